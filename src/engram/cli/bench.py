"""``engram bench``: is it fast here? Small rows, beside NumPy and whatever other libraries are installed."""

from __future__ import annotations

import logging
import os
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import click
import msgspec
import numpy as np
import torch

from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, __version__, num_threads
from engram._words import said_size
from engram.cli.show import echo, problem, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Rows = Mapping[str, NDArray[np.float32]]

#: Values of each field of a row.
_FIELDS = {"obs": (17,), "action": (6,), "next_obs": (17,), "reward": (1,), "done": (1,)}
_ROUNDS = 3
_COPIED = 64 << 20
#: What is measured: the unit, and what one call counts for.
_OPERATIONS = {
    "write": "rows/s, one at a time",
    "extend": "rows/s, a batch at a time",
    "sample": "batches/s",
    "prioritized": "batches/s, drawn by priority, priorities updated",
}


class Library(Protocol):
    """A buffer of one library, full of rows. Each attribute does one call; None: the library has no such call."""

    write: Callable[[], object] | None
    extend: Callable[[], object] | None
    sample: Callable[[], object] | None
    prioritized: Callable[[], object] | None


class Measured(msgspec.Struct):
    """What was found."""

    rows: int
    batch: int
    row_bytes: int
    cores: int
    threads: int
    load: float
    """Programs that wanted a core in the last minute."""
    memory_gb_s: float
    """A copy of 64 MB in memory."""
    libraries: dict[str, str]
    """Versions by name."""
    results: dict[str, dict[str, float]]
    """By operation, then library: ``_OPERATIONS`` says in what."""
    missing: dict[str, str]
    """Libraries that are installed and did not work, and why."""
    problems: list[dict[str, str | int | None]]


def measured(rows: int, batch: int, seconds: float, *, alone: bool = False) -> Measured:
    """Measure all operations of all libraries in turns: the median of three rounds, each of so many seconds.

    Cost: three times ``seconds`` for each number, and memory for one or two full buffers of each library.
    """
    data = _data(batch)
    made, versions, missing = _libraries(rows, data, batch, alone=alone)
    results: dict[str, dict[str, float]] = {}
    for operation in _OPERATIONS:
        calls = {name: call for name, library in made.items() if (call := _call(library, operation)) is not None}
        rates: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(_ROUNDS):
            for name in sorted(calls, reverse=bool(turn % 2)):
                rates[name].append(_rate(calls[name], seconds))
        times = batch if operation == "extend" else 1
        results[operation] = {name: statistics.median(found) * times for name, found in rates.items()}
    found = Measured(
        rows=rows,
        batch=batch,
        row_bytes=sum(array[0].nbytes for array in data.values()),
        cores=len(os.sched_getaffinity(0)),
        threads=num_threads(),
        load=os.getloadavg()[0],
        memory_gb_s=_memory_speed(seconds),
        libraries=versions,
        results=results,
        missing=missing,
        problems=[],
    )
    ours, theirs = results["sample"]["engram"], results["sample"]["NumPy"]
    if ours < theirs:
        what = (
            f"sample: expected engram to be faster than NumPy, got {ours:,.0f} batches/s and {theirs:,.0f}. "
            "If no other program is running, see 'engram doctor'"
        )
        found.problems.append(problem(what))
    return found


def show_measured(found: Measured) -> None:
    """Print a table, and what it means."""
    names = list(found.libraries)
    for operation, unit in _OPERATIONS.items():
        rates = found.results[operation]
        click.echo(f"{operation}: {unit}")
        rows = []
        for name in names:
            if name in rates:
                times = f"{rates['engram'] / rates[name]:.1f}x as fast here" if name != "engram" else ""
                rows.append(
                    (f"  {name} {found.libraries[name]}", f"{rates[name]:,.0f}", f"engram {times}" if times else "")
                )
        echo(table(rows, right=[1]))
    sampled = said_size(round(found.results["sample"]["engram"] * found.batch * found.row_bytes))
    click.echo(f"rows of {said_size(found.row_bytes)}, {found.rows:,} in a buffer, {found.batch:,} in a batch")
    click.echo(f"sampling moves {sampled}/s; a copy in memory {said_size(round(found.memory_gb_s * 1e9))}/s")
    click.echo(f"{found.cores} cores, {found.threads} threads of engram, load {found.load:.1f}")
    if found.load > found.cores * 0.75:
        click.echo("note: other programs are running, so all numbers are smaller than they could be")
    echo(f"note: {name} was left out: {why}" for name, why in found.missing.items())
    echo((f"SLOW {entry['what']}" for entry in found.problems), damaged=True)


# ---- libraries -------------------------------------------------------------------------------------------------------


class _Engram:
    def __init__(self, rows: int, data: Rows, batch: int) -> None:
        tensors = {name: torch.from_numpy(array) for name, array in data.items()}
        row = {name: tensor[0] for name, tensor in tensors.items()}
        plain = ReplayBuffer(storage=LazyTensorStorage(rows), batch_size=batch)
        weighted = ReplayBuffer(
            storage=LazyTensorStorage(rows), sampler=PrioritizedSampler(rows, 0.6, 0.4), batch_size=batch
        )
        for buffer in (plain, weighted):
            for _ in range(-(-rows // batch)):
                buffer.extend(tensors)
        priority = torch.rand(batch)

        def drawn() -> None:
            _, info = weighted.sample(return_info=True)
            weighted.update_priority(info["index"], priority)

        self.write: Callable[[], object] | None = lambda: plain.add(row)
        self.extend: Callable[[], object] | None = lambda: plain.extend(tensors)
        self.sample: Callable[[], object] | None = plain.sample
        self.prioritized: Callable[[], object] | None = drawn


class _NumPy:
    """Arrays and a cursor, as scripts of one file have them."""

    def __init__(self, rows: int, data: Rows, batch: int) -> None:
        arrays = {name: np.zeros((rows, *array.shape[1:]), array.dtype) for name, array in data.items()}
        draws = np.random.default_rng(0)
        cursor = 0

        def write() -> None:
            nonlocal cursor
            for name, array in arrays.items():
                array[cursor] = data[name][0]
            cursor = (cursor + 1) % rows

        def extend() -> None:
            nonlocal cursor
            at = np.arange(cursor, cursor + batch) % rows
            for name, array in arrays.items():
                array[at] = data[name]
            cursor = (cursor + batch) % rows

        def sample() -> dict[str, torch.Tensor]:
            at = draws.integers(0, rows, batch)
            return {name: torch.from_numpy(array[at]) for name, array in arrays.items()}

        self.write: Callable[[], object] | None = write
        self.extend: Callable[[], object] | None = extend
        self.sample: Callable[[], object] | None = sample
        self.prioritized: Callable[[], object] | None = None


class _TorchRL:
    def __init__(self, rows: int, data: Rows, batch: int) -> None:
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage as Storage
        from torchrl.data import TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

        tensors = TensorDict({name: torch.from_numpy(array) for name, array in data.items()}, [batch])
        plain = TensorDictReplayBuffer(storage=Storage(rows), batch_size=batch)
        for _ in range(-(-rows // batch)):
            plain.extend(tensors.clone())
        row, priority = tensors[0].clone(), torch.rand(batch)
        try:
            weighted = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=Storage(rows), batch_size=batch)
        except RuntimeError:  # its extension does not fit this torch
            weighted = None
        else:
            for _ in range(-(-rows // batch)):
                weighted.extend(tensors.clone())

        def drawn() -> None:
            found = weighted.sample()
            weighted.update_priority(found["index"], priority)

        self.write: Callable[[], object] | None = lambda: plain.add(row)
        self.extend: Callable[[], object] | None = lambda: plain.extend(tensors)
        self.sample: Callable[[], object] | None = plain.sample
        self.prioritized: Callable[[], object] | None = None if weighted is None else drawn


class _Cpprb:
    def __init__(self, rows: int, data: Rows, batch: int) -> None:
        import cpprb

        fields = {name: {"shape": array.shape[1:], "dtype": np.float32} for name, array in data.items()}
        plain = cpprb.ReplayBuffer(rows, fields)
        weighted = cpprb.PrioritizedReplayBuffer(rows, fields, alpha=0.6)
        for buffer in (plain, weighted):
            for _ in range(-(-rows // batch)):
                buffer.add(**data)
        row = {name: array[0] for name, array in data.items()}
        priority = np.random.default_rng(0).random(batch, np.float32)

        def drawn() -> None:
            found = weighted.sample(batch, 0.4)
            weighted.update_priorities(found["indexes"], priority)

        self.write: Callable[[], object] | None = lambda: plain.add(**row)
        self.extend: Callable[[], object] | None = lambda: plain.add(**data)
        self.sample: Callable[[], object] | None = lambda: plain.sample(batch)
        self.prioritized: Callable[[], object] | None = drawn


class _StableBaselines:
    def __init__(self, rows: int, data: Rows, batch: int) -> None:
        from gymnasium.spaces import Box
        from stable_baselines3.common.buffers import ReplayBuffer as Buffer

        observed, acted = (Box(-1, 1, shape=_FIELDS[name], dtype=np.float32) for name in ("obs", "action"))
        buffer = Buffer(rows, observed, acted, device="cpu")
        fields = ("obs", "next_obs", "action", "reward", "done")
        obs, next_obs, action, reward, done = (data[name][0] for name in fields)

        def write() -> None:
            buffer.add(obs, next_obs, action, reward, done, [{}])

        for _ in range(rows):
            write()
        self.write: Callable[[], object] | None = write
        self.extend: Callable[[], object] | None = None
        self.sample: Callable[[], object] | None = lambda: buffer.sample(batch)
        self.prioritized: Callable[[], object] | None = None


#: By name: the module to find, the distribution whose version is told, and the buffer. Without a module it is always there.
_RIVALS: dict[str, tuple[str, str, Callable[[int, Rows, int], Library]]] = {
    "TorchRL": ("torchrl", "torchrl", _TorchRL),
    "cpprb": ("cpprb", "cpprb", _Cpprb),
    "SB3": ("stable_baselines3", "stable-baselines3", _StableBaselines),
}


def _libraries(
    rows: int, data: Rows, batch: int, *, alone: bool
) -> tuple[dict[str, Library], dict[str, str], dict[str, str]]:
    """Buffers, versions, and what could not be used."""
    logging.getLogger("torchrl").setLevel(logging.ERROR)  # which prints a line about each new buffer
    made: dict[str, Library] = {"engram": _Engram(rows, data, batch), "NumPy": _NumPy(rows, data, batch)}
    versions, missing = {"engram": __version__, "NumPy": np.__version__}, {}
    for name, (module, distribution, make) in ({} if alone else _RIVALS).items():
        if find_spec(module) is None:
            continue
        try:
            made[name] = make(rows, data, batch)
            versions[name] = version(distribution)
        except (ImportError, PackageNotFoundError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            made.pop(name, None)
            missing[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return made, versions, missing


def _call(library: Library, operation: str) -> Callable[[], object] | None:
    calls = {
        "write": library.write,
        "extend": library.extend,
        "sample": library.sample,
        "prioritized": library.prioritized,
    }
    return calls[operation]


# ---- the clock -------------------------------------------------------------------------------------------------------


def _data(batch: int) -> Rows:
    draws = np.random.default_rng(0)
    return {name: draws.random((batch, *shape), np.float32) for name, shape in _FIELDS.items()}


def _rate(call: Callable[[], object], seconds: float) -> float:
    """Calls per second. The clock is read after each call, which takes 50 ns."""
    call()
    began, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds or not calls:
        call()
        calls += 1
    return calls / max(elapsed, 1e-9)


def _memory_speed(seconds: float) -> float:
    source, target = np.zeros(_COPIED, np.uint8), np.ones(_COPIED, np.uint8)
    return _rate(lambda: np.copyto(target, source), min(seconds, 0.2)) * _COPIED / 1e9
