"""A fixed number of classes for each client: "#C = k" of NIID-Bench.

Source: Li et al. 2022, NIID-Bench (arXiv 2102.02079), section IV-A: every client is given k different
classes, and the samples of a class are shared equally among the clients that were given it.  As in the
authors' code, clients get their first class in turn and the others at random.

Differs: with fewer clients than classes, clients go on in turn until each class is given to somebody, so
that no sample is left out; and the turn goes through the classes in an order drawn by the seed.
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
    """Deal the samples of each class out to the clients that were given it.

    A client that was given a class with fewer samples than clients may hold none of it.

    Raises:
        DataError: targets that are not classes, too few classes or too many, or a client without a sample.
    """
    labels = class_labels(train, name="classes")
    present, label_of = np.unique(labels, return_inverse=True)
    num_classes = len(present)
    if not num_classes <= num_clients * classes_per_client <= num_clients * num_classes:
        raise DataError(
            f"partition.num_clients={num_clients} clients with partition.classes_per_client={classes_per_client} "
            f"cannot share {num_classes} classes: expected is at least {-(-num_classes // num_clients)}, or some "
            f"class would be left out, and at most {num_classes}."
        )
    is_given = _assign(num_clients, num_classes, classes_per_client, rng)
    owner_of = np.empty(len(train), dtype=np.int64)
    for label in range(num_classes):
        index = rng.permutation(np.flatnonzero(label_of == label))
        holders = rng.permutation(np.flatnonzero(is_given[:, label]))  # the first get the samples that do not divide
        owner_of[index] = holders[np.arange(len(index)) % len(holders)]
    indices = group(owner_of, num_clients)
    if empty := sum(len(index) == 0 for index in indices):
        raise DataError(
            f"partition.name=classes leaves {empty} of {num_clients} clients without a sample: a class has fewer "
            "samples than clients it is given to; raise partition.classes_per_client or lower partition.num_clients."
        )
    return Split(indices=indices)


def _assign(num_clients: int, num_classes: int, each: int, rng: np.random.Generator) -> IntArray:
    """Which client is given which class, a mask [K, C] with `each` ones a row and one at least in each column."""
    is_given = np.zeros((num_clients, num_classes), dtype=bool)
    turn = np.arange(max(num_clients, num_classes))
    is_given[turn % num_clients, rng.permutation(num_classes)[turn % num_classes]] = True
    # random keys: a row's smallest are its choice, and what it has already comes first
    keys = np.where(is_given, -1.0, rng.random(is_given.shape))
    chosen = np.argsort(keys, axis=1)[:, :each]
    np.put_along_axis(is_given, chosen, True, axis=1)
    return is_given
