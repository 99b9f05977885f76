"""The `fedsign estimate memory` command: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

from collections.abc import Mapping, Sequence
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
    config: Annotated[
        Path | None, typer.Option(metavar="FILE|RUN", help="An experiment, as TOML or as a run's folder.")
    ] = None,
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
    state_dtype: Annotated[
        str | None, typer.Option(help="Type of the optimizer's moments, or 8bit; default: --dtype.")
    ] = None,
    masters: Annotated[
        bool,
        typer.Option(
            "--masters",
            help="Mixed precision: float32 master weights and moments; default: as the experiment says.",
        ),
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(min=1, help="Rank of LoRA adapters and GaLore projections; default: 128, or the experiment's."),
    ] = None,
    lora_dropout: Annotated[float, typer.Option(min=0.0, max=0.99, help="Dropout on the adapters' inputs.")] = 0.0,
    attention: Annotated[
        str | None,
        typer.Option(
            help="fused, such as flash attention (default); math materializes the attention matrix of each head."
        ),
    ] = None,
    adamw: Annotated[
        str | None,
        typer.Option(
            help="Implementation of AdamW: fused (no temporaries; default), foreach (temporaries for all "
            "trained parameters), or loop (for one tensor)."
        ),
    ] = None,
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
    """Estimate the memory of an experiment's whole run, or of a training step by method, from shapes alone."""
    import torch

    from fedsign.config import load
    from fedsign.memory.estimate import Setting
    from fedsign.memory.methods import methods_of
    from fedsign.memory.step import AdamKind, AttentionKind, Device
    from simulations.memory import estimate as estimates

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
    if masters and state_dtype not in (None, "float32", "8bit"):
        raise ConfigError(
            f"--masters was given with --state-dtype {state_dtype}; copies for the optimizer are float32, and their "
            "moments are float32 or 8bit: leave one of the two out."
        )
    if out is not None:
        figures.check_name(out)
    card_bytes = None if card is None else bytes_of(card, option="--card")
    if is_named:
        dtype = dtype or "bf16"
        work = estimates.of_named(model or DEFAULT_MODEL, batch=batch, tokens=tokens, checkpoint=checkpoint)
    else:
        if config is not None and config.is_dir():  # a run
            config = config / "config.toml"
        experiment = load(config, overrides or [])
        of_a_step = (methods, batch, tokens, dtype, gradient_dtype, state_dtype, rank, attention, adamw, kernels, out)
        if all(each is None for each in of_a_step) and not (masters or checkpoint or lora_dropout or devices > 1):
            with stoppable():
                _of_run(experiment, card=card_bytes, measure=measure, json=json)
            return
        rank = rank or experiment.client.optimizer.settings.get("rank")
        dtype = dtype or str(experiment.model.settings.get("dtype", "float32"))
        work = estimates.of_experiment(experiment, batch=batch, tokens=tokens, checkpoint=checkpoint)
        if state_dtype is None and not masters:
            masters, state_dtype = estimates.optimizer_types(experiment, dtype)
    # only for --measure: an estimate runs on the meta device
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting = Setting(
        weights=estimates.dtype_of("--dtype", dtype),
        gradients=estimates.dtype_of("--gradient-dtype", gradient_dtype or dtype),
        states=estimates.moments_of("--state-dtype", state_dtype or ("float32" if masters else dtype)),
        masters=masters,
        # an estimate is usually asked for a GPU that is not here; a measurement has to fit this machine's kernels
        device=estimates.chosen("--kernels", kernels or (here.type if measure else "cuda"), get_args(Device)),
        attention=estimates.chosen("--attention", attention or "fused", get_args(AttentionKind)),
        adam=estimates.chosen("--adamw", adamw or "fused", get_args(AdamKind)),
        devices=devices,
    )
    names = estimates.possible_methods(work) if methods is None else words(methods)
    if not names:
        raise ConfigError("--methods names none; expected names such as full,lora,E+H+2L.")
    chosen = methods_of(names, rank=rank or 128, dropout=lora_dropout)
    rows = _estimated(work, chosen, setting, card_bytes, here if measure else None)
    title = f"{work.title}, {dtype}{' with float32 masters' if masters else ''}"
    if out is not None:
        chart = estimates.chart_of(rows, title, card_bytes)
        figures.write_picture(partial(figures.draw, chart, width=figures.PAGE, titled=True), out)
    # of the model itself, the same for every method: adapters are not counted
    num_parameters = rows[0].num_parameters
    if json:
        methods_json = [row.as_json() for row in rows]
        print_json(
            {"title": title, "num_parameters": num_parameters, "card_bytes": card_bytes, "methods": methods_json}
        )
        return
    where = f"measured on {'the GPU' if here.type == 'cuda' else 'the CPU'}; " if measure else ""
    how = f"{where}{setting.device} kernels, {setting.attention} attention, {setting.adam} AdamW"
    _print_rows(rows, f"[bold]{escaped(title)}[/], {num_parameters:,} parameters", how, card)
    if out is not None:
        Console(soft_wrap=True, highlight=False).print(f"picture {escaped(str(out))}")


def _estimated(work: Any, methods: Sequence[Any], setting: Any, card: int | None, device: Any) -> list[Any]:
    """Estimate a step of each method, and measure it if a device is given."""
    from fedsign.memory.estimate import estimate
    from fedsign.memory.measure import measure
    from simulations.progress import display

    rows: list[Any] = []
    with stoppable(), display(len(methods), unit="method") as shown:
        for method in methods:
            row = estimate(work, method, setting)
            # `largest`: of several devices the fullest one decides
            fits = None if card is None else row.largest.total_bytes <= card
            measured = None if device is None else measure(work, method, setting, row, device)
            rows.append(replace(row, fits=fits, measured=measured))
            shown.show(len(rows))
    return rows


def _of_run(experiment: Any, *, card: int | None, measure: bool, json: bool) -> None:
    """Print the account of a whole run."""
    from fedsign.report.wording import byte_count
    from fedsign.workload import Workload
    from simulations.memory.account import account
    from simulations.memory.measured import measured_peaks
    from simulations.memory.phases import GPU, UnaccountedError

    try:
        found = account(Workload(experiment))
    except UnaccountedError as error:
        if not measure:
            raise
        _print_measured(str(error), measured_peaks(experiment, has_several=True), card=card, json=json)
        return
    has_several = len(found.processes) > 1
    if measure:
        found = found.measured(measured_peaks(experiment, has_several=has_several))
    fits = _fits(found.peak_bytes, card)
    if json:
        print_json({**found.as_json(), **fits})
        return
    console = Console(soft_wrap=True, highlight=False)
    where = ", on the GPU" if found.processes[0].name == GPU else ""
    frozen = f" and {found.num_frozen:,} frozen ones" if found.num_frozen else ""
    trainable = f"{found.num_parameters - found.num_frozen:,} trainable parameters"
    console.print(f"[bold]{escaped(found.title)}[/], {trainable}{frozen}{where}")
    for process in found.processes:
        if has_several:
            console.print(
                f"[bold]{process.name if process.count == 1 else f'each of {process.count} {process.name}s'}[/]"
            )
        _print_process(process, console)
    if has_several:
        console.print(f"together  {byte_count(found.peak_bytes)}; what processes share counts once")
    _print_fits(fits, console)


def _print_measured(reason: str, peaks: Mapping[str, int], *, card: int | None, json: bool) -> None:
    """Print why a run is not accounted for, and the peak of each of its processes."""
    from fedsign.report.wording import byte_count

    fits = _fits(sum(peaks.values()), card)
    if json:
        print_json({"reason": reason, "measured_bytes": dict(peaks), **fits})
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(escaped(reason))
    for name, peak in peaks.items():
        console.print(f"measured  {byte_count(peak)}, {name}")
    _print_fits(fits, console)


def _fits(num_bytes: int, card: int | None) -> dict[str, Any]:
    return {} if card is None else {"card_bytes": card, "fits": num_bytes <= card}


def _print_fits(fits: Mapping[str, Any], console: Console) -> None:
    if fits:
        console.print("fits" if fits["fits"] else "[red]does not fit[/]")


def _print_process(process: Any, console: Console) -> None:
    """Print the phases of a process, and its peak."""
    from fedsign.report.wording import byte_count
    from simulations.memory.phases import PARTS

    parts = [part for part in PARTS if any(phase.parts[part] for phase in process.phases)]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", *parts, "total"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for phase in process.phases:
        sizes = (*(phase.parts[part] for part in parts), phase.total_bytes)
        table.add_row(phase.name, *(byte_count(size) if size else "-" for size in sizes))
    print_wide(table)
    peak, measured = process.peak.total_bytes, process.measured_bytes
    console.print(f"peak      {byte_count(peak)}, in {process.peak.name}")
    if measured is not None:
        console.print(f"measured  {byte_count(measured)}: estimate / measured {peak / measured:.2f}")


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
