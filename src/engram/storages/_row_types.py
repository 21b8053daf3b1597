"""Classes of rows that a stored structure names: tensorclasses, named tuples and dataclasses."""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from engram._tensordict import is_tensorclass_type
from engram.nested import fields_of

if TYPE_CHECKING:
    from engram.format.schema import Node


def type_name(cls: type) -> str:
    """What a structure calls a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def find_types(node: Node, types: dict[str, type]) -> None:
    """Add the classes that a structure names to ``types``. Raises ``TypeError``: this program has not defined one."""
    if node.type and node.type not in types:
        types[node.type] = _find_type(node)
    for child in node.children.values():
        find_types(child, types)


def _find_type(node: Node) -> type:
    """A class that the program has defined already. A name found in a file never makes us import anything."""
    module_name, _, qualname = node.type.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    fits = isinstance(found, type) and (
        is_tensorclass_type(found)
        if node.kind == "tensorclass"
        else is_dataclass(found) or (issubclass(found, tuple) and hasattr(found, "_fields"))
    )
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
    cls: type = found
    return cls
