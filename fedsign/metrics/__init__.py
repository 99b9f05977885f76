"""Metrics: functions of (outputs [n, ...], targets [n]) that return one number.

If a task reduces its outputs (`fedsign.tasks.base.KeepingTask`), its metrics take (kept, targets) instead.

This module does not import torch, so that reports can ask which direction is better.
"""

LOWER_IS_BETTER = frozenset({"loss", "train_loss", "rmse", "mse", "mae", "perplexity"})


def is_higher_better(name: str) -> bool:
    """Whether larger values are better.  A custom metric is lower-is-better if its name ends in `_loss` or `_error`.

    >>> [is_higher_better(name) for name in ("accuracy", "validation_rmse", "mymetrics:top_5_error")]
    [True, False, False]
    """
    column = name.rpartition(":")[2].removeprefix("validation_")
    return column not in LOWER_IS_BETTER and not column.endswith(("_loss", "_error"))
