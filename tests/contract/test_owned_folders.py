"""Every command that writes where the user says refuses the user's own file by name, before it computes anything."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulations.cli import app

needs = pytest.mark.needs
ANALYSES = ("coordinates", "curvature", "interpolate", "signs", "trajectory", "valley")
KINDS = {"interpolate": "interpolation"}
SHARDING_TEXT = "estimate sharding --params 1e9 --per-group 4 --memory 80GB --ranks 8 --intra 2000Gbps --inter 80Gbps"
LEARN_TEXT = "tune learn client.lr --steps 1 --rounds 1 --set data.validation_fraction=0.2 --out out"
COORDINATES_TEXT = (
    "analyze coordinates --schemes smupar --densities 1 --seeds 1 --steps 1 --out out --set model.name=mlp "
    "--set parameterization.name=smupar --set parameterization.base_width=32"
)
SHARDING, LEARN, COORDINATES = (text.split() for text in (SHARDING_TEXT, LEARN_TEXT, COORDINATES_TEXT))

COMMANDS = [
    *(
        pytest.param(["partition", "--out", f"out/mine{end}"], f"mine{end}")
        for end in (".svg", ".pdf", ".png", ".html")
    ),
    pytest.param(["partition"], "../partition.svg", id="partition by default"),
    pytest.param([*SHARDING, "--out", "out/mine.svg"], "mine.svg", marks=needs("sharding")),
    pytest.param(SHARDING, "../sharding.svg", id="sharding by default", marks=needs("sharding")),
    pytest.param(["estimate", "memory", "--out", "out/mine.pdf"], "mine.pdf", marks=needs("memory")),
    *(
        pytest.param(["compare", "--export", "out", "--seeds", "1"], name, marks=needs("comparison"))
        for name in ("paper.tex", "README.txt", "table.csv")
    ),
    pytest.param(["compare", "--out", "out", "--seeds", "1"], "notes.md", marks=needs("comparison")),
    pytest.param(["ablate", "fedsign", "--out", "out", "--seeds", "1"], "notes.md", marks=needs("ablation")),
    *(
        pytest.param(
            ["analyze", name, *(["a.npz"] * (2 if name == "interpolate" else name != "coordinates")), "--out", "out"],
            f"{KINDS.get(name, name)}{end}",
            marks=needs("sparsity" if name == "coordinates" else "signs" if name == "signs" else "landscape"),
        )
        for name in ANALYSES
        for end in (".json", "-error.svg")
    ),
    pytest.param(["analyze", "valley", "a.npz", "--surface", "--out", "out"], "surface.npz", marks=needs("landscape")),
    *(pytest.param(LEARN, name, marks=needs("bilevel")) for name in ("learned.json", "learned.toml", "steps.json")),
    pytest.param(["tune", "search", "--trials", "1", "--out", "out"], "found.toml", marks=needs("tuning")),
    pytest.param(["tune", "transfer", "--out", "out"], "transfer.json", marks=needs("sparsity")),
    pytest.param(["condense", "--out", "out"], "images.png", marks=needs("bilevel")),
    pytest.param(["export", "a-run", "--out", "out"], "config.json", marks=needs("language")),
    pytest.param(["new", "out"], "README.md", marks=needs("projects")),
    pytest.param(["deploy", "init", "out", "--host", "localhost"], "README.md", marks=needs("deployment")),
    pytest.param(["deploy", "key", "berlin", "--out", "out"], "berlin.pub", marks=needs("deployment")),
    pytest.param(["deploy", "key", "berlin", "--out", "out"], "berlin.key", marks=needs("deployment")),
]


@pytest.mark.parametrize(("command", "name"), COMMANDS)
def test_a_file_of_the_user_is_refused_by_name_before_anything_is_computed(
    command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "a.npz").touch()
    (tmp_path / "out" / name).write_text("mine")
    before = sorted(os.walk(tmp_path))
    done = CliRunner().invoke(app, command)
    said = str(done.exception) if done.exception and not isinstance(done.exception, SystemExit) else done.output
    assert done.exit_code != 0 and "\n" not in said.strip()
    whole_folder = command[0] in ("compare", "ablate", "condense", "new") and "--export" not in command
    assert (Path(name).name in said) or (whole_folder and "out" in said) or command[:2] == ["deploy", "init"], said
    assert (tmp_path / "out" / name).read_text() == "mine"
    assert sorted(os.walk(tmp_path)) == before


@pytest.mark.parametrize(
    "command",
    [
        ["partition", "--out", "out/split.svg"],
        ["partition", "--out", "~/split.html"],
        pytest.param([*SHARDING, "--out", "out/plan.pdf"], marks=needs("sharding")),
        pytest.param(COORDINATES, marks=[needs("sparsity"), pytest.mark.slow]),
        pytest.param(LEARN, marks=[needs("bilevel"), pytest.mark.slow]),
    ],
)
def test_a_command_repeated_on_its_own_output_goes_through_until_the_user_edits_it(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "out"))
    small = ["--set", "partition.num_clients=4", "--set", "server.cohort_size=2"] if command[0] != "estimate" else []
    for _ in range(2):
        done = CliRunner().invoke(app, [*command, *small])
        assert done.exit_code == 0, (done.output, done.exception)
    written = [
        path for path in (tmp_path / "out").iterdir() if path.suffix in (".svg", ".pdf", ".png", ".html", ".toml")
    ]
    assert written and {path.name for path in tmp_path.iterdir()} == {"out"}
    written[-1].write_text("edited")
    done = CliRunner().invoke(app, [*command, *small])
    assert done.exit_code != 0 and written[-1].read_text() == "edited"
