"""Sites: every client has a data set of its own, which lies with it; nothing is dealt out.

The settings say where the sites' data lie, as far as this process may know it; see `fedsign.data.site_reader`.
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
    """Every site keeps what is its own; one whose data are not here has no samples.

    Args:
        roots: a folder or a file for each site, where the sites' data lie on this machine.
        names: what the sites are called in reports.
        input_shape: of one sample's features, where the reader's settings do not say it.
        test_root: the server's own test samples, if it has some.
    """
    if train.owners is None:
        raise DataError(
            "partition.name=sites needs samples that say whose they are; let fedsign.data.site_reader read them."
        )
    return Split(indices=group(train.owners.numpy(), num_clients))
