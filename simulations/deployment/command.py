"""The `fedsign deploy` commands: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy nor cryptography, so that `--help` stays fast.
"""

import datetime as dt
import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedsign.errors import ConfigError
from simulations.options import JsonOption
from simulations.printing import escaped, print_facts, print_json, print_table

app = typer.Typer(
    name="deploy",
    help=(
        "Deploy a federation over several machines: certificates, a startup kit for each site, checks.\n"
        "\n"
        "Run 'init' on the server, then 'check' and 'start' in each site's kit. 'status' and 'logs' monitor the "
        "federation. 'up' and 'down' try it on one machine."
    ),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    # for all that is written, also by the programs that are started: keys, logs, states, and names of sites
    callback=lambda: os.umask(0o077),
)

FolderOption = Annotated[Path, typer.Option("--folder", help="Federation folder on the server.")]
DaysOption = Annotated[int, typer.Option(min=1, max=3650, help="Validity of the server's certificate in days.")]
_PassphraseFile = typer.Option(exists=True, dir_okay=False, help="File with the passphrase; else a terminal asks.")
PassphraseOption = Annotated[Path | None, _PassphraseFile]
_FOLDER = Path("federation")


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to create, on the server.")] = _FOLDER,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name or address of the server; sites connect to the first. Repeatable.",
            show_default=False,
        ),
    ] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=FILE]",
            help=(
                "Site name, with FILE = its public key; without FILE, a key is generated into its startup "
                "kit. Repeatable."
            ),
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the federation.")] = "fedsign",
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port of the server.")] = 8000,
    bind: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "0.0.0.0",
    days: DaysOption = 365,
    ca_passphrase_file: PassphraseOption = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys; for local tests only.")] = False,
    plain_supernodes: Annotated[
        bool,
        typer.Option("--plain-supernodes", help="Also let in Flower's own SuperNodes, which sign less of a request."),
    ] = False,
) -> None:
    """Create a federation: a CA, the server's certificate, and a kit for each site.

    For example: fedsign deploy init --host fl.example.org --host 192.0.2.10 --site berlin --site hamburg=hamburg.pub
    """
    from simulations.deployment import provision
    from simulations.deployment.accounts import remarks
    from simulations.deployment.federation import Federation
    from simulations.deployment.start import PLAIN, UNSAFE

    if not host:
        raise ConfigError(
            "--host is missing: give a name or an address under which sites reach this machine; it may be repeated."
        )
    federation = Federation(
        folder=folder.resolve(),
        name=name,
        hosts=tuple(host),
        port=port,
        bind=bind,
        insecure=insecure,
        plain_supernodes=plain_supernodes,
    )
    given = [text.partition("=") for text in site or ()]
    sites = [(name, Path(file) if file else None) for name, _, file in given]
    passphrase = b"" if insecure else _passphrase(ca_passphrase_file, is_new=True)
    made = provision.init(federation, sites, lifetime=dt.timedelta(days=days), passphrase=passphrase)
    for remark in [UNSAFE] if insecure else remarks(made):
        _warn(remark)
    if plain_supernodes:
        _warn(PLAIN)
    _say(f"federation {made.name} in {folder}: server {made.hosts[0]}, port {made.port}, {len(made.active)} sites")
    _say_kits(made, (each.name for each in made.active))
    _say(f"next: {folder}/server/start.sh here; each site unpacks its kit and follows its README.md")


@app.command()
def key(
    site: Annotated[str, typer.Argument(help="Site name.")],
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Output folder.")] = Path(),
) -> None:
    """Generate a site's key at the site. SITE.key stays there; send SITE.pub to the server's operators."""
    from simulations.deployment import federation, keys

    federation.check_site_name(site)
    private, public = folder / f"{site}.key", folder / f"{site}.pub"
    if not folder.is_dir():
        raise ConfigError(f"--out {folder} is no folder; make it first.")
    if public.exists():
        raise ConfigError(f"{public} is there already; move it away, or name another folder.")
    public_key = keys.make_key(private, comment=site)
    public.write_text(public_key + "\n", encoding="utf-8")
    _say(f"{private}  keep it here; readable only by you")
    _say(f"{public}  send it to the server's operators: fedsign deploy add-site {site} --public-key {public.name}")
    _say(f"fingerprint  {keys.fingerprint(public_key)}")


@app.command("add-site")
def add_site(
    site: Annotated[str, typer.Argument(help="Site name.")],
    folder: FolderOption = _FOLDER,
    public_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Public key of the site; without it, a key is generated into its startup kit."
        ),
    ] = None,
    data_root: Annotated[str, typer.Option("--data-root", metavar="DIR", help="Data folder at the site.")] = "",
    device: Annotated[str, typer.Option(help="Device at the site: cpu, cuda, cuda:1.")] = "",
    max_examples: Annotated[
        int,
        typer.Option(
            "--max-examples", min=0, help="Maximum number of samples a reply may count; 0: the experiment's limit."
        ),
    ] = 0,
) -> None:
    """Add a site. The SuperLink may be running."""
    from simulations.deployment import provision
    from simulations.deployment.federation import open_federation

    grown = provision.add_site(
        open_federation(folder), site, public_key, data_root=data_root, device=device, max_examples=max_examples
    )
    _say(f"{site} has partition {grown.site(site).partition}" + _when(provision.apply(grown)))
    _say_kits(grown, [site])


@app.command()
def revoke(
    site: Annotated[str, typer.Argument(help="Site name.")],
    folder: FolderOption = _FOLDER,
) -> None:
    """Revoke a site and its key for good. The SuperLink may be running."""
    from simulations.deployment import provision
    from simulations.deployment.federation import open_federation

    left = provision.revoke(open_federation(folder), site)
    partition = left.site(site).partition
    _say(f"{site} is revoked" + _when(provision.apply(left)))
    _say(f"partition {partition} is free: the next site that is added gets it; until then runs go on without it")


@app.command()
def renew(
    folder: FolderOption = _FOLDER,
    days: DaysOption = 365,
    ca_key: Annotated[Path | None, typer.Option(help="The CA's private key, if it is not ca/ca.key.")] = None,
    ca_passphrase_file: PassphraseOption = None,
    host: Annotated[
        list[str] | None, typer.Option(help="Additional host name or address of the server; repeatable.")
    ] = None,
) -> None:
    """Issue a new certificate for the server. The sites' kits stay valid."""
    from simulations.deployment import keys, membership, provision
    from simulations.deployment.federation import open_federation

    federation, lifetime = open_federation(folder), dt.timedelta(days=days)
    ask = partial(_passphrase, ca_passphrase_file)
    renewed = provision.renew(federation, host or [], lifetime=lifetime, ca_key=ca_key, passphrase=ask)
    _say(f"certificate for {', '.join(renewed.hosts)}, until {keys.ends_at(renewed.certificate):%Y-%m-%d}")
    if membership.process_of(renewed) is not None:
        _say("the SuperLink that is running has the old one: start it again")


@app.command()
def check(
    folder: Annotated[
        Path | None, typer.Argument(help="Startup kit or federation folder; default: current folder.")
    ] = None,
    experiment: Annotated[
        Path | None,
        typer.Option(help="In a startup kit: also read and examine the site's data, as this TOML file configures it."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check data, versions, device, TLS, clock and keys of a site or of the server.

    Exits with code 1 if something is broken.
    """
    from simulations.deployment.check import check_server, check_site

    federation, kit = _opened(folder)
    if kit is None and experiment is not None:
        raise ConfigError("--experiment belongs to a site's kit: the server has no data; name the kit's folder.")
    rows = check_server(federation) if kit is None else check_site(kit, experiment)
    print_json(rows) if json else print_table(rows)
    if any(row["state"] == "broken" for row in rows):
        raise typer.Exit(1)


@app.command()
def status(
    folder: Annotated[
        Path | None, typer.Argument(help="Federation folder on the server; default: current folder.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the SuperLink, its runs, which sites they wait for, and each site's state.

    Exits with code 1 if the SuperLink is not running.
    """
    from simulations.deployment.status import status_of

    federation, kit = _opened(folder)
    if kit is not None:
        raise ConfigError(
            f"{kit.folder} is a site's kit, which 'fedsign deploy check' looks at; status is shown on the server's "
            "machine."
        )
    report = status_of(federation)
    if json:
        print_json(report)
    else:
        facts = [("superlink", report["superlink"]), ("certificate", report["certificate"])]
        facts += [("remark", remark) for remark in report["remarks"]]
        print_facts([(name, escaped(text)) for name, text in facts])
        for rows in filter(None, (report["runs"], report["sites"], report["refused"])):
            print()
            print_table(rows)
    if not report["is_up"]:
        raise typer.Exit(1)


@app.command()
def logs(
    folder: Annotated[
        Path | None, typer.Argument(help="Startup kit or federation folder; default: current folder.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Number of lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until Ctrl-C.")] = False,
) -> None:
    """Show the log of the SuperLink, or of a site's SuperNode, with timestamps."""
    from simulations.deployment.logs import log_of

    federation, kit = _opened(folder)
    log = log_of(federation.server if kit is None else kit.folder)
    if not log.exists():
        raise ConfigError(f"{log} does not exist: nothing was started from this folder yet; start it with start.sh.")
    sys.stdout.flush()
    os.execvp("tail", ["tail", "-n", str(lines), *(["-F"] if follow else []), str(log)])


@app.command()
def start(
    folder: Annotated[
        Path | None, typer.Argument(help="Startup kit or server folder; default: current folder.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="In a startup kit: connect to this host instead.")] = None,
    key_stdin: Annotated[bool, typer.Option("--key-stdin", help="Read the server's key from standard input.")] = False,
) -> None:
    """Run as the SuperLink, or as a site's SuperNode, until stopped. The start scripts call this."""
    from simulations.deployment.start import start_server, start_site

    federation, kit = _opened(folder)
    if kit is not None and key_stdin:
        raise ConfigError("--key-stdin belongs to the server's folder; a site's SuperNode reads the file 'key'.")
    if kit is not None:
        start_site(kit, _warn, host=host)
    if host is not None:
        raise ConfigError("--host belongs to a site's kit; where the server listens is 'bind' in federation.toml.")
    start_server(federation, _warn, key_stdin=key_stdin)


@app.command()
def up(
    local: Annotated[int, typer.Option("--local", min=1, metavar="N", help="Number of local sites.")],
    folder: FolderOption = _FOLDER,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1, help="Seconds to wait until all sites are online.")
    ] = 180.0,
) -> None:
    """Try out a federation on this machine: start the server and N sites. Creates a federation if none exists."""
    from simulations.deployment import provision, running, start
    from simulations.deployment.accounts import remarks
    from simulations.deployment.federation import FILE, Federation, open_federation

    if not (folder / FILE).exists():
        created = Federation(
            folder=folder.resolve(), name="local", hosts=("localhost",), port=running.free_port(), bind="127.0.0.1"
        )
        sites = [(f"site-{number}", None) for number in range(1, local + 1)]
        provision.init(created, sites, lifetime=dt.timedelta(days=365))
        created.authority_key.unlink()  # which no try-out needs again
        _say(f"made a federation for this machine alone in {folder}")
    federation = open_federation(folder)
    start.up(federation, local, timeout_s=timeout_s, say=_say)
    whose = f"files: {folder}/server and {folder}/ca are the server's, {folder}/kits/SITE and its data the site's"
    for line in (whose, *remarks(federation)):
        _say(line)
    _say(
        f"next: fedsign run --set engine.name=superlink --set engine.federation={folder} --set "
        f"partition.num_clients={local} --set server.cohort_size={local}"
    )


@app.command()
def down(folder: FolderOption = _FOLDER) -> None:
    """Stop the server started from this folder, and the sites started by 'up'."""
    from simulations.deployment import start
    from simulations.deployment.federation import open_federation

    ended = start.down(open_federation(folder))
    _say(f"ended: {', '.join(map(str, ended))}" if ended else "nothing was running")


def _opened(folder: Path | None) -> tuple[Any, Any]:
    """Open a federation, also by its server folder, or else a site's kit; the other one is None."""
    from simulations.deployment.federation import FILE, open_federation, whose
    from simulations.deployment.startup_kits import SITE_FILE, open_startup_kit

    for candidate in [Path(), _FOLDER] if folder is None else [folder, folder.resolve().parent]:
        try:
            if (candidate / SITE_FILE).exists():
                return None, open_startup_kit(candidate)
            if (candidate / FILE).exists():
                return open_federation(candidate), None
        except PermissionError as error:
            raise whose(candidate) from error
    named = "this folder" if folder is None else str(folder)
    raise ConfigError(f"{named} holds neither a site's kit ({SITE_FILE}) nor a federation ({FILE}); name one of them.")


def _passphrase(file: Path | None, *, is_new: bool = False) -> bytes:
    """Return the passphrase of the CA's key: a file's first line, or a terminal's answer, or nothing."""
    if file is not None:
        return file.read_bytes().partition(b"\n")[0].strip()
    form: dict[str, Any] = {"hide_input": True, "confirmation_prompt": is_new, "show_default": False, "err": True}
    answer: str = typer.prompt("Passphrase of the CA's key", "", **form) if sys.stdin.isatty() else ""
    return answer.encode()


def _say_kits(federation: Any, names: Iterable[str]) -> None:
    for name in names:
        kit = federation.kit(name)
        remark = "contains a private key: send it like a password" if (kit / "key").exists() else "contains no secret"
        _say(f"kit of {name}: {kit}.tar.gz  {remark}")


def _when(is_reported: bool) -> str:
    return ", and the SuperLink knows" if is_reported else "; the SuperLink will know when it is started"


def _say(line: str) -> None:
    Console(soft_wrap=True, highlight=False).print(escaped(line))


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)
