"""Sites: clients that hold their own data.  This module covers what an experiment knows of them without reading data.

With `partition.name=sites`, every client is a site.  The server builds the model before any data are read, so the
configuration must determine its shape: class names, columns, sample shape (`Frame`).  Anything measured on data (means,
texts, classes) would differ between sites, and is refused.  `fedsign.data.site_reader` reads the data.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from fedsign.config import ExperimentConfig
from fedsign.data.base import Frame, Tokenizer, fingerprint
from fedsign.errors import DataError
from fedsign.registry import resolve
from fedsign.rules import Rule, check
from fedsign.traits import DatasetTraits, EngineTraits, TaskTraits


def has_sites(config: ExperimentConfig) -> bool:
    """Whether clients are sites."""
    return bool(getattr(resolve("partition", config.partition.name), "has_sites", False))


def lies_at_nodes(config: ExperimentConfig) -> bool:
    """Whether only nodes read the sites' data, never the server."""
    return has_sites(config) and EngineTraits.of(config.engine.name).is_deployed


def root_of(config: ExperimentConfig, site: int) -> str:
    """The location of a site's data; empty if this process does not know it."""
    roots = config.partition.settings["roots"]
    return str(roots[site]) if site < len(roots) else ""


def name_of(config: ExperimentConfig, site: int) -> str:
    """The name of a site: from `partition.names`, otherwise its folder's."""
    names = config.partition.settings["names"]
    if site < len(names) and names[site]:
        return str(names[site])
    return Path(root_of(config, site)).name or f"site {site}"


def frame_of(config: ExperimentConfig) -> Frame:
    """What the configuration determines of all sites' data.

    Raises:
        ConfigError: the configuration leaves it open.
    """
    data = config.data
    make_frame = DatasetTraits.of(data.name).frame
    frame = Frame() if make_frame is None else make_frame(data.settings)
    frame = replace(
        frame,
        input_shape=tuple(config.partition.settings["input_shape"]) or frame.input_shape,
        class_names=tuple(data.settings.get("class_names") or ()),
    )
    check_frame(config, frame)
    return frame


def is_evaluated_at_clients(config: ExperimentConfig) -> bool:
    """Whether sites evaluate on their own samples, instead of the server."""
    return config.server.evaluation == "clients" or not config.partition.settings["test_root"]


def check_frame(config: ExperimentConfig, frame: Frame) -> None:
    """Raise ConfigError if data of this kind cannot be held by separate sites."""
    check(_FRAME_RULES, _Agreed(config, frame))


def check_tokenizer(config: ExperimentConfig, own: Tokenizer | None, servers: str) -> None:
    """Raise DataError if a site's tokenizer differs from the server's, whose fingerprint is given."""
    if servers and fingerprint(own) != servers:
        raise DataError(
            f"data.tokenizer={config.data.settings.get('tokenizer')} has other tokens here than at the server; put "
            "the same files there."
        )


@dataclass(frozen=True)
class _Agreed:
    """An experiment, and what its sites' data have in common."""

    config: ExperimentConfig
    frame: Frame


def _miscounted(config: ExperimentConfig) -> str:
    """A list that does not have one entry per site."""
    for key in ("roots", "names"):
        num, expected = len(config.partition.settings[key]), config.partition.num_clients
        # roots may be fewer: nodes bring their own
        if num > expected or (key == "names" and 0 < num < expected):
            return f"partition.{key} holds {num} entries"
    return ""


def _missing(config: ExperimentConfig) -> str:
    """The first site without data that this process could read."""
    sites = range(0 if lies_at_nodes(config) else config.partition.num_clients)
    return next((str(site) for site in sites if not root_of(config, site)), "")


RULES: tuple[Rule[ExperimentConfig], ...] = (
    Rule(
        _miscounted,
        "{found} for partition.num_clients={partition.num_clients} sites",
        "expected one for each: set partition.num_clients to the number of sites",
    ),
    Rule(
        _missing,
        "partition.name=sites was given with engine.name={engine.name}, but site {found} of "
        "partition.num_clients={partition.num_clients} has no data here",
        "give every site's folder with --set 'partition.roots=[\"...\"]', or let nodes bring their own: "
        "engine.name=superlink",
    ),
    Rule(
        lambda config: config.server.evaluation == "server" and not config.partition.settings["test_root"],
        "server.evaluation=server was given with partition.name=sites, but the server has no test samples",
        "name them with --set partition.test_root=PATH, or use server.evaluation=clients",
    ),
    Rule(
        lambda config: config.data.validation_fraction and not is_evaluated_at_clients(config),
        "data.validation_fraction={data.validation_fraction} was given, but validation samples lie at the sites and "
        "evaluation at the server",
        "set it to 0, or use server.evaluation=clients",
    ),
)
_FRAME_RULES: tuple[Rule[_Agreed], ...] = (
    Rule(
        lambda agreed: (
            agreed.config.data.normalize in ("per_channel", "unit")
            or (agreed.config.data.normalize == "default" and agreed.frame.is_standardized)
        ),
        "data.normalize={config.data.normalize} measures the data, which would give every site another scale",
        "use data.normalize=none, or constants with data.mean and data.std",
    ),
    Rule(
        lambda agreed: (
            TaskTraits.of(agreed.config.task).targets == "class labels"
            and not agreed.frame.class_names
            and agreed.frame.text is None
        ),
        "partition.name=sites was given with data.name={config.data.name}, but the sites' class names are not known",
        "name them with --set 'data.class_names=[\"...\"]' (a reader of your own takes a setting class_names)",
    ),
    Rule(
        lambda agreed: not agreed.frame.input_shape,
        "partition.name=sites was given with data.name={config.data.name}, but the server cannot see the shape of "
        "the sites' samples",
        "{frame.remedy}",
    ),
)
