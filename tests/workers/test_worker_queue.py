"""The order of training, and the position of tensors in shared memory."""

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.state.store import ClientStore
from clients.workers.process import _Worker
from clients.workers.queue import Queue, Unit
from fedsign.records import Failure, ObjectiveSpec, Tensors, TrainRequest
from fedsign.transport.connection import Connection
from fedsign.transport.tensors import Layout, Slots, slot_bytes_of


def unit(partition: int, cost: int) -> Unit:
    request = TrainRequest(
        round=1,
        partition=partition,
        tensors={},
        objective=ObjectiveSpec(),
        state_version=0,
        needed_versions=frozenset(),
    )
    return Unit([request], cost)


@settings(deadline=None)
@given(
    costs=st.lists(st.integers(1, 1000), max_size=40),
    window=st.integers(1, 50),
    num_workers=st.integers(1, 5),
    choice=st.randoms(use_true_random=False),
)
def test_every_unit_is_handed_out_once_and_none_before_it_is_in_the_window(
    costs: list[int], window: int, num_workers: int, choice: "object"
) -> None:
    units = [unit(partition, cost) for partition, cost in enumerate(costs)]
    queue = Queue(units, window=window, num_workers=num_workers)
    running: list[Unit] = []
    done: set[int] = set()
    taken: list[int] = []
    while len(done) < len(units):
        while job := queue.take():
            first = min(set(range(len(units))) - done)
            assert all(each.position < first + window for each in job)
            running += job
            taken += [each.position for each in job]
        finished = running.pop(choice.randrange(len(running)))  # type: ignore[attr-defined]
        done.add(finished.position)
        queue.done(finished)
    assert sorted(taken) == list(range(len(units))) and not len(queue)


def test_the_longest_come_first_and_jobs_become_smaller() -> None:
    costs = [1, 50, 3, 40, 2, 30] + 40 * [5]
    queue = Queue([unit(partition, cost) for partition, cost in enumerate(costs)], window=len(costs), num_workers=2)
    jobs = []
    while job := queue.take():
        jobs.append([each.cost for each in job])
    handed_out = [cost for job in jobs for cost in job]
    assert handed_out == sorted(costs, reverse=True)
    # what is left / (4 jobs x 2 workers) is the fair share of a job, unless one client alone is longer
    left = sum(costs)
    for job in jobs:
        assert len(job) == 1 or sum(job) <= left / 8
        left -= sum(job)
    assert len(jobs[-1]) == 1 and max(map(len, jobs)) > 1


def test_a_unit_that_was_given_back_is_a_job_of_its_own_and_the_next_one() -> None:
    queue = Queue([unit(partition, 10) for partition in range(40)], window=40, num_workers=1)
    first = queue.take()
    assert len(first) > 1
    for each in first:
        queue.give_back(each)
    assert [queue.take() for _ in first] == [[each] for each in first]


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(shapes, dtypes), max_size=5))
def test_what_is_written_by_a_layout_is_read_with_the_same_bits_types_and_strides(
    found: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    tensors = {
        name: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        for name, (shape, dtype) in found.items()
    }
    tensors = {
        name: tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
        for name, tensor in tensors.items()
    }
    layout = Layout.from_json(Layout.of(tensors).as_json())
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.write(tensors, memory)
    there = layout.read(memory)
    assert list(there) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(there[name], tensor)
        assert (there[name].dtype, there[name].stride()) == (tensor.dtype, tensor.stride())


def test_a_slot_is_used_again_once_the_last_tensor_in_it_is_gone() -> None:
    tensors = {"a": torch.arange(5.0), "b": torch.ones(3, dtype=torch.int64)}
    slots = Slots("test", slot_bytes_of(tensors))
    layout = Layout.of(tensors)
    first = slots.take()
    memory = slots.lent(first)
    layout.write(tensors, memory)
    there = layout.read(memory)
    del memory
    second = slots.take()
    assert second != first
    a = there.pop("a")
    there.clear()
    assert slots.take() not in (first, second)
    assert a.tolist() == [0, 1, 2, 3, 4]
    del a
    assert slots.take() == first
    slots.close()


def test_the_end_of_a_loan_runs_no_python_in_which_an_interruption_would_be_lost() -> None:
    slots = Slots("test", 100)
    memory = slots.lent(slots.take())
    events: list[str] = []
    sys.setprofile(lambda frame, event, what: events.append(event))
    del memory
    sys.setprofile(None)
    assert "call" not in events
    assert slots.take() == 0
    slots.close()


@pytest.mark.parametrize("slot_bytes", [100, 2**20, 2**30])
def test_a_file_has_as_many_slots_as_were_held_at_once_and_takes_memory_for_what_was_written(slot_bytes: int) -> None:
    slots = Slots("test", slot_bytes)
    held = [slots.lent(slots.take()) for _ in range(5)]
    for number, memory in enumerate(held):
        memory[:100] = number
    assert [memory[99].item() for memory in held] == [0, 1, 2, 3, 4]
    del held, memory
    for _ in range(20):
        slots.lent(slots.take())
    assert slots.num_slots == 5
    assert 512 * os.fstat(slots.descriptor).st_blocks <= 5 * os.sysconf("SC_PAGE_SIZE")
    slots.close()


class Seeing:
    """A trainer that notes the models that it is given."""

    def __init__(self) -> None:
        self.seen: list[Tensors] = []

    def train_many(self, requests: Sequence[TrainRequest], states: ClientStore) -> Iterator[Failure]:
        for request in requests:
            self.seen.append({name: tensor.clone() for name, tensor in request.tensors.items()})
            yield Failure(partition=request.partition, reason="only looked")


def test_a_worker_trains_on_the_newest_model_of_a_slot() -> None:
    """The second model lies in the slot of the first one, in another layout."""
    models, trainer = Slots("models", 1000), Seeing()
    ours, theirs = socket.socketpair()
    given = [{"weight": torch.arange(6.0).reshape(2, 3)}, {"bias": torch.ones(2), "weight": torch.zeros(3, 2)}]
    with closing(models), ours, theirs:
        worker = _Worker(parent=Connection(theirs), trainer=trainer, together=False, models=models, replies=models)
        slot, nothing = models.take(), Layout.of({}).as_json()
        for task, tensors in enumerate(given, start=1):
            layout = Layout.of(tensors)
            layout.write(tensors, models.memory(slot))
            client = {
                "round": 1,
                "partition": 7,
                "state_version": 0,
                "objective": {"name": "plain", "settings": {}},
                "task": 0,
            }
            job = {"job": task, "tasks": [{"slot": slot, "model": layout.as_json(), "shared": nothing}]}
            worker.train(job | {"units": [[slot, 0, [client]]]})
    for found, expected in zip(trainer.seen, given, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
