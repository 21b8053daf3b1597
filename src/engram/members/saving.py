"""The state of an ensemble: that of its members, and what is its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, cast

from engram._support.checks import check_path
from engram._support.state import Change, Loads, check_keys, integer, prepare_load, read_from, typed
from engram.buffer.configuration import Settings
from engram.buffer.prefetching import Prefetching, prepare_batches
from engram.buffer.saving import OwnLoad, most_bytes, saved_rng
from engram.buffer.wiring import Wiring
from engram.errors import IncompatibleCheckpoint
from engram.members.components import naming
from engram.members.reading import Member
from engram.saved import checkpointers, checkpoints, disk, part_reader, parts
from engram.types import Commit, StrPath

State = dict[str, object]

#: Entries of a member's state that are in the ensemble's under the same names, by the number of the member.
_COMPONENTS = ("_storage", "_sampler", "_writer")
_OWN = ("_transforms", "_batch_size", "_iterating", "_rng", "_default_rng", "_prefetch_state")
_PART = "ensemble"


class EnsembleSaving:
    """Saves an ensemble and loads it. It owns no state.

    Args:
        kind: the class of the ensemble.
        members: its buffers.
        wiring: its components.
        settings: batch size and iteration.
        prefetching: the prefetched batches; None: there are none.
    """

    def __init__(
        self, kind: str, members: Sequence[Member], wiring: Wiring, settings: Settings, prefetching: Prefetching | None
    ) -> None:
        self._kind, self._members, self._wiring = kind, members, wiring
        self._settings, self._prefetching = settings, prefetching

    # ---- as a dict -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """As ``ReplayBufferEnsemble.state_dict``."""
        own, states = self._state_and_places(drop_prefetched=False)[0], []
        for member in self._members:
            with naming(member.number):
                states.append(member.buffer.state_dict())
        components = {name: {str(n): state.pop(name) for n, state in enumerate(states)} for name in _COMPONENTS}
        return {**components, "_members": {str(number): state for number, state in enumerate(states)}, **own}

    def prepare_state(self, state: State, *, default_rng: bool) -> Commit:
        """Check a :meth:`state_dict`. Raises as ``ReplayBuffer.load_state_dict``; nothing is changed."""
        kind = self._kind
        if checkpointers.foreign_state(state, 1) is not None:
            raise IncompatibleCheckpoint(f"{kind}: expected the state of an ensemble, got that of one buffer.")
        check_keys(state, (*_COMPONENTS, "_members", *_OWN), kind)
        numbers = tuple(str(member.number) for member in self._members)
        for name in (*_COMPONENTS, "_members"):
            check_keys(typed(state, name, dict, kind), numbers, f"{kind}: {name}")
        loads: list[Commit] = []
        for number, member in zip(numbers, self._members, strict=True):
            of_member = {name: typed(state, name, dict, kind)[number] for name in _COMPONENTS}
            rest = typed(typed(state, "_members", dict, kind), number, dict, f"{kind}: _members")
            with member.checking():
                loads.append(member.saving.prepare_state({**rest, **of_member}, default_rng=False))
        return self._loads(loads, self._prepare_own(state, default_rng=default_rng))

    def _loads(self, of_members: Sequence[Commit], own: Commit) -> Commit:
        """Drops prefetched batches first: threads would draw for them from what was loaded."""
        of_members = [_MemberLoad(number, load) for number, load in enumerate(of_members)]
        if self._prefetching is None:
            return Loads([*of_members, own])
        return Loads([Change(self._prefetching.discard, "load", keys=False), *of_members, own])

    def _state_and_places(self, *, drop_prefetched: bool) -> tuple[State, State]:
        """What is the ensemble's own; and by the number of a member the state that its sampler had before it drew batches that are
        left out.
        """
        wiring, batches, before = self._wiring, None, None
        if self._prefetching is not None:
            batches, before = self._prefetching.saved(drop=drop_prefetched)
        own: State = {
            "_transforms": wiring.transform.state_dict(),
            "_batch_size": self._settings.batch_size,
            "_iterating": self._settings.iterating,
            **saved_rng(wiring),
            "_prefetch_state": batches,
        }
        return own, before or {}

    def _prepare_own(self, state: State, *, default_rng: bool) -> Commit:
        kind, own = self._kind, OwnLoad.checked(state, self._settings, default_rng=default_rng)
        transforms = prepare_load(self._wiring.transform, state["_transforms"], f"{kind}: _transforms")
        batches = prepare_batches(state["_prefetch_state"], self._prefetching, f"{kind}: _prefetch_state")
        return Loads([Change(own.take, self._wiring, self._settings), transforms, batches])

    # ---- as a folder ---------------------------------------------------------------------------------------------------

    def dumps(self, path: StrPath, prefetch: str) -> None:
        """As ``ReplayBufferEnsemble.dumps``: a dump per member, in ``members/<number>``, beside what is the ensemble's own."""
        check_path("dumps: path", path)
        if self._prefetching is not None:
            self._prefetching.materialize()  # members do not wait for it
        begun = [member.saving.prepare_dump(prefetch) for member in self._members]
        with checkpoints.replacing(Path(path)) as folder, disk.batched_fsync():
            for one in begun:
                one.prepare()
            with ExitStack() as paused:
                for one in begun:
                    paused.enter_context(one.paused)
                # First: it draws what was asked for.
                own, places = self._state_and_places(drop_prefetched=prefetch == "drop")
                dumps = [one.take() for one in begun]
            for member, place in places.items():
                dumps[int(member)].parts.states["sampler"] = cast("State", place)
            for number, dump in enumerate(dumps):
                below = _folder_of(folder, number)
                disk.make_folders(str(below))
                dump.save(below)
            disk.sync_folder(below.parent)
            state = {name.removeprefix("_"): value for name, value in own.items()}
            parts.write_part(folder, _PART, self._kind, {"members": len(dumps), **state})

    def loads(self, path: StrPath, *, convert: bool, default_rng: bool) -> None:
        """As ``ReplayBufferEnsemble.loads``."""
        check_path("loads: path", path)
        folder = checkpoints.standing(Path(path))
        if (foreign := checkpointers.foreign_format(folder)) is not None:
            if convert:
                raise IncompatibleCheckpoint(
                    f"{path}: a dump of {foreign.library}'s cannot be converted. Load it into an ensemble of buffers of its sizes."
                )
            ndims = [member.wiring.storage.ndim for member in self._members]
            self._prepare_foreign(foreign.read_ensemble(folder, ndims, max_bytes=most_bytes())).commit()
            return
        with ExitStack() as opened:
            reader = opened.enter_context(part_reader.PartReader.open(folder))
            parts.check_kind(reader, _PART, self._kind)
            state = parts.read_state(reader)
            with read_from(str(folder)):
                check_keys(state, ("members", *(name.removeprefix("_") for name in _OWN)), self._kind)
                saved = integer(state, "members", 1, 1 << 31, self._kind)
                if saved != len(self._members):
                    raise IncompatibleCheckpoint(f"{path}: expected {len(self._members)} members, got {saved}.")
                own = self._prepare_own({name: state[name.removeprefix("_")] for name in _OWN}, default_rng=default_rng)
            loads: list[Commit] = []
            for member in self._members:
                with member.checking():
                    checkpoint = opened.enter_context(checkpoints.Checkpoint(_folder_of(folder, member.number)))
                    load = member.saving.prepare_load(checkpoint, 0, default_rng=False, convert=convert, resize=convert)
                    loads.append(load)
            self._loads(loads, own).commit()

    def _prepare_foreign(self, dump: checkpointers.ForeignEnsemble) -> Commit:
        """Check a dump of another library's. What it does not say stays as it is here."""
        loads: list[Commit] = []
        for member, found in zip(self._members, dump.members, strict=True):
            with naming(member.number, "Nothing was loaded."):
                loads.append(member.saving.prepare_foreign(found))
        state = self._state_and_places(drop_prefetched=False)[0]
        state["_batch_size"] = self._settings.batch_size or dump.batch_size
        if dump.rng_state is not None and self._wiring.generator is not None:
            state["_rng"] = [dump.rng_state, "cpu"]
        state["_prefetch_state"] = None
        return self._loads(loads, self._prepare_own(state, default_rng=False))


def _folder_of(folder: Path, member: int) -> Path:
    return folder / "members" / str(member)


class _MemberLoad(NamedTuple):
    """The checked state of a member."""

    number: int
    load: Commit

    def commit(self) -> None:
        before = "Members before it are loaded, those behind it are as they were. Load the ensemble again."
        with naming(self.number, before):
            self.load.commit()
