"""What a buffer is made of, and buffers whose parts are there as soon as they are used."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engram import samplers
from engram._support import fork
from engram.around import Expander, SampleUnit
from engram.buffer.tracing import empty_of, like
from engram.buffer.wiring import Wiring, component, consuming_sampler, first_storage
from engram.device.pinning import pinning_for
from engram.saved.checkpointers import StorageCheckpointerBase, TensorStorageCheckpointer, accepted
from engram.storages import DefaultStorage, LazyTensorStorage, ListStorage
from engram.transforms import Compose
from engram.types import Sampler, Writer
from engram.writers import RemovingWriter, RoundRobinWriter
from engram.writers.removers import FifoRemover

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engram.buffer.compat import Arguments as TorchRL
    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.storages import Storage
    from engram.writers.removers import Remover

#: Held while a buffer is made at its first use: other threads that use it wait.
_MAKING = fork.rlock()


class Arguments(NamedTuple):
    """Of a constructor, as far as components are made of them."""

    call: str
    storage: object
    size: int | None
    sampler: object
    writer: object
    default_writer: Callable[[], object]
    transform: object
    transform_factory: Callable[[], object] | None
    collate_fn: Callable[[object], object] | None
    pin_memory: bool | None
    generator: torch.Generator | None
    batch_size: int | None
    sample_unit: SampleUnit | None
    remover: Remover | None
    draws_of_a_row: int | None
    dim_extend: int | None
    shared: bool
    delayed_init: bool | None
    checkpointer: object = None

    def made_later(self) -> bool:
        """Whether components are to be made at the first use: by default if a factory makes the transform."""
        by_default = callable(self.transform_factory) and self.transform is None
        return by_default if self.delayed_init is None else self.delayed_init

    def wiring(self) -> Wiring:
        """Make the components. Raises as ``ReplayBuffer``."""
        call, sampler, transform, factory = self.call, self.sampler, self.transform, self.transform_factory
        if factory is not None:
            if not callable(factory):
                raise TypeError(
                    f"{call}: transform_factory: expected a callable that makes a transform, got {type(factory).__name__}."
                )
            if transform is not None:
                raise TypeError(f"{call}: expected one of transform and transform_factory, got both.")
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise TypeError(f"{call}: collate_fn: expected a callable, got {type(self.collate_fn).__name__}.")
        unit: object = self.sample_unit
        if not isinstance(unit, SampleUnit | None):
            name = unit.__name__ if isinstance(unit, type) else type(unit).__name__
            advice = f" Write {name}(…)." if isinstance(unit, type) else ""
            if name == "Trajectory":
                advice = " It is what rb.query returns. Pass Sequence(length=…), or sampler=SliceSampler(…)."
            raise TypeError(
                f"{call}: sample_unit: expected a SampleUnit, such as Sequence(length=…), got {name}.{advice}"
            )
        if self.draws_of_a_row is not None:
            sampler = consuming_sampler(sampler, self.draws_of_a_row, call)
        sampler = component(sampler, Sampler, "sampler", samplers.RandomSampler)
        tensors = isinstance(sampler, Expander | samplers.PromptGroupSampler)  # which they need
        # A collate function is handed the items of a list.
        listed = ListStorage if self.collate_fn or self.default_writer is not RoundRobinWriter else DefaultStorage
        storage = first_storage(self.storage, self.size, sampler, call, LazyTensorStorage if tensors else listed)
        if self.dim_extend is not None:
            used = self.dim_extend != storage.dim_extend and (storage.initialized or len(storage.listeners) > 0)
            if self.dim_extend not in range(storage.ndim) or used:
                raise TypeError(
                    f"{call}: dim_extend: expected None or one of the {storage.ndim} dimensions that index rows of the storage, which has "
                    f"dim_extend={storage.dim_extend} already, got {self.dim_extend!r}. Make the storage with ndim={storage.ndim + 1}."
                )
            storage.time_dim = self.dim_extend
        wiring = Wiring(
            storage,
            Compose.of(transform if factory is None else factory()),
            collate_fn=self.collate_fn,
            pinning=pinning_for(self.pin_memory, call),
            generator=self.generator,
        )
        if self.checkpointer:
            storage.checkpointer = component(
                accepted(self.checkpointer), StorageCheckpointerBase, "checkpointer", TensorStorageCheckpointer
            )
        wiring.unit = self.sample_unit
        wiring.connect(sampler, component(self._writer(), Writer, "writer", self.default_writer), self.batch_size)
        return wiring

    def finish(self, buffer: ReplayBuffer, storage: Storage) -> None:
        """What comes last, once the buffer has its parts."""
        storage.attach(buffer)
        cls = type(buffer)
        if "_wiring" in vars(cls):  # it was to be made at the first use, and has that class no more
            object.__setattr__(buffer, "__class__", cls.__base__)
        if self.shared:
            buffer.share()

    def _writer(self) -> object:
        """The writer, or what makes it."""
        if self.remover is None or isinstance(self.remover, FifoRemover):
            return self.writer
        if self.writer is not None:
            raise TypeError(
                f"{self.call}: expected one of writer and remover, got both. Use writer=RemovingWriter(remover)."
            )
        return RemovingWriter(self.remover)


#: Sample unit, remover, draws of a row, ``dim_extend``, ``shared``, ``delayed_init`` and ``checkpointer``.
Taken = tuple[SampleUnit | None, "Remover | None", int | None, int | None, bool, bool | None, object]


def taken_from(torchrl: TorchRL) -> Taken:
    """Take out of TorchRL's keywords of a buffer those that :class:`Arguments` ends with."""
    unit, remover = torchrl.pop("sample_unit", None), torchrl.pop("remover", None)
    draws, dim = torchrl.pop("consume_after_n_samples", None), torchrl.pop("dim_extend", None)
    shared, later = bool(torchrl.pop("shared", False)), torchrl.pop("delayed_init", None)
    return unit, remover, draws, dim, shared, later, torchrl.pop("checkpointer", None)


class Assembled(Protocol):
    """A buffer whose parts may be missing."""

    def assemble(self) -> None:
        """Make them all."""


class _Part:
    """An attribute of a buffer whose parts are not made yet."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, buffer: Assembled | None, _: object) -> object:
        if buffer is None:
            return self
        with _MAKING:
            if self._name not in vars(buffer):
                buffer.assemble()
        return vars(buffer)[self._name]


#: Of a buffer: what :meth:`Assembled.assemble` makes.
_PARTS = ("_wiring", "_recipe", "_lanes", "_prefetching", "_reading", "_writing", "_rows", "_saving")


def make_at_first_use(buffer: Assembled) -> None:
    """Make the parts of a buffer as soon as one is used."""
    cls: object = type(buffer)
    object.__setattr__(buffer, "__class__", _unmade(cls))


@cache
def _unmade(cls: type[object]) -> type[object]:
    """The class of the buffers of a class that have no parts yet; with parts, they are of that class itself.

    Descriptors in that class would slow down every use of a part.
    """
    return like(cls, {name: _Part(name) for name in _PARTS}, lambda: empty_of(cls))
