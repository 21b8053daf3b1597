"""What a result was measured on: hardware and commit, without names that identify the machine."""

import os
import platform
import re
import subprocess
from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_ROOT = Path(__file__).parents[1]


def describe() -> dict[str, str | int]:
    """Processor, memory and system. Linux says most; elsewhere what Python knows."""
    return {
        "cpu": _first_match("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.machine(),
        "cores": cores(),
        "last_level_cache_mib": cache_bytes() // 2**20,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "os": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
    }


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float:
    """Average number of busy programs over the last minute, before we begin: ideally none."""
    return round(os.getloadavg()[0], 2)


def cache_bytes() -> int:
    """Size of the largest cache one core can use; 32 MiB where the system does not tell."""
    sizes = [_cache_size(path.read_text()) for path in _CACHES.glob("index*/size")]
    return max(sizes, default=32 * 2**20)


def drop_cache(folder: Path) -> None:
    """Let the system drop what it keeps in memory of the files below a folder, so that the disk is read."""
    for root, _, names in os.walk(folder):
        for name in names:
            with Path(root, name).open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def commit() -> dict[str, str | bool | None]:
    """The commit measured, and whether files differ from it; results of earlier runs do not count."""
    revision = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cache_size(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KM]?)", text.strip())
    return int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]] if found else 0


def _first_match(path: str, pattern: str) -> str | None:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return found[1].strip() if found else None
