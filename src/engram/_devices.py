"""Devices of this machine."""

from __future__ import annotations

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
