"""Where a store's trajectories end, and the native table that knows it.

The table belongs to the store, under a name: every sampler of the same name and boundaries draws from the same one, and
every write keeps it, whoever writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engram import _fork, _native, _progress
from engram.format.schema import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.format.schema import Field
    from engram.store import Store

__all__ = [
    "ID_KEYS",
    "NAMED",
    "Boundaries",
    "Key",
    "as_key",
    "as_keys",
    "boundaries_of",
    "field_numbers",
    "make_table",
    "shared_table",
    "static_table",
    "step_type_bytes",
    "step_type_of",
]

Key = tuple[str, ...]

#: What step types are called.
STEP_TYPE = "step_type"
#: Kinds of rows whose entries have names.
NAMED = ("tensordict", "tensorclass", "dict", "namedtuple")

#: Looked for in this order where no key is given.
ID_KEYS: tuple[Key, ...] = (("collector", "traj_ids"), ("episode",))
_END_KEY: Key = ("next", "done")


def as_key(key: Any, what: str) -> Key | None:
    """A key as a tuple; None stays. Raises ``TypeError``: it is none."""
    if key is None:
        return None
    parts = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, tuple | list) else ()
    if not parts or not all(isinstance(part, str) for part in parts):
        raise TypeError(f"{what}: expected a key, a string or a tuple of strings, got {key!r}.")
    return parts


def as_keys(keys: Any, what: str) -> tuple[Key, ...] | None:
    """A list of keys as a tuple of them; None stays. Raises ``TypeError``: it is none."""
    if keys is None:
        return None
    if isinstance(keys, str) or not isinstance(keys, tuple | list) or not keys:
        raise TypeError(f"{what}: expected a list of keys, got {keys!r}.")
    return tuple(as_key(key, what) or () for key in keys)


class Boundaries(NamedTuple):
    """What ends a trajectory."""

    by_id: bool
    """Another content of a field in the next step; else a byte other than zero in one of the fields, or a step type."""
    which: tuple[int, ...]
    """Numbers of the fields in the store; one if ``by_id``."""


def field_numbers(memory: Store) -> dict[Key, int]:
    """The fields of rows that are TensorDicts or tensorclasses, by key; of others none."""
    if memory.schema.structure.kind not in ("tensordict", "tensorclass"):
        return {}
    return {field.key: number for number, field in enumerate(memory.schema.fields)}


def step_type_bytes(field: Field) -> int:
    """Of a field that holds step types, the bytes of one; of others 0.

    Step types are integers called ``step_type``, at any depth: 0 is the first step of a trajectory, 2 the last one, as in dm_env. A
    first step begins a trajectory also where the last step of the one before it was lost.
    """
    integers = "int" in field.dtype
    return DTYPES[field.dtype] if field.key[-1] == STEP_TYPE and integers else 0


def step_type_of(fields: Sequence[Field]) -> int | None:
    """Which field holds the step types of the rows: the one that is nested least, and no step's behind the row's; None: none."""
    found = [
        (len(field.key), number)
        for number, field in enumerate(fields)
        if step_type_bytes(field) and "next" not in field.key[:-1]
    ]
    return min(found, default=(0, None))[1]


def boundaries_of(
    memory: Store, traj_key: Key | None, end_key: Key | None, end_keys: Sequence[Key] | None
) -> Boundaries:
    """The boundaries that some keys mean in a store.

    What was asked for by name comes first: ``traj_key``, else ``end_key`` or ``end_keys``; then ids; then ends; then step types.

    Raises:
        RuntimeError: the store has none of the fields.
    """
    fields = field_numbers(memory)
    ids = ID_KEYS if traj_key is None else (traj_key,)
    ends = tuple(end_keys) if end_keys is not None else (end_key or _END_KEY,)
    by_id = [Boundaries(True, (fields[key],)) for key in ids if key in fields][:1]
    stored = tuple(fields[key] for key in ends if key in fields)
    by_end = [Boundaries(False, stored)] if stored else []
    ends_first = traj_key is None and (end_key is not None or end_keys is not None)
    step_type = step_type_of(memory.schema.fields) if memory.schema.structure.kind in NAMED else None
    by_type = [] if step_type is None else [Boundaries(False, (step_type,))]
    found = (by_end + by_id if ends_first else by_id + by_end) + by_type
    if not found:
        stored_keys = [field.name for field in memory.schema.fields] if fields else "rows that are no TensorDicts"
        raise RuntimeError(
            f"sample: expected TensorDicts with one of the trajectory ids {list(ids)}, of the end flags {list(ends)} or with a "
            f"{STEP_TYPE!r} of integers, got {stored_keys}. Name a stored field with traj_key or end_key."
        )
    return found[0]


def shared_table(memory: Store, name: str, boundaries: Boundaries, window: int) -> Any:
    """The store's table of that name, made by a scan of the rows where there is none.

    Raises:
        IncompatibleStore: the name stands for other boundaries.
    """

    def make() -> Any:
        which, fields = memory.on_host(boundaries.which)
        counted = memory.windows.setdefault(name, window)
        types = [
            0 if boundaries.by_id else step_type_bytes(memory.schema.fields[number]) for number in boundaries.which
        ]
        table = make_table(memory, boundaries.by_id, which, fields, counted, types)
        memory.core.attach(table)
        scan(table, memory)
        return table

    return memory.index(name, "trajectories", boundaries, make)


def make_table(
    memory: Store,
    by_id: bool,
    which: Sequence[int],
    fields: Sequence[Tensor],
    window: int,
    step_types: Sequence[int] = (),
) -> Any:
    """A table of its own over ``fields``, ``[C, ...]`` each and on the CPU, of which nothing is known yet.

    ``which``: their numbers in the core; none of fields that no write moves. ``step_types``: as :func:`step_type_bytes`; none: all
    of them are flags or an id.
    """
    control, tickets = memory.words
    width = 1
    for size in memory.schema.columns:
        width *= size
    nbytes = _native.Trajectories.bytes(memory.lanes, memory.lane_length, width)
    block = memory.room(nbytes)
    table = _native.Trajectories(
        control.data_ptr(),
        control.numel(),
        tickets.data_ptr(),
        tickets.numel(),
        by_id,
        list(which),
        list(step_types),
        [field.data_ptr() for field in fields],
        [field[:1].numel() * field.element_size() for field in fields],
        width,
        window,
        block.data_ptr(),
        nbytes,
        (control, tickets, block, *fields),
    )
    return _fork.mended(table)


def static_table(memory: Store, values: Tensor, *, by_id: bool, window: int) -> tuple[Any, Tensor]:
    """A private table over ids or end flags that are no field of the store, and their memory, ``[C, ...]`` by row."""
    field = torch.zeros((memory.capacity, *values.shape[1:]), dtype=values.dtype, device="cpu")
    return make_table(memory, by_id, (), [field], window), field


def scan(table: Any, memory: Store) -> None:
    """Let a table look at all rows."""
    steps = max(1, _progress.CHUNK // memory.lanes)
    _progress.watch(iter(lambda: table.catch_up(steps), 0), "looking for trajectories")
