"""The figures of a buffer."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
import torch

from engram._support.field_paths import FieldPath, as_path, public
from engram._support.unsupported import needs
from engram._support.words import count, format_share
from engram.samplers import PrioritizedSampler
from engram.samplers._base import DeclaredSampler
from engram.saved.rows import boundary_fields, roles_of
from engram.store.priorities import PriorityConfig, PriorityIndex
from engram.store.row_indexes import ConsumptionIndex, UsageIndex

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from engram.format.schema import Field
    from engram.storages import Storage
    from engram.types import Extent

    Moment = tuple[float, dict[str, float]]
    Floats = np.typing.NDArray[np.float64]
    Ints = np.typing.NDArray[np.int64]
    Bools = np.typing.NDArray[np.bool_]


#: Rows that are looked at, at most.
MOST = 1 << 16
_LAST_STEP = 2


class Scanned(Protocol):
    """The part of a buffer, or of its wiring, that a scan reads."""

    @property
    def storage(self) -> Storage: ...
    @property
    def sampler(self) -> object: ...


class Watched(Scanned, Protocol):
    """The part of a buffer that figures read."""

    def stats(self) -> dict[str, float]: ...


class Priorities(NamedTuple):
    """Priorities of live rows, in row order, and the sampler that draws by them."""

    #: ``(priority + eps) ** alpha``, which draws are proportional to.
    leaves: Floats
    #: The smallest positive leaf of all rows, which has weight 1; infinite if there is none.
    smallest: float
    alpha: float
    beta: float
    eps: float

    @property
    def values(self) -> Floats:
        """The priorities themselves."""
        return values_of(self.leaves, self)

    @property
    def weights(self) -> Floats:
        """Importance weights, of rows that can be drawn."""
        return (self.leaves[self.leaves > 0] / self.smallest) ** -self.beta


def values_of(leaves: Floats, parameters: Priorities | PriorityConfig) -> Floats:
    """The priorities of leaves. With ``alpha=0`` leaves do not tell them: all are 1."""
    if not parameters.alpha:
        return np.ones_like(leaves)
    with np.errstate(over="ignore"):
        return np.clip(leaves ** (1 / parameters.alpha) - parameters.eps, 0, np.finfo(np.float64).max)


def effective(leaves: Floats) -> float:
    """The number of equally likely rows that draws in proportion to these are as diverse as."""
    largest = leaves.max(initial=0.0)
    shares = leaves / largest if largest else leaves  # squares of large ones would overflow
    squares = float((shares**2).sum())
    return float(shares.sum()) ** 2 / squares if squares else 0.0


class Trajectories(NamedTuple):
    """Whole trajectories, in the order of their last steps."""

    returns: Floats
    lengths: Ints
    #: Writes that came after the last step.
    ends: Ints


def check_here(storage: Storage, call: str, where: str = ".") -> None:
    """Raise ``RuntimeError``: the rows are a server's. ``where``: how the message ends."""
    if storage.traits.is_remote:
        raise RuntimeError(
            f"{call}: expected the rows in this process, the buffer is a connection. Call it where the store is{where}"
        )


def index_of(sampler: object, kind: str) -> str | None:
    """The name of a sampler's index of that kind."""
    indexes = sampler.own_indexes if isinstance(sampler, DeclaredSampler) else ()
    return next((name for name, found in indexes if found == kind), None)


def looked_at(storage: Storage, extent: Extent, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Live rows at even distances in row order, ``most`` at most, and their tickets. Those that hold nothing are left out."""
    ranks = torch.arange(min(extent.size, most), device="cpu")
    rows = extent.rows(ranks * extent.size // len(ranks))
    numbers, tickets = rows.numpy(), storage.tickets_of(rows).numpy()
    live = tickets >= 0  # by NumPy: torch's threads would wait for each other where other processes have the cores
    return torch.from_numpy(numbers[live]), torch.from_numpy(tickets[live])


class Scan:
    """Reads a buffer for one figure.

    Args:
        buffer: whose rows are read.
        call: what messages begin with.
        most: rows to look at, at most: if more are live, as many at even distances.

    Raises ``RuntimeError``: the buffer is empty, or a connection.
    """

    def __init__(self, buffer: Scanned, call: str, most: int = MOST) -> None:
        self._storage, self._call = buffer.storage, call
        check_here(self._storage, call, ": engram plot DIR." if call.startswith("plot.") else ".")
        extent = self._storage.extent()
        if not extent.size:
            before = "drawing it" if call.startswith("plot.") else "asking"
            raise RuntimeError(f"{call}: the buffer is empty. Add data before {before}.")
        self._sampler, self.extent = buffer.sampler, extent
        self.rows, self._tickets = looked_at(self._storage, extent, most)
        #: Live rows for each that is looked at.
        self.scale = extent.size / max(len(self.rows), 1)

    def ages(self) -> Ints:
        """int64 ``[n]``: writes, of single rows, that came after each row."""
        return self._ages(self._tickets)

    def ages_of(self, rows: Ints) -> Floats:
        """float64 ``[n]``: ages of these rows, NaN of those that hold nothing."""
        which = torch.from_numpy(rows)
        tickets = self._storage.tickets_of(which)
        live = (tickets >= 0) & self.extent.contains(which)
        return np.where(live.numpy(), self._ages(tickets), np.nan)

    def _ages(self, tickets: torch.Tensor) -> Ints:
        return (self._storage.next_number() - 1 - tickets).clamp(min=0).numpy()

    @property
    def has_priorities(self) -> bool:
        """Whether :meth:`priorities` has something to say."""
        return index_of(self._sampler, PriorityIndex.kind) is not None

    def priorities(self) -> Priorities:
        """Raises ``RuntimeError``: the sampler has none. Copies 8 bytes a row."""
        state: Mapping[str, object] | None = None
        sampler = self._sampler
        name = index_of(sampler, PriorityIndex.kind)
        if name is not None:
            state = self._storage.priorities_in_use(name)
            if state is None and isinstance(sampler, PrioritizedSampler):  # of a list
                state = sampler.priorities().state(self.extent.capacity)
        if state is None:
            raise RuntimeError(
                f"{self._call}: expected a sampler with priorities, such as PrioritizedSampler, got {type(sampler).__name__}."
            )
        leaves = np.maximum(np.asarray(state["leaves"]), 0)  # -0.0 is a priority of zero
        alpha, beta, eps = (cast("float", state[name]) for name in ("alpha", "beta", "eps"))
        return Priorities(leaves[self.rows.numpy()], float(leaves[leaves > 0].min(initial=math.inf)), alpha, beta, eps)

    def counts(self) -> tuple[Ints, int]:
        """How often each row was drawn, and how often at most. Raises ``RuntimeError``: nothing counts. Copies 4 bytes a row."""
        name, sampler, index = index_of(self._sampler, ConsumptionIndex.kind), self._sampler, None
        usage = None if self._storage.memory is None else UsageIndex.in_use(self._storage.memory)
        if usage is not None and name is None:
            often: Ints = usage.counts(self.rows).numpy()
            return often, int(often.max(initial=0))
        if name is not None and isinstance(sampler, DeclaredSampler) and sampler.traits.consumes:
            most = sampler.draws_of_a_row or 0
            index = self._storage.consumption(name, most)
        if index is None:
            raise RuntimeError(
                f"{self._call}: expected draws to be counted, got {type(sampler).__name__} without. Call rb.count_usage() before."
            )
        return index.counts(self.extent.capacity).numpy()[self.rows.numpy()].astype(np.int64), most

    # ---- trajectories ------------------------------------------------------------------------------------------------

    def trajectories(self, reward: FieldPath | None, most: int = MOST) -> Trajectories:
        """Whole trajectories among the newest rows, ``most`` at most.

        A trajectory whose first step may have been overwritten is left out, and so is one without an end or with a lost row.

        Raises ``RuntimeError``: no field is a reward, or none ends trajectories. ``KeyError``: no such field.
        """
        fields = () if self._storage.memory is None else self._storage.memory.schema.fields
        key, signals = self._reward(fields, reward), Ends.of(fields)
        if not signals.fields:
            raise RuntimeError(
                f"{self._call}: expected a field that ends trajectories, such as ('next', 'done'), got {_shown(fields)}."
            )
        width = math.prod(self._storage.columns)
        length = self.extent.capacity // len(self.extent.filled)
        each = max(most // len(self.extent.filled) // width, 1) * width
        found = []
        for lane, (filled, seam) in enumerate(zip(self.extent.filled, self.extent.seam, strict=True)):
            count, start = min(filled, each), lane * length
            # The row that is written next lies behind the newest one.
            places = (seam - start + torch.arange(-count, 0, device="cpu")) % length
            rows = (start + places).reshape(-1, width)
            whole = count == filled < length
            found += [self._of_track(rows[:, i].contiguous(), key, signals, whole) for i in range(width) if count]
        returns, lengths, ends = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.argsort(-ends, kind="stable")
        return Trajectories(returns[order], lengths[order], ends[order])

    def _reward(self, fields: Sequence[Field], asked: FieldPath | None) -> FieldPath:
        keys = [field.key for field in fields]
        if asked is not None:
            if asked not in keys:
                raise KeyError(
                    f"{self._call}: reward: expected one of the fields {_shown(fields)}, got {public(asked)!r}."
                )
            return asked
        rewards = sorted((key for key in keys if key[-1] == "reward"), key=lambda key: (len(key), key[0] != "next"))
        if not rewards:
            raise RuntimeError(
                f"{self._call}: expected a field called 'reward', got {_shown(fields)}. Name the one that is it with reward=."
            )
        return next((key for key in rewards if key == ("next", "reward")), rewards[0])

    def _of_track(self, rows: torch.Tensor, reward: FieldPath, signals: Ends, whole: bool) -> Trajectories:
        """Of rows of one track, oldest first. ``whole``: the first one is the first that the track ever had."""
        tickets = self._storage.tickets_of(rows)
        lost = (tickets < 0).numpy()
        kept, expected = rows[~torch.from_numpy(lost)], tickets[tickets >= 0]
        columns = {}
        for key in (reward, *signals.fields):
            column, moved = self._storage.field(key, kept, expected)
            values = np.zeros(len(rows))
            values[~lost] = column.reshape(len(kept), -1).sum(1, dtype=torch.float64).cpu().numpy()
            places = np.flatnonzero(~lost)[moved]  # written again meanwhile
            lost[places] = True
            columns[key] = values
        is_end = signals.are_set(columns)
        stops = np.flatnonzero(is_end)
        starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
        before = np.concatenate([[0], np.cumsum(lost)])
        good = before[stops + 1] == before[starts]
        good &= (starts > 0) | whole
        total = np.concatenate([[0.0], np.cumsum(columns[reward])])
        return Trajectories(
            (total[stops + 1] - total[starts])[good], (stops + 1 - starts)[good], self._ages(tickets)[stops[good]]
        )


class Ends(NamedTuple):
    """The fields that end trajectories."""

    flags: tuple[FieldPath, ...]
    types: tuple[FieldPath, ...]
    ids: tuple[FieldPath, ...]

    @classmethod
    def of(cls, fields: Sequence[Field]) -> Ends:
        meant = boundary_fields(fields, roles_of(fields))
        roles = ("done", "terminated", "truncated"), ("last",), ("traj_id",)
        return cls(*(tuple(field.key for role in some for field in meant[role]) for some in roles))

    @property
    def fields(self) -> tuple[FieldPath, ...]:
        return self.flags + self.types + self.ids

    def are_set(self, columns: Mapping[FieldPath, Floats]) -> Bools:
        """Whether each step is the last one of its trajectory. ``columns``: sums of the fields, ``[n]`` each."""
        ends = [columns[key] != 0 for key in self.flags] + [columns[key] == _LAST_STEP for key in self.types]
        ends += [np.append(np.diff(columns[key]) != 0, False) for key in self.ids]
        return cast("Bools", np.logical_or.reduce(ends))


def _shown(fields: Sequence[Field]) -> list[str | FieldPath]:
    return [public(field.key) for field in fields]


#: Cells of a map, at most.
_CELLS = 1 << 14
#: Seconds between two looks at a buffer.
_LOOK_S = 0.05
_BINS = 50
_ROWS, _DRAWS, _LIMIT = "0.6", "tab:blue", "tab:red"


class Plots:
    """Figures of a buffer: ``rb.plot``.

    Every method returns the matplotlib ``Axes`` it drew to and never calls ``show()``: in a notebook the figure shows itself, in a
    script ``axes.figure.savefig("age.png")``. ``ax``: draw there; default: a new figure of ``matplotlib.pyplot``, which
    ``plt.close(axes.figure)`` frees.

    A figure of rows looks at 65,536 of them at most, at even distances in row order, so a large buffer takes no longer to
    draw. Other processes may write meanwhile. Nothing is changed, and no draw is counted.

    Every method raises ``RuntimeError`` where the buffer is empty, closed or a connection, or lacks what the figure shows; its
    message says what that is. ``ModuleNotFoundError``: matplotlib is missing, which ``engram-replay[plot]`` brings.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
    >>> _ = rb.extend(torch.arange(150))
    >>> rb.plot.age().get_xlabel()
    'age, in writes'
    """

    def __init__(self, buffer: Watched) -> None:
        self._buffer = buffer

    def priority(self, *, ax: Axes | None = None) -> Axes:
        """A histogram of the priorities, with a logarithmic count: of rows, and of the draws that they lead to.

        The title says how many equally likely rows would be drawn as diversely, ``(sum p)² / sum p²``: the effective number of rows.

        Raises ``RuntimeError``: a sampler without priorities. Cost: a copy of 8 bytes a row.
        """
        scan = Scan(self._buffer, "plot.priority")
        found = scan.priorities()
        rows = f"{effective(found.leaves) * scan.scale:,.0f} of {count(scan.extent.size, 'row')}"
        axes = _axes(ax)
        _histogram(axes, found.values, found.leaves, scan.scale)
        axes.set(
            xlabel="priority", ylabel="rows", yscale="log", title=f"Priorities, α={found.alpha:g}: effective {rows}"
        )
        return axes

    def weights(self, *, ax: Axes | None = None) -> Axes:
        """A histogram, in logarithmic bins, of the importance weights, in (0, 1], of rows that can be drawn, and of their draws.

        Raises ``RuntimeError``: a sampler without priorities. Cost: a copy of 8 bytes a row.
        """
        scan = Scan(self._buffer, "plot.weights")
        found = scan.priorities()
        axes = _axes(ax)
        _histogram(axes, found.weights, found.leaves[found.leaves > 0], scan.scale, powers=True)
        axes.set(xlabel="importance weight", ylabel="rows", xscale="log", title=f"Weights, β={found.beta:g}")
        return axes

    def age(self, *, ax: Axes | None = None) -> Axes:
        """A histogram of the ages of rows: how many rows have been written, or edited, since. 0 is the newest.

        With priorities also that of the draws, which shows whether a sampler prefers old rows or new ones.
        """
        scan = Scan(self._buffer, "plot.age")
        ages = scan.ages()
        axes = _axes(ax)
        _histogram(axes, ages, scan.priorities().leaves if scan.has_priorities else None, scan.scale)
        axes.set(
            xlabel="age, in writes", ylabel="rows", title=f"Age: mean {ages.mean():,.0f}, largest {ages.max():,} writes"
        )
        return axes

    def usage(self, *, ax: Axes | None = None) -> Axes:
        """How many rows were drawn how often, as bars, and in the title the share that was never drawn.

        Raises ``RuntimeError``: nothing counts. :meth:`ReplayBuffer.count_usage` begins, and :class:`ConsumingSampler` does, too.
        Cost: a copy of 4 bytes a row.
        """
        scan = Scan(self._buffer, "plot.usage")
        counts, most = scan.counts()
        axes = _axes(ax)
        rows = np.bincount(counts, minlength=most + 1) * scan.scale
        axes.bar(np.arange(len(rows)), rows, color=_DRAWS)
        never = format_share(np.mean(counts == 0))
        axes.set(xlabel="times drawn", ylabel="rows", title=f"{never} of the rows were never drawn")
        _count_whole(axes.xaxis)
        return axes

    def returns(self, *, reward: object = None, ax: Axes | None = None) -> Axes:
        """The return of each whole trajectory over the writes since its end, oldest first, and their moving mean.

        Args:
            reward: the field; default ``("next", "reward")``, or the one called ``"reward"`` that is nested least. Several rewards of
                a row are summed.
            ax: as the class says.

        Trajectories end where ``done``, ``terminated``, ``truncated`` or ``step_type`` says so, or else where an id of trajectories
        changes. One whose first step may have been overwritten is left out. Only the newest 65,536 rows are looked at. The writer
        must keep the order of steps, as all do but those that keep the best rows.

        Raises:
            RuntimeError: no reward, no field that ends trajectories, or no whole trajectory. KeyError: no such field.
            TypeError: ``reward`` is no key.
        """
        found = Scan(self._buffer, "plot.returns").trajectories(as_path(reward, "plot.returns: reward"))
        if not len(found.returns):
            raise RuntimeError("plot.returns: expected a trajectory with its first and last step, got none.")
        axes = _axes(ax)
        axes.plot(found.ends, found.returns, ".", color=_ROWS, label="a trajectory")
        window = min(20, len(found.returns))
        means = np.convolve(found.returns, np.full(window, 1 / window), "valid")
        axes.plot(found.ends[window - 1 :], means, color=_DRAWS, label=f"mean of {window}")
        mean, steps = found.returns.mean(), found.lengths.mean()
        title = f"{count(len(found.returns), 'trajectory')}: mean return {mean:.4g}, {steps:.4g} steps"
        axes.set(xlabel="writes since its end", ylabel="return", title=title)
        axes.set_xlim(axes.get_xlim()[::-1])
        axes.legend()
        return axes

    def map(self, *, ax: Axes | None = None) -> Axes:
        """The storage as a picture: a line per lane, or one lane folded into lines; colours are ages, blank cells hold nothing.

        A cell is one row, or every so-many-th, with at most 16,384 cells. Red marks the row that each lane writes next.
        """
        scan = Scan(self._buffer, "plot.map", most=1)
        extent, lanes = scan.extent, len(scan.extent.filled)
        length = extent.capacity // lanes
        per_lane = min(length, max(_CELLS // lanes, 1))
        lines = lanes if lanes > 1 else max(math.isqrt(per_lane // 2), 1)
        width = per_lane if lanes > 1 else -(-per_lane // lines)
        cells = np.arange(lanes * per_lane)
        rows = cells // per_lane * length + cells % per_lane * length // per_lane
        image = np.full(lines * width, np.nan)
        image[: len(cells)] = scan.ages_of(rows)
        seams = [int((seam - lane * length) % length * per_lane // length) for lane, seam in enumerate(extent.seam)]
        marks = [(lane, seam) if lanes > 1 else divmod(seam, width) for lane, seam in enumerate(seams)]
        axes = _axes(ax)
        picture = axes.imshow(image.reshape(lines, width), aspect="auto", interpolation="nearest", cmap="viridis_r")
        axes.get_figure(root=True).colorbar(picture, ax=axes, label="age, in writes")  # type: ignore[union-attr] # it is in a figure
        axes.plot([x for _, x in marks], [y for y, _ in marks], "s", color=_LIMIT, markersize=4, label="next write")
        step, line = length / per_lane, "lane" if lanes > 1 else "line"
        axes.set(
            xlabel=f"row of the {line}" if step == 1 else f"row of the {line}, every {step:.4g}th",
            ylabel="lane" if lanes > 1 else f"line of {count(round(width * step), 'row')}",
            title=f"{extent.size:,} of {count(extent.capacity, 'row')} live",
        )
        _count_whole(axes.yaxis)
        return axes

    def throughput(
        self, history: Sequence[Moment] | None = None, *, seconds: float | None = None, ax: Axes | None = None
    ) -> Axes:
        """Rows written and rows sampled per second by all processes.

        Args:
            history: moments as a training loop collects them, ``(time.monotonic(), rb.stats())``, oldest first. Default: the curve
                that the store keeps, of the last twenty minutes in which there was something to count, every ten seconds.
            seconds: look at the buffer itself for so long, twenty times a second; this thread waits meanwhile. Default, where there
                is no curve of a store yet: 2.
            ax: as the class says.

        Raises:
            ValueError: less than two moments, or such that time does not pass between them; ``seconds`` that are not above 0.
        """
        if history is None:
            curve = [] if seconds is not None else curve_of(self._buffer)
            history = curve if len(curve) > 1 else self._watched(2.0 if seconds is None else seconds)
        times = np.array([when for when, _ in history], dtype=np.float64)
        if len(times) < 2 or not bool((np.diff(times) > 0).all()):
            raise ValueError(
                f"plot.throughput: history: expected two moments or more, oldest first, got times {times.tolist()!s:.80}."
            )
        axes, since = _axes(ax), times - times[0]
        for name, key, color in (("written", "write_count", _ROWS), ("sampled", "sample_count", _DRAWS)):
            if all(key in stats for _, stats in history):
                counts = np.array([stats[key] for _, stats in history], dtype=np.float64)
                rates = np.maximum(np.diff(counts), 0) / np.diff(times)  # empty() sets counts back
                axes.stairs(
                    rates, since, color=color, baseline=None, linewidth=1.5, clip_on=False, label=f"rows {name}"
                )
        axes.set(xlabel="seconds", ylabel="rows per second", title="Throughput", ylim=(0, None))
        axes.legend()
        return axes

    def ratio(self, history: Sequence[Moment] | None = None, *, ax: Axes | None = None) -> Axes:
        """Rows sampled over rows inserted; where :class:`SamplesPerInsert` is set, since then, in the band that it keeps them to.

        Args:
            history: as for :meth:`throughput`: the path that the counts took. Default: where they are now; without a limit, the
                curve that the store keeps.
            ax: as the class says.

        Raises ``RuntimeError``: the store has no such limit, and counted no samples.
        """
        now = self._buffer.stats()
        moments = [stats for _, stats in history] if history is not None else [now]
        if not moments or not all(stats.get("limit_ratio") for stats in moments):
            return self._unlimited([stats for _, stats in history or curve_of(self._buffer)] or [now], ax)
        inserts, samples = (np.array([stats[f"limit_{name}"] for stats in moments]) for name in ("inserts", "samples"))
        last = moments[-1]
        ratio = last["limit_ratio"]
        # The level is what inserts have earned less what samples have spent, from a start in the middle of the band.
        start = last["limit_level"] - ratio * inserts[-1] + samples[-1]
        reach = np.array([0.0, max(1.2 * inserts.max(), last["limit_min_size"], 1.0)])
        middle = ratio * reach
        axes = _axes(ax)
        low, high = (np.maximum(middle + start - last[f"limit_{side}"], 0) for side in ("highest", "lowest"))
        axes.fill_between(reach, low, high, color=_DRAWS, alpha=0.15, label="allowed")
        axes.plot(reach, middle, ":", color=_DRAWS, label=f"{ratio:g} samples per insert")
        return _path(axes, inserts, samples, f"{ratio:g} asked for", tuple(reach.tolist()))

    def _unlimited(self, moments: list[dict[str, float]], ax: Axes | None) -> Axes:
        """The ratio without a limit."""
        if not all("sample_count" in stats for stats in moments):
            raise RuntimeError(
                "plot.ratio: expected a store that counts samples, or has a limit SamplesPerInsert, there is none: rb.limit(…)."
            )
        since = [stats for stats in moments if stats["write_count"] >= 0]  # it was emptied last
        inserts, samples = (np.array([stats[name] for stats in since]) for name in ("write_count", "sample_count"))
        if not samples.any():
            raise RuntimeError(
                "plot.ratio: no row was sampled since the buffer was emptied or loaded. Sample before drawing it."
            )
        return _path(_axes(ax), inserts, samples, "no limit", (0, None))

    def _watched(self, seconds: float) -> list[Moment]:
        if not seconds > 0:
            raise ValueError(f"plot.throughput: seconds: expected a number above 0, got {seconds!r:.40}.")
        start = time.monotonic()
        moments = [(start, self._buffer.stats())]
        while moments[-1][0] < start + seconds:
            time.sleep(min(_LOOK_S, seconds))
            moments.append((time.monotonic(), self._buffer.stats()))
        return moments


def curve_of(buffer: Watched) -> list[Moment]:
    """What the store of a buffer has counted, every ten seconds, and now; empty, where there is no store here."""
    storage = buffer.storage
    if storage.traits.is_remote or storage.memory is None:
        return []
    core = storage.memory.core
    points = [(when, inserted, sampled) for when, inserted, sampled, _, _ in core.curve()]
    stats, (inserted, sampled) = buffer.stats(), core.counted()
    points.append((max(time.time(), points[-1][0] + 1e-3) if points else time.time(), inserted, sampled))
    behind = inserted - stats["write_count"], sampled - stats["sample_count"]
    rising = [point for at, point in enumerate(points) if at == 0 or point[0] > points[at - 1][0]]
    return [(at, {"write_count": wrote - behind[0], "sample_count": drew - behind[1]}) for at, wrote, drew in rising]


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    with needs("plot", "plot"):
        from matplotlib import pyplot as plt  # takes half a second
    return plt.subplots(figsize=(7, 4), layout="constrained")[1]


def _histogram(axes: Axes, values: Floats | Ints, leaves: Floats | None, scale: float, *, powers: bool = False) -> None:
    """Counts of rows, each of which stands for ``scale``, and, where ``leaves`` says how they are drawn, of as many draws.

    ``powers``: bins and axis are logarithmic.
    """
    edges = np.histogram_bin_edges(np.log10(values) if powers else values, _BINS)
    edges = 10**edges if powers else edges
    axes.stairs(np.histogram(values, edges)[0] * scale, edges, fill=True, color=_ROWS, label="rows")
    if leaves is not None and leaves.sum() > 0:
        draws = np.histogram(values, edges, weights=leaves / leaves.sum() * len(values))[0] * scale
        axes.stairs(draws, edges, color=_DRAWS, linewidth=1.5, label="as many draws")
        axes.legend()


def _path(axes: Axes, inserts: Floats, samples: Floats, limit: str, reach: tuple[float | None, ...]) -> Axes:
    """The path that the counts took."""
    axes.plot(inserts, samples, color="0.3")
    axes.plot(inserts[-1:], samples[-1:], "o", color=_LIMIT, clip_on=False, label="now")
    axes.set(xlabel="rows inserted", ylabel="rows sampled", xlim=reach, ylim=(0, None))
    axes.set_title(f"{samples[-1] / max(inserts[-1], 1):.3g} samples per insert, {limit}")
    axes.legend()
    return axes


def _count_whole(axis: Axis) -> None:
    """Let the ticks of an axis be whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
