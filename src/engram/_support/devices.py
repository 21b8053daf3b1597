"""Devices of this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

import torch


def named_device(device: torch.device | str | int, name: str) -> torch.device:
    """A device by name. Raises ``RuntimeError``: it is none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise RuntimeError(f"{name}: expected a device or its name, got {device!r:.40}.") from error


def existing_device(device: torch.device | str | int, name: str) -> torch.device:
    """A device of this machine, with its index.

    Raises:
        RuntimeError: there is none of that name.
    """
    made = named_device(device, name)
    if made.type in ("cpu", "meta"):
        return made
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator is not None else 0
    index: int | None = made.index
    if accelerator is None or made.type != accelerator.type or (index or 0) >= count:
        there = ["cpu", *(f"{accelerator}:{i}" for i in range(count))]
        raise RuntimeError(f"{name}: no such device, {device!r}. This machine has {', '.join(there)}.")
    return torch.device(made.type, torch.accelerator.current_device_index() if index is None else index)


def foreseen(device: torch.device | str | int) -> tuple[str, int | None]:
    """Name and :func:`free_bytes` of an accelerator that ``plan`` is asked for: of this machine, if it has any.

    Raises:
        RuntimeError: it has others only, or that is no device. ValueError: the device is none with memory of its own.
    """
    found = named_device(device, "plan: device")
    if found.type in ("cpu", "meta"):
        raise ValueError(f"plan: device: expected an accelerator such as 'cuda', got {str(found)!r}. Leave it out.")
    found = existing_device(found, "plan: device") if torch.accelerator.is_available() else found
    return str(found), free_bytes(found)


def free_bytes(device: torch.device) -> int | None:
    """Memory that a device has for new tensors; None: that is not known."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    free, cached = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    return free + cached - torch.cuda.memory_allocated(device)


def check_room(what: str, needed: int, device: torch.device) -> None:
    """Before memory for rows, or of them, is taken. Raises ``RuntimeError``: a device has less than it ``needed`` free."""
    free = free_bytes(device)
    if free is not None and free < needed:
        raise RuntimeError(
            f"{what} on {device} need {needed:,} bytes, and {free:,} are free. Store fewer rows, or smaller ones, or keep them on the host "
            'with device="cpu". engram.plan(row, capacity, device=…) says what they take.'
        )


def missing_for_kernels() -> str | None:
    """What this machine or its software lacks for a device to read the host by Triton's kernels."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")).absolute()
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    found = {
        "this torch is built for ROCm": torch.version.hip is not None,
        f"this is {platform.system()}, not Linux": sys.platform != "linux",
        "this is WSL": "microsoft" in platform.release().lower(),
        "Triton is not installed, which comes with torch's builds for CUDA": importlib.util.find_spec("triton") is None,
        "there is no C compiler, which Triton needs (gcc, clang, or the one that CC names)": not any(
            map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))
        ),
        f"Triton cannot write to its cache {str(cache)!r} (TRITON_CACHE_DIR names another)": not os.access(
            there, os.W_OK | os.X_OK
        ),
    }
    return next((why for why, holds in found.items() if holds), None)
