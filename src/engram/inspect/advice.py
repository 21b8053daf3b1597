"""Advice with numbers: whether a buffer does what it is there for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from engram._support.field_paths import public
from engram._support.words import count, format_share
from engram.around import SliceSampler
from engram.errors import RowError
from engram.format import layout, schema
from engram.inspect.plots import Ends, Scan, Watched, check_here, effective, index_of, looked_at, values_of
from engram.samplers import PrioritizedSampler
from engram.samplers._base import DeclaredSampler
from engram.storages import Storage
from engram.store import lifetime, priorities, row_indexes
from engram.store.memory import read_block
from engram.store.store import Store
from engram.types import Extent

#: Rows that estimates are of.
MOST = 4096


def gauges(storage: Storage, sampler: object) -> dict[str, float]:
    """What ``ReplayBuffer.stats`` says beyond sizes and counters. What is not known is not there.

    Args:
        storage: whose rows are looked at; of one whose rows are on a server, which knows them, nothing.
        sampler: of the buffer.

    Cost: looks at 4,096 rows at most, a word or two each, however many there are.
    """
    if storage.traits.is_remote:
        return {}
    store = storage.memory
    found = _bytes(storage, store) | ({} if store is None else store.core.meter())
    usage = None if store is None else row_indexes.UsageIndex.in_use(store)
    found["usage_counted"] = int(usage is not None)
    extent = storage.extent()
    rows, tickets = looked_at(storage, extent, MOST) if extent.size else (torch.empty(0),) * 2
    if not len(rows):
        return found
    ages = np.maximum(storage.next_number() - 1 - tickets.numpy(), 0)
    found |= {"age_mean": float(ages.mean()), "age_p99": float(np.quantile(ages, 0.99))}
    if usage is not None:
        found["never_sampled_frac"] = float((usage.counts(rows).numpy() == 0).mean())
    index = priorities_of(storage, sampler)
    return found if index is None else found | _stored_priorities(index, rows, extent.size)


def effective_size(storage: Storage) -> float | None:
    """Of a store in a folder that is only read: the effective sample size of its priorities now, whatever the sampler of the buffer.

    None: it has no priorities, or several, or its rows are elsewhere. Raises as reading their file. Cost: copies them.
    """
    if storage.traits.is_remote:
        return None
    store = storage.memory
    folder = None if store is None else store.folder
    if store is None or folder is None:
        return None
    paths = [*(folder / layout.FOLDER / layout.INDEXES).glob(f"*/{priorities.PriorityIndex.kind}")]
    extent = storage.extent()
    rows, _ = looked_at(storage, extent, MOST) if extent.size else (torch.empty(0),) * 2
    if len(paths) != 1 or not len(rows):
        return None
    block = priorities.PriorityIndex.copied(read_block(paths[0], paths[0].stat().st_size).tensor)
    return _stored_priorities(priorities.PriorityIndex(block, None), rows, extent.size)["priority_ess"]


def priorities_of(storage: Storage, sampler: object) -> priorities.Priorities | None:
    """The priorities that a sampler draws by, if there are any."""
    name = index_of(sampler, priorities.PriorityIndex.kind)
    if name is None:
        return None
    if storage.memory is not None:
        return storage.memory.indexes.get((name, priorities.PriorityIndex.kind))
    return sampler.priorities() if isinstance(sampler, PrioritizedSampler) and len(storage) else None  # of a list


def drawing_by(sampler: object) -> object:
    """The sampler whose priorities rows are drawn by: the one inside expanders; of windows, their anchors."""
    inner = sampler.chooser if isinstance(sampler, DeclaredSampler) else sampler
    return inner.anchors if isinstance(inner, SliceSampler) and inner.anchors is not None else inner


def is_over_batch(sampler: object) -> bool:
    """Whether weights are over the largest of each batch."""
    by = drawing_by(sampler)
    return isinstance(by, PrioritizedSampler) and by.normalize == "batch"


def _stored_priorities(index: priorities.Priorities, rows: torch.Tensor, size: int) -> dict[str, float]:
    """Of rows that stand for all ``size``."""
    leaves = index.leaves_of(rows).numpy()
    values = values_of(leaves, index.config)
    largest = float(values.max(initial=0.0))
    mean, diverse = largest * float((values / largest).mean()) if largest else 0.0, effective(leaves) * size / len(rows)
    return {"priority_max": float(index.core.default_priority), "priority_mean": mean, "priority_ess": diverse}


def _bytes(storage: Storage, store: Store | None) -> dict[str, float]:
    """Memory and disk of rows, their tickets and indexes, when all rows are written."""
    if store is None:
        return {"bytes_ram": storage.nbytes, "bytes_disk": 0}
    nbytes = store.nbytes + sum(len(memory) for memory in store.control_memory)
    nbytes += sum(store.indexes[key].block.nbytes for key in tuple(store.indexes))  # another thread may add one
    on_disk = store.folder is not None
    if store.folder is not None and (memory := lifetime.shared_memory()).parent.name == "dev":
        on_disk = os.stat(store.folder).st_dev != os.stat(memory).st_dev
    return {"bytes_ram": 0 if on_disk else nbytes, "bytes_disk": nbytes if on_disk else 0}


#: Steps of its lane that are looked at before a row, and behind it, for its trajectory.
_STEPS = 1 << 14


class Place(NamedTuple):
    """The place of a step in its trajectory."""

    #: Steps of the trajectory that are stored before it.
    before: int
    #: Steps of the trajectory that are stored behind it.
    after: int
    #: Whether the first step is stored: that before it ends another trajectory, or is none of its lane.
    begun: bool
    #: Whether the last one is.
    ended: bool


class Explanation(NamedTuple):
    """All that is known of a row: the result of :meth:`ReplayBuffer.explain`."""

    row: int
    #: The number of its write: ``"index_generation"`` of batches.
    ticket: int
    #: Rows that have been written, or edited, since, in any lane.
    age: int
    lane: int
    #: Steps that its lane has had since; 0: it is the newest.
    steps_ago: int
    #: None: no field tells trajectories apart, or the lane holds too many steps to see.
    trajectory: Place | None
    #: None: the sampler has no priorities.
    priority: float | None
    #: With which each draw takes it, now; None: that depends on more than the row.
    probability: float | None
    #: Since it was written; None: that is not counted, which ``rb.count_usage()`` begins.
    times_sampled: int | None

    def __str__(self) -> str:
        age, steps = count(self.age, "write"), count(self.steps_ago, "step")
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
        said.append(often if self.times_sampled is None else f"sampled {count(self.times_sampled, 'time')}")
        return "; ".join(said)


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
    check_here(storage, "explain")
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
    index = priorities_of(storage, self.sampler)
    usage = None if storage.memory is None else row_indexes.UsageIndex.in_use(storage.memory)
    priority = probability = None
    if index is not None:
        leaf, total = index.leaves_of(rows).numpy(), float(index.core.total)
        priority = float(values_of(leaf, index.config)[0])
        probability = float(leaf[0]) / total if total else None
    elif isinstance(self.sampler, DeclaredSampler) and self.sampler.traits.draws_uniformly:
        probability = 1 / extent.size
    age, place = max(storage.next_number() - 1 - ticket, 0), _place(storage, extent, number, lane, width)
    sampled = None if usage is None else int(usage.counts(rows)[0])
    return Explanation(number, ticket, age, lane, ago, place, priority, probability, sampled)


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


def _ends(storage: Storage, rows: torch.Tensor, signals: Ends) -> torch.Tensor | None:
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


#: Of the draws, this share is taken by few rows if the exponent is too high: by fewer than that share of the rows.
_MOST_DRAWS, _FEW_ROWS = 0.9, 0.1
#: Rows from which on shares of them say something.
_MANY = 1_000
#: Rows that are compared with the ones that follow.
_PAIRS = 512
#: The share of equal ones from which on next observations are stored twice.
_EQUAL = 0.8
#: Samples per row outside of which a ratio is worth a word.
_LEAST_RATIO, _MOST_RATIO = 1.0, 256.0
#: Never sampled are no more rows than this, where rows were sampled that often on average.
_NEVER, _OFTEN = 0.5, 2.0
#: The largest importance weight that batches of so many rows are expected to have, below which they hardly change what learns.
_BATCH, _LEAST_WEIGHT = 256, 0.01
#: A row is stale if so many times more writes came since than rows are live; and so many of them are worth a word.
_LAPS, _STALE = 2.0, 0.05


def count_usage(self: Watched) -> None:
    """Count from now on how often each row is sampled: an index of 4 bytes a row, which stays with the store.

    Every process that samples from the store counts, from its next sample on. A row that is written again begins at 0; edits keep
    the count, and so does :meth:`open`. Then ``stats()`` has ``never_sampled_frac``, and :meth:`explain`, :meth:`health` and
    ``rb.plot.usage()`` say how often. Repeatable. A row that is written over while it is sampled may begin at 1.

    Raises:
        RuntimeError: nothing was ever written, so that there is no store yet; a connection: call it where the store is.
        TypeError: a ``ListStorage``, which keeps no indexes in a store. ReadOnlyStore: the buffer only reads.
        OSError: no space for the file. StoreInUse: another process is opening or closing the store.

    Cost: 4 bytes a row, and about a nanosecond for each row sampled.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=200)
    >>> _ = rb.extend(torch.arange(100))
    >>> rb.count_usage()
    >>> _ = rb.sample()
    >>> 0 < rb.stats()["never_sampled_frac"] < 0.4
    True
    """
    storage = self.storage
    check_here(storage, "count_usage")
    if not storage.traits.has_fields:
        raise TypeError(
            f"count_usage: expected a tensor storage, got a {type(storage).__name__}. Use LazyTensorStorage or LazyMemmapStorage."
        )
    if storage.memory is None:
        raise RuntimeError("count_usage: expected a store, but nothing was ever written. Add data first.")
    storage.memory.check_writable()
    row_indexes.UsageIndex.of_store(storage.memory)


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    #: Whether there is nothing to do.
    good: bool
    #: The numbers as a sentence; if it is not good, what to do.
    text: str
    numbers: dict[str, float]

    def __str__(self) -> str:
        return f"{'ok    ' if self.good else 'ADVICE'} {self.name}: {self.text}"


class Health(tuple[Finding, ...]):
    """The findings of :meth:`ReplayBuffer.health`, a :class:`Finding` each. ``print`` shows a line each."""

    __slots__ = ()

    @property
    def good(self) -> bool:
        """Whether there is nothing to do."""
        return not self.advice

    @property
    def advice(self) -> list[str]:
        """The sentences of what is not good."""
        return [finding.text for finding in self if not finding.good]

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing to judge: rows of a list have no counts and no priorities"

    def __repr__(self) -> str:
        return f"Health(good={self.good}, {len(self)} findings, {len(self.advice)} with advice)"


def health(self: Watched) -> Health:
    """Look for what keeps a buffer from being of use, and say what to do. Nothing is changed, and no draw counts.

    Findings, each where it applies: ``"priorities"``: how few rows take most of the draws; ``"weights"``: the largest importance weight
    that a batch is expected to have; ``"next observations"``: how many repeat
    the following row's; ``"replay ratio"``; ``"never sampled"``: the share of rows, where :meth:`count_usage` was called; ``"stale
    rows"``: rows of lanes that are no longer written to.

    Returns:
        A tuple of findings: ``name``, ``good``, ``text`` and ``numbers``; ``advice``: the texts of those that are not good.

    Raises ``RuntimeError``: the buffer is empty, or a connection.

    Cost: looks at 65,536 rows at most, and with priorities copies 8 bytes a row.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(1_000))
    >>> obs = torch.arange(500.0).double()
    >>> _ = rb.extend({"obs": obs, "next": {"obs": obs + 1}})
    >>> print(rb.health().advice[0].partition(":")[0])
    the next observation 'obs' repeats that of the following row in 100 % of the rows
    """
    scan = Scan(self, "health")
    return Health(
        (*_priorities(scan, self), *_next_observations(self.storage, scan), *_counts(self), *_stale(self.storage, scan))
    )


def _priorities(scan: Scan, buffer: Watched) -> Iterator[Finding]:
    if not scan.has_priorities:
        return
    found = scan.priorities()
    leaves = np.sort(found.leaves)[::-1]
    total, size = float(leaves.sum()), scan.extent.size
    if not total:
        text = "all are 0, so that nothing can be drawn: call update_priority with eps above 0."
        yield Finding("priorities", False, text, {"alpha": found.alpha})
        return
    few = int(np.searchsorted(np.cumsum(leaves), _MOST_DRAWS * total)) + 1
    share, diverse = few / len(leaves), effective(leaves) * scan.scale
    good = share >= _FEW_ROWS or size < _MANY
    text = (
        f"{format_share(share)} of the rows take {format_share(_MOST_DRAWS)} of the draws, which are as diverse as of {diverse:,.0f} "
        f"equally likely rows of {size:,} (alpha={found.alpha:g})."
    )
    if not good:
        text += " The exponent is too high for these priorities: lower alpha, or clip the TD errors."
    numbers = {"alpha": found.alpha, "rows_of_most_draws": share, "priority_ess": diverse}
    yield Finding("priorities", good, text, numbers)
    below = np.cumsum(leaves[::-1])  # by which a row is drawn that has at most this leaf
    lowest = int(np.searchsorted(below, below[-1] * (1 - 0.5 ** (1 / _BATCH))))
    weight = 1.0 if is_over_batch(buffer.sampler) else float((leaves[::-1][lowest] / found.smallest) ** -found.beta)
    text = f"the largest importance weight of {_BATCH} rows is about {weight:.2g} (beta={found.beta:g})."
    if weight < _LEAST_WEIGHT:
        text += ' Losses nearly vanish, as one row has a priority near 0: give the sampler normalize="batch", or a larger eps.'
    yield Finding("weights", weight >= _LEAST_WEIGHT, text, {"largest_weight": weight, "beta": found.beta})


def _next_observations(storage: Storage, scan: Scan) -> Iterator[Finding]:
    """Fields below ``"next"`` that hold what the field of that name has in the following row."""
    if storage.memory is None:
        return
    fields = {field.key: field for field in storage.memory.schema.fields}
    pairs = [(key[1:], key) for key, field in fields.items() if key[0] == "next" and _alike(fields.get(key[1:]), field)]
    width, lanes = math.prod(storage.columns), len(scan.extent.filled)
    length = scan.extent.capacity // lanes
    # Even distances might meet the ends of trajectories, or none.
    some = np.random.default_rng(0).permutation(len(scan.rows))[:_PAIRS]
    rows = scan.rows[torch.from_numpy(np.sort(some))]
    lane = rows // length
    behind = lane * length + (rows - lane * length + width) % length
    # The row that is written next holds the lane's oldest step.
    seam = torch.tensor(scan.extent.seam, device="cpu")[lane]
    both = scan.extent.contains(behind) & ((behind - seam) % length >= width)
    rows, behind = rows[both], behind[both]
    if not len(rows):
        return
    for key, later in pairs:
        ours, theirs = (storage.field(k, r, storage.tickets_of(r)) for k, r in ((later, rows), (key, behind)))
        still = torch.ones(len(rows), dtype=torch.bool, device="cpu")
        still[[*ours[1], *theirs[1]]] = False
        same = (ours[0] == theirs[0]).reshape(len(rows), -1).all(1).cpu()[still]
        if not len(same):
            continue
        share, nbytes = float(same.double().mean()), fields[later].row_bytes
        name = public(key)
        text = f"the next observation {name!r} repeats that of the following row in {format_share(share)} of the rows"
        if share >= _EQUAL:
            saved = nbytes / storage.memory.schema.row_bytes
            text += (
                f": {nbytes:,} bytes of each row, {format_share(saved)} of all, are stored twice. Leave it out, and read it with "
                "NextFromFollowing."
            )
        yield Finding("next observations", share < _EQUAL, text, {"equal_frac": share, "bytes_per_row": nbytes})


def _alike(one: schema.Field | None, other: schema.Field) -> bool:
    return one is not None and (one.dtype, one.shape) == (other.dtype, other.shape) and other.row_bytes >= 8


def _counts(buffer: Watched) -> Iterator[Finding]:
    stats = buffer.stats()
    if "sample_count" not in stats:
        return
    ratio, inserted, capacity = stats["replay_ratio"], stats["write_count"], stats.get("capacity", math.inf)
    text = f"{ratio:.3g} rows are sampled for each row written ({stats['sample_count']:,.0f} samples)."
    good = not (inserted > capacity and ratio < _LEAST_RATIO) and ratio <= _MOST_RATIO
    if not good and ratio < _LEAST_RATIO:
        text += " Most rows are overwritten before they are sampled: sample more often, in larger batches, or from a larger buffer."
    elif not good:
        text += " Values may fit these rows too well: write more, sample less, or keep the ratio with rb.limit(SamplesPerInsert(…))."
    yield Finding("replay ratio", good, text, {"replay_ratio": ratio, "sample_count": stats["sample_count"]})
    if not stats["usage_counted"]:
        text = "not counted: rb.count_usage() counts samples of each row from then on."
        yield Finding("never sampled", True, text, {})
        return
    never = stats["never_sampled_frac"]
    good = never <= _NEVER or ratio < _OFTEN or stats["size"] < _MANY
    text = f"{format_share(never)} of the rows were never sampled."
    if not good:
        text += f" With {ratio:.3g} samples a row that many are not expected: the sampler prefers few rows (see rb.plot.usage())."
    yield Finding("never sampled", good, text, {"never_sampled_frac": never, "replay_ratio": ratio})


def _stale(storage: Storage, scan: Scan) -> Iterator[Finding]:
    ages, size = scan.ages(), scan.extent.size
    if storage.memory is None:
        return
    old = ages > _LAPS * size
    share, oldest = float(old.mean()), int(ages.max())
    text = f"{format_share(share)} of the rows are older than {_LAPS:g} times as many writes as rows are live; the oldest has {oldest:,}."
    if share > _STALE:
        length = scan.extent.capacity // len(scan.extent.filled)
        lanes = sorted({int(row) // length for row in scan.rows[torch.from_numpy(old)]})
        which = ", ".join(map(str, lanes[:8])) + (", …" if len(lanes) > 8 else "")
        text += f" They lie in lanes {which}: see whether what writes there still runs."
    yield Finding("stale rows", share <= _STALE, text, {"stale_frac": share, "age_max": oldest})
