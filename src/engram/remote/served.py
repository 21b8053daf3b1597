"""The components of a buffer whose rows are on servers: they check rows, and ask for the rest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch

from engram._support.unsupported import BY_NUMBER, refused, refusing
from engram.errors import PriorityError, RateLimited
from engram.format.schema import Schema
from engram.format.sizes import usual_row_bytes
from engram.remote.protocol import COALESCED_BYTES, MAX_BATCHES, Mass, Sample, Served, State
from engram.samplers import _base, prioritized, staleness
from engram.saved.rows import Roles
from engram.storages import Count, LazyTensorStorage, Storage, _columns, _ragged_structure, _structure, ragged
from engram.store.blocks import Key
from engram.store.limits import Rules
from engram.store.sampled import SampledStorage
from engram.store.store import Store
from engram.types import Entry, Info, NativeBatch, Shown, Traits
from engram.writers._base import NativeWriter


class OfServer:
    """A component that asks a server, which says what its text is."""

    _text: str

    def __repr__(self) -> str:
        return self._text


#: Between two requests that the limits of a store refused.
RETRY_INTERVAL_S = 0.02


class Limits:
    """The limits of a store that is elsewhere, as readers of a store ask for them: there are none."""

    limited = False
    #: Writes to the store are not seen here: waiting goes on without them.
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
        time.sleep(min(seconds, RETRY_INTERVAL_S))

    def wake_limits(self) -> None:
        """What waits here asks again by itself."""

    def begin_wait(self) -> int:
        """Of a call that is not timed here."""
        return 0

    def count_wait(self, since: int) -> None:
        """Waits are counted where the store is."""


class ServedLimits(Limits):
    """Limits of a store that its server follows. It refuses at once what it does not admit, so clients ask again."""

    #: It may be: only the server knows.
    limited = True

    def __init__(self, ask: Callable[..., State], served: Callable[[], Served]) -> None:
        self._ask, self._served = ask, served

    #: Of a fleet, which goes on without it.
    hurried = False
    #: The number that the last answer told, as of :class:`Written`; None: none did.
    told: int | None = None

    def state(self) -> State:
        """Numbers of the store at this moment. Raises as :meth:`Connection.ask`."""
        state = self._ask(hurried=self.hurried)
        self.tell(state.fleet[0] or (-1 if any(state.limit) else 0))
        return state

    def tell(self, number: int) -> None:
        """What an answer says."""
        self.told = number if self._served().limited is not None else None

    @property
    def limit(self) -> tuple[float, float, int, int]:
        return self.state().limit

    def limit_counts(self) -> dict[str, float]:
        return self.state().limit_counts

    @property
    def fleet_limit(self) -> tuple[int, int]:
        return self.state().fleet

    def size(self) -> int:
        return self.state().size

    def admits_samples(self, rows: int) -> bool:  # noqa: ARG002 - the server has said that the rows can be sampled
        return True

    def await_limit(self, samples: bool, rows: int, event: int, seconds: float) -> bool:  # noqa: ARG002
        """Sleep until the server is to be asked again."""
        time.sleep(min(seconds, RETRY_INTERVAL_S))
        return True

    def count_limit_wait(self, samples: bool) -> None:
        """The server counts none of these."""


class Memory(NamedTuple):
    """A store that is elsewhere, as far as readers of a store look at one."""

    schema: Schema
    place: str
    core: Limits
    #: The same: a store's own looks up less.
    bare: Limits
    directory: None = None
    is_native: bool = True
    reads_apart: bool = False
    closed: bool = False
    participant: int = 0


class Drawn(NamedTuple):
    """A batch that a server drew."""

    columns: list[torch.Tensor]
    rows: torch.Tensor
    info: Info
    #: An epoch ended with it.
    last: bool


class Parts(NamedTuple):
    """What a store has drawn of some batches, one behind the other."""

    #: Of the rows of each part.
    sizes: list[list[int]]
    #: Of the store, at each.
    masses: list[Mass]
    #: Of all rows ``[n, ...]``, as are the rows and the entries of info.
    columns: list[torch.Tensor]
    rows: torch.Tensor
    info: dict[Entry, torch.Tensor]


class OneStore(NamedTuple):
    """A store, as rows that grow use it."""

    #: As of a connection.
    call: Callable[..., object]
    #: A context in which so many rows are written.
    admitted: Callable[[int], AbstractContextManager[object]]
    #: Number of its row 0.
    first: int

    def until(self, timeout: float, call: Callable[[], object]) -> object:
        """What a call returns, once its limits and slots admit it. Raises ``RateLimited`` after so many seconds."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return call()
            except RateLimited:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(RETRY_INTERVAL_S)


def update_once(
    called: Callable[..., tuple[object, bool]], rows: torch.Tensor, given: Mapping[str, object]
) -> tuple[torch.Tensor | None, ...]:
    """What ``update_if_present`` returns. Each message names the tickets of its rows, so that it is applied once.

    Of one that was sent again, rows count that have the patch at the end; others that were edited meanwhile do not.
    """
    named = {"index": rows, **given}
    look = {**named, "patch": {}, "version_key": None, "version": None, "tickets": None}
    rejected, numbers, tickets, _ = cast("list[torch.Tensor]", called("update_if_present", look)[0])
    while True:
        made, again = called("update_if_present", {**named, "tickets": tickets})
        refused, written, others, alike = cast("list[torch.Tensor]", made)
        rejected, numbers = rejected | refused, numbers.maximum(written.maximum(alike) if again else written)
        tickets = others.where((tickets >= 0) & (numbers < 0), -1)
        if again or not bool((tickets >= 0).any()):
            return numbers >= 0, None if given["version_key"] is None else rejected, numbers


class ServedRows(Protocol):
    """Rows that servers have, as far as a buffer asks more of them than of every storage."""

    @property
    def served(self) -> Served:
        """What a server says of the store."""

    def state(self) -> State:
        """Numbers of what is stored at this moment."""

    def gauges(self) -> dict[str, float]:
        """What ``stats()`` says beyond the state, where the servers know it: see :class:`engram.remote.protocol.Gauges`."""

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

    def draw_within(self, key: int, command: Sample) -> Drawn:
        """A batch of as many rows as have the tokens that the command says. Nothing else may be under way. ``key``: of its draw."""

    def call_each(self, name: str, given: Mapping[str, object]) -> list[tuple[torch.Tensor, ...]]:
        """What a method of the buffer of each store returns, rows first. Raises ``ConnectionError``: a store is gone."""

    def update(self, rows: torch.Tensor, given: Mapping[str, object]) -> tuple[torch.Tensor | None, ...]:
        """What ``update_if_present`` returns, of rows ``[n]`` and the other arguments."""

    def stores(self, *, home: bool) -> list[OneStore]:
        """Those that have rows which grow; ``home``: where rows of this buffer go to."""

    def can_sample(self, rows: int) -> bool:
        """Whether a batch of so many rows could be drawn now."""

    def check_rows(self, rows: torch.Tensor, call: str = "update_priority") -> None:
        """Raise ``RowError``: a row outside the storage. -1 is none."""

    def prioritize(self, rows: torch.Tensor, priorities: torch.Tensor, tickets: torch.Tensor | None) -> None:
        """Send new priorities. Of what was asked for before, none is drawn by them; all that is asked for later is."""

    def end_trajectories(self, lanes: torch.Tensor, roles: Roles | None, *, terminated: bool) -> torch.Tensor:
        """What ``ReplayBuffer.end_trajectory`` does."""

    def fetch_dump(self, folder: Path, progress: Callable[[int], None]) -> None:
        """Write the files of a dump that the server makes into a new folder. ``progress`` is called with how many bytes came."""


class ServedStorage(Storage, ServedRows):
    """A storage whose rows are on servers. Calls that need the rows here are refused, with what to do instead."""

    traits = Traits(has_fields=True, is_remote=True)
    #: Of rows by how many fields they have: some may have been drawn before others were added.
    _structures: dict[int, _structure.Structure]

    def __init__(self) -> None:
        super().__init__()
        self._structures = {}

    def describe(self, schema: Schema, place: str, limits: Limits, participant: int) -> None:
        """Say what the rows are, and where."""
        self._schema = schema
        self.structure = self._structures[len(schema.fields)] = _ragged_structure.structure_in(schema)
        self._usual_bytes = usual_row_bytes(schema)
        # As far as readers look at it.
        self.memory = cast("Store", Memory(schema, place, limits, limits, participant=participant))
        self.ndim = 1 + len(schema.columns)

    # ---- what it is ----------------------------------------------------------------------------------------------------

    initialized = True
    device = torch.device("cpu")
    shared = True
    #: As of a tensor storage, for this process.
    layout = LazyTensorStorage.layout

    @property
    def is_ragged(self) -> bool:
        return bool(self._schema.ragged)

    @property
    def lanes(self) -> int:
        return self._schema.lanes

    @property
    def columns(self) -> tuple[int, ...]:
        return self._schema.columns

    @property
    def nbytes(self) -> int:
        return self._schema.nbytes

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
            raise refused(call, "The store is drawn from and written to as its server does: change that.")

    def limit(self, rules: Rules, unconsumed: int) -> None:  # noqa: ARG002 - it is refused
        raise refused("limit", "Call it where the store is.")

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def batches_in_message(self, rows: int) -> int:
        """How many batches of so many rows one message asks for."""
        return min(MAX_BATCHES, max(1, COALESCED_BYTES // max(1, rows * self._usual_bytes)))

    # ---- writing -------------------------------------------------------------------------------------------------------

    def adopt_fields(self) -> None:
        """Take over the fields that a server has shown since."""

    def prepare(
        self, data: object, call: str, *, batched: bool, ignored: Iterable[str] = (), count: Count | None = None
    ) -> tuple[list[torch.Tensor], int]:
        self.adopt_fields()
        structure = self.structure
        known = structure if self.ndim == 1 else None
        data, n, _ = _columns.rows_of_written(
            data, self, call, structure.dtypes, batched=batched, count=count, known=known, ignored=ignored
        )
        return structure.flatten(data, n, call, ignored), n or 1

    def add_row(self, lane: object, data: object, ignored: Iterable[str] = ()) -> tuple[int, int] | None:
        """There is no short path."""

    def append_of(self, data: object, lane: object) -> None:
        """There is no short path."""

    # ---- reading -------------------------------------------------------------------------------------------------------

    def batch(
        self, columns: Sequence[torch.Tensor], n: int | tuple[int, ...] | None, *layout: ragged.RaggedLayout | None
    ) -> object:
        more = (None, *layout) if layout else ()
        structure = self._structures.get(len(columns), self.structure)
        return structure.unflatten(columns, (n,) if isinstance(n, int) else n, self.device, *more)  # type: ignore[arg-type]

    def rows_at(self, coordinates: torch.Tensor) -> torch.Tensor:
        """As of a tensor storage, whose coordinates batches have."""
        if self.memory is None:
            return torch.full(coordinates.shape[:-1], -1, device="cpu")
        length = self._schema.capacity // math.prod(self.columns)
        return _columns.rows_of_coordinates(coordinates, (length, *self.columns))

    # ---- what needs the rows here ----------------------------------------------------------------------------------------

    extent = refusing("extent", BY_NUMBER)
    field = refusing("rb[key]", BY_NUMBER)
    settled = refusing("sampler", BY_NUMBER)
    tickets_of = hold_nothing = locate = resolve = read = patch = pack = get = refusing("rb[index]", BY_NUMBER)
    edit = edit_fields = patch_fields = refusing("rb[index] = value", "Edit them where the store is.")
    next_number = state_dict = state_without_rows = prepare_load = refusing(
        "state_dict", "Save with dumps(path), which streams them."
    )

    priorities = refusing("priorities", "Rows are drawn by them where the store is.")


def _traits(names: list[str], **own: bool) -> Traits:
    known = {name: name in names for name in Traits._fields}
    return Traits(**{**known, "untraced": False, **own})  # that is of the process which serves


_REFUSED = refusing("sampler.alpha and sampler.beta", "They are the store's: look at them, and set them, where it is.")


class RemoteSampler(OfServer, _base.DeclaredSampler):
    """A sampler that draws by the sampler of a server."""

    traits = Traits()

    def __init__(self, served: Served) -> None:
        # It consumes nothing: the server writes over rows that are used up.
        own = {"draws_uniformly": False, "can_rewind": False, "listens": False, "consumes": False}
        self.traits = _traits(served.traits_of_sampler, reads_natively=True, **own)
        self.draws_of_a_row = served.draws_of_a_row
        self._text = served.sampler
        self._storage: ServedStorage | None = None

    def bind(self, storage: SampledStorage) -> None:
        if not isinstance(storage, ServedStorage):
            raise refused("set_storage", "Make a buffer of its own for the storage.")
        self._storage = storage

    @cached_property
    def computed_keys(self) -> dict[Entry, bool]:  # type: ignore[override] # asked for with the first batch: there is a store then
        of = self._bound().served.computed_keys
        return {key[0] if len(key) == 1 else tuple(key): flat for key, flat in of}

    def _bound(self) -> ServedStorage:
        if self._storage is None:
            raise RuntimeError("sampler: expected a buffer that it draws for, got none. Use ReplayBuffer.connect.")
        return self._storage

    def sample_natively(
        self, storage: SampledStorage, key: Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """A batch of the server."""
        del numbered, shown  # all comes along
        assert isinstance(storage, ServedStorage)  # it was bound to one
        batch = storage.draw(key.value, n)
        if batch.last:
            self.ran_out = True
        return batch.columns, batch.rows, batch.info

    draw = refusing("sampler.draw", "Use the buffer's sample.")
    mark_update = refusing("mark_update", "Rows that are written get the default priority.")
    state_dict = refusing("state_dict", "Save with dumps(path).")
    prepare_load = refusing("load_state_dict", "Load where the store is.")
    alpha = property(_REFUSED, _REFUSED, doc="Of the server.")
    beta = property(_REFUSED, _REFUSED, doc="Of the server.")

    @property
    def consumer_version(self) -> int:
        """As of ``StalenessAwareSampler``: of all stores the largest. Raises ``TypeError``: the stores' samplers have none."""
        return self._bound().consumer_version()

    @consumer_version.setter
    def consumer_version(self, value: int) -> None:
        self._bound().consumer_version(staleness.check_version(value))

    def increment_consumer_version(self) -> None:
        """Come to the next version. Of two clients that do so at the same time one may have no effect."""
        self.consumer_version += 1

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:  # noqa: ARG002 - it has one
        return self._bound().can_sample(batch_size)

    def update_priority(self, index: object, priority: object, *, generation: torch.Tensor | None = None) -> None:
        """Send new priorities, and do not wait: what is drawn later is drawn by them.

        Raises as ``PrioritizedSampler.update_priority``. Nothing is sent then.
        """
        if not self.traits.takes_priorities:
            super().update_priority(index, priority, generation=generation)
            return
        storage, rows = self._bound(), prioritized.rows_of(index, "update_priority")
        storage.check_rows(rows)
        tickets = None if generation is None else prioritized.rows_of(generation, "update_priority: generation")
        if tickets is not None and len(tickets) != len(rows):
            raise RuntimeError(f"update_priority: generation: expected one per row, {len(rows)}, got {len(tickets)}.")
        storage.prioritize(rows, _priorities(priority, len(rows)), tickets)

    def check_priority(self, priority: object, n: int) -> None:
        _priorities(priority, n)


def _priorities(priority: object, n: int) -> torch.Tensor:
    """float64 ``[n]``, as a server takes it. Raises as ``PrioritizedSampler.update_priority``."""
    value = prioritized.as_priorities(priority, n, lambda many: many.reshape(n, -1).amax(1)).to(torch.float64)
    bad = value[~((value >= 0) & torch.isfinite(value))]
    if len(bad):
        raise PriorityError(f"update_priority: expected finite priorities of at least 0, got {float(bad[0])}.")
    return value


class RemoteWriter(OfServer, NativeWriter):
    """A writer that writes by the writer of a server."""

    traits = Traits()

    def __init__(self, served: Served) -> None:
        super().__init__()
        # The server refuses.
        self.traits = _traits(served.traits_of_writer, appends=True, places_natively=False, read_only=False)
        self._text = served.writer

    def register_storage(self, storage: object) -> None:
        if not isinstance(storage, ServedStorage):
            raise refused("set_storage", "Make a buffer of its own for the storage.")
        super().register_storage(storage)

    place = refusing("writer.place", "Use the buffer's add and extend.")
