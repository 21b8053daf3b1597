"""What a buffer is told: its configuration, the settings that follow from it, and buffers whose parts are made at their first use."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import new_class
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, SupportsIndex, TypeAlias, TypedDict, TypeVar

from engram import samplers
from engram._support import checks, fork, unsupported, words
from engram.around import Expander, SampleUnit
from engram.buffer.output import FORMS, Output
from engram.buffer.wiring import Wiring, component, consuming_sampler, first_storage
from engram.device.pinning import pinning_for
from engram.saved.checkpointers import StorageCheckpointerBase, TensorStorageCheckpointer, accepted
from engram.storages import DefaultStorage, LazyTensorStorage, ListStorage
from engram.transforms import Compose
from engram.types import Sampler, StrPath, Writer
from engram.writers import RemovingWriter, RoundRobinWriter
from engram.writers.removers import FifoRemover, Remover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from engram.buffer.services import Facade
    from engram.remote.fleet.members import Missing
    from engram.remote.protocol import Full
    from engram.storages.own import GivenStorage

    #: A function and its arguments.
    Empty: TypeAlias = tuple[Callable[..., object], tuple[type[object]]]

B = TypeVar("B")

# ---- keywords ----------------------------------------------------------------------------------------------------------


class LaterArguments(TypedDict, total=False):
    """Keywords of TorchRL's buffers that must change nothing here."""

    dim_extend: Annotated[int | None, unsupported.Later("no call but the constructor")]
    service_backend: Annotated[object, unsupported.Later("no call but the constructor", ("direct",))]
    service_backend_options: Annotated[object, unsupported.Later("service_backend='ray'")]
    transport: Annotated[object, unsupported.Later("service_backend='ray'", ("auto", "direct"))]
    transport_options: Annotated[object, unsupported.Later("service_backend='ray'")]


class TorchRLArguments(LaterArguments, total=False):
    """Keywords of TorchRL's buffers, of the constructor and of ``open``."""

    compilable: bool | None
    checkpointer: StorageCheckpointerBase | Callable[[], StorageCheckpointerBase] | None
    sample_unit: SampleUnit | None
    remover: Remover | None
    consume_after_n_samples: int | None
    delayed_init: bool | None


class Arguments(TorchRLArguments, total=False):
    """Keywords of the constructor alone."""

    shared: bool
    shards: int
    placement: str
    name: str | None
    missing: Missing


class _Reading(TypedDict, total=False):
    collate_fn: Callable[..., object] | None
    transform: object
    transform_factory: Callable[[], object] | None
    batch_size: int | None
    prefetch: int | None
    pin_memory: bool | None
    generator: torch.Generator | None


class ReadingArguments(_Reading, total=False):
    """Keywords of the constructor that say how rows are read: also of ``connect``."""

    output: Output | None


class Reaching(TypedDict, total=False):
    """Keywords of ``connect`` that commands have as options."""

    token: StrPath | None
    tls_root: StrPath | Sequence[StrPath] | None
    tls_cert: StrPath | None
    tls_key: StrPath | None


class ConnectArguments(ReadingArguments, Reaching, total=False):
    """Keywords of ``connect``."""

    patience: float
    full: Full | None
    missing: Missing
    stratum: int | None
    compression: Literal["zstd"] | None
    own_lanes: bool


class BufferArguments(_Reading, Arguments, total=False):
    """Keywords of the constructor of :class:`ReplayBuffer`."""

    storage: GivenStorage | None
    sampler: Sampler | Callable[[], Sampler] | None
    writer: Writer | Callable[[], Writer] | None
    output: Output


class OpenArguments(ReadingArguments, TorchRLArguments, total=False):
    """Keywords of the constructor of which ``open`` takes those that are given, and else what the directory notes."""

    sampler: object
    writer: object


#: Names of keywords that ``connect`` takes, and those that ``open`` does.
READING_ARGUMENTS = tuple(ReadingArguments.__annotations__)
OPEN_ARGUMENTS = tuple(name for name in OpenArguments.__annotations__ if name not in LaterArguments.__annotations__)


#: What will carry each of :class:`LaterArguments`.
NOT_YET = unsupported.carriers(LaterArguments)


def returns_itself(doc: str) -> Callable[[B], B]:
    """A method that returns the buffer."""

    def method(self: B) -> B:
        return self

    method.__doc__ = doc
    return method


# ---- the configuration, and what is made of it ---------------------------------------------------------------------------

#: Held while a buffer is made at its first use: other threads that use it wait.
_MAKING = fork.rlock()


@dataclass(frozen=True)
class Configuration:
    """All that the constructor of a buffer was told. Fields have the names of its arguments."""

    #: What messages begin with: the name of the class.
    call: str
    default_writer: Callable[[], object]
    #: Entry of TensorDicts with a row's priority.
    priority_key: str | None
    storage: object
    size: int | None
    sampler: object
    writer: object
    collate_fn: Callable[..., object] | None
    transform: object
    transform_factory: Callable[[], object] | None
    batch_size: int | None
    prefetch: int | None
    pin_memory: bool | None
    generator: torch.Generator | None
    output: str
    sample_unit: SampleUnit | None = None
    remover: Remover | None = None
    consume_after_n_samples: int | None = None
    dim_extend: int | None = None
    shared: bool = False
    delayed_init: bool | None = None
    checkpointer: object = None

    @property
    def is_made_later(self) -> bool:
        """Whether components are to be made at the first use: by default if a factory makes the transform."""
        by_default = callable(self.transform_factory) and self.transform is None
        return by_default if self.delayed_init is None else self.delayed_init

    def wiring(self) -> Wiring:
        """Make the components. Raises as ``ReplayBuffer``."""
        call, sampler, transform, factory = self.call, self.sampler, self.transform, self.transform_factory
        if factory is not None:
            checks.check_callable(f"{call}: transform_factory", factory, "a callable that makes a transform")
            if transform is not None:
                raise TypeError(f"{call}: expected one of transform and transform_factory, got both.")
        if self.collate_fn is not None:
            checks.check_callable(f"{call}: collate_fn", self.collate_fn, "a callable")
        unit: object = self.sample_unit
        if not isinstance(unit, SampleUnit | None):
            name = unit.__name__ if isinstance(unit, type) else type(unit).__name__
            advice = f" Write {name}(…)." if isinstance(unit, type) else ""
            if name == "Trajectory":
                advice = " It is what rb.query returns. Pass Sequence(length=…), or sampler=SliceSampler(…)."
            raise TypeError(
                f"{call}: sample_unit: expected a SampleUnit such as Sequence(length=4), got {name}.{advice}"
            )
        if self.consume_after_n_samples is not None:
            sampler = consuming_sampler(sampler, self.consume_after_n_samples, call)
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
        composed = Compose.of(transform if factory is None else factory())
        pinning = pinning_for(self.pin_memory, call) if self.pin_memory else None
        wiring = Wiring(storage, composed, collate_fn=self.collate_fn, pinning=pinning, generator=self.generator)
        if self.checkpointer:
            storage.checkpointer = component(
                accepted(self.checkpointer), StorageCheckpointerBase, "checkpointer", TensorStorageCheckpointer
            )
        wiring.unit = self.sample_unit
        writer = self.writer if self.remover is None else self._writer_with(self.remover)
        wiring.connect(sampler, component(writer, Writer, "writer", self.default_writer), self.batch_size)
        return wiring

    def _writer_with(self, remover: Remover) -> object:
        """The writer, or what makes it."""
        if isinstance(remover, FifoRemover):
            return self.writer
        if self.writer is not None:
            raise TypeError(f"{self.call}: expected writer or remover, got both. Use writer=RemovingWriter(remover).")
        return RemovingWriter(remover)


#: Keywords of the constructor that the components of a buffer are made with, beside those that it names.
OF_COMPONENTS = tuple(it.name for it in fields(Configuration) if it.default is not MISSING)


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
        unmade: Configuration | None = None,
    ) -> None:
        checks.check_choice(f"{kind}: output", output, FORMS)
        self.kind = kind
        self.output = str(output)
        self.batch_size = None if batch_size is None else checks.check_count("batch_size", batch_size)
        self.prefetch = 0 if prefetch is None or prefetch is False else _checked_depth(prefetch, self.batch_size, kind)
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
                raise RuntimeError("sample: expected a batch size: sample(batch_size) or ReplayBuffer(batch_size=…).")
            return self.batch_size
        batch_size = checks.check_count("batch_size", batch_size)
        if drawing and self.prefetch and batch_size != self.batch_size:
            raise ValueError(
                f"sample: batch_size: expected the prefetched {self.batch_size}, got {batch_size}. Sample from another ReplayBuffer "
                "over the same storage, or without prefetch."
            )
        if drawing and not self._warned and self.batch_size not in (None, batch_size):
            self._warned = True
            words.warn(f"sample: batch_size={batch_size} is used instead of the buffer's batch_size={self.batch_size}.")
        return batch_size

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "iterator": None, "_resumes": False}


def _checked_depth(prefetch: object, batch_size: int | None, call: str) -> int:
    """Batches to ask for ahead. Raises ``TypeError``, ``ValueError``: another value, or no batch size."""
    depth = checks.check_count(f"{call}: prefetch", prefetch, "batches", least=0, most=1 << 20)
    if depth and batch_size is None:
        raise ValueError(f"{call}: prefetch={prefetch}: expected a batch size, too: pass batch_size=….")
    return depth


# ---- buffers whose parts are made at their first use ---------------------------------------------------------------------


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


#: Of a buffer: what :meth:`Assembled.assemble` makes of its components.
AROUND_COMPONENTS = ("_recipe", "_lanes", "_prefetching", "_reading", "_writing", "_rows", "_saving")


def make_at_first_use(buffer: Assembled) -> None:
    """Make the parts of a buffer as soon as one is used."""
    cls: object = type(buffer)
    object.__setattr__(buffer, "__class__", _unmade(cls))


@cache
def _unmade(cls: type[object]) -> type[object]:
    """The class of the buffers of a class that have no parts yet; with parts, they are of that class itself.

    Descriptors in that class would slow down every use of a part.
    """
    return like(cls, {name: _Part(name) for name in ("_wiring", *AROUND_COMPONENTS)}, lambda: empty_of(cls))


# ---- buffers that torch.compile does not look into -----------------------------------------------------------------------

#: What a compiled function calls of a buffer.
_CALLS = ("add", "extend", "sample", "update_if_present", "update_priority", "update_tensordict_priority")

#: Of each class that :func:`_untraced` made: the class of which it is.
_TRACED: dict[type[object], type[object]] = {}


def leave_untraced(buffer: object) -> None:
    """Make each call of a buffer in a compiled function one graph break, after which it runs as it is. Repeatable."""
    cls: object = type(buffer)
    if cls not in _TRACED:
        object.__setattr__(buffer, "__class__", _untraced(cls))


@cache
def _untraced(cls: type[object]) -> type[object]:
    """The class of the buffers of a class which torch does not trace. Other buffers keep the ordinary class."""
    import torch.compiler

    disable: Callable[[object], object] = torch.compiler.disable
    calls: dict[str, object] = {name: disable(getattr(cls, name)) for name in _CALLS if name in dir(cls)}
    made = like(cls, calls, lambda: (_new_untraced, (cls,)))
    _TRACED[made] = cls
    return made


def like(cls: type[object], attributes: Mapping[str, object], empty: Callable[[], Empty]) -> type[object]:
    """A class of a buffer's class, with other attributes, that looks like it. ``empty``: as :func:`empty_of`, for pickles."""

    def reduced(buffer: Facade, _: SupportsIndex) -> object:
        of_service: object = buffer._service.reduced(buffer)  # noqa: SLF001 - of the facade
        return of_service or (*empty(), buffer.__getstate__())

    own = {
        "__slots__": (),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduced,
        **attributes,
    }
    return new_class(cls.__name__, (cls,), exec_body=lambda names: names.update(own))


def empty_of(cls: type[object]) -> Empty:
    """What makes an object of a buffer's class that has no attributes yet, for pickles: a function, and its arguments."""
    return (_new_untraced, (_TRACED[cls],)) if cls in _TRACED else (object.__new__, (cls,))


def _new_untraced(cls: object) -> object:
    return object.__new__(_untraced(cls))
