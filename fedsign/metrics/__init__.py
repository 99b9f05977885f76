"""Metrics: functions of (outputs [n, ...], targets [n]) that return one number.

Where a task keeps something else of the outputs (`fedsign.tasks.base.KeepingTask`), they are functions of (kept, targets).

What is known of them without computing anything (and without torch) stands here.
"""

LOWER_IS_BETTER = frozenset({"loss", "train_loss", "rmse", "mse", "mae", "perplexity"})


def is_higher_better(name: str) -> bool:
    """Whether more of a metric is better; of one's own, unless its name ends in `_loss` or `_error`.

    >>> [is_higher_better(name) for name in ("accuracy", "validation_rmse", "mymetrics:top_5_error")]
    [True, False, False]
    """
    column = name.rpartition(":")[2].removeprefix("validation_")
    return column not in LOWER_IS_BETTER and not column.endswith(("_loss", "_error"))
