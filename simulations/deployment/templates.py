"""The texts in a federation's folder: start scripts, systemd units, instructions."""

from simulations.deployment.federation import Federation, Site, with_port

SITE_HEADER = """\
# Yours to set.  data_root: the folder that holds this site's data; device: "cpu", "cuda", "cuda:1".
# With "" the experiment's own settings hold.
"""
SITE_REST = """
# From the server; leave it as it is.
"""

_START = """\
#!/bin/sh
# {what}
# 'fedsign' has to be installed; if it is not on the path, say where: FEDSIGN=/opt/fedsign/bin/fedsign {script}
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec "${{FEDSIGN:-fedsign}}" deploy start "$here" "$@"
"""

_UNIT = """\
# {what}
# cp {name}.service /etc/systemd/system/ && systemctl enable --now {name}
# Change User and the paths to where the folder and FedSign lie.
[Unit]
Description={what}
Wants=network-online.target
After=network-online.target

[Service]
User=fedsign
Environment=FEDSIGN=/opt/fedsign/bin/fedsign
ExecStart=/opt/fedsign/{folder}/start.sh
Restart=on-failure
RestartSec=30
UMask=0077
NoNewPrivileges=yes
ProtectSystem=full
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""

_SITE_README = """\
# {site}: a site of the federation {name}

This folder lets one machine take part in the federation {name}. It connects to {address} and listens to nobody: no port has to
be opened here. Data stay on this machine; what leaves it are models and counts.

1. Install FedSign {fedsign} with Python {python} and torch {torch}, as at the server.
2. {key}
3. In `site.toml`, say where the data are and which device computes:
   `data_root = "/data/{site}"`, `device = "cuda"`
4. `fedsign deploy check .` looks at all of it, and at the way to the server.
5. `./start.sh` takes part, until it is stopped with Ctrl-C. `fedsign-{site}.service` is a unit for systemd that does it
   at every start of the machine.

`key` is this site's alone: it stays 0600, and in no mail and no repository. If it is lost or seen by others, tell the server's
people, who run `fedsign deploy revoke {site}`.
"""
_KEY_IN_KIT = "`key` came with this folder. Check that it is readable for you alone: `chmod 600 key`."
_KEY_AT_SITE = "Put the private key that you made with `fedsign deploy key` here as `key`: `mv {site}.key key`."
_INSECURE = "This federation was asked for with `--insecure`: nothing is encrypted and no site shows who it is. For trying out only."

_README = """\
# The federation {name}

Server: {address}. {security}

| | |
|---|---|
| `server/start.sh` | starts the SuperLink; `server/fedsign-superlink.service` is its unit for systemd |
| `kits/SITE.tar.gz` | what each site gets; send it as you would send a password if `key` is in it |
| `ca/ca.key` | signs the server's certificate; needed for `fedsign deploy renew` alone, and may be kept elsewhere until then |
| `server/state/` | what the SuperLink remembers: its runs, and the sites' registrations |
| `server/flower/` | Flower's own configuration: `FLWR_HOME={folder}/server/flower flwr list` |

Commands, on the server's machine:

```
fedsign deploy check {folder}
fedsign deploy add-site NAME --folder {folder}
fedsign deploy revoke NAME --folder {folder}
fedsign deploy renew --folder {folder}
fedsign run --set engine.name=superlink --set engine.federation={folder} --set partition.num_clients={num_sites} --set server.cohort_size={num_sites}
```

Open one port: {port}, TCP, from the sites to this machine. Sites reach nothing there but what a SuperNode needs; runs are started,
and sites registered, from this machine alone.
"""


def for_site(federation: Federation, site: Site, *, has_key: bool) -> dict[str, str]:
    """File name -> text, of a kit."""
    what = f"SuperNode of {site.name} in the federation {federation.name}"
    key = _INSECURE if federation.insecure else _KEY_IN_KIT if has_key else _KEY_AT_SITE.format(site=site.name)
    readme = _SITE_README.format(
        site=site.name,
        name=federation.name,
        address=with_port(federation.hosts[0], federation.port),
        key=key,
        **{name: federation.versions[name].partition("+")[0] for name in ("fedsign", "python", "torch")},
    )
    unit = _UNIT.format(what=what, name=f"fedsign-{site.name}", folder=site.name)
    return {
        "start.sh": _START.format(what=what, script="./start.sh"),
        f"fedsign-{site.name}.service": unit,
        "README.md": readme,
    }


def for_server(federation: Federation) -> dict[str, str]:
    """File name -> text, of the server's folder."""
    what = f"SuperLink of the federation {federation.name}"
    return {
        "start.sh": _START.format(what=what, script="./start.sh"),
        "fedsign-superlink.service": _UNIT.format(what=what, name="fedsign-superlink", folder="federation/server"),
    }


def readme(federation: Federation) -> str:
    """For the people at the server."""
    secure = "TLS with a CA of its own; each SuperNode shows who it is with its own key."
    return _README.format(
        name=federation.name,
        address=with_port(federation.hosts[0], federation.port),
        security=_INSECURE if federation.insecure else secure,
        folder=federation.folder.name,
        port=federation.port,
        num_sites=len(federation.active),
    )
