"""Jobs that leave a reference cycle behind, and report how many of the earlier ones are still alive."""

import gc
import weakref

from fedsign.errors import FedSignError
from fedsign.transport.connection import Connection, Message
from simulations.jobs import answer_all


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def main(parent: Connection) -> None:
    gc.disable()
    made: list[weakref.ref[_Cycle]] = []

    def run_job(asked: Message) -> None:
        alive = sum(each() is not None for each in made)
        made.append(weakref.ref(_Cycle()))
        raise FedSignError(f"{alive} alive")

    answer_all(parent, run_job)
