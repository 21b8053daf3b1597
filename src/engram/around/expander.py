"""The base of the expanders: a sampler around a sampler."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, cast

from engram import samplers
from engram._support import fork
from engram._support.checks import check_count
from engram._support.field_paths import FieldPath, public
from engram.around.episodes import TrajectoryKeys
from engram.around.reading import MARK, Expansion, Reading
from engram.errors import NoSampleable
from engram.format.schema import Field
from engram.samplers._base import DeclaredSampler, SamplerAround
from engram.store import Key as DrawKey
from engram.store import Masses, Store
from engram.types import Draw, Extent, NativeBatch, Sampler, Shown, Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.around.windows import WindowSampler
    from engram.store.sampled import SampledStorage


class TrajectoryArguments(TypedDict, total=False):
    """Keywords of expanders that say which rows are one trajectory."""

    traj_key: object
    end_keys: object
    index: str | None
    end_when: str | None


class Expander(SamplerAround):
    """A sampler around a sampler. The inner one draws the rows; the expander adds what it computes from the steps
    around them.

    Rows, ``"index"``, ``"index_generation"`` and ``"priority_weight"`` are those of the inner sampler, so
    priorities are updated as without an expander. Attributes that an expander does not have are those of
    :attr:`sampler`, for reading and for setting: ``rb.sampler.beta = 0.5`` sets ``beta`` of the
    ``PrioritizedSampler`` inside. Expanders can wrap expanders, in any order.

    Steps belong together as for a :class:`SliceSampler`: to one trajectory in one lane (with ``ndim > 1``, in one
    column), never across the seam of a ring, where the newest row precedes the oldest. The rows around a drawn row
    are read together with it and compared with their tickets. If one of them is overwritten meanwhile, all are read
    or drawn again.

    Around a slice sampler, every step of every window is expanded as if it had been drawn alone. It may therefore
    include steps before or after the window, but never of another trajectory. Windows and their marks stay:
    ``("next", "truncated")`` is true at the last step of a window, and ``("next", "done")`` there and where the
    expanded entry is true.

    Computed entries are fields of the batch, nested by their keys, as if they were stored: ``batch["next"]["frame"]`` of
    dicts, ``batch["next", "frame"]`` of TensorDicts. Collate functions and transforms get them with the stored fields. They
    are in ``info`` as well, as they were computed: ``info["next", "frame"]``. Counts, discounts and flags are ``[B, 1]``; in
    batches of dicts whose rewards are ``[B]`` they are ``[B]``, too. Rows of named tuples, dataclasses and tensorclasses have
    no place for computed entries; there they are in ``info`` only. What tells rows and windows apart, such as ``"index"``,
    ``"priority_weight"`` and masks, is in the ``info`` of all buffers and in the batches of :class:`TensorDictReplayBuffer`.
    """

    @property
    def changed(self) -> tuple[FieldPath, ...]:
        """Fields of which each entry of a batch holds something made of several steps."""
        return ()

    @property
    def followed(self) -> tuple[FieldPath, ...]:
        """Fields whose next observation is read from the following row."""
        return ()

    #: Whether rows say where their final observation is.
    marks = False

    @property
    def chain(self) -> tuple[Expander, ...]:
        """The expanders inside this one, the innermost first, and this one."""
        return (*self._inside, self)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__.startswith("engram."):  # those of users are not there in every program that opens the store
            cls.known[cls.__name__] = cls

    def __init__(
        self,
        sampler: Sampler | type[Sampler],
        *,
        traj_key: object = None,
        end_keys: object = None,
        index: str | None = None,
        end_when: str | None = None,
    ) -> None:
        name = type(self).__name__
        inner = sampler() if isinstance(sampler, type) else sampler
        if not isinstance(inner, Sampler):
            raise TypeError(f"{name}: sampler: expected a sampler, got {type(sampler).__name__}.")
        keys = TrajectoryKeys.of(name, traj_key, end_keys, index, end_when)
        if isinstance(inner, Expander):
            theirs = inner.rules
            said = theirs._replace(end_when=theirs.end_when or "any")
            if any(mine not in (None, other) for mine, other in zip(keys, said, strict=True)):
                raise ValueError(
                    f"{name}: expected the trajectories of the {type(inner).__name__} inside, traj_key, end_keys, index, end_when = "
                    f"{tuple(theirs)}, got {tuple(keys)}. Give them to the innermost expander only."
                )
            keys = theirs
        elif (source := samplers.declared(inner)).traits.reads_windows:
            of_windows = cast("WindowSampler", source).rules
            if of_windows is None:
                raise TypeError(
                    f"{name}: sampler: expected windows of trajectories that the rows tell, got a {type(inner).__name__} with ends or "
                    "trajectories of its own. Store them as a field, and name it with traj_key or end_key."
                )
            if keys == TrajectoryKeys(None, None, None):
                keys = of_windows
        self._rules = keys
        self.sampler: Any = inner
        self._attach()
        for key in (key for other in self._inside for key in other.changed):
            if key in self.changed:
                raise TypeError(
                    f"{name}: expected a field as it is stored, but an expander inside has changed {public(key)!r}. Stack or sum it once."
                )

    def _attach(self) -> None:
        """Set what follows from the sampler inside, and forget the store."""
        inner = self.sampler
        self._source = samplers.declared(inner)
        #: The expanders inside, the innermost first, and the sampler that they are around.
        self._inside: tuple[Expander, ...] = (*inner.inside, inner) if isinstance(inner, Expander) else ()
        self._innermost: DeclaredSampler = inner.innermost if isinstance(inner, Expander) else self._source
        self._lock = fork.rlock()
        #: The innermost sampler, if it is one of windows that are read natively.
        self._windows = cast("WindowSampler", self._innermost) if self._innermost.traits.reads_windows else None
        self._expansion: Expansion | None = None
        vars(self)["computed_keys"] = {}  # those of the store that was read last

    @property
    def rules(self) -> TrajectoryKeys:
        """``traj_key``, ``end_keys``, ``index`` and ``end_when``: those of the innermost expander."""
        return self._rules

    @property
    def inside(self) -> tuple[Expander, ...]:
        """The expanders inside this one, the innermost first."""
        return self._inside

    @property
    def innermost(self) -> DeclaredSampler:
        """The innermost sampler, which is not an expander."""
        return self._innermost

    def change(self, reading: Reading) -> None:
        """Declare what batches contain.

        Raises:
            KeyError: a field is not stored.
            TypeError: a field is of the wrong kind.

        Args:
            reading: what a batch holds so far: the fields as they are stored, and what the expanders inside made of them.

        >>> import torch
        >>> from engram import LazyTensorStorage, NStep, RandomSampler, ReplayBuffer
        >>> sampler = NStep(RandomSampler(), n=2, gamma=0.5, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=2)
        >>> rows = {"episode": torch.zeros(3, dtype=torch.int64), "next": {"reward": torch.ones(3)}}
        >>> _ = rb.extend(rows)
        >>> set(rb.sample()["next"]["reward"].tolist()) <= {1.0, 1.5}  # as NStep declares: the sum over two steps
        True
        """
        raise NotImplementedError

    @property
    def reads_there(self) -> bool:
        """Whether rows on an accelerator can be read with what this expander adds."""
        return False

    @property
    def _followed(self) -> tuple[FieldPath, ...]:
        """Of all expanders here."""
        return tuple(key for expander in self.chain for key in expander.followed)

    def stored(self, fields: Sequence[Field]) -> tuple[Field, ...]:
        """The fields of rows as they are stored, of rows as they are written."""
        gone = {("next", *key) for key in self._followed}
        kept = tuple(field for field in fields if field.key not in gone)
        marked = any(expander.marks for expander in self.chain)
        return kept if not marked else (*(field for field in kept if field.key != MARK), Field(MARK, "int64", (2,)))

    def ready_bytes(self, stored: Sequence[Field]) -> int:
        """Bytes of a row that holds what batches have: all frames of its stacks, and its next observations.

        Raises: as drawing does, if an expander does not find its fields among those that are stored.
        """
        reading = self._reading(stored)
        nexts = [] if reading.following is None else reading.following.columns(reading.columns)[:-1]
        read = [column for column in (*reading.columns, *nexts) if reading.fields[column.field].key != MARK]
        return sum(column.frames * reading.fields[column.field].row_bytes for column in read)

    def beside_bytes(self, stored: Sequence[Field]) -> int:
        """Bytes that this expander keeps beside rows of these fields.

        >>> from engram import NStep, RandomSampler
        >>> NStep(RandomSampler(), 3, 0.99).beside_bytes([])
        0
        """
        return 0

    # ---- the sampler inside ------------------------------------------------------------------------------------------

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of :attr:`sampler`, but rows are read with what is around them."""
        return self._source.traits._replace(draws_uniformly=False, reads_natively=True)

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:
        """Asked of :attr:`sampler`. Of rows whose next observations are read from following ones, one is drawn to see."""
        source = self._innermost
        if not self._followed or not len(storage):
            return source.can_sample(storage, batch_size)
        assert storage.memory is not None
        if not storage.memory.is_native and self.draws_on_device:
            return self._can_sample_there(storage.memory) and source.can_sample(storage, batch_size)
        if self._windows is not None:
            finished = self._expansion_of(storage.memory).finished
            return self._windows.can_sample(storage, batch_size, finished=finished)
        try:
            if source.can_sample(storage, batch_size):
                self.sample_natively(storage, DrawKey.of(0), 1)
                return True
        except NoSampleable:
            pass
        return False

    def masses(self, storage: SampledStorage) -> Masses | None:
        """Those of :attr:`sampler`; None where next observations are read from following rows, which some rows have not yet."""
        return None if self._followed else self._source.masses(storage)

    def moved(self) -> None:
        """The storage's rows lie elsewhere now, with their indexes."""
        self._expansion = None
        self._source.moved()

    def bind(self, storage: SampledStorage) -> None:
        """Meet the storage whose rows are drawn.

        Raises:
            RuntimeError: its rows are no fields, or not on the CPU.
            TypeError: next frames of a field are stacked that are not stored, but its frames are not.

        >>> from engram import FrameStack, ListStorage, RandomSampler
        >>> FrameStack(RandomSampler(), 4, None, ["frame"]).bind(ListStorage(10))
        Traceback (most recent call last):
        RuntimeError: FrameStack: expected a tensor storage on the CPU, ...
        """
        self._check_next_frames()
        self._check_storage(storage)
        there = storage.device is not None and storage.device.type != "cpu"
        if not storage.traits.has_fields or (there and not self.reads_there):
            where = f"a {type(storage).__name__}" + (f" on {storage.device}" if storage.device is not None else "")
            raise RuntimeError(self._elsewhere(where))
        self._source.bind(storage)

    def _check_storage(self, storage: SampledStorage) -> None:
        """Raise for a storage that this expander does not take."""

    def _check_next_frames(self) -> None:
        for stacking in self.chain:
            for following in self.chain:
                for key in following.followed:
                    if ("next", *key) in stacking.changed and key not in stacking.changed:
                        raise TypeError(
                            f"{type(stacking).__name__}: in_keys: expected {public(key)!r} beside {public(('next', *key))!r}, whose frames "
                            f"{type(following).__name__} takes from the rows of {public(key)!r}: a batch would hold a single frame now and "
                            "several next. Name both."
                        )

    def _elsewhere(self, where: str) -> str:
        return (
            f"{type(self).__name__}: expected a tensor storage on the CPU, whose rows have neighbours that can be read, got {where}. "
            'Use LazyTensorStorage or LazyMemmapStorage with device="cpu", and a DeviceLoader for batches on an accelerator.'
        )

    # ---- the store ---------------------------------------------------------------------------------------------------

    def _expansion_of(self, memory: Store) -> Expansion:
        """The read of a store's rows. It is replaced as a whole if another store was read last: other threads may be drawing."""
        memory.core.find_fields()
        found = self._expansion
        if found is None or found.memory is not memory or found.stored != memory.schema.fields:
            with self._lock:
                found = self._expansion  # which another thread may have made meanwhile
                if found is None or found.memory is not memory or found.stored != memory.schema.fields:
                    found = self._expansion = self._new_expansion(memory)
        return found

    def _new_expansion(self, memory: Store) -> Expansion:
        name = type(self).__name__
        if not memory.is_native:  # device="auto", and the first row was elsewhere
            raise RuntimeError(self._elsewhere(f"rows of {memory.place}"))
        Expansion.check_rows(memory, name)
        expansion = Expansion(memory, self._reading(memory.schema.fields), self._rules, name)
        vars(self)["computed_keys"] = expansion.computed
        return expansion

    def _reading(self, fields: Sequence[Field]) -> Reading:
        reading = Reading(fields, self._followed)
        for expander in self.chain:
            expander.change(reading)
        if reading.relabelling is not None:
            reading.relabelling.check(reading)
        return reading

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        """Refused: rows alone are not what an expander is for. Raises ``RuntimeError``."""
        raise RuntimeError(self._elsewhere("a storage of other rows"))

    def sample_natively(
        self, storage: SampledStorage, key: DrawKey, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """Draw, and read the rows with what is around them in one native call: ``(columns, rows, info)``.

        Raises:
            NoSampleable: nothing to draw.
            WriterStalled: a row or a step around it moved at every try.
            KeyError, TypeError, RuntimeError: the rows have not the fields that are needed.
        """
        source, memory = self._innermost, storage.memory
        assert memory is not None  # the buffer asks only then
        if not memory.is_native and self.draws_on_device:
            return self._sample_there(storage, key, n, numbered=numbered)
        expansion = self._expansion_of(memory)
        relabelling, windows = expansion.relabelling, self._windows
        goals = None if relabelling is None else relabelling.goals(memory, expansion.table, key.value)
        if windows is not None:
            finished = expansion.finished
            read = expansion.read_windows if goals is None else partial(expansion.read_windows, goals=goals)
            tensors, rows, info = windows.sample_apart(
                storage, key, n, read, numbered=numbered, finished=finished, ended=goals is not None
            )
            columns = expansion.fields(tensors, info)
            if goals is not None:
                goals.apply(storage, columns, info, expansion.computed, windows.truncated_key)
            return windows.laid_out(columns, rows, info)
        if goals is not None and expansion.plain and source.traits.draws_uniformly:
            *columns, rows, writes = memory.sample_uniform(key, n, with_rows=True, with_numbers=True)
            if not goals.read(rows, writes, []):  # else as below
                info = {"index_generation": writes} if numbered else {}
                goals.apply(storage, columns, info, {})
                return columns, rows, info
        extent = storage.extent()
        samplers.check_drawable(extent.size)
        source.bind(storage)
        draw = source.draw(extent, n, key.value)
        tensors, rows, info = expansion.read_drawn(storage, source, draw, key.value, goals)
        memory.count_sampled(rows)
        tickets = tensors.pop()
        if numbered or draw.tickets is not None:
            info["index_generation"] = memory.writes_of(rows, tickets)
        columns = expansion.fields(tensors, info)
        if goals is not None:
            goals.apply(storage, columns, info, expansion.computed)
        return columns, rows, info

    def _sample_there(self, storage: SampledStorage, key: DrawKey, n: int, *, numbered: bool) -> NativeBatch:
        """As :meth:`sample_natively`, of rows on an accelerator. Where no row can be drawn, ``rb.stats()`` raises."""
        raise NotImplementedError

    def _can_sample_there(self, memory: Store) -> bool:
        """Whether some row on an accelerator can be read with what this expander adds."""
        raise NotImplementedError

    # ---- the rest of a sampler ---------------------------------------------------------------------------------------

    def config(self) -> dict[str, object]:
        """The constructor's arguments, as plain values: what a store notes to make the expander again.

        >>> from engram import NStep, RandomSampler
        >>> config = NStep(RandomSampler(), n=3, gamma=0.99).config()
        >>> config["n"], config["sampler"]["type"]
        (3, 'RandomSampler')
        """
        return {**self._inner_config(), **self._rules.config(), **super().config()}

    def __getstate__(self) -> dict[str, object]:
        derived = ("_source", "_inside", "_innermost", "_windows", "_lock", "_expansion", "_there", "computed_keys")
        return {name: value for name, value in vars(self).items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._rules = TrajectoryKeys(*self._rules)  # a plain tuple, if pickled by an earlier version
        self._attach()


def check_steps(what: str, value: object) -> int:
    """A number of steps. Raises ``TypeError``, ``ValueError``: it is none, below 1, or larger than the native core takes."""
    steps = check_count(what, value)
    if steps >= 1 << 31:
        raise ValueError(f"{what}: expected less than 2 ** 31, got {steps}.")
    return steps
