"""The `fedsign condense` and `fedsign tune learn` commands: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsign.errors import ConfigError
from simulations.options import JsonOption, NumbersOption, SetOption, ShowConfigOption, Stopped, stoppable
from simulations.printing import print_analysis, print_json, print_table


def condense(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file; default: digits to one image per class, by (FG)²U."),
    ] = None,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; default: condensations/NAME.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="CONDENSATION", help="Resume the condensation in this folder.")
    ] = None,
    show_config: ShowConfigOption = False,
    json: JsonOption = False,
) -> None:
    """Condense a data set: learn a few images that replace all of them in training."""
    from fedsign.bilevel import settings
    from simulations.bilevel import condensing

    if resume is not None:
        if config is not None or overrides or out is not None:
            raise ConfigError("--resume goes on with a condensation's own configuration and folder: drop the others.")
        with _resumable(resume):
            records, written = condensing.resume(resume)
    else:
        condensation = settings.load(config, overrides or [])
        if show_config:
            typer.echo(condensation.to_toml(), nl=False)
            return
        folder = out or Path("condensations") / condensation.name
        with _resumable(folder):
            records, written = condensing.condense(condensation, folder)
    start, accuracy = (records[at]["accuracy"] for at in (0, -1))
    if json:
        print_json({"accuracy": accuracy, "lines": records, "files": [str(path) for path in written]})
        return
    print_table([{"accuracy": f"{accuracy:.4f}", "at the start": f"{start:.4f}", "steps": len(records) - 1}])
    for path in written:
        typer.echo(path)


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    from simulations.bilevel.condensing import CONFIG

    try:
        yield
    except KeyboardInterrupt:
        hint = f"; resume with: fedsign condense --resume {shlex.quote(str(folder))}"
        raise Stopped(f"stopped{hint if (folder / CONFIG).exists() else '.'}") from None


def learn(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="SETTING...",
            help=(
                "client.lr, client.weight_decay, aggregation.weights, or a numeric setting of the strategy, "
                "such as strategy.gamma."
            ),
        ),
    ],
    config: Annotated[Path | None, typer.Option(help="TOML file; default: FedAvg on digits.")] = None,
    overrides: SetOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of hypergradient steps.")] = 30,
    rounds: Annotated[
        int, typer.Option(min=0, help="Rounds per step, from the initial model; 0: the experiment's.")
    ] = 0,
    lr: Annotated[
        float, typer.Option(min=0, help="Learning rate of Adam on the (approximate) logarithms of the settings.")
    ] = 0.1,
    method: Annotated[
        str, typer.Option(metavar="METHOD", help="Hypergradient method (see fedsign list hypergradients).")
    ] = "forward_exact",
    out: Annotated[Path | None, typer.Option(help="Output folder; default: tuning/NAME-learned.")] = None,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print only the experiment with the learned settings, as TOML.")
    ] = False,
    json: NumbersOption = False,
) -> None:
    """Learn hyperparameters by gradients through whole rounds, on held-out samples of the server."""
    from fedsign import config as configs
    from fedsign.report.analysis import check_folder
    from simulations.bilevel import learning

    if toml and json:
        raise ConfigError("--toml and --json were both given; expected one of them.")
    experiment = configs.load(config, overrides or [])
    options = learning.Options(names=tuple(names), steps=steps, rounds=rounds, lr=lr, method=method)
    folder = (out or Path("tuning") / f"{experiment.run_name}-learned").expanduser()
    check_folder(folder, "learned")
    with stoppable("the steps so far"):
        found = learning.learn(experiment, options, keep=folder)
    learned = learning.learned_config(experiment, found).to_toml()
    written = found.write(folder, learned=learned)
    if toml:
        typer.echo(learned, nl=False)
        return
    loss, file = found.facts["loss"], written[-1]
    remark = f"validation loss {found.facts['loss_before']:.4f} before, {loss:.4f} after\ntoml    {file}"
    print_analysis(found, written, _row, remark, as_json=json)


def _row(row: Any) -> dict[str, str]:
    def shown(value: Any) -> str:
        return " ".join(f"{each:.4g}" for each in (value if isinstance(value, list) else [value]))

    return {"setting": row["setting"], "before": shown(row["before"]), "learned": shown(row["learned"])}
