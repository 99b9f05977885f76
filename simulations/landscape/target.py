"""The target of an analysis: a model with its weights, and the samples to evaluate it on.

A run provides all of it, and so does one of its checkpoints. A plain state_dict needs the experiment it belongs to:
`--model` and `--set`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Union

import numpy as np
import torch
from torch import Tensor, nn

from fedsign import config as configs
from fedsign.data.base import AnySamples, Samples
from fedsign.errors import ConfigError, ResultsError
from fedsign.federation.aggregation import is_finite
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.vector import Layout
from fedsign.models.transform import sent_tensors, whole_state
from fedsign.models.weights import load_weights
from fedsign.overrides import parse_override
from fedsign.records import Tensors
from fedsign.seeding import Purpose, generator
from fedsign.storage import checkpoints
from fedsign.storage.finding import open_run
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload

if TYPE_CHECKING:
    from simulations.api import Run  # imports Flower

_CHANGEABLE = frozenset({"data", "engine"})  # cannot change the model's tensors


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model and its origin. `run` is the run it belongs to, if any.

    Raises:
        ResultsError: it has values that are not finite.
    """

    source: Path
    workload: Workload
    tensors: Tensors  # as sent
    run: RunFolder | None

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if not is_finite(tensor):
                raise ResultsError(
                    f"the model in {self.source} holds NaN or infinite values in tensor '{name}': its training "
                    "diverged; give a model or a checkpoint from before."
                )

    @cached_property
    def model(self) -> nn.Module:
        """Return the model with its weights, in evaluation mode."""
        model = self.workload.make_model()
        # sparse models are stored as their remaining weights
        model.load_state_dict(whole_state(model, self.tensors))
        return model.eval()

    @cached_property
    def initial(self) -> nn.Module | None:
        """Return the initial model, which is known of a run only."""
        return None if self.run is None else self.workload.make_model()

    def initial_vector(self, layout: Layout) -> Tensor | None:
        """Return the initial parameters [D], on the CPU."""
        if self.initial is None:
            return None
        return layout.vector(dict(self.initial.named_parameters())).cpu()

    @property
    def name(self) -> str:
        """The name for titles."""
        return self.source.stem if self.run is None else self.workload.config.run_name

    @property
    def facts(self) -> dict[str, str]:
        """Return the facts that a result records about the model."""
        config = self.workload.config
        return {"source": str(self.source), "model": config.model.name, "data": config.data_label}

    def vector_in(self, layout: Layout) -> Tensor:
        """Return the parameters [D] in the order of another model's layout.

        Raises:
            ConfigError: it has other parameters.
        """
        try:
            return layout.vector(dict(self.model.named_parameters()))
        except ConfigError as error:
            raise ConfigError(f"{self.source} and the first model are not of one architecture: {error}") from error

    def landscape(self, samples: int | None, statistics: int) -> Landscape:
        """Return the landscape on `samples` test samples (None: all).

        BatchNorm is recalibrated on `statistics` training samples (0: not at all).
        """
        # other draw: a stream of its own, so that --statistics does not change the test samples
        others = self._some(self.workload.dataset.train, statistics, draw=1).features if statistics else None
        return Landscape(self.model, self.workload.task, self.test_samples(samples), statistics=others)

    def centers(self, landscape: Landscape, samples: int | None) -> dict[str, dict[str, float]]:
        """Return loss and error at the landscape's `center`, and with BatchNorm also of the evaluated model."""
        landscapes = {"center": landscape}
        if landscape.sizes["num_statistics"]:
            landscapes["own_center"] = self.landscape(samples, statistics=0)
        return {name: at_center(each) for name, each in landscapes.items()}

    def test_samples(self, count: int | None) -> Samples:
        """Return the server's test samples, or `count` of them drawn by the experiment's seed."""
        return self._some(self.workload.dataset.test, count, draw=0)

    def _some(self, samples: AnySamples, count: int | None, *, draw: int) -> Samples:
        if count is not None and count < 1:
            raise ConfigError(f"{count} samples were asked for, but expected 1 or more.")
        if not len(samples):
            raise ConfigError(
                f"{self.source} was trained on data that lie at sites, and none of them are here; name folders here "
                "with --set engine.name=in_process --set 'partition.roots=[\"...\"]', or other data."
            )
        chosen = np.arange(len(samples))
        if count is not None and count < len(samples):
            # round=5: fedsign.landscape uses the streams 0 to 4 of ANALYSIS
            rng = generator(self.workload.config.seed, Purpose.ANALYSIS, round=5, partition=draw)
            chosen = np.sort(rng.permutation(len(samples))[:count])
        features, targets = samples.batch(torch.from_numpy(chosen))
        return Samples(features=features.to(self.workload.device), targets=targets.to(self.workload.device))


def at_center(landscape: Landscape) -> dict[str, float]:
    """Return loss and error at the landscape's center."""
    return {name: float(of[0]) for name, of in landscape.at(landscape.center.unsqueeze(0)).arrays().items()}


Source = Union[Target, "Run", Path, str]
"""A run, or the path of a run, of one of its checkpoints, or of a file of weights."""


def path_of(source: "Run | Path | str") -> Path:
    """Return a source's path.

    Raises:
        ConfigError: it is neither a run nor a path.
    """
    path = getattr(source, "path", source)
    if isinstance(path, str | Path):
        return Path(path)
    raise ConfigError(f"{source!r} was given, but expected a run or a path.")


def run_of(path: Path) -> RunFolder | None:
    """Open the run at a run's folder or around a checkpoint; None for a file.

    Raises:
        ResultsError: there is no run.
    """
    if path.is_file():
        return None
    # RUN/checkpoints/round-NNNNNN/state.json
    return open_run(path.parent.parent if (path / "state.json").is_file() else path)


def targets_of(sources: Sequence[Source], *, model: str | None, overrides: Sequence[str]) -> list[Target]:
    """Load several sources. Runs know their model, so with both, `model` applies to the files of weights."""
    are_files = [not isinstance(source, Target) and path_of(source).is_file() for source in sources]
    return [
        target_of(source, model=model if is_file or not any(are_files) else None, overrides=overrides)
        for source, is_file in zip(sources, are_files, strict=True)
    ]


def target_of(source: Source, *, model: str | None = None, overrides: Sequence[str] = ()) -> Target:
    """Load a source.

    Args:
        source: a run, or the path of a run, of one of its checkpoints, or of a file of weights.
        model: the model's name, for a file of weights only.
        overrides: for a file of weights, "KEY=VALUE" settings of its experiment; for a run, changes that keep its
            model,
            such as another data set.

    Raises:
        FedSignError: there is no such source, or it does not fit.
    """
    if isinstance(source, Target):
        return source
    path = path_of(source)
    run = run_of(path)
    if run is None:
        return _of_file(path, model, overrides)
    if model is not None:
        raise ConfigError(
            f"--model={model} was given with {path}, which is no file of weights; a run knows its model: drop --model."
        )
    if (path / "state.json").is_file():
        checkpoint = checkpoints.load(path)
        # a checkpoint has the evaluated model only where it differs, as with FedDyn
        tensors = checkpoint.evaluated or checkpoint.served
    else:
        tensors = checkpoints.last_model(run)
    workload = Workload(_experiment(run, overrides))
    return Target(source=path, workload=workload, tensors=tensors, run=run)


def _of_file(path: Path, model: str | None, overrides: Sequence[str]) -> Target:
    if model is None:
        raise ConfigError(
            f"{path} is a file of weights, which does not say its model; name it with --model (and its data with --set "
            "data.name=NAME), or give the folder of a run."
        )
    workload = Workload(configs.load(None, [f"model.name={model}", *overrides]))
    module = workload.make_model()
    load_weights(module, path)
    # packed like a run's, so that `Target.model` unpacks both
    return Target(source=path, workload=workload, tensors=sent_tensors(module), run=None)


def _experiment(run: RunFolder, overrides: Sequence[str]) -> configs.ExperimentConfig:
    changes = dict(parse_override(text) for text in overrides)
    fixed = sorted(key for key in changes if key.partition(".")[0] not in _CHANGEABLE)
    if fixed:
        raise ConfigError(
            f"--set {fixed[0]} was given with the run {run.path}, whose model it could change; expected keys under "
            f"{' and '.join(sorted(_CHANGEABLE))}."
        )
    own = configs.from_toml(run.config_toml)
    return own.replace(**changes) if changes else own
