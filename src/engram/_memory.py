"""The memory that this process may have, whatever the machine has."""

from __future__ import annotations

import sys
from pathlib import Path

#: Of each version of control groups: where its tree is, and the file that says the limit.
_V1, _V2 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("sys/fs/cgroup", "memory.max")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes: what the kernel says is available, and at most the limit of every control group around this process.

    Files that are cached count as available. 0 where the kernel says nothing, which is not Linux. Cost: some small files are read.
    """
    return min(_from_kernel(root), *_from_groups(root), sys.maxsize)


def missing_share(nbytes: int, memory: int, needed: int) -> float:
    """Of so many bytes of rows, the share that does not fit into memory beside what is needed there."""
    return 1 - min(1.0, max(0, memory - needed) / nbytes)


def _from_kernel(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _from_groups(root: Path) -> list[int]:
    """The limits of the process's groups and of those above them. In a container a tree begins at the group."""
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        tree, limit = _V1 if controllers else _V2
        at = Path(group.lstrip("/"))
        for folder in (at, *at.parents):
            said = next(iter(_lines(root / tree / folder / limit)), "max").strip()
            if said.isdigit():
                limits.append(int(said))
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
