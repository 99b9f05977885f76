"""Cross-silo: few clients, all of them in every round, with a large model. The large workload is for GPUs."""

from benchmarks.workloads import BenchmarkWorkload

_EXPERIMENT = {
    "name": "silo",
    "rounds": 3,
    "strategy": {"name": "fedavg"},
    "data": {"name": "benchmarks.data:class_images", "num_train": 320, "num_test": 64, "strength": 1.0},
    "partition": {"name": "iid", "num_clients": 10},
    "model": {"name": "resnet18"},
    "server": {"cohort_size": 10},
    "client": {"local_epochs": 1, "batch_size": 16, "lr": 0.05, "optimizer": {"momentum": 0.0}},
}
_NETWORK = "ResNet-18 with a start for small images (11.2 M parameters)"

SILO = BenchmarkWorkload(
    name="silo",
    title="Cross-silo: ResNet-18, 10 clients",
    about=(
        f"320 images of 32x32x3 in 10 clients of 32, all of them in every round, {_NETWORK}, batches of 16, SGD with "
        "lr 0.05, 1 epoch, 3 rounds, 64 test images after each."
    ),
    experiment=_EXPERIMENT,
    network="resnet18",
    min_accuracy=0.25,
    devices=("cpu",),
)

SILO_LARGE = BenchmarkWorkload(
    name="silo-large",
    title="Cross-silo: ResNet-18, 10 clients of 2,000",
    about=(
        f"20,000 images of 32x32x3 in 10 clients of 2,000, all of them in every round, {_NETWORK}, batches of 64, "
        "SGD with lr 0.02, 1 epoch, 5 rounds, 2,000 test images after each."
    ),
    experiment={
        **_EXPERIMENT,
        "rounds": 5,
        "data": {"name": "benchmarks.data:class_images", "num_train": 20_000, "num_test": 2_000, "strength": 1.0},
        "client": {"local_epochs": 1, "batch_size": 64, "lr": 0.02, "optimizer": {"momentum": 0.0}},
    },
    network="resnet18",
    min_accuracy=0.5,
    devices=("cuda",),
)
