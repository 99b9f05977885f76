"""`fedsign estimate memory`: what it was asked for, and what it prints.

Like the command line itself, importing this imports neither torch nor Flower nor NumPy.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from simulations.options import NumbersOption, words
from simulations.printing import escaped, print_json

_WIDEST = 100_000  # columns


def memory(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|CONFIG.JSON",
            help="llama-2-7b (without anything else), llama-2-70b, mistral-7b, tinyllama, gpt2-small, or a config.json of Hugging Face's.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="An experiment's TOML file, in place of --model.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of an experiment, such as model.depth=12; may be repeated."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="full, lora, galore, lisa (E+H+2L), or E+H+nL with n blocks at a time; without it, all that the model can take.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples in a step; without it 1, or the experiment's.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="In a row, of a language model by name; without it 1024.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of weights and activations: bf16, float16 or float32; without it bf16, or float32 for an experiment."
        ),
    ] = None,
    gradient_dtype: Annotated[str | None, typer.Option(help="Without it, as --dtype.")] = None,
    state_dtype: Annotated[str | None, typer.Option(help="Of the optimiser's moments; without it, as --dtype.")] = None,
    masters: Annotated[
        bool, typer.Option("--masters", help="Mixed precision: float32 copies of what is trained, and float32 moments.")
    ] = False,
    rank: Annotated[int, typer.Option(min=1, help="Of LoRA's adapters and GaLore's projections.")] = 128,
    lora_dropout: Annotated[float, typer.Option(min=0.0, max=0.99, help="Of what adapters read.")] = 0.0,
    attention: Annotated[
        str, typer.Option(help="fused, as flash attention; math keeps tokens x tokens weights for each head.")
    ] = "fused",
    adamw: Annotated[
        str,
        typer.Option(help="fused takes nothing for itself; foreach copies of all that is trained; loop of one tensor."),
    ] = "fused",
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Keep only what flows between blocks, and compute the rest again.")
    ] = False,
    card: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What it has to fit into, such as 24GB (10^9 bytes) or 24GiB.")
    ] = None,
    devices: Annotated[
        int, typer.Option(min=1, help="Over which the blocks are shared out; the card is each one's.")
    ] = 1,
    kernels: Annotated[
        str | None, typer.Option(help="Of a cuda or a cpu device; without it cuda, or what --measure measures on.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Take a real step of each method that fits, on a GPU or else on the CPU.")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw stacked bars into this file.")] = None,
    json: NumbersOption = False,
) -> None:
    """Estimate a training step's memory from shapes alone: weights, gradients, optimiser, activations, under each method."""
    from simulations.memory import estimate as estimates

    asked = estimates.Asked(
        model=model,
        config=config,
        overrides=overrides or [],
        methods=None if methods is None else words(methods),
        batch=batch,
        tokens=tokens,
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        state_dtype=state_dtype,
        masters=masters,
        rank=rank,
        lora_dropout=lora_dropout,
        attention=attention,
        adamw=adamw,
        checkpoint=checkpoint,
        card=card,
        devices=devices,
        kernels=kernels,
        measure=measure,
        out=out,
    )
    found = estimates.look(asked)
    if out is not None:
        estimates.draw(found, out)
    if json:
        print_json(found.as_json())
        return
    _print(found)
    if out is not None:
        Console(soft_wrap=True, highlight=False).print(f"svg     {escaped(str(out))}")


def _print(found: Any) -> None:
    from fedsign.report.wording import byte_count

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escaped(found.title)}[/], {found.num_parameters:,} parameters")
    table = Table(box=None, padding=(0, 2, 0, 0))
    columns = ["method", "trained", "weights", "gradients", "optimiser", "activations", "peak", "in"]
    columns += ["a device"] * found.has_devices + [escaped(found.card_name)] * bool(found.card_name)
    columns += ["measured static", "measured peak"] * found.is_measured
    for column in columns:
        table.add_column(column, justify="left" if column in ("method", "in") else "right", no_wrap=True)
    for row in found.rows:
        each = row.estimate
        sizes = (
            each.static.weights,
            each.static.gradients,
            each.static.states,
            each.activations,
            each.peak.total_bytes,
        )
        cells = [escaped(each.method), _count(each.num_trained), *map(byte_count, sizes), each.peak.phase]
        cells += [byte_count(each.largest.total_bytes)] * found.has_devices
        cells += [("fits" if row.fits else "[red]does not fit[/]")] * bool(found.card_name)
        cells += _measured(row.measured) if found.is_measured else []
        table.add_row(*cells)
    needed = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    Console(soft_wrap=True, highlight=False, width=max(console.width, needed)).print(table)
    for row in found.rows:
        if row.measured is not None and row.measured.refused:
            console.print(f"{escaped(row.estimate.method)} was not measured: {escaped(row.measured.refused)}.")
    console.print(escaped(found.note), style="dim")


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1_000_000 else f"{number:,}"


def _measured(measured: Any) -> list[str]:
    from fedsign.report.wording import byte_count

    if measured is None or measured.refused:
        return ["-", "-"]
    return [byte_count(measured.static), byte_count(measured.peak)]
