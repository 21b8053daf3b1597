"""What is claimed: the floors, in one place and as data, and how a measured ratio is judged against them."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from benchmarks.timing import Spread, Timing

Kind = Literal["times", "share", "value"]
Verdict = Literal["aim", "yes", "no", ""]


@dataclass(frozen=True)
class Floor:
    """A bound on a comparison.

    ``times``: the other side's time over ours, at least ``bound``; ``share``: our time over the other's, at
    most ``bound``; ``value``: a plain number, at most ``bound``. ``within_iqr`` accepts the bound if the
    quartiles reach it: for claims of equality, where the median of two equal sides lands on either side of 1
    by chance.
    """

    kind: Kind
    bound: float
    aim: float | None = None
    within_iqr: bool = False

    def verdict(self, measured: Spread) -> Verdict:
        """``aim`` and ``yes`` by the median, but for ``within_iqr``."""
        if self.kind == "times":
            best = measured.high if self.within_iqr else measured.median
            if self.aim is not None and measured.median >= self.aim:
                return "aim"
            return "yes" if best >= self.bound else "no"
        best = measured.low if self.within_iqr else measured.median
        if self.aim is not None and measured.median <= self.aim:
            return "aim"
        return "yes" if best <= self.bound else "no"

    def __str__(self) -> str:
        sign = "≥" if self.kind == "times" else "≤"
        return f"{sign} {self.bound:g}{' (IQR)' if self.within_iqr else ''}"


def _every(keys: Iterable[str], against: str, floor: Floor) -> dict[tuple[str, str], Floor]:
    return {(key, against): floor for key in keys}


_WARM = ("tensor", "memmap")
_MOVES = tuple(f"{kind}/{shape}" for kind in ("frames", "small") for shape in ("2-3", "3-2"))
_CROWDS = ("1-writer", "2-writers")
_WINDOWS = ("8 x 32", "32 x 8", "8 x 32, WindowSpec", "8 x 32, R2D2")
_FORMS = ("dict", "tensordict")
_SHAPES = ("32x64", "128x64", "128x256", "512x64", "512x256", "512x1024")
_LANES = ("", "-array", "-each")
_CHOOSING = ("StalestFirst", "Lifo", "MaxTimesSampled")
_CLASSES = ("ReplayBuffer", "TensorDictReplayBuffer")

FLOORS: dict[tuple[str, str], Floor] = {
    **_every((f"sample/tensordict/{s}" for s in _WARM), "TorchRL", Floor("times", 8, aim=12)),
    **_every((f"sample/tensordict/{s}" for s in _WARM), "cpprb", Floor("times", 2)),
    **_every((f"sample/tensor/{s}" for s in _WARM), "TorchRL", Floor("times", 5, aim=8)),
    ("sample/tensordict/list", "TorchRL"): Floor("times", 5),
    ("sample/tensor/list", "TorchRL"): Floor("times", 2),
    ("sample/dict/list", "TorchRL"): Floor("times", 2),
    **_every((f"sample/half-full/{s}" for s in _WARM), "TorchRL", Floor("times", 8, aim=15)),
    **_every((f"sample/dict-to-tensordict/{s}" for s in _WARM), "TensorDict", Floor("share", 1, within_iqr=True)),
    ("sample/memmap-to-tensor", "LazyTensor"): Floor("share", 1.1),
    **_every((f"everyday/extend-{n}{lane}" for n in (1, 8) for lane in _LANES), "cpprb", Floor("times", 1)),
    ("everyday/add", "SB3"): Floor("times", 2 / 3),
    ("transfer_queue/client", "SimpleStorage"): Floor("times", 5),
    ("ragged/extend", "copy"): Floor("share", 1.5),
    ("ragged/extend", "TorchRL"): Floor("times", 5),
    ("ragged/directory", "copy"): Floor("share", 2.5),
    ("ragged/sample", "torch.cat"): Floor("share", 1.3),
    ("ragged/sample", "TorchRL"): Floor("times", 6),
    ("ragged/one", "25 µs"): Floor("value", 25),
    ("ragged/lists", "TorchRL"): Floor("share", 1, within_iqr=True),
    ("ragged/groups", "random"): Floor("share", 2),
    ("ragged/groups/scaling", "1e+05 rows"): Floor("share", 2),
    ("ragged/tick/bytes", "1.3 ×"): Floor("value", 1.3),
    ("ragged/tick/paused", "1 ms"): Floor("value", 1),
    ("ragged/tick/time", "1 GB"): Floor("share", 1.1, within_iqr=True),
    ("ragged/reopened", "100 ms"): Floor("value", 100),
    ("units/sequence/written", "TorchRL"): Floor("times", 10),
    **_every(("cleanrl/dqn", "cleanrl/sac"), "SB3", Floor("times", 1, within_iqr=True)),
    **_every(("cleanrl/dqn/buffer", "cleanrl/sac/buffer"), "SB3", Floor("times", 1.5)),
    **_every(("sb3/dqn", "sb3/sac"), "SB3", Floor("times", 0.98)),
    **_every((f"sb3/buffer/{k}" for k in ("dqn-1", "dqn-8", "sac-1", "frames-1")), "SB3", Floor("share", 0.7)),
    ("sb3/memory", "SB3"): Floor("share", 0.15),
    **_every(("ensembles/all", "ensembles/drawn"), "TorchRL", Floor("times", 5)),
    ("batches/stacks", "SB3"): Floor("share", 1.2),
    **_every(("batches/once-45-B", "batches/once-1-kB"), "uniform", Floor("share", 1.1)),
    ("batches/update", "cpprb"): Floor("times", 1),
    **_every(
        (f"threads/{what}" for what in (*_SHAPES, "add", "update")),
        "1 thread",
        Floor("share", 1.1, aim=1, within_iqr=True),
    ),
    **_every((f"write/add/{c}" for c in _CLASSES), "TorchRL", Floor("times", 10)),
    **_every((f"write/add/{c}" for c in _CLASSES), "cpprb", Floor("times", 2)),
    **_every((f"write/extend-64/{c}" for c in _CLASSES), "TorchRL", Floor("times", 10)),
    **_every(
        (f"write/best/{k}/{n}" for k in ("all", "half", "none") for n in (1, 8)), "plain extend", Floor("share", 3)
    ),
    **_every(("write/best/half/64", "write/best/none/64", "write/best/none/512"), "plain extend", Floor("share", 3)),
    ("write/best/all/64", "plain extend"): Floor("share", 4),  # rows anywhere in memory, against rows in order
    ("write/best/half/512", "plain extend"): Floor("share", 4),
    ("write/best/all/512", "plain extend"): Floor("share", 6.5),
    ("prioritized/sample", "cpprb"): Floor("times", 3),
    ("prioritized/sample", "rlox"): Floor("times", 2),
    ("prioritized/sample", "TorchRL"): Floor("times", 8),
    ("prioritized/update", "cpprb"): Floor("times", 0.6),
    ("prioritized/update", "TorchRL"): Floor("times", 8),
    ("prioritized/both", "cpprb"): Floor("times", 3),
    ("indexes/uniform", "rlox"): Floor("times", 1.2),
    ("indexes/without-replacement", "TorchRL"): Floor("times", 8),
    ("indexes/max-value", "TorchRL"): Floor("times", 20),
    ("groups/random", "TorchRL"): Floor("times", 10),
    ("staleness/rest", "TorchRL"): Floor("times", 10),
    ("staleness/written", "TorchRL"): Floor("times", 10),
    ("query/reward-sum", "TorchRL"): Floor("times", 5),
    ("slices/by-end", "TorchRL"): Floor("times", 40),
    ("slices/by-id", "TorchRL"): Floor("times", 20),
    ("slices/written", "TorchRL"): Floor("times", 100),
    **_every(
        (f"windows/{w}/{f}/{b}" for w in _WINDOWS for f in _FORMS for b in (71, 175)), "uniform", Floor("share", 1.15)
    ),
    **_every(
        (f"windows/{w}/{f}/{b}" for w in _WINDOWS for f in _FORMS for b in (1063, 4135)), "uniform", Floor("share", 1)
    ),
    ("hindsight/future", "TorchRL"): Floor("times", 5),
    **_every(("updates/value", "updates/state", "updates/versions"), "TorchRL", Floor("times", 5)),
    ("scaling/hindsight", "1e+05 rows"): Floor("share", 2),
    ("scaling/tree", "1e+06 rows"): Floor("share", 3),
    ("scaling/slices", "1e+05 rows"): Floor("share", 1.5),
    ("scaling/groups", "1e+05 rows"): Floor("share", 2),
    ("scaling/staleness", "1e+05 rows"): Floor("share", 2),
    **_every(
        (f"removers/{r}/{n}/{m}" for r in _CHOOSING for n in (1, 256) for m in ("alone", "in-turn")),
        "1e+05 rows",
        Floor("share", 3),
    ),
    **_every((f"sharing/write/{k}" for k in ("memmap", "tensor", "td-memmap")), "TorchRL", Floor("times", 10)),
    **_every((f"sharing/{n}-beside-sampler" for n in _CROWDS), "another program", Floor("share", 1.3)),
    **_every((f"sharing/{n}-beside-sampler" for n in _CROWDS), "alone", Floor("share", 1.3)),
    **_every((f"sharing/p99-beside-{n}" for n in _CROWDS), "another program", Floor("share", 2)),
    **_every((f"sharing/p99-beside-{n}" for n in _CROWDS), "alone", Floor("share", 2)),
    **_every(("sharing/prioritized/tensor", "sharing/prioritized/memmap"), "private", Floor("share", 1.2)),
    **_every((f"sharing/reverb/{k}" for k in ("write", "sample", "prioritized")), "Reverb", Floor("times", 50)),
    ("sharing/recovery", "100 ms"): Floor("value", 100),
    **_every((f"prefetch/wait/device/{depth}" for depth in (1, 2)), "prefetch=0", Floor("share", 0.1)),
    **_every((f"prefetch/nothing-to-hide/{k}" for k in ("stepped", "tight")), "prefetch=0", Floor("value", 20)),
    **_every(
        (f"prefetch/small/{kind}/{s}" for kind in ("dict", "tensordict") for s in _WARM),
        "prefetch=0",
        Floor("share", 1.05),
    ),
    **_every((f"checkpoints/dumps/{k}" for k in ("new", "again")), "TorchRL", Floor("times", 2)),
    ("checkpoints/capacity", "full"): Floor("share", 1.2),
    **_every((f"checkpoints/one-per-cent/{k}" for k in ("time", "bytes")), "full", Floor("share", 0.02)),
    **_every((f"checkpoints/pause/{k}" for k in ("add", "sample", "paused")), "20 ms", Floor("value", 20)),
    ("checkpoints/loads", "reading"): Floor("share", 1.25),
    ("checkpoints/memory", "64 MiB"): Floor("value", 64),
    ("checkpoints/verify", "1 GB/s"): Floor("value", 1000),
    ("ranks/plan/time", "10 s"): Floor("value", 10),
    ("ranks/plan/memory", "200 MB"): Floor("value", 200),
    **_every((f"ranks/restore/disk/{move}" for move in _MOVES), "copying", Floor("share", 1 / 0.6)),
    **_every((f"ranks/memory/frames/{shape}" for shape in ("2-3", "3-2")), "64 MiB", Floor("value", 64)),
    ("ranks/stall/call", "50 ms"): Floor("value", 50),
    ("ranks/request", "poll_every"): Floor("value", 1),
    ("frames/2-threads", "copy_"): Floor("share", 1.3),
    ("frames/2-threads", "TorchRL"): Floor("times", 8),
    ("frames/two-against-one", "one thread"): Floor("times", 1.6),
    **_every((f"memory/folder/{c}" for c in _CLASSES), "the data", Floor("value", 9)),
    ("larger/frames", "announced, read"): Floor("share", 1 / 0.7),
    ("larger/mapping", "mapping"): Floor("times", 30),
    ("larger/slices", "from end to end"): Floor("share", 1 / 0.8),
    ("larger/small", "mapping"): Floor("times", 20),
    ("larger/grouped", "a file each"): Floor("times", 2),
    ("larger/wait", "prefetch=0"): Floor("share", 0.3),
    ("larger/extend", "pwrite"): Floor("share", 1 / 0.7),
    ("larger/longest", "100 ms"): Floor("value", 100),
    ("limits/wake", "1 ms"): Floor("value", 1000),
    **_every(
        (f"meter/{k}/{n}" for k in ("tensordict", "dict", "prioritized") for n in (64, 256)), "1 %", Floor("value", 1)
    ),
    ("cluster/sample/small", "TorchRL, ray"): Floor("times", 4),
    ("cluster/sample/small", "TorchRL, gloo"): Floor("times", 8),
    ("cluster/sample/frames", "TorchRL, ray"): Floor("times", 3.5),
    ("cluster/sample/frames", "TorchRL, gloo"): Floor("times", 2),
    ("cluster/iterated/small", "TorchRL, ray"): Floor("times", 20),
    ("cluster/iterated/small", "TorchRL, gloo"): Floor("times", 40),
    ("cluster/iterated/small", "a socket, one by one"): Floor("share", 0.6),
    ("cluster/iterated/frames", "TorchRL, ray"): Floor("times", 5),
    ("cluster/iterated/frames", "TorchRL, gloo"): Floor("times", 2.5),
    ("cluster/iterated/frames", "a socket"): Floor("share", 2.2),
    ("cluster/extend/small", "TorchRL, ray"): Floor("times", 5),
    ("cluster/streamed/small", "TorchRL, ray"): Floor("times", 8),
    ("cluster/reverb/sample", "Reverb"): Floor("times", 10),
    ("cluster/reverb/write", "Reverb"): Floor("times", 10),
    ("cluster/local", "not served"): Floor("share", 1.1, within_iqr=True),
    ("single/acknowledged", "33.3 µs"): Floor("value", 33.3),
    ("single/cpu", "30 µs"): Floor("value", 30),
    ("cluster/server-death", "500 ms"): Floor("value", 500),
    ("cluster/all-dead", "100 ms"): Floor("value", 100),
}


@dataclass(frozen=True)
class Comparison:
    """Ours against one other side: what was measured, and the floor if one was promised."""

    against: str
    kind: Kind
    measured: Spread
    floor: Floor | None

    @property
    def verdict(self) -> Verdict:
        return self.floor.verdict(self.measured) if self.floor else ""


@dataclass(frozen=True)
class Row:
    """One line of the report. ``spreads`` is per side, in ``unit``; ``blocks_us`` always in microseconds per
    call.

    ``notes`` says per side what to know about its number, or why there is none.
    """

    key: str
    what: str
    spreads: dict[str, Spread]
    comparisons: list[Comparison]
    unit: str = "µs"
    blocks_us: dict[str, list[float]] = field(default_factory=dict)
    calls: int = 1
    notes: dict[str, str] = field(default_factory=dict)

    def unjudged(self, against: str | None = None) -> "Row":
        """The same numbers without floors, or without that one: neither a pass nor a failure would mean anything."""
        left = [replace(one, floor=None) if against in (None, one.against) else one for one in self.comparisons]
        return replace(self, comparisons=left)

    def as_rate(self, rows: int) -> "Row":
        """The same row in rows per second, a call writing that many; ratios stay those of the times."""
        spreads = {side: _rate(rows, spread) for side, spread in self.spreads.items()}
        return replace(self, spreads=spreads, unit="rows/s")


def _rate(rows: int, spread: Spread) -> Spread:
    per_second = rows * 1e6
    return Spread(per_second / spread.median, per_second / spread.high, per_second / spread.low)


def timed(
    key: str,
    what: str,
    timing: Timing,
    *,
    ours: str = "engram",
    times: Iterable[str] = (),
    share: Iterable[str] = (),
    notes: dict[str, str] | None = None,
) -> Row:
    """A row of times: ``times`` names the sides that are put over ours, ``share`` those that ours is put
    over.

    Sides that did not run are passed over; ``notes`` says why they did not.
    """
    comparisons = []
    if ours in timing.blocks_us:
        for other in (side for side in times if side in timing.blocks_us):
            measured = timing.ratio(other, ours)
            comparisons.append(Comparison(other, "times", measured, FLOORS.get((key, other))))
        for other in (side for side in share if side in timing.blocks_us):
            measured = timing.ratio(ours, other)
            comparisons.append(Comparison(other, "share", measured, FLOORS.get((key, other))))
    spreads = {side: timing.spread(side) for side in timing.blocks_us}
    return Row(key, what, spreads, comparisons, blocks_us=timing.blocks_us, calls=timing.calls, notes=notes or {})
