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


def foreseen_device(device: torch.device | str | int, name: str) -> torch.device:
    """An accelerator by name, of this machine if it has any.

    Raises:
        RuntimeError: it has others only, or that is no device. ValueError: the device is none with memory of its own.
    """
    found = named_device(device, name)
    if found.type in ("cpu", "meta"):
        raise ValueError(f"{name}: expected an accelerator such as 'cuda', got {str(found)!r}. Leave it out.")
    return existing_device(found, name) if torch.accelerator.is_available() else found


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device. One of the host goes through pinned memory, so that the host need not wait."""
    if tensor.is_cpu and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def capturing(device: torch.device) -> bool:
    """Whether what is done on a device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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


def after_stream(device: torch.device, before: torch.Stream | None) -> torch.Stream | None:
    """The current stream of a device, which waits there for an earlier one, if that is another. None: it has none."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    if before is not None and stream != before:
        stream.wait_stream(before)
    return stream
