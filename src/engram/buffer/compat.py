"""TorchRL's names: keywords that engram does not have yet, aliases, and methods that return the buffer."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar

from engram._support.unsupported import Later, carriers

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    import torch

    from engram.around import SampleUnit
    from engram.buffer.output import Output
    from engram.remote.fleet.members import Missing
    from engram.remote.streaming import Full
    from engram.saved.checkpointers import StorageCheckpointerBase
    from engram.storages.own import GivenStorage
    from engram.types import Sampler, Writer
    from engram.writers.removers import Remover


B = TypeVar("B")


class LaterArguments(TypedDict, total=False):
    """Keywords of TorchRL's buffers that must change nothing here."""

    dim_extend: Annotated[int | None, Later("no call but the constructor")]
    service_backend: Annotated[object, Later("no call but the constructor", ("direct",))]
    service_backend_options: Annotated[object, Later("service_backend='ray'")]
    transport: Annotated[object, Later("service_backend='ray'", ("auto", "direct"))]
    transport_options: Annotated[object, Later("service_backend='ray'")]


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
    collate_fn: Callable[[Any], object] | None
    transform: object
    transform_factory: Callable[[], object] | None
    batch_size: int | None
    prefetch: int | None
    pin_memory: bool | None
    generator: torch.Generator | None


class ReadingArguments(_Reading, total=False):
    """Keywords of the constructor that say how rows are read: also of ``connect``."""

    output: Output | None


class ConnectArguments(ReadingArguments, total=False):
    """Keywords of ``connect``."""

    token: str | os.PathLike[str] | None
    tls_root: str | os.PathLike[str] | None
    patience: float
    full: Full | None
    missing: Missing
    stratum: int | None


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
NOT_YET = carriers(LaterArguments)


def alias(name: str, doc: str = "", set_by: str | None = None) -> Any:
    """A property that is another attribute, of the buffer or of one of its parts; ``set_by`` names the method that sets it."""

    def set_through(self: object, value: object) -> None:
        operator.methodcaller(str(set_by), value)(self)

    shown = doc or f"As :attr:`{name.rpartition('.')[2]}`."
    return property(operator.attrgetter(name), set_through if set_by else None, doc=shown)


def returns_itself(doc: str) -> Callable[[B], B]:
    """A method that returns the buffer."""

    def method(self: B) -> B:
        return self

    method.__doc__ = doc
    return method
