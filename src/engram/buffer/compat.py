"""Names of TorchRL's buffers that mean nothing more here: constants, aliases, and methods that return the buffer."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["alias", "constant", "returns_itself"]


def constant(value: object, doc: str) -> property:
    """A property that is the same for every buffer."""
    return property(lambda _: value, doc=doc)


def alias(name: str) -> property:
    """A property that is another attribute, of the buffer or of one of its parts."""
    return property(operator.attrgetter(name), doc=f"As :attr:`{name.rpartition('.')[2]}`.")


def returns_itself(doc: str) -> Callable[[Any], Any]:
    """A method that returns the buffer."""

    def method(self: Any) -> Any:
        return self

    method.__doc__ = doc
    return method
