"""Read the data of sites: each from its own root by the experiment's reader, concatenated if one process has several.

A process reads the sites whose data it holds: all of them in process, its own at a node, none at the server of a
deployment, whose empty data set still defines the model's shape.  After concatenation, a sample's owner is its site.

A root is a folder or a file.  A reader with the setting `root` receives it as is; one with `path` looks for that file
(and for `test_path`) in the folder.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset
from torch.utils.data import Dataset as TorchDataset

from fedsign import plugins
from fedsign.config import ExperimentConfig
from fedsign.data import sites
from fedsign.data.base import AnySamples, Dataset, Frame, LazySamples, Samples, joined_questions
from fedsign.data.checks import checked_dataset
from fedsign.data.client_data import rooted
from fedsign.data.normalize import IDENTITY
from fedsign.data.splitting import hold_out_validation
from fedsign.data.target import TargetKind
from fedsign.errors import ConfigError, DataError, FedSignError
from fedsign.registry import KINDS
from fedsign.seeding import Purpose, global_stream


@dataclass(frozen=True)
class SiteData:
    """The data of an experiment's sites; implements `fedsign.data.client_data.ClientData`."""

    config: ExperimentConfig

    @property
    def is_evaluated_at_clients(self) -> bool:
        """Implements `ClientData.is_evaluated_at_clients`."""
        return sites.is_evaluated_at_clients(self.config)

    def read(self, here: frozenset[int] | None) -> Dataset:
        """The data of the sites `here`, each sample owned by its site; not normalized.

        None stands for all sites in process (and with Ray), and for no site if nodes hold the data.  Test samples are
        the sites' own; the server's, if the server evaluates.

        Raises:
            DataError: a site's data cannot be read, or do not match the configuration; the error names the site.
        """
        config = self.config
        frame = sites.frame_of(config)
        if here is None:
            here = frozenset(() if sites.lies_at_nodes(config) else range(config.partition.num_clients))
        by_site: dict[int, Dataset] = {}
        # sorted: the order of samples must not depend on a set's order
        for site in sorted(here):
            root = sites.root_of(config, site)
            if not root:
                raise DataError(
                    f"site {site} has no data here; start its node with --node-config 'data-root=\"FOLDER\"', or "
                    "name its folder in partition.roots."
                )
            stream = global_stream(config.seed, Purpose.DATA, partition=site)
            with _naming(f"site '{sites.name_of(config, site)}'"), stream:
                whole = _read(config, root, frame)
                # site by site, so that a site holds out the same samples wherever it is read
                by_site[site] = hold_out_validation(whole, config.data.validation_fraction, config.seed)
        server = None
        if not sites.is_evaluated_at_clients(config):  # all samples below test_root are test samples
            with _naming("the server's test data"):
                server = _read(config, str(config.partition.settings["test_root"]), frame)
        normalizations = {data.normalization for data in (*by_site.values(), server) if data is not None}
        if len(normalizations) > 1:
            raise DataError(
                f"data.name={config.data.name} gives sites different normalizations; let it name the same one at "
                "every site, or set data.normalize=none."
            )
        tests = {site: data.test for site, data in by_site.items()}
        held = {site: data.validation for site, data in by_site.items() if data.validation is not None}
        return Dataset(
            train=_joined({site: data.train for site, data in by_site.items()}, frame),
            test=_joined(tests if server is None else {0: server.train, 1: server.test}, frame),
            validation=_joined(held, frame) if held else None,
            class_names=frame.class_names,
            text=frame.text,
            read_as=self._sentences("read_as", by_site, server),
            notes=self._sentences("notes", by_site, server),
            normalization=normalizations.pop() if normalizations else IDENTITY,
        )

    def _sentences(
        self, kind: Literal["read_as", "notes"], by_site: Mapping[int, Dataset], server: Dataset | None
    ) -> tuple[str, ...]:
        """Sentences about sites, with the site's name, and about the server's test data."""
        named = {f"site '{sites.name_of(self.config, site)}'": data for site, data in by_site.items()}
        if server is not None:
            named["the server's test data"] = server
        return tuple(f"{name}: {sentence}" for name, data in named.items() for sentence in getattr(data, kind))

    def at_root(self, root: str, here: Collection[int] | None) -> ExperimentConfig:
        """Implements `ClientData.at_root`.

        Raises:
            ConfigError: all sites are read in this process, each from its own folder.
        """
        if here is None:
            raise ConfigError(
                f"--data-root={root} was given, but all sites are trained in one process, and each has a folder of "
                "its own: let partition.roots be right on all machines, and leave --data-root out."
            )
        everywhere = range(self.config.partition.num_clients)
        roots = [root if site in here else sites.root_of(self.config, site) for site in everywhere]
        return self.config.replace(**{"partition.roots": roots})


def _read(config: ExperimentConfig, root: str, frame: Frame) -> Dataset:
    """The data below one root, checked against the configuration, which all sites share."""
    data = config.data
    settings = rooted(data, root)
    if "strict" in plugins.names_of(data.kind, data.name):
        settings["strict"] = True  # nothing may be inferred from a single site's table
    is_ours = data.name in KINDS["dataset"].table  # the root of a user's own reader need not be a path
    if is_ours and not Path(root).expanduser().exists():
        raise DataError(f"there is nothing at {root}; correct the node's data-root, or partition.roots.")
    dataset = checked_dataset(plugins.build(data.kind, data.name, settings, config.seed), name=data.name)
    # again: for a user's own reader, only the data tell whether their normalization would be measured
    sites.check_frame(config, replace(frame, is_standardized=bool(dataset.standardized)))
    sizes = [0 if text is None else text.vocabulary_size for text in (dataset.text, frame.text)]
    if sizes[0] != sizes[1]:
        raise DataError(
            f"the text in {root} has a vocabulary of {sizes[0]} tokens; expected {sizes[1]}, those of "
            "data.tokenizer: use the same tokenizer at every site."
        )
    if dataset.class_names != frame.class_names:
        raise DataError(
            f"the data in {root} have the classes {list(dataset.class_names)[:20]}; expected data.class_names="
            f"{list(frame.class_names)[:20]}, whether all of them occur or not."
        )
    target, num_outputs = dataset.target, len(frame.class_names) or 1
    # rows of labels: whether they are one-hot would depend on the site
    if dataset.text is None and (target.num_outputs != num_outputs or target.kind is TargetKind.LABELS):
        raise DataError(
            f"the data in {root} have {target}; expected one target for each sample, or masks of the "
            f"{num_outputs} classes that data.class_names names."
        )
    if dataset.input_shape != frame.input_shape:
        raise DataError(
            f"the data in {root} have samples of the shape {list(dataset.input_shape)}; expected "
            f"{list(frame.input_shape)}, as the configuration says (partition.input_shape, or the reader's settings)."
        )
    return dataset


@contextmanager
def _naming(prefix: str) -> Iterator[None]:
    """A context manager: prefix errors with the site they are about."""
    try:
        yield
    except FedSignError as error:
        # the same type: callers tell wrong settings (ConfigError) from wrong data (DataError)
        raise type(error)(f"{prefix}: {error}") from error


def _joined(parts: Mapping[int, AnySamples], frame: Frame) -> AnySamples:
    """Concatenated samples, each owned by the key of its part."""
    if not parts:
        features = torch.zeros(0, *frame.input_shape)
        targets = torch.zeros(0, dtype=torch.int64 if frame.class_names else torch.float32)
        if frame.text is not None:
            features, targets = features.long(), torch.zeros(0, *frame.input_shape[:1], dtype=torch.int64)
        parts = {0: Samples(features=features, targets=targets)}
    owners = torch.cat([torch.full((len(part),), site) for site, part in parts.items()])
    # the usual case at a node: one site, whose samples need not be copied
    if len(parts) == 1 and isinstance(part := next(iter(parts.values())), Samples):
        return replace(part, owners=owners)
    targets = torch.cat([part.targets for part in parts.values()])
    # in memory if all parts are; otherwise features stay lazy
    in_memory = [part for part in parts.values() if isinstance(part, Samples)]
    if len(in_memory) == len(parts):
        features, questions = torch.cat([part.features for part in in_memory]), joined_questions(in_memory)
        return Samples(features=features, targets=targets, owners=owners, questions=questions)
    return LazySamples(source=ConcatDataset([_Items(part) for part in parts.values()]), targets=targets, owners=owners)


class _Items(TorchDataset[Tensor]):
    """The features of samples as a torch Dataset."""

    def __init__(self, samples: AnySamples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Tensor:
        return self._samples.batch(torch.tensor([index]))[0][0]
