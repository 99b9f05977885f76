"""`python -m tests.same_numbers --base COMMIT [--only GLOB] [--tolerance X]`: see CONTRIBUTING.md.

The base's results are cached in `.same-numbers/`, by commit, configuration, machine and versions, so later calls run
only the working tree.  Cached results count only with their recorded digest.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path

from tests.same_numbers.compare import Snapshot, difference

HERE = Path(__file__).parent
TREE = HERE.parents[1]
CACHE = TREE / ".same-numbers"
CONFIGURATIONS = sorted(path for path in (HERE / "configurations").glob("*.toml") if path.name != "_base.toml")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
Results = dict[str, Snapshot | None]  # None: it failed


def main() -> int:
    """Run, compare, and say it; 1 if there is a difference."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.same_numbers", description="Do two commits give the same numbers?"
    )
    parser.add_argument("--base", required=True, help="the commit to compare the working tree with")
    parser.add_argument("--only", default="*", help="a pattern of names of configurations, such as 'lisa*'")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="relative deviation that is let pass; 0: equal bits"
    )
    asked = parser.parse_args()
    files = [path for path in CONFIGURATIONS if fnmatch(path.stem, asked.only)]
    if not files:
        parser.error(f"--only {asked.only} fits none of {', '.join(path.stem for path in CONFIGURATIONS)}.")
    commit = _git("rev-parse", "--verify", f"{asked.base}^{{commit}}").decode().strip()
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as scratch:
        base, tree = _base(commit, files, Path(scratch)), _run(TREE, files, Path(scratch) / "tree", label="tree")
    verdicts = {path.stem: _verdict(base[path.stem], tree[path.stem], asked.tolerance) for path in files}
    for name, (_, said) in verdicts.items():
        print(f"{name:32} {said}")
    same = sum(is_same for is_same, _ in verdicts.values())
    print(f"{same} of {len(files)} configurations are the same as on {commit[:12]}, {len(files) - same} differ.")
    return 0 if same == len(files) else 1


def _verdict(base: Snapshot | None, tree: Snapshot | None, tolerance: float) -> tuple[bool, str]:
    if base is None or tree is None:
        return False, f"failed on {'both' if base is tree else 'the base' if base is None else 'the working tree'}"
    found = difference(base, tree)
    if found is None:
        return True, f"same ({len(base.tensors)} tensors, {len(base.numbers)} numbers)"
    largest = f"largest relative deviation {found.largest:.1e}"
    if tolerance and found.largest <= tolerance:
        return True, f"same within {tolerance:g} ({found.count} differ, {largest})"
    return False, f"differs: {found.first} ({found.count} differ, {largest})"


def _base(commit: str, files: list[Path], scratch: Path) -> Results:
    """From the cache, or run in a checkout."""
    kept = {path: CACHE / commit[:12] / f"{path.stem}-{_key(commit, path)}" for path in files}
    found: Results = {path.stem: _load(folder) for path, folder in kept.items()}
    missing = [path for path in files if found[path.stem] is None]
    if missing:
        checkout = scratch / "checkout"
        with tarfile.open(fileobj=BytesIO(_git("archive", commit))) as archive:
            archive.extractall(checkout, filter="data")
        found |= _run(checkout, missing, scratch / "base", label=commit[:12])
        for path in missing:
            if (snapshot := found[path.stem]) is not None:
                _keep(snapshot, kept[path])
    return found


def _run(code: Path, files: list[Path], out: Path, *, label: str) -> Results:
    """Run configurations with the packages that lie in `code`, in one process of their own."""
    out.mkdir()
    command = [sys.executable, "-P", str(HERE / "runner.py"), str(out), *map(str, files)]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(code), "SAME_NUMBERS_CODE": str(code)}
    ok = {}
    with subprocess.Popen(command, cwd=out, env=environment, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        for line in runner.stdout:
            done = json.loads(line)
            ok[done["name"]] = done["ok"]
            print(
                f"{label}: {done['name']} {'done' if done['ok'] else 'failed'} in {done['seconds']} s",
                file=sys.stderr,
            )
            if not done["ok"]:
                print((out / done["name"] / "log.txt").read_text(encoding="utf-8"), file=sys.stderr)
    return {path.stem: Snapshot.of(out / path.stem) if ok.get(path.stem) else None for path in files}


def _key(commit: str, path: Path) -> str:
    """Of all that the numbers of a commit depend on."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "flwr", "scikit-learn")]
    cpu = Path("/proc/cpuinfo")
    models = (
        {line for line in cpu.read_text().splitlines() if line.startswith(("model name", "flags"))}
        if cpu.exists()
        else ()
    )
    facts = [commit, platform.platform(), platform.python_version(), *versions, *sorted(models)]
    files = [path, path.with_name("_base.toml"), HERE / "own_parts.py", HERE / "runner.py", HERE / "compare.py"]
    content = b"\0".join([*(fact.encode() for fact in facts), *(file.read_bytes() for file in files)])
    return hashlib.sha256(content).hexdigest()[:16]


def _keep(snapshot: Snapshot, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    snapshot.write(folder)
    (folder / "digest").write_text(_digest(folder))


def _load(folder: Path) -> Snapshot | None:
    """What is kept; None where there is nothing, or something that was damaged."""
    written = folder / "digest"
    return Snapshot.read(folder) if written.exists() and written.read_text() == _digest(folder) else None


def _digest(folder: Path) -> str:
    contents = [path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "digest"]
    return hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=TREE, capture_output=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
