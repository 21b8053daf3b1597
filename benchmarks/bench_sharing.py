"""Claim: one buffer in many processes costs little more than one in one process, and many times less than elsewhere.

Measured: processes that work concurrently. Their calls are counted in time windows that all of them know beforehand; sides
take turns. Rows as in ``writing``: TensorDicts of 97 bytes, 100,000 of them; the ring is full before the clock starts.

- Writers: two processes extend one buffer by 64 rows; rows per second of both together. "A lane each" is engram with one
  lane per writer; TorchRL, and engram otherwise, have one cursor for both. Processes share TorchRL's storage in RAM
  only with ``shared_init``, and then it is a memory-mapped file.
- Writers beside a sampler, and a sampler beside writers (uniform, batches of 256, RAM). More processes than cores
  share the cores, whatever they do, and two busy cores of one chip are slower than one. Therefore there are two ratios.
  "Alone" is the raw one: compared with the same work without the others. "Another program" excludes these effects:
  compared with the same work beside processes that use a buffer of their own. That is lenient, because the second buffer
  causes more cache misses. Both are judged, except the raw one if there are fewer cores than processes (it then measures
  the scheduler), or if that other program alone costs more than the floor allows.
- Priorities: sample and update 256 of 1,000,000 rows in a store that a second, idle process has open, against one that is
  private to its process. Fields and tree of the private one are in huge pages where available; those of files rarely are.
- Recovery: 10,000,000 rows of one float32 with priorities, two processes that write, sample and update; both are
  killed at once. Measured is ``ReplayBuffer.open`` in a new process after its imports, compared with opening the same
  store after it was closed in order. Its files are in the page cache, as they are after such a death.
- Reverb, only if ``REVERB_PYTHON`` names the Python of an environment that has it: see ``reverb_peer``. One writer with
  its server against one writer; one sampler with its server against one sampler.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import data, machine, rivals
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.timing import Effort, Side, Spread, Timing, alternate, once, together
from benchmarks.workers import Forked, Program, Shift, Worker, in_turns

WRITE = Shift(length_s=0.15, windows=11)
BESIDE = Shift(length_s=0.2, windows=11)
REVERB = Shift(length_s=0.4, windows=7)
PRIORITIZED = Effort(calls=30, blocks=40)
RECOVERIES = 7

CHUNK, BATCH = 64, 256
PRIORITY_ROWS, RECOVERY_ROWS = 10**6, 10**7
ALPHA, BETA = 0.6, 0.4
FIRST_MARK = 2.0
"""What writer 0 leaves in a place where filling left less than 1: so it can be seen that its rows came."""
FILE = "TorchRL: LazyTensorStorage with shared_init, which keeps the rows in a memory-mapped file."
FEW_CORES = "More processes than cores: the ratio to being alone measures the scheduler, and is not judged."
TAKEN = "A program that shares nothing costs more than the floor allows: the raw ratio is not judged."
NO_REVERB = (
    "Not measured: REVERB_PYTHON does not name the Python of an environment that has dm-reverb and its tensorflow."
)


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Beside TorchRL, then engram beside itself, then beside Reverb."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from _writing(libraries, folder, share)
        if libraries["engram"].module is not None:
            yield from _beside(libraries["engram"], folder / "beside", share)
            yield from _prioritized(libraries["engram"].module, folder / "prioritized", share)
            yield _recovery(libraries["engram"].module, folder / "recovery", share)
            yield from _reverb(libraries["engram"], folder / "reverb", share)


# ---- two writers -----------------------------------------------------------------------------------------------------


def _writing(libraries: rivals.Libraries, folder: Path, share: float) -> Iterator[Row]:
    kinds = {
        "memmap": ("memmap", "ReplayBuffer"),
        "td-memmap": ("memmap", "TensorDictReplayBuffer"),
        "tensor": ("tensor", "ReplayBuffer"),
    }
    for key, (storage, buffer) in kinds.items():
        replays: dict[str, Any] = {}
        for library in (libraries[name] for name in rivals.TORCH_LIKE if libraries[name].module is not None):
            replays[library.name] = _full(library, storage, folder / key, buffer)
        if "engram" in replays:
            apart = _full(libraries["engram"], storage, folder / key / "lanes", buffer, lanes=2)
            replays["a lane each"] = apart
        workers = {
            name: [Forked(partial(_writer, replay, k, k if name == "a lane each" else None)) for k in range(2)]
            for name, replay in replays.items()
        }
        turns = in_turns(workers, WRITE.scaled(share))
        for name, replay in replays.items():
            _check_written(replay, workers[name], exact=name != "TorchRL")
        _stop(workers)
        for replay in replays.values():
            getattr(replay, "close", lambda: None)()
        timing = Timing(1, {name: [together(turn) for turn in found] for name, found in turns.items()})
        what = f"two writers, 64 rows · {buffer} · {rivals.SHORT[storage]}, rows/s"
        notes = {"TorchRL": FILE} if storage == "tensor" else {}
        row = timed(f"sharing/write/{key}", what, timing, times=("TorchRL",), share=("a lane each",), notes=notes)
        yield row.as_rate(CHUNK)


def _full(library: rivals.Library, storage: str, folder: Path, buffer: str = "ReplayBuffer", lanes: int = 1) -> Any:
    """A buffer for many processes whose every row is written."""
    more = {} if lanes == 1 else {"lanes": lanes}
    replay = rivals.torch_like(
        library, storage, data.ROWS, folder, batch_size=BATCH, buffer=buffer, shared=True, **more
    )
    rows = data.tensordict(data.fields())
    if lanes == 1:
        replay.extend(rows)
    else:
        for lane, part in enumerate(rows.chunk(lanes)):
            replay.extend(part, lane=lane)
    return replay


def _writer(replay: Any, number: int, lane: int | None = None) -> Callable[[], object]:
    """What writer ``number`` calls. Made in its process."""
    fields = data.fields(200 * CHUNK)
    fields["b"][:, 0, 1] = FIRST_MARK + number
    extend = replay.extend if lane is None else partial(replay.extend, lane=lane)
    return data.each(extend, data.tensordicts(data.pieces(fields, CHUNK)))


def _check_written(replay: Any, writers: Sequence[Forked], *, exact: bool) -> None:
    """Refuse writers whose rows are not there, of whom there are less than ``writers`` said, or that are torn.

    Raises:
        ValueError: one of that.
    """
    marks = replay[:]["b"][:, 0, 1]
    for number in range(len(writers)):
        if not bool((marks == FIRST_MARK + number).any()):
            raise ValueError(f"sharing: expected rows of writer {number}, got none.")
    expected = data.ROWS + CHUNK * sum(writer.calls for writer in writers)
    if exact and replay.write_count != expected:
        raise ValueError(f"sharing: expected {expected} rows written, got {replay.write_count}.")
    data.check(replay.sample(), size=BATCH)


def _stop(workers: Mapping[str, Sequence[Worker]]) -> None:
    for worker in {id(worker): worker for side in workers.values() for worker in side}.values():
        worker.stop()


# ---- writers and a sampler -------------------------------------------------------------------------------------------


def _beside(engram: rivals.Library, folder: Path, share: float) -> Iterator[Row]:
    """Everybody alone, with the others, and with others who do the same in a buffer of their own."""
    replay, apart = (_full(engram, "tensor", folder) for _ in range(2))
    sampler, other_sampler = (Forked(partial(_sampler, one)) for one in (replay, apart))
    writers, other_writers = ([Forked(partial(_writer, one, k)) for k in range(2)] for one in (replay, apart))
    sides: dict[str, list[Forked]] = {"sampler": [sampler]}
    for n in (1, 2):
        sides |= {
            f"{n} alone": writers[:n],
            f"{n} together": [*writers[:n], sampler],
            f"{n} apart": [*writers[:n], other_sampler],
            f"{n} others": [*other_writers[:n], sampler],
        }
    turns = in_turns(sides, BESIDE.scaled(share))
    _check_written(replay, writers, exact=True)
    _stop(sides)
    replay.close()
    apart.close()

    def rates(side: str, n: int) -> list[float]:
        return [together(turn[:n]) for turn in turns[side]]

    def tails(side: str) -> list[float]:
        return [turn[-1].p99_us for turn in turns[side]]

    for n, name, many in ((1, "1-writer", "one writer"), (2, "2-writers", "two writers")):
        found = {"engram": "together", "alone": "alone", "another program": "apart"}
        timing = Timing(1, {label: rates(f"{n} {side}", n) for label, side in found.items()})
        key, what = f"sharing/{name}-beside-sampler", f"{many} beside a sampler, rows/s"
        yield _judged(timed(key, what, timing, share=("another program", "alone")), n + 1).as_rate(CHUNK)
        blocks = {"engram": f"{n} together", "alone": "sampler", "another program": f"{n} others"}
        timing = Timing(1, {label: tails(side) for label, side in blocks.items()})
        key, what = f"sharing/p99-beside-{name}", f"p99 of a sample of 256 beside {many}"
        yield _judged(timed(key, what, timing, share=("another program", "alone")), n + 1)


def _judged(row: Row, processes: int) -> Row:
    """Without the verdict on the raw ratio, where a program that shares nothing costs as much as is allowed."""
    alone, apart = row.spreads["alone"].median, row.spreads["another program"].median
    bound = FLOORS[row.key, "alone"].bound
    if machine.cores() < processes:
        row.notes["engram"] = FEW_CORES
    elif apart > bound * alone:
        row.notes["engram"] = TAKEN
    else:
        return row
    return row.unjudged("alone")


def _sampler(replay: Any) -> Callable[[], object]:
    data.check(replay.sample(), size=BATCH)
    sample: Callable[[], object] = replay.sample
    return sample


# ---- priorities ------------------------------------------------------------------------------------------------------


def _prioritized(engram: Any, folder: Path, share: float) -> Iterator[Row]:
    rows = data.tensordict(data.fields(PRIORITY_ROWS))
    storages = {
        "private": engram.LazyTensorStorage(PRIORITY_ROWS),
        "tensor": engram.LazyTensorStorage(PRIORITY_ROWS),
        "memmap": engram.LazyMemmapStorage(PRIORITY_ROWS, scratch_dir=folder),
    }
    replays = {}
    for name, storage in storages.items():
        replay = engram.TensorDictReplayBuffer(
            storage=storage,
            sampler=engram.PrioritizedSampler(PRIORITY_ROWS, ALPHA, BETA),
            batch_size=BATCH,
            shared=name != "private",
        )
        replay.extend(rows)
        replay.update_priority(torch.arange(PRIORITY_ROWS), torch.rand(PRIORITY_ROWS))
        replays[name] = replay
    idle = [Forked(partial(_learner, replay)) for name, replay in replays.items() if name != "private"]
    timing = alternate([Side(name, _learner(replay)) for name, replay in replays.items()], PRIORITIZED.scaled(share))
    for worker in idle:
        worker.stop()
    for replay in replays.values():
        replay.close()
    for key in ("tensor", "memmap"):
        blocks = {"engram": timing.blocks_us[key], "private": timing.blocks_us["private"]}
        what = f"sample and update 256 priorities · shared {rivals.SHORT[key]}, against private"
        yield timed(f"sharing/prioritized/{key}", what, Timing(timing.calls, blocks), share=("private",))


def _learner(replay: Any) -> Callable[[], object]:
    """A sample and an update of its priorities. Called once here, so that the process is attached and warm."""
    fresh = torch.rand(BATCH)

    def learn() -> None:
        batch = replay.sample()
        batch["td_error"] = fresh
        replay.update_tensordict_priority(batch)

    learn()
    return learn


# ---- after all have died ---------------------------------------------------------------------------------------------


def _recovery(engram: Any, folder: Path, share: float) -> Row:
    """Everything in children: here the store is never open."""
    in_child(_make_small_rows, engram, folder)
    found: dict[str, list[float]] = {"engram": [], "after a close": []}
    for _ in range(max(5, round(RECOVERIES * share))):
        _die(engram, folder)
        found["engram"].append(in_child(_open, engram, folder))
        found["after a close"].append(in_child(_open, engram, folder))
    spreads = {side: Spread.of(values) for side, values in found.items()}
    judged = Comparison("100 ms", "value", spreads["engram"], FLOORS["sharing/recovery", "100 ms"])
    note = (
        "Of that, recovery of tickets and priorities is what opening the same store takes longer than after it was "
        f"closed in order: {spreads['engram'].median - spreads['after a close'].median:.0f} ms."
    )
    what = "open 10,000,000 rows with priorities after all processes were killed"
    return Row("sharing/recovery", what, spreads, [judged], unit="ms", notes={"engram": note})


def _make_small_rows(engram: Any, folder: Path) -> None:
    replay = engram.TensorDictReplayBuffer(
        storage=engram.LazyMemmapStorage(RECOVERY_ROWS, scratch_dir=folder),
        sampler=engram.PrioritizedSampler(RECOVERY_ROWS, ALPHA, BETA),
        batch_size=BATCH,
    )
    replay.extend(TensorDict({"a": torch.rand(RECOVERY_ROWS)}, [RECOVERY_ROWS]))
    replay.update_priority(torch.arange(RECOVERY_ROWS), torch.rand(RECOVERY_ROWS))
    replay.close()


def _die(engram: Any, folder: Path) -> None:
    """Two processes at work, killed somewhere in the middle of it."""
    workers = [Forked(partial(_actor_and_learner, engram, folder)) for _ in range(2)]
    for worker in workers:
        worker.begin_without_end()
    time.sleep(0.2 + 0.1 * random.random())
    for worker in workers:
        worker.kill()


def _actor_and_learner(engram: Any, folder: Path) -> Callable[[], object]:
    replay = engram.ReplayBuffer.open(folder)
    learn = _learner(replay)
    step = TensorDict({"a": torch.rand(CHUNK)}, [CHUNK])

    def work() -> None:
        replay.extend(step)
        learn()

    return work


def _open(engram: Any, folder: Path) -> float:
    """Milliseconds."""
    elapsed_ms, replay = once(partial(engram.ReplayBuffer.open, folder))
    if len(replay) < RECOVERY_ROWS - 10**4 or len(replay.sample()) != BATCH:
        raise ValueError(f"sharing: expected nearly {RECOVERY_ROWS} rows to be there, got {len(replay)}.")
    replay.close()
    return elapsed_ms


def in_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """What ``work`` returns in a process of its own."""
    ours, theirs = get_context("fork").Pipe()
    child = get_context("fork").Process(target=lambda: theirs.send(work(*arguments)))
    child.start()
    theirs.close()
    found = ours.recv()
    child.join()
    return found


# ---- Reverb ----------------------------------------------------------------------------------------------------------


def _reverb(engram: rivals.Library, folder: Path, share: float) -> Iterator[Row]:
    python = os.environ.get("REVERB_PYTHON")
    if not python:
        yield Row("sharing/reverb", "one writer, one sampler · Reverb", {}, [], notes={"engram": NO_REVERB})
        return
    server = Program(python, "benchmarks.reverb_peer", "server", str(data.ROWS))
    address = f"localhost:{server.said['port']}"
    roles = ("write", "write-together", "sample", "prioritized")
    peers = {role: Program(python, "benchmarks.reverb_peer", role, address) for role in roles}
    replay = _full(engram, "memmap", folder)
    learner = engram.module.TensorDictReplayBuffer(
        storage=engram.module.LazyMemmapStorage(data.ROWS, scratch_dir=folder / "prioritized"),
        sampler=engram.module.PrioritizedSampler(data.ROWS, ALPHA, BETA),
        batch_size=BATCH,
    )
    learner.extend(data.tensordict(data.fields()))
    ours: dict[str, Worker] = {
        "write": Forked(partial(_writer, replay, 0)),
        "sample": Forked(partial(_sampler, replay)),
        "prioritized": Forked(partial(_sampler, learner)),
    }
    sides: dict[str, list[Worker]] = {f"engram {role}": [worker] for role, worker in ours.items()}
    turns = in_turns({**sides, **{role: [peer] for role, peer in peers.items()}}, REVERB.scaled(share))
    _stop({**sides, "Reverb": [*peers.values(), server]})  # the server last
    replay.close()
    learner.close()
    note = f"Beside Reverb {server.said['reverb']} with TensorFlow {server.said['tensorflow']}, over loopback."

    def row(role: str, what: str, name: str = "Reverb") -> Row:
        found = {"engram": turns[f"engram {role.removesuffix('-together')}"], name: turns[role]}
        timing = Timing(1, {side: [together(turn) for turn in each] for side, each in found.items()})
        return timed(f"sharing/reverb/{role}", what, timing, times=(name,), notes={"engram": note})

    yield row("write", "one writer, 64 rows · Reverb: an item per row, rows/s").as_rate(CHUNK)
    as_one = "Reverb, 64 rows an item"
    yield row("write-together", "… · Reverb: 64 rows as one item, drawn only together", as_one).as_rate(CHUNK)
    yield row("sample", "one sampler, batches of 256 · uniform")
    yield row("prioritized", "one sampler, batches of 256 · prioritized")
