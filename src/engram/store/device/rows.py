"""Rows on an accelerator, with the numbers of their writes and the cursor of their ring: all that a CUDA graph needs of them. And their
priorities, which never wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram._support import devices, fork, words
from engram.errors import EMPTY, NoSampleable, PriorityError, RowError
from engram.format.sizes import device_priority_bytes
from engram.store.blocks import Key, Masses
from engram.store.device.accelerator import Accelerator
from engram.store.device.row_operations import Drawing, RowKernels, RowOperations, SumTree, tree_state
from engram.store.memory import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engram.format.schema import Schema
    from engram.store.device.store import DeviceStore

#: Rows of a write of which the last entry of each row is found by comparing all pairs.
_PAIRS = 1_024


class DeviceRows:
    """Columns, numbers and cursor, each on the device. No method waits for it, but :meth:`check` and :meth:`written`.

    Behind the last row there is one more, at :attr:`spare`: entries that change nothing are written there.
    """

    def __init__(self, schema: Schema, device: torch.device, tensors: Sequence[Tensor] = ()) -> None:
        self.device, self.capacity, self.accelerator = device, schema.capacity, Accelerator(device)
        self.lane_length = schema.capacity // schema.lanes
        self.spare = schema.capacity
        self.whole = [
            torch.zeros((schema.capacity + 1, *field.shape), dtype=torch_dtype(field), device=device)
            for field in schema.fields
        ]
        for column, tensor in zip(self.whole, tensors, strict=False):
            column[:-1].copy_(tensor)
        #: The number of the write that each row holds; 0: it holds nothing.
        self.numbers = torch.zeros(schema.capacity + 1, dtype=torch.int64, device=device)
        #: Edits by an index on the device, of each row: one counts when it begins, and when it ends.
        self.edited = torch.zeros(schema.capacity + 1, dtype=torch.int32, device=device)
        #: The same when the host last gave edited rows new tickets.
        self.told = torch.zeros_like(self.edited)
        #: Position of the next step, its number, and rows written since the last emptying: of a store of one lane.
        self.cursor = torch.zeros(3, dtype=torch.int64, device=device)
        #: Where the cursor will be once a graph has appended what it is at, which it says before; that counts where a mirror looks.
        self.begun = torch.zeros(1, dtype=torch.int64, device=device)
        #: Updates that came too late; bad priorities; rows outside the store or without data; draws where nothing had a priority.
        self.tally = torch.zeros(4, dtype=torch.int64, device=device)
        #: The spare row, on the device.
        self.nowhere = torch.full((), self.spare, device=device)
        #: By row the position of an entry that names it, as :meth:`last_of` and the kernels compare them.
        self.last = torch.full((schema.capacity + 1,), -1, dtype=torch.int64, device=device)
        self._checked = [0, 0, 0]
        #: The one of the last call outside of a graph.
        self.stream = self.accelerator.after(None)
        #: Held around every call by what enters these rows, so that the operations of two threads do not mix.
        self.lock = fork.rlock()
        # What the host knows of it, in one place for all stores around these rows.
        #: Appended rows that the core has not been told of.
        self.pending = 0
        #: Whether graphs append rows, and whether they edit some, of which the core hears when it is asked.
        self.captured, self.captured_edits = False, False
        #: Whether rows may have been edited of which it has not heard.
        self.edits = False
        #: Whether the live rows are those that the cursor has passed.
        self.ring = True
        #: What the cursor on the device was when the host last knew.
        self.known = (0, 0, 0)
        self.trees: list[DevicePriorities] = []
        #: How often all rows were replaced; how often they were forgotten, and whether the last time the count of writes stayed.
        self.replaced, self.emptied, self.kept_count = 0, 0, False

        #: What reads, appends and updates them.
        self.work = work_on(self)

    @property
    def capturing(self) -> bool:
        """Whether what is done now goes into a CUDA graph."""
        return self.accelerator.capturing()

    def __enter__(self) -> None:
        """For a call: no other thread's operations come in between, and those of earlier calls come before, whatever their streams."""
        with self.lock:
            self.follow_stream()
            self.lock.acquire()  # once more, for the block

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def follow_stream(self) -> None:
        """Let what is done on the current stream come after what was done before on another one."""
        if not self.capturing:
            self.stream = self.accelerator.after(self.stream)

    def sent(self, tensor: Tensor, call: str) -> Tensor:
        """A tensor on the device. Raises ``RuntimeError``: it is of the host, and a graph is captured."""
        if tensor.device == self.device:
            return tensor
        if self.capturing:
            raise RuntimeError(
                f"{call}: expected tensors on {self.device} while a CUDA graph is captured, got one on {tensor.device}, which would be "
                "read once and not at each replay. Move it there before, or make this call outside of the capture."
            )
        return self.accelerator.bring(tensor)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def last_of(self, rows: Tensor) -> Tensor | None:
        """For each entry the position of the last one that names its row: int64 ``[n]``. None: there is one entry only."""
        n, places = len(rows), torch.arange(len(rows), device=self.device)
        if n <= 1:
            return None
        if n <= _PAIRS:
            return torch.where(rows.unsqueeze(1) == rows, places, -1).amax(1)
        self.last.index_fill_(0, rows, -1)
        return self.last.scatter_reduce_(0, rows, places, "amax")[rows]

    def put(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor], last: Tensor | None) -> None:
        """Replace fields of rows. ``last``: of rows that may be named several times, as :meth:`last_of` has it."""
        for number, column in zip(which, columns, strict=True):
            self.whole[number].index_put_((rows,), column if last is None else column[last])

    def put_span(self, start: int, which: Sequence[int], columns: Sequence[Tensor]) -> None:
        """Replace fields of consecutive rows."""
        spans = [self.whole[number][start : start + len(column)] for number, column in zip(which, columns, strict=True)]
        torch._foreach_copy_(spans, list(columns))  # torch's optimizers use it

    def number(self, rows: Tensor, first: int | Tensor, last: Tensor | None) -> None:
        """Rows hold new writes, numbered from ``first`` on. ``last`` as for :meth:`put`."""
        numbers = torch.arange(len(rows), device=self.device) + first
        self.numbers.index_put_((rows,), numbers if last is None else numbers[last])

    def begin(self, n: int | Tensor) -> None:
        """Some steps will be appended at the cursor."""
        torch.add(self.cursor[:1], n, out=self.begun)

    def count_edits(self, rows: Tensor) -> None:
        """Edits of rows begin, or end. Those of one call do both at once, as readers come between calls."""
        ones = torch.ones(len(rows), dtype=torch.int32, device=self.device)
        self.edited.index_add_(0, rows, ones if self.capturing else ones * 2)

    def newly_edited(self) -> Tensor:
        """Rows that were edited since the last call, on the host, which waits; not those whose edit a graph is just making."""
        now = self.edited.clone()
        changed = (now != self.told) & (now % 2 == 0)
        self.told.copy_(torch.where(changed, now, self.told))
        return changed[:-1].nonzero().squeeze(1).cpu()

    def size(self) -> Tensor:
        """Rows of the ring that hold data, on the device."""
        return self.cursor[2].clamp(max=self.capacity)

    def live(self, rows: Tensor) -> Tensor:
        """Rows, the spare one in place of those that are outside or hold nothing, which are counted."""
        at = torch.where((rows >= 0) & (rows < self.capacity), rows, self.nowhere)
        wrong = self.numbers[at] <= 0
        self.tally[2].add_(wrong.sum())
        return torch.where(wrong, self.nowhere, at)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def take(self, rows: Tensor, which: Sequence[int]) -> list[Tensor]:
        """Fields of rows, copied."""
        return [self.whole[number].index_select(0, rows) for number in which]

    # ---- what the host asks for: each waits ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``PriorityError``, ``RowError`` or ``NoSampleable`` for what calls on the device left out since the last call."""
        with self:
            before, now = self._checked, self.tally[1:].tolist()
        bad, outside, empty = (b - a for a, b in zip(before, now, strict=True))
        self._checked = now
        left_out = "since the last look at the device; they were left out."
        if bad:
            raise PriorityError(f"update_priority: expected finite priorities, at least 0, got {bad} others {left_out}")
        if outside:
            raise RowError(f"expected rows that hold data, got {outside} others {left_out}")
        if empty:
            raise NoSampleable(f"{EMPTY} Since the last look at the device {empty} draws found no row, or no priority.")


def work_on(rows: DeviceRows) -> RowOperations:
    """Kernels on a CUDA device, else operations of torch. Warns where the device could run kernels, but something is missing."""
    if rows.device.type != "cuda":
        return RowOperations()
    obstacle = rows.accelerator.obstacle()
    if obstacle is None:
        try:
            with rows.accelerator.active():
                return RowKernels(rows, rows.accelerator.launch)
        except Exception as error:  # noqa: BLE001 - Triton has errors of its own, and those of the C compiler that it calls
            obstacle = f"{type(error).__name__}: {error}"
    words.warn(
        f"storage on {rows.device}: expected Triton's kernels, got none: {obstacle}. Torch's operations do the same, several times slower."
    )
    return RowOperations()


class DevicePriorities:
    """As the priorities of a store on the CPU, in memory of the device: a leaf is ``(priority + eps) ** alpha``.

    Draws use the random numbers that draws on the CPU use, so the rows are the same ones but for rounding; those of a CUDA graph
    use torch's generator of the device. Of an update on the device the entries that are wrong are left out and counted.
    """

    def __init__(self, rows: DeviceRows, alpha: float, beta: float, eps: float, within_buffer: bool) -> None:
        devices.check_room(f"priorities of {rows.capacity:,} rows", device_priority_bytes(rows.capacity), rows.device)
        self._rows, self.eps, self.within_buffer = rows, eps, within_buffer
        self.rows = rows.capacity
        self.most = 1e300 / rows.capacity
        self.tree = SumTree(rows.capacity, rows.device)
        #: alpha, beta, and the largest priority of all updates, 0 before the first: on the device, so that graphs see them change.
        powers = torch.zeros(3, dtype=torch.float64, device=rows.device)
        self._alpha, self._beta, self.highest_there = powers.unbind()
        self._alpha.fill_(alpha)
        self._beta.fill_(beta)
        self.zero = torch.zeros_like(self._alpha)
        self._powers = (alpha, beta)
        self._closed: object = None
        #: Whether the priorities of that name are elsewhere now.
        self.retired = False
        #: The tree, as the kernels find it.
        self.state_there = tree_state(self.tree, powers, eps, self.most)
        if isinstance(rows.work, RowKernels):
            rows.work.warm_up(self.state_there)

    @property
    def core(self) -> DevicePriorities:
        """This, under the name that an index on the host has it by. Raises ``RuntimeError``: the store was closed."""
        return self if self._closed is None else self._closed  # type: ignore[return-value] # it raises whatever is asked

    @core.setter
    def core(self, refusing: object) -> None:
        self._closed = refusing

    # ---- parameters --------------------------------------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """Exponent of priorities. Setting it raises all leaves to ``new / old``."""
        return self._powers[0]

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        power, leaves = alpha / self.alpha if self.alpha > 0 else 1.0, self.tree.leaves
        with self._rows:
            raised = torch.where(leaves > 0, leaves**power, leaves)
            if bool((raised >= self.most).any()):
                raise ValueError("with that alpha a priority is too large")
            leaves.copy_(raised)
            self.tree.sum_up()
            self._alpha.fill_(alpha)
            self._powers = (alpha, self.beta)

    @property
    def beta(self) -> float:
        """Exponent of the weights. Graphs see it change."""
        return self._powers[1]

    @beta.setter
    def beta(self, beta: float) -> None:
        with self._rows:
            self._beta.fill_(beta)
            self._powers = (self.alpha, beta)

    @property
    def highest(self) -> float:
        """The largest priority of all updates, 0.0 before the first."""
        with self._rows:
            return float(self.highest_there)

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        with self._rows:
            return float(self.tree.total())

    @property
    def default_priority(self) -> float:
        """What new rows get."""
        with self._rows:
            leaf = float(self._default())
        return leaf ** (1 / self.alpha) - self.eps if self.alpha > 0 else self.highest or 1.0

    @property
    def masses(self) -> Masses:
        """Sum and smallest of the leaves, and live rows, of one moment."""
        total, least = self.total, float(self.tree.least())
        return Masses(total, 0.0 if least == torch.inf else least, int((self._rows.numbers > 0).sum()))

    def _default(self) -> Tensor:
        """The leaf of new rows, on the device."""
        leaf = self.leaf(torch.where(self.highest_there > 0, self.highest_there, 1.0))
        if not self.within_buffer:
            return leaf
        largest = self.tree.leaves.amax()
        return torch.where(largest > 0, largest, leaf)

    # ---- what the store tells ----------------------------------------------------------------------------------------

    def written(self, rows: Tensor) -> None:
        """Rows on the device, which may be named several times, hold new writes."""
        self.tree.put(rows, self._default())

    def for_kernels(self) -> tuple[Tensor, Tensor | None]:
        """The tree as the kernels find it, and the leaf of new rows where they cannot know it."""
        return self.state_there, self._default() if self.within_buffer else None

    def emptied(self) -> None:
        """The store was emptied."""
        self.highest_there.zero_()
        self._set_all(torch.zeros_like(self.tree.leaves[: self.rows]))

    def scan(self, begin: int, end: int) -> None:
        """Of all rows, once the last ones are asked for: live ones without a priority get the default one, others none."""
        if end >= self.rows >= begin:
            self._set_all(self.tree.leaves[: self.rows])

    def _set_all(self, leaves: Tensor) -> None:
        """Set the leaves of live rows; those that none was ever given get the default one."""
        with self._rows:
            given, held = (leaves > 0) | leaves.signbit(), self._rows.numbers[:-1] > 0
            self.tree.leaves[: self.rows].copy_(torch.where(held, torch.where(given, leaves, self._default()), 0.0))
            self.tree.sum_up()

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def sample(self, store: DeviceStore, key: Key, n: int, single_precision: bool, over_batch: bool) -> list[Tensor]:
        """Rows by priority, on the device: one tensor per field, then rows, numbers of their writes and weights."""
        weighed = single_precision and not over_batch
        columns = store.sample_rows(n, key.value, Drawing(self, weighed))
        if not weighed:
            leaves = columns.pop()
            least = torch.where(leaves > 0, leaves, torch.inf).amin() if over_batch else None
            weights = self.weigh(leaves, least)
            columns.append(weights.float() if single_precision else weights)
        return columns

    def weigh(self, leaves: Tensor, least: Tensor | None = None) -> Tensor:
        """float64 ``[n]``: the weights of rows with these leaves, over that of ``least``, which is by default the smallest one."""
        least = self.tree.least() if least is None else least
        return torch.where(leaves > 0, (least / leaves) ** self._beta, self.zero)

    def leaf(self, priorities: Tensor) -> Tensor:
        """float64: the leaves of priorities, on the device."""
        return (priorities + self.eps) ** self._alpha

    def draw(self, key: int, n: int, *, leaves: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The same on the host, which waits for it: rows, numbers, and float64 weights, or ``leaves`` in place of these.

        Raises ``NoSampleable``: all priorities are zero, or there are no rows.
        """
        if self.total == 0:
            raise NoSampleable(f"{EMPTY} Or all priorities are zero.")
        with self._rows:
            rows, numbers, found = self._rows.work.read(self._rows, n, key, 0, Drawing(self, False))[-3:]
            return rows.cpu(), numbers.cpu(), (found if leaves else self.weigh(found)).cpu()

    # ---- changing ----------------------------------------------------------------------------------------------------

    def update(self, rows: Tensor, priorities: Tensor, expected: Tensor | None) -> None:
        """As :meth:`update_there`, where rows and priorities of the host are looked at first.

        Raises:
            PriorityError: one is negative, not finite or too large. Nothing is changed.
            RowError: a row outside the store. Nothing is changed.
        """
        self.check(priorities)
        if rows.is_cpu and bool(((rows < -1) | (rows >= self.rows)).any()):
            raise RowError(f"update_priority: expected rows in [-1, {self.rows}), got {rows.tolist()[:8]}….")
        self.update_there(rows, priorities, expected)

    def check(self, priorities: Tensor) -> None:
        """Raise ``PriorityError`` for priorities on the host of which one is negative, not finite or too large."""
        if not priorities.is_cpu:
            return
        good = (priorities >= 0) & ((priorities.double() + self.eps) ** self.alpha < self.most)
        if not bool(good.all()):
            at = int(good.long().argmin())
            raise PriorityError(
                f"update_priority: expected finite priorities of at least 0 whose power alpha={self.alpha:g} can be summed: a priority at "
                f"position {at} is {float(priorities[at])}."
            )

    def update_there(self, rows: Tensor, priorities: Tensor, expected: Tensor | None) -> None:
        """New priorities, ``[n]``, of rows int64 ``[n]``; -1 is passed over, and so are rows of other writes than expected, and rows
        that hold nothing: these are counted. Of a row that is named twice the last entry stays.

        A priority that is negative, not finite or too large leaves its row as it is, and is counted, too; so is a row outside.
        """
        ledger, call = self._rows, "update_priority"
        with ledger:
            expected = None if expected is None else ledger.sent(expected, call)
            ledger.work.update(ledger, self, ledger.sent(rows, call), ledger.sent(priorities, call), expected)

    def update_arrays(self, *_: object) -> None:
        """Raises ``TypeError``: arrays become tensors first."""
        raise TypeError("update_arrays: expected an index on the CPU")

    def reset(self, rows: Tensor) -> None:
        """Give live rows the default priority again."""
        with self._rows:
            at = self._rows.live(self._rows.sent(rows, "mark_update"))
            self.tree.put(at, torch.where(at < self.rows, self._default(), 0.0))

    # ---- what the host asks for: each waits ------------------------------------------------------------------------------

    def leaves(self, n: int) -> Tensor:
        """float64 ``[n]``: ``(priority + eps) ** alpha`` of the first rows, 0 for rows that hold nothing. A copy."""
        with self._rows:
            return self.tree.leaves[:n].abs().cpu()

    def copy_to(self, room: Tensor) -> None:
        """Copy all leaves, and behind them the largest priority of all updates, into float64 ``[rows + 1]`` on the device."""
        room[:-1].copy_(self.tree.leaves[: self.rows])
        room[-1].copy_(self.highest_there)

    def leaves_of(self, rows: Tensor) -> Tensor:
        """float64 ``[n]``: the leaves of rows, int64 ``[n]``. A copy. Raises ``IndexError``: a row outside the store."""
        return self.leaves(self.rows)[rows]

    def weights(self, rows: Tensor) -> Tensor:
        """float64 ``[n]``: the weights that draws of these rows would have now; 0 for rows that cannot be drawn.

        Raises ``RowError``: a row outside the store.
        """
        if bool(((rows < 0) | (rows >= self.rows)).any()):
            raise RowError(f"weights: expected rows in [0, {self.rows}), got {rows.tolist()[:8]}….")
        leaves = self.leaves(self.rows)[rows]
        return torch.where(leaves > 0, (leaves / self.tree.least().cpu()) ** -self.beta, 0.0)

    def count(self, stats: dict[str, float]) -> None:
        """Add what it has to say to the numbers of the store."""
        stats["priority_mass"] = stats.get("priority_mass", 0.0) + self.total
        stats["priority_updates_dropped"] += int(self._rows.tally[0])

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a state that was checked; rows that it says nothing of get the default priority."""
        alpha, beta, highest, saved = (state[name] for name in ("alpha", "beta", "highest", "leaves"))
        assert isinstance(alpha, float) and isinstance(beta, float) and isinstance(saved, Tensor)  # noqa: PT018 - as checked
        leaves = torch.zeros(self.rows, dtype=torch.float64, device="cpu")
        leaves[: len(saved)] = saved
        with self._rows:
            self._powers = (alpha, beta)
            self._alpha.fill_(alpha)
            self._beta.fill_(beta)
            self.highest_there.fill_(float(highest))  # type: ignore[arg-type] # a number
            self._set_all(leaves.to(self._rows.device))
