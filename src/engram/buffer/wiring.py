"""The components of a buffer, and the paths that they allow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engram import samplers, storages, writers
from engram._support import checks, fork, overrides
from engram.around import Expander, SampleUnit
from engram.around.sequence import Named, UnitReader
from engram.buffer.output import Source
from engram.device.pinning import Pinning
from engram.errors import RowError
from engram.samplers._base import DeclaredSampler
from engram.store import blocks, lifetime, ragged
from engram.store.device.accelerator import Accelerator
from engram.store.limits import Gate, Limit, Rules, rules_of
from engram.store.store import Store
from engram.transforms import Compose
from engram.types import Declared, Sampler, Traits, Writer
from engram.writers._base import NativeWriter

#: Attributes of a wiring that a copy makes again.
_DERIVED = (
    " source of_sampler placer of_writer generator unit_reader own_sampler draws_uniformly draws_natively numbers "
    "sample_natively refills places_each hooked appends appends_natively write_of collates untraced "
)


class Wiring:
    """Storage, sampler, writer, transform, collate function, pinning and generator of one buffer, with their traits.

    Traits are read when a component is taken. :meth:`choose_paths` turns them into the paths that reading and writing take.
    """

    #: Whether this is a copy from another process, which still runs.
    is_apart = False

    def __init__(
        self,
        storage: storages.Storage,
        transform: Compose,
        *,
        collate_fn: Callable[[Any], object] | None,
        pinning: Pinning | None,
        generator: torch.Generator | None,
    ) -> None:
        self.storage: Any = storage
        self.transform = transform
        self.collate_fn = collate_fn
        self.pinning = pinning
        #: Drives every draw; None: torch's default one.
        self.generator = None if generator is None else checked_generator(generator)
        self.sampler: Any = None
        #: The sampler, with all that is asked of one.
        self.source: DeclaredSampler
        self.of_sampler = Traits()
        self.writer: Any = None
        #: The writer, with all that is asked of one.
        self.placer: NativeWriter
        self.of_writer = Traits()
        #: What a drawn row stands for; None: itself.
        self.unit: SampleUnit | None = None
        #: Draws and reads batches of the unit; None: they are read as they are drawn.
        self.unit_reader: UnitReader | None = None
        #: Where this buffer's calls wait for the limits of the store.
        self.gate = Gate()
        #: Rows that batches of each form with a budget of tokens had lately.
        self.rows_within = ragged.RowsWithin()
        #: What sets the draws of this process apart, as :func:`engram._support.fork.stream` says; None: not known yet.
        self.stream: int | None = None
        fork.registered(self, uses_others=True)

    # ---- random bits -----------------------------------------------------------------------------------------------------

    def own_stream(self) -> int:
        """What sets the draws of this process apart from here on."""
        if self.stream is not None:
            return self.stream
        stores = [one.memory for one in self.storage.storages]
        stream = fork.stream(*(0 if store is None else store.participant for store in stores))
        if None not in stores or not self.storage.traits.has_fields:
            self.stream = stream
        return stream

    def mix(self, key: blocks.Key) -> None:
        """Let a key that was drawn here be none that another process draws."""
        stream = self.own_stream()
        if stream:
            key.mix(stream)

    def begin_apart(self) -> None:
        """This is a copy in another process than the one that it was made in, and both go on: what this one draws is its own."""
        self.stream = None
        if self.of_sampler.has_epochs:  # an epoch of the sampler's own; one of the store goes on
            self.source.observe(None, None)

    after_fork = begin_apart

    # ---- taking components -----------------------------------------------------------------------------------------------

    def connect(self, sampler: Sampler, writer: Writer, batch_size: int | None) -> None:
        """Take the first sampler and the first writer. Raises as :meth:`take_sampler` and :meth:`take_writer`."""
        self.take_sampler(sampler, batch_size)
        self.take_writer(writer)
        self.choose_paths()

    def take_sampler(self, sampler: Sampler, batch_size: int | None) -> None:
        """Draw with this sampler from now on.

        Raises:
            ValueError: it has ``drop_last``, and no batch size is known. What the sampler raises to refuse the storage.
        """
        if self.storage.traits.is_remote:
            self.storage.admit(sampler, "set_sampler")
        source = samplers.declared(sampler)
        if source.drop_last and batch_size is None:
            raise ValueError(f"{type(sampler).__name__}: drop_last needs ReplayBuffer(batch_size=…).")
        if "placer" in vars(self):
            self._check_order(source, self.placer)
        reader = None if self.unit is None else self._reader_of(self.unit, source)
        source.bind(self.storage)
        self.sampler, self.source, self.of_sampler, self.unit_reader = sampler, source, source.traits, reader

    def _check_order(self, source: DeclaredSampler, placer: NativeWriter) -> None:
        """Raise ``ValueError``: the sampler needs rows in the order of time, and the writer chooses places."""
        if placer.keeps_order:
            return
        if source.traits.draws_windows or self.unit is not None or isinstance(source, Expander):
            raise ValueError(
                f"remover: expected a sampler of single rows, got {source!r}: the rows that a remover leaves are in no order of time. Use "
                "FifoRemover(), the default."
            )

    def _reader_of(self, unit: SampleUnit, source: DeclaredSampler) -> UnitReader | None:
        """What reads batches of the unit. Raises ``TypeError``: it does not go with the storage or the sampler."""
        if self.storage.traits.is_remote:
            return None  # the server does
        unit.check(self.storage, source)
        reader = unit.read_with(source, Named(self.user_index, self.rows_named))
        if reader is not None and isinstance(source, Expander):
            raise TypeError(
                f"sample_unit: {type(unit).__name__}: expected a sampler of rows, got the expander {type(source).__name__}. Put it "
                "around a SliceSampler(window=WindowSpec(…))."
            )
        return reader

    def check_storage(self, storage: storages.Storage) -> None:
        """Raise what sample unit, sampler or writer raise to refuse a storage that is to take the place of this one."""
        if self.unit is not None and not storage.traits.is_remote:
            self.unit.check(storage, self.source)
        self.source.bind(storage)
        self.placer.register_storage(storage)

    def moved(self) -> None:
        """The storage's rows lie elsewhere now, or the buffer is closed: forget what was kept of them."""
        self.source.moved()
        if self.unit_reader is not None:
            self.unit_reader.moved()

    def take_writer(self, writer: Writer) -> None:
        """Place rows with this writer from now on. Raises what the writer raises to refuse the storage."""
        if self.storage.traits.is_remote:
            self.storage.admit(writer, "set_writer")
        placer = writers.declared(writer)
        if not placer.keeps_order:
            self._check_order(self.source, placer)
        placer.register_storage(self.storage)
        self.writer, self.placer, self.of_writer = writer, placer, placer.traits

    def choose_paths(self) -> None:
        """Uniform draws and plain appends need nothing between them and the store: one native call each."""
        fields = self.storage.traits.has_fields
        #: Whether the store draws by itself, and whether nothing else needs to hear of it.
        self.draws_uniformly = fields and self.of_sampler.draws_uniformly and self.unit_reader is None
        self.draws_natively = self.draws_uniformly and not self.storage.gets
        #: Whether what is read says its tickets.
        self.numbers = self.of_writer.tracks_tickets
        #: What draws and reads in one native call; None: nothing does.
        self.sample_natively = self.source.sample_natively if fields and self.of_sampler.reads_natively else None
        writer = type(self.writer)
        #: Whether the user's writer says of each row by itself where it goes.
        self.places_each = overrides.overrides(writer, "get_insert_index")
        appends = self.of_writer.appends and not self.places_each
        #: Whether rows that are used up are written over first.
        self.refills = self.of_sampler.consumes and appends and self.storage.ndim == self.storage.lanes == 1
        #: Whether rows go behind the last one of their lane, without asking the writer.
        self.appends = fields and appends and not self.refills
        #: The sampler that the user has made, inside of expanders.
        self.own_sampler = self.sampler
        while isinstance(self.own_sampler, Expander):
            self.own_sampler = self.own_sampler.sampler
        of_rows = type(self.own_sampler)
        #: Whether writes go through methods of TorchRL's that components of the user's override.
        calls = (
            *((writer, name) for name in ("add", "extend")),
            *((of_rows, name) for name in ("mark_update", "add", "extend")),
        )
        self.hooked = self.storage.sets or any(overrides.overrides(*call) for call in calls)
        #: The same as appends, in one native call.
        self.appends_natively = self.appends and not self.hooked
        #: What places and writes in one native call; None: nothing does.
        natively = fields and self.of_writer.places_natively and not (self.hooked or self.places_each)
        self.write_of = self.placer.write_of if natively else None
        #: Whether a batch is not yet what was gathered.
        self.collates = not fields or self.collate_fn is not None
        #: Whether storage or writer ask functions under ``torch.compile`` not to look into calls of the buffer.
        self.untraced = self.storage.traits.untraced or self.of_writer.untraced

    def reads_around(self, memory: Store) -> bool:
        """Whether the sampler itself reads, or refuses, rows that are read apart from the draw."""
        there = self.of_sampler.draws_windows or self.source.draws_on_device
        return there or (memory.is_native and isinstance(self.source, Expander))

    def bound_sampler(self) -> DeclaredSampler:
        """The sampler, which may have served another storage meanwhile."""
        self.source.bind(self.storage)
        return self.source

    def has_listeners(self) -> bool:
        """Whether the sampler of any buffer on the storage does something with writes."""
        storage = self.storage
        return bool(storage.has_listeners) if len(storage.listeners) > 1 else self.of_sampler.listens

    # ---- limits ----------------------------------------------------------------------------------------------------------

    def limit(self, limits: tuple[object, ...]) -> None:
        """Limit how fast rows come and go. Raises as ``ReplayBuffer.limit``."""
        rules, storage = rules_of(limits), self.storage
        source = self.bound_sampler()
        groups = isinstance(source, samplers.PromptGroupSampler)
        rules.check(storage.max_size, source.draws_of_a_row, "limit", groups=groups)
        storage.limit(rules, source.drawable(storage) if rules.in_flight else 0)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits of the store now."""
        return self._rules().limits()

    def _rules(self) -> Rules:
        memory = self.storage.memory
        return (self.storage.pending_limit or Rules()) if memory is None else Rules(*memory.core.limit)

    def checked_sampler(self, given: object) -> Sampler:
        """The sampler to draw with from now on. Raises ``TypeError``: none. ``ValueError``: inserts would wait for ever with it."""
        sampler: Sampler = component(given, Sampler, "sampler", None)
        of, most = samplers.declared(sampler), self.storage.max_size
        groups = isinstance(of, samplers.PromptGroupSampler)
        self._rules().check(most, of.draws_of_a_row, "set_sampler", groups=groups)
        return sampler

    def can_sample(self, rows: int) -> bool:
        """Whether a draw of so many rows would succeed now, and be admitted."""
        return self.source.can_sample(self.storage, rows) and self.gate.admits(self.storage.memory, rows)

    def awaiting(self, source: Source) -> Source:
        """A source that waits for rows, where the sampler says that there may be none yet."""
        return _Awaiting(source, self) if self.of_sampler.awaits_rows else source

    def tell_emptied(self) -> None:
        """Call what samplers and writers of TorchRL's form reset themselves by."""
        for part in (self.own_sampler, self.writer):
            if overrides.overrides(type(part), "_empty"):
                part._empty()  # noqa: SLF001 - TorchRL's

    def check_editable(self, call: str) -> None:
        """Raise ``RuntimeError``: rows must not be changed."""
        if self.of_writer.read_only:
            raise RuntimeError(f"{call}: the buffer is read-only ({type(self.writer).__name__}).")
        self.storage.check_writable()
        self.storage.begin_change()

    def epoch_ended(self) -> bool:
        """Whether the batch drawn last ended an epoch. True once: the next one begins another."""
        ended: bool = self.of_sampler.has_epochs and self.source.ran_out
        if ended:
            self.source.ran_out = False
        return ended

    # ---- rows as users name them -----------------------------------------------------------------------------------------

    def user_index(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the user sees them: on the storage's device, with ``ndim > 1`` ``[n, ndim]`` coordinates."""
        storage = self.storage
        if storage.ndim > 1:
            rows = storages.coordinates(rows, storage.columns)
        device = storage.device  # on_device, without a call
        return rows if device is None or device.type == "cpu" else Accelerator(device).bring(rows)

    def on_device(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows where the storage is."""
        device = self.storage.device
        return rows if device is None or device.type == "cpu" else Accelerator(device).bring(rows)

    def no_index(self) -> torch.Tensor:
        """The index of no rows."""
        return torch.empty((0, self.storage.ndim), dtype=torch.int64, device="cpu")

    def rows_named(self, index: object) -> Any:
        """Rows that are to change, by an index in the users' form; with ``ndim > 1`` coordinates ``[B, ndim]`` or an ``ndim``-tuple of
        ``[B]``.
        """
        self.storage.begin_change()
        dims = self.storage.ndim
        if dims == 1:
            return index
        there = self.source.draws_on_device
        if isinstance(index, tuple):
            parts = [checks.as_numbers("index", one) for one in index]
            index = torch.stack(parts if there else [part.to("cpu") for part in parts], -1)
        if not isinstance(index, torch.Tensor) or index.shape[-1:] != (dims,):
            raise RuntimeError(f"expected an index [B, {dims}], or a tuple of {dims} tensors [B].")
        rows: torch.Tensor = self.storage.rows_at(index.to(index.device if there else "cpu", torch.int64))
        if there and not index.is_cpu:  # who takes them counts those outside
            return torch.where((rows < 0) & ~(index == -1).all(-1), -2, rows)
        outside = (rows < 0) & ~(index == -1).all(-1).to("cpu")
        if bool(outside.any()):
            raise RowError(f"expected an index inside the storage, got {index[outside.to(index.device)][0].tolist()}.")
        return rows

    # ---- copies ----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, object]:
        state = {name: value for name, value in self.__dict__.items() if f" {name} " not in _DERIVED}
        # An array goes by value. A tensor that is gone before the receiver looks takes its file descriptor along.
        state["process"] = lifetime.Process.this()
        state["generator_state"] = None if self.generator is None else self.generator.get_state().numpy()
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        generator_state: Any = state.pop("generator_state")
        process: Any = state.pop("process", lifetime.Process(0, 0))
        self.__dict__.update(state)
        self.of_sampler = Traits()
        self.is_apart = process != lifetime.Process.this() and process.runs()
        if process != lifetime.Process.this():
            self.stream = None
        fork.registered(self, uses_others=True)
        self.generator = None
        if generator_state is not None:
            self.generator = torch.Generator()
            self.generator.set_state(torch.from_numpy(generator_state))


def checked_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """The generator of draws. Raises ``TypeError``: it is none. ``ValueError``: it is not on the CPU."""
    if generator is not None:
        how = "Write torch.Generator().manual_seed(0)."
        checks.check_type("generator", generator, torch.Generator, "a torch.Generator", how)
        if generator.device.type != "cpu":
            raise ValueError(f"generator: expected one of the CPU, which draws rows, got one on {generator.device}.")
    return generator


def component(given: object, kind: Any, name: str, default: Callable[[], object] | None) -> Any:
    """The component that an argument names: one, a class of it or a callable that makes it; of None the default.

    Raises:
        TypeError: it is of another kind.
    """
    if given is None and default is not None:
        return default()
    of_storage = kind is storages.Storage
    given = storages.adapted(given) if of_storage else given
    makes = isinstance(given, type) or (callable(given) and not isinstance(given, kind))
    try:
        made = given() if makes else given  # type: ignore[operator]
    except TypeError as error:
        if isinstance(given, type) and issubclass(given, kind):
            raise TypeError(
                f"{name}: expected a {kind.__name__} or a class that needs no arguments, got the class {given.__name__}: {error}. "
                f"Write {name}={given.__name__}(…)."
            ) from error
        raise
    made = storages.adapted(made) if of_storage and makes else made
    if not isinstance(made, kind):
        got = f"one that made a {type(made).__name__}" if makes else type(given).__name__
        raise TypeError(
            f"{name}: expected a {kind.__name__} or a callable that makes one, got {got}.{_remedy(made, kind)}"
        )
    if isinstance(made, Declared) and not type(made).__module__.startswith("engram."):
        inside = {"sample": "that of the sampler inside"} if isinstance(made, Expander) else {}
        overrides.refuse_others(made, **({"_empty": "empty"} if of_storage else inside))
    return made


class _Awaiting:
    """Batches of a source, once there are rows for them."""

    def __init__(self, source: Source, wiring: Wiring) -> None:
        self._source, self._wiring = source, wiring

    def sample(self, batch_size: int, return_info: bool, timeout: float) -> object:
        """As the source. Raises as it does, ``NoSampleable`` after ``timeout`` seconds."""
        wiring = self._wiring
        draw = partial(self._source.sample, batch_size, return_info, timeout)
        least = batch_size or wiring.source.rows_of_unit  # 0: of any number
        return wiring.gate.gathered(draw, partial(wiring.can_sample, least), timeout)


def consuming_sampler(given: object, draws: int, call: str) -> Sampler:
    """The sampler of a new buffer whose rows are drawn so often, ``consume_after_n_samples``.

    Raises:
        TypeError: it is none, or ``draws`` is no int. ValueError: ``draws`` is below 1, or the sampler draws rows another number of times.
    """
    sampler: Sampler = component(given, Sampler, "sampler", samplers.RandomSampler)
    what = f"{call}: consume_after_n_samples"
    draws, source = checks.check_count(what, draws), samplers.declared(sampler)
    if source.traits.draws_uniformly:
        return samplers.ConsumingSampler(draws)
    if isinstance(source, samplers.PromptGroupSampler) and source.max_uses is None:
        source.use_up(draws, what)
    if source.draws_of_a_row != draws:
        raise ValueError(
            f"{what}: expected the default sampler, a ConsumingSampler(max_sample_count={draws}), or another one that uses rows up after "
            f"as many draws, got {sampler!r}. Leave it out, or pass FilteredSampler(…, max_uses={draws})."
        )
    return sampler


def _remedy(made: object, kind: type[object]) -> str:
    """What to do about a component that is another library's, or has some methods of its kind only."""
    theirs = next((cls.__name__ for cls in type(made).__mro__ if cls.__module__.partition(".")[0] == "torchrl"), None)
    if theirs is None:
        own = storages.METHODS if kind is storages.Storage else vars(kind)
        asked = [name for name in own if not name.startswith("_")]
        missing = [name for name in asked if not hasattr(made, name)]
        return f" It has no {', '.join(missing)}." if len(missing) < len(asked) else ""
    ours = next((theirs for family in (storages, samplers, writers) if hasattr(family, theirs)), None)
    advice = f"from engram import {ours}" if ours else "use one of engram's"
    return f" It is torchrl's {theirs}: {advice}."


def checked_size(size: object, call: str) -> int | None:
    """The size of a buffer as an int; None stays None. Raises as :func:`first_storage`."""
    try:
        return None if size is None else checks.check_count(f"{call}: size", size, "row")
    except TypeError as error:
        kinds = size.__mro__ if isinstance(size, type) else type(size).__mro__
        if any(cls.__name__ == "Storage" for cls in kinds):  # torchrl's, too
            raise TypeError(f"{error} Pass the storage by name: {call}(storage=…).") from None
        raise


def first_storage(
    given: object, size: int | None, sampler: Sampler, call: str, kind: Callable[[int], storages.Storage]
) -> storages.Storage:
    """The storage of a new buffer, by default of a ``kind``, of ``size`` rows or as many as the sampler can draw from.

    Raises:
        TypeError: it is none, or ``size`` is no int. ValueError: ``size`` is below 1, or not the storage's ``max_size``.
    """
    size = None if size is None else checked_size(size, call)
    if given is None:
        rows = size or samplers.declared(sampler).max_size or 1000
        storage: storages.Storage = kind(rows)
    else:
        storage = component(given, storages.Storage, "storage", None)
    if size is not None:
        storage.bound(size)
        if size not in (storage.max_size, storage.requested_size):
            raise ValueError(
                f"{call}: size: expected the storage's max_size {storage.max_size}, got {size}. Give one of them."
            )
    return storage
