"""What ``engram doctor`` finds on a GPU: whether it reads rows in host memory by itself, and how fast batches get there."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path

import torch

from engram._support.words import format_share, format_size
from engram.buffer.replay_buffer import ReplayBuffer
from engram.cli.doctor import SHARED, Finding, noted
from engram.device.loader import DeviceLoader
from engram.storages import LazyTensorStorage
from engram.store.device.accelerator import Accelerator, NotRegistered, Registry
from engram.store.memory import file_block, private_block

#: Rows that are read, their bytes, rows of a batch and batches that are timed; bytes that are registered.
ROWS, ROW_BYTES, BATCH, BATCHES, _REGISTERED_BYTES = 2_048, 28_224, 256, 100, 1 << 20
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
    yield Finding("GPU", f"{name}, {format_size(free)} free of {format_size(total)}")
    obstacle, reads = accelerator.obstacle(), "GPU reads the host"
    if obstacle is not None:
        remedy = next((advice for words, advice in _REMEDIES.items() if words in obstacle), "")
        yield Finding(reads, f"impossible: {obstacle}", "note", remedy + _BLOCK)
    else:
        yield Finding(reads, "nothing stands in the way: driver, Triton, a C compiler, a cache for kernels")
        yield from _registrations(accelerator)
    source = accelerator.memory.empty((BATCH * ROW_BYTES,), torch.uint8)
    pinned = _speed(accelerator, lambda: accelerator.send(source))
    for transport in ("direct", "block") if obstacle is None else ("block",):
        yield from _batches(accelerator, transport, pinned)
    slow = "Cards in full slots reach 12 GB/s and more: nvidia-smi -q has the width of the link." * (pinned < 8e9)
    yield noted("GPU copies", f"{format_size(round(pinned))}/s of pinned memory", slow)


def _registrations(accelerator: Accelerator) -> Iterator[Finding]:
    """Whether the device's driver takes memory of each kind."""
    kinds: dict[str, tuple[Path | None, str]] = {
        "GPU takes RAM": (None, f"ulimit -l unlimited, or less pinned memory elsewhere. Else {_BLOCK}"),
        "GPU takes shared memory": (SHARED, f"A kernel that can pin files of /dev/shm. Else {_BLOCK}"),
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
                stack.enter_context(closing(Registry().register(accelerator, [memory.tensor])))
                yield Finding(
                    kind, "yes" if advice else "yes, or that is no disk; the host copies their rows all the same"
                )
        except (NotRegistered, OSError) as error:
            value = f"no: {error}" if advice else "no, as expected: the host copies their rows"
            yield noted(kind, value, advice)


def _batches(accelerator: Accelerator, transport: str, pinned: float) -> Iterator[Finding]:
    """Whether batches are right, also after a fork, and how fast they are. ``pinned``: bytes per second of one pinned copy."""
    name, is_direct = f"GPU by {transport}", transport == "direct"
    try:
        rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=BATCH)
        rb.extend(_rows(0))
        with DeviceLoader(rb, accelerator.device, transport=transport) as loader:
            batches = iter(loader)
            wrong = _wrong(batches, 0)
            speed = _speed(accelerator, lambda: next(batches))
            if is_direct:
                _fork_while(lambda: rb.extend(_rows(ROWS)))
                # A new iteration: a batch of the old one may have been read ahead, before the fork.
                stale, advice = _wrong(iter(loader), ROWS), "Start processes by spawn or forkserver, and report this."
                after = Finding(f"{name} after a fork", "works")
                yield after._replace(value=stale, status="BAD", advice=advice) if stale else after
    except Exception as error:  # noqa: BLE001 - a line says so, and the others follow
        yield Finding(name, f"fails: {error}", "note", _BLOCK if is_direct else "Use rb.sample().to(device).")
        return
    if wrong:
        yield Finding(name, wrong, "BAD", 'Use another transport="…", and report this.')
        return
    part, what = speed / pinned, f"one pinned copy ({BATCH} rows of {format_size(ROW_BYTES)})"
    faster = 'transport="block" may be: the line below.' if is_direct else "engram.set_num_threads(n) gathers faster."
    slow = f"The copies could be faster. {faster}" * (part < 0.5)
    yield noted(name, f"{format_size(round(speed))}/s, {format_share(part)} of {what}", slow)


def _rows(first: int) -> dict[str, torch.Tensor]:
    """Rows that say which they are in every byte."""
    numbers = torch.arange(first, first + ROWS, device="cpu")
    return {"number": numbers, "bytes": (numbers % 251).to(torch.uint8).unsqueeze(1).repeat(1, ROW_BYTES)}


def _wrong(batches: Iterator[dict[str, torch.Tensor]], first: int) -> str:
    """Look at three batches of such rows. Empty: all are right."""
    wrong = 0
    for batch in islice(batches, 3):
        numbers, values = batch["number"].cpu(), batch["bytes"].cpu()
        here = (numbers >= first) & (numbers < first + ROWS)
        wrong += not bool((here & (values == (numbers % 251).unsqueeze(1)).all(1)).all())
    return f"{wrong} of 3 batches have wrong rows" * bool(wrong)


def _speed(accelerator: Accelerator, call: Callable[[], object]) -> float:
    """Bytes per second of batches."""
    call()
    accelerator.finish()
    begin = time.perf_counter()
    for _ in range(BATCHES):
        call()
    accelerator.finish()
    return BATCHES * BATCH * ROW_BYTES / (time.perf_counter() - begin)


def _fork_while(work: Callable[[], object]) -> None:
    """Work while a forked child has this process's memory, so that what is written moves to other pages."""
    child = os.fork()
    if child == 0:
        time.sleep(60)  # it is killed before
        os._exit(0)
    try:
        work()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
