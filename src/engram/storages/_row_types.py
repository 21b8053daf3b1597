"""Classes of rows that a stored structure names: tensorclasses, named tuples and dataclasses."""

from __future__ import annotations

import functools
import sys
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from engram._support.nested import can_be_attribute, class_of, fields_of
from engram._support.tensordicts import is_tensorclass_type
from engram._support.words import warn

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from engram.format.schema import Node


def type_name(cls: type[object]) -> str:
    """What a structure calls a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def find_types(node: Node, types: dict[str, type[object]]) -> None:
    """Add the classes that a structure names to ``types``. A named tuple of the same fields stands for a dataclass or named tuple that this
    program has not defined.

    Raises:
        TypeError: a tensorclass that it has not defined, or a class that has other fields now.
    """
    if node.type and node.type not in types:
        types[node.type] = _find_type(node)
    for child in node.children.values():
        find_types(child, types)


def _find_type(node: Node) -> type[object]:
    """A class that the program has defined already. A name found in a file never makes us import anything."""
    module_name, _, qualname = node.type.partition(":")
    found = _found(node.type)
    fits = isinstance(found, type) and (
        is_tensorclass_type(found)
        if node.kind == "tensorclass"
        else is_dataclass(found) or (issubclass(found, tuple) and hasattr(found, "_fields"))
    )
    if not fits and node.kind == "namedtuple" and all(map(can_be_attribute, node.children)):
        return _stand_in(node.type, tuple(node.children))
    if not fits:
        raise TypeError(
            f"open: the rows are of the {node.kind} {qualname!r}, which this program has not defined. "
            f"Import it first (it was defined in module {module_name!r})."
        )
    if node.kind == "namedtuple" and fields_of(found) != tuple(node.children):
        raise TypeError(
            f"open: the rows are of the namedtuple {qualname!r} with the fields {list(node.children)}, but in this program it has "
            f"{list(fields_of(found))}. Define it as it was; rows whose fields are numbers come from before engram kept the names: write "
            "them again."
        )
    cls: type[object] = found
    return cls


def _found(name: str) -> Any:
    """What lies under a name now; None: nothing."""
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    return found


@functools.cache
def _stand_in(name: str, fields: tuple[str, ...]) -> type[object]:
    module_name, _, qualname = name.partition(":")
    warn(
        f"open: the rows are of the class {qualname!r} of module {module_name!r}, which this program has not defined: here they are named "
        f"tuples with its fields, {', '.join(fields)}. Define or import it before to have it."
    )
    return class_of(fields)


def stands_in(cls: type[object]) -> bool:
    """Whether a class stands for one that the program has not defined."""
    return cls.__module__ == class_of.__module__


def of_users(types: Mapping[str, type[object]]) -> dict[str, type[object]]:
    """Those of the classes that the user has defined, and that other processes find under their names."""
    return {name: cls for name, cls in types.items() if not stands_in(cls) and is_named(cls, name)}


def is_named(cls: type[object], name: str) -> bool:
    """Whether a class is what a structure calls by that name. Those that functions make are not, nor are those that were made again."""
    return _found(name) is cls


def takes_rows_of(
    cls: type[object], node: Node, types: dict[str, type[object]], kept: MutableMapping[str, object]
) -> bool:
    """Whether data may be of a class. Where the first row's is not found under its name, the fields count: the caller compares them.

    The user's own class takes the place of one that stands in for it: batches are of it from then on, and the ``intake`` is made again.
    """
    known = types[node.type]
    if cls is known or node.kind != "namedtuple" or is_named(known, node.type):
        return cls is known
    if stands_in(known) and fields_of(cls) == tuple(node.children):
        types[node.type] = cls
        kept.pop("intake", None)
    return True
