"""Methods of TorchRL's that a class of the user's overrides.

A buffer calls them as TorchRL's does. What they override does meanwhile what the buffer would have done without them: so the lane, the
limits of the store and what was drawn stay as they are, whatever the user's method adds.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, cast


def _overrides(cls: type[object], name: str) -> bool:
    definer = next((base for base in cls.__mro__ if name in vars(base)), object)
    return definer is not object and definer.__module__.partition(".")[0] != "engram"


#: Whether a class has a method of the user's under a name: one that engram does not define.
overrides = cast("Callable[[type, str], bool]", functools.cache(_overrides))


#: Methods that TorchRL's components have and a buffer here never calls, and what to override in their place.
_NEVER_CALLED = {
    **dict.fromkeys(("_get_item", "_get_list", "_get_slice"), "get"),
    **dict.fromkeys(("_set_item", "_set_slice"), "set"),
    "_sampleable_count": "can_sample",
    "generations_of": "written",
}


def refuse_others(component: object, **more: str) -> None:
    """Raise ``TypeError``: the user's class overrides what is never called.

    ``more``: further methods, and what to override instead; "": it is called.
    """
    for name, instead in (_NEVER_CALLED | more).items():
        if instead and overrides(type(component), name):
            raise TypeError(
                f"{type(component).__name__}.{name}: a buffer never calls it. Override {instead} in its place."
            )


class _Meanwhile(threading.local):
    """The methods whose overrides by users are running in this thread, and what they do, by component."""

    of: Mapping[int, Callable[..., object] | None] = MappingProxyType({})


_meanwhile = _Meanwhile()


def meanwhile(component: object) -> Callable[..., Any] | None:
    """What a method of engram's does while the user's override of it runs; None: as always."""
    return _meanwhile.of.get(id(component))


@contextmanager
def doing(component: object, what: Callable[..., object] | None) -> Iterator[None]:
    """Around a call of an override: meanwhile the component's own method does this; None: as always."""
    before = _meanwhile.of
    _meanwhile.of = {**before, id(component): what}
    try:
        yield
    finally:
        _meanwhile.of = before
