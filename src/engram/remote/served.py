"""What every storage is whose rows are on servers: it checks rows, and asks for the rest."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch

from engram._support.unsupported import BY_NUMBER, refused, refusing
from engram.remote.commands import COALESCED_BYTES, MAX_BATCHES
from engram.storages import Storage
from engram.storages._columns import rows_of_coordinates, rows_of_written
from engram.storages._structure import Structure
from engram.types import Traits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch import Tensor

    from engram.format.schema import Schema
    from engram.remote.commands import Mass, Served, State
    from engram.saved.rows import Roles
    from engram.storages import Count
    from engram.store import Store
    from engram.store.limits import Rules
    from engram.types import Info


class OfServer:
    """A component that asks a server."""


#: Between two requests that the limits of a store refused.
ASK_AGAIN_S = 0.02


class Limits:
    """Limits of a store, as far as readers of one ask for them, that is elsewhere: there are none."""

    limited = False
    #: Of what is written to the store nothing is heard: it is waited for without it.
    write_count = next_ticket = 0

    @property
    def limit(self) -> tuple[float, float, int, int]:
        """As of ``Rules``."""
        return (0.0, 0.0, 0, 0)

    @property
    def fleet_limit(self) -> tuple[int, int]:
        """As of a store: of several stores these are not a part."""
        return (0, 0)

    def admit_samples(self, rows: int) -> bool:  # noqa: ARG002 - it is asked by the draw
        return True

    def give_back_samples(self, rows: int) -> None:
        """It has counted what was drawn."""

    def limit_event(self, samples: bool) -> int:  # noqa: ARG002 - as of a store that is here
        return 0

    def await_insert(self, written: int, seconds: float) -> None:  # noqa: ARG002
        time.sleep(min(seconds, ASK_AGAIN_S))

    def wake_limits(self) -> None:
        """What waits here asks again by itself."""

    def begin_wait(self) -> int:
        """Of a call that is not timed here."""
        return 0

    def count_wait(self, since: int) -> None:
        """Waits are counted where the store is."""


class Memory(NamedTuple):
    """What readers of a store look at, of one that is elsewhere."""

    schema: Schema
    place: str
    core: Limits
    bare: Limits
    """The same: a store's own looks up less."""
    directory: None = None
    is_native: bool = True
    closed: bool = False
    participant: int = 0


class Drawn(NamedTuple):
    """A batch that a server drew."""

    columns: list[Tensor]
    rows: Tensor
    info: Info
    last: bool
    """An epoch ended with it."""
    mass: Mass | None = None
    """Of the store, if it is a part of a batch."""


class ServedRows(Protocol):
    """What a buffer asks of rows that servers have, beside what it asks of every storage."""

    @property
    def served(self) -> Served:
        """What a server says of the store."""

    def state(self) -> State:
        """Numbers of what is stored at this moment."""

    def gauges(self) -> dict[str, float]:
        """What ``stats()`` says beyond the state, where the servers know it: see :class:`engram.remote.commands.Gauges`."""

    def consumer_version(self, at_least: int | None = None) -> int:
        """Up to which policy version the consumer has come, after it was raised to that one. Raises ``TypeError``: no sampler asks."""

    def ask_for(self, keys: Sequence[int], rows: int) -> None:
        """Ask for a batch of each key, and do not wait for it. Raises ``ValueError``: a batch is larger than a message may be."""

    def answer(self, rows: int) -> list[Callable[[], Drawn]]:
        """The batches, of so many rows, that were asked for first. Raises what drawing the first raised.

        Each is copied out of what came when it is called for.
        """

    def settle(self) -> None:
        """Wait until all that was asked for is drawn."""

    def forget_asked(self) -> None:
        """Drop what was asked for."""

    def draw(self, key: int, rows: int) -> Drawn:
        """A batch, in one request. Nothing else may be under way."""

    def can_sample(self, rows: int) -> bool:
        """Whether a batch of so many rows could be drawn now."""

    def check_rows(self, rows: Tensor, call: str = "update_priority") -> None:
        """Raise ``RowError``: a row outside the storage. -1 is none."""

    def prioritize(self, rows: Tensor, priorities: Tensor, tickets: Tensor | None) -> None:
        """Send new priorities. Of what was asked for before, none is drawn by them; all that is asked for later is."""

    def end_trajectories(self, lanes: Tensor, roles: Roles | None, *, terminated: bool) -> Tensor:
        """What ``ReplayBuffer.end_trajectory`` does."""

    def fetch_dump(self, folder: Path, progress: Callable[[int], None]) -> None:
        """Write the files of a dump that the server makes into a new folder. ``progress`` is called with how many bytes came."""


class ServedStorage(Storage, ServedRows):
    """Rows that servers have. Whatever needs them here refuses, and says what to do instead."""

    traits = Traits(has_fields=True, is_remote=True)

    def describe(self, schema: Schema, place: str, limits: Limits, participant: int) -> None:
        """Say what the rows are, and where."""
        self._schema = schema
        self.structure = Structure.from_schema(schema)
        self.memory = cast(
            "Store", Memory(schema, place, limits, limits, participant=participant)
        )  # as far as readers look at it
        self.ndim = 1 + len(schema.columns)

    # ---- what it is ----------------------------------------------------------------------------------------------------

    initialized = True
    device = torch.device("cpu")
    shared = True

    @property
    def lanes(self) -> int:
        return self._schema.lanes

    @property
    def columns(self) -> tuple[int, ...]:
        return self._schema.columns

    @property
    def nbytes(self) -> int:
        return self._schema.row_bytes * self._schema.capacity

    def __len__(self) -> int:
        return self.state().size

    @property
    def write_count(self) -> int:
        return self.state().write_count

    def counters(self) -> dict[str, float]:
        return self.state().counters

    def admit(self, component: object, call: str) -> None:
        """Raise to refuse a sampler or a writer that a buffer is to take, in this call."""
        if not isinstance(component, OfServer):
            raise refused(
                call, "The store is drawn from and written to as its server does: change it where the store is."
            )

    def limit(self, rules: Rules, unconsumed: int) -> None:  # noqa: ARG002 - it is refused
        raise refused("limit", "Call it where the store is.")

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def batches_in_message(self, rows: int) -> int:
        """How many batches of so many rows one message asks for."""
        return min(MAX_BATCHES, max(1, COALESCED_BYTES // max(1, rows * self._schema.row_bytes)))

    # ---- writing -------------------------------------------------------------------------------------------------------

    def prepare(
        self, data: object, call: str, *, batched: bool, ignored: Iterable[str] = (), count: Count | None = None
    ) -> tuple[list[Tensor], int]:
        data, n, _ = rows_of_written(data, self, call, self.structure.dtypes, batched=batched, count=count)
        return self.structure.flatten(data, n, call, ignored), n or 1

    def add_row(self, lane: object, data: object, ignored: Iterable[str] = ()) -> None:
        """There is no short path."""

    def append_of(self, data: object, lane: object) -> None:
        """There is no short path."""

    # ---- reading -------------------------------------------------------------------------------------------------------

    def batch(self, columns: Sequence[Tensor], n: int | tuple[int, ...] | None) -> object:
        return self.structure.unflatten(columns, (n,) if isinstance(n, int) else n, self.device)

    def rows_at(self, coordinates: Tensor) -> Tensor:
        """As of a tensor storage, whose coordinates batches have."""
        if self.memory is None:
            return torch.full(coordinates.shape[:-1], -1, device="cpu")
        length = self._schema.capacity // math.prod(self.columns)
        return rows_of_coordinates(coordinates, (length, *self.columns))

    # ---- what needs the rows here ----------------------------------------------------------------------------------------

    extent = refusing("extent", BY_NUMBER)
    tickets_of = refusing("rb[index]", BY_NUMBER)
    hold_nothing = refusing("rb[index]", BY_NUMBER)
    field = refusing("rb[key]", BY_NUMBER)
    settled = refusing("sampler", BY_NUMBER)
    locate = resolve = read = patch = pack = get = refusing("rb[index]", BY_NUMBER)
    edit = edit_fields = patch_fields = refusing("rb[index] = value", "Edit them where the store is.")
    next_number = refusing("state_dict", "Save with dumps(path), which streams them.")
    state_dict = state_without_rows = prepare_load = refusing(
        "state_dict", "Save with dumps(path), which streams them."
    )

    priorities = refusing("priorities", "Rows are drawn by them where the store is.")
