"""Who plays: a table of players.  A new row is one value here, and one file if it is played in a new way.

`module` is a file of this folder, started as `python -m benchmarks.players.<module>` in the player's own Python.  `settings`
are handed to it; for `ours` they are changes to the work's experiment.  `environment` names the requirements in
benchmarks/peers; None is the Python of FedSign itself.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """One row of every table.  `refused` names works that it cannot play, with the reason.

    `works` are those that it is for: a player of another precision has no place where all have to end at the same loss.
    """

    name: str
    title: str
    module: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None
    one_process: bool = True  # then its processor time is all of it, and can be compared too
    refused: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    works: tuple[str, ...] = ()  # none: all


BARE = "bare_loop"
FLOOR = "floor"

LARGE_MODELS = ("w2", "silo", "silo-large")

PLAYERS: tuple[Player, ...] = (
    Player(name=BARE, title="bare PyTorch loop", module="bare_loop"),
    Player(name=FLOOR, title="floor", module="floor"),
    Player(name="sequential", title="ours, sequential", module="ours", settings={"client": {"path": "sequential"}}),
    Player(name="cohort", title="ours, cohort", module="ours", settings={"client": {"path": "cohort"}}),
    Player(
        name="workers_2",
        title="ours, 2 workers",
        module="ours",
        settings={"client": {"path": "sequential"}, "engine": {"workers": 2}},
        one_process=False,
        devices=("cpu",),
        works=LARGE_MODELS,
    ),
    Player(
        name="bf16",
        title="ours, bf16",
        module="ours",
        settings={"client": {"path": "sequential"}, "engine": {"precision": "bf16"}},
        works=LARGE_MODELS,
    ),
    Player(
        name="bf16_workers_2",
        title="ours, 2 x bf16",
        module="ours",
        settings={"client": {"path": "sequential"}, "engine": {"precision": "bf16", "workers": 2}},
        one_process=False,
        devices=("cpu",),
        works=LARGE_MODELS,
    ),
    Player(
        name="tf32",
        title="ours, TF32",
        module="ours",
        settings={"client": {"path": "sequential"}, "engine": {"tf32": True}},
        devices=("cuda",),
        works=LARGE_MODELS,
    ),
    Player(name="pfl_1", title="pfl-research", module="pfl_research", environment="pfl", settings={"processes": 1}),
    Player(
        name="pfl_2",
        title="pfl, 2 processes",
        module="pfl_research",
        environment="pfl",
        settings={"processes": 2},
        one_process=False,
    ),
    Player(name="fedlab", title="FedLab, serial", module="fedlab_serial", environment="fedlab"),
    Player(
        name="flower_ray",
        title="Flower on Ray, 2",
        module="flower_ray",
        environment="flower",
        settings={"actors": 2},
        one_process=False,
    ),
)


def player_named(name: str) -> Player:
    """The row of a name."""
    found = {player.name: player for player in PLAYERS}
    if name not in found:
        raise SystemExit(f"there is no player '{name}'; expected is one of {', '.join(found)}.")
    return found[name]
