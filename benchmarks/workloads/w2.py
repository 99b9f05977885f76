"""W2: convolutions, where arithmetic takes nearly all the time; the model of pfl-research's own comparison."""

from benchmarks.workloads import BenchmarkWorkload

W2 = BenchmarkWorkload(
    name="w2",
    title="W2: CIFAR-shaped images, 200 clients, a CNN",
    about=(
        "10,000 images of 32x32x3 (a random image for each class, plus noise) in 200 clients of 50, 50 clients a "
        "round, the CNN of pfl-research's comparison (conv3x3-32, conv3x3-64, maxpool, dropout, 128, dropout, 10: "
        "1,626,442 parameters), batches of 10, SGD with lr 0.05, 1 epoch, 5 rounds, 500 test images after each."
    ),
    experiment={
        "name": "w2",
        "rounds": 5,
        "strategy": {"name": "fedavg"},
        "data": {"name": "benchmarks.data:class_images", "num_train": 10_000, "num_test": 500, "strength": 1.0},
        "partition": {"name": "iid", "num_clients": 200},
        "model": {"name": "benchmarks.networks:pfl_cnn"},
        "server": {"cohort_size": 50},
        "client": {"local_epochs": 1, "batch_size": 10, "lr": 0.05, "optimizer": {"momentum": 0.0}},
    },
    network="pfl_cnn",
    min_accuracy=0.5,
)
