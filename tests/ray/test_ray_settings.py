"""Ray's settings: none is ignored, and invalid ones are refused before Ray starts."""

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
