"""PaRO's guideline in the paper's scenarios: which strategies fit, and in which order they are fast.

Paper: arXiv 2310.06003, section 3.1 and experiments: 32 GPUs of 80 GB, 8 per machine, 2000 Gbit/s within and 80 Gbit/s
between machines, 10 micro-batches; memory and t_comm by its formulas (`fedsign.sharding.plan`). Without computation,
ratios of times are not ratios of throughput, so only orders are judged.  Nothing is random or timed.  For measurements
over a slow link see docs/benchmarks.md.
"""

from collections.abc import Mapping

from fedsign.sharding.layout import Grouping
from fedsign.sharding.plan import Estimate, Task, rank
from fedsign.sharding.strategy import PAPER, STRATEGIES
from fedsign.sharding.traffic import Network
from simulations.recipes.base import Metrics, Verdict, at_least, at_most, below, part, recipe

_GROUPING, _NETWORK = Grouping(groups=4, per_group=8), Network(intra_bps=2000e9, inter_bps=80e9)
_GPU_BYTES, _FIT_65B = 80e9, {"GGG", "IGG", "IIG"}
_FASTER = {  # scenario -> pairs, the first of which is faster in the paper
    "7b": (("IIG", "GGG"), ("NII", "NGG")),
    "7b_part": (("NII", "NIG"), ("NIG", "NGG")),
    "65b": (("IIG", "GGG"),),
    "65b_part": (("III", "GGG"), ("IIG", "GGG")),
    "65b_adapters": (("ING", "GGG"),),
}
_SCENARIOS = {"7b": (7e9, 1.0), "7b_part": (7e9, 1 / 16), "65b": (65e9, 1.0), "65b_part": (65e9, 1 / 16)} | {
    "65b_adapters": (65e9, 3 / 1000)
}
_RATIOS = [f"{name}_{fast}_over_{slow}" for name, pairs in _FASTER.items() for fast, slow in pairs]
_FIT = ("others_that_fit_of_those_run", "others_that_fit_of_all")


@recipe(
    (
        "Of 27 ways to shard 14 are worth it; for 65B only ZeRO-3, IGG and IIG fit; the faster strategies are those "
        "that the paper reports."
    ),
    part("of the 27 combinations, 14 remain", at_least(14, "kept"), at_most(14, "kept")),
    part(
        "for 65B, only GGG, IGG, and IIG of the strategies evaluated in the paper fit",
        at_most(0, "others_that_fit_of_those_run"),
    ),
    part("for 65B no other strategy of the 14 fits", at_most(0, "others_that_fit_of_all")),
    part(
        "for 7B, NII, IIG, and III are the three fastest strategies evaluated in the paper",
        at_least(3, "recommended_among_fastest"),
    ),
    part("in each scenario, the strategies that the paper reports as faster are faster", below(1.0, *_RATIOS)),
    part(
        "for 65B with 1/16 of the weights trained, IIG takes less memory than MiCS", below(1.0, "iig_over_mics_memory")
    ),
    source="PaRO, section 3.1 and experiments",
    null={"kept": 27, "recommended_among_fastest": 0, "iig_over_mics_memory": 1.0}
    | dict.fromkeys(_FIT, 5)
    | dict.fromkeys(_RATIOS, 1.0),
    quick=[below(1.0, *_RATIOS)],
    expected=Verdict.IN_PART,
)
def paro_guideline(quick: bool) -> Metrics:
    """Return counts, and ratios of communication seconds and of bytes; a quick check is a full one."""
    found = {name: _estimates(*scenario) for name, scenario in _SCENARIOS.items()}
    fitting = {name for name, each in found["65b"].items() if each.memory_bytes <= _GPU_BYTES}
    fastest = sorted(PAPER, key=lambda name: found["7b"][name].communication_s)[:3]
    part_of_65b = found["65b_part"]
    return {
        "kept": float(len(STRATEGIES)),
        # symmetric difference: a strategy too many and one too few both count
        _FIT[0]: float(len((fitting & {*PAPER}) ^ _FIT_65B)),
        _FIT[1]: float(len(fitting ^ _FIT_65B)),
        "recommended_among_fastest": float(len({*fastest} & {"NII", "IIG", "III"})),
        **{
            f"{name}_{fast}_over_{slow}": found[name][fast].communication_s / found[name][slow].communication_s
            for name, pairs in _FASTER.items()
            for fast, slow in pairs
        },
        "iig_over_mics_memory": part_of_65b["IIG"].memory_bytes / part_of_65b["III"].memory_bytes,
    }


def _estimates(params: float, share: float) -> Mapping[str, Estimate]:
    task = Task(params=params, trainable=share * params, accumulate=10)
    ranked = rank(task, grouping=_GROUPING, network=_NETWORK, memory_bytes=_GPU_BYTES)
    return {each.strategy.name: each for _, each in ranked}
