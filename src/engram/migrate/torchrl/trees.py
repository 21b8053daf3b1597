"""States of TensorDicts: which TensorDicts they were made of, and what these held that is no tensor."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engram._tensordict import children, tensordict_type
from engram.errors import IncompatibleCheckpoint

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tensordict import TensorDict

_OBJECT = "NonTensorData"


class Said(NamedTuple):
    """What a state says of one of its TensorDicts."""

    batch: torch.Size
    on_device: bool
    kind: str
    """The name of its class; empty: ``TensorDict``."""
    objects: dict[str, object]
    """What it has besides tensors, by name."""


def said_in(state: object, where: str) -> dict[str, Said] | None:
    """What a TensorDict's state says of each TensorDict in it, by the beginning of the names of its entries; None: it is no such state.

    Raises ``IncompatibleCheckpoint``: the state of something else.
    """
    noted = vars(state).get("_metadata") if isinstance(state, OrderedDict) else None
    if not isinstance(noted, dict):
        return None
    found = {}
    for prefix, said in noted.items():
        batch = said.get("batch_size") if isinstance(said, dict) else None
        if not isinstance(prefix, str) or not isinstance(batch, torch.Size):
            raise IncompatibleCheckpoint(
                f"{where}: expected the state of a TensorDict, got that of another object. Extend the buffer with the object itself."
            )
        kind, objects = said.get("_type", ""), said.get("_non_tensor", {})
        found[prefix] = Said(batch, said.get("device") is not None, str(kind), dict(objects))
    return {"": found.get("", Said(torch.Size([]), False, "", {})), **found}


def split(name: str, said: Collection[str]) -> tuple[str, str]:
    """The TensorDict that an entry is in, and its name there: names are joined by points, and may have points of their own."""
    above = max((prefix for prefix in said if prefix and name.startswith(f"{prefix}.")), key=len, default="")
    return above, name[len(above) + 1 :] if above else name


def path_of(name: str, said: Collection[str]) -> tuple[str, ...]:
    """The key of an entry, or of a TensorDict."""
    above, last = split(name, said)
    return (*path_of(above, said), last) if above else (last,)


def lost(said: Mapping[str, Said], names: Collection[str], *, objects: bool) -> list[str]:
    """What a state does not say of its TensorDicts, in words.

    Args:
        said: of them.
        names: of the tensors.
        objects: whether what is no tensor is lost, too.
    """
    found = []
    for prefix, one in said.items():
        what = f"field {prefix!r:.100}" if prefix else "the root"
        filled = any(name.startswith(f"{prefix}." if prefix else "") for name in (*names, *filter(None, said)))
        if one.kind not in ("", _OBJECT):
            found.append(f"the class of {what}, {one.kind}, which is read as a TensorDict")
        if not one.kind and not filled:
            found.append(f"what {what} held, if it was a stack of objects: the state has an empty TensorDict there")
        if objects and one.objects:
            found.append(f"{what}, which is no tensor" if one.kind == _OBJECT else f"{sorted(one.objects)} of {what}")
    return found


def made_of(state: Mapping[str, object], said: Mapping[str, Said], without: Collection[str], where: str) -> object:
    """The TensorDict, or the object, whose state this is, with tensors of its own.

    Args:
        state: its tensors by name.
        said: of its TensorDicts.
        without: entries to leave out.
        where: for messages.

    Raises:
        IncompatibleCheckpoint: an entry that is no tensor. ValueError: one that does not have the batch size that is said.
    """
    devices = {value.device for value in state.values() if isinstance(value, Tensor)}
    own = devices.pop() if said[""].on_device and len(devices) == 1 else None
    made: dict[str, TensorDict] = {}
    for prefix in sorted(said, key=len):
        one = said[prefix]
        above, last = split(prefix, said)
        if prefix and path_of(prefix, said)[0] in without:
            continue
        if one.kind == _OBJECT:
            holder = made[above] if prefix else tensordict_type()(batch_size=one.batch)
            holder.set_non_tensor(last, one.objects.get("data"))
            if not prefix:
                return children(holder)[last]
            continue
        made[prefix] = tensordict_type()(batch_size=one.batch, device=own)
        for name, value in one.objects.items():
            made[prefix].set_non_tensor(name, value)
        if prefix:
            _put(made[above], last, made[prefix], f"{where}: {prefix}")
    for name, value in state.items():
        above, last = split(name, said)
        if path_of(name, said)[0] in without:
            continue
        if not isinstance(value, Tensor):
            raise IncompatibleCheckpoint(f"{where}: {name}: expected a tensor, got a {type(value).__name__}.")
        if above not in made:
            raise ValueError(f"{where}: {name}: expected an entry of a TensorDict, got one of a {said[above].kind}.")
        _put(made[above], last, value.detach().clone(), f"{where}: {name}")
    return made[""]


def _put(holder: TensorDict, name: str, value: Tensor | TensorDict, where: str) -> None:
    try:
        holder.set(name, value)
    except RuntimeError as error:
        raise ValueError(
            f"{where}: expected a shape that begins with {list(holder.batch_size)}, got {list(value.shape)}."
        ) from error
