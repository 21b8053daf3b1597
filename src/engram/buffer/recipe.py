"""What a store in a directory notes of the buffer that writes to it, so that ``ReplayBuffer.open`` makes the same again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from engram import around, samplers, storages, writers
from engram._support import checks, words
from engram.buffer import configuration, services
from engram.buffer.wiring import Wiring
from engram.errors import CorruptStore, EngramError, IncompatibleStore
from engram.format import files, layout
from engram.storages.ragged import RaggedArguments
from engram.store.device.store import DeviceStore
from engram.store.store import Store
from engram.types import Declared, StrPath

_SAMPLERS = around.Expander.known
_WRITERS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        writers.RoundRobinWriter,
        writers.TensorDictRoundRobinWriter,
        writers.TensorDictMaxValueWriter,
        writers.RemovingWriter,
        writers.ImmutableDatasetWriter,
    )
}
_BUFFERS: dict[str, Any] = {}

B = TypeVar("B", bound=type)
R = TypeVar("R")


def register(cls: B) -> B:
    """Let :func:`open_buffer` make a buffer of this class again."""
    _BUFFERS[cls.__name__] = cls
    return cls


class Recipe:
    """Notes the components and settings of a buffer in the directory of its store."""

    def __init__(self, wiring: Wiring, settings: configuration.Settings) -> None:
        self._wiring = wiring
        self._settings = settings
        unmade = settings.unmade
        chosen = unmade is not None and (unmade.sampler is not None or unmade.consume_after_n_samples is not None)
        #: Of a buffer that was given none: they take no other ones' place in a directory.
        self._default_sampler = (
            None if chosen or not isinstance(wiring.sampler, samplers.RandomSampler) else wiring.sampler
        )
        chosen = unmade is not None and (unmade.writer is not None or unmade.remover is not None)
        self._default_writer = None if chosen else wiring.writer
        #: Whether the directory says what the buffer is now; True, too, where there is no directory.
        self.noted = False
        #: Whether it was read after a write of another buffer.
        self.looked = False

    def note(self) -> None:
        """Write it down, if anything was ever stored. A buffer that was given no sampler leaves the one that another has noted.

        Raises ``OSError``: the directory cannot be written.
        """
        if not self._wiring.storage.initialized:
            return
        folder = self._folder()
        self.noted = folder is None
        if folder is None:
            return
        entries = self.entries()
        noted = _read(folder) if self._wiring.sampler is self._default_sampler else {}
        if noted.get("sampler", entries["sampler"]) != entries["sampler"]:
            left = {"writer"} if self._wiring.writer is self._default_writer else set()
            entries = noted | {name: entries[name] for name in {"writer", "sample_unit"} & entries.keys() - left}
        holder, finals = _finals_in(entries["sampler"]), around.finals_of(self._wiring.sampler)
        if holder is not None and finals is not None:
            holder["finals"] = finals.note(folder)
        files.overwrite(_path(folder), json.dumps(entries).encode())
        self.noted = True

    def entries(self) -> dict[str, object]:
        """What it writes down, but for final observations, which take a folder."""
        entries: dict[str, object] = {
            "buffer": self._settings.kind,
            "sampler": _described(self._wiring.sampler, _SAMPLERS),
            "writer": _described(self._wiring.writer, _WRITERS),
            "batch_size": self._settings.batch_size,
            "prefetch": self._settings.prefetch,
        }
        if self._wiring.unit is not None:
            entries["sample_unit"] = _described(self._wiring.unit, around.SampleUnit.known)
        if self._settings.output != "torch":
            entries["output"] = self._settings.output
        if self._wiring.storage.initialized and (dtypes := self._wiring.storage.structure.dtypes):
            entries["dtypes"] = [[list(key), dtype] for key, dtype in dtypes.items()]
        if self._settings.priority_key is not None:
            entries["priority_key"] = self._settings.priority_key
        return entries

    def note_if_possible(self) -> None:
        """As :meth:`note`; the next write tries again if it fails."""
        with contextlib.suppress(OSError):  # the rows are there
            self.note()

    def note_priorities(self) -> None:
        """After an update of priorities, which are written to the directory as rows are. Other samplers only warn."""
        if not self.noted and self._wiring.of_sampler.prioritized:
            self.note_if_possible()

    def note_if_absent(self) -> None:
        """After a write that did not come through the buffer: note what it is, unless the directory names another."""
        if self.noted or self.looked:
            return
        self.looked = True
        folder = self._folder()
        if folder is not None and not _read(folder):
            self.note_if_possible()

    def _folder(self) -> Path | None:
        store: Store | None = self._wiring.storage.memory
        if store is None or store.closed:
            return None
        mirror = store.mirror if isinstance(store, DeviceStore) else None
        return store.directory if mirror is None else mirror.directory


def open_buffer(
    directory: StrPath, unclean: str, io: str, given: Mapping[str, object], *, readonly: bool, prioritized: str | None
) -> Any:
    """The buffer that a directory notes, over its store.

    Args:
        directory: the store's.
        unclean: whether a store is taken that was open when the machine went down: ``"accept"`` or ``"refuse"``.
        io: as for ``LazyMemmapStorage``.
        given: arguments of the constructor; one that is not None replaces what was noted.
        readonly: nothing is written to the directory.
        prioritized: the class that was asked for, if its buffers always have priorities.

    Raises: as ``ReplayBuffer.open``.
    """
    _check_unclean("open", unclean)
    path, io = checks.check_path("open: directory", directory), storages.memmap.check_io("open", io)
    noted = _read(path)
    storage = storages.LazyMemmapStorage.open(
        path, unclean=unclean, dtypes=_noted_dtypes(noted), readonly=readonly, io=io
    )
    _announce_repair(storage)  # before anything else can fail
    opened: list[storages.Storage] = [storage]
    try:
        kind = kind_of(noted, "open")
        arguments = {name: value for name, value in given.items() if value is not None}
        holder = None if "sampler" in arguments else _finals_in(noted.get("sampler"))
        if holder is not None:
            holder["finals"] = again = _noted_finals(holder["finals"], path, unclean=unclean, readonly=readonly, io=io)
            opened.append(again.storage)
        for name, known in (("sampler", _SAMPLERS), ("writer", _WRITERS), ("sample_unit", around.SampleUnit.known)):
            if name not in arguments:
                arguments[name] = _made_again(noted.get(name), known, name)
        finals = around.finals_of(arguments["sampler"])
        if finals is not None and not {"transform", "transform_factory"} & arguments.keys():
            arguments["transform"] = finals
        if kind._prioritized and not (prioritized or draws_by_priority(arguments["sampler"])):  # noqa: SLF001 - of the family
            kind = kind.__mro__[1]  # that takes any sampler
        if given.get("sampler") is None and noted.get("sampler") == _described(samplers.RandomSampler(), _SAMPLERS):
            del arguments["sampler"]  # the default one, which takes no other one's place in the directory
        rb = kind(storage=storage, **(noted_settings(noted) | arguments), **kind.open_arguments(noted))
        if prioritized and not samplers.declared(rb.sampler).traits.prioritized:
            raise TypeError(
                f"open: {str(path)!r}: expected a store that a buffer with priorities wrote to, got one of a {kind.__name__} with "
                f"{rb.sampler!r}. Use {prioritized}.open_or_create, which takes alpha and beta, or pass sampler=."
            )
        return rb
    except BaseException:
        for one in opened:
            one.close()
        raise


def draws_by_priority(sampler: object) -> bool:
    """Whether buffers that always have priorities take the sampler: it draws rows by them, natively."""
    if not isinstance(sampler, Declared):
        return False
    traits = sampler.traits
    return traits.reads_natively and traits.prioritized and not traits.draws_windows


def open_or_create(
    kind: Callable[..., R],
    directory: StrPath,
    store: tuple[int, int, int, object, int],
    unclean: str,
    io: str,
    given: Mapping[str, object],
    *,
    tensordicts: bool,
) -> R:
    """A buffer of a class over the store in a directory, or over one that the first write creates there.

    Args:
        kind: the class.
        directory: the store's.
        store: rows, lanes, ndim, dtypes and group_small_fields, as for ``LazyMemmapStorage``.
        unclean, io: as for :func:`open_buffer`.
        given: arguments of the constructor.
        tensordicts: whether the class is one of TensorDicts.

    Raises: as ``ReplayBuffer.open_or_create``.
    """
    call = "open_or_create"
    _check_unclean(call, unclean)
    if "storage" in given:
        raise TypeError(
            f"{call}: storage: expected none, the rows lie in the directory; got {type(given['storage']).__name__}."
        )
    path, io = checks.check_path(f"{call}: directory", directory), storages.memmap.check_io(call, io)
    size, lanes, ndim, dtypes, grouped = store
    ragged = cast("RaggedArguments", {name: given[name] for name in RaggedArguments.__annotations__ if name in given})
    given = {name: value for name, value in given.items() if name not in ragged}
    storage = storages.LazyMemmapStorage.open_or_create(
        path, size, lanes, ndim, dtypes, unclean=unclean, io=io, group_small_fields=grouped, **ragged
    )
    try:
        _announce_repair(storage)
        found, changed = storage.structure, {"transform", "transform_factory", "collate_fn"} & given.keys()
        if tensordicts and found is not None and found.root.kind not in ("tensordict", "tensorclass") and not changed:
            raise IncompatibleStore(
                f"{call}: {str(path)!r}: expected rows that are TensorDicts, for a buffer of these, got a store of {found.root.kind} "
                f"rows. Use ReplayBuffer.{call}, or another folder."
            )
        return kind(storage=storage, **given)
    except BaseException:
        storage.close()
        raise


def _check_unclean(call: str, unclean: object) -> None:
    checks.check_choice(f"{call}: unclean", unclean, ("refuse", "accept"))


def _announce_repair(storage: storages.LazyMemmapStorage) -> None:
    """Log what opening recovered."""
    repair = storage.store.repair if storage.initialized else None
    if repair is not None:
        storages.announcing.announce(f"{storage.scratch_dir}: its last process did not close it: {repair}.")


def _path(directory: StrPath) -> Path:
    return Path(directory) / layout.FOLDER / layout.BUFFER


def _described(component: Any, known: Mapping[str, object]) -> dict[str, object]:
    name = type(component).__name__
    if known.get(name) is type(component) and component.recordable:
        return {"type": name, "config": component.config()}
    return {"type": name, "custom": True}


def _read(directory: StrPath) -> dict[str, object]:
    """What a directory notes; empty if it notes nothing."""
    path = _path(directory)
    if not path.exists():
        return {}
    with words.raise_as(CorruptStore, f"{path}: not readable as JSON"):
        entries = json.loads(files.read_small(path, 1 << 20))
    if not isinstance(entries, dict):
        raise CorruptStore(f"{path}: expected an object.")
    return entries


def _made_again(noted: object, known: dict[str, Any], kind: str) -> object:
    if noted is None:
        return None
    name = noted.get("type") if isinstance(noted, dict) else None
    if not isinstance(noted, dict) or noted.get("custom") or name not in known:
        raise TypeError(f"open: the store was used with the custom {kind} {name!r}: pass {kind}=….")
    damaged = (TypeError, ValueError, KeyError, AttributeError)
    with words.raise_as(CorruptStore, f"open: cannot make the recorded {kind} {name!r} again", damaged):
        made: object = known[name].from_config(noted.get("config", {}))
    return made


def _finals_in(noted: object) -> dict[str, object] | None:
    """The arguments of an expander, among those of a sampler, that hold final observations; None: no expander has some."""
    while isinstance(noted, dict) and isinstance(config := noted.get("config"), dict):
        if "finals" in config and not isinstance(config["finals"], list):  # the keys alone
            return config
        noted = config.get("sampler")
    return None


def _noted_finals(noted: object, base: Path, *, unclean: str, readonly: bool, io: str) -> around.FinalObservations:
    try:
        return around.FinalObservations.of_note(noted, base, unclean=unclean, readonly=readonly, io=io)
    except EngramError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CorruptStore(f"open: cannot make the recorded final observations again: {error}.") from error


def _noted_dtypes(noted: dict[str, object]) -> storages.Dtypes:
    pairs = cast("Iterable[tuple[str, str]]", noted.get("dtypes", ()))
    try:
        return storages.checked_dtypes({tuple(key): dtype for key, dtype in pairs}, "open")
    except (TypeError, ValueError) as error:
        raise CorruptStore(f"open: the recorded {error}") from error


def kind_of(noted: dict[str, object], call: str) -> type[services.Facade]:
    """The buffer class that was noted. Raises ``TypeError``: it is not known."""
    kind: type[services.Facade] | None = _BUFFERS.get(str(noted.get("buffer", "ReplayBuffer")))
    if kind is None:
        raise TypeError(f"{call}: the store was used by an unknown buffer class {noted.get('buffer')!r}.")
    return kind


def noted_unit(noted: dict[str, object]) -> around.SampleUnit | None:
    """The sample unit that was noted; None: there is none, or it is of the user's own."""
    unit = noted.get("sample_unit")
    own = isinstance(unit, dict) and unit.get("custom")
    return None if own else cast("around.SampleUnit | None", _made_again(unit, around.SampleUnit.known, "sample_unit"))


def noted_settings(noted: dict[str, object]) -> dict[str, Any]:
    """The arguments of the constructor that were noted, besides the components. Raises ``CorruptStore``: they are none."""
    settings: dict[str, Any] = {name: noted[name] for name in ("batch_size", "prefetch", "output") if name in noted}
    with words.raise_as(CorruptStore, "open", (TypeError, ValueError)):
        configuration.Settings("what was recorded", **{"batch_size": None, "prefetch": None, **settings})
    return settings
