"""Claim: results of a computation go back to the rows that they were computed from in a fraction of TorchRL's time.

Measured: ``update_if_present`` of 256 rows of 10^6 in RAM, drawn with their generations: a value of one float32; a recurrent state, two
fields of 64 float32; and the value with versions, of which the newer one wins. All rows are still there, so each is written. Every call
names other rows than the 63 before. One thread; the clock counts its CPU time.
"""

import time
from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

UPDATE = Effort(calls=64, blocks=60)
ROWS, BATCH, CALLS = 1_000_000, 256, 64


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """One field, two, and one with versions."""
    sides = [libraries[name] for name in rivals.TORCH_LIKE if libraries[name].module is not None]
    patches = {
        "value": {"value": torch.rand(BATCH, 1)},
        "state": {"h": torch.rand(BATCH, 64), "c": torch.rand(BATCH, 64)},
        "versions": {"value": torch.rand(BATCH, 1)},
    }
    for what, patch in patches.items():
        timing = alternate(
            [Side(one.name, _updating(one, patch, versions=what == "versions")) for one in sides],
            UPDATE.scaled(share),
            time.thread_time_ns,
        )
        yield timed(f"updates/{what}", f"update {BATCH} rows if present · {what}", timing, times=("TorchRL",))


def _updating(library: rivals.Library, patch: dict[str, torch.Tensor], *, versions: bool) -> Callable[[], None]:
    kinds = library.module
    rb = kinds.TensorDictReplayBuffer(
        storage=kinds.LazyTensorStorage(ROWS), writer=kinds.TensorDictRoundRobinWriter(track_generations=True)
    )
    fields = {
        "obs": torch.zeros(ROWS, 8),
        "value": torch.zeros(ROWS, 1),
        "version": torch.zeros(ROWS, dtype=torch.int64),
    }
    rb.extend(TensorDict({**fields, "h": torch.zeros(ROWS, 64), "c": torch.zeros(ROWS, 64)}, [ROWS]))
    drawn = rb.sample(2 * CALLS * BATCH)
    index, first = _first_of_each(drawn["index"])
    if len(index) < CALLS * BATCH:
        raise ValueError(f"updates: expected {CALLS * BATCH} rows, got {len(index)}.")
    names = [index[at : at + BATCH] for at in range(0, CALLS * BATCH, BATCH)]
    generation = drawn["index_generation"][first]
    held = [generation[at : at + BATCH] for at in range(0, CALLS * BATCH, BATCH)]
    keeps = library.name != "engram"  # TorchRL's generations stay as they are when a row is updated
    turns, version = cycle(range(CALLS)), torch.zeros(BATCH, dtype=torch.int64)
    more = {"version_key": "version", "version": version} if versions else {}

    def update() -> None:
        turn = next(turns)
        if versions and turn == 0:
            version.add_(1)
        made = rb.update_if_present(index=names[turn], generation=held[turn], patch=patch, **more)
        if not keeps:
            held[turn] = made.generation

    for _ in range(2 * CALLS):
        update()
    last = rb.update_if_present(index=names[0], generation=held[0], patch={"value": torch.ones(BATCH, 1)})
    if last.updated_count != BATCH:
        raise ValueError(f"updates: expected {BATCH} rows to be written, got {last.updated_count}, of {library.name}.")
    if not keeps:
        held[0] = last.generation
    return update


def _first_of_each(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Different rows in the order in which they were drawn, and where each was."""
    seen: dict[int, int] = {}
    for at, row in enumerate(rows.tolist()):
        seen.setdefault(row, at)
    return torch.tensor(list(seen)), torch.tensor(list(seen.values()))
