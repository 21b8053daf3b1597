"""Buffers that ``torch.compile`` does not look into."""

from __future__ import annotations

from functools import cache
from types import new_class
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engram.buffer.services import Facade

    #: A function and its arguments.
    Empty: TypeAlias = tuple[Callable[..., object], tuple[type[object]]]

#: What a compiled function calls of a buffer.
_CALLS = ("add", "extend", "sample", "update_if_present", "update_priority", "update_tensordict_priority")

#: Of each class that :func:`_untraced` made: the class of which it is.
_TRACED: dict[type[object], type[object]] = {}


def leave_untraced(buffer: object, asked: object) -> None:
    """If that is asked, make each call of a buffer in a compiled function one graph break, after which it runs as it is. Repeatable."""
    cls: object = type(buffer)
    if asked and cls not in _TRACED:
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
