"""Closing: an object that refuses every use from then on, whatever its class can do or learns to do."""

from __future__ import annotations

from functools import cache
from typing import NoReturn, Self, cast

#: Special methods that every object has, or every class may have: a closed object keeps them. All others of its class refuse.
_OF_ALL_OBJECTS = {*dir(object), "__class_getitem__"}
#: What makes copies of any object.
_COPYING = ("__getstate__", "__reduce__", "__reduce_ex__")


class Closes:
    """Base of objects that ``with`` closes at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def end(thing: object, why: str, **goes_on: object) -> None:
    """From now on every use of an object raises ``RuntimeError``.

    Its text, ``close()``, ``closed`` and what is given by name go on. The object becomes one of a subclass that has nothing else:
    no method can forget to look, none of an open object need look, and what the object referred to is let go. A call that another
    thread has begun ends with that error, where it asks the object for anything more.

    Args:
        thing: of a Python class.
        why: what the error says, behind the name of the call.
        goes_on: attributes that stay.
    """
    try:
        text = f"closed {thing!r}"
    except Exception:  # noqa: BLE001 - it may describe what is not there any more
        text = f"closed {type(thing).__name__}"
    attributes = vars(thing)
    cls: object = type(thing)
    before = set(attributes)
    attributes["_ended"] = why, text, before
    thing.__class__ = _closed(cls)
    for name in before:
        del attributes[name]
    attributes |= {"close": _nothing, "closed": True, **goes_on}


def _nothing() -> None:
    """``close()`` of what is closed."""


def _refused(name: str) -> object:
    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"{name.strip('_')}: {object.__getattribute__(self, '_ended')[0]}")

    return refuse


def _attribute(self: object, name: str) -> object:
    if name.startswith("__") and name.endswith("__"):
        return object.__getattribute__(self, name)
    goes_on = object.__getattribute__(self, "__dict__")
    if name in goes_on:
        return goes_on[name]
    why, _, before = goes_on["_ended"]
    if name not in before and not hasattr(type(self), name):
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    raise RuntimeError(f"{name}: {why}")


def _text(self: object) -> str:
    return cast("str", object.__getattribute__(self, "_ended")[1])


@cache
def _closed(cls: type) -> type:
    """The class of closed objects of a class."""
    special = {
        name
        for base in cls.__mro__[:-1]
        for name, method in vars(base).items()
        if name.startswith("__") and name.endswith("__") and callable(method)
    }
    methods = {name: _refused(name) for name in {*(special - _OF_ALL_OBJECTS), *_COPYING}}
    shown = dict.fromkeys({"__repr__", *(special & {"__rich__"})}, _text)

    def opened(_: object, *args: object, **kwargs: object) -> object:
        return cls(*args, **kwargs)

    known = {
        "__new__": opened,  # of ``type(closed)(…)``
        "__slots__": (),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls)(cls.__name__, (cls,), {**known, **methods, **shown, "__getattribute__": _attribute})
