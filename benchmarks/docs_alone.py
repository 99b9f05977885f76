"""Sections of docs/benchmarks.md on FedSign alone, without competitors."""

from collections.abc import Callable, Iterator

from benchmarks.tables import MISSING, Result, measured_on, metrics_of, ms, table
from fedsign.report.wording import figure

_DOORS_TARGET = 1.05
_TARGET_S = 1.5  # startup beyond the imports
_REHEARSAL_TARGET = 1.05  # start-up with a rehearsal relative to one without
_LISA_TARGET = 0.25  # maximum of LISA's optimizer states and gradients, relative to full fine-tuning
_SPARSE_TARGET = 1.1  # maximum relative to a dense client's step
_HYPERGRADIENTS_TARGET = 2.0  # maximum of our step relative to a hand-written one
_BROWSING_TARGET_S = 1.0  # an answer of `fedsign ui`
_CHECKPOINT_TARGET = 1.1  # maximum relative to a checkpoint without digests
_MEMORY_TARGET = 0.1  # deviation of an estimate from the measured peak
_LISA_PROGRAM = 0.5e9  # bytes that a run of LISA is meant to take for libraries, data, and what an allocator wastes
_GAP = 1.25  # ratio of two predictions
COMPARED = (
    ("GGG flat", "IIG", 4.0),
    ("FSDP2", "IIG", 2.0),
    ("FSDP2 ZeRO-2, gradients once", "NII", 1.0),
    ("FSDP2 HSDP", "III", 1.0),
)
"""The slower variant, the faster one, and the minimum ratio."""
UNSHAPED = "unshaped"  # instead of a rate


def _startup(result: Result) -> str:
    beyond = result["beyond_imports_s"]
    verdict = "within" if beyond["median"] <= _TARGET_S else "**above**"
    rows = [
        [title, f"{result[key]['median']:.2f}", f"{result[key]['lowest']:.2f}-{result[key]['highest']:.2f}"]
        for title, key in (
            ("`fedsign run`, to the end of the first round", "command_s"),
            (f"`python -c '{result['imports']}'`", "imports_s"),
            ("**beyond the imports**", "beyond_imports_s"),
            ("processor time beyond the imports, to the end of the command", "cpu_beyond_imports_s"),
            ("completion of a setting in bash", "completion_s"),
        )
        if key in result
    ]
    share = ""
    if "rehearsal_ratio" in result:
        ratio = result["rehearsal_ratio"]
        share = (
            f" It takes {ratio['median']:.3f} times as long as without the rehearsal "
            f"({ratio['lowest']:.3f}-{ratio['highest']:.3f}); at most {_REHEARSAL_TARGET} is meant."
        )
    return _alone(
        "Start-up",
        "The default experiment, from the start of the command until the line of the first round is on disk; in turn "
        "with a Python that only imports what FedSign takes from torch, Flower and scikit-learn.",
        result,
        table(("", "s", "range"), rows, left=1),
        f"{beyond['median']:.2f} s, {verdict} the {_TARGET_S} s that it is meant to take.{share}",
    )


def _population(result: Result) -> str:
    """Startup, memory and rounds by number of clients."""
    head = ("", "clients", "start, s", "peak, MiB", "ms a round", "x the smallest", "range")
    rows = []
    for strategy, by_size in result["strategies"].items():
        for size, figures in by_size.items():
            ratio = figures["ratio_to_smallest"]["wall_ms"]
            rows.append(
                [
                    strategy,
                    f"{int(size):,}",
                    f"{figures['start_s']['median']:.2f}",
                    f"{figures['peak_mib']['median']:,.0f}",
                    figure(figures["wall_ms"]["median"]),
                    f"{ratio['median']:.2f}",
                    f"{ratio['lowest']:.2f}-{ratio['highest']:.2f}",
                ]
            )
    return _alone(
        "A million clients",
        "W1's model and training with virtual clients (`partition.name = virtual`) on the cohort path, without "
        "client state (fedavg) and with it (feddyn), populations in turn. *start* is from the end of the imports to "
        "the end of the first round; a round is the mean one, checkpoints included. Of 1,000 clients all samples are "
        "drawn before the first round, for the facts about the split; of a larger population a round draws those of "
        "most of its clients itself, however many there are.",
        result,
        table(head, rows, left=1),
    )


def _checkpoint(result: Result) -> str:
    """Milliseconds with and without digests."""
    rows = []
    for name, row in result["checkpoints"].items():
        ratio = row["ratio"]
        cells = [figure(row[key]["median"]) for key in ("ours_ms", "plain_ms")]
        cells += [f"{ratio['median']:.3f}", f"{ratio['lowest']:.3f}-{ratio['highest']:.3f}"]
        rows.append([name, f"{row['num_parameters']:,}", *cells])
    worst = max(row["ratio"]["median"] for row in result["checkpoints"].values())
    verdict = "within" if worst <= _CHECKPOINT_TARGET else "**above**"
    return _alone(
        "Checkpoints",
        "A checkpoint with digests, forced to the disk, in turn with the same files without; for FedDyn with the "
        "server's state and the versions of 10,000 clients' states.",
        result,
        table(("", "parameters", "ms", "without, ms", "ratio", "range"), rows, left=1),
        f"At most {worst:.3f} times as long, {verdict} the {_CHECKPOINT_TARGET} that digests may cost.",
    )


def _soak(result: Result) -> str:
    """Sizes after the warm-up, and at the end."""
    rows = [
        [
            name,
            *(figure(values[when]) for when in ("before", "after", "largest")),
            f"{values['after'] / values['before']:.2f}",
        ]
        for name, values in result["grown"].items()
    ]
    happened = ", ".join(f"{count} times {way}" for way, count in sorted(result["happened"].items()))
    late = result["longest_collecting_s"] - result["round_timeout_s"]
    return _alone(
        "Sites that come and go",
        f"{result['rounds']:,} rounds of FedDyn on one SuperLink with TLS and three sites, which leave at seeded "
        f"times ({happened}) and come back, with Flower's pauses as short as in the tests. Medians over a tenth of "
        "the rounds, after a warm-up and at the end; folders without records and logs.",
        result,
        table(("", "after the warm-up", "at the end", "largest", "ratio"), rows, left=1),
        f"{result['took_s'] / 60:.0f} minutes, {result['missing_replies']:,} replies missing, none of which ended "
        f"the run. Collecting replies ended {late:.1f} s after `server.round_timeout_s` at the latest.",
    )


def _aggregation(result: Result) -> str:
    """Seconds, and memory by number of replies."""
    titles = {
        "in_place_sum": "sum in place",
        "ours": "**ours**, `WeightedMean`",
        "flower": "Flower's `aggregate_arrayrecords`",
    }
    peaks = result["peak_mb"]
    numbers = [*next(iter(peaks.values()))]
    rows = []
    for name, title in titles.items():
        ratio = result["ratio_to_in_place_sum"][name]
        cells = [ms(result["seconds"][name]["median"]), f"{ratio['median']:.2f}"]
        cells.append(f"{ratio['lowest']:.2f}-{ratio['highest']:.2f}")
        rows.append([title, *cells, *(f"{peaks[name][num]:,.0f}" if name in peaks else MISSING for num in numbers)])
    head = ("", "ms", "x the sum", "range", *(f"MB, {num} replies" for num in numbers))
    return _alone(
        "Aggregation",
        f"The mean of {result['num_replies']} replies of {result['mb']:.0f} MB each, in turn with a plain sum in "
        "place; and the peak of memory while more and more replies arrive one after another.",
        result,
        table(head, rows, left=1),
    )


def _analysis(result: Result) -> str:
    """Valleys and their baselines; rounds with and without sign recording."""
    titles = {
        "mlp": ("valley of the default MLP, 246 points on 360 samples", "a loop over the points", "loop"),
        "resnet20": ("curve of ResNet-20, 41 points on 2,000 images, statistics of 500", "the passes alone", "passes"),
    }
    rows = []
    for work, (title, other_title, other) in titles.items():
        seconds, ratio = result["seconds"][work], result["ratio"][work]
        cells = [f"{seconds['ours']['median']:.2f}", other_title, f"{seconds[other]['median']:.2f}"]
        rows.append([title, *cells, f"{ratio['median']:.2f}", f"{ratio['lowest']:.2f}-{ratio['highest']:.2f}"])
    watched = []
    for work, title in {"w1": "W1, cohort", "w2": "W2, sequential"}.items():
        on, off = (ms(result["round_ms"][work][state]["median"] / 1000) for state in ("on", "off"))
        more, ratio = result["signs_ms"][work], result["signs_ratio"][work]
        dispersion = f"{more['lowest']:.2f} to {more['highest']:.2f}"
        watched.append([title, off, on, f"{more['median']:.2f}", dispersion, f"{ratio['median']:.3f}"])
    return _alone(
        "Valleys and signs",
        "What it costs to look, in turn with what cannot be done without; and what a round takes with "
        "`results.signs`, in turn with one without.",
        result,
        table(("", "ours, s", "beside", "s", "ratio", "range"), rows, left=1),
        table(("", "off, ms", "on, ms", "more, ms", "range", "ratio"), watched, left=1),
    )


def _browsing(result: Result) -> str:
    """Answers of `fedsign ui`, and its memory."""
    titles = {
        "list": "the list, 100 runs by time",
        "filter": "the list with three conditions",
        "sort": "the list by best accuracy",
        "overlay": f"overlay of {result['num_overlaid']} runs, mean of 10 rounds",
        "differences": f"settings in which {result['num_overlaid']} runs differ",
    }
    rows = []
    for key, title in titles.items():
        wall, cpu = result["wall_ms"][key], result["cpu_ms"][key]
        cells = [f"{each['median']:.0f}" for each in (wall, cpu)]
        rows.append([title, cells[0], f"{wall['lowest']:.0f}-{wall['highest']:.0f}", cells[1]])
    slowest = max(each["median"] for each in result["wall_ms"].values()) / 1000
    verdict = "within" if slowest <= _BROWSING_TARGET_S else "**above**"
    mib = {key: f"{value:.0f} MiB" for key, value in result["mib"].items()}
    return _alone(
        "Browsing runs",
        f"`fedsign ui` over {result['num_runs']:,} generated runs of {result['num_rounds']:,} rounds: answers of the "
        "server to a client on the same machine. Each overlay shows other runs, read from their files.",
        result,
        table(("", "ms", "range", "of processor time"), rows, left=1),
        f"The slowest takes {slowest:.2f} s, {verdict} the {_BROWSING_TARGET_S:g} s that are meant. The first index "
        f"took {result['cold_s']:.0f} s, {result['cold_cpu_s']:.0f} s of processor time, while the page can be used; "
        f"it has {mib['index']}. With it, the first list after a restart takes {result['first_ms']:.0f} ms.",
        f"Memory: at most {mib['build']} while the index is built, {mib['start']} after a restart; {mib['warm']} after "
        f"each of these answers, {mib['after']} after 20 more of each.",
    )


def _engines(result: Result) -> str:
    """Seconds and bytes of a round by engine, and Flower's floor."""
    titles = {
        "in_process": ("in process", ""),
        "workers": ("in process, two workers", ""),
        "ray": ("Ray, two actors", "floor_ray"),
        "floor_ray": ("*floor: Flower on Ray, clients that do nothing*", ""),
        "superlink": ("SuperLink, four SuperNodes", "floor_superlink"),
        "floor_superlink": ("*floor: Flower's SuperLink and SuperNodes, clients that do nothing*", ""),
    }
    rows = []
    for model, num_parameters in result["models"].items():
        of_model = metrics_of(result)[model]
        for name, (title, floor) in titles.items():
            row = of_model[name]
            seconds = row["round_s"]
            ratio = f"{seconds['median'] / of_model[floor]['round_s']['median']:.2f}" if floor else ""
            dispersion = f"{figure(seconds['lowest'])}-{figure(seconds['highest'])}"
            loopback = "" if name in ("in_process", "workers") else f"{row['loopback_bytes']['median'] / 1e6:.1f}"
            rows.append(
                [
                    title, f"{num_parameters:,}", figure(seconds["median"]), dispersion, ratio,
                    figure(row["first_round_s"]["median"]), f"{row['payload_bytes'] / 1e6:.2f}", loopback,
                ]
            )  # fmt: skip
    return _alone(
        "Engines",
        "Four clients, one step each of an MLP on digits, so that what is measured is the way there and back. The "
        "floor of an engine is an app without torch and FedSign whose clients send back what they got, over Flower's "
        "own `send_and_receive`. *Tensors* are those of the round, both ways; *loopback* is what the machine "
        "counted, all hops between a SuperLink, its SuperNodes and their processes included. A SuperNode that finds "
        "no message sleeps three seconds, and looks for the reply of its client every half a second; Flower has no "
        "option for either. What it starts anew for every message, a process and its imports, a site of FedSign's "
        "keeps (`python -m clients.site`).",
        result,
        table(
            ("", "parameters", "s a round", "range", "x floor", "first round, s", "tensors, MB", "loopback, MB"),
            rows,
            left=1,
        ),
    )


def _large(result: Result) -> str:
    """Seconds and peak memory of a large model's round trip."""
    rows = []
    for precision, row in metrics_of(result).items():
        seconds, peaks = row["round_s"], row["peak_bytes"]
        size = row["bytes_down"]
        cells = [f"{peak / 1e9:.1f} ({peak / size:.1f} x)" for peak in peaks.values()]
        rows.append([precision, f"{size / 1e9:.2f}", f"{seconds['median']:.0f}", *cells])
    return _alone(
        "A large model",
        "An MLP of 248 million parameters to one client of a SuperLink and back, a step of SGD in between: seconds "
        "of the second round, and the peak memory of each process, in GB and in sizes of the model. A model in "
        "bfloat16 travels as such.",
        result,
        table(("", "GB each way", "s a round", *next(iter(metrics_of(result).values()))["peak_bytes"]), rows, left=1),
    )


def _memory(result: Result) -> str:
    """Estimated and measured peaks, a row for each model, a column for each method; then those of other runs."""
    cells: Result = result["cells"]
    several = {name: cell["processes"] for name, cell in cells.items() if "processes" in cell}
    by_process = [[name, *map(_peaks, each.values())] for name, each in several.items()]
    lisa = {of: cells.get(f"{of}, LISA, 285 M", {}) for of in ("Llama", "GPT-2", "GPT-NeoX", "ViT")}
    return _alone(
        "Memory of a run",
        "What `fedsign estimate memory` says of a whole run, and the peak of its resident memory, in GB: two rounds of "
        "one client, batches of one sample of 64 tokens or patches, in a process of its own, in float32 unless a type "
        "is given.",
        result,
        *_of_models(cells),
        "Of several processes, in four rounds: the server's, and the largest of those that train. What they share "
        "counts in each.",
        table(("Llama of `transformers`", "server", "worker or rank"), by_process, left=1),
        _within(cells),
        *_spread(cells),
        _lisa_goal(lisa),
        *_memory_of_gpu(result.get("gpu", {})),
    )


def _of_models(cells: dict[str, Result]) -> Iterator[str]:
    """The cells of one process: those of several architectures, and those of a Llama."""
    methods = ("LISA", "LoRA", "AdamW", "SGD, momentum", "GaLore")
    models = [(of, size) for size in ("75 M", "285 M") for of in ("Llama", "GPT-2", "GPT-NeoX", "ViT")]
    names = [[f"{of}, {method}, {size}" for method in methods] for of, size in models]
    peaks = {name: _peaks(cells.get(name, {})) for row in names for name in row}
    rows = [[f"{of}, {size}", *map(peaks.__getitem__, row)] for (of, size), row in zip(models, names, strict=True)]
    yield table(("", *methods), rows, left=1)
    others = {name: cell for name, cell in cells.items() if name not in peaks and "processes" not in cell}
    found = [[name, _peaks(cell)] for name, cell in others.items()]
    yield table(("Llama of `transformers`", "estimate / measured"), found, left=1)


def _within(cells: dict[str, Result]) -> str:
    """How many of the estimates are good, and the worst ones."""
    alone = [cell for each in cells.values() for cell in each.get("processes", {"": each}).values()]
    ratios = [cell["estimated_bytes"] / cell["measured_bytes"] for cell in alone if cell.get("measured_bytes")]
    within = sum(abs(ratio - 1) <= _MEMORY_TARGET for ratio in ratios)
    return (
        f"{within} of {len(ratios)} estimates are within {_MEMORY_TARGET:.0%} of the measured peak; they range from "
        f"{min(ratios):.2f} to {max(ratios):.2f} of it."
    )


def _memory_of_gpu(result: Result) -> Iterator[str]:
    if result:
        yield (
            "The same on a GPU: the peak of what PyTorch allocates there, without CUDA's context, and without blocks "
            "that the allocator keeps for later."
        )
        yield measured_on(result)
        yield from _of_models(result["cells"])
        yield _within(result["cells"])


def _spread(cells: dict[str, Result]) -> list[str]:
    """What the runs of a cell took that was measured several times."""
    several = {name: cell["all_measured_bytes"] for name, cell in cells.items() if "all_measured_bytes" in cell}
    found = [f"{name}: {min(each) / 1e9:.2f} to {max(each) / 1e9:.2f} GB" for name, each in several.items()]
    return [f"Cells that are the median of several runs: {'; '.join(found)}."] if found else []


def _lisa_goal(cells: dict[str, Result]) -> str:
    """What a run of LISA is meant to take at most, beside what it takes."""
    goals = {
        name: 4 * cell["num_parameters"] + 16 * cell["num_trained"] + cell["activations_bytes"] + _LISA_PROGRAM
        for name, cell in cells.items()
        if "num_trained" in cell and cell.get("measured_bytes")
    }
    found = [f"{name} {cells[name]['measured_bytes'] / 1e9:.2f} of {goal / 1e9:.2f} GB" for name, goal in goals.items()]
    return (
        "LISA at 285 M is meant to take at most the weights, 4 times what is drawn (copy, gradient, two moments), the "
        f"activations, and {_LISA_PROGRAM / 1e9:.1f} GB for everything else: {', '.join(found) or MISSING}."
    )


def _peaks(cell: Result) -> str:
    if not cell.get("measured_bytes"):
        return f"{MISSING} ({cell.get('refused', 'not measured yet')})"
    estimated, measured = cell["estimated_bytes"], cell["measured_bytes"]
    return f"{estimated / 1e9:.2f} / {measured / 1e9:.2f} = {estimated / measured:.2f}"


def _lisa(result: Result) -> str:
    """Bytes and times of LISA and full fine-tuning."""
    titles = {"full": "full fine-tuning", "lisa": "**LISA**, 2 of 12 blocks"}
    rows = []
    for kind, title in titles.items():
        sizes, seconds = result["bytes"][kind], result["iteration_s"][kind]
        names = ("weights", "gradients", "optimizer", "beyond_weights", "allocator_beyond_weights")
        cells = [f"{sizes[f'{name}_bytes'] / 1e6:.1f}" for name in names]
        rows.append([title, *cells, ms(seconds["median"]), f"{ms(seconds['lowest'])}-{ms(seconds['highest'])}"])
    kept, ratio, cpu = result["kept_ratio"], result["iteration_ratio"], result["cpu_ratio"]
    verdict = "within" if kept <= _LISA_TARGET else "**above**"
    parts = [
        table(
            (
                "",
                "weights, MB",
                "gradients",
                "optimizer",
                "peak beyond weights",
                "by the allocator",
                "ms an iteration",
                "range",
            ),
            rows,
            left=1,
        ),
        f"Optimizer and gradients: {kept:.3f} of full fine-tuning's, {verdict} the {_LISA_TARGET} that are meant; "
        f"all beyond the weights at the peak: {result['beyond_weights_ratio']:.3f}, since frozen blocks keep fewer "
        f"activations, not none. An iteration: {ratio['median']:.2f} of full's "
        f"({ratio['lowest']:.2f}-{ratio['highest']:.2f}); of processor time {cpu['median']:.2f} "
        f"({cpu['lowest']:.2f}-{cpu['highest']:.2f}).",
    ]
    if "gpu" in result:
        large = result["gpu"]
        large_rows = [
            [
                title.replace("of 12", "of 32"),
                f"{large[kind]['peak_bytes'] / 1e9:.1f}",
                ms(large[kind]["iteration_s"]["median"]),
            ]
            for kind, title in titles.items()
        ]
        parts.append("LLaMA-2-7B's shapes in bf16, one row of 1,024 tokens, on a GPU:")
        parts.append(measured_on(large))
        parts.append(table(("", "peak, GB", "ms an iteration"), large_rows, left=1))
    return _alone(
        "LISA",
        "A gpt of 12 blocks, width 256, 8 heads, on characters of Python's help texts: batches of 8 rows of 128, "
        "float32, torch's fused AdamW. LISA draws two blocks every 20 steps; embedding, head and the last norm train "
        "always. Live bytes over a draw, and of three steps by the allocator; a period of each in turn for the time.",
        result,
        *parts,
    )


def _sparse(result: Result) -> str:
    """Ratios of compressed to dense products, of layers and of steps."""
    layers = result["layers"]
    densities = list(dict.fromkeys(row["density"] for row in layers))
    by_place = {(row["rows"], row["width"], row["density"]): row for row in layers}
    rows = []
    for num, width in dict.fromkeys((row["rows"], row["width"]) for row in layers):
        found = [by_place[num, width, density] for density in densities]
        cells = [f"{row['cpu_ratio']['median']:.2f}" for row in found]
        marked = [f"**{cell}**" if row["csr_by_rule"] else cell for row, cell in zip(found, cells, strict=True)]
        rows.append([f"{num:,} x {width}", *marked])
    steps = [
        [f"{row['width']}, 1/{1 / row['density']:g}", *(f"{row[key]['median']:.2f}" for key in ("cpu_ratio", "ratio"))]
        for row in result["steps"]
    ]
    return _alone(
        "Products of sparse layers",
        "A linear layer as wide as its inputs under a random mask, there and back on one thread: the processor's "
        "time with compressed rows (CSR) over that with whole products, medians of turns taken one after the other. "
        "Bold is what `engine.sparse_products=auto` takes compressed.",
        result,
        table(("rows x width", *(f"1/{1 / density:g}" for density in densities)), rows, left=1),
        (
            "A whole training step of a gpt of two layers, 8 rows of 128 characters, packed AdamW; embeddings, head "
            "and attention's own products are dense in both:"
        ),
        table(("width, density", "processor's time, csr over dense", "clock"), steps, left=1),
    )


def _sparse_clients(result: Result) -> str:
    """Time per local step and model size by density."""
    rows = []
    for competitor, ratio in result["step_ratio"].items():
        seconds, cpu = result["step_s"][competitor], result["cpu_ratio"][competitor]
        rows.append(
            [
                f"**{competitor}**" if competitor.startswith("packed") else competitor,
                f"{result['bytes'][competitor] / 1e6:.3f}",
                ms(seconds["median"]),
                f"{ratio['median']:.2f}",
                f"{ratio['lowest']:.2f}-{ratio['highest']:.2f}",
                f"{cpu['median']:.2f}",
            ]
        )
    worst = max(
        ratio["median"] for competitor, ratio in result["step_ratio"].items() if competitor.startswith("packed")
    )
    verdict = "within" if worst <= _SPARSE_TARGET else "**above**"
    return _alone(
        "Sparse clients",
        "A client's round of 20 local steps with a gpt of 2 blocks, width 256, on batches of 8 rows of 128 "
        "characters; rows into whole tensors and back are in the time. Masked: torch's AdamW on whole tensors with "
        "zeros; packed: `packed_adamw`. Each in turn, by the dense client of the same turn.",
        result,
        table(("", "MB each way", "ms a step", "of dense", "range", "of processor time"), rows, left=1),
        f"The slowest packed client: {worst:.2f} of a dense one's step, {verdict} the {_SPARSE_TARGET} that are meant.",
    )


def _alone(title: str, about: str, result: Result, *parts: str) -> str:
    """A section on FedSign alone."""
    return "\n\n".join([f"## {title}", about, measured_on(result), *parts]) + "\n"


def _hypergradients(result: Result) -> str:
    """Bytes and times by depth; many directions at once; the hand-written baseline."""
    methods = list(next(iter(result["depths"].values())))
    rows = []
    for depth, of_depth in result["depths"].items():
        sizes = [f"{of_depth[method]['peak_bytes'] / 1e6:.2f}" for method in methods]
        rows.append([depth, *sizes, *(ms(of_depth[method]["seconds"]["median"]) for method in methods)])
    ways = []
    titles = {
        "one_after_another": "one after another",
        "by_hand": "by hand",
        "by_func": "`torch.func`, mapped",
        "by_func_one_after_another": "`torch.func`, one after another",
    }
    for found in result["conv_nets"]:
        ratios = found["ratio_to_together"]
        cells = [
            f"{ratios[way]['median']:.2f} ({ratios[way]['lowest']:.2f}-{ratios[way]['highest']:.2f})" for way in titles
        ]
        ways.append([str(found["width"]), str(found["threads"]), ms(found["seconds"]["together"]["median"]), *cells])
    worst = max(found["ours_over_hand"]["median"] for found in result["conv_nets"])
    verdict = "within" if worst <= _HYPERGRADIENTS_TARGET else "**above**"
    return _alone(
        "Gradients through training",
        "Digits condensed to one image of each class. By depth, an MLP of 64 units and 10 directions: live bytes at "
        "the peak of one hypergradient, and the time of one, in turn. Then 32 directions through 5 steps of the "
        "ConvNet with InstanceNorm, on digits in the middle of 16x16: all at once, and four other ways over it, in "
        "turn; they agree to rounding. One direction alone takes nine products of matrices a layer, three of them "
        "those of the training itself, which all directions share: where products are all that takes time, to go one "
        "after another takes 1.5 times as long. *By hand* is the step of this one network with its tangents written "
        "out by somebody who needs no other (`benchmarks/alone/hand_jvp.py`).",
        result,
        table(("steps", *(f"{each}, MB" for each in methods), *(f"{each}, ms" for each in methods)), rows, left=1),
        table(("width", "threads", "ours, ms", *(f"{each} / ours" for each in titles.values())), ways, left=1),
        (
            f"Ours takes {worst:.2f} of the time of what is written by hand at most, {verdict} the "
            f"{_HYPERGRADIENTS_TARGET} that are meant."
        ),
    )


def _paro(result: Result) -> str:
    """Sharding strategies by bandwidth; slow ones beside fast ones."""
    parts = []
    for megabits, found in result["rates"].items():
        rows, competitors = [], found["competitors"]
        for name, of in competitors.items():
            seconds, expected = of["seconds"], of.get("predicted")
            rows.append(
                [
                    name,
                    f"{seconds['median']:.2f} ({seconds['lowest']:.2f}-{seconds['highest']:.2f})",
                    f"{expected['seconds']:.2f}" if expected else MISSING,
                    f"{of['predicted_over_measured']:.2f}" if expected else MISSING,
                    f"{of['cable_bytes'] / 1e6:.1f}",
                    f"{of['kept_bytes'] / 1e6:.1f}",
                    f"{expected['kept_bytes'] / 1e6:.1f}" if expected else MISSING,
                ]
            )
        rows.sort(key=lambda row: float(row[1].partition(" ")[0]))
        titles = ("", "s a step", "predicted", "/ measured", "MB through the cable", "MB kept", "predicted")
        is_shaped = megabits != UNSHAPED
        # the ratios that are meant are those of a cable that limits
        ratios = ", ".join(
            f"{slow} / {fast}: {seconds['median']:.1f} ({seconds['lowest']:.1f}-{seconds['highest']:.1f}"
            + (f", {meant:g} is meant)" if is_shaped else ")")
            for (slow, fast, meant), seconds in zip(COMPARED, found["ratios"], strict=True)
        )
        against = inversions(found["competitors"])
        order = "; ".join(against) if against else "none"
        parts += [
            (
                f"**{f'{megabits} Mbit/s' if is_shaped else 'Not shaped'}** (measured across: "
                f"{found['across_bps'] / 1e6:.0f} Mbit/s, within a machine: {found['within_bps'] / 1e9:.1f} Gbit/s; to "
                f"compute: {found['computing_s']:.2f} s a step)"
            ),
            table(titles, rows, left=1),
            f"{ratios}. Where the plan sees a gap of 25 % or more and it is the other way round: {order}.",
        ]
    return _alone(
        "Sharded over a slow network",
        "Two machines of two ranks (network namespaces), one cable between them that both ranks of a machine share, "
        "as fast as the machine passes it on or shaped to a rate. Two matrices of a million float32 weights, AdamW, 4 "
        "micro-batches of 4 rows: next to "
        "nothing to compute. PaRO's fourteen strategies (collectives of all ranks in two levels, or flat), and "
        "torch's DDP, ZeroRedundancyOptimizer and FSDP2, as its documentation says: ZeRO-2 keeps its parameters "
        "through the step, HSDP shards within machines and reduces between them once a step, *gradients once* "
        "accumulates whole gradients. All take the same steps, in turn, to rounding those of one process. Bytes are "
        "those of both directions, with headers; kept is what the fullest rank has at a step's end, before the update.",
        result,
        *parts,
    )


def _ahead(result: Result) -> str:
    """With and without prefetching, by bandwidth."""
    parts = []
    for megabits, found in result["rates"].items():
        rows = []
        for name, of in found["competitors"].items():
            ratio = of["off_over_on"]
            seconds = [
                f"{of[key]['median']:.2f} ({of[key]['lowest']:.2f}-{of[key]['highest']:.2f})" for key in ("off", "on")
            ]
            rows.append(
                [
                    name,
                    *seconds,
                    f"{ratio['median']:.2f} ({ratio['lowest']:.2f}-{ratio['highest']:.2f})",
                    "yes" if of["is_same"] else "**no**",
                ]
            )
        parts += [
            f"**{megabits} Mbit/s** (to compute: {found['computing_s']:.2f} s a step)",
            table(("", "without, s a step", "with", "without / with", "same bits"), rows, left=1),
        ]
    return _alone(
        "Sharded, ahead of time",
        "The same two machines. Six matrices of 768 x 768 float32 weights, AdamW, 2 micro-batches of 256 rows, so "
        "that there is something to compute meanwhile. The next unit is gathered and gradients are reduced while the "
        "model computes, or all is done one after another, in turn.",
        result,
        *parts,
    )


def inversions(competitors: Result) -> list[str]:
    """Return pairs that the plan orders wrongly, though it predicts a difference of at least 25 %."""
    planned = {name: of["predicted"]["seconds"] for name, of in competitors.items() if "predicted" in of}
    measured = {name: competitors[name]["seconds"]["median"] for name in planned}
    return [
        f"{fast} {measured[fast]:.2f} s, {slow} {measured[slow]:.2f} s"
        for fast in planned
        for slow in planned
        if _GAP * planned[fast] <= planned[slow] and measured[fast] > measured[slow]
    ]


def _splits(result: Result) -> str:
    """Accuracies of both cuts and their paired difference, in points."""
    rows = [
        [
            name,
            *(f"{100 * cell[cut]:.2f}" for cut in ("dirichlet", "dirichlet_prefix")),
            f"{100 * cell['difference']:+.2f} "
            f"[{100 * cell['difference_low']:+.2f}, {100 * cell['difference_high']:+.2f}]",
            f"{cell['wins'] * result['repetitions']:.0f}/{result['repetitions']}",
        ]
        for name, cell in result["cells"].items()
    ]
    return _alone(
        "The cut of the Dirichlet partition",
        "The default experiment on digits, on the cohort path: test accuracy in percent, mean of the last 5 rounds, "
        "with exchangeable clients (`dirichlet`) and with the cut of FedSign 0.2 (`dirichlet_prefix`), whose last "
        "client gets a sample of nearly every class. Differences are paired by seed, with their own 95 % intervals "
        "(Student's t). Nothing is timed, so the load of the machine does not matter here.",
        result,
        table(("", "`dirichlet`", "`dirichlet_prefix`", "difference", "wins"), rows, left=1),
    )


def _doors(result: Result) -> str:
    """Seconds per round with and without the checks, and their ratio."""
    rows = [
        [
            {"superlink": "`engine.name=superlink`", "deploy": "`fedsign deploy`, over TLS"}[way],
            f"{of['checked']['median']:.3f}",
            f"{of['open']['median']:.3f}",
            f"**{of['ratio']['median']:.3f}** ({of['ratio']['lowest']:.3f}-{of['ratio']['highest']:.3f})",
        ]
        for way, of in result["ways"].items()
    ]
    worst = max(of["ratio"]["median"] for of in result["ways"].values())
    return _alone(
        "The cost of the doors",
        "Seconds per round of a small model with two SuperNodes on one machine, median of "
        f"{result['rounds'] - 1} rounds, in turn with Flower's servers without FedSign's checks of accounts, keys, and "
        "signatures. Flower's sleeps are shortened, or they would hide the cost.",
        result,
        table(("", "s", "without, s", "ratio"), rows, left=1),
        f"{'Within' if worst <= _DOORS_TARGET else '**Above**'} the {_DOORS_TARGET} that they may cost.",
    )


SECTIONS: dict[str, Callable[[Result], str]] = {
    "startup": _startup,
    "population": _population,
    "checkpoint": _checkpoint,
    "doors": _doors,
    "soak": _soak,
    "aggregation": _aggregation,
    "analysis": _analysis,
    "browsing": _browsing,
    "engines": _engines,
    "large": _large,
    "lisa": _lisa,
    "memory": _memory,
    "sparse": _sparse,
    "hypergradients": _hypergradients,
    "sparse_clients": _sparse_clients,
    "paro_network": _paro,
    "paro_prefetch": _ahead,
    "splits": _splits,
}
