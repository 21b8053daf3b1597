"""TorchRL's names: keywords that engram does not have yet, constants, aliases, and methods that return the buffer."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable


class LaterArguments(TypedDict, total=False):
    """Keywords of TorchRL's buffers that must be off here, None or False, each with what will carry it."""

    sample_unit: Annotated[object, "expanders"]
    dim_extend: Annotated[object, "the storage (until then: storage.ndim - 1)"]
    checkpointer: Annotated[
        object, "a choice of layouts for dumps (until then: dumps and Checkpointer, which have one)"
    ]
    compilable: Annotated[object, "tracing through torch.compile"]
    service_backend: Annotated[object, "remote buffers"]
    service_backend_options: Annotated[object, "remote buffers"]
    transport: Annotated[object, "remote buffers"]
    transport_options: Annotated[object, "remote buffers"]


class TorchRLArguments(LaterArguments, total=False):
    """Keywords of TorchRL's buffers, of the constructor and of ``open``."""

    consume_after_n_samples: int | None
    delayed_init: bool | None


class Arguments(TorchRLArguments, total=False):
    """Keywords of the constructor that have TorchRL's defaults."""

    shared: bool


#: What will carry each of :class:`LaterArguments`.
NOT_YET = {name: known.__metadata__[0] for name, known in get_type_hints(LaterArguments, include_extras=True).items()}


def constant(value: object, doc: str) -> property:
    """A property that is the same for every buffer."""
    return property(lambda _: value, doc=doc)


def alias(name: str, doc: str = "") -> property:
    """A property that is another attribute, of the buffer or of one of its parts."""
    return property(operator.attrgetter(name), doc=doc or f"As :attr:`{name.rpartition('.')[2]}`.")


def returns_itself(doc: str) -> Callable[[Any], Any]:
    """A method that returns the buffer."""

    def method(self: object) -> Any:
        return self

    method.__doc__ = doc
    return method
