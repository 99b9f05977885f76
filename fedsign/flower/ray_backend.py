"""Flower's Ray backend, with what it takes to last: actors that die are replaced, and all of ray.init can be set.

Flower 1.41 differs: an actor whose process has died goes back to the pool, where every later message fails with it;
`runtime_env` among the arguments of ray.init raises, since Flower passes its own.
"""

import os
import sys
from typing import Any

import ray
from flwr.app import Context, Message
from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend

from fedsign.errors import EngineError
from fedsign.flower.shims import PARTITION_KEY, client_error

_INIT_ARGS = "init_args"


class LastingRayBackend(RayBackend):
    """See the module."""

    def init_ray(self, backend_config: BackendConfig) -> None:
        """As Flower does, with the user's `runtime_env` merged into Flower's."""
        if ray.is_initialized():
            return
        given: dict[str, Any] = dict(backend_config.get(_INIT_ARGS) or {})
        runtime_env = dict(given.pop("runtime_env", {}))
        # Ray's processes inherit the environment, but not what this process has added to its path.
        python_path = os.pathsep.join([*sys.path, *filter(None, [os.environ.get("PYTHONPATH")])])
        os.environ["PYTHONPATH"] = python_path
        runtime_env["env_vars"] = {"PYTHONPATH": python_path, **runtime_env.get("env_vars", {})}
        ray.init(runtime_env=runtime_env, **{"include_dashboard": False, **given})

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        """As Flower does; in the place of an actor that has died comes a new one."""
        pool, app = self.pool, self.app_fn
        if pool is None or app is None:
            raise EngineError("Ray has no actors yet: its backend was not built.")
        job = (app, message, str(context.node_config[PARTITION_KEY]), context)
        future = pool.submit(lambda actor, *given: actor.run.remote(*given), job)
        try:
            return pool.fetch_result_and_return_actor_to_pool(future)
        except ray.exceptions.RayActorError:
            pool._future_to_actor.pop(future)
            pool.pool.append(pool.create_actor_fn())  # type: ignore[no-untyped-call]
            return Message(client_error("the process that trained this client died"), reply_to=message), context
        except Exception:
            pool.add_actor_back_to_pool(future)
            raise
