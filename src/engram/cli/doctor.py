"""What engram finds on a machine."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from engram._version import __version__


def findings() -> list[tuple[str, str, bool]]:
    """``(what, what was found, whether it is as it should be)``, in the order to show them."""
    found = [
        ("engram", __version__, True),
        (
            "Python",
            f"{platform.python_version()} ({platform.machine()}, {platform.system()})",
            sys.version_info >= (3, 11),
        ),
        ("GIL", "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off", True),
    ]
    found += [_torch(), _package("tensordict"), _core()]
    found += [
        ("cores", f"{os.cpu_count()}", True),
        ("huge pages", _first_line("/sys/kernel/mm/transparent_hugepage/enabled"), True),
        ("shared memory", _free("/dev/shm"), True),  # noqa: S108 - only looked at
        ("temporary folder", f"{tempfile.gettempdir()}, {_free(tempfile.gettempdir())}", True),
    ]
    return found


def _torch() -> tuple[str, str, bool]:
    try:
        import torch
    except ImportError as error:
        return "torch", f"does not import: {error}", False
    devices = f", {torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else ", CPU only"
    return "torch", f"{torch.__version__}{devices}", True


def _package(name: str) -> tuple[str, str, bool]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return name, version(name), True
    except PackageNotFoundError:
        return name, "not installed", False


def _core() -> tuple[str, str, bool]:
    try:
        from engram import _native
    except ImportError as error:
        return "native core", f"does not load: {error}", False
    way = "sees tensors natively" if _native.HAS_EXCHANGE else "without DLPack exchange: slower writes"
    return "native core", f"loaded, {_native.num_threads()} threads, {way}", True


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _free(path: str) -> str:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return "not there"
    return f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} GB"
