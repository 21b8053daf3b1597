"""The state of a buffer, saved and loaded: as a dict, as a folder, as the shard of a checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from engram._support import checks, fork, words
from engram._support.progress import OnProgress, Work
from engram._support.state import Loads, check_keys, integer, prepare_load, read_from, saved, tensor_in, typed
from engram.buffer import configuration, other_sampler, read_path
from engram.buffer.lanes import Lanes
from engram.buffer.prefetching import Prefetching, prepare_batches
from engram.buffer.recipe import Recipe
from engram.buffer.wiring import Wiring
from engram.errors import IncompatibleCheckpoint
from engram.format import layout
from engram.reshard import driver, plan
from engram.reshard.driver import Reshard, format_counts, seed_of
from engram.samplers._base import DeclaredSampler
from engram.saved import checkpointers, disk, part_reader
from engram.saved import parts as saved_parts
from engram.saved.checkpoints import Checkpoint, finish_dump, replacing, standing
from engram.saved.snapshot import Snapshot, StoragePreparation, StorageSnapshot
from engram.storages import Storage, announcing
from engram.store import priorities
from engram.types import Commit, Form, Ranking, StorageLoad, StrPath

State = dict[str, Any]

#: Entries of a state that lie in the part of a checkpoint that is the buffer's own.
_IN_BUFFER = ("batch_size", "lane", "iterating", "consume_after_n_samples")
#: Entries of a state.
_COMPONENTS = ("_storage", "_sampler", "_writer", "_transforms")
_ENTRIES = (*_COMPONENTS, *(f"_{name}" for name in _IN_BUFFER), "_rng", "_default_rng", "_prefetch_state")


class Saving:
    """Saves a buffer and loads it. It owns no state: it is given the parts that do.

    Args:
        wiring: the components.
        settings: batch size and iteration.
        lanes: the lane that was named.
        reading: says whether batches name their rows.
        prefetching: the prefetched batches; None: there are none.
        recipe: noted in the directory of a store.
    """

    def __init__(
        self,
        wiring: Wiring,
        settings: configuration.Settings,
        lanes: Lanes,
        reading: read_path.ReadPath,
        prefetching: Prefetching | None,
        recipe: Recipe,
    ) -> None:
        self._wiring, self._settings, self._lanes = wiring, settings, lanes
        self._reading, self._prefetching, self._recipe = reading, prefetching, recipe

    # ---- saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """As :meth:`ReplayBuffer.state_dict`."""
        self._settle()
        storage = self._wiring.storage
        with storage.paused:
            state = self._state_but_rows()
            return {"_storage": storage.state_dict(without=self._own_indexes()), **state}

    def dumps(self, path: StrPath, prefetch: str, progress: OnProgress | None) -> None:
        """As :meth:`ReplayBuffer.dumps`."""
        checks.check_path("dumps: path", path)
        begun = self.prepare_dump(prefetch)
        with replacing(Path(path)) as folder, disk.batched_fsync():
            begun.prepare()
            with begun.paused:
                dump = begun.take()
                if dump.rows.needs_pause:
                    dump.save(folder, progress)
            if not dump.rows.needs_pause:
                dump.save(folder, progress)

    def prepare_dump(self, prefetch: str) -> DumpPreparation:
        """Begin what :meth:`dumps` does. Raises ``ValueError``: ``prefetch`` is neither ``"save"`` nor ``"drop"``."""
        checks.check_choice("dumps: prefetch", prefetch, ("save", "drop"))
        self._settle()
        parts = partial(self._parts, (), drop_prefetched=prefetch == "drop")
        return DumpPreparation(self._wiring.storage, self._own_indexes, parts)

    def snapshot(self, *, prefetched: Literal["save", "drop"] = "save") -> Snapshot:
        """As :meth:`~engram.checkpoint.save.Checkpointable.snapshot`."""
        storage, drop = self._wiring.storage, prefetched == "drop"
        self._parts(None, drop_prefetched=drop)  # raises what cannot be saved, and reads batches, before writers wait
        prepared = storage.prepare_snapshot(whole=False)
        with storage.paused:
            began = time.perf_counter()
            rows = prepared.take()
            parts = self._parts(rows.state["priorities"], drop_prefetched=drop)
            return Snapshot(rows, parts, self.form, time.perf_counter() - began)

    @property
    def form(self) -> Form:
        """How the buffer keeps its rows, as far as a checkpoint must know."""
        form: Form = self._wiring.storage.form
        return form._replace(ranking=self._wiring.placer.ranking)

    def _settle(self) -> None:
        """Read prefetched batches, so that no writer waits for it; and transforms may be writers."""
        self._sampler()
        if self._prefetching is not None:
            self._prefetching.wait()

    def _sampler(self) -> DeclaredSampler:
        """The sampler, which may have served another storage meanwhile."""
        if self._prefetching is not None:
            self._prefetching.materialize()
        return self._wiring.bound_sampler()

    def _own_indexes(self) -> tuple[tuple[str, str], ...]:
        """Names and kinds of the storage's indexes that the sampler's state has."""
        return self._sampler().own_indexes

    def _state_but_rows(self, *, with_sampler: bool = True, drop_prefetched: bool = False) -> State:
        """All of :meth:`state_dict` but the storage's. ``drop_prefetched``: as if prefetched batches had never been drawn."""
        wiring, batches, before = self._wiring, None, None
        if self._prefetching is not None:  # first: it draws what was asked for
            batches, before = self._prefetching.saved(drop=drop_prefetched)
        sampler = saved(self._sampler(), "_sampler") if with_sampler else {}
        return {
            "_sampler": sampler if before is None else before,
            "_writer": saved(wiring.writer, "_writer"),
            "_transforms": wiring.transform.state_dict(),
            "_batch_size": self._settings.batch_size,
            "_lane": self._lanes.saved,
            "_iterating": self._settings.iterating,
            "_consume_after_n_samples": wiring.source.draws_of_a_row,
            **saved_rng(wiring),
            "_prefetch_state": batches,
        }

    def _parts(self, noted: Collection[str] | None, *, drop_prefetched: bool) -> saved_parts.Parts:
        """All of the state but the storage's, as the parts of a checkpoint.

        ``noted``: names of priorities that the storage's part has, None: all. If one of those is all of the sampler's state, its
        part says which.
        """
        own = self._own_indexes()
        # The name of the priorities that are all of the sampler's state; None: it has another one.
        index = own[0][0] if [kind for _, kind in own] == [priorities.PriorityIndex.kind] else None
        of_sampler: State | None = None
        if index is not None:
            known = noted is None or index in noted
            of_sampler = {saved_parts.INDEX: index} if known else self._wiring.storage.priorities_in_use(index)
        state = self._state_but_rows(with_sampler=of_sampler is None, drop_prefetched=drop_prefetched)
        functions = self._wiring.transform.functions
        states = {
            "sampler": state["_sampler"] if of_sampler is None else of_sampler,
            "writer": state["_writer"],
            "transforms": state["_transforms"] | ({saved_parts.FUNCTIONS: functions} if functions else {}),
            "buffer": {name: state[f"_{name}"] for name in _IN_BUFFER},
            "rng": {"generator": state["_rng"], "default": state["_default_rng"]},
            "prefetch": {"batches": state["_prefetch_state"]},
        }
        return saved_parts.Parts(states, self._kinds())

    def _kinds(self) -> dict[str, str]:
        """The class of each part."""
        wiring = self._wiring
        components = {"sampler": wiring.sampler, "writer": wiring.writer, "transforms": wiring.transform}
        kinds = {part: type(component).__name__ for part, component in components.items()}
        return {**kinds, "buffer": self._settings.kind, "rng": "Generator", "prefetch": "Prefetcher"}

    # ---- loading ---------------------------------------------------------------------------------------------------------

    def loads(self, path: StrPath, *, convert: bool, default_rng: bool, progress: OnProgress | None) -> None:
        """As :meth:`ReplayBuffer.loads`."""
        checks.check_path("loads: path", path)
        with Work("loading", 0, progress) as work:
            self._load(path, work, convert=convert, default_rng=default_rng)

    def _load(self, path: StrPath, work: Work, *, convert: bool, default_rng: bool) -> None:
        folder = standing(Path(path))
        foreign = checkpointers.foreign_format(folder)
        if foreign is not None:
            if convert:
                raise IncompatibleCheckpoint(
                    f"{path}: a dump of {foreign.library}'s cannot be converted. Load it into a buffer of its size."
                )
            dump = foreign.read(folder, ndim=self._wiring.storage.ndim, max_bytes=most_bytes())
            self.prepare_foreign(dump).commit()
            return
        if layout.is_series(folder):
            raise IncompatibleCheckpoint(
                f"{path}: expected a dump or one checkpoint, got a folder of them. Checkpointer({str(path)!r}, rb).restore() loads the "
                "newest of it; loads takes the path of one."
            )
        if (folder / layout.FOLDER / layout.STORE).exists():
            raise IncompatibleCheckpoint(
                f"loads: {path}: expected a dump or one checkpoint, got a store. ReplayBuffer.open({str(path)!r}) goes on with it."
            )
        with Checkpoint(folder) as checkpoint:
            if checkpoint.manifest.world > 1:
                raise IncompatibleCheckpoint(
                    f"loads: {path}: expected what one process saved, got a checkpoint of {checkpoint.manifest.world} ranks. "
                    f"Checkpointer({str(folder.parent)!r}, buffer).restore(name={folder.name!r}) takes all of it."
                )
            checkpoint.progress, storage = work, self._wiring.storage
            twice = storage.form.takes_rows and len(storage) > 0  # rows are checked before those here are given up
            work.total = checkpoint.shard(0).totals.bytes_logical * (1 + twice)
            load = self.prepare_load(checkpoint, 0, default_rng=default_rng, convert=convert, resize=convert)
            load.commit()
        if load.converted:
            announcing.announce(f"{path}: {load.converted}.")

    def prepare_state(self, state: Any, *, default_rng: bool) -> PreparedLoad:
        """Check a :meth:`state_dict`."""
        kind = self._settings.kind
        foreign = checkpointers.foreign_state(state, self._wiring.storage.ndim)
        if foreign is not None:
            return self.prepare_foreign(foreign)
        check_keys(state, _ENTRIES, kind)
        return self._prepare(state, self._wiring.storage.prepare_load(state["_storage"]), default_rng=default_rng)

    def prepare_load(
        self,
        checkpoint: Checkpoint,
        rank: int,
        *,
        default_rng: bool = False,
        close_open: bool = False,
        convert: bool = False,
        resize: bool = False,
        prefetched: bool = True,
    ) -> PreparedLoad:
        """As :meth:`~engram.checkpoint.save.Checkpointable.prepare_load`.

        Args:
            checkpoint: open until the load is committed.
            rank: whose shard.
            default_rng: set torch's default generator, too.
            close_open: trajectories that go on end where they are.
            convert: to the sampler here.
            resize: to the capacity and lanes here.
            prefetched: False: batches that were saved with it are left out.

        Raises: as :meth:`ReplayBuffer.loads`. Nothing is changed.
        """
        where = str(checkpoint.shard_folder(rank))
        with read_from(where):
            reader = saved_parts.open_storage(checkpoint, rank)
            without = (saved_parts.STORAGE,) if prefetched else (saved_parts.STORAGE, "prefetch")
            found = saved_parts.read_parts(checkpoint, rank, without=without)
            states = other_sampler.checked_states(found, checkpoint.shard_folder(rank), self._kinds(), convert=convert)
            own = self._of_the_sampler(states) if convert else []
            if saved_parts.INDEX in states["sampler"]:
                states["sampler"] = saved_parts.index_state(reader, states["sampler"])
            if resize and reader.type != checkpointers.HOOKED and not checkpointers.is_layout(reader):
                rows = self._prepare_conversion(reader, states)
            else:
                rows = checkpointers.prepare_dumped(self._wiring.storage, reader, close_open=close_open, without=own)
            made = self._converted(states, found, where, convert=convert)
            return self._prepare(self._state_of_parts(made.states, where), rows, made, default_rng=default_rng)

    def prepare_placed(
        self, checkpoint: Checkpoint, made: Reshard, rank: int, *, env_offset: int, default_rng: bool, convert: bool
    ) -> PreparedLoad:
        """As :meth:`~engram.checkpoint.save.Checkpointable.prepare_placed`.

        What is not of rows is that of one rank. Passes over the rows and generators begin again, and nothing is prefetched.

        Args:
            checkpoint: open until the load is committed.
            made: the plan, of shards of that checkpoint.
            rank: of this buffer.
            env_offset: added to the lane in fields whose role is ``env_id``.
            default_rng: seed torch's default generator, too.
            convert: to the sampler here.

        Raises: as :meth:`ReplayBuffer.loads`. Nothing is changed.
        """
        placed = made.rows(rank, env_offset)
        where = str(checkpoint.shard_folder(made.leader))
        with read_from(where):
            seed = seed_of(checkpoint, len(made.targets), rank)
            generator = torch.Generator().manual_seed(seed).get_state()
            shard = checkpoint.shard_folder(made.leader)
            found = made.leader_parts(checkpoint)
            read = other_sampler.checked_states(found, shard, self._kinds(), convert=convert)
            self._state_of_parts(read, where)  # they have what is replaced
            states = {part: saved_parts.reset(part, state, seed, generator) for part, state in read.items()}
            own = self._of_the_sampler(states) if convert else []
            priorities_of = placed.state["priorities"]
            others = {name: of for name, of in priorities_of.items() if name not in own}
            rows = self._wiring.storage.prepare_rows({**placed.state, "priorities": others}, placed.source)
            if saved_parts.INDEX in states["sampler"]:
                states["sampler"] = priorities_of[states["sampler"][saved_parts.INDEX]]
            conversion = self._converted(states, found, where, convert=convert)
            state = self._state_of_parts(conversion.states, where)
            state["_rng"] = None if self._wiring.generator is None else [generator, "cpu"]
            state["_lane"] = self._lanes.saved  # that of another rank says nothing here
            return self._prepare(state, rows, conversion, default_rng=default_rng)

    def _of_the_sampler(self, states: dict[str, State]) -> list[str]:
        """Names of priorities that the sampler loads, with the parameters that it has here, and not the rows."""
        named = states["sampler"].get(saved_parts.INDEX)
        return [name for name, kind in self._own_indexes() if (name, kind) == (named, priorities.PriorityIndex.kind)]

    def _converted(
        self, states: dict[str, State], found: Mapping[str, saved_parts.SavedPart], where: str, *, convert: bool
    ) -> other_sampler.Conversion:
        """What is loaded of states, whose sampler may be another one if ``convert``."""
        if not convert:
            other_sampler.check_priorities(states["sampler"], self._kinds(), self._wiring, where)
            return other_sampler.Conversion(states)
        if self._prefetching is not None:
            self._prefetching.materialize()
        return other_sampler.converted(states, found, self._kinds(), self._wiring, self._settings.batch_size, where)

    def prepare_foreign(self, dump: checkpointers.ForeignDump) -> PreparedLoad:
        """Check a dump of another library's. What it does not say stays as it is here."""
        synthesised = ("index", "index_generation") if self._reading.shows_rows else ()
        rows = dump.prepare(self._wiring.storage, (*self._settings.ignored, *synthesised))
        state = self._state_but_rows()
        sampler = state["_sampler"] = saved_parts.reset_epoch(state["_sampler"], 0)
        if dump.priorities is not None and sampler.keys() >= {"alpha", "eps", "highest"}:
            leaves = dump.priorities.leaves
            sampler |= {
                "alpha": dump.priorities.alpha,
                "beta": dump.priorities.beta,
                "eps": dump.priorities.eps,
                "highest": dump.priorities.max_priority or 0.0,
                "leaves": torch.where(leaves == 0, -0.0, leaves),
            }
        elif "leaves" in sampler:
            sampler["leaves"] = torch.zeros(0, dtype=torch.float64, device="cpu")
        if dump.rng_state is not None and self._wiring.generator is not None:
            state["_rng"] = [dump.rng_state, "cpu"]
        state["_batch_size"] = self._settings.batch_size or dump.batch_size
        state["_prefetch_state"] = None
        return self._prepare(state, rows, default_rng=False)

    def _prepare_conversion(self, reader: part_reader.PartReader, states: dict[str, State]) -> StorageLoad:
        """Check what is to be converted for the storage. Changes the states of the other parts."""
        storage, sampler = self._wiring.storage, states["sampler"]
        shard = plan.open_shard(reader, held=True)
        own = [
            name for name, kind in self._own_indexes() if kind == priorities.PriorityIndex.kind and "leaves" in sampler
        ]
        for name in own:
            here: State = self._wiring.source.state_dict()
            shard.head["priorities"][name] = priorities.with_parameters(sampler, here["alpha"], here["eps"])
        schema = storage.schema_here(shard.head["schema"], str(reader.folder))
        converted = driver.convert(shard, schema, storage.ndim, self.form.ranking)
        dropped = [f"{format_counts(it)} as {reason}" for reason, it in converted.dropped.items() if it["steps"]]
        if dropped:
            words.warn(
                f"loads: {reader.folder.parent}: left out: {', '.join(dropped)}. The "
                f"{'best' if isinstance(self.form.ranking, Ranking) else 'newest'} were taken: a larger storage takes more."
            )
        if len(storage):
            saved_parts.check_blocks(reader)
        state, source = converted.rows
        others = {name: known for name, known in state["priorities"].items() if name not in own}
        load: StorageLoad = storage.prepare_rows({**state, "priorities": others}, source)
        for name in own:
            states["sampler"] = state["priorities"][name]
        states["sampler"] = saved_parts.reset_epoch(states["sampler"], 0)
        states["prefetch"] = {"batches": None}
        if states["buffer"].get("lane") not in [[lane] for lane in range(storage.lanes)]:
            states["buffer"]["lane"] = 0
        return load

    def _state_of_parts(self, states: dict[str, State], where: str) -> State:
        """All but the storage's, as :meth:`state_dict` has it."""
        for part, names in (("buffer", _IN_BUFFER), ("rng", ("generator", "default")), ("prefetch", ("batches",))):
            check_keys(states[part], names, f"{where}: {part}")
        transforms = {name: of for name, of in states["transforms"].items() if name != saved_parts.FUNCTIONS}
        functions = typed(
            {saved_parts.FUNCTIONS: [], **states["transforms"]}, saved_parts.FUNCTIONS, list, f"{where}: transforms"
        )
        ours = set(self._wiring.transform.state_dict())
        if set(transforms) != ours:
            raise IncompatibleCheckpoint(
                f"{where}: transforms: expected the states {sorted(ours)}, got {sorted(transforms)}."
            )
        here = self._wiring.transform.functions
        if len(here) < len(functions):
            words.warn(
                f"{where}: saved with the transforms {', '.join(map(str, functions))}, which are code and not in it, and loaded into a "
                f"buffer with {', '.join(here) or 'none'}. Make the buffer with them: transform=…, or append_transform."
            )
        return {
            "_sampler": states["sampler"],
            "_writer": states["writer"],
            "_transforms": transforms,
            **{f"_{name}": states["buffer"][name] for name in _IN_BUFFER},
            "_rng": states["rng"]["generator"],
            "_default_rng": states["rng"]["default"],
            "_prefetch_state": states["prefetch"]["batches"],
        }

    def _prepare(
        self, state: State, rows: StorageLoad, made: other_sampler.Conversion | None = None, *, default_rng: bool
    ) -> PreparedLoad:
        """Check all but the storage's state, which ``rows`` loads. ``made``: what the state of the sampler is."""
        wiring, kind = self._wiring, self._settings.kind
        if state["_batch_size"] is None and wiring.source.drop_last:
            raise IncompatibleCheckpoint(f"{kind}: _batch_size: expected an int, as drop_last needs one, got None.")
        own = OwnLoad.checked(state, self._settings, default_rng=default_rng)
        lane = self._lanes.checked_saved(state, kind)
        typed(state, "_consume_after_n_samples", (int, type(None)), kind)  # the sampler says how many, too
        batches = prepare_batches(state["_prefetch_state"], self._prefetching, f"{kind}: _prefetch_state")
        sampler = self._sampler()
        try:
            loaded = made is None or made.loads_sampler
            loads = [sampler.prepare_load(state["_sampler"], rows.capacity)] if loaded else []
        except KeyError as error:
            raise KeyError(f"{error.args[0]}{other_sampler.INSTEAD if made is None else ''}") from error
        writer = prepare_load(wiring.writer, state["_writer"], f"{kind}: _writer")
        transforms = prepare_load(wiring.transform, state["_transforms"], f"{kind}: _transforms")
        components = Loads([*loads, writer, transforms, batches])
        return PreparedLoad(self._take, rows, components, own, lane, "" if made is None else made.converted)

    def _take(self, load: PreparedLoad) -> None:
        storage = self._wiring.storage
        storage.begin_change()
        if self._prefetching is not None:
            self._prefetching.discard("load", keys=False)
        load.rows.allocate()
        # A write in between would be of rows that the sampler's state does not know.
        with storage.placing, storage.paused:  # a writer that has placed rows is about to write them
            load.rows.commit()
            storage.notify(None, None)
            self._wiring.bound_sampler()  # to what was allocated just now
            load.components.commit()
            load.own.take(self._wiring, self._settings)
            self._lanes.take(load.lane)
        if not self._recipe.noted:
            self._recipe.note_if_possible()


class DumpPreparation:
    """A dump of a buffer, prepared before writers wait for it."""

    def __init__(
        self, storage: Storage, own: Callable[[], checkpointers.IndexNames], parts: Callable[[], saved_parts.Parts]
    ) -> None:
        self._storage, self._own, self._parts = storage, own, parts
        self._prepared: StoragePreparation | None = None

    def prepare(self) -> None:
        """Gather what writers need not wait for."""
        own = self._own()
        laid_out = self._storage.checkpointer.preparation(self._storage, own)
        self._prepared = laid_out or self._storage.prepare_snapshot(without=own)  # type: ignore[assignment] # or a layout

    @property
    def paused(self) -> AbstractContextManager[object]:
        """No process writes inside."""
        return self._storage.paused

    def take(self) -> Dump:
        """What is saved, as it is now. Call it while writers are :attr:`paused`, after :meth:`prepare`."""
        assert self._prepared is not None
        return Dump(self._prepared.take(), self._parts())


class Dump(NamedTuple):
    """All that a dump has of a buffer, at one moment."""

    rows: StorageSnapshot
    parts: saved_parts.Parts

    def save(self, folder: Path, progress: OnProgress | None = None) -> None:
        """Write it into a new folder. ``progress``, and what it raises: as :meth:`ReplayBuffer.dumps`."""
        with Work("saving", self.rows.nbytes, progress) as work:
            rows = self.rows.save(folder / saved_parts.STORAGE, work)
            infos = [rows.info, *saved_parts.write_parts(folder, self.parts)]
            checkpointers.for_torchrl(folder, self.rows, self.parts.states["buffer"]["batch_size"])
        finish_dump(folder, infos, rows.shard)


class PreparedLoad(NamedTuple):
    """A state that was checked, for a buffer."""

    take: Callable[[PreparedLoad], None]
    rows: StorageLoad
    #: Sampler, writer, transforms and prefetched batches.
    components: Commit
    own: OwnLoad
    lane: int | None
    converted: str

    def commit(self) -> None:
        self.take(self)


class OwnLoad(NamedTuple):
    """Of the checked state of a buffer or ensemble, what belongs to no component."""

    batch_size: int | None
    iterating: bool
    rng: RngLoad

    @classmethod
    def checked(cls, state: State, settings: configuration.Settings, *, default_rng: bool) -> OwnLoad:
        """Raises ``TypeError``, ``ValueError``; ``IncompatibleCheckpoint``: prefetching needs a batch size."""
        kind = settings.kind
        batch_size = typed(state, "_batch_size", (int, type(None)), kind)
        if batch_size is not None:
            checks.check_count("batch_size", batch_size)
        elif settings.prefetch:
            raise IncompatibleCheckpoint(
                f"{kind}: _batch_size: expected an int, as prefetch={settings.prefetch} needs one, got None. Load it without prefetch."
            )
        iterating = typed(state, "_iterating", bool, kind)
        return cls(batch_size, iterating, RngLoad.checked(state, kind, default_rng=default_rng))

    def take(self, wiring: Wiring, settings: configuration.Settings) -> None:
        """Take it over."""
        settings.batch_size, settings.iterating = self.batch_size, self.iterating
        self.rng.commit(wiring)


def most_bytes() -> int:
    """What rows that a dump claims may take: half of the memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def saved_rng(wiring: Wiring) -> State:
    """The entries ``_rng`` and ``_default_rng`` of a state."""
    generator = None if wiring.generator is None else wiring.generator.get_state()
    rng = [] if generator is None else [generator, "cpu"]
    if stream := wiring.own_stream() if wiring.stream is None else wiring.stream:
        rng = [generator, "cpu", stream]
    return {"_rng": rng or None, "_default_rng": torch.default_generator.get_state()}


class RngLoad(NamedTuple):
    """Generators of a state."""

    #: None: it stays.
    own: torch.Generator | None
    #: What torch's default one becomes; None: it stays.
    default: torch.Generator | None
    #: What was mixed into the keys.
    stream: int

    @classmethod
    def checked(cls, state: State, where: str, *, default_rng: bool) -> RngLoad:
        """Of entries as :func:`saved_rng`. Raises ``TypeError``, ``ValueError``: they are none, or not on the CPU."""
        rng: Any = state["_rng"]
        known = checked_generator_state(state["_default_rng"], f"{where}: _default_rng")
        default = known if default_rng else None
        if rng is None:
            return cls(None, default, 0)
        where += ": _rng"
        if not isinstance(rng, list | tuple) or len(rng) not in (2, 3):
            raise TypeError(f"{where}: expected None or [state, device], got a {type(rng).__name__}.")
        if rng[1] != "cpu":
            raise ValueError(f"{where}: expected the state of a CPU generator, got one of {rng[1]!r}.")
        stream = integer({"stream": rng[2]}, "stream", 1, 1 << 63, where) if len(rng) > 2 else 0
        return cls(None if rng[0] is None and stream else checked_generator_state(rng[0], where), default, stream)

    def commit(self, wiring: Wiring) -> None:
        if self.own is not None:
            wiring.generator = wiring.generator or torch.Generator()
            wiring.generator.set_state(self.own.get_state())
        if self.default is not None:
            torch.default_generator.set_state(self.default.get_state())
        if not (self.own is self.default is None or fork.rank() is not None or fork.worker() is not None):
            wiring.stream = self.stream


def checked_generator_state(state: object, where: str) -> torch.Generator:
    """A generator of a saved state. Raises ``TypeError``, ``ValueError``: it is none."""
    generator = torch.Generator()
    with words.raise_as(ValueError, f"{where}: expected the state of a generator", RuntimeError):
        generator.set_state(tensor_in({"state": state}, "state", torch.uint8, (None,), where).clone())
    return generator
