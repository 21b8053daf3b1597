"""The fields of rows that data may leave out, as they were added since the first row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engram.store.memory import DTYPE_OF

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from engram.format.schema import Field, Node, Schema


class Added(NamedTuple):
    """Fields that were added."""

    digits: tuple[str, ...]
    """What they are filled with, as ``Schema.added`` has it."""
    fills: dict[int, Tensor]
    """The same by number, ``[*shape]``."""

    @classmethod
    def of(cls, schema: Schema) -> Added:
        """Those of a schema."""
        if not schema.added:
            return NOTHING_ADDED
        numbers = range(schema.first_fields, len(schema.fields))
        return cls(schema.added, {n: _row(schema.fields[n], schema.fill(n) or b"") for n in numbers})

    def without(self, children: Mapping[str, Node], given: Collection[str]) -> dict[str, Node]:
        """Children of a node that data must have, and those that it has."""
        return {name: child for name, child in children.items() if name in given or not self._may_lack(child)}

    def _may_lack(self, node: Node) -> bool:
        if node.kind == "leaf":
            return node.field in self.fills
        return bool(node.children) and all(map(self._may_lack, node.children.values()))

    def missing(self, children: Mapping[str, Node], given: Collection[str]) -> Iterator[int]:
        """Numbers of the fields below children that are not given."""
        for name, child in children.items():
            if name not in given:
                yield from _leaves(child)


def _leaves(node: Node) -> Iterator[int]:
    if node.kind == "leaf":
        yield node.field
    for child in node.children.values():
        yield from _leaves(child)


def _row(field: Field, raw: bytes) -> Tensor:
    if not raw:
        return torch.empty(field.shape, dtype=DTYPE_OF[field.dtype], device="cpu")
    words = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return words.view(DTYPE_OF[field.dtype]).view(field.shape)


NOTHING_ADDED = Added((), {})
