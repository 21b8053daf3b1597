"""How much memory this process has in RAM: bytes. Linux only."""

from pathlib import Path


def now() -> int:
    """At this moment."""
    return _status("VmRSS")


def peak() -> int:
    """At most, since the process began or :func:`forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Reset the maximum that :func:`peak` returns."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(entry: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{entry}:"))
    return int(line.split()[1]) * 1024
