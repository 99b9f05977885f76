"""Tasks whose content never arrives: the SuperNode gives them up and continues, and so does their process."""

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.common.constant import SubStatus
from flwr.supercore.heartbeat import HeartbeatSender

from fedsign.flower import tasks
from fedsign.flower.tasks import Task, Tasks
from fedsign.seeding import Purpose, global_stream


@dataclass
class Runtime:
    """A SuperNode's Runtime API, as far as it is asked here; `handed_out`: the tasks that there are, in order."""

    handed_out: list[str]
    closed: threading.Event = field(default_factory=threading.Event)
    ended: list[Any] = field(default_factory=list)

    def AcquireTask(self, request: Any) -> Any:
        token = self.handed_out.pop(0) if self.handed_out else ""
        return SimpleNamespace(HasField=lambda name: bool(token), token=token, task=SimpleNamespace(fab_hash="f"))

    def SendTaskHeartbeat(self, request: Any) -> Any:
        return SimpleNamespace(success=True)

    def PushTaskOutput(self, request: Any) -> None:
        self.ended.append(request)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime([])
    monkeypatch.setattr(tasks.RuntimeHttpClient, "from_server_address", lambda **settings: made)
    monkeypatch.setattr(tasks, "_POLL_INTERVAL_S", 0.1)
    return made


def never(client: Runtime) -> None:
    client.closed.wait(30)
    raise RuntimeError("the client is closed")


def test_a_task_whose_content_never_comes_is_given_up_when_there_is_another(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "pull_task_input", never)
    runtime.handed_out = ["next"]
    began, own = time.monotonic(), Tasks("127.0.0.1:1")
    own.run(Task(token="lost", fab_hash="f"))
    assert time.monotonic() - began < 5
    (end,) = runtime.ended
    assert end.sub_status == SubStatus.FAILED and not end.HasField("context")
    assert runtime.closed.is_set()
    assert own.next() == Task(token="next", fab_hash="f")


def test_heartbeats_end_before_the_task_does(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperNode would refuse one that comes later, and flwr interrupts a process that is refused."""
    order: list[str] = []

    class Heartbeats:
        def __init__(self, send: Any) -> None:
            self.start, self.stop = lambda: order.append("start"), lambda: order.append("stop")

    monkeypatch.setattr(tasks, "HeartbeatSender", Heartbeats)
    monkeypatch.setattr(tasks, "pull_task_input", lambda client: (order.append("pull"), object(), object(), object()))
    monkeypatch.setattr(tasks, "_answer", lambda app, message, context: (message, ""))
    monkeypatch.setattr(tasks, "push_message", lambda client, reply, context: order.append("reply"))
    monkeypatch.setattr(tasks, "push_task_output", lambda *given: order.append("end"))
    Tasks("127.0.0.1:1").run(Task(token="token", fab_hash="f"))
    assert order == ["start", "pull", "reply", "stop", "end"]


def test_what_pulling_raises_is_raised_be_it_a_timeout(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(client: Runtime) -> None:
        raise TimeoutError("the SuperNode does not answer")

    monkeypatch.setattr(tasks, "pull_task_input", fails)
    with pytest.raises(TimeoutError, match="does not answer"):
        Tasks("127.0.0.1:1").run(Task(token="lost", fab_hash="f"))
    assert runtime.closed.is_set()


def test_content_that_takes_its_time_is_waited_for_while_there_is_no_other_task(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = (object(), object(), object(), object())

    def slowly(client: Runtime) -> Any:
        time.sleep(0.5)
        return pulled

    monkeypatch.setattr(tasks, "pull_task_input", slowly)
    replies: list[Any] = []
    monkeypatch.setattr(tasks, "_answer", lambda app, message, context: (message, ""))
    monkeypatch.setattr(tasks, "push_message", lambda client, reply, context: replies.append(reply))
    monkeypatch.setattr(tasks, "push_task_output", lambda *given: runtime.ended.append(given))
    Tasks("127.0.0.1:1").run(Task(token="slow", fab_hash="f"))
    assert replies == [pulled[0]]
    assert [given[2] for given in runtime.ended] == [SubStatus.COMPLETED]


def test_heartbeats_take_no_number_from_a_client(runtime: Runtime) -> None:
    """Or whatever draws from `random` while it trains would depend on when they are sent."""
    Tasks("127.0.0.1:1")
    with global_stream(0, Purpose.TRAINING) as drawn:
        heartbeat = HeartbeatSender(lambda: True)
        heartbeat.start()
        heartbeat.stop()  # once it has drawn how long to wait for the next one
        assert drawn() == []
