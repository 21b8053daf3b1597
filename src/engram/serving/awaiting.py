"""A server of a store that the first write of a client makes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import torch

from engram._support.field_paths import nested
from engram._support.tensordicts import tensordict_type
from engram.buffer.tensordict import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.errors import IncompatibleStore
from engram.format.schema import Field, Schema, decode, encode, field_differences
from engram.remote import protocol
from engram.serving.copies import away
from engram.serving.service import Service, check_protocol, served_by, why_alone
from engram.storages import LazyMemmapStorage
from engram.storages._structure import Structure
from engram.store.store import Store
from engram.types import Write


def awaiting(
    directory: Path,
    capacity: int,
    lanes: int = 1,
    batch_size: int | None = None,
    priorities: tuple[float, float] | None = None,
    fields: Sequence[Field] = (),
    *,
    tensordicts: bool = False,
) -> Awaiting:
    """A store in a directory, made at once where its fields are given, else by the first write.

    Args:
        directory: a store of this capacity, an empty folder or a free name.
        capacity, lanes: of the store.
        batch_size: of its buffer.
        priorities: alpha and beta of draws by priority; None: all rows are equally likely.
        fields: of a row.
        tensordicts: whether rows are TensorDicts.

    Raises as ``ReplayBuffer.open_or_create``. ``ValueError``: such rows cannot be stored.
    """
    kinds = (ReplayBuffer, PrioritizedReplayBuffer), (TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer)
    more = {} if priorities is None else {"alpha": priorities[0], "beta": priorities[1]}
    kind = kinds[tensordicts][priorities is not None]
    rb = kind.open_or_create(directory, capacity, lanes=lanes, batch_size=batch_size, **more)  # type: ignore[arg-type] # of its kind
    made = Awaiting(rb, directory)
    try:
        if fields:
            made.make_of(fields)
        directory.mkdir(exist_ok=True)  # its number names the store until there is one
    except BaseException:
        rb.close()
        raise
    return made


class Awaiting:
    """Answers until there is a store, of a buffer over a directory: then :meth:`found` is asked."""

    def __init__(self, rb: ReplayBuffer, directory: Path) -> None:
        #: The open one.
        self.buffer = rb
        self._directory = directory
        self._storage = cast("LazyMemmapStorage", rb.storage)
        self._lock = threading.Lock()
        self._service: Service | None = None

    def found(self) -> Service | None:
        """The service of the store, once this or another process has made it."""
        with self._lock:
            if self._service is None and self._storage.initialized:
                # The folder notes the buffer's kind, also where who made the store died before it was noted.
                self.buffer.observe(Write(torch.empty(0, dtype=torch.int64), 0), None)
                # One for all callers: it counts them, and an epoch's draws take turns in it.
                self._service = Service(self.buffer)
            return self._service

    @property
    def name(self) -> str:
        """As of ``Service``; empty: there is no store yet."""
        return "" if (found := self.found()) is None else found.name

    def do(self, command: msgspec.Struct, data: bytes = b"") -> object:  # noqa: ARG002 - no command of a store that is not there has any
        """As ``Service.do``. Raises Flight's error for a server that is gone: it takes a store, so who had one has lost it."""
        match command:
            case protocol.Describe():
                check_protocol(command)
                rb, folder = self.buffer, self._directory.stat()
                name, recipe = f"{folder.st_dev:x}-{folder.st_ino:x}", vars(rb)["_recipe"].entries()
                served = served_by(rb, name, "", recipe, why_alone(rb))
                return msgspec.structs.replace(served, lanes=self._storage.lanes, limited=False)
            case protocol.Make():
                self.make(decode(command.schema.encode(), "extend"))
            case protocol.Health():
                pass
            case _:
                raise away("there is no store: nothing was ever written")
        return {}

    def make(self, schema: Schema) -> None:
        """Make the store, if there is none. Raises ``ValueError``: such rows cannot be stored. ``OSError``: no space."""
        storage = self._storage
        with self._lock:
            if not storage.initialized:
                own = msgspec.structs.replace(schema, capacity=storage._geometry.capacity, lanes=storage.lanes)  # noqa: SLF001 - asked for
                storage.allocate_for(decode(encode(own), "extend"))

    def make_of(self, fields: Sequence[Field]) -> None:
        """As :meth:`make`, for rows with these fields. Raises ``IncompatibleStore``: there is a store, of others."""
        row = nested({field.key: torch.zeros(field.shape, dtype=getattr(torch, field.dtype)) for field in fields})
        data = tensordict_type()(row, []) if isinstance(self.buffer, TensorDictReplayBuffer) else row
        structure = Structure.of(data, batched=False, call="serve")
        structure.flatten(data, None, "serve")
        self.make(wanted := self._storage._geometry.schema(structure, ()))  # noqa: SLF001 - what it was asked for
        if differs := field_differences(wanted.fields, cast("Store", self._storage.memory).schema.fields):
            raise IncompatibleStore(
                f"serve: {str(self._directory)!r} holds a store of other fields: {'; '.join(differs)}."
            )
