"""Evaluation at the sites, each on its own test samples.

A round's metrics are means over the sites, weighted by samples. For the loss and for fractions of samples (accuracy)
this equals the metric of all test samples together. For a metric that is not a mean over samples (AUC, F1, balanced
accuracy) it does not; it then describes the model at an average site.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum, isfinite, nan

from clients.deployment.evaluator import SiteEvaluator
from fedsign.config import ExperimentConfig
from fedsign.flower.evaluation import ask_sites
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.metrics.base import columns_due
from fedsign.records import EvaluateReply, EvaluateRequest, Failure, Tensors
from fedsign.seeding import Purpose, generator
from fedsign.storage.results import Record
from fedsign.workload import Workload
from simulations.evaluation import Evaluation

AskSites = Callable[[Sequence[EvaluateRequest]], Iterable[EvaluateReply | Failure]]
_VALIDATION = "validation_"


def at_sites(workload: Workload, grid: PartitionGrid, *, num_threads: int) -> "EvaluationAtSites | None":
    """Evaluate at the sites (see `simulations.evaluation.evaluator_for`), over messages unless all is in this
    process.
    """
    if not workload.is_evaluated_at_clients:
        return None
    ask: AskSites = partial(ask_sites, grid, timeout_s=workload.config.server.round_timeout_s)
    if not grid.leaves_process:
        ask = SiteEvaluator(workload, num_threads=num_threads).evaluate_many
    return EvaluationAtSites(workload.config, ask, grid.label)


@dataclass(frozen=True, slots=True)
class EvaluationAtSites:
    """Evaluates at the sites. `ask` sends the request; `label` names a site in failures."""

    config: ExperimentConfig
    ask: AskSites
    label: Callable[[int], str] = lambda partition: ""

    def evaluate(self, round: int, tensors: Tensors) -> Evaluation:
        """Evaluate the model of a round, as `simulations.evaluation.Evaluate`."""
        sites = evaluating(self.config, round)
        requests = [EvaluateRequest(round=round, partition=site, tensors=tensors) for site in sites]
        names = ["loss", *columns_due(self.config, round)]
        answers = [_checked(answer, names, self.label) for answer in self.ask(requests)]
        replies = [answer for answer in answers if isinstance(answer, EvaluateReply)]
        failed = [answer for answer in answers if isinstance(answer, Failure)]
        return Evaluation(
            metrics=means(replies, names),
            failures=[replace(answer, reason=f"in evaluation: {answer.reason}") for answer in failed],
            bytes_down=len(sites) * sum(tensor.nbytes for tensor in tensors.values()),
            records={"sites.jsonl": {"round": round, "sites": [_line(site) for site in replies]}},
        )


def evaluating(config: ExperimentConfig, round: int) -> list[int]:
    """Return the sites that evaluate in a round, ascending."""
    num_clients, num_sampled = config.partition.num_clients, config.server.evaluate_clients
    if num_sampled in (0, num_clients):
        return list(range(num_clients))
    # a stream of its own: changing evaluate_clients must not change who trains
    drawn = generator(config.seed, Purpose.EVALUATION, round=round).choice(num_clients, size=num_sampled, replace=False)
    return sorted(int(site) for site in drawn)


def means(sites: Sequence[EvaluateReply], names: Sequence[str]) -> dict[str, float]:
    """Average the sites' metrics by samples. A site is left out of a metric that its samples do not define.

    Returns NaN for a metric that no site defines.
    """
    averages = {name: _mean([(site.num_test, site.metrics[name]) for site in sites]) for name in names}
    held = [site for site in sites if site.num_validation]
    for name in names if held else ():
        key = _VALIDATION + name
        averages[key] = _mean([(site.num_validation, site.metrics[key]) for site in held])
    return averages


def _mean(weighted: Iterable[tuple[int, float]]) -> float:
    # e.g. the AUC of a site whose test samples have one class
    kept = [(num, value) for num, value in weighted if isfinite(value)]
    total = sum(num for num, _ in kept)
    # fsum rounds once: the mean does not depend on the order of the sites
    return fsum(num * value for num, value in kept) / total if total else nan


def _line(site: EvaluateReply) -> Record:
    own = {"client": site.partition, "name": site.name, "num_train": site.num_train, "num_test": site.num_test}
    # null: JSON has no NaN
    return own | {name: value if isfinite(value) else None for name, value in site.metrics.items()}


def _checked(
    answer: EvaluateReply | Failure, names: Sequence[str], label: Callable[[int], str]
) -> EvaluateReply | Failure:
    """Return a reply with all requested metrics; a failure if some are missing or the loss is not finite."""
    if isinstance(answer, Failure):
        return answer
    wanted = [*names, *(_VALIDATION + name for name in names if answer.num_validation)]
    missing = [name for name in wanted if name not in answer.metrics]
    if missing:
        reason = (
            f"{label(answer.partition)}the reply lacks the figures {missing}; run the same version of FedSign at every "
            "node."
        )
        return Failure(partition=answer.partition, reason=reason)
    # only the loss: other metrics may be undefined on a site's samples, see `_mean`
    diverged = [
        name for name in wanted if name in ("loss", _VALIDATION + "loss") and not isfinite(answer.metrics[name])
    ]
    if diverged:
        reason = (
            f"{label(answer.partition)}its {diverged[0]} is {answer.metrics[diverged[0]]}; expected a finite "
            "number: the model diverged on its samples."
        )
        return Failure(partition=answer.partition, reason=reason)
    # drops whatever else a site put into its reply: the keys become columns of rounds.jsonl
    return replace(answer, metrics={name: answer.metrics[name] for name in wanted})
