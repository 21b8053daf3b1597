"""Windows of consecutive steps of one trajectory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from engram import _fork, _native
from engram._later import refuse
from engram.errors import NoSampleable
from engram.samplers._base import NativeSampler
from engram.samplers._boundaries import boundaries_of, field_numbers, scan, shared_table, static_table
from engram.types import Draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.samplers._boundaries import Key
    from engram.store import Store
    from engram.types import Extent, Write

__all__ = ["SliceSampler", "SliceSamplerWithoutReplacement", "Slices"]

_LATER = {
    "fragmented": "slices of interleaved trajectories",
    "step_key": "slices of interleaved trajectories",
}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MASK = ("collector", "mask")
#: int64 rows and tickets; bools: ends its window ``[B, 1]``, begins it ``[B]``, is no padding ``[B]``; false ``[B, 1]``.
#: Made natively, as every operation of torch gives the GIL away, and getting it back from busy writers takes its time.
_COLUMNS = [(0, 64, ()), (0, 64, ()), (6, 8, (1,)), (6, 8, ()), (6, 8, ()), (6, 8, (1,))]
_LAYOUT = _native.Layout(_COLUMNS)


class Slices(Draw):
    """A draw of whole windows, one behind the other."""

    length: int
    """Steps that were asked for per window."""
    sizes: list[int]
    """Rows of each window, padding included."""
    last: Tensor
    """bool ``[B, 1]``: the last real step of its window."""
    first: Tensor
    """bool ``[B]``: the first step of its window."""
    real: Tensor
    """bool ``[B]``: no padding."""
    never: Tensor
    """bool ``[B, 1]``: false."""

    @property
    def columns(self) -> list[Tensor]:
        """All that has an entry per row."""
        assert self.tickets is not None  # windows are read as they were drawn
        return [self.rows, self.tickets, self.last, self.first, self.real, self.never]


def _allocate(n: int) -> list[Tensor]:
    if _native.HAS_EXCHANGE:
        tensors: list[Tensor] = _LAYOUT.allocate(n)
        return tensors
    kinds = (torch.int64, torch.int64, *(torch.bool,) * 4)
    return [
        torch.empty((n, *shape), dtype=kind, device="cpu") for kind, (_, _, shape) in zip(kinds, _COLUMNS, strict=True)
    ]


def _slices(columns: Sequence[Tensor], sizes: list[int], length: int) -> Slices:
    draw = Slices(columns[0], columns[1])
    draw.last, draw.first, draw.real, draw.never = columns[2:]
    draw.sizes = sizes
    draw.length = length
    return draw


class _SliceSampler(NativeSampler):
    """What slice samplers share: arguments, the table, and the marks of a window's ends."""

    #: Batches are windows: the buffer asks for :meth:`finish` and :meth:`redraw`, and ``info["index"]`` is a tuple.
    draws_windows = True

    def __init__(
        self,
        *,
        num_slices: int | None,
        slice_len: int | None,
        end_key: Any,
        end_keys: Any,
        traj_key: Any,
        ends: Any,
        trajectories: Any,
        truncated_key: Any,
        init_key: Any,
        strict_length: bool,
        index: str,
        later: dict[str, Any],
    ) -> None:
        name = type(self).__name__
        refuse(name, later, _LATER)
        if (num_slices is None) == (slice_len is None):
            raise TypeError(
                f"{name}: expected one of num_slices and slice_len, got num_slices={num_slices}, slice_len={slice_len}."
            )
        for argument, value in (("num_slices", num_slices), ("slice_len", slice_len)):
            if value is not None:
                _check_count(f"{name}: {argument}", value, least=1)
        if end_key is not None and end_keys is not None:
            raise RuntimeError(f"{name}: expected one of end_key and end_keys, got both. Put all into end_keys.")
        kinds = {
            "ends": ends,
            "trajectories": trajectories,
            "end_key": end_key,
            "end_keys": end_keys,
            "traj_key": traj_key,
        }
        given = {argument for argument, value in kinds.items() if value is not None}
        if given & {"ends", "trajectories"} and len(given) > 1:
            raise RuntimeError(f"{name}: expected one kind of boundaries, got {sorted(given)}. Give one of them.")
        if not isinstance(index, str):
            raise TypeError(f"{name}: index: expected a name, got {type(index).__name__}.")
        if not _NAME.fullmatch(index):
            raise ValueError(f"{name}: index: expected 1 to 64 letters, digits, '_' or '-', got {index!r}.")
        self.num_slices = num_slices
        self.slice_len = slice_len
        self.end_key = _as_key(end_key, f"{name}: end_key")
        self.end_keys = _as_keys(end_keys, f"{name}: end_keys")
        self.traj_key = _as_key(traj_key, f"{name}: traj_key")
        self.truncated_key = _as_key(truncated_key, f"{name}: truncated_key")
        self.init_key = _as_key(init_key, f"{name}: init_key")
        self.strict_length = bool(strict_length)
        self.index = index
        self._ends = _as_static(ends, f"{name}: ends")
        self._trajectories = _as_static(trajectories, f"{name}: trajectories")
        self._pad = False
        self._shape_arguments: dict[str, Any] = {"strict": self.strict_length}
        self._unbind()

    # ---- the store and its table -------------------------------------------------------------------------------------

    def _unbind(self) -> None:
        self._lock = _fork.rlock()
        self._storage: Any = None
        self._memory: Store | None = None
        self._table: Any = None
        self._static_field: Tensor | None = None
        self._static_version = -1
        self._fields: dict[Key, int] = {}
        self._shapes: dict[int, Any] = {}

    def bind(self, storage: Any) -> None:
        """Take a storage to draw from. Its table is made by the first draw.

        The buffer calls this when it takes the sampler and before every draw, as a sampler may serve several buffers.
        """
        if storage is not self._storage:
            with self._lock:
                self._storage = storage
                self._memory = self._table = None

    @property
    def recordable(self) -> bool:
        """Whether :meth:`config` says all: static boundaries are not noted in a store."""
        return self._ends is None and self._trajectories is None

    def _table_of(self, extent: Extent, length: int) -> Any:
        """The table, caught up with the store as far as static boundaries go."""
        memory: Store | None = getattr(self._storage, "memory", None)
        if memory is None or memory is not self._memory:
            with self._lock:
                self._find_table(memory, length)
        if self._static_field is not None:
            self._place_static(extent)
        return self._table

    def _find_table(self, memory: Store | None, length: int) -> None:
        name = type(self).__name__
        if self._storage is None:
            raise RuntimeError(f"{name}: expected a storage: give the sampler to a ReplayBuffer, or bind(storage).")
        if memory is None:
            if not self._storage.initialized:
                raise NoSampleable("sample: the buffer is empty. Add data before sampling.")
            raise RuntimeError(
                f"{name}: expected a tensor storage of TensorDicts, got a {type(self._storage).__name__}. "
                "Use LazyTensorStorage or LazyMemmapStorage."
            )
        self._static_field, self._static_version = None, -1
        static = self._ends if self._ends is not None else self._trajectories
        if static is not None:
            if not field_numbers(memory):
                raise RuntimeError(f"{name}: expected a storage of TensorDicts, got other rows.")
            by_id = self._trajectories is not None
            self._table, self._static_field = static_table(memory, static, by_id=by_id, window=length)
        else:
            boundaries = boundaries_of(memory, self.traj_key, self.end_key, self.end_keys)
            self._table = shared_table(memory, self.index, boundaries, length)
        self._fields = field_numbers(memory)
        self._memory = memory

    def _place_static(self, extent: Extent) -> None:
        """Static boundaries belong to the live rows in row order; a write can only make them too few or too many."""
        values = self._ends if self._ends is not None else self._trajectories
        assert values is not None and self._memory is not None and self._static_field is not None  # noqa: PT018
        name = "ends" if self._ends is not None else "trajectories"
        if len(values) != extent.size:
            raise ValueError(
                f"sample: {name}: expected one value per live row, {extent.size}, got {len(values)}. Give a sampler with "
                "those of the rows that are there now."
            )
        with self._lock:
            version = int(self._memory.core.next_ticket)
            if version == self._static_version:
                return
            rows = extent.rows(torch.arange(extent.size, device="cpu"))
            self._static_field.zero_()
            self._static_field[rows] = values
            self._table.forget()
            scan(self._table, self._memory)
            self._static_version = version

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def _split(self, batch_size: int) -> tuple[int, int]:
        """Windows, and steps of each."""
        if self.num_slices is not None:
            count, rest = self.num_slices, batch_size % self.num_slices
        else:
            assert self.slice_len is not None  # one of the two was given
            count, rest = batch_size // self.slice_len, batch_size % self.slice_len
        if rest or not count:
            which = f"num_slices={self.num_slices}" if self.num_slices is not None else f"slice_len={self.slice_len}"
            raise RuntimeError(f"sample: batch_size: expected a multiple of {which}, got {batch_size}.")
        return count, batch_size // count

    def _shape(self, length: int) -> Any:
        shape = self._shapes.get(length)
        if shape is None:
            if len(self._shapes) > 64:
                self._shapes.clear()
            shape = self._shapes[length] = _native.Shape(length, **self._shape_arguments)
        return shape

    def _choose(self, table: Any, key: int, count: int, length: int) -> Any:
        """The windows, as the native core draws them."""
        raise NotImplementedError

    def draw(self, extent: Extent, batch_size: int, key: int) -> Slices:
        count, length = self._split(batch_size)
        return self._draw(extent, key, count, length)

    def _draw(self, extent: Extent, key: int, count: int, length: int) -> Slices:
        table = self._table_of(extent, length)
        drawn = self._choose(table, key % (1 << 64), count, length)
        padded = length if self._pad else 0
        total = drawn.total(padded)
        if not total:
            self._refuse(table, length)
        columns = _allocate(total)
        drawn.write(padded, *[column.data_ptr() for column in columns])
        return _slices(columns, [max(size, padded) for size in drawn.lengths() if size], length)

    def _refuse(self, table: Any, length: int) -> NoReturn:
        trajectories, longest = table.census()
        if trajectories == 0:
            raise NoSampleable("sample: the buffer is empty. Add data before sampling.")
        if longest >= length:  # a batch of a pass
            raise NoSampleable(
                f"sample: slice_len={length}: expected a trajectory of at least {length} steps in every batch of a pass, got a "
                f"batch of shorter ones ({trajectories} trajectories, of at most {longest} steps). Take more slices per batch, "
                "lower slice_len, or pass strict_length=False."
            )
        raise NoSampleable(
            f"sample: slice_len={length}: expected a trajectory of at least {length} steps, got {trajectories} of at most "
            f"{longest}. Lower slice_len, or pass strict_length=False."
        )

    def redraw(self, draw: Slices, moved: list[int], extent: Extent, key: int) -> Slices:
        """A draw in which other windows stand for those with a row that moved: at these places of the batch."""
        ends = torch.tensor(draw.sizes, device="cpu").cumsum(0)
        hit = sorted(set(torch.searchsorted(ends, torch.tensor(moved, device="cpu"), right=True).tolist()))
        fresh = self._draw(extent, key, len(hit), draw.length)
        parts = [list(column.split_with_sizes(draw.sizes)) for column in draw.columns]
        others = [column.split_with_sizes(fresh.sizes) for column in fresh.columns]
        for number, window in enumerate(hit):
            for part, other in zip(parts, others, strict=True):
                part[window] = other[number] if number < len(other) else part[window][:0]
        sizes = [len(rows) for rows in parts[0] if len(rows)]
        return _slices([torch.cat(part) for part in parts], sizes, draw.length)

    def finish(self, columns: Sequence[Tensor], draw: Slices) -> dict[str | Key, Tensor]:
        """The marks of a batch that was read: what ``info`` holds beside the index.

        Args:
            columns: ``[B, ...]``, one per field of the store.
            draw: what was read.

        Returns:
            Under :attr:`truncated_key` and its siblings ``done`` and ``terminated``, bool ``[B, 1]``; under
            :attr:`init_key`, if it is stored, as it is stored; under ``("collector", "mask")``, with padding, bool ``[B]``.
        """
        info: dict[str | Key, Tensor] = {}
        if self.truncated_key is not None:
            *above, _ = self.truncated_key
            done, terminated = (self._flag(columns, (*above, name)) for name in ("done", "terminated"))
            info[_public(self.truncated_key)] = draw.last
            info[_public((*above, "done"))] = draw.last.clone() if done is None else done | _like(draw.last, done)
            info[_public((*above, "terminated"))] = draw.never if terminated is None else terminated
        if self.init_key is not None and self.init_key in self._fields:
            stored = columns[self._fields[self.init_key]]
            first = _like(draw.first, stored)
            info[_public(self.init_key)] = stored | first if stored.dtype is torch.bool else stored.where(~first, 1)
        if self._pad:
            info[_MASK] = draw.real
        return info

    def _flag(self, columns: Sequence[Tensor], key: Key) -> Tensor | None:
        """A stored flag as bools ``[B, 1]`` (rows with batch dimensions: as stored), None if there is none."""
        number = self._fields.get(key)
        if number is None:
            return None
        flag = columns[number]
        if flag.dtype is not torch.bool:
            flag = flag != 0
        return flag.unsqueeze(-1) if flag.ndim == 1 else flag

    # ---- the rest of a sampler ---------------------------------------------------------------------------------------

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """Whether a long enough trajectory is there; False, too, where boundaries or batch size do not fit."""
        self.bind(storage)
        try:
            _, length = self._split(batch_size)
            table = self._table_of(storage.extent(), length)
        except (RuntimeError, ValueError):
            return False
        return bool(table.anchors(length if self.strict_length else 1) > 0)

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Draw from a storage with a key of torch's default generator: ``((int64 [B],), info)``."""
        self.bind(storage)
        key = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        draw = self.draw(storage.extent(), batch_size, key)
        return (draw.rows,), dict(self.finish(storage.read(draw.rows)[0], draw))

    def config(self) -> dict[str, Any]:
        return {
            "num_slices": self.num_slices,
            "slice_len": self.slice_len,
            "end_key": _plain(self.end_key),
            "end_keys": None if self.end_keys is None else [_plain(key) for key in self.end_keys],
            "traj_key": _plain(self.traj_key),
            "truncated_key": _plain(self.truncated_key),
            "init_key": _plain(self.init_key),
            "strict_length": self.strict_length,
            "index": self.index,
        }

    def __getstate__(self) -> dict[str, Any]:
        local = ("_lock", "_storage", "_memory", "_table", "_static_field", "_static_version", "_fields", "_shapes")
        return {k: v for k, v in self.__dict__.items() if k not in local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._unbind()
        self.__dict__.update(state)


class SliceSampler(_SliceSampler):
    """Windows of one trajectory each, drawn with replacement: first a trajectory, uniformly, then where it starts.

    A batch of ``B`` rows is ``num_slices`` windows of ``slice_len`` steps, one behind the other. Trajectories are found by
    what was written: they go on across the end of a full ring, never across its seam, and each lane (with ``ndim > 1``
    each column) has its own. Finding them costs a write what it wrote, and a sample next to nothing; the first sample
    from a storage that holds data scans it once.

    Samples have ``("next", "truncated")``, true at the last step of every window, ``("next", "done")`` (stored, or
    truncated), ``("next", "terminated")`` (stored, or false), bool ``[B, 1]``, and where it is stored ``"is_init"``, true
    at the first step of every window. TensorDict buffers put them into the batch, all buffers into ``info``, where
    ``"index"`` is a tuple of int64 ``[B]``.

    Args:
        num_slices: windows per batch.
        slice_len: steps per window. Exactly one of the two.
        end_key: bool field that is true at the last step of a trajectory. Default ``("next", "done")``.
        end_keys: several of these: any of them ends a trajectory; those that are not stored are skipped.
        traj_key: field that is constant within a trajectory and changes with the next one. By default, and if neither end key
            is given, ``("collector", "traj_ids")``, else ``"episode"``, if one is stored. A key given that is not stored: the
            other kind is looked for.
        ends, trajectories: end flags or ids of all live rows in row order, ``[N]``, instead of a stored field. They stay
            those of their rows when a full ring is written to. Need ``cache_values=True``.
        cache_values, compile, use_gpu: change nothing: boundaries are always kept and always fresh.
        truncated_key: where the marks go; ``done`` and ``terminated`` stand beside it. None: no such marks.
        init_key: the field of first steps; None: left as it is.
        strict_length: leave out trajectories that are shorter; False: such a trajectory is drawn as a whole.
        pad_output: repeat the last step of short windows up to the length; ``("collector", "mask")`` is false there.
        span: ``(left, right)``, or one for both: how far a window may overhang its trajectory at that end: True: as long as one
            step is left, an int: by so many steps. Only steps that are there are returned, so batches may be short.
        uniform_over: ``"trajectories"``, or ``"anchors"``: every window equally likely, so that long trajectories weigh more.
        index: name of the store's table of trajectories; samplers of the same name and boundaries share it.
        replacement: False makes a :class:`SliceSamplerWithoutReplacement`.

    Raises:
        TypeError: not exactly one of ``num_slices`` and ``slice_len``; a key that is none.
        RuntimeError: several kinds of boundaries; static ones without ``cache_values``.
        ValueError: a number out of range; ``pad_output`` with ``strict_length``; a bad ``uniform_over`` or ``index``.

    Raises (when drawing):
        RuntimeError: a batch size that is not divisible; no such field; rows that are no TensorDicts.
        NoSampleable: no trajectory is long enough; says how many there are, and how long.
        ValueError: ``ends`` or ``trajectories`` of another length than the live rows; ``span`` of a whole window or more.
        IncompatibleStore: ``index`` is the name of a table with other boundaries.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=3), batch_size=6)
    >>> _ = rb.extend(TensorDict({"episode": torch.arange(20) // 5, "step": torch.arange(20) % 5}, batch_size=[20]))
    >>> steps = rb.sample()["step"].reshape(2, 3)
    >>> bool((steps[:, 1:] - steps[:, :-1] == 1).all())
    True
    """

    def __new__(cls, *, replacement: bool = True, **kwargs: Any) -> Any:
        return super().__new__(cls) if replacement else SliceSamplerWithoutReplacement(**kwargs)

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: Any = None,
        trajectories: Any = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: Any = False,  # noqa: A002 - TorchRL's argument: nothing here is compiled
        span: Any = False,
        use_gpu: Any = False,
        uniform_over: str = "trajectories",
        index: str = "main",
        replacement: bool = True,
        **later: Any,
    ) -> None:
        super().__init__(
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            index=index,
            later=later,
        )
        if not self.recordable and not cache_values:
            raise RuntimeError("SliceSampler: ends and trajectories need cache_values=True, as they are kept.")
        if pad_output and strict_length:
            raise ValueError(
                "SliceSampler: pad_output: expected strict_length=False: with it there are no short windows to pad."
            )
        if uniform_over not in ("trajectories", "anchors"):
            raise ValueError(f"SliceSampler: uniform_over: expected 'trajectories' or 'anchors', got {uniform_over!r}.")
        self.pad_output = self._pad = bool(pad_output)
        self.span = _as_span(span)
        self.uniform_over = uniform_over
        self.cache_values = bool(cache_values)
        if slice_len is not None:
            self._shape(slice_len)

    def _shape(self, length: int) -> Any:
        if length not in self._shapes:
            left, right = (length - 1 if end is True else int(end) for end in self.span)
            if max(left, right) >= length:
                raise ValueError(
                    f"SliceSampler: span: expected less than the {length} steps of a window, got {self.span}."
                )
            by_anchor = self.uniform_over == "anchors"
            self._shape_arguments = {
                "strict": self.strict_length,
                "by_anchor": by_anchor,
                "left": left,
                "right": right,
            }
        return super()._shape(length)

    def _choose(self, table: Any, key: int, count: int, length: int) -> Any:
        return table.draw(key, count, self._shape(length))

    def config(self) -> dict[str, Any]:
        more = {"pad_output": self.pad_output, "span": list(self.span), "uniform_over": self.uniform_over}
        return {**super().config(), **more}


class SliceSamplerWithoutReplacement(_SliceSampler):
    """Every trajectory at most once per pass, one random window of it.

    A batch takes the next ``num_slices`` trajectories of the pass. The last batch of a pass is short, unless ``drop_last``,
    and sets ``ran_out``; the next draw starts a new pass, and so does any draw after a write, since trajectories have
    changed then. Trajectories that are too short are skipped, which shortens their batch.

    Args:
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, truncated_key, init_key, strict_length, index:
            as for :class:`SliceSampler`; ``ends`` and ``trajectories`` need nothing else.
        drop_last: skip the trajectories of a pass that do not fill a batch.
        shuffle: random order; else lane by lane, oldest first.
        compile, use_gpu: change nothing.

    Raises: as :class:`SliceSampler`, and when drawing
        ValueError: ``drop_last`` and fewer trajectories than slices.
        NoSampleable: a batch would be empty, as the trajectories it is made of are too short.
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: Any = None,
        trajectories: Any = None,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        compile: Any = False,  # noqa: A002 - TorchRL's argument: nothing here is compiled
        use_gpu: Any = False,
        index: str = "main",
        replacement: bool = False,
        **later: Any,
    ) -> None:
        if replacement:
            raise TypeError("SliceSamplerWithoutReplacement: expected replacement=False. Use SliceSampler().")
        super().__init__(
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            index=index,
            later=later,
        )
        self.drop_last = bool(drop_last)
        self.shuffle = bool(shuffle)
        self.ran_out = False
        self._pass = (0, 0, 0, 0)

    def observe(self, write: Write | None, data: Any) -> None:
        """An emptied buffer: the pass is over."""
        if write is None:
            with self._lock:
                self._pass = (0, 0, 0, 0)

    def _choose(self, table: Any, key: int, count: int, length: int) -> Any:
        with self._lock:
            state, drawn = table.draw_pass(self._pass, key, count, self._shape(length), self.shuffle, self.drop_last)
            _, _, visited, found = state
            if self.drop_last and 0 < found < count:
                raise ValueError(
                    f"sample: drop_last: expected at least {count} trajectories, got {found}. Add data first, or use "
                    "drop_last=False."
                )
            self._pass = state
            self.ran_out = visited == found
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """``key``, ``version`` of the store, ``visited`` and ``count`` of the pass under way, and ``ran_out``: plain values."""
        key, version, visited, count = self._pass
        return {"key": key, "version": version, "visited": visited, "count": count, "ran_out": self.ran_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the pass of a saved state, if the store is as it was then.

        Raises:
            KeyError: a missing or unknown entry. Nothing is changed.
            ValueError: a number out of range. Nothing is changed.
        """
        names = ("key", "version", "visited", "count")
        if set(state_dict) != {*names, "ran_out"}:
            raise KeyError(
                f"SliceSamplerWithoutReplacement: expected a state with {', '.join(names)}, ran_out; "
                f"got {sorted(state_dict)}."
            )
        key, version, visited, count = (int(state_dict[name]) for name in names)
        if not (0 <= visited <= count < 1 << 63 and 0 <= key < 1 << 64 and 0 <= version < 1 << 62):
            raise ValueError(f"SliceSamplerWithoutReplacement: expected 0 <= visited <= count, got {state_dict}.")
        with self._lock:
            self._pass = (key, version, visited, count)
            self.ran_out = bool(state_dict["ran_out"])

    def config(self) -> dict[str, Any]:
        return {**super().config(), "drop_last": self.drop_last, "shuffle": self.shuffle}


# ---- arguments ---------------------------------------------------------------------------------------------------------


def _check_count(what: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what}: expected an int, got {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{what}: expected at least {least}, got {value}.")


def _as_key(key: Any, what: str) -> Key | None:
    if key is None:
        return None
    parts = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, tuple | list) else ()
    if not parts or not all(isinstance(part, str) for part in parts):
        raise TypeError(f"{what}: expected a key, a string or a tuple of strings, got {key!r}.")
    return parts


def _as_keys(keys: Any, what: str) -> tuple[Key, ...] | None:
    if keys is None:
        return None
    if isinstance(keys, str) or not isinstance(keys, tuple | list) or not keys:
        raise TypeError(f"{what}: expected a list of keys, got {keys!r}.")
    return tuple(_as_key(key, what) or () for key in keys)


def _as_static(values: Any, what: str) -> Tensor | None:
    """Boundaries of all live rows, flat and contiguous, apart from the caller's memory."""
    if values is None:
        return None
    values = torch.as_tensor(values, device="cpu")
    if values.ndim < 1:
        raise TypeError(f"{what}: expected one value per row, got a scalar.")
    flat: Tensor = values.reshape(-1).clone()
    return flat


def _as_span(span: Any) -> tuple[bool | int, bool | int]:
    ends = (span, span) if isinstance(span, bool | int) else span
    if not isinstance(ends, tuple | list) or len(ends) != 2 or not all(isinstance(end, bool | int) for end in ends):
        raise TypeError(f"SliceSampler: span: expected a bool or an int, or two of them, got {span!r}.")
    if min(ends) < 0:
        raise ValueError(f"SliceSampler: span: expected at least 0 steps, got {span!r}.")
    return ends[0], ends[1]


def _plain(key: Key | None) -> str | list[str] | None:
    return None if key is None else key[0] if len(key) == 1 else list(key)


def _public(key: Sequence[str]) -> str | Key:
    return key[0] if len(key) == 1 else tuple(key)


def _like(mark: Tensor, stored: Tensor) -> Tensor:
    """Marks ``[B]`` or ``[B, 1]`` in the dimensions of a stored field."""
    return mark if mark.ndim == stored.ndim else mark.reshape(-1, *(1,) * (stored.ndim - 1))
