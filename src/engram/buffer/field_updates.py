"""Fields of rows that still hold what was drawn: ``update_if_present``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engram import storages
from engram._support import native
from engram._support.checks import as_numbers
from engram._support.field_paths import FieldPath, checked_path
from engram._support.nested import flatten, has_entries
from engram._support.tensordicts import tensordict_type
from engram.errors import RowError
from engram.types import Write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from tensordict import TensorDict

    from engram.buffer.wiring import Wiring

CALL = "update_if_present"


@dataclass(frozen=True)
class ConditionalUpdateResult:
    """What :meth:`ReplayBuffer.update_if_present` did with each entry. Tensors of the shape of ``generation``.

    >>> import torch
    >>> from engram import LazyTensorStorage, PrioritizedReplayBuffer
    >>> rb = PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend({"obs": torch.zeros(10, 3), "value": torch.zeros(10)})
    >>> batch, info = rb.sample(return_info=True)
    >>> patch = {"value": torch.ones(4)}
    >>> result = rb.update_if_present(index=info["index"], generation=info["index_generation"], patch=patch)
    >>> result.updated.tolist()
    [True, True, True, True]
    >>> len(result), result[:2].updated.shape
    (4, torch.Size([2]))
    """

    #: bool: the row held what was drawn, and has the patch now.
    updated: Tensor
    #: bool: the row held what was drawn, but its version was too new; None without versions.
    version_rejected: Tensor | None
    #: int64: the number of the row's write, which an update leaves as it is; -1 where nothing was updated.
    generation: Tensor

    @property
    def batch_size(self) -> torch.Size:
        """The shape of ``generation``."""
        return self.updated.shape

    def __len__(self) -> int:
        """The first dimension. Raises ``TypeError``: there is none."""
        return len(self.updated)

    def __getitem__(self, index: object) -> ConditionalUpdateResult:
        """The result of some of the entries, as tensors are indexed: views where those would be."""
        rejected = self.version_rejected
        return ConditionalUpdateResult(
            self.updated[index],  # type: ignore[index]
            None if rejected is None else rejected[index],  # type: ignore[index]
            self.generation[index],  # type: ignore[index]
        )

    def to_tensordict(self) -> TensorDict:
        """A TensorDict of copies of the tensors.

        >>> import torch
        >>> from engram import ConditionalUpdateResult
        >>> result = ConditionalUpdateResult(torch.tensor([True]), None, torch.tensor([7]))
        >>> result.to_tensordict()["generation"]
        tensor([7])
        """
        named = {"updated": self.updated, "version_rejected": self.version_rejected, "generation": self.generation}
        present = {name: tensor.clone() for name, tensor in named.items() if tensor is not None}
        return tensordict_type()(present, batch_size=self.batch_size)

    @property
    def updated_count(self) -> int:
        """Entries that were written."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Entries that were rejected by their version."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Entries whose row was written or forgotten since."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


class FieldUpdates:
    """Patches the rows of a buffer. It keeps nothing of its own."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring

    def apply(
        self, index: object, generation: object, patch: object, version_key: object, version: object, *, newer: bool
    ) -> ConditionalUpdateResult:
        """What ``ReplayBuffer.update_if_present`` does, once the buffer may be edited."""
        storage = self._storage()
        result = self._applied_natively(storage, index, generation, patch, version_key, version, newer=newer)
        if result is not None and (version_key is None or not result.stale_count):
            return result
        rows, expected = self._named(index, generation)
        batch = expected.shape
        which, columns, versions = self._checked(storage, patch, version_key, version, batch)
        expected, rejected = expected.reshape(-1), None
        if versions is None:
            write, numbers = storage.patch_fields(rows, which, columns, expected)
            if len(write.rows):
                storage.notify(write, None)
        else:
            columns, which = [*columns, versions[1]], [*which, versions[0]]
            numbers, rejected = self._newer(storage, rows, expected, which, columns, result, newer=newer)
            rejected = self._wiring.on_device(rejected.reshape(batch))
        numbers = numbers.reshape(batch)
        place = self._wiring.on_device
        return ConditionalUpdateResult(
            updated=place(torch.from_numpy(numbers.numpy() >= 0)), version_rejected=rejected, generation=place(numbers)
        )

    def _newer(
        self,
        storage: storages.TensorStorage,
        rows: Tensor,
        expected: Tensor,
        which: Sequence[int],
        columns: Sequence[Tensor],
        done: ConditionalUpdateResult | None,
        *,
        newer: bool,
    ) -> tuple[Tensor, Tensor]:
        """Patch rows where their versions allow it: the last field. Rows that others edit between the look and the patch come again.

        Returns the numbers of the writes, -1 where nothing was updated; and which versions were rejected. ``done``: of some entries.
        """
        numbers, rejected = torch.full_like(expected, -1), torch.zeros(expected.shape, dtype=torch.bool)
        if done is not None and done.version_rejected is not None:
            numbers, rejected = done.generation, done.version_rejected
        at, again = ((numbers < 0) & ~rejected).nonzero().squeeze(1), done is not None
        while len(at):
            tickets = storage.store.tickets_of_writes(rows[at], expected[at])
            if again and not bool((tickets >= 0).any()):
                break
            values, again = [column[at] for column in columns], True
            look = self._newest(storage, rows[at], tickets, which[-1], values[-1], newer=newer)
            wins, live = map(torch.from_numpy, look)
            write, fresh = storage.patch_fields(rows[at], which, values, tickets.where(wins, -1), unedited=True)
            if len(write.rows):
                storage.notify(write, None)
            numbers[at], rejected[at] = fresh, live & ~wins
            at = at[(fresh < 0) & ~(live & ~wins)]
        return numbers, rejected

    def _applied_natively(
        self,
        storage: storages.TensorStorage,
        index: object,
        generation: object,
        patch: object,
        version_key: object,
        version: object,
        *,
        newer: bool,
    ) -> ConditionalUpdateResult | None:
        """The short path, of tensors that lie as the core reads them. None: nothing was written, and Python looks at them."""
        if storage.ndim > 1 or not isinstance(index, Tensor) or not isinstance(generation, Tensor):
            return None
        versions = self._versions(storage, version_key, version, generation.shape)
        field, given = (-1, None) if versions is None else versions
        try:
            made = storage.write_natively(
                lambda core, intake: core.patch_of(intake, index, generation, patch, field, given, newer)
            )
        except IndexError:  # a row outside the storage
            return None
        if made is None:
            return None
        first, kept, numbers, updated, rejected = made
        if kept and storage.listeners:
            storage.notify(Write(index if kept == len(index) else index[updated], first), None)
        return ConditionalUpdateResult(updated, rejected, numbers)

    def check(self, rows: Tensor, patch: object, version_key: object, version: object) -> None:
        """Raise what :meth:`apply` would of these rows, ``[n]``. Nothing is written."""
        storage = self._storage()
        outside = rows[(rows < -1) | (rows >= storage.max_size)]
        if len(outside):
            raise RowError(f"{CALL}: expected rows in [-1, {storage.max_size}), got {int(outside[0])}.")
        self._checked(storage, patch, version_key, version, rows.shape)

    def _checked(
        self, storage: storages.TensorStorage, patch: object, version_key: object, version: object, batch: torch.Size
    ) -> tuple[Sequence[int], list[Tensor], tuple[int, Tensor] | None]:
        """The fields of a patch and their columns, and what :meth:`_versions` returns."""
        entries, dims = dict(_entries(patch)), storage.ndim
        if dims > 1:  # what is laid out as the data of extend comes in the order of its index
            time, of = storage.dim_extend, storage.columns
            laid_out = (*of[:time], batch.numel() // math.prod(of), *of[time:])
            for key, value in entries.items():
                if isinstance(value, Tensor | np.ndarray) and tuple(value.shape[:dims]) == laid_out:
                    entries[key] = torch.as_tensor(value).movedim(time, 0)
        try:
            which, columns = storage.written().columns(entries, batch, call=CALL, loose=True)
        except RuntimeError as error:  # TorchRL's class
            raise ValueError(str(error)) from None
        versions = self._versions(storage, version_key, version, batch)
        if versions is not None and versions[0] in which:
            path = storage.written().fields[versions[0]].key
            raise ValueError(f"{CALL}: expected a patch without the version key, got {path}. Pass it as version.")
        return which, columns, versions

    def _storage(self) -> storages.TensorStorage:
        wiring = self._wiring
        storage = wiring.storage
        if not isinstance(storage, storages.TensorStorage):
            raise RuntimeError(f"{CALL}: expected a tensor storage, a {type(storage).__name__} has no fields.")
        if not (wiring.of_writer.tracks_tickets or wiring.of_sampler.prioritized):
            raise RuntimeError(
                f"{CALL}: expected a writer with track_generations=True, whose batches carry index_generation, got "
                f"{wiring.writer!r}."
            )
        return storage

    def _named(self, index: object, generation: object) -> tuple[Tensor, Tensor]:
        """Rows ``[n]`` and generations ``[*batch]``. Both may be spread over the batch dimensions of rows, as batches have them."""
        expected, own = _whole("generation", generation), len(self._wiring.storage.written().root.batch)
        rows = self._wiring.rows_named(index)
        rows = _whole("index", rows[0] if isinstance(rows, tuple) and len(rows) == 1 else rows)
        if own and expected.ndim > own and rows.shape == expected.shape:
            rows, expected = (x.flatten(x.ndim - own)[..., 0] for x in (rows, expected))
        if rows.numel() != expected.numel():
            raise ValueError(
                f"{CALL}: expected one generation per row, got {list(rows.shape)} rows and {list(expected.shape)} generations."
            )
        return rows.reshape(-1).contiguous(), expected

    def _versions(
        self, storage: storages.TensorStorage, key: object, version: object, batch: torch.Size
    ) -> tuple[int, Tensor] | None:
        """The field that holds versions, and those to compare, as rows of it."""
        if (key is None) != (version is None):
            raise ValueError(f"{CALL}: expected version_key and version together, got one of them.")
        if key is None:
            return None
        if isinstance(key, str) and "." in key:
            raise ValueError(f"{CALL}: version_key: expected a tuple, {tuple(key.split('.'))}, got {key!r}.")
        structure = storage.written()
        number = structure.field_of(checked_path(key, f"{CALL}: version_key"), CALL)
        field = structure.fields[number]
        if any(size != 1 for size in field.shape):
            raise ValueError(
                f"{CALL}: version_key: expected one number per row, field {field.name} has shape {list(field.shape)}."
            )
        given = version if isinstance(version, Tensor) else np.asarray(version)
        shape = (*batch, *field.shape)
        if math.prod(given.shape) == 1:
            given = given.expand(shape) if isinstance(given, Tensor) else np.broadcast_to(given, shape)
        elif math.prod(given.shape) == batch.numel():
            given = given.reshape(shape)
        typed = isinstance(version, Tensor | np.ndarray | np.generic)  # others have no dtype of their own
        try:
            return number, structure.column(number, given if typed else given.tolist(), batch, call=CALL)
        except RuntimeError as error:  # TorchRL's class
            raise ValueError(str(error)) from None

    def _newest(
        self,
        storage: storages.TensorStorage,
        rows: Tensor,
        expected: Tensor,
        field: int,
        incoming: Tensor,
        *,
        newer: bool,
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which entries are to be written, and which rows hold what was drawn: bool ``[n]``.

        Their versions are those under the tickets expected: a row that gets another one until it is written is left alone. Any
        version is newer than NaN.
        """
        live = expected.numpy() >= 0
        columns, moved = storage.store.read(rows.clamp(min=0), expected=expected, which=(field,))
        live[moved] = False
        stored, given = _comparable(columns[0]), _comparable(incoming)
        wins, floating = np.empty_like(live), stored.dtype == np.float64
        held, brought, here, won = stored.ctypes.data, given.ctypes.data, live.ctypes.data, wins.ctypes.data
        native.pick_newest(rows.data_ptr(), len(rows), held, brought, floating, newer, here, won)
        return wins, live


def _whole(what: str, given: object) -> Tensor:
    """Ints of any shape, int64 on the CPU."""
    numbers = as_numbers(f"{CALL}: {what}", given)
    if numbers.dtype.is_floating_point or numbers.dtype.is_complex or numbers.dtype is torch.bool:
        raise TypeError(f"{CALL}: {what}: expected ints, got {numbers.dtype}.")
    return numbers.to("cpu", torch.int64)


def _entries(patch: object) -> Iterator[tuple[FieldPath, object]]:
    """The entries of a patch by their paths. Keys may be tuples, and values be nested."""
    if not has_entries(patch):
        raise TypeError(f"{CALL}: patch: expected a dict or TensorDict, got {type(patch).__name__}.")
    for key, value in patch.items():  # type: ignore[attr-defined]
        path = checked_path(key, f"{CALL}: patch")
        if has_entries(value):
            yield from flatten(value, path)
        else:
            yield path, value


def _comparable(values: Tensor) -> NDArray[np.int64] | NDArray[np.float64]:
    """In the same order, as the core compares them."""
    values = values.detach().to("cpu").reshape(-1)
    if values.is_floating_point():
        return values.double().numpy()
    if values.dtype is torch.uint64:
        return (values.numpy() ^ np.uint64(1 << 63)).view(np.int64)
    return values.to(torch.int64).numpy()
