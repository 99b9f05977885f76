"""Evaluation at a site: metrics on its own test samples, which never leave it."""

from collections.abc import Iterable, Iterator

from clients.working_model import BorrowingModel
from fedsign.data import sites
from fedsign.data.base import AnySamples, Dataset
from fedsign.data.partition.base import group
from fedsign.records import EvaluateReply, EvaluateRequest, Failure, failure_of
from fedsign.workload import Workload


class SiteEvaluator:
    """Evaluates models at the sites of this process; on a CPU, `num_threads` share the batches."""

    def __init__(self, workload: Workload, *, num_threads: int = 1) -> None:
        self._workload, self._num_threads = workload, num_threads
        self._model = BorrowingModel(workload.make_model(), workload.numerics)
        self._model.empty()
        self._samples = samples_of_sites(workload.dataset)

    def evaluate_many(self, requests: Iterable[EvaluateRequest]) -> Iterator[EvaluateReply | Failure]:
        """Evaluate sites one by one; one that raises becomes a failure."""
        for request in requests:
            try:
                yield self.evaluate(request)
            except Exception as error:  # noqa: BLE001 - a client's error is a reply, on every engine
                yield failure_of(request.partition, error)

    def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """One site's metrics."""
        workload, site = self._workload, request.partition
        test, validation = self._samples[site]
        self._model.load(request.tensors)
        try:
            metrics = workload.evaluate(
                self._model.module, (test, validation), num_threads=self._num_threads, round=request.round
            )
        finally:
            self._model.release()
        return EvaluateReply(
            round=request.round,
            partition=site,
            name=sites.name_of(workload.config, site),
            num_train=len(workload.share_of(site)),
            num_test=len(test),
            num_validation=0 if validation is None else len(validation),
            metrics=metrics,
        )


def samples_of_sites(data: Dataset) -> dict[int, tuple[AnySamples, AnySamples | None]]:
    """The test and validation samples of each site in a data set."""
    held = _by_owner(data.validation)
    return {site: (test, held.get(site)) for site, test in _by_owner(data.test).items()}


def _by_owner(samples: AnySamples | None) -> dict[int, AnySamples]:
    if samples is None or samples.owners is None or not len(samples):
        return {}
    parts = group(samples.owners.numpy(), int(samples.owners.max()) + 1)
    return {owner: samples[index] for owner, index in enumerate(parts) if len(index)}  # other owners are at other nodes
