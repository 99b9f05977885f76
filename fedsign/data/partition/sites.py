"""Sites: every client holds a data set of its own; nothing is partitioned.

The settings locate the sites' data, as far as this process knows them; see `fedsign.data.site_reader`.
"""

import numpy as np

from fedsign.data.base import AnySamples
from fedsign.data.partition.base import Split, group
from fedsign.data.site_reader import SiteData
from fedsign.data.sites import RULES
from fedsign.errors import DataError
from fedsign.traits import declares


@declares(client_data=SiteData, has_sites=True, rules=RULES)
def sites(
    train: AnySamples,
    num_clients: int,
    rng: np.random.Generator,
    *,
    roots: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    input_shape: tuple[int, ...] = (),
    test_root: str = "",
) -> Split:
    """Every site keeps its own data; a site whose data are elsewhere has no samples here.

    Args:
        roots: a folder or file per site, where its data are on this machine.
        names: the sites' names in reports.
        input_shape: shape of one sample's features, if the reader's settings do not determine it.
        test_root: the server's own test samples, if any.
    """
    if train.owners is None:
        raise DataError(
            "partition.name=sites needs samples that say whose they are; let fedsign.data.site_reader read them."
        )
    return Split(indices=group(train.owners.numpy(), num_clients))
