"""Ray's settings: none is ignored, and invalid ones are refused before Ray starts."""

import subprocess
import sys
from typing import Any

import pytest

from fedsign.config import from_dict
from fedsign.errors import ConfigError
from simulations.backends.ray import Ray

pytest.importorskip("ray")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"init_args": {"num_cpu": 2}}, "Did you mean 'num_cpus'?"),
        ({"init_args": {"_temp_dri": "/scratch"}}, "Did you mean '_temp_dir'?"),
        ({"init_args": {"address": "auto"}}, "expected engine.address=auto"),
        ({"client_resources": {"numcpus": 2}}, "which Ray does not take for an actor (Invalid option keyword numcpus"),
        ({"client_resources": {"num_gpus": 0.5}}, "expected engine.gpus_per_client=0.5"),
    ],
)
def test_what_ray_does_not_take_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Ray(**given)
    assert said in str(caught.value)


def test_what_ray_takes_without_naming_it_in_its_signature_passes() -> None:
    assert Ray(client_resources={"memory": 1e6}).resources["memory"] == 1e6
    assert Ray(init_args={"_temp_dir": "/scratch", "num_cpus": 2}).init_args == {"_temp_dir": "/scratch", "num_cpus": 2}


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 1.0), ("cuda", 0.0)])
def test_gpus_that_are_set_aside_are_used_and_the_other_way_around(device: str, gpus: float) -> None:
    with pytest.raises(ConfigError, match=f"engine.device={device} was given|given with engine.device={device}"):
        from_dict({"engine": {"name": "ray", "device": device, "gpus_per_client": gpus}})


def test_a_cluster_that_is_there_has_its_own_size() -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.init_args\.num_cpus was given with engine\.address=auto, .* drop one"
    ):
        from_dict({"engine": {"name": "ray", "init_args": {"num_cpus": 2}, "address": "auto"}})


LOCAL = """
import os, subprocess, sys
from pathlib import Path
from simulations.backends.ray import {engine}
{engine}()
import ray
from fedsign.flower.ray_backend import LastingRayBackend
backend = LastingRayBackend({{"init_args": {{"num_cpus": 1}}}})
node = ray.get_runtime_context()
folder = Path(ray._private.worker._global_node.get_session_dir_path()).parents[1]
environment = {{name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}}
environment["RAY_gcs_rpc_server_connect_timeout_s"] = "1"
code = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False); print(ray.get(ray.remote(lambda: 7).remote()))"
done = subprocess.run([sys.executable, "-c", code, node.gcs_address], env=environment, capture_output=True, text=True)
print("a stranger ran:", done.stdout)
print(oct(folder.stat().st_mode & 0o777), "ours:", ray.get(ray.remote(lambda: 7).remote()))
backend.terminate()
print("left:", folder.exists())
"""


@pytest.mark.slow
@pytest.mark.engines
def test_a_stranger_runs_nothing_on_our_ray_and_reads_none_of_its_files() -> None:
    """Ray listens on every interface, and its own folder, /tmp/ray, belongs to all."""
    code = LOCAL.format(engine=Ray.__name__)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split("\n") == ["a stranger ran: ", "0o700 ours: 7", "left: False", ""], done.stderr[-2000:]
