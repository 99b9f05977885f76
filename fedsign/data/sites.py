"""Sites: clients whose data lie with them.  What an experiment says of them, without looking at data.

With `partition.name=sites` every client is a site.  The server makes the model before it has heard of any data, so
whatever decides its shape comes from the configuration: class names, columns, the shape of a sample (`Frame`).  What is
learnt of data (means, texts, classes) would differ from site to site, and is refused.  Reading: `fedsign.data.site_reader`.
"""

from dataclasses import replace
from pathlib import Path

from fedsign.config import ExperimentConfig
from fedsign.data.base import Frame, Tokenizer, fingerprint
from fedsign.errors import ConfigError, DataError
from fedsign.registry import resolve

SITES = "sites"


def has_sites(config: ExperimentConfig) -> bool:
    """Whether clients have data of their own."""
    return config.partition.name == SITES


def lies_at_nodes(config: ExperimentConfig) -> bool:
    """Whether sites' data are read by nodes alone, and never by the server."""
    return has_sites(config) and config.engine.name == "superlink"


def root_of(config: ExperimentConfig, site: int) -> str:
    """Where a site's data lie; empty where this process does not know."""
    roots = config.partition.settings["roots"]
    return str(roots[site]) if site < len(roots) else ""


def name_of(config: ExperimentConfig, site: int) -> str:
    """What a site is called: by `partition.names`, or else by its folder."""
    names = config.partition.settings["names"]
    if site < len(names) and names[site]:
        return str(names[site])
    return Path(root_of(config, site)).name or f"site {site}"


def frame_of(config: ExperimentConfig) -> Frame:
    """What all sites' data have in common, by the configuration.

    Raises:
        ConfigError: the configuration does not say it.
    """
    data = config.data
    class_names = tuple(data.settings.get("class_names") or ())
    said = getattr(resolve(data.kind, data.name), "frame", None)
    frame = Frame() if said is None else said(data.settings)
    if config.task == "classification" and not class_names and frame.text is None:
        raise ConfigError(
            f"partition.name=sites was given with data.name={data.name}, but the sites' class names are not known; name them "
            "with --set 'data.class_names=[\"...\"]' (a reader of your own takes a setting class_names)."
        )
    shape = tuple(config.partition.settings["input_shape"]) or frame.input_shape
    if not shape:
        raise ConfigError(
            f"partition.name=sites was given with data.name={data.name}, but the server cannot see the shape of the sites' samples; "
            f"{frame.remedy}."
        )
    return replace(frame, input_shape=shape, class_names=class_names)


def check_sites(config: ExperimentConfig) -> None:
    """Raise ConfigError for what cannot be, before any data are read."""
    part, num_clients = config.partition, config.partition.num_clients
    for key in ("roots", "names"):
        given = part.settings[key]
        if len(given) > num_clients or (given and key == "names" and len(given) < num_clients):
            raise ConfigError(
                f"partition.{key} holds {len(given)} entries for partition.num_clients={num_clients} sites; expected is one for "
                "each: set partition.num_clients to the number of sites."
            )
    missing = next((site for site in range(num_clients) if not root_of(config, site)), None)
    if missing is not None and not lies_at_nodes(config):
        raise ConfigError(
            f"partition.name=sites was given with engine.name={config.engine.name}, but site {missing} of "
            f"partition.num_clients={num_clients} has no data here; give every site's folder with "
            "--set 'partition.roots=[\"...\"]', or let nodes bring their own: engine.name=superlink."
        )
    normalise, frame = config.data.normalise, frame_of(config)
    if normalise in ("per_channel", "unit") or (normalise == "default" and frame.is_standardised):
        raise ConfigError(measured_sentence(normalise))
    if config.data.validation_fraction and not is_evaluated_at_clients(config):
        raise ConfigError(
            f"data.validation_fraction={config.data.validation_fraction} was given, but validation samples lie at the sites and "
            "evaluation at the server; set it to 0, or use server.evaluation=clients."
        )


def is_evaluated_at_clients(config: ExperimentConfig) -> bool:
    """Whether sites test the model on samples of their own, or the server on its.

    Raises:
        ConfigError: it was asked for what there is no data for.
    """
    asked, test_root = config.server.evaluation, config.partition.settings["test_root"]
    if asked == "server" and not test_root:
        raise ConfigError(
            "server.evaluation=server was given with partition.name=sites, but the server has no test samples; name them with "
            "--set partition.test_root=PATH, or use server.evaluation=clients."
        )
    return asked == "clients" or not test_root


def check_tokenizer(config: ExperimentConfig, own: Tokenizer | None, servers: str) -> None:
    """Raise DataError unless a site reads text with the server's tokenizer, given as its fingerprint."""
    if servers and fingerprint(own) != servers:
        raise DataError(
            f"data.tokenizer={config.data.settings.get('tokenizer')} has other tokens here than at the server; put the same files "
            "there."
        )


def measured_sentence(normalise: str) -> str:
    return (
        f"data.normalise={normalise} measures the data, which would give every site another scale; use data.normalise=none, or "
        "constants with data.mean and data.std."
    )
