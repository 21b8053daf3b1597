"""States that ``state_dict`` of TorchRL's buffers returned, described as its dumps are."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from engram._dtypes import DTYPE_NAMES
from engram.errors import IncompatibleCheckpoint
from engram.format.layout import SINGLE
from engram.format.schema import Field, Node
from engram.migrate.torchrl.rows import TorchRLDump
from engram.persist.foreign import DumpedPriorities
from engram.state import integer, real, typed

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What messages call it.
_WHERE = "load_state_dict: TorchRL's state"


class _Tree(Protocol):
    """TorchRL's, of the priorities of rows."""

    def __getitem__(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class TorchRLState(TorchRLDump):
    """A checked state. Its tensors are the state's."""

    _tensors: Mapping[tuple[str, ...], Tensor]

    def read_rows(self, key: tuple[str, ...], out: Tensor, first: int = 0) -> None:
        out.copy_(self._tensors[key][first : first + len(out)])


def read_state(state: Mapping[str, object], *, ndim: int) -> TorchRLState:
    """Describe and check a state. What TorchRL does not save, such as transforms' code, is not in it.

    Args:
        state: what ``ReplayBuffer.state_dict()`` of TorchRL returned, of a tensor storage.
        ndim: of the storage it is for, which must be 1: a state does not say how rows are numbered otherwise.

    Raises:
        IncompatibleCheckpoint: a list, no rows, a dtype that cannot be stored, or another ``ndim``.
        KeyError, TypeError, ValueError: an entry that is missing, of another type or out of range.
    """
    if ndim != 1:
        raise IncompatibleCheckpoint(
            f"{_WHERE}: expected a storage with ndim of 1, got {ndim}. Extend the buffer with its rows."
        )
    storage, writer = _part(state, "_storage"), _part(state, "_writer")
    rows = storage["_storage"]
    if isinstance(rows, list):
        raise IncompatibleCheckpoint(f"{_WHERE}: expected tensors, got a list. Extend the buffer with its items.")
    tensors = _leaves(rows)
    if not tensors:
        raise IncompatibleCheckpoint(f"{_WHERE}: expected rows, got none: nothing was ever written.")
    capacity = min(len(tensor) for tensor in tensors.values())
    length, position = (
        integer(of, name, 0, capacity + 1, _WHERE) for of, name in ((storage, "_len"), (writer, "_cursor"))
    )
    batch_size = state.get("_batch_size")
    return TorchRLState(
        path=Path("TorchRL's state"),
        capacity=capacity,
        columns=(),
        length=length,
        position=position % capacity,
        write_count=integer(writer, "_write_count", 0, 1 << 62, _WHERE),
        fields=tuple(Field(key, DTYPE_NAMES[one.dtype], tuple(one.shape[1:])) for key, one in tensors.items()),
        structure=_structure(list(tensors)),
        batch_size=batch_size if isinstance(batch_size, int) and batch_size > 0 else None,
        priorities=_priorities(_part(state, "_sampler"), length),
        drop_last=None,
        ranks=None,
        rng_state=None,
        left_out=(),
        _files={},
        _tensors=tensors,
    )


def _part(state: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Of a component."""
    found: Mapping[str, object] = typed(state, name, (dict, OrderedDict), _WHERE)
    return found


def _leaves(rows: object) -> dict[tuple[str, ...], Tensor]:
    """The tensors of a storage, by key. In a state, the parts of a key are joined by points, as TorchRL reads them."""
    if not isinstance(rows, dict):
        return {(SINGLE,): _checked(rows, "rows")}
    names = [name for name in rows if name not in ("__batch_size", "__device")]  # of the TensorDict
    return {tuple(name.split(".")): _checked(rows[name], name) for name in names}


def _checked(value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise IncompatibleCheckpoint(f"{_WHERE}: {name}: expected a tensor, got a {type(value).__name__}.")
    if value.ndim < 1 or value.dtype not in DTYPE_NAMES:
        raise IncompatibleCheckpoint(
            f"{_WHERE}: {name}: expected rows of a dtype that can be stored, got {value.dtype} of shape {list(value.shape)}."
        )
    return value.detach()


def _structure(keys: list[tuple[str, ...]]) -> Node:
    """TensorDicts with fields of these keys."""
    if keys == [(SINGLE,)]:
        return Node("leaf", field=0)
    root = Node("tensordict", children={})
    for number, key in enumerate(keys):
        node = root
        for part in key[:-1]:
            node = node.children.setdefault(part, Node("tensordict", children={}))
        node.children[key[-1]] = Node("leaf", field=number)
    return root


def _priorities(state: Mapping[str, object], length: int) -> DumpedPriorities | None:
    """Of a prioritized sampler, whose tree is an object of TorchRL's that is read by row; None: of another sampler."""
    if "_sum_tree" not in state:
        return None
    alpha, beta, eps = (real(state, name, _WHERE) for name in ("_alpha", "_beta", "_eps"))
    leaves = torch.as_tensor(cast("_Tree", state["_sum_tree"])[torch.arange(length)], dtype=torch.float64).reshape(-1)
    if leaves.numel() != length or not bool((leaves.isfinite() & (leaves >= 0)).all()):
        raise ValueError(f"{_WHERE}: _sum_tree: expected {length} priorities that are finite and at least 0.")
    value, row = typed(state, "_max_priority", tuple, _WHERE)
    highest = None if value is None else float(value)
    if highest is not None and not math.isfinite(highest):
        raise ValueError(f"{_WHERE}: _max_priority: expected a finite one, got {highest}.")
    return DumpedPriorities(alpha, beta, eps, leaves, highest, None if row is None else int(row))
