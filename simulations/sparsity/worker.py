"""A process that plays cells of a sweep."""

from pathlib import Path

from fedsign.config import from_toml
from fedsign.transport.connection import Connection, Message
from simulations.jobs import answer_all
from simulations.sparsity.cells import write_loss
from simulations.sparsity.training import Trainings


def main(parent: Connection) -> None:
    """Play what is asked for; a cell's file is whole, or not there."""
    trainings = Trainings()

    def play(asked: Message) -> None:
        loss = trainings.loss(from_toml(asked["config"]), steps=asked["steps"], samples=asked["samples"])
        write_loss(Path(asked["path"]), loss, asked["words"])

    answer_all(parent, play)
