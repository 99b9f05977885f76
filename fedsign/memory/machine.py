"""The memory of this machine, or of its container, whose limit psutil does not see."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")  # version 2


def machine_bytes() -> int:
    """All of it."""
    import psutil  # lazily: each run asks for its checks

    total: int = psutil.virtual_memory().total
    return min(total, _limit() or total)


def available_bytes() -> int:
    """What is free."""
    import psutil

    free: int = psutil.virtual_memory().available
    used = _CGROUP / "memory.current"
    return min(free, machine_bytes() - int(used.read_text(encoding="utf-8"))) if _limit() and used.exists() else free


def _limit() -> int:
    """The container's limit; 0 if there is none."""
    limit = _CGROUP / "memory.max"
    text = limit.read_text(encoding="utf-8").strip() if limit.exists() else "max"
    return 0 if text == "max" else int(text)
