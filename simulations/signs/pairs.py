"""`fedsign.analyze.signs`: sign agreement of models by layer, and over the rounds of a run that recorded it."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsign.errors import ConfigError
from fedsign.landscape.sign_ratios import same_sign_ratio
from fedsign.landscape.vector import Layout
from fedsign.report.analysis import Analysis
from fedsign.signs.figures import sign_figures
from simulations.landscape.target import Source, Target, targets_of

_FIGURE = "models_global"


def signs(*sources: Source, model: str | None = None, overrides: Sequence[str] = ()) -> Analysis:
    """Compute the fraction of parameters with equal signs, for every pair of models, layer by layer.

    Args:
        sources: runs, or paths of runs, of checkpoints, or of files of weights; a single run is compared with its
            initial model.
        model: the model of a file of weights, such as "mlp".
        overrides: other settings of its experiment, such as "data.name=mnist".

    Raises:
        FedSignError: there is nothing to compare, or the models differ in architecture.
    """
    if not sources:
        raise ConfigError("no model was given, but expected a run, or two models.")
    targets = targets_of(sources, model=model, overrides=overrides)
    first = targets[0]
    layout = Layout.of(first.model)
    models = {str(target.source): target.vector_in(layout).cpu() for target in targets}
    if len(targets) == 1:
        initial = first.initial_vector(layout)
        if initial is None:
            raise ConfigError(
                f"{first.source} alone was given, and what its training began with is not known; expected a run, "
                "or two files."
            )
        models = {"initial": initial, **models}
    elif len(models) < len(targets):
        raise ConfigError("the same path was given twice, but expected different models.")
    rows = []
    for (one, a), (other, b) in combinations(models.items(), 2):
        for layer, span in {"": slice(None), **layout.slices()}.items():  # "" stands for all layers together
            ratio = same_sign_ratio(a[span], b[span])
            rows.append({"first": one, "second": other, "layer": layer, "same_sign_ratio": ratio})
    return Analysis(
        kind="signs",
        name=first.name,
        facts={
            "sources": list(models),
            "model": first.workload.config.model.name,
            "num_parameters": layout.size,
            "layers": list(layout.shapes),
        },
        rows=rows,
        summary=[row for row in rows if not row["layer"]],
        arrays=_over_rounds(first),
        drawn_by=sign_figures,
    )


def _over_rounds(target: Target) -> dict[str, NDArray[Any]]:
    """Return `rounds` and, by layer, the agreement of client models with the received one [layers, rounds]."""
    records = target.run.records("signs.jsonl") if target.run is not None else []
    if not records:
        return {}
    layers = list(records[-1]["layers"])
    values = [[record["layers"].get(layer, {}).get(_FIGURE) for record in records] for layer in layers]
    return {
        "rounds": np.array([record["round"] for record in records]),
        "layers": np.array(layers),
        # float64 turns None, of a layer without a count, into NaN
        _FIGURE: np.array(values, dtype=np.float64),
    }
