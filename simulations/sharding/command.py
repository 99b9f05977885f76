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
    params: Annotated[float, typer.Option(help="The model's parameters, such as 65e9.")],
    per_group: Annotated[int, typer.Option(help="GPUs that fast links join: those of a machine.")],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Of a GPU, such as 80GB or 24GiB.")],
    ranks: Annotated[int | None, typer.Option(help="GPUs, or processes, in total.")] = None,
    intra: Annotated[
        str | None, typer.Option(metavar="BANDWIDTH", help="Within a group, such as 2000Gbps or 250GB/s.")
    ] = None,
    inter: Annotated[str | None, typer.Option(metavar="BANDWIDTH", help="Between groups, such as 80Gbps.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure --intra, --inter and --link between the ranks of a torchrun.")
    ] = False,
    trainable: Annotated[str, typer.Option(metavar="FRACTION", help="Of the parameters, such as 1/16.")] = "1",
    accumulate: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 1,
    t_comp: Annotated[
        float, typer.Option(metavar="SECONDS", help="The computation of a step, with which communication overlaps.")
    ] = 0.0,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="rank|group",
            help="Whose the link between groups is: each rank's (if nothing is said), or its group's.",
        ),
    ] = None,
    collectives: Annotated[
        str, typer.Option(metavar="flat|two-level", help="How collectives of all ranks go; two-level is PaRO-CC.")
    ] = "flat",
    candidates: Annotated[
        str, typer.Option(metavar="all|paper", help="All 14 strategies, or the 8 that the paper ran.")
    ] = "all",
    out: Annotated[
        Path | None,
        typer.Option(
            help="The picture, .svg, .pdf or .png; without it, sharding.svg in this folder (none with --json)."
        ),
    ] = None,
    json: NumbersOption = False,
) -> None:
    """Compare sharding strategies (PaRO) by memory and time: which fit, and which is fastest on this network."""
    from simulations.sharding import estimate as estimates

    asked = estimates.with_network(estimates.Asked(**context.params))  # the command's options by name
    if asked is None:
        return  # the first rank prints
    found = estimates.look(asked)
    if json:
        print_json(found.as_json())
    else:
        estimates.show(found)


def worker(
    join: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where the first machine listens: its client.sharding.listen."),
    ],
    secret_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help=(
                "What machines have to know, as in the first one's client.sharding.secret_file; needed unless HOST "
                "is this machine."
            ),
        ),
    ] = "",
    interface: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=(
                "The network interface by which ranks speak, such as ib0; without it, that by which this machine has "
                "joined."
            ),
        ),
    ] = "",
    data_root: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Where the client's data lie here; without it, at the path that the first machine has."
        ),
    ] = "",
    logs: Annotated[Path, typer.Option(metavar="DIR", help="What ranks have to say goes to files here.")] = Path(
        "worker-logs"
    ),
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="How long to look for the first machine, at the start and when it is lost."
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
