"""The trainer of a workload for which no capability offers one."""

import pytest

from clients import local_trainers
from clients.local_trainers import TrainerProvider, decided, provider_of
from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.records import ObjectiveSpec
from fedsign.workload import Workload


@pytest.fixture(autouse=True)
def _no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_trainers, "extensions", lambda point: ())


def test_clients_are_trained_one_after_another() -> None:
    workload = Workload(ExperimentConfig())
    assert decided(workload, ObjectiveSpec()) is workload
    assert type(provider_of(workload)) is TrainerProvider


def test_several_workers_are_refused_in_one_sentence() -> None:
    with pytest.raises(
        ConfigError, match=r"^engine\.workers=2 was given, but [^.]+; install [^.]+ engine\.workers=1\.$"
    ):
        provider_of(Workload(ExperimentConfig()), 2)
