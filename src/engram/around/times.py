"""Windows by time: a drawn row stands for the rows at given times before and after it, by stored timestamps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias, cast

import torch

from engram._support import checks, native
from engram._support.field_paths import FieldPath, checked_path, plain, public
from engram.around import episodes, expander
from engram.around.sequence import Expanded, ExpandedReader, Named, SampleUnit, Sequence, UnitReader
from engram.format.schema import Schema
from engram.samplers._base import DeclaredSampler
from engram.storages import Storage
from engram.store.memory import as_rows
from engram.store.store import Store
from engram.types import Draw

#: Times before and after a row, of each field: a dict, or pairs of keys and times.
Deltas: TypeAlias = Mapping[str, object] | Mapping[tuple[str, ...], object] | Iterable[tuple[object, object]]


class Window(SampleUnit):
    """A window by time: each drawn row stands for the rows at given times before and after it.

    ``ReplayBuffer(sample_unit=Window(deltas={"state": [-0.1, 0.0], "action": torch.arange(50) / 50}))`` is what ``delta_timestamps``
    is in LeRobot. In a batch of ``B`` rows the fields under each key of ``deltas`` are ``[B, T, ...]``, all others those of the drawn
    rows, ``[B, ...]``.

    Args:
        deltas: for each key ``T`` times from that of the drawn row, in the unit of the stored timestamps. A key of nested fields means
            all of them.
        tolerance: how far the time of a row may lie from the one that is meant, in the same unit.
        time_key: the field with timestamps, one real number per row, which never go back within an episode.
        traj_key, end_keys, end_when: where episodes end, as for :class:`SliceSampler`.

    The row is the nearest one of the same episode. Where the time lies before the first stored row of the episode, or after its last,
    that row stands for it, and bool ``[B, T]`` ``KEY_is_pad`` is true. This mask is in the ``info`` of all buffers and in the batches
    of :class:`TensorDictReplayBuffer`. ``index`` and priorities are those of drawn rows.

    Raises:
        TypeError: ``deltas`` is no dict of numbers. ValueError: it is empty; a time or the tolerance is not finite.
        Drawing raises ``KeyError``: a key or the timestamps are not stored; ``TypeError``: timestamps are not one real number per row;
            ``ValueError``: within an episode no row is near enough, or a timestamp is not finite;
            ``RuntimeError``: rows on an accelerator or of several steps, or nothing says where episodes end.

    Cost: besides the draw one native search for all times, which reads as many timestamps as an episode can be halved, and a read of
    each key.

    >>> import torch
    >>> from engram import LazyTensorStorage, TensorDictReplayBuffer, Window
    >>> from tensordict import TensorDict
    >>> unit = Window(deltas={"state": [-0.1, 0.0], "action": torch.arange(3) / 10})
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sample_unit=unit, batch_size=4)
    >>> step = torch.arange(20)
    >>> rows = {"episode": step // 10, "timestamp": step % 10 / 10, "state": step, "action": step}
    >>> _ = rb.extend(TensorDict(rows, [20]))
    >>> batch = rb.sample()
    >>> batch["state"].shape, batch["action"].shape
    (torch.Size([4, 2]), torch.Size([4, 3]))
    >>> bool((batch["state_is_pad"][:, 0] == (batch["timestamp"] == 0)).all())  # an episode has nothing before its first row
    True
    """

    def __init__(
        self,
        deltas: Deltas,
        tolerance: float = 1e-4,
        *,
        time_key: object = "timestamp",
        traj_key: object = None,
        end_keys: Iterable[object] | None = None,
        end_when: str | None = None,
    ) -> None:
        pairs = deltas.items() if isinstance(deltas, Mapping) else deltas
        if not isinstance(pairs, Iterable):
            raise TypeError(f"Window: deltas: expected a dict of times by key, got {deltas!r}.")
        named = [(checked_path(key, "Window: deltas"), times) for key, times in pairs]
        if not named:
            raise ValueError("Window: deltas: expected times of one key at least, got none. Or leave the unit out.")
        #: Times of each key, float64 ``[T]``.
        self.deltas: dict[FieldPath, torch.Tensor] = {path: _times(times, path) for path, times in named}
        self.tolerance = checks.check_number("Window: tolerance", tolerance, least=0)
        self.time_key = checked_path(time_key, "Window: time_key")
        self.rules = episodes.TrajectoryKeys.of("Window", traj_key, end_keys, None, end_when)

    def check(self, storage: Storage, source: DeclaredSampler) -> None:
        Sequence(1).check(storage, source)  # needs the same of both

    def read_with(self, source: DeclaredSampler, named: Named) -> UnitReader | None:
        return TimeReader(self, source, named)

    def config(self) -> dict[str, object]:
        """As of every unit: the arguments as plain values, ``deltas`` as pairs.

        >>> from engram import Window
        >>> Window(deltas={("next", "state"): [0.0, 0.5]}).config()["deltas"]
        [[['next', 'state'], [0.0, 0.5]]]
        """
        rules = {name: value for name, value in self.rules.config().items() if name != "index"}
        deltas = [[plain(path), times.tolist()] for path, times in self.deltas.items()]
        key = plain(self.time_key)
        return {"deltas": deltas, "tolerance": self.tolerance, "time_key": key, "end_when": None, **rules}


def _times(times: object, path: FieldPath) -> torch.Tensor:
    """Times as float64 ``[T]``. Raises ``TypeError``, ``ValueError``."""
    what = f"Window: deltas: {public(path)!r}"
    found = checks.as_numbers(what, times).detach().to("cpu", torch.float64)
    if found.ndim != 1 or not len(found) or not bool(found.isfinite().all()):
        raise ValueError(f"{what}: expected a list of finite times, got {times!r}.")
    return found


class _Fields(NamedTuple):
    """What a unit reads of one store."""

    memory: Store
    schema: Schema
    #: The number of the timestamps.
    time: int
    #: The fields under each key of the unit.
    of_keys: list[list[int]]
    others: list[int]

    @classmethod
    def of(cls, memory: Store, unit: Window) -> _Fields:
        """Raises ``KeyError``, ``TypeError``, ``RuntimeError``, as :class:`Window` says."""
        if not memory.is_native:
            raise RuntimeError('sample: Window: expected rows on the CPU, got an accelerator. Use device="cpu".')
        expander.Expansion.check_rows(memory, "Window")
        fields, numbers = memory.schema.fields, episodes.numbers_by_path(memory)
        fixed = {path: number for path, number in numbers.items() if fields[number].ragged is None}
        of_keys = [[number for path, number in fixed.items() if path[: len(key)] == key] for key in unit.deltas]
        missing = [public(key) for key, found in zip(unit.deltas, of_keys, strict=True) if not found]
        time = fixed.get(unit.time_key)
        if time is None or missing:
            what = f"deltas: {missing}" if missing else f"time_key: {public(unit.time_key)!r}"
            raise KeyError(
                f"sample: Window: {what}: expected a stored field, one of {[public(path) for path in fixed]}, of rows of one size."
            )
        form = fields[time]
        if math.prod(form.shape) != 1 or not form.dtype.startswith(("float", "int", "uint")):
            raise TypeError(
                f"sample: Window: time_key: expected one real number per row, got {form.dtype} {list(form.shape)} in {form.name}."
            )
        taken = {number for found in of_keys for number in found}
        others = [number for number in range(len(fields)) if number not in taken]
        return cls(memory, memory.schema, time, of_keys, others)


def _steps_at(
    fields: _Fields, table: native.Trajectories, drawn: torch.Tensor, deltas: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The steps that stand for the times around ``B`` drawn rows, ``[B, T]`` each.

    Returns:
        Rows; their tickets, -1: one is being written; times from that of the drawn row; and whether the episode has no step beyond.

    Raises:
        ValueError: a timestamp is not finite.
    """
    memory, shape = fields.memory, (len(drawn), len(deltas))
    dtypes = (torch.int64, torch.int64, torch.float64, torch.bool)
    rows, tickets, times, is_end = (torch.empty(shape, dtype=dtype, device="cpu") for dtype in dtypes)
    form = native.DLPACK[getattr(torch, memory.schema.fields[fields.time].dtype)]
    wrong = table.nearest(memory.core, fields.time, *form, drawn, deltas, rows, tickets, times, is_end)
    if wrong >= 0:
        got = float(memory.read(torch.tensor([wrong]), which=[fields.time])[0][0])
        raise ValueError(f"sample: Window: time_key: expected finite timestamps, got {got} in row {wrong}.")
    return rows, tickets, times, is_end


class TimeReader(ExpandedReader):
    """Draws rows, finds those at the times around them, and reads these."""

    def __init__(self, unit: Window, source: DeclaredSampler, named: Named) -> None:
        super().__init__(unit, source, named)
        self._window = unit
        self._fields: _Fields | None = None

    def expanded(self, storage: Storage, draw: Draw, clock: int) -> Expanded:
        """As :meth:`ExpandedReader.expanded`. Raises as :class:`Window` says."""
        memory, unit = cast("Store", storage.memory), self._window
        fields, drawn = self._fields, as_rows(draw.rows, "sample")
        if fields is None or fields.memory is not memory or fields.schema is not memory.schema:
            fields = self._fields = _Fields.of(memory, unit)
        tickets = storage.tickets_of(drawn) if draw.tickets is None else draw.tickets
        deltas, info = torch.cat([*unit.deltas.values()]), dict(draw.info)
        table = unit.rules.episodes(memory, "sample: Window").table()
        rows, expected, times, is_end = _steps_at(fields, table, drawn, deltas)
        far = ~((times - deltas).abs() <= unit.tolerance)
        refused = far & ~is_end
        moved = ((expected < 0) | (expected >= clock)).any(1).nonzero().flatten().tolist()
        if not moved and bool(refused.any()):
            row, at = refused.nonzero()[0].tolist()
            key = [public(key) for key, each in unit.deltas.items() for _ in each][at]
            raise ValueError(
                f"sample: Window: deltas: {key!r}: expected a row of the episode within {unit.tolerance:g} of the time of row "
                f"{int(drawn[row])} plus {float(deltas[at]):.9g}, got the nearest at that plus {float(times[row, at]):.9g}. Name "
                "times that are stored, or raise tolerance=. Timestamps of an episode must not go back."
            )
        columns: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(memory.schema.fields)
        begin = 0
        for (name, each), which in zip(unit.deltas.items(), fields.of_keys, strict=True):
            part = slice(begin, begin := begin + len(each))
            found, changed = memory.read(rows[:, part].reshape(-1), expected=expected[:, part].reshape(-1), which=which)
            moved += [place // len(each) for place in changed]
            for number, column in zip(which, found, strict=True):
                columns[number] = column.reshape(-1, len(each), *column.shape[1:])
            info[public((*name[:-1], f"{name[-1]}_is_pad"))] = far[:, part].contiguous()
        found, changed = memory.read(drawn, expected=tickets, which=fields.others)
        for number, column in zip(fields.others, found, strict=True):
            columns[number] = column
        return Expanded(columns, drawn, tickets, info, sorted({*moved, *changed}))
