"""What ``engram doctor`` finds on a GPU: whether it reads rows in host memory by itself, and how fast batches get there."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engram._support.words import said_size
from engram.buffer.replay_buffer import ReplayBuffer
from engram.cli.doctor import SHARED, Finding
from engram.device.loader import DeviceLoader
from engram.storages import LazyTensorStorage
from engram.store.device.registry import NotRegistered, Registry
from engram.store.memory import file_block, private_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engram.store.device.accelerator import Accelerator

#: Rows that are read, their bytes, rows of a batch and batches that are timed.
ROWS, ROW_BYTES, BATCH, BATCHES = 2_048, 28_224, 256, 100
_REGISTERED_BYTES = 1 << 20
_BLOCK = 'DeviceLoader copies batches through the host (transport="block").'
#: What to do about an obstacle, by words of it.
_REMEDIES = {
    "Triton is not installed": "Install the version that torch names: pip install triton. ",
    "no C compiler": "Install one (Debian, Ubuntu: apt install gcc). ",
    "cannot write to its cache": "export TRITON_CACHE_DIR=/a/folder/that/can/be/written. ",
    "CUDA driver cannot be used": "In a container, start it with the driver's libraries: docker run --gpus all. ",
}


def gpu_findings(accelerator: Accelerator, name: str) -> Iterator[Finding]:
    """What was found on a device, in the order to show it. ``name``: of the device."""
    free, total = accelerator.room()
    yield Finding("GPU", f"{name}, {said_size(free)} free of {said_size(total)}")
    obstacle = accelerator.obstacle()
    if obstacle is not None:
        remedy = next((advice for words, advice in _REMEDIES.items() if words in obstacle), "")
        yield Finding("GPU reads the host", f"impossible: {obstacle}", "note", remedy + _BLOCK)
    else:
        yield Finding(
            "GPU reads the host", "nothing stands in the way: driver, Triton, a C compiler, a cache for kernels"
        )
        yield from _registrations(accelerator)
    pinned = _speed(accelerator, _copies(accelerator))
    for transport in ("direct", "block") if obstacle is None else ("block",):
        yield from _batches(accelerator, transport, pinned)
    slow = (
        "A card in a full slot reaches 12 GB/s and more: nvidia-smi -q says how wide its link is."
        if pinned < 8e9
        else ""
    )
    yield Finding("GPU copies", f"{said_size(round(pinned))}/s of pinned memory", "note" if slow else "ok", slow)


def _registrations(accelerator: Accelerator) -> Iterator[Finding]:
    """Whether the device's driver takes memory of each kind."""
    registry = Registry()
    kinds: dict[str, tuple[Path | None, str]] = {
        "GPU takes RAM": (None, f"ulimit -l unlimited, or less pinned memory elsewhere. Else {_BLOCK}"),
        "GPU takes shared memory": (
            SHARED,
            f"Keep rows that processes share in /dev/shm on a kernel that can pin it. Else {_BLOCK}",
        ),
        "GPU takes files on a disk": (Path(tempfile.gettempdir()), ""),
    }
    for kind, (folder, advice) in kinds.items():
        try:
            with ExitStack() as stack:
                memory = private_block(_REGISTERED_BYTES)
                if folder is not None:
                    file = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder))
                    file.truncate(_REGISTERED_BYTES)
                    memory = file_block(Path(file.name), _REGISTERED_BYTES)
                stack.enter_context(closing(registry.register(accelerator, [memory.tensor])))
                yield Finding(
                    kind, "yes" if advice else "yes, or that is no disk. Rows in files go through the host all the same"
                )
        except (NotRegistered, OSError) as error:
            if advice:
                yield Finding(kind, f"no: {error}", "note", advice)
            else:
                yield Finding(kind, "no, as expected: rows in files go through the host")


def _batches(accelerator: Accelerator, transport: str, pinned: float) -> Iterator[Finding]:
    """Whether batches are right, also after a fork, and how fast they are. ``pinned``: bytes per second of one pinned copy."""
    name = f"GPU by {transport}"
    try:
        rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=BATCH)
        rb.extend(_rows(0))
        with DeviceLoader(rb, accelerator.device, transport=transport) as loader:
            batches = iter(loader)
            wrong = sum(_is_wrong(batch, 0) for batch in islice(batches, 3))
            speed = _speed(accelerator, lambda: next(batches))
            if transport == "direct":
                _fork_while(lambda: rb.extend(_rows(ROWS)))
                stale = sum(_is_wrong(batch, ROWS) for batch in islice(batches, 3))
                after = "works" if not stale else f"{stale} of 3 batches have wrong rows"
                advice = "" if not stale else "Start processes by spawn or forkserver, and report this."
                yield Finding(f"{name} after a fork", after, "BAD" if stale else "ok", advice)
    except Exception as error:  # noqa: BLE001 - a line says so, and the others follow
        yield Finding(
            name, f"fails: {error}", "note", _BLOCK if transport == "direct" else "Use rb.sample().to(device)."
        )
        return
    if wrong:
        yield Finding(
            name, f"{wrong} of 3 batches have wrong rows", "BAD", 'Use another transport="…", and report this.'
        )
        return
    part, advice = speed / pinned, ""
    if part < 0.5:
        advice = "It is slower than the copies could be. " + (
            'transport="block" may be faster: the line below says so.'
            if transport == "direct"
            else "More threads gather faster: engram.set_num_threads(n)."
        )
    value = (
        f"{said_size(round(speed))}/s, {100 * part:.0f} % of one pinned copy ({BATCH} rows of {said_size(ROW_BYTES)})"
    )
    yield Finding(name, value, "note" if advice else "ok", advice)


def _rows(first: int) -> dict[str, torch.Tensor]:
    """Rows that say which they are in every byte."""
    numbers = torch.arange(first, first + ROWS, device="cpu")
    return {"number": numbers, "bytes": (numbers % 251).to(torch.uint8).unsqueeze(1).repeat(1, ROW_BYTES)}


def _is_wrong(batch: dict[str, torch.Tensor], first: int) -> bool:
    numbers, values = batch["number"].cpu(), batch["bytes"].cpu()
    here = (numbers >= first) & (numbers < first + ROWS)
    return not bool((here & (values == (numbers % 251).unsqueeze(1)).all(1)).all())


def _copies(accelerator: Accelerator) -> Callable[[], object]:
    source = accelerator.memory.empty((BATCH * ROW_BYTES,), torch.uint8)
    return lambda: accelerator.send(source)


def _speed(accelerator: Accelerator, call: Callable[[], object]) -> float:
    """Bytes per second of batches."""
    for _ in range(3):
        call()
    accelerator.finish()
    begin = time.perf_counter()
    for _ in range(BATCHES):
        call()
    accelerator.finish()
    return BATCHES * BATCH * ROW_BYTES / (time.perf_counter() - begin)


def _fork_while(work: Callable[[], object]) -> None:
    """Work while a forked child has this process's memory, so that what is written moves to other pages."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs nothing
        child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        work()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
