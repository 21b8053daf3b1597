"""The memory that this process may have, whatever the machine has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple


class _Version(NamedTuple):
    """A version of control groups: the folder of their tree, and the names of their files."""

    tree: str
    limit: str
    usage: str
    #: Entries of ``memory.stat``, a group's and its groups' files that are cached.
    cached: frozenset[str]


_OF_V1 = frozenset({"total_active_file", "total_inactive_file"})
_V1 = _Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", _OF_V1)
_V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", frozenset({"active_file", "inactive_file"}))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes: what the kernel says is available, and at most what every control group around this process has left.

    Files that are cached count as available, what this process and others use does not. 0 where the kernel says nothing, which is
    not Linux. Cost: some small files are read.
    """
    return min(_from_kernel(root), *_from_groups(root), sys.maxsize)


def missing_share(nbytes: int, memory: int, needed: int) -> float:
    """Of so many bytes of rows, the share that does not fit into memory beside what is needed there."""
    return 1 - min(1.0, max(0, memory - needed) / nbytes)


def _from_kernel(root: Path) -> int:
    for line in lines_of(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _from_groups(root: Path) -> list[int]:
    """Bytes that the process's groups, and those above them, may still use. In a container a tree begins at the group."""
    left = []
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        at = Path(group.lstrip("/"))
        for folder in (at, *at.parents):
            here = root / version.tree / folder
            limit = _number(here / version.limit)
            if limit is not None:
                entries = [entry.split() for entry in lines_of(here / "memory.stat")]
                cached = sum(int(entry[1]) for entry in entries if entry[0] in version.cached)
                left.append(max(0, limit - max(0, (_number(here / version.usage) or 0) - cached)))
    return left


def _number(path: Path) -> int | None:
    said = next(iter(lines_of(path)), "").strip()
    return int(said) if said.isdigit() else None


def lines_of(path: str | Path) -> list[str]:
    """Of a file of the system; none where it is not there, or may not be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
