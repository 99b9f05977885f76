"""The parts of a checkpoint whose bits are the same whenever a run is repeated."""

import hashlib
from pathlib import Path

from fedsign.storage.digests import read_json


def files_of(checkpoint: Path) -> dict[str, str]:
    """A digest of each of its files; of the manifest without the run, and chains of records, since some hold times."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.glob("*.safetensors")}
    manifest, _ = read_json((checkpoint / "state.json").read_text(encoding="utf-8"))
    return digests | {key: str(value) for key, value in manifest.items() if key not in ("records", "run")}
