"""The search for good settings: points spread over the space, then Optuna's TPE.

Trials are asked for in batches of one size, and their values told in the order of the trials.

What is asked for next depends on the seed and on the values of the trials so far alone: not on how many processes play,
nor on which of them is the first to end.  So nothing of the search is stored.  It is asked and told again from its
beginning whenever values have come, and goes on where it was (a hundred trials take less than a second).

The first trial has the experiment's own settings: a search never ends at worse validation values than it began with.
The next ones are points of a scrambled Halton sequence, whose coordinates do not depend on how many there are: all
strategies try the same shared settings there, and none is ahead by the luck of its draws.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from scipy.stats.qmc import Halton

from fedsign.extras import require
from fedsign.seeding import Purpose, generator
from simulations.comparison.space import Range

SPREAD = 8  # the trials before TPE has a say: the first one, and points of the sequence
BATCH = 4
"""Trials that are asked for before the first of them is told: part of the result, so no option."""

Choice = dict[str, Any]


def optuna_version() -> str:
    """Of the library, part of what a search's result depends on.

    Raises:
        ConfigError: it is not installed.
    """
    return str(require("optuna", extra="tune", what="a search of settings").__version__)


def trials(
    space: Mapping[str, Range],
    first: Choice,
    *,
    num: int,
    seed: int,
    higher_is_better: bool,
    value_of: Callable[[int, Choice], float | None],
) -> list[Choice]:
    """The settings of all trials that can be asked for, given the values so far.

    Args:
        space: where to look.
        first: what the experiment says of these settings, tried first.
        num: all trials.
        seed: of the search.
        higher_is_better: the direction of the values.
        value_of: the value of a trial by its position; NaN if it was lost, None if it is still to be played.

    A trial that was lost counts as worse than all others.  Of `first`, a value outside of its range is told as the
    range's nearest one.
    """
    optuna = require("optuna", extra="tune", what="a search of settings")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    worst = -math.inf if higher_is_better else math.inf
    rng = generator(seed, Purpose.SEARCH)
    sampler = optuna.samplers.TPESampler(seed=int(rng.integers(2**31)), n_startup_trials=SPREAD)
    study = optuna.create_study(direction="maximize" if higher_is_better else "minimize", sampler=sampler)
    study.enqueue_trial({key: each.nearest(first[key]) for key, each in space.items()})
    for point in Halton(len(space), rng=rng).random(SPREAD - 1):
        study.enqueue_trial({key: each.at(share) for (key, each), share in zip(space.items(), point, strict=True)})
    distributions = {key: _distribution(optuna, each) for key, each in space.items()}
    choices: list[Choice] = []
    while len(choices) < num:
        batch = [study.ask(distributions) for _ in range(min(BATCH, num - len(choices)))]
        asked = [{key: each.typed(trial.params[key]) for key, each in space.items()} for trial in batch]
        if not choices:
            asked[0] = {key: first[key] if not each.values else each.nearest(first[key]) for key, each in space.items()}
        values = [value_of(len(choices) + place, choice) for place, choice in enumerate(asked)]
        choices += asked
        if None in values:
            break
        for trial, value in zip(batch, values, strict=True):
            study.tell(trial, value if value is not None and math.isfinite(value) else worst)
    return choices


def _distribution(optuna: Any, each: Range) -> Any:
    if each.values:
        return optuna.distributions.CategoricalDistribution(each.values)
    if each.is_integer:
        return optuna.distributions.IntDistribution(int(each.low), int(each.high), log=each.is_log)
    return optuna.distributions.FloatDistribution(each.low, each.high, log=each.is_log)
