"""The `fedsign estimate sharding` and `fedsign worker` commands: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from simulations.options import NumbersOption
from simulations.printing import print_json


def sharding(
    context: typer.Context,
    params: Annotated[float, typer.Option(help="Number of parameters, such as 65e9.")],
    per_group: Annotated[int, typer.Option(help="GPUs per group (connected by fast links), usually per machine.")],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of a GPU, such as 80GB or 24GiB.")],
    ranks: Annotated[int | None, typer.Option(help="Total number of GPUs or processes.")] = None,
    intra: Annotated[
        str | None, typer.Option(metavar="BANDWIDTH", help="Bandwidth within a group, such as 2000Gbps or 250GB/s.")
    ] = None,
    inter: Annotated[
        str | None, typer.Option(metavar="BANDWIDTH", help="Bandwidth between groups, such as 80Gbps.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure --intra, --inter, and --link between the ranks of a torchrun job."),
    ] = False,
    trainable: Annotated[
        str, typer.Option(metavar="FRACTION", help="Fraction of trainable parameters, such as 1/16.")
    ] = "1",
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    t_comp: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds of computation per step, overlapped with communication.")
    ] = 0.0,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="rank|group",
            help="Whether each rank has its own link between groups (default), or the group shares one.",
        ),
    ] = None,
    collectives: Annotated[
        str, typer.Option(metavar="flat|two-level", help="Collectives over all ranks; two-level is PaRO-CC.")
    ] = "flat",
    candidates: Annotated[
        str, typer.Option(metavar="all|paper", help="All 14 strategies, or the 8 in the paper's experiments.")
    ] = "all",
    out: Annotated[
        Path | None,
        typer.Option(help="Output file: .svg, .pdf, or .png; default: ./sharding.svg (none with --json)."),
    ] = None,
    json: NumbersOption = False,
) -> None:
    """Compare sharding strategies (PaRO) by memory and time: which fit, and which is fastest on this network."""
    from simulations.sharding import estimate as estimates

    options = estimates.with_network(estimates.Options(**context.params))  # the command's options by name
    if options is None:
        return  # the first rank prints
    estimated = estimates.estimate(options)
    if json:
        print_json(estimated.as_json())
    else:
        estimates.show(estimated)


def worker(
    join: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Address of the first machine (its client.sharding.listen)."),
    ],
    secret_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help=(
                "File with the shared secret (the first machine's client.sharding.secret_file); required "
                "unless HOST is this machine."
            ),
        ),
    ] = "",
    interface: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=("Network interface for traffic between ranks, such as ib0; default: the one used to join."),
        ),
    ] = "",
    data_root: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Folder of the client's data on this machine; default: same path as on the first machine.",
        ),
    ] = "",
    logs: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the ranks' logs.")] = Path("worker-logs"),
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Seconds to wait for the first machine, at start and after a lost connection."
        ),
    ] = 600.0,
) -> None:
    """Provide ranks of a client that trains on several machines. Run this on all machines except the first.

    The machines are listed in client.sharding.machines. Exits with code 0
    after the run, and with code 1 if the first machine could not be reached
    for --wait seconds.
    """
    from clients.sharding.worker import Worker
    from fedsign.transport.addresses import Address
    from fedsign.transport.handshake import read_key

    address = Address.of(join, given_as="--join")
    key = read_key(secret_file, is_loopback=address.is_loopback, given_as="--secret-file")
    Worker(address, key, interface=interface, data_root=data_root, logs=logs.resolve(), wait_s=wait).work()
