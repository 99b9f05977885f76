"""The tasks of a SuperNode, played in this process.

A SuperNode with `--isolation process` leaves it to others to play its messages.  Flower's own way is a fresh process for
each message, which imports torch and makes the experiment's data anew.  `Tasks` is the same conversation with the SuperNode
(`flwr.supernode.runtime.run_clientapp` of Flower 1.41, step by step), as often as wanted in one process.

[Note: given up] A message is announced to the SuperNode before its content has come to the SuperLink.  Where the server ends in
between, the SuperNode gives up its run and goes on, but hands out the task all the same, whose content never comes: flwr's
pulling tries for two hours.  A SuperNode has one message at a time, so that another task means that it has given up this one.
"""

import logging
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import closing
from dataclasses import dataclass

from flwr.app import Context, Error, Message
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedsign.records import failure_of

POLL_INTERVAL_S = 0.1
_LOOKS_EVERY_S = 1.0
_log = logging.getLogger("fedsign")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A message to play: the right to do so, and which app it is for."""

    token: str
    fab_hash: str


class Tasks:
    """The tasks of the SuperNode whose Runtime API is at `address`, on this machine and without TLS, as Flower's own are."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = self._connect(RuntimeVersionHttpInterceptor(component_name="flower-superexec"))
        self._apps: dict[str, ClientApp] = {}
        self._early: Task | None = None  # taken while another one was waited for

    def next(self) -> Task:
        """Wait for a task and take it."""
        while (task := self._early or self._acquired()) is None:
            time.sleep(POLL_INTERVAL_S)
        self._early = None
        return task

    def play(self, task: Task) -> None:
        """Pull the message, let the app answer it, push the answer; whatever the app raises is an answer too.

        A message that the SuperNode has given up while it was pulled is not answered; see [Note: given up].
        """
        own = RuntimeTokenHttpInterceptor(task.token)
        context: Context | None = None
        why = "the content of the message never came"
        with closing(self._connect(RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), own)) as client:
            heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
            heartbeat.start()
            try:
                pulled = self._pulled(client)
                if pulled is None:
                    _log.warning("a message whose content never came was given up: its run has ended")
                else:
                    message, context, run, fab = pulled
                    reply, why = _answer(lambda: self._app(run, fab), message, context)
                    push_message(client, reply, context)
            finally:
                heartbeat.stop()  # one that comes later is refused, and Flower then interrupts this process
            push_task_output(client, context, SubStatus.FAILED if why else SubStatus.COMPLETED, why)

    def _acquired(self) -> Task | None:
        answer = self._client.AcquireTask(AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP}))
        if not (answer.HasField("task") and answer.token):
            return None
        return Task(token=answer.token, fab_hash=answer.task.fab_hash)

    def _pulled(self, client: RuntimeHttpClient) -> tuple[Message, Context, Run, Fab] | None:
        """A task's input; None once there is another task, while the thread that pulls ends when its client is closed."""
        puller = futures.ThreadPoolExecutor(max_workers=1)
        pulled = puller.submit(pull_task_input, client)
        puller.shutdown(wait=False)
        while not futures.wait([pulled], timeout=_LOOKS_EVERY_S).done:
            self._early = self._acquired()
            if self._early is not None:
                return None
        return pulled.result()

    def _app(self, run: Run, fab: Fab) -> ClientApp:
        """The app of a bundle, loaded once."""
        if fab.hash_str not in self._apps:
            install_from_fab(fab.content, skip_prompt=True)
            load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
            self._apps[fab.hash_str] = load(run.fab_id, run.fab_version, fab.hash_str)
        return self._apps[fab.hash_str]

    def _connect(self, *interceptors: RuntimeVersionHttpInterceptor | RuntimeTokenHttpInterceptor) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=self._address,
            insecure=True,
            root_certificates=None,
            interceptors=list(interceptors),
            retry_invoker=make_simple_http_retry_invoker(),
        )


def _answer(app: Callable[[], ClientApp], message: Message, context: Context) -> tuple[Message, str]:
    """The app's reply; an error message and its reason where there is none."""
    try:
        return app()(message=message, context=context), ""
    except Exception as error:  # noqa: BLE001 - told to the server, whatever it is
        _log.exception("the ClientApp raised an exception")
        reason = failure_of(0, error).reason
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message), reason
