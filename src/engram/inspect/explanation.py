"""What is known of one row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from engram.errors import RowError
from engram.inspect.estimates import priorities_of, values_of
from engram.plotting.rows import Ends
from engram.samplers._base import DeclaredSampler
from engram.usage import UsageIndex

if TYPE_CHECKING:
    from torch import Tensor

    from engram.plotting.rows import Watched
    from engram.storages import Storage
    from engram.types import Extent

#: Steps of its lane that are looked at before a row, and behind it, for its trajectory.
_STEPS = 1 << 14


class Place(NamedTuple):
    """Where a step is in its trajectory."""

    before: int
    """Steps of the trajectory that are stored before it."""
    after: int
    """Steps of the trajectory that are stored behind it."""
    begun: bool
    """Whether the first step is stored: that before it ends another trajectory, or is none of its lane."""
    ended: bool
    """Whether the last one is."""


class Explanation(NamedTuple):
    """What is known of a row: :meth:`ReplayBuffer.explain`."""

    row: int
    ticket: int
    """The number of its write: ``"index_generation"`` of batches."""
    age: int
    """Rows that have been written, or edited, since, in any lane."""
    lane: int
    steps_ago: int
    """Steps that its lane has had since; 0: it is the newest."""
    trajectory: Place | None
    """None: no field tells trajectories apart, or the lane holds too many steps to see."""
    priority: float | None
    """None: the sampler has no priorities."""
    probability: float | None
    """With which each draw takes it, now; None: that depends on more than the row."""
    times_sampled: int | None
    """Since it was written; None: that is not counted, which ``rb.count_usage()`` begins."""

    def __str__(self) -> str:
        age, steps = _many(self.age, "write"), _many(self.steps_ago, "step")
        said = [f"row {self.row}: ticket {self.ticket}, {age} ago; lane {self.lane}, {steps} ago"]
        if self.trajectory is not None:
            before, after, begun, ended = self.trajectory
            least = "" if begun else "at least "
            more = f"{after:,} behind it" + ("" if ended else ", not ended")
            said.append(f"step {least}{before:,} of its trajectory, {more}")
        if self.priority is not None:
            said.append(f"priority {self.priority:.6g}")
        if self.probability is not None:
            said.append(f"drawn with probability {self.probability:.3g}")
        often = "not counted how often sampled: rb.count_usage()"
        said.append(often if self.times_sampled is None else f"sampled {_many(self.times_sampled, 'time')}")
        return "; ".join(said)


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def explain(self: Watched, row: int | tuple[int, ...]) -> Explanation:
    """What is known of a row: when it was written, where it lies, its trajectory, priority, and how often it was sampled.

    Args:
        row: as a batch says it in ``"index"``; negative ones count live rows from the end, as in ``rb[row]``. With ``ndim > 1`` a
            tuple, as ``rb[…]`` takes it.

    Returns:
        A named tuple of plain values; ``print`` shows it as a sentence. It is of one moment: other processes may write meanwhile.

    Trajectories end where ``done``, ``terminated``, ``truncated`` or ``step_type`` says so, else where an id of trajectories
    changes. 16,384 steps before the row and behind it are looked at.

    Raises:
        RowError: a row that is not live. TypeError: not one row. RuntimeError: the buffer is a connection.

    Cost: reads the end flags of at most 32,768 rows of its lane, and a few words.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
    >>> _ = rb.extend({"obs": torch.arange(5), "done": torch.tensor([0, 1, 0, 0, 0]).bool()})
    >>> found = rb.explain(3)
    >>> found.age, found.trajectory.before, found.trajectory.ended, found.probability
    (1, 1, False, 0.2)
    """
    storage = self.storage
    if storage.traits.is_remote:
        raise RuntimeError(
            "explain: expected the rows in this process, the buffer is a connection. Call it where the store is."
        )
    where = storage.locate(row)
    if not where.single:
        raise TypeError(f"explain: expected one row, got {type(row).__name__}. Ask for one after the other.")
    number = int(where.rows.reshape(-1)[0])
    extent = storage.extent()
    rows = torch.tensor([number], device="cpu")
    ticket = int(storage.tickets_of(rows)[0])
    if ticket < 0 or not bool(extent.contains(rows)[0]):
        raise RowError(f"explain: row {number}: expected a live row, got one that holds nothing.")
    ticket = int(storage.writes_of(rows, torch.tensor([ticket], device="cpu"))[0])
    length = extent.capacity // len(extent.filled)
    lane = number // length
    width = math.prod(storage.columns)
    ago = (extent.seam[lane] - 1 - number) % length // width
    index, usage = priorities_of(storage, self.sampler), None
    if storage.memory is not None:
        usage = UsageIndex.in_use(storage.memory)
    priority = probability = None
    if index is not None:
        leaf, total = index.leaves_of(rows).numpy(), float(index.core.total)
        priority = float(values_of(leaf, index.config)[0])
        probability = float(leaf[0]) / total if total else None
    elif isinstance(self.sampler, DeclaredSampler) and self.sampler.traits.draws_uniformly:
        probability = 1 / extent.size
    return Explanation(
        number,
        ticket,
        max(storage.next_number() - 1 - ticket, 0),
        lane,
        ago,
        _place(storage, extent, number, lane, width),
        priority,
        probability,
        None if usage is None else int(usage.counts(rows)[0]),
    )


def _place(storage: Storage, extent: Extent, row: int, lane: int, width: int) -> Place | None:
    """Where a row is in its trajectory, by the end flags around it."""
    signals = Ends.of(() if storage.memory is None else storage.memory.schema.fields)
    if not signals.fields:
        return None
    length = extent.capacity // len(extent.filled)
    start, filled, seam = lane * length, extent.filled[lane] // width, extent.seam[lane] - lane * length
    ago = (seam - 1 - (row - start)) % length // width  # steps since
    oldest = filled - 1 - ago  # steps of the lane before it
    first, last = min(oldest, _STEPS), min(ago, _STEPS)
    steps = torch.arange(-first, last + 1, device="cpu")
    rows = start + (row - start + steps * width) % length
    ends = _ends(storage, rows, signals)
    if ends is None:
        return None
    before, behind = ends[:first].flip(0), ends[first:]
    begins, stops = before.nonzero(), behind.nonzero()
    begun, ended = len(begins) > 0, len(stops) > 0
    count = int(begins[0]) if begun else first
    after = int(stops[0]) if ended else last
    whole = not begun and first == oldest and filled < length // width  # the lane has not been written over yet
    return Place(count, after, begun or whole, ended)


def _ends(storage: Storage, rows: Tensor, signals: Ends) -> Tensor | None:
    """Whether each step is the last one of a trajectory; None: a row has moved, or holds nothing."""
    tickets = storage.tickets_of(rows)
    if bool((tickets < 0).any()):
        return None
    columns = {}
    for key in signals.fields:
        column, moved = storage.field(key, rows, tickets)
        if moved:
            return None
        columns[key] = column.reshape(len(rows), -1).sum(1, dtype=torch.float64).cpu().numpy()
    return torch.from_numpy(signals.are_set(columns))
