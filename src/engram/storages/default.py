"""The default storage of a buffer, which its first rows turn into tensors or a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from engram.storages.announcing import announce, temporary
from engram.storages.list import ListStorage
from engram.storages.own import LazyTensorStorage

if TYPE_CHECKING:
    from engram.saved.part_reader import PartReader
    from engram.types import Form, StorageLoad


def _of_tensors(name: str) -> Any:
    """A method that makes the storage one of tensors, and calls that one's."""

    def call(self: DefaultStorage, *args: object, **kwargs: object) -> object:
        return getattr(self.become_tensors(), name)(*args, **kwargs)

    return call


class DefaultStorage(ListStorage):
    """A list without rows. It becomes a :class:`LazyTensorStorage` when the first ones are dicts that such a storage takes, and when it
    is shared, limited or loaded with rows of tensors; else a :class:`ListStorage`.

    Dicts may hold tensors, arrays, numbers, and dicts of them; several come as a list of dicts or as a dict of columns. The buffer
    goes on with the same object.

    >>> import torch
    >>> from engram import ReplayBuffer
    >>> rb = ReplayBuffer(100, batch_size=4)
    >>> rb.storage
    ListStorage(size=0/100, a LazyTensorStorage if the first rows are dicts)
    >>> _ = rb.extend([{"obs": torch.zeros(3), "reward": 0.5}] * 2)
    >>> rb.storage
    LazyTensorStorage(size=2/100, 2 fields, cpu)
    """

    #: In a text about the buffer.
    described = "ListStorage, or LazyTensorStorage for rows that are dicts"

    def prepare(self, data: object, call: str, *, batched: bool, **options: Any) -> tuple[Any, int]:
        with self._lock:
            if isinstance(self, DefaultStorage):  # else another thread was faster
                if len(self) or not self._are_of_tensors(data, call, batched=batched):
                    prepared = ListStorage.prepare(self, data, call, batched=batched, **options)
                    self.__class__ = ListStorage  # type: ignore[assignment]
                    return prepared
                self.become_tensors()
        return self.prepare(data, call, batched=batched, **options)

    def _are_of_tensors(self, data: object, call: str, *, batched: bool) -> bool:
        """Whether rows are dicts that a tensor storage takes. Raises what that does of a dict of columns, which no list takes."""
        rows = data if batched and isinstance(data, list) else [data]
        if not rows or not all(isinstance(row, dict) for row in rows):
            return False
        try:
            with temporary():
                LazyTensorStorage(1).prepare(data, call, batched=batched)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            if batched and rows is not data:
                raise
            announce(
                f"{call}: rows are kept in a list, which is several times slower than a LazyTensorStorage: {error}"
            )
            return False
        return True

    def become_tensors(self) -> LazyTensorStorage:
        with self._lock:
            made = cast("LazyTensorStorage", self)
            if isinstance(self, DefaultStorage):
                # First what the other class needs: threads may be amid a method of this one.
                twin = LazyTensorStorage(self.max_size, device=self._device or "cpu")
                vars(self).update({**vars(twin), "_lock": self._lock, "listeners": self.listeners})
                made.__class__ = LazyTensorStorage
                made.remedy = " Rows of several kinds are for storage=ListStorage(…)."
                made._tell_moved()
        return made

    @property
    def form(self) -> Form:
        return super().form._replace(takes_rows=True)

    share, limit, prepare_rows, schema_here = map(_of_tensors, ("share", "limit", "prepare_rows", "schema_here"))

    def prepare_load(self, state_dict: dict[str, object]) -> StorageLoad:
        if isinstance(state_dict, dict) and state_dict.get("schema"):  # type: ignore[redundant-expr] # a user's
            return self.become_tensors().prepare_load(state_dict)
        return super().prepare_load(state_dict)

    def prepare_part(self, reader: PartReader, **options: Any) -> StorageLoad:
        if reader.type in LazyTensorStorage._loads:
            return self.become_tensors().prepare_part(reader, **options)
        return super().prepare_part(reader, **options)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, a LazyTensorStorage if the first rows are dicts)"


DefaultStorage.__name__ = ListStorage.__name__  # which states of it say, and messages
