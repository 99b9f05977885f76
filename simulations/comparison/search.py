"""Hyperparameter search: quasi-random points first, then Optuna's TPE.

Trials are requested in batches of a fixed size, and their values are reported in the order of the trials. The next
request thus depends only on the seed and on the values so far, not on the number of processes or on which one ends
first. No state of the search is stored: whenever new values arrive, the search is replayed from its beginning (a
hundred trials take less than a second).

The first trial has the experiment's own settings, so a search never ends with worse validation values than it began
with. The next ones are points of a scrambled Halton sequence. Their coordinates do not depend on the number of
dimensions, so all strategies try the same shared settings there, and none gains by a lucky draw.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from scipy.stats.qmc import Halton

from fedsign.extras import require
from fedsign.seeding import Purpose, generator
from simulations.comparison.space import Range

SPREAD = 8  # trials before TPE: the experiment's own settings and points of the sequence
BATCH = 4
"""Trials requested before the first of them is reported. It affects the result, so it is not an option."""

Choice = dict[str, Any]


def optuna_version() -> str:
    """Return Optuna's version, which a search's result depends on.

    Raises:
        ConfigError: it is not installed.
    """
    return str(require("optuna", extra="tune", feature="a search of settings").__version__)


def trials(
    space: Mapping[str, Range],
    first: Choice,
    *,
    num: int,
    seed: int,
    higher_is_better: bool,
    value_of: Callable[[int, Choice], float | None],
) -> list[Choice]:
    """Return the settings of all trials that can be requested, given the values so far.

    Args:
        space: the search space.
        first: the experiment's own settings, tried first.
        num: total number of trials.
        seed: the search's seed.
        higher_is_better: whether the metric is maximized.
        value_of: the value of a trial by its index; NaN if it was lost, None if it is pending.

    A lost trial counts as worse than all others. A value of `first` outside its range is reported to Optuna as the
    nearest value inside.
    """
    optuna = require("optuna", extra="tune", feature="a search of settings")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    worst = -math.inf if higher_is_better else math.inf
    rng = generator(seed, Purpose.SEARCH)
    # the enqueued trials are TPE's startup: it would otherwise draw ten of its own, see docs/decisions/0025
    sampler = optuna.samplers.TPESampler(seed=int(rng.integers(2**31)), n_startup_trials=SPREAD)
    study = optuna.create_study(direction="maximize" if higher_is_better else "minimize", sampler=sampler)
    study.enqueue_trial({key: each.nearest(first[key]) for key, each in space.items()})
    # [SPREAD - 1, settings]; all are enqueued even if `num` is smaller, so that more trials extend fewer
    for point in Halton(len(space), rng=rng).random(SPREAD - 1):
        study.enqueue_trial({key: each.at(share) for (key, each), share in zip(space.items(), point, strict=True)})
    distributions = {key: _distribution(optuna, each) for key, each in space.items()}
    choices: list[Choice] = []
    while len(choices) < num:
        # asked together before any is told: a trial must not depend on how fast its neighbors were
        batch = [study.ask(distributions) for _ in range(min(BATCH, num - len(choices)))]
        suggested = [{key: each.typed(trial.params[key]) for key, each in space.items()} for trial in batch]
        # exactly as given: `nearest` may have moved it into the range, `typed` rounded it
        if not choices:
            suggested[0] = {
                key: first[key] if not each.values else each.nearest(first[key]) for key, each in space.items()
            }
        values = [value_of(len(choices) + index, choice) for index, choice in enumerate(suggested)]
        choices += suggested
        if None in values:
            break
        for trial, value in zip(batch, values, strict=True):
            # a finite order needs a number: Optuna takes infinities, but fails a trial that is told NaN
            study.tell(trial, value if value is not None and math.isfinite(value) else worst)
    return choices


def _distribution(optuna: Any, each: Range) -> Any:
    if each.values:
        return optuna.distributions.CategoricalDistribution(each.values)
    if each.is_integer:
        return optuna.distributions.IntDistribution(int(each.low), int(each.high), log=each.is_log)
    return optuna.distributions.FloatDistribution(each.low, each.high, log=each.is_log)
