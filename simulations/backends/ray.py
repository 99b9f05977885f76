"""Ray: Flower's simulation runtime. The server runs in this process, clients run in actors.

Without an address, Ray starts on this machine with all CPUs and GPUs and stops with the run. With one (`auto`,
`HOST:PORT`, `ray://...`), clients train on an existing cluster. The app is sent to its machines, but FedSign must be
installed there, and the run's folder, which holds client states, must be on a shared file system.
"""

import importlib.metadata
import importlib.util
import inspect
import os
import re
import secrets
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from flwr.app import Context
from flwr.serverapp import Grid
from pydantic import Field

from clients.node import RUN_KEY, STATE_KEY
from fedsign.errors import ConfigError, nearest
from fedsign.extras import require
from fedsign.flower.shims import quiet_flower
from fedsign.rules import Rule
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations.backends.base import called, intra_op_threads
from simulations.flower_app import CLIENT_STUB, write_app
from simulations.rounds import OnRound, RoundLoop

_OF_A_CLUSTER = ("num_cpus", "num_gpus", "resources", "object_store_memory")


class Ray:
    """Settings: resources per client, which limit how many train at once; the cluster; start-up options.

    `start_timeout_s`: how long to wait until all clients have answered the roll call.
    `client_resources`: further numeric options of the client actors, such as `memory`.
    `init_args`: arguments of ray.init, such as `num_cpus`, `object_store_memory`, `runtime_env`.
    """

    rules: ClassVar[tuple[Rule[Any], ...]] = (
        Rule(
            lambda config: config.engine.gpus_per_client and config.engine.device == "cpu",
            (
                "engine.gpus_per_client={engine.gpus_per_client:g} was given with engine.device=cpu, which leaves "
                "the GPUs idle"
            ),
            "give engine.device=cuda, or engine.gpus_per_client=0",
        ),
        Rule(
            lambda config: not config.engine.gpus_per_client and config.engine.device.startswith("cuda"),
            "engine.device={engine.device} was given with engine.gpus_per_client=0, so that Ray would hand out no GPU",
            "give the share of one that a client takes, such as engine.gpus_per_client=0.25",
        ),
        Rule(
            lambda config: (
                config.engine.address and next((name for name in _OF_A_CLUSTER if name in config.engine.init_args), "")
            ),
            (
                "engine.init_args.{found} was given with engine.address={engine.address}, but a cluster that is "
                "there has its own"
            ),
            "drop one of the two",
        ),
    )

    def __init__(
        self,
        *,
        cpus_per_client: Annotated[float, Field(gt=0)] = 1.0,
        gpus_per_client: Annotated[float, Field(ge=0)] = 0.0,
        client_resources: dict[str, float] = {},  # noqa: B006 - is never changed
        address: str = "",
        init_args: dict[str, Any] = {},  # noqa: B006 - is never changed
        start_timeout_s: Annotated[float, Field(gt=0)] = 300.0,
    ) -> None:
        if not address and "ray" not in sys.modules:
            # Ray listens on every interface. It reads this when it is imported, and runs nobody's code without it
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # here, not in `execute`: `requirement` and options are checked before a run's folder exists
        ray = require("ray", extra="ray", feature="engine.name=ray")
        _check_resources(ray, client_resources)
        _check_init_args(ray, init_args)
        # Ray packs as many actors on a machine as these allow, which is Flower's only limit on concurrency
        self.resources = {"num_cpus": cpus_per_client, "num_gpus": gpus_per_client, **client_resources}
        self.address, self.init_args = address, init_args
        self.start_timeout_s = start_timeout_s

    @staticmethod
    def requirement() -> tuple[str, str]:
        """Return the row of `fedsign doctor`."""
        if importlib.util.find_spec("ray") is None:
            return "missing", "pip install 'fedsign[ray]'"
        return "ok", importlib.metadata.version("ray")

    def execute(self, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
        """Start Ray or connect to it, and run the round loop in a thread beside Flower's backend."""
        # Ray warns that it will stop hiding GPUs from actors that request none. Opt in to the new behavior.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray's default niceness of 15 lets any other program starve the actors: clients would be late.
        os.environ.setdefault("RAY_worker_niceness", "0")
        from fedsign.flower.ray_backend import run_on_ray  # imports Ray, an optional dependency

        config = workload.config
        run_config = {STATE_KEY: str(folder.clients.resolve()), RUN_KEY: folder.id}
        app = write_app(folder.path / "app", config, run_config=run_config)
        init_args: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", **self.init_args}
        if self.address:  # the app is shipped with the run
            # the user's runtime_env wins
            own = {"working_dir": str(app), **init_args.get("runtime_env", {})}
            init_args |= {"address": self.address, "runtime_env": own}
        raised: list[BaseException] = []

        def serve(grid: Grid, context: Context) -> None:
            try:
                # inside the thread: torch keeps the number of threads per thread
                with intra_op_threads(config.engine.threads):
                    partitions = called(grid, workload, timeout_s=self.start_timeout_s)
                    RoundLoop(workload, partitions, folder, on_round).run()
            except BaseException as error:  # noqa: BLE001 - re-raised in the calling thread
                raised.append(error)

        with quiet_flower():
            run_on_ray(
                serve,
                app_folder=app,
                client_app=f"{CLIENT_STUB}:app",
                num_nodes=config.partition.num_clients,
                backend_config={
                    "client_resources": self.resources,
                    "init_args": init_args,
                    "start_timeout_s": self.start_timeout_s,
                },
            )
        if raised:
            raise raised[0]

    def check(self, workload: Workload) -> None:
        """Check what Ray actors cannot run, and Ray's own options."""


def _check_resources(ray: Any, client_resources: Mapping[str, float]) -> None:
    """Reject resources that have a setting of their own, and those that Ray does not know."""
    for name, setting in (("num_cpus", "cpus_per_client"), ("num_gpus", "gpus_per_client")):
        if name in client_resources:
            raise ConfigError(
                f"engine.client_resources.{name} was given; expected engine.{setting}={client_resources[name]:g}."
            )
    try:
        ray.remote(object).options(**client_resources)  # validates all options without a cluster
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"engine.client_resources={dict(client_resources)} was given, which Ray does not take for an actor "
            f"({str(error).rstrip('.')}); expected options of its actors, such as memory."
        ) from error


def _check_init_args(ray: Any, init_args: Mapping[str, Any]) -> None:
    """Reject names that ray.init does not take. Ray itself reports them as deprecated, or ignores them."""
    known = [name for name in inspect.signature(ray.init).parameters if name not in ("address", "kwargs")]
    # these are hidden behind **kwargs in its signature
    rarely_known = re.findall(r'kwargs\.pop\(\s*"(_\w+)"', inspect.getsource(ray.init))
    for name in init_args:
        if name == "address":
            raise ConfigError(f"engine.init_args.address was given; expected engine.address={init_args[name]}.")
        if name not in (*known, *rarely_known):
            raise ConfigError(
                f"engine.init_args.{name} was given, which ray.init does not "
                f"take.{nearest(name, [*known, *rarely_known])} Expected one of {', '.join(known)}."
            )
