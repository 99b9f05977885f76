"""Process the tasks of a SuperNode in this process.

With `--isolation process`, a SuperNode leaves its messages to other processes.  Flower starts a new process per
message, which imports torch and rebuilds the experiment's data.  `Tasks` follows the same protocol with the SuperNode
(`flwr.supernode.runtime.run_clientapp` of Flower 1.41, step by step), but for any number of messages in one process.

[Note: given up] A message is announced to the SuperNode before its content reaches the SuperLink.  If the server exits
in between, the SuperNode drops that run and continues, but still hands out the task, whose content never comes; flwr
keeps pulling for two hours.  A SuperNode has one message at a time, so a new task implies that the current one was
given up.
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

from fedsign.flower.shims import leave_global_random_alone
from fedsign.records import failure_of

POLL_INTERVAL_S = 0.1
_POLL_INTERVAL_S = 1.0
_log = logging.getLogger("fedsign")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A message to process: the token that grants access, and the app it is for."""

    token: str
    fab_hash: str


class Tasks:
    """The tasks of the SuperNode whose Runtime API is at `address`, on this host and without TLS, as in Flower."""

    def __init__(self, address: str) -> None:
        leave_global_random_alone()  # heartbeats are sent while a client trains
        self._address = address
        self._client = self._connect(RuntimeVersionHttpInterceptor(component_name="flower-superexec"))
        self._apps: dict[str, ClientApp] = {}
        self._early: Task | None = None  # acquired while the previous task was being pulled

    def next(self) -> Task:
        """Wait for a task and acquire it."""
        while (task := self._early or self._acquired()) is None:
            time.sleep(POLL_INTERVAL_S)
        self._early = None
        return task

    def run(self, task: Task) -> None:
        """Pull the message, let the app handle it, push the reply; an exception of the app becomes an error reply.

        A message that the SuperNode gives up during the pull gets no reply; see [Note: given up].
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
                heartbeat.stop()  # before the output: Flower interrupts this process if a later heartbeat is refused
            push_task_output(client, context, SubStatus.FAILED if why else SubStatus.COMPLETED, why)

    def _acquired(self) -> Task | None:
        answer = self._client.AcquireTask(AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP}))
        if not (answer.HasField("task") and answer.token):
            return None
        return Task(token=answer.token, fab_hash=answer.task.fab_hash)

    def _pulled(self, client: RuntimeHttpClient) -> tuple[Message, Context, Run, Fab] | None:
        """A task's input; None once another task is available.  The pulling thread ends when its client is closed."""
        puller = futures.ThreadPoolExecutor(max_workers=1)
        pulled = puller.submit(pull_task_input, client)
        puller.shutdown(wait=False)  # joining it could take two hours, see [Note: given up]
        while not futures.wait([pulled], timeout=_POLL_INTERVAL_S).done:
            self._early = self._acquired()
            if self._early is not None:
                return None  # see [Note: given up]
        return pulled.result()

    def _app(self, run: Run, fab: Fab) -> ClientApp:
        """The app of a bundle (FAB), loaded once."""
        if fab.hash_str not in self._apps:
            install_from_fab(fab.content, skip_prompt=True)
            load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
            # imports the app: once per process
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
    """The app's reply and an empty string; an error message and its reason if the app raised."""
    try:
        return app()(message=message, context=context), ""
    except Exception as error:  # noqa: BLE001 - reported to the server
        _log.exception("the ClientApp raised an exception")
        reason = failure_of(0, error).reason
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message), reason
