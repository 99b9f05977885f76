"""`fedsign analyse parameterisation` and `coordinates`: what they were asked for, and what they print.

Like the command line itself, importing this imports neither torch nor Flower nor NumPy.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from simulations.analyses.command import JsonOption, app, numbers, print_files, words
from simulations.printing import escaped, print_json, print_table

ConfigArgument = Annotated[
    Path | None, typer.Argument(help="A TOML file; without it, the default experiment: FedSign on digits.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, such as client.lr=0.1; may be repeated."),
]


@app.command()
def parameterisation(config: ConfigArgument = None, overrides: Overrides = None, json: JsonOption = False) -> None:
    """Show what [parameterisation] gives each tensor of an experiment's model, and why."""
    from fedsign import config as configs
    from simulations.sparsity import parameterisation as looking

    found = looking.look(configs.load(config, overrides or []))
    if json:
        print_json(found)
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escaped(found['scheme'])}[/]: {escaped(found['sentence'])}")
    print_table([_tensor_row(row) for row in found["tensors"]])
    passes = [{"pass of": row["module"], "times": f"{row['factor']:.4g}", "why": row["why"]} for row in found["passes"]]
    print_table(passes)


def _tensor_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "tensor": row["name"],
        "shape": "x".join(map(str, row["shape"])),
        "density": f"{row['density']:g}",
        "start": "" if row["init_std"] is None else f"{row['init_std']:.4g}",
        "rate": f"{row['rate']:.4g}",
        "decay": f"{row['weight_decay']:.4g}",
        "why": row["why"],
    }


@app.command()
def coordinates(
    config: ConfigArgument = None,
    schemes: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...", help="sp, mup, smupar; smupar-init and smupar-rate correct one of the two."
        ),
    ] = "sp,mup,smupar",
    densities: Annotated[str, typer.Option(metavar="D,D,...", help="Ratios are to the first.")] = "1,0.25,0.0625",
    seeds: Annotated[int, typer.Option(help="How many, from the experiment's on.")] = 3,
    steps: Annotated[int, typer.Option(help="Of training, on all clients' samples.")] = 10,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; without it, ./analysis/NAME.")] = None,
    json: JsonOption = False,
) -> None:
    """Measure how large activations are while training begins, by step and density, under several parameterisations."""
    from fedsign import config as configs
    from fedsign.report.analysis import write_found
    from fedsign.report.coordinate_plots import coordinate_figures
    from simulations.sparsity import coordinates as looking

    asked = looking.Asked(schemes=words(schemes), densities=numbers("--densities", densities), seeds=seeds, steps=steps)
    found = looking.look(configs.load(config, overrides or []), asked)
    written = write_found(found, out or Path("analysis") / found.name, coordinate_figures(found))
    if json:
        print_json(found.as_json() | {"files": [str(file) for file in written]})
        return
    print_table([_scheme_row(row) for row in found.summary])
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        "ratio: to the first density, smallest and largest over seeds and modules; change: of the activations by the first step.",
        style="dim",
    )
    print_files(written, None)


def _scheme_row(row: Any) -> dict[str, Any]:
    def between(what: str) -> str:
        return f"{row[f'{what}_low']:.3g} .. {row[f'{what}_high']:.3g}"

    return {
        "scheme": row["scheme"],
        "density": f"{row['density']:g}",
        "mean |activation| at the end": f"{row['size_at_end']:.4g}",
        "ratio at the start": between("start"),
        "at the end": between("end"),
        "of the change": between("change"),
    }


__all__ = ["app"]
