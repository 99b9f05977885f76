"""A fault-tolerant version of Flower's Ray backend: dead actors are replaced, and all of ray.init is configurable.

Differs from Flower 1.41: there, an actor whose process has died returns to the pool, where every later message to it
fails; and `runtime_env` in the arguments of ray.init raises, since Flower passes its own.
"""

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.server.superlink.fleet.vce.backend import raybackend
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from flwr.serverapp import Grid, ServerApp
from flwr.simulation.ray_transport.ray_actor import BasicActorPool
from flwr.simulation.run_simulation import _run_simulation
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.telemetry import EventType

from fedsign.errors import OUT_OF_MEMORY, EngineError
from fedsign.flower.shims import PARTITION_KEY, client_error, empty_run, ensure_task_identity

_POLL_S = 0.02


class LastingRayBackend(RayBackend):
    """Flower's Ray backend with replacement of dead actors; see the module docstring."""

    def __init__(self, backend_config: dict[str, Any]) -> None:
        self._folder = ""
        super().__init__(backend_config)
        self.start_timeout_s: float | None = backend_config.get("start_timeout_s")
        self._submitting = threading.Lock()

    def terminate(self) -> None:
        """As in Flower, and remove Ray's folder."""
        super().terminate()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def init_ray(self, backend_config: dict[str, Any]) -> None:
        """As in Flower, with the user's `runtime_env` merged into Flower's."""
        if ray.is_initialized():
            return
        given: dict[str, Any] = dict(backend_config.get("init_args") or {})
        runtime_env = {
            # before a module of the user can take such a name
            "worker_process_setup_hook": "fedsign.companions.import_packages",
            **given.pop("runtime_env", {}),
        }
        # Ray's workers inherit the environment, but not changes to sys.path.
        python_path = os.pathsep.join([*sys.path, *filter(None, [os.environ.get("PYTHONPATH")])])
        os.environ["PYTHONPATH"] = python_path
        runtime_env["env_vars"] = {"PYTHONPATH": python_path, **runtime_env.get("env_vars", {})}
        own: dict[str, Any] = {"address": "local", "include_dashboard": False}
        if not given.keys() & {"address", "_temp_dir"}:  # Ray lets every account write its folder: its parent is ours
            self._folder = tempfile.mkdtemp(prefix="ray-", dir=os.environ.get("RAY_TMPDIR", "/tmp"))
            own["_temp_dir"] = f"{self._folder}/ray"
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        # Ray's processes inherit what is blocked: batch systems signal all, and a round needs them to its end
        signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
        try:
            # "local": without an address, ray.init joins a cluster that somebody else has started on this machine
            ray.init(runtime_env=runtime_env, **{**own, **given})
        finally:
            for number, handler in handlers.items():
                if callable(handler):  # Ray's would end this process in mid-round
                    signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)

    def build(self, app_fn: Callable[[], ClientApp]) -> None:
        """As in Flower, then wait for the actors: their startup must not count against the first round's timeout."""
        super().build(app_fn)
        if self.pool is not None:
            started = [actor.__ray_ready__.remote() for actor in self.pool.pool]  # type: ignore[attr-defined]
            ray.wait(started, num_returns=len(started), timeout=self.start_timeout_s)

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        """As in Flower, but an actor that has died is replaced by a new one."""
        pool, app = self.pool, self.app_fn
        if pool is None or app is None:
            raise EngineError("Ray has no actors yet: its backend was not built.")
        job = (app, message, str(context.node_config[PARTITION_KEY]), context)
        with self._submitting:
            # Flower has a thread per actor, so all are busy only while a replacement starts
            while not pool.is_actor_available() and ray.is_initialized():
                time.sleep(_POLL_S)
            future = pool.submit(lambda actor, *given: actor.run.remote(*given), job)
        try:
            return pool.fetch_result_and_return_actor_to_pool(future)
        except ray.exceptions.RayActorError:
            pool._future_to_actor.pop(future)  # forget the dead actor, instead of returning it to the pool
            threading.Thread(target=_add_actor, args=(pool,), daemon=True).start()
            died = f"the process that trained this client died, {OUT_OF_MEMORY}"
            return Message(client_error(died), reply_to=message), context
        except Exception:
            pool.add_actor_back_to_pool(future)
            raise


def _add_actor(pool: BasicActorPool) -> None:
    """Add a started actor: messages do not wait for it while another one is idle."""
    actor = pool.create_actor_fn()  # type: ignore[no-untyped-call]
    with suppress(ray.exceptions.RayError):  # the run is over
        ray.wait([actor.__ray_ready__.remote()])
    pool.pool.append(actor)


def run_on_ray(
    server_main: Callable[[Grid, Context], None],
    *,
    app_folder: Path,
    client_app: str,
    num_nodes: int,
    backend_config: dict[str, Any],
) -> None:
    """Run a server function on Flower's simulation runtime (Ray), in this process.

    The public `run_simulation` is deprecated and takes no run configuration.  The function behind it does, given an
    app's folder, from which clients load the ClientApp and the configuration.
    """
    ensure_task_identity()
    run = empty_run()
    run.primary_task_id = 1
    run.federation_id = NOOP_FEDERATION_ID
    server_app = ServerApp()
    server_app.main()(server_main)
    flowers_own = RayBackend
    # Flower imports the backend class by this name on start, and accepts no other.
    setattr(raybackend, "RayBackend", LastingRayBackend)  # noqa: B010
    try:
        _run_simulation(
            num_supernodes=num_nodes,
            exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
            client_app_attr=client_app,
            server_app=server_app,
            backend_name="ray",
            backend_config=backend_config,
            app_dir=str(app_folder),
            is_app=True,
            run=run,
        )
    finally:
        setattr(raybackend, "RayBackend", flowers_own)  # noqa: B010
