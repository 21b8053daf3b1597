"""What a buffer is told besides its components."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from engram._support.checks import check_count
from engram._support.words import warn
from engram.buffer.output import checked_form

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engram.buffer.services import Facade
    from engram.buffer.wiring import Wiring
    from engram.storages import Storage


class Unmade(Protocol):
    """What the components of a buffer will be made of."""

    def wiring(self) -> Wiring:
        """Make them."""

    def finish(self, buffer: Facade, storage: Storage) -> None:
        """What comes last, once the buffer has its parts."""


class Settings:
    """Batch size, prefetched batches, and the iteration that :meth:`ReplayBuffer.next` is amid.

    Args:
        kind: the buffer's class.
        batch_size: of draws that name none; None: each must name one.
        prefetch: batches asked for ahead, or None.
        priority_key: entry of TensorDicts with a row's priority.
        output: the form of batches.
        unmade: what the components will be made of, as long as they are not.

    Raises:
        TypeError: no ints. ValueError: ``batch_size`` below 1; ``prefetch`` below 0, or without ``batch_size``; no such ``output``.
    """

    def __init__(
        self,
        kind: str,
        batch_size: object,
        prefetch: object,
        priority_key: str | None = None,
        output: object = "torch",
        unmade: Unmade | None = None,
    ) -> None:
        self.kind = kind
        self.output = checked_form(output, kind)
        self.batch_size = None if batch_size is None else check_count("batch_size", batch_size)
        self.prefetch = checked_depth(prefetch, self.batch_size, kind)
        self.priority_key = priority_key
        self.unmade = unmade
        #: Entries of the data that may be there without being stored.
        self.ignored = () if priority_key is None else ("priority_weight", priority_key)
        self.iterator: Iterator[Any] | None = None
        self._resumes = False
        self._warned = False

    @property
    def iterating(self) -> bool:
        """Whether :meth:`ReplayBuffer.next` is amid an epoch. Setting it replaces the iterator."""
        return self.iterator is not None or self._resumes

    @iterating.setter
    def iterating(self, value: bool) -> None:
        self.iterator, self._resumes = None, value

    def resumes(self) -> bool:
        """Whether the iterator that begins now goes on with an epoch. Said once."""
        resumes, self._resumes = self._resumes, False
        return resumes

    def batch_size_of(self, batch_size: int | None, *, drawing: bool = True) -> int:
        """The batch size of a draw that names this one.

        Raises:
            RuntimeError: none is known. TypeError: no int. ValueError: below 1, or another one than is prefetched.
        """
        if batch_size is None:
            if self.batch_size is None:
                raise RuntimeError(
                    "sample: expected a batch size: pass sample(batch_size) or ReplayBuffer(batch_size=…)."
                )
            return self.batch_size
        batch_size = check_count("batch_size", batch_size)
        if drawing and self.prefetch and batch_size != self.batch_size:
            raise ValueError(
                f"sample: batch_size: expected the prefetched {self.batch_size}, got {batch_size}. Sample from another ReplayBuffer "
                "over the same storage, or without prefetch."
            )
        if drawing and not self._warned and self.batch_size not in (None, batch_size):
            self._warned = True
            warn(f"sample: batch_size={batch_size} is used instead of the buffer's batch_size={self.batch_size}.")
        return batch_size

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "iterator": None, "_resumes": False}


def checked_depth(prefetch: object, batch_size: int | None, call: str) -> int:
    """Batches to ask for ahead. Raises ``TypeError``, ``ValueError``: another value, or no batch size."""
    if prefetch is None or prefetch is False:
        return 0
    depth = check_count(f"{call}: prefetch", prefetch, "batches", least=0, most=1 << 20)
    if depth and batch_size is None:
        raise ValueError(f"{call}: prefetch={prefetch}: expected a batch size, too: pass batch_size=….")
    return depth
