"""A process that plays many jobs keeps nothing of those that have ended."""

from pathlib import Path

from simulations.jobs import Job, Team, Watcher


class Said(Watcher):
    def __init__(self) -> None:
        self.errors: list[str | None] = []

    def on_end(self, worker: int, job: Job, error: str | None) -> None:
        self.errors.append(error)


def test_a_job_leaves_nothing_in_memory(tmp_path: Path) -> None:
    said = Said()
    with Team("tests.unit.cyclic_jobs", workers=1, logs=tmp_path) as team:
        team.play([Job(id=str(number), asked={}) for number in range(3)], [said])
    assert said.errors == ["0 alive"] * 3
