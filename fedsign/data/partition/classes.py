"""A fixed number of classes per client: "#C = k" of NIID-Bench.

Source: Li et al. 2022, NIID-Bench (arXiv 2102.02079), section IV-A.  Every client is assigned k different classes, and
the samples of a class are divided equally among its clients.  As in the authors' code, first classes are assigned in
turn, the others at random.

Differs: with fewer clients than classes, the turn continues until every class is assigned, so no sample is left out.
The order of classes in the turn is random, but clients k and k + C begin with the same class.
"""

import numpy as np

from fedsign.data.base import AnySamples, IntArray
from fedsign.data.partition.base import AtLeastOne, Split, class_labels, group
from fedsign.errors import DataError


def classes(
    train: AnySamples,
    num_clients: int,
    rng: np.random.Generator,
    *,
    classes_per_client: AtLeastOne = 2,
) -> Split:
    """Divide the samples of each class among the clients to which it is assigned.

    A client may hold none of a class that has fewer samples than clients.

    Raises:
        DataError: the targets are not classes, the number of classes does not fit, or a client gets no sample.
    """
    labels = class_labels(train, name="classes")
    # classes that no training sample has would otherwise be assigned to clients
    present, label_of = np.unique(labels, return_inverse=True)
    num_classes = len(present)
    if not num_classes <= num_clients * classes_per_client <= num_clients * num_classes:
        raise DataError(
            f"partition.num_clients={num_clients} clients with partition.classes_per_client={classes_per_client} "
            f"cannot share {num_classes} classes: expected at least {-(-num_classes // num_clients)}, or some "
            f"class would be left out, and at most {num_classes}."
        )
    is_given = _assign(num_clients, num_classes, classes_per_client, rng)
    owner_of = np.empty(len(train), dtype=np.int64)
    for label in range(num_classes):
        index = rng.permutation(np.flatnonzero(label_of == label))
        holders = rng.permutation(np.flatnonzero(is_given[:, label]))  # the first ones get the remainder
        owner_of[index] = holders[np.arange(len(index)) % len(holders)]
    indices = group(owner_of, num_clients)
    if empty := sum(len(index) == 0 for index in indices):
        raise DataError(
            f"partition.name=classes leaves {empty} of {num_clients} clients without a sample: a class has fewer "
            "samples than clients it is given to; raise partition.classes_per_client or lower partition.num_clients."
        )
    return Split(indices=indices)


def _assign(num_clients: int, num_classes: int, each: int, rng: np.random.Generator) -> IntArray:
    """The class assignment, a mask [K, C] with `each` ones per row and at least one per column."""
    is_given = np.zeros((num_clients, num_classes), dtype=bool)
    turn = np.arange(max(num_clients, num_classes))
    is_given[turn % num_clients, rng.permutation(num_classes)[turn % num_classes]] = True
    # Each row takes the classes with the smallest keys: those assigned in turn, then random ones.
    keys = np.where(is_given, -1.0, rng.random(is_given.shape))
    chosen = np.argsort(keys, axis=1)[:, :each]
    np.put_along_axis(is_given, chosen, True, axis=1)
    return is_given
