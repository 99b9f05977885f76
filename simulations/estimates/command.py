"""`fedsign estimate ...`: what it was asked for, and what it prints.

Like the command line itself, importing this imports neither torch nor Flower nor NumPy.
"""

import typer

from simulations.memory.command import memory
from simulations.sharding.command import sharding

app = typer.Typer(
    name="estimate",
    help="Say what a training will take, before it is run.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def group() -> None:
    """Keep commands of their own."""


app.command()(memory)
app.command()(sharding)
