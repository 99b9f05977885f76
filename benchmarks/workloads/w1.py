"""W1: many tiny clients, where launching small operations takes nearly all the time."""

from benchmarks.workloads import BenchmarkWorkload

W1 = BenchmarkWorkload(
    name="w1",
    title="W1: digits, 100 small clients, an MLP",
    about="1,437 images of 8x8 dealt out to 100 clients by Dirichlet(0.5), 10 clients a round, an MLP 64-64-10 (4,810 "
    "parameters), batches of 16, SGD with lr 0.1, 1 epoch, 50 rounds, 360 test images after each.",
    experiment={
        "name": "w1",
        "rounds": 50,
        "strategy": {"name": "fedavg"},
        "partition": {"name": "dirichlet_prefix", "num_clients": 100, "alpha": 0.5, "min_partition_size": 1},
        "model": {"name": "mlp", "hidden": [64]},
        "server": {"cohort_size": 10},
        "client": {"local_epochs": 1, "batch_size": 16, "lr": 0.1, "optimizer": {"momentum": 0.0}},
    },
    network="mlp",
    network_settings={"hidden": [64]},
    warm_up_rounds=5,
    min_accuracy=0.4,
    loss_tolerance=1e-3,
)
