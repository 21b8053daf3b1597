"""Tables of trajectories whose steps are interleaved: which row holds which step of which trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engram import _fork, _native
from engram.field_paths import public
from engram.format.schema import DTYPES
from engram.samplers.trajectory_tables import ID_KEYS, Boundaries, numbers_by_path, what_ends
from engram.store.memory import placed, row_stride

if TYPE_CHECKING:
    from torch import Tensor

    from engram.field_paths import FieldPath
    from engram.format.schema import Field
    from engram.samplers.trajectory_tables import TrajectoryKeys
    from engram.samplers.window_settings import WindowSettings
    from engram.store import Store


class _Fields(NamedTuple):
    """Numbers of the fields in the store."""

    trajectory: int
    step: int
    boundaries: Boundaries


def fragments_table(
    memory: Store, settings: WindowSettings, rules: TrajectoryKeys, window: int
) -> tuple[_native.Fragments, FieldPath]:
    """The store's table of interleaved trajectories under the settings' name, and the field that tells trajectories apart.

    Where there is none, one is made by a scan of the rows.

    Raises:
        RuntimeError: a field is not stored, or rows are in columns.
        TypeError: a field is not one integer per row.
        IncompatibleStore: the name stands for other fields.
    """
    if memory.schema.columns:
        raise RuntimeError(
            f"sample: fragmented: expected a storage with ndim=1, got one with columns {list(memory.schema.columns)}."
        )
    numbers = numbers_by_path(memory)
    ids = ID_KEYS if settings.traj_key is None else (settings.traj_key,)
    id_key = next((key for key in ids if key in numbers), None)
    step_key = settings.step_key
    if id_key is None or step_key not in numbers:
        missing = (
            f"traj_key {[public(key) for key in ids]}" if id_key is None else f"step_key {public(step_key or ())!r}"
        )
        got = [public(field.key) for field in memory.schema.fields] if numbers else "rows of one tensor each"
        raise RuntimeError(f"sample: fragmented: expected rows with the {missing}, got {got}. Name a stored field.")
    fields, known = memory.schema.fields, memory.indexes.made_with.get(settings.index)
    boundaries = rules.boundaries(fields, numbers, "sample", known)._replace(ids=())
    which = _Fields(numbers[id_key], numbers[step_key], boundaries)
    for number, argument in ((which.trajectory, "traj_key"), (which.step, "step_key")):
        _check_integer(fields[number], argument)

    def make() -> _native.Fragments:
        counted = memory.indexes.windows.setdefault(settings.index, window)
        memory.indexes.made_with[settings.index] = len(fields)
        _, (trajectory, step, *ends) = memory.on_host((which.trajectory, which.step, *boundaries.ends))
        owner = (*memory.control_memory, trajectory, step, *ends)
        described = (*_described(memory, which.trajectory, trajectory), *_described(memory, which.step, step))
        table: _native.Fragments = _fork.registered(
            _native.Fragments(memory.core, *described, *placed(ends), *what_ends(fields, boundaries), counted, owner)
        )
        memory.core.attach(table)
        table.catch_up()
        return table

    found: _native.Fragments = memory.indexes.table(settings.index, "fragments", which, make)
    return found, id_key


def _described(memory: Store, number: int, field: Tensor) -> tuple[int, int, int, bool]:
    """Address of a field, bytes of an integer, bytes from row to row, and whether it is signed."""
    signed = memory.schema.fields[number].dtype.startswith("int")
    return field.data_ptr(), field[:1].nbytes, row_stride(field), signed


def _check_integer(field: Field, argument: str) -> None:
    if "int" not in field.dtype or field.row_bytes != DTYPES[field.dtype]:
        raise TypeError(
            f"sample: fragmented: {argument}={field.name!r}: expected one integer per row, got {field.dtype} {list(field.shape)}."
        )
