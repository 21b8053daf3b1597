"""Which lanes rows go to."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from engram import storages
from engram._support import checks, nested, words
from engram._support.field_paths import FieldPath, checked_path, public
from engram._support.state import integer, typed
from engram._support.tensordicts import is_tensor_collection
from engram.buffer.wiring import Wiring
from engram.errors import RowError
from engram.storages import Count

Layout: TypeAlias = Literal["time_first", "lane_first"] | None
Lane: TypeAlias = "int | Sequence[int] | np.typing.NDArray[np.integer] | Tensor | Literal['each'] | None"
#: Batches that are looked at, numbers of each field of a row, and how much smaller a difference must be.
BATCHES, _NUMBERS, _ALIKE = 8, 64, 4


class Lanes:
    """The lane that a buffer named for its writes, and what a write may name."""

    def __init__(self, wiring: Wiring, named: int | None = None) -> None:
        self._wiring = wiring
        #: Whether it was logged that no lane was named.
        self.told = False
        #: Rows of the first batches, as long as they may be steps of several environments; None: nothing is to be said any more.
        self.newest: list[Tensor] | None = []
        #: Where rows go whose write names no lane; None: it must name one of several.
        self.default: int | None
        self.take(named)

    @cached_property
    def _environments(self) -> Environments:
        return Environments(self._wiring)

    @property
    def named(self) -> int | None:
        """The one of several lanes that was named; None: none was."""
        return None if self._wiring.storage.lanes == 1 else self.default

    def take(self, named: int | None) -> None:
        """Name a lane. One that the storage does not have is forgotten."""
        lanes = self._wiring.storage.lanes
        if lanes == 1:
            self.default = 0
        else:
            self.default = named if named is not None and named < lanes else None

    @property
    def saved(self) -> int | list[int]:
        """In a state: a list of the lane that was named, or 0."""
        return 0 if self.named is None else [self.named]

    def checked_saved(self, state: dict[str, Any], where: str) -> int | None:
        """The lane that a state names. Earlier states have an int also of one that named its lane, unless that was 0."""
        saved = typed(state, "_lane", (list, int, type(None)), where)
        if saved in (None, 0):
            return None
        named = saved if isinstance(saved, list) else [saved]
        if len(named) != 1:
            raise ValueError(f"{where}: _lane: expected None or a list of one lane, got {len(named)}.")
        return integer({"_lane": named[0]}, "_lane", 0, self._wiring.storage.lanes, where)

    def of_rows(self, lane: Any, call: str, *, batched: bool) -> tuple[int | Tensor, Count | None]:
        """The lane of rows, or one per row, and how many rows there must be then.

        Raises:
            RowError: no such lane. TypeError, RuntimeError: no lane; one row, and several lanes, of which none was named.
        """
        storage = self._wiring.storage
        if lane is None and not self._wiring.appends:  # the writer names them, or hands these back
            return storage.one_in_each_lane("")[0], None
        if lane is None:
            return cast("tuple[int | Tensor, Count | None]", storage.unnamed_lanes(call, batched=batched))
        if isinstance(lane, str) and lane == "each" and batched:
            return cast("tuple[Tensor, Count]", storage.one_in_each_lane('one for each lane, as lane="each" says'))
        lane = self.checked(lane, call)
        return lane, storages.Count(len(lane)) if isinstance(lane, Tensor) else None

    def checked(self, lane: Any, call: str) -> Any:
        """A lane as an int, or one per row as int64 ``[n]``. Raises as :meth:`of_rows`; messages begin with ``call``."""
        lanes = self._wiring.storage.lanes
        if isinstance(lane, int) and 0 <= lane < lanes:
            return int(lane)
        if isinstance(lane, str) and lane == "each":
            raise RuntimeError(
                f'{call}: lane="each": expected a batch of {lanes} rows for extend(), one for each lane, got one row or one lane.'
            )
        if isinstance(lane, list | tuple | range) or (not isinstance(lane, int) and getattr(lane, "ndim", 0) != 0):
            return self._inside(self._numbers(checks.as_numbers(f"{call}: lane", lane).to("cpu"), call), call)
        try:
            number = operator.index(lane)
        except TypeError:
            raise TypeError(f"{call}: lane: expected an int, one int per row or 'each', got {lane!r}.") from None
        if not 0 <= number < lanes:
            raise RowError(f"{call}: lane: expected an int in [0, {lanes}) or one per row, got {lane!r}.")
        return number

    def meant(self, lane: object, call: str) -> Tensor:
        """The lanes that a call means which writes no rows: int64 ``[k]``. None: the one that was named; else all, as ``"each"``.

        Raises: as :meth:`of_rows`.
        """
        lane = self.default if lane is None else lane
        if lane is None or (isinstance(lane, str) and lane == "each"):
            return torch.arange(self._wiring.storage.lanes, device="cpu")
        checked = self.checked(lane, call)
        return checked if isinstance(checked, Tensor) else torch.tensor([checked], device="cpu")

    # ---- steps of several lanes ------------------------------------------------------------------------------------------

    def arranged(self, data: object, lane: Lane, layout: Layout, key: object) -> tuple[object, Lane]:
        """A batch of steps of several lanes as rows, and the lane of each. Raises: as ``ReplayBuffer.extend``."""
        if key is not None and (lane is not None or layout is not None):
            raise ValueError("extend: lane_key: expected no lane= and no layout= beside it: the field names lanes.")
        if layout is None:
            return self._by_field(data, key)
        checks.check_choice("extend: layout", layout, ("time_first", "lane_first"))
        if self._wiring.storage.ndim > 1:
            raise RuntimeError("extend: layout: expected ndim=1: one with more takes [*columns, T, ...] as it is.")
        lanes = self.meant(lane, "extend")
        shape = data.batch_size[:2] if is_tensor_collection(data) else torch.Size()
        if len(shape) == 2:
            data = _without_time(data, shape)
        elif not self._wiring.storage.initialized:  # later, rows have a shape
            _check_flat(data, len(lanes), layout)
        n = len(data) if isinstance(data, list) else storages.leading_size(data, "extend", least=0)
        steps, rest = divmod(n, len(lanes))
        first = layout == "time_first"
        if rest or (len(shape) == 2 and shape[first] != len(lanes)):
            expected = f"[T, {len(lanes)}]" if first else f"[{len(lanes)}, T]"
            raise RuntimeError(
                f"extend: layout={layout!r}: expected equally many steps of {words.count(len(lanes), 'lane')}, k · {len(lanes)} rows or "
                f"a TensorDict {expected}, got {list(shape) if len(shape) == 2 else n}. Name other lanes with lane=[…]."
            )
        return data, lanes.repeat(steps) if first else lanes.repeat_interleave(steps)

    def _by_field(self, data: object, key: object) -> tuple[object, Tensor | None]:
        """As the values of a field say; without a ``key`` as the environments that collectors number have them."""
        storage, path = self._wiring.storage, ENV_ID if key is None else checked_path(key, "extend: lane_key")
        if key is None and (not is_tensor_collection(data) or (storage.initialized and storage.structure.root.batch)):
            return data, None
        rows = data if isinstance(data, list) else [data]
        named = [nested.find_field(row, path) for row in rows]
        if any(one is None for one in named):
            if key is None:
                return data, None
            raise KeyError(f"extend: lane_key: expected a field of the data, got {key!r}.")
        values = checks.as_numbers("extend: lane_key", named if isinstance(data, list) else named[0]).to("cpu")
        shape = data.batch_size if is_tensor_collection(data) else values.shape[: 1 if isinstance(data, list) else None]
        if key is None and values.numel() != shape.numel():
            return data, None
        if len(shape) not in (1, 2) or values.numel() != shape.numel() or storage.ndim > 1:
            raise RuntimeError(
                f"extend: lane_key: expected a lane for each row, [n] or [n, T], got {list(values.shape)} of {list(shape)} rows."
            )
        call = f"extend: {public(path)!r} names the lanes"
        lanes = self._numbers(values.reshape(-1), call)
        try:
            lanes = self._environments.lanes_of(lanes, call) if key is None else self._inside(lanes, call)
        except RowError as error:
            raise RowError(f"{error} Name them with lane=…") from None
        return data if len(shape) == 1 else nested.map_leaves(data, lambda x: _without_time(x, shape)), lanes

    def _numbers(self, lanes: Tensor, call: str) -> Tensor:
        """Ints of any dtype as int64 ``[n]``."""
        if lanes.ndim != 1:
            raise RuntimeError(
                f"{call}: lane: expected an int, or one per row in one dimension, got shape {list(lanes.shape)}. Flatten them."
            )
        if lanes.dtype.is_floating_point or lanes.dtype.is_complex or lanes.dtype is torch.bool:
            raise TypeError(f"{call}: lane: expected ints, one per row, got {lanes.dtype}. Convert them to ints.")
        return lanes.to(torch.int64)  # first: torch compares no uint16; and what no int64 holds is negative now

    def _inside(self, lanes: Tensor, call: str) -> Tensor:
        outside = lanes[(lanes < 0) | (lanes >= self._wiring.storage.lanes)]
        if len(outside):
            raise RowError(f"{call}: lane: expected lanes in [0, {self._wiring.storage.lanes}), got {outside[0]}.")
        return lanes

    def watch(self, newest: list[Tensor]) -> None:
        """Log once if the first batches of a store with one lane look like steps of several environments.

        They do if each row goes on in the same one of the next batch, or resembles it, more than the next row of its own batch.
        """
        self.newest, wiring, n = None, self._wiring, len(newest[0])
        storage = wiring.storage
        if not (storage.lanes == storage.ndim == 1 and storage.traits.has_fields and wiring.appends) or n < 2:
            return
        # A look at rows on an accelerator would wait for it.
        if storage.traits.is_remote or any(len(rows) != n or not rows.is_cpu for rows in newest):
            return
        schema = storage.memory.schema
        paths = {number: field.key for number, field in enumerate(schema.fields) if field.ragged is None}
        columns = storage.memory.read(torch.cat(newest), which=tuple(paths))[0]
        if _look_like_environments(dict(zip(paths.values(), columns, strict=False)), n):
            reads = wiring.of_sampler.draws_windows or wiring.unit_reader or "inside" in dir(wiring.source)
            line = (
                f"extend: {n} rows each time look like steps of {n} environments, which one lane has one after the other: windows and "
                f"returns mix them. Make the storage with lanes={n}."
            )
            storages.announcing.announce(line, level=logging.WARNING if reads else logging.INFO)

    def say_unnamed(self) -> None:
        """Log once that no lane was named."""
        if not self.told:
            self.told = True
            lanes = self._wiring.storage.lanes
            storages.announcing.announce(
                f'extend: no lane was named: of {lanes} rows each goes to a lane of its own, as lane="each" says.'
            )


def _look_like_environments(columns: Mapping[FieldPath, Tensor], n: int) -> bool:
    """Whether rows of several batches of ``n`` go on in the next batch, and not in the next row.

    Stored next observations say it, by which values come again. Without them rows change less from batch to batch than within one, in a
    field, and in none the other way.
    """
    for path, column in columns.items():
        after = columns.get(("next", *path))
        if after is not None and after.shape == column.shape:
            next_ones, ones = (values.reshape(len(values) // n, n, -1) for values in (after, column))
            pairs = (next_ones[:, :-1] != ones[:, 1:]), (next_ones[:-1] != ones[1:])
            within, across = (float(others.any(-1).double().mean()) for others in pairs)
            if max(within, across) > max(0.5, _ALIKE * min(within, across)):
                return across < within
    found = False
    for column in columns.values():
        if not (column.dtype.is_complex or column.dtype is torch.bool):
            values = column.reshape(len(column) // n, n, -1)[..., :_NUMBERS].double()
            within, across = (float(values.diff(dim=dim).abs().mean()) for dim in (1, 0))
            if 0 < within < across / _ALIKE:
                return False
            found |= across < within / _ALIKE
    return found


def _check_flat(data: object, lanes: int, layout: Layout) -> None:
    """Refuse leaves that all begin with steps and lanes, in this order or the other: as rows they would be others, silently."""
    shapes: list[tuple[int, ...]] = []
    nested.map_leaves(data, lambda x: shapes.append(tuple(getattr(x, "shape", ()))[:2]))
    first = shapes[0] if shapes else ()
    alike = len(shapes) > 1 and set(shapes) == {first}
    if lanes > 1 and alike and len(first) == 2 and first[layout == "time_first"] == lanes:
        raise RuntimeError(
            f"extend: layout={layout!r}: expected rows, k · {lanes} of them, got {list(first)} in every leaf, which are steps and lanes. "
            "Flatten them, x.reshape(-1, *x.shape[2:]), or, if they are rows, name the lane of each with lane=[…]."
        )


def _without_time(x: object, shape: torch.Size) -> object:
    """Steps ``[n, T, ...]`` as rows ``[n · T, ...]``. Raises ``RuntimeError``: they are others."""
    x = x if isinstance(x, Tensor) or is_tensor_collection(x) else np.asarray(x)
    if x.shape[:2] != shape:
        raise RuntimeError(
            f"extend: lane_key: expected [{shape[0]}, {shape[1]}, ...] in every leaf, as the lanes are, got {list(x.shape)}. Flatten the "
            "lanes, [n], if rows are [n, ...]."
        )
    return x.reshape(-1, *x.shape[2:]) if isinstance(x, np.ndarray) else x.flatten(0, 1)


#: Where collectors say which environment a step is of.
ENV_ID = ("collector", "env_id")


class Environments:
    """The lanes of the environments that collectors number, as the rows say it: a lane is that of its newest row's environment.

    A handle remembers what it has seen, and looks at the rows again when it meets an environment that it does not know.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._lane_of: dict[int, int] = {}
        #: Whether environment ``k`` has lane ``k``, as far as known; None: the rows were not looked at.
        self._by_number: bool | None = None

    def lanes_of(self, ids: Tensor, call: str) -> Tensor:
        """The lane of each row, int64 ``[N]``, by the number of its environment, int64 ``[N]``.

        An environment keeps its lane. New ones have that of their number, if it is free, or else, in order, the lanes that are free,
        if they are as many.

        Raises ``RowError``: neither is so. Messages begin with ``call``.
        """
        if self._by_number is None:
            self._look()
        if self._by_number and bool(((ids >= 0) & (ids < self._wiring.storage.lanes)).all()):
            return ids
        numbers = ids.tolist()
        if not self._lane_of.keys() >= {*numbers}:
            self._look()
            self._give_lanes([number for number in dict.fromkeys(numbers) if number not in self._lane_of], call)
        return torch.tensor([self._lane_of[number] for number in numbers], device="cpu")

    def _give_lanes(self, new: list[int], call: str) -> None:
        lanes = self._wiring.storage.lanes
        free = sorted({*range(lanes)} - {*self._lane_of.values()})
        if len(new) == len(free):
            of = dict(zip(new if {*new} != {*free} else free, free, strict=True))
        elif {*new} <= {*free}:
            of = dict(zip(new, new, strict=True))
        else:
            other = next(number for number in new if number not in free)
            known = sorted(self._lane_of)
            having = f", of which the environments {known} have {len(known)}" if known else ""
            raise RowError(
                f"{call}: lane: expected lanes in [0, {lanes}){having}, got {other}, and {words.count(len(new), 'new environment')} for "
                f"{words.count(len(free), 'free lane')}. Name them with lane=…"
            )
        self._lane_of.update(of)
        self._by_number = all(number == lane for number, lane in self._lane_of.items())

    def _look(self) -> None:
        """Take over what the newest rows say. Where rows do not hold their environment, or are elsewhere, what this handle remembers
        stays.
        """
        storage, store = self._wiring.storage, self._wiring.storage.memory
        self._by_number = self._by_number or not self._lane_of
        if store is None or storage.traits.is_remote:
            return
        keys = [field.key for field in store.schema.fields]
        if ENV_ID not in keys:
            return
        extent = storage.extent()
        held = [lane for lane, filled in enumerate(extent.filled) if filled]
        length = extent.capacity // storage.lanes
        newest = [lane * length + (extent.seam[lane] - 1) % length for lane in held]
        (ids,), moved = store.read(torch.tensor(newest, dtype=torch.int64, device="cpu"), which=(keys.index(ENV_ID),))
        if ids.numel() != len(held):
            return
        said = {int(n): lane for i, (n, lane) in enumerate(zip(ids.flatten(), held, strict=True)) if i not in moved}
        # Lanes that say the same tell no environments apart.
        self._lane_of = said if len(said) == len(held) - len(moved) else {}
        self._by_number = all(number == lane for number, lane in self._lane_of.items())
