"""Ray: clients in Ray actors, Flower's simulation runtime."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="clients in Ray actors, Flower's simulation runtime",
    modules=("fedsign.flower.ray_backend", "simulations.backends.ray"),
    rows={"engine": {"ray": ("simulations.backends.ray:Ray", "Flower's simulation runtime, clients in Ray actors")}},
    extras=("ray",),
)
