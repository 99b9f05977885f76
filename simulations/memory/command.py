"""The `fedsign estimate memory` command: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table

from fedsign.errors import ConfigError
from fedsign.report import figures
from simulations.options import NumbersOption, stoppable, words
from simulations.printing import escaped, print_json, print_wide
from simulations.sharding.quantities import bytes_of

DEFAULT_MODEL = "llama-2-7b"


def memory(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|CONFIG.JSON",
            help=(
                "llama-2-7b (default), llama-2-70b, mistral-7b, tinyllama, gpt2-small, or a Hugging Face config.json."
            ),
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of an experiment, instead of --model.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a setting of the experiment, such as model.depth=12; repeatable.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help=(
                "full, lora, galore, lisa (E+H+2L), or E+H+nL with n blocks at a time; default: all that fit the model."
            ),
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size; default: 1, or the experiment's.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Sequence length of a named language model; default: 1024.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type of weights and activations: bf16, float16, or float32; default: bf16, or float32 for "
            "an experiment."
        ),
    ] = None,
    gradient_dtype: Annotated[str | None, typer.Option(help="Type of gradients; default: --dtype.")] = None,
    state_dtype: Annotated[str | None, typer.Option(help="Type of the optimizer's moments; default: --dtype.")] = None,
    masters: Annotated[
        bool, typer.Option("--masters", help="Mixed precision: float32 master weights and moments.")
    ] = False,
    rank: Annotated[int, typer.Option(min=1, help="Rank of LoRA adapters and GaLore projections.")] = 128,
    lora_dropout: Annotated[float, typer.Option(min=0.0, max=0.99, help="Dropout on the adapters' inputs.")] = 0.0,
    attention: Annotated[
        str, typer.Option(help="fused, such as flash attention; math materializes the attention matrix of each head.")
    ] = "fused",
    adamw: Annotated[
        str,
        typer.Option(
            help="Implementation of AdamW: fused (no temporaries), foreach (temporaries for all "
            "trained parameters), or loop (for one tensor)."
        ),
    ] = "fused",
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Activation checkpointing: keep block inputs and recompute the rest.")
    ] = False,
    card: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the device, such as 24GB (10^9 bytes) or 24GiB.")
    ] = None,
    devices: Annotated[
        int, typer.Option(min=1, help="Number of devices that the blocks are spread over, each with --card.")
    ] = 1,
    kernels: Annotated[
        str | None, typer.Option(help="Kernels of a cuda or cpu device; default: cuda, or the device of --measure.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Run a real step of each method that fits, on a GPU if there is one, else on the CPU."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a stacked bar chart to this file: .svg, .pdf, or .png.")
    ] = None,
    json: NumbersOption = False,
) -> None:
    """Estimate a training step's memory from shapes alone, by method: weights, gradients, optimizer, activations."""
    import torch

    from fedsign.config import load
    from fedsign.memory.estimate import Setting, estimate
    from fedsign.memory.measure import measure as taken
    from fedsign.memory.methods import methods_of
    from fedsign.memory.step import AdamKind, AttentionKind, Device
    from simulations.memory import estimate as estimates
    from simulations.progress import display

    is_named = config is None and not overrides
    if model is not None and not is_named:
        raise ConfigError(
            "--model was given beside --config or --set; an experiment has a model of its own: give one of the two."
        )
    if measure and devices > 1:
        raise ConfigError(
            f"--measure was given with --devices {devices}, but a step is measured on one device; leave one of the "
            "two out."
        )
    if masters and state_dtype not in (None, "float32"):
        raise ConfigError(
            f"--masters was given with --state-dtype {state_dtype}; copies for the optimizer are float32, and so are "
            "their moments: leave one of the two out."
        )
    if out is not None:
        figures.check_name(out)
    card_bytes = None if card is None else bytes_of(card, option="--card")
    # only for --measure: an estimate runs on the meta device
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if is_named:
        dtype = dtype or "bf16"
        work = estimates.of_named(model or DEFAULT_MODEL, batch=batch, tokens=tokens, checkpoint=checkpoint)
    else:
        experiment = load(config, overrides or [])
        dtype = dtype or str(experiment.model.settings.get("dtype", "float32"))
        work = estimates.of_experiment(experiment, batch=batch, tokens=tokens, checkpoint=checkpoint)
    setting = Setting(
        weights=estimates.dtype_of("--dtype", dtype),
        gradients=estimates.dtype_of("--gradient-dtype", gradient_dtype or dtype),
        states=estimates.dtype_of("--state-dtype", "float32" if masters else state_dtype or dtype),
        masters=masters,
        # an estimate is usually asked for a GPU that is not here; a measurement has to fit this machine's kernels
        device=estimates.chosen("--kernels", kernels or (here.type if measure else "cuda"), get_args(Device)),
        attention=estimates.chosen("--attention", attention, get_args(AttentionKind)),
        adam=estimates.chosen("--adamw", adamw, get_args(AdamKind)),
        devices=devices,
    )
    names = estimates.possible_methods(work) if methods is None else words(methods)
    if not names:
        raise ConfigError("--methods names none; expected names such as full,lora,E+H+2L.")
    rows, chosen = [], methods_of(names, rank=rank, dropout=lora_dropout)
    with stoppable(), display(len(chosen), unit="method") as shown:
        for method in chosen:
            estimated = estimate(work, method, setting)
            # `largest`: of several devices the fullest one decides
            fits = None if card_bytes is None else estimated.largest.total_bytes <= card_bytes
            measured = taken(work, method, setting, estimated, here) if measure else None
            rows.append(replace(estimated, fits=fits, measured=measured))
            shown.show(len(rows))
    title = f"{work.title}, {dtype}{' with float32 masters' if masters else ''}"
    # of the model itself, the same for every method: adapters are not counted
    num_parameters = rows[0].num_parameters
    if out is not None:
        chart = estimates.chart_of(rows, title, card_bytes)
        figures.write(partial(figures.draw, chart, width=figures.PAGE, titled=True), out)
    if json:
        methods_json = [row.as_json() for row in rows]
        print_json(
            {"title": title, "num_parameters": num_parameters, "card_bytes": card_bytes, "methods": methods_json}
        )
        return
    where = f"measured on {'the GPU' if here.type == 'cuda' else 'the CPU'}; " if measure else ""
    how = f"{where}{setting.device} kernels, {attention} attention, {adamw} AdamW"
    _print_rows(rows, f"[bold]{escaped(title)}[/], {num_parameters:,} parameters", how, card)
    if out is not None:
        Console(soft_wrap=True, highlight=False).print(f"picture {escaped(str(out))}")


def _print_rows(rows: list[Any], heading: str, how: str, card: str | None) -> None:
    """Print the table, and what the estimate leaves out."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(heading)
    print_wide(_table(rows, card))
    for row in rows:
        if row.measured is not None and row.measured.refused:
            console.print(f"{escaped(row.method)} was not measured: {escaped(row.measured.refused)}.")
    console.print(
        (
            f"{how}. The peak is below the sum: gradients come while activations go. A device's context and "
            "libraries are not in it."
        ),
        style="dim",
    )


def _table(rows: list[Any], card: str | None) -> Table:
    from fedsign.report.wording import byte_count

    has_devices, is_measured = bool(rows[0].of_devices), rows[0].measured is not None
    columns = ["method", "trained", "weights", "gradients", "optimizer", "activations", "peak", "in"]
    columns += ["a device"] * has_devices + [escaped(card or "")] * bool(card)
    columns += ["measured static", "measured peak"] * is_measured
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("method", "in") else "right", no_wrap=True)
    for row in rows:
        parts = (row.weights_bytes, row.gradients_bytes, row.optimizer_bytes, row.activations_bytes)
        cells = [escaped(row.method), _count(row.num_trained), *map(byte_count, (*parts, row.peak.total_bytes))]
        cells.append(row.peak.phase)
        cells += [byte_count(row.largest.total_bytes)] * has_devices
        cells += [("fits" if row.fits else "[red]does not fit[/]")] * bool(card)
        if is_measured:
            measured = row.measured
            cells += ["-", "-"] if measured.refused else map(byte_count, (measured.static, measured.peak))
        table.add_row(*cells)
    return table


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1_000_000 else f"{number:,}"
