"""A finding before a run: references that a generated answer cannot reach."""

from typing import Any, Protocol

from fedsign.config import ExperimentConfig
from fedsign.data.base import Dataset
from fedsign.metrics.answer_keys import AnswerKeys
from fedsign.traits import MetricTraits


class _Workload(Protocol):
    @property
    def config(self) -> ExperimentConfig: ...

    @property
    def dataset(self) -> Dataset: ...


def run_check(workload: _Workload) -> list[dict[str, Any]]:
    """Extension point `run_check`: a record of findings.jsonl, if references are longer than answers may be."""
    config = workload.config
    asking = [inputs for name in config.metrics if (inputs := MetricTraits.of(name).inputs) is not None]
    if not asking or not len(workload.dataset.test):
        return []
    from fedsign.metrics.generated import GENERATED, lengths

    most = AnswerKeys.of(config).max_new_tokens
    sizes = lengths(workload.dataset, config) if GENERATED in asking else []
    num_longer = sum(size > most for size in sizes)
    if not num_longer:
        return []
    finding = {
        "rule": "long-answers",
        "source": "data",
        "message": f"{num_longer:,} of {len(sizes):,} reference answers have more tokens than "
        f"server.max_new_tokens={most}, at which generated ones are cut",
        "remedy": f"use --set server.max_new_tokens={max(sizes)} to generate answers of their length",
        "round": 0,
    }
    return [finding]
