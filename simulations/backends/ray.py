"""Ray: Flower's simulation runtime; the server's side runs in this process, clients in actors."""

import importlib.util
import os
from typing import Annotated

from flwr.app import Context
from flwr.serverapp import Grid
from pydantic import Field

from fedsign.errors import ConfigError
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.flower.shims import quiet_flower, run_on_ray
from fedsign.records import roles_of
from fedsign.results import RunFolder
from fedsign.workload import Workload
from simulations.backends.base import intra_op_threads
from simulations.flower_app import CLIENT_STUB, write_app
from simulations.rounds import OnRound, RoundLoop


class Ray:
    """Settings: resources of one client; `start_timeout_s`, until all clients have answered the roll call."""

    def __init__(
        self,
        *,
        cpus_per_client: Annotated[float, Field(gt=0)] = 1.0,
        gpus_per_client: Annotated[float, Field(ge=0)] = 0.0,
        start_timeout_s: Annotated[float, Field(gt=0)] = 300.0,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("engine.name=ray needs Ray, which is not installed: pip install 'fedsign[ray]'.")
        self.cpus_per_client = cpus_per_client
        self.gpus_per_client = gpus_per_client
        self.start_timeout_s = start_timeout_s

    def execute(self, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
        """See Engine."""
        # Ray warns that it will stop hiding GPUs from actors that ask for none; say so beforehand.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        config = workload.config
        app = write_app(folder.path / "app", config, run_folder=folder.path, state_folder=folder.clients)
        raised: list[BaseException] = []

        def serve(grid: Grid, context: Context) -> None:
            try:
                self._play(grid, workload, folder, on_round)
            except BaseException as error:  # noqa: BLE001 - carried over to the calling thread
                raised.append(error)

        with quiet_flower():
            run_on_ray(
                serve,
                app_folder=app,
                client_app=f"{CLIENT_STUB}:app",
                num_nodes=config.partition.num_clients,
                backend_config={
                    "client_resources": {
                        "num_cpus": self.cpus_per_client,
                        "num_gpus": self.gpus_per_client,
                    },
                    "init_args": {"log_to_driver": False, "logging_level": "error"},
                },
            )
        if raised:
            raise raised[0]

    def _play(self, grid: Grid, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
        config = workload.config
        with intra_op_threads(config.engine.threads):
            partitions = PartitionGrid(
                grid,
                num_partitions=config.partition.num_clients,
                roles=roles_of(workload.make_model()),
                leaves_process=True,
            )
            partitions.roll_call(timeout_s=self.start_timeout_s)
            RoundLoop(workload, partitions, folder, on_round).run()
