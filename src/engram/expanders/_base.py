"""What expanders share: the sampler inside, the trajectories around its rows, and the native read of both."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch

from engram import _fork, _native, samplers
from engram.errors import NoSampleable, RowError, WriterStalled
from engram.field_paths import FieldPath, as_path, as_paths, plain, public
from engram.persist.components import Dumpable
from engram.samplers.trajectory_tables import (
    END_KEYS,
    ID_KEYS,
    NAMED,
    Boundaries,
    find_boundaries,
    shared_table,
    step_type_bytes,
)
from engram.store import check_index_name, dlpack_specs
from engram.types import Declared, Draw, Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from engram.format.schema import Field
    from engram.store import Key as DrawKey
    from engram.store import Store
    from engram.types import Extent, Traits, Write

__all__ = [
    "Column",
    "Expander",
    "Following",
    "Reading",
    "check_count",
    "check_discount",
]

#: Reads of rows that keep moving: tries in a row, then with pauses.
_TRIES = 8
#: Draws in place of rows whose next observation is not there yet.
_MOST_REDRAWS = 200


class Column(NamedTuple):
    """One tensor of a batch. Step 0 is the drawn row; ``ahead`` names a later one, or the trajectory's last before that."""

    kind: str
    """``row``, ``frames``, ``sum``, ``steps``, ``discount`` or ``over``: methods of the native ``Expansion``."""
    field: int = 0
    """Number of the field in the store."""
    ahead: int = 0
    gamma: float = 1.0
    frames: int = 1
    dim: int = -1
    """Along which frames are put together."""
    first: int = -1
    """The field that holds the frame before the trajectory's first step; -1: there is none."""
    padding: float | None = None
    """What stands before the first frame; None: that frame itself."""


class Following(NamedTuple):
    """Next observations that are those of the following rows."""

    mark: int
    """The field in which a row names its final observation."""
    fields: dict[FieldPath, int]
    """The observations, by key."""
    read: Any
    """Final observations of marks: ``read(mark) -> (columns, found)``."""
    storage: Any
    """Where they lie."""


class Reading:
    """What a batch will hold. Expanders change it, from the innermost outwards, before anything is read."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        self.numbers: dict[FieldPath, int] = {field.key: number for number, field in enumerate(fields)}
        self.columns = [Column("row", number) for number in range(len(fields))]
        """Of every stored field, in order."""
        self.entries: dict[FieldPath, Column] = {}
        """What is not stored."""
        self.following: Following | None = None

    def number(self, key: FieldPath, who: str) -> int:
        """The field under a key. Raises ``KeyError``: it is not stored."""
        if key not in self.numbers:
            raise KeyError(
                f"sample: {who}: expected a stored field, one of {[f.name for f in self.fields]}, got {public(key)!r}."
            )
        return self.numbers[key]

    def number_of_reward(self, key: FieldPath, who: str) -> int:
        """The field of a reward. Raises ``TypeError``: it is neither float32 nor float64."""
        number = self.number(key, who)
        field = self.fields[number]
        if field.dtype not in ("float32", "float64"):
            raise TypeError(
                f"sample: {who}: field {field.name}: expected float32 or float64, got {field.dtype}. Store rewards as float32."
            )
        return number

    def add(self, key: FieldPath, column: Column, who: str) -> None:
        """A new entry. Raises ``ValueError``: there is one of that name."""
        if key in self.entries or key in self.numbers:
            raise ValueError(
                f"sample: {who}: expected a name of its own for {public(key)!r}, but the rows have such a field."
            )
        self.entries[key] = column


class _Bound(NamedTuple):
    """A store, and how a batch is read from it. Replaced as a whole: other threads may be drawing."""

    memory: Store
    table: Any
    read: Any
    """The native ``Expansion``."""
    stacked: list[tuple[int, int]]
    """Tensors with frames, and the dimension along which those are put together."""
    names: list[Any]
    """Of the tensors behind the fields."""
    following: Following | None
    """Then there are three more tensors: steps up to the observed row, up to the next one, and whether the former is the last."""


class Expander(Declared, Dumpable):
    """A sampler around a sampler. The inner one draws the rows; then every batch gets what the steps around them say.

    Rows, ``"index"``, ``"index_generation"`` and ``"priority_weight"`` are the inner sampler's, so priorities are updated as
    without an expander. Attributes that an expander does not have are those of :attr:`sampler`, in both directions:
    ``rb.sampler.beta = 0.5`` sets that of the ``PrioritizedSampler`` inside. Expanders can wrap expanders, in any order.

    Steps belong together as for a :class:`SliceSampler`: to one trajectory in one lane (with ``ndim > 1`` one column), never
    across the seam of a ring, where the newest row lies before the oldest. The rows around a drawn one are read under their
    tickets together with it: if one of them is overwritten meanwhile, all are read or drawn again.

    Around a slice sampler every step of every window is expanded as if it had been drawn alone, so what it says may come from
    behind the window, or before it, but never from another trajectory. Windows and their marks stay: ``("next", "truncated")`` is
    true at the last step of a window, and ``("next", "done")`` there and where the expanded entry is.

    Entries that are not stored stand in the batches of TensorDict buffers, and in the ``info`` of all buffers.
    """

    part = "sampler"
    #: What a store's record may name.
    known: ClassVar[dict[str, Any]] = {
        cls.__name__: cls
        for cls in (
            samplers.RandomSampler,
            samplers.SamplerWithoutReplacement,
            samplers.PrioritizedSampler,
            samplers.PrioritizedSliceSampler,
            samplers.SliceSampler,
            samplers.SliceSamplerWithoutReplacement,
        )
    }

    _rules: tuple[FieldPath | None, tuple[FieldPath, ...] | None, str | None]
    _bound: _Bound | None

    @property
    def stacked(self) -> tuple[FieldPath, ...]:
        """Fields of which a batch holds several steps in one."""
        return ()

    @property
    def followed(self) -> tuple[FieldPath, ...]:
        """Fields whose next observation is one following row."""
        return ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__.startswith("engram."):  # those of users are not there in every program that opens the store
            cls.known[cls.__name__] = cls

    def __init__(
        self,
        sampler: Any,
        *,
        traj_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        index: str | None = None,
    ) -> None:
        name = type(self).__name__
        inner = sampler() if isinstance(sampler, type) else sampler
        if not isinstance(inner, Sampler):
            raise TypeError(f"{name}: sampler: expected a sampler, got {type(sampler).__name__}.")
        if index is not None:
            check_index_name(index, f"{name}: index")
        rules: tuple[Any, ...] = (
            as_path(traj_key, f"{name}: traj_key"),
            as_paths(end_keys, f"{name}: end_keys"),
            index,
        )
        if isinstance(inner, Expander):
            theirs = inner.rules
            if any(mine not in (None, other) for mine, other in zip(rules, theirs, strict=True)):
                raise ValueError(
                    f"{name}: expected the trajectories of the {type(inner).__name__} inside, traj_key, end_keys, index = {theirs}, "
                    f"got {rules}. Give them to the innermost expander only."
                )
            rules = theirs
        elif isinstance(inner, samplers.SliceSampler | samplers.SliceSamplerWithoutReplacement):
            if not inner.recordable:
                raise TypeError(
                    f"{name}: sampler: expected windows of trajectories that the rows tell, got a {type(inner).__name__} with ends or "
                    "trajectories of its own. Store them as a field, and name it with traj_key or end_key."
                )
            if rules == (None, None, None):
                rules = (inner.traj_key, inner.end_keys or (inner.end_key and (inner.end_key,)), inner.index)
        self._rules = rules
        self._source = samplers.declared(inner)
        self.sampler: Any = inner
        self._unbind()

    @property
    def rules(self) -> tuple[FieldPath | None, tuple[FieldPath, ...] | None, str | None]:
        """``traj_key``, ``end_keys`` and ``index``: those of the innermost expander."""
        return self._rules

    def change(self, reading: Reading) -> None:
        """Say what batches hold. Raises ``KeyError`` and ``TypeError`` for fields that are missing or of the wrong kind."""
        raise NotImplementedError

    # ---- the sampler inside ------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "sampler" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.__dict__["sampler"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            name.startswith("_")
            or "sampler" not in self.__dict__
            or isinstance(getattr(type(self), name, None), property)
        ):
            super().__setattr__(name, value)
        elif name in self.__dict__ or hasattr(type(self), name) or not hasattr(self.sampler, name):
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be set. Make a new expander, and give it to rb.set_sampler()."
            )
        else:
            setattr(self.sampler, name, value)

    def observe(self, write: Write | None, data: Any) -> None:
        """Passed on."""
        self.sampler.observe(write, data)

    def update_priority(self, index: Any, priority: Any, *, generation: Tensor | None = None) -> None:
        """Passed on."""
        self.sampler.update_priority(index, priority, generation=generation)

    def state_dict(self) -> dict[str, Any]:
        """That of :attr:`sampler`."""
        state: dict[str, Any] = self.sampler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Passed on."""
        self.sampler.load_state_dict(state_dict)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of :attr:`sampler`, but rows are read with what is around them."""
        return self._source.traits._replace(draws_uniformly=False, reads_natively=True)

    @property
    def ran_out(self) -> bool:
        """Whether the last batch ended an epoch of :attr:`sampler`."""
        return self._source.ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._source.ran_out = value

    @property
    def drop_last(self) -> bool:
        """That of :attr:`sampler`."""
        return self._source.drop_last

    @drop_last.setter
    def drop_last(self, value: bool) -> None:
        self.sampler.drop_last = value

    @property
    def own_indexes(self) -> tuple[tuple[str, str], ...]:
        """Those of :attr:`sampler`."""
        return self._source.own_indexes

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """Asked of :attr:`sampler`."""
        return self._source.can_sample(storage, batch_size)

    def check_priority(self, priority: Any, n: int) -> None:
        """Passed on."""
        self._source.check_priority(priority, n)

    def mark_update(self, index: Any) -> None:
        """Passed on."""
        self._source.mark_update(index)

    def checked_state(self, state_dict: dict[str, Any], capacity: int | None = None) -> Callable[[], None]:
        """Passed on."""
        return self._source.checked_state(state_dict, capacity)

    def moved(self) -> None:
        """The storage's rows lie elsewhere now, with their indexes."""
        self._bound = None
        self._source.moved()

    def bind(self, storage: Any) -> None:
        """Meet the storage whose rows are drawn.

        Raises:
            RuntimeError: its rows are no fields, or not on the CPU.
            TypeError: frames of a field are stacked, but its next observation is that of one row.
        """
        self._check_next_frames()
        if not storage.traits.has_fields or (storage.device is not None and storage.device.type != "cpu"):
            where = f"a {type(storage).__name__}" + (f" on {storage.device}" if storage.device is not None else "")
            raise RuntimeError(self._elsewhere(where))
        self._source.bind(storage)

    def _check_next_frames(self) -> None:
        chain, _ = self._chain()
        for stacking in chain:
            for following in chain:
                for key in following.followed:
                    if key in stacking.stacked or ("next", *key) in stacking.stacked:
                        raise TypeError(
                            f"{type(stacking).__name__}: in_keys: expected fields whose next observations are stored, got "
                            f"{public(key)!r}, whose next one {type(following).__name__} takes from one following row: a batch would "
                            "hold several frames now and a single one next. Store its next observations too, and stack both."
                        )

    def _elsewhere(self, where: str) -> str:
        return (
            f"{type(self).__name__}: expected a tensor storage on the CPU, whose rows have neighbours that can be read, got {where}. "
            'Use LazyTensorStorage or LazyMemmapStorage with device="cpu", and a DeviceLoader for batches on an accelerator.'
        )

    # ---- the store ---------------------------------------------------------------------------------------------------

    def _unbind(self) -> None:
        self._lock = _fork.rlock()
        self._bound = None

    def _chain(self) -> tuple[list[Expander], Any]:
        """All expanders, the innermost first, and the sampler that they are around."""
        chain: list[Expander] = [self]
        while isinstance(chain[-1].sampler, Expander):
            chain.append(chain[-1].sampler)
        return chain[::-1], samplers.declared(chain[-1].sampler)

    def _bound_to(self, memory: Store) -> _Bound:
        bound = self._bound
        if bound is None or bound.memory is not memory:
            with self._lock:
                bound = self._bound
                if bound is None or bound.memory is not memory:
                    bound = self._bound = self._find(memory)
        return bound

    def _check_rows(self, memory: Store) -> None:
        """Raise ``RuntimeError`` unless rows are steps on the CPU with keys."""
        if not memory.is_native:  # device="auto", and the first row was elsewhere
            raise RuntimeError(self._elsewhere(f"rows on {memory.device}"))
        kind = memory.schema.structure.kind
        if kind not in NAMED:
            raise RuntimeError(f"sample: {type(self).__name__}: expected rows whose fields have keys, got a {kind}.")
        own = memory.schema.structure.batch
        if own:
            raise RuntimeError(
                f"sample: {type(self).__name__}: expected rows that are one step each, got TensorDicts of batch size {list(own)}: "
                "their steps may belong to different trajectories. Use a storage with ndim > 1, or lanes."
            )

    def _find(self, memory: Store) -> _Bound:
        self._check_rows(memory)
        fields = memory.schema.fields
        reading = Reading(fields)
        for expander in self._chain()[0]:
            expander.change(reading)
        boundaries, ends = self._boundaries(reading)
        table = shared_table(memory, self._rules[2] or "main", boundaries, 1)
        specs = dlpack_specs(fields)
        read = _native.Expansion(ends, [step_type_bytes(fields[number]) for number in ends])
        columns, names = [*reading.columns, *reading.entries.values()], [public(key) for key in reading.entries]
        following = reading.following
        if following is not None:
            if memory.directory is not None and not following.storage.shared:
                raise RuntimeError(
                    "sample: NextFromFollowing: the buffer is one that processes share, but the storage of final observations is "
                    "not. Use a LazyMemmapStorage for it, or storage.share()."
                )
            ahead = columns[following.mark].ahead
            columns += [Column("row", number, ahead + 1) for number in following.fields.values()]
            names += [("next", *key) for key in following.fields]
            columns += [Column("steps", ahead=ahead), Column("steps", ahead=ahead + 1), Column("over", ahead=ahead)]
        for column in columns:
            spec = specs[column.field]
            match column.kind:
                case "row":
                    read.row(column.field, spec, column.ahead)
                case "frames":
                    read.frames(
                        column.field,
                        spec,
                        column.ahead,
                        column.frames,
                        column.first,
                        _filling(column, fields[column.field]),
                    )
                case "sum":
                    read.sum(column.field, spec, column.ahead, column.gamma)
                case "steps":
                    read.steps(column.ahead)
                case "discount":
                    read.discount(column.ahead, column.gamma)
                case _:
                    read.over(column.ahead)
        stacked = [(at, column.dim) for at, column in enumerate(columns) if column.kind == "frames"]
        return _Bound(memory, table, read, stacked, names, following)

    def _boundaries(self, reading: Reading) -> tuple[Boundaries, list[int]]:
        """What the table of trajectories goes by, and the flags that end one besides."""
        traj_key, end_keys, _ = self._rules
        numbers = reading.numbers
        flags = end_keys or END_KEYS
        ends = [numbers[key] for key in flags if key in numbers]
        if end_keys is None and END_KEYS[0] in numbers:  # so that slice samplers use the same table
            flags = END_KEYS[:1]
        ids = ID_KEYS if traj_key is None else (traj_key,)
        ends_first = traj_key is None and end_keys is not None
        boundaries = find_boundaries(reading.fields, numbers, ids, flags, ends_first=ends_first)
        if boundaries is not None:
            return boundaries, ends or ([] if boundaries.by_id else list(boundaries.which))
        raise RuntimeError(
            f"sample: {type(self).__name__}: expected rows with one of the trajectory ids {[public(key) for key in ID_KEYS]}, "
            f"of the end flags {[public(key) for key in end_keys or END_KEYS]} or with a 'step_type' of integers, got "
            f"{[f.name for f in reading.fields]}. Name a stored field with traj_key or end_keys."
        )

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:  # noqa: ARG002 - the protocol's
        """Refused: rows alone are not what an expander is for. Raises ``RuntimeError``."""
        raise RuntimeError(self._elsewhere("a storage of other rows"))

    def sample_natively(
        self, storage: Any, key: DrawKey, n: int, *, numbered: bool = False
    ) -> tuple[list[Tensor], Tensor, dict[Any, Tensor]]:
        """Draw, and read the rows with what is around them in one native call: ``(columns, rows, info)``.

        Raises:
            NoSampleable: nothing to draw.
            WriterStalled: a row or a step around it moved at every try.
            KeyError, TypeError, RuntimeError: the rows have not the fields that are needed.
        """
        source = self._chain()[1]
        if source.traits.draws_windows:
            return self._sample_windows(storage, source, key, n, numbered=numbered)
        bound = self._bound_to(storage.memory)
        extent = storage.extent()
        samplers.check_drawable(extent.size)
        source.bind(storage)
        draw = source.draw(extent, n, key.value)
        tensors, moved, waiting = _read(bound, draw)
        info = dict(draw.info)
        rows = draw.rows
        if moved:
            rows, info = self._read_again(storage, bound, source, draw, tensors, moved, waiting, key.value)
        _stack(bound, tensors)
        numbers = tensors.pop()
        if numbered or draw.tickets is not None:
            info["index_generation"] = numbers
        count = len(bound.memory.schema.fields)
        info.update(zip(bound.names, tensors[count:], strict=True))
        return tensors[:count], rows, info

    def _sample_windows(
        self, storage: Any, source: Any, key: DrawKey, n: int, *, numbered: bool
    ) -> tuple[list[Tensor], Tensor, dict[Any, Tensor]]:
        """Windows are drawn and marked by their sampler; each of their steps is read as a row of its own.

        Where a step around a row moved, that row is read again; where the row did, all windows are drawn again.
        """

        def read(draw: Draw) -> tuple[list[Tensor], list[int]]:
            bound = self._bound_to(storage.memory)  # after the draw: the table counts the windows of whoever made it
            tensors, moved, _ = _read(bound, draw)
            tickets = draw.tickets
            assert tickets is not None  # windows have them
            for _ in range(_TRIES):
                if not moved:
                    break
                places = torch.tensor(moved, device="cpu")
                fresh, still, _ = _read(bound, Draw(draw.rows[places], tickets[places]))
                for tensor, values in zip(tensors, fresh, strict=True):
                    tensor[places] = values
                moved = [moved[i] for i in still]
            _stack(bound, tensors)
            return tensors[:-1], moved

        tensors, rows, info = source.sample_apart(storage, key, n, read, numbered=numbered)
        bound = self._bound_to(storage.memory)
        count = len(bound.memory.schema.fields)
        info.update(zip(bound.names, tensors[count:], strict=True))
        return tensors[:count], rows, info

    def _read_again(
        self,
        storage: Any,
        bound: _Bound,
        source: Any,
        draw: Draw,
        tensors: list[Tensor],
        moved: list[int],
        waiting: bool,
        key: int,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Replace what was read where something moved; the rows and their info in the end.

        Others are drawn where draws are independent of each other, or the sampler named the tickets that it means; of other
        samplers the same rows are read once more, with what they hold now; where that is nothing, other live rows.
        """
        others = draw.tickets is not None or bound.following is not None or isinstance(source, samplers.RandomSampler)
        rows, info = draw.rows.clone(), {name: _copied(value) for name, value in draw.info.items()}
        deadline = time.monotonic() + _native.wait_limit()
        attempt = 0
        while moved:
            attempt += 1
            extent = storage.extent()
            if extent.size == 0:
                raise NoSampleable("sample: the buffer was emptied meanwhile. Add data first.")
            if waiting and attempt > _MOST_REDRAWS:
                raise NoSampleable("sample: no row that is drawn has a next observation yet. Add data first.")
            if attempt > _TRIES:
                if time.monotonic() > deadline:
                    raise WriterStalled(
                        f"sample: row {int(rows[moved[0]])}, or a step around it, moved at every try for "
                        f"{_native.wait_limit():g} s."
                    )
                time.sleep(0.001)
            places = torch.tensor(moved, device="cpu")
            if others:
                fresh = source.draw(extent, len(moved), _mixed(key, attempt))
                rows[places] = fresh.rows
                for name, value in fresh.info.items():
                    if isinstance(value, torch.Tensor):
                        info[name][places.to(value.device)] = value
            else:
                gone = places[storage.hold_nothing(rows[places])]
                if len(gone):  # their writer died meanwhile
                    rows[gone] = samplers.RandomSampler().draw(extent, len(gone), _mixed(key, attempt)).rows
                fresh = Draw(rows[places])
            read, still, waiting = _read(bound, fresh)
            for tensor, values in zip(tensors, read, strict=True):
                tensor[places] = values
            moved = [moved[i] for i in still]
        return rows, info

    # ---- the rest of a sampler ---------------------------------------------------------------------------------------

    @property
    def recordable(self) -> bool:
        """Whether :meth:`config` says all: a sampler of the user's own is not noted in a store."""
        inner = self.sampler
        known = self.known.get(type(inner).__name__) is type(inner)
        return known and bool(inner.recordable)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as plain values: what a store notes to make the expander again."""
        inner = {"type": type(self.sampler).__name__, "config": self.sampler.config()} if self.recordable else {}
        traj_key, end_keys, index = self._rules
        return {
            "sampler": inner,
            "traj_key": plain(traj_key),
            "end_keys": None if end_keys is None else [plain(key) for key in end_keys],
            "index": index,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The expander that a store noted, with the sampler inside."""
        inner, arguments = cls.known[config["sampler"]["type"]], config["sampler"]["config"]
        return cls(inner.from_config(arguments), **{name: value for name, value in config.items() if name != "sampler"})

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_bound")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._unbind()

    def __repr__(self) -> str:
        shown = {k: v for k, v in self.config().items() if k != "sampler" and v is not None}
        return f"{type(self).__name__}({', '.join([repr(self.sampler), *(f'{k}={v!r}' for k, v in shown.items())])})"


def _read(bound: _Bound, draw: Draw) -> tuple[list[Tensor], list[int], bool]:
    """What is around some rows, the positions that are to be drawn again, and whether all of them wait for the next step."""
    rows, tickets = _as_rows(draw.rows), None if draw.tickets is None else _as_rows(draw.tickets)
    expected = 0 if tickets is None else tickets.data_ptr()
    try:
        tensors, moved = bound.read.read(bound.memory.core, bound.table, rows.data_ptr(), rows.numel(), expected)
    except IndexError as error:
        raise RowError(f"sample: {error}.") from error
    if bound.following is None:
        return tensors, moved, False
    return _followed(bound, bound.following, rows, tensors, moved)


def _followed(
    bound: _Bound, following: Following, rows: Tensor, tensors: list[Tensor], moved: list[int]
) -> tuple[list[Tensor], list[int], bool]:
    """Put final observations where no row follows. Raises ``RuntimeError``: they are not there."""
    numbers, over, further, steps = (tensors.pop() for _ in range(4))
    tensors.append(numbers)
    stands = torch.ones(len(rows), dtype=torch.bool, device="cpu")
    stands[moved] = False
    mark = tensors[following.mark]
    final = stands & (mark[:, 0] >= 0)
    at = final.nonzero().flatten()
    if len(at):
        columns, found = following.read(mark[at])
        gone = at[~found]
        if len(gone):  # unless the row is, too
            lost = gone[bound.memory.numbers_of(rows[gone]) == numbers[gone]]
            if len(lost):
                raise RuntimeError(
                    f"sample: NextFromFollowing: the final observation of row {int(rows[lost[0]])} is not in {following.storage!r}: "
                    "that holds fewer than the episodes of the buffer, or is not the one that was written to. Give "
                    "FinalObservations a storage of at least as many rows as there are episodes."
                )
            stands[gone] = False
        for place, column in zip(range(-1 - len(following.fields), -1), columns, strict=False):
            tensors[place][at[found]] = column[found]
    alone = stands & ~final & (steps == further).flatten()
    ended = alone & over.flatten()
    if bool(ended.any()):
        raise RuntimeError(
            f"sample: NextFromFollowing: row {int(rows[ended.nonzero()[0, 0]])}, or one that follows it, is the last of its "
            "trajectory, but was written without an end flag, so its final observation was not kept. Set one of the end keys of "
            "FinalObservations at the last step of every episode."
        )
    again = (~stands | alone).nonzero().flatten().tolist()
    return tensors, again, bool(alone.any()) and bool(stands.all())


def _as_rows(rows: Tensor) -> Tensor:
    if rows.dtype is torch.int64 and rows.is_cpu and rows.is_contiguous():
        return rows
    return rows.to("cpu", torch.int64).contiguous()


def _mixed(key: int, attempt: int) -> int:
    return (key + attempt * 0x9E3779B97F4A7C15) % (1 << 63)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _filling(column: Column, field: Field) -> bytes:
    """A frame of padding, as it would lie in the store."""
    if column.padding is None:
        return b""
    frame = torch.full((math.prod(field.shape),), column.padding, dtype=getattr(torch, field.dtype), device="cpu")
    return bytes(frame.view(torch.uint8).numpy().tobytes())


def _stack(bound: _Bound, tensors: list[Tensor]) -> None:
    for at, dim in bound.stacked:
        tensors[at] = _put_together(tensors[at], dim)


def _put_together(frames: Tensor, dim: int) -> Tensor:
    """``[n, frames, *shape]``, the frames one behind the other along a dimension of the shape; no copy if it is the first."""
    at = frames.ndim - 1 + dim
    return frames.movedim(1, at).flatten(at, at + 1)


# ---- arguments ---------------------------------------------------------------------------------------------------------


def check_count(what: str, value: Any) -> int:
    """A number of steps. Raises ``TypeError``, ``ValueError``: it is none, or below 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what}: expected an int, got {type(value).__name__}.")
    if not 1 <= value < 1 << 31:
        raise ValueError(f"{what}: expected at least 1 and less than 2 ** 31, got {value}.")
    return value


def check_discount(what: str, value: Any) -> float:
    """A discount. Raises ``ValueError``: it is outside [0, 1]."""
    number = float(value)
    if not 0 <= number <= 1:
        raise ValueError(f"{what}: expected a number in [0, 1], got {value}.")
    return number
