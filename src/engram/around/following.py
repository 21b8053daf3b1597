"""Next observations that are not stored: they are the observations of the following rows."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from threading import get_ident
from typing import Any, Self, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engram._support import checks, words
from engram._support.field_paths import FieldPath, as_paths, checked_paths, plain, public
from engram._support.nested import find
from engram._support.state import Stateful, check_keys, integer, typed
from engram._support.tensordicts import is_tensor_collection, tensordict_type
from engram.around.episodes import END_KEYS, numbers_by_path, usual_flags
from engram.around.expander import MARK, Column, Expander, Expansion, Reading, TrajectoryArguments
from engram.errors import ReadOnlyStore
from engram.format import layout, schema
from engram.samplers import PrioritizedSampler
from engram.storages import LazyMemmapStorage, LazyTensorStorage, TensorStorage
from engram.storages.memmap import check_io
from engram.store import blocks, sampled
from engram.store.device.row_operations import Drawing, End, Followed
from engram.store.device.store import DeviceStore
from engram.store.memory import as_words
from engram.store.store import Store
from engram.transforms import ExcludeTransform
from engram.transforms._base import put
from engram.types import Commit, Info, NativeBatch, Sampler, Traits, Write, WritePlan

#: Rows on an accelerator for each final observation that has a place by default: memory there is taken at once.
_ROWS_PER_FINAL = 8


class FinalObservations(Stateful):
    """A write transform that removes next observations from rows, and keeps those that no row follows in a storage of
    its own.

    The next observation of a step is the observation of the following step, except for the last step of an episode.
    Written rows must have both ``k`` and ``("next", k)``. For rows with an end flag, ``("next", k)`` is written to
    ``storage``. Every row is stored without ``("next", k)`` and with ``("next", "final")``, int64 ``[2]``: the row
    of its final observation and a random number that both have, or -1. Frames are therefore stored once, at 16
    bytes per row. :class:`NextFromFollowing` puts them together again.

    Args:
        keys: the observations, which rows have under ``k`` and ``("next", k)``.
        storage: a ``LazyTensorStorage`` or ``LazyMemmapStorage`` for final observations, with one row per episode
            in the buffer. The oldest are overwritten: a write that loses one of a row that is still stored warns, once,
            and such rows are no longer drawn. If processes share the buffer, they must share this storage: memory-mapped,
            or after ``share()``. :meth:`open_or_create` makes one in a directory. Default: one with a place for each row
            of the buffer whose sampler is a :class:`NextFromFollowing` with these final observations. It is in RAM, which
            is taken as episodes end. Beside a shared buffer it is memory-mapped: in a temporary folder, or beside a
            directory ``replay`` in ``replay-finals``. For rows on an accelerator, which takes memory at once, it lies there
            and has a place for every eighth row.
        end_keys: fields that are nonzero at the last step of an episode; those that do not exist are skipped.
            Default: ``("next", "done")``, ``("next", "terminated")`` and ``("next", "truncated")``, or without any the
            flags of the same names beside the observation.

    Raises:
        TypeError: a key is not a key, or the storage is of another kind.

    Raises (when rows are written; nothing is stored):
        TypeError: rows are neither TensorDicts nor dicts.
        KeyError: an entry is missing, or there is no end flag.
        RuntimeError: there is more than one batch dimension; an observation and the next one differ in shape or
            dtype; no storage was given, and no buffer draws with a :class:`NextFromFollowing` of these.

    >>> import torch
    >>> from engram import FinalObservations, LazyTensorStorage
    >>> finals = FinalObservations(["obs"], LazyTensorStorage(10))
    >>> rows = {"obs": torch.arange(3), "next": {"obs": torch.arange(1, 4), "done": torch.tensor([False, False, True])}}
    >>> stored = finals.inv(rows)
    >>> list(stored["next"]), stored["next"]["final"][:, 0].tolist(), len(finals.storage)
    (['done', 'final'], [-1, -1, 0], 1)
    """

    #: The rows of the buffer, once it is known.
    _rows: weakref.ref[TensorStorage] | None = None
    #: Where next observations are of rows on an accelerator; None: not known yet, or the rows are on the host.
    there: Followed | None = None
    #: What tags of final observations on an accelerator count from.
    _first_tag = int.from_bytes(os.urandom(7), "little")
    _lost = 0

    def __init__(self, keys: object, storage: sampled.SampledStorage | None = None, *, end_keys: object = None) -> None:
        self.keys = checked_paths(keys, "FinalObservations: keys")
        #: Whether the storage is one that follows the rows, and whether it was made.
        self._follows, self._made = storage is None, False
        storage = LazyTensorStorage(1) if storage is None else storage
        if not isinstance(storage, TensorStorage) or storage.ndim != 1 or storage.lanes != 1:
            raise TypeError(f"FinalObservations: storage: expected a LazyTensorStorage with one lane, got {storage!r}.")
        self.storage = storage
        self.end_keys = as_paths(end_keys, "FinalObservations: end_keys") or END_KEYS
        self._warned = False
        #: The round of the storage in which places were last looked for, and int64 ``[max_size]``: the row of each place, or -1.
        self._owners: tuple[int, Tensor] | None = None
        #: Of each thread, the rows whose places its last write took, and their marks; None: rows of that write itself.
        self._replaced: dict[int, tuple[Tensor, Tensor] | None] = {}

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_rows": None, "_owners": None, "_replaced": {}, "there": None}

    @property
    def lost(self) -> int:
        """Stored rows that are not drawn any more, as their final observations were overwritten: those that this object has met. Of rows
        on an accelerator all, and the host waits for it.
        """
        return self._lost if self.there is None else self.there.lost()

    @classmethod
    def open_or_create(
        cls,
        keys: object,
        directory: str | os.PathLike[str],
        max_size: int,
        *,
        end_keys: object = None,
        unclean: str = "refuse",
        io: str = "auto",
    ) -> Self:
        """Go on with the final observations in a directory, or make it: for a script that may be killed and started again, beside
        :meth:`ReplayBuffer.open_or_create`. Another folder than the buffer's.

        Args:
            keys, end_keys: as for the constructor.
            directory: the folder. It appears with the first end of an episode.
            max_size: as many as the buffer has episodes.
            unclean, io: as for :meth:`ReplayBuffer.open`.

        Raises: as :meth:`ReplayBuffer.open_or_create`.

        >>> import tempfile
        >>> import numpy as np
        >>> from engram import FinalObservations
        >>> folder = tempfile.mkdtemp() + "/finals"
        >>> rows = {"obs": np.ones(1), "next": {"obs": np.ones(1), "done": np.ones(1, bool)}}
        >>> for start in range(2):
        ...     finals = FinalObservations.open_or_create(["obs"], folder, 100)
        ...     _ = finals.inv(rows)
        ...     print(len(finals.storage))
        ...     finals.storage.close()
        1
        2
        """
        call = f"{cls.__name__}.open_or_create"
        folder = checks.check_path(f"{call}: directory", directory)
        storage = LazyMemmapStorage.open_or_create(folder, max_size, 1, 1, None, unclean=unclean, io=check_io(call, io))
        return cls(keys, storage, end_keys=end_keys)

    @classmethod
    def of_note(cls, note: object, base: Path, *, unclean: str, readonly: bool, io: str) -> Self:
        """What the store in ``base`` noted by :meth:`note`.

        Raises: as :meth:`ReplayBuffer.open`. ``KeyError``, ``TypeError``, ``ValueError``: it is no such note.

        >>> import tempfile
        >>> from pathlib import Path
        >>> from engram import FinalObservations
        >>> base = Path(tempfile.mkdtemp())
        >>> finals = FinalObservations.open_or_create(["obs"], base / "finals", 100)
        >>> note = finals.note(base)
        >>> again = FinalObservations.of_note(note, base, unclean="refuse", readonly=False, io="auto")
        >>> again.keys, again.folder == finals.folder
        ((('obs',),), True)
        """
        noted = typed({"finals": note}, "finals", dict, cls.__name__)
        check_keys(noted, ("keys", "end_keys", "max_size", "directory"), cls.__name__)
        folder = Path(os.path.normpath(base / typed(noted, "directory", str, cls.__name__)))
        keys, ends = noted["keys"], noted["end_keys"]
        if not readonly and not layout.is_store(folder):  # no episode has ended yet
            size = integer(noted, "max_size", 1, 1 << 62, cls.__name__)
            return cls.open_or_create(keys, folder, size, end_keys=ends, unclean=unclean, io=io)
        storage = LazyMemmapStorage.open(folder, unclean=unclean, readonly=readonly, io=io)
        return cls(keys, storage, end_keys=ends)

    def note(self, base: Path) -> dict[str, object]:
        """What is written down in the store in ``base``.

        The folder is named relative to ``base``, so that both can be moved together.

        >>> import tempfile
        >>> from pathlib import Path
        >>> from engram import FinalObservations
        >>> base = Path(tempfile.mkdtemp())
        >>> note = FinalObservations.open_or_create(["obs"], base / "finals", 100).note(base)
        >>> note["directory"], note["max_size"]
        ('finals', 100)
        """
        keys = {"keys": plain(self.keys), "end_keys": plain(self.end_keys), "max_size": self.storage.max_size}
        assert self.folder is not None  # else it is not recordable
        return {**keys, "directory": os.path.relpath(self.folder, base)}

    @property
    def folder(self) -> Path | None:
        """Where :attr:`storage` lies; None: in memory."""
        return self.storage.scratch_dir if isinstance(self.storage, LazyMemmapStorage) else None

    def follow(self, rows: TensorStorage) -> None:
        """Learn which rows these are the final observations of, and make the storage if none was given.

        Raises: as :meth:`open_or_create`. ``RuntimeError``: as :meth:`check_shared`; or rows and final observations are on two devices.

        >>> from engram import FinalObservations, LazyTensorStorage
        >>> finals = FinalObservations(["obs"])
        >>> finals.follow(LazyTensorStorage(1_000))
        >>> finals.storage.max_size
        1000
        """
        self._rows = weakref.ref(rows)
        fresh = not (self.storage.initialized or self.storage.shared)
        if self._follows and fresh and (rows.shared or not self._made):
            folder = rows.scratch_dir if isinstance(rows, LazyMemmapStorage) else None
            if folder is not None:
                beside = folder.with_name(f"{folder.name}-finals")
                self.storage = LazyMemmapStorage.open_or_create(beside, rows.max_size, 1, 1, None, unclean="refuse")
            elif rows.device != torch.device("cpu"):
                self.storage = LazyTensorStorage(max(1, rows.max_size // _ROWS_PER_FINAL), device=rows.device)
            else:
                self.storage = (LazyMemmapStorage if rows.shared else LazyTensorStorage)(rows.max_size)
            self._made = True
        elif self._follows and rows.shared and not self.storage.shared:
            self.storage.share()
        if rows.shared:
            self.check_shared()
        if rows.device != self.storage.device:
            raise RuntimeError(
                f"NextFromFollowing: expected final observations on {rows.device}, where the rows are, got a storage on "
                f"{self.storage.device}. Make it with device='{rows.device}', or leave it out: FinalObservations(keys)."
            )

    def move(self) -> None:
        """Follow the rows, which lie elsewhere now. Raises: as :meth:`follow`.

        >>> from engram import FinalObservations
        >>> FinalObservations(["obs"]).move()  # they are not known
        """
        rows = None if self._rows is None else self._rows()
        if rows is not None and self._follows:
            self.follow(rows)

    def check_shared(self) -> None:
        """Raise ``RuntimeError`` unless every process of a buffer that is shared can read them.

        >>> from engram import FinalObservations, LazyTensorStorage
        >>> finals = FinalObservations(["obs"], LazyTensorStorage(10))
        >>> finals.storage.share()
        >>> finals.check_shared()
        """
        if not self.storage.shared:
            raise RuntimeError(
                "NextFromFollowing: the buffer is one that processes share, but the storage of final observations is not. Use "
                "FinalObservations.open_or_create(keys, directory, size), a LazyMemmapStorage, or storage.share()."
            )

    def inv(self, data: Any) -> Any:
        """Rows as they are stored: without the next observations, of which those of ended episodes are kept here.

        The argument is not changed.

        Args:
            data: rows, a TensorDict ``[n]`` or a dict, with the observations, the next ones and an end flag.

        Raises: as the class says; nothing is kept.

        >>> import torch
        >>> from engram import FinalObservations, LazyTensorStorage
        >>> finals = FinalObservations(["obs"], LazyTensorStorage(10))
        >>> rows = {"obs": torch.arange(2), "next": {"obs": torch.arange(1, 3), "done": torch.tensor([False, True])}}
        >>> stored = finals.inv(rows)
        >>> "obs" in stored["next"], finals.storage[0]["obs"].item()
        (False, 2)
        """
        if not (isinstance(data, dict) or (is_tensor_collection(data) and isinstance(data, tensordict_type()))):
            raise TypeError(f"FinalObservations: expected TensorDicts or dicts of rows, got {type(data).__name__}.")
        if not isinstance(data, dict) and len(data.batch_size) != 1:
            raise RuntimeError(f"FinalObservations: expected one batch dimension, got {list(data.batch_size)}.")
        named = self.end_keys if self.end_keys != END_KEYS else usual_flags(lambda key: find(data, key) is not None)
        keys = [key for key in named if find(data, key) is not None]
        if not keys:
            raise KeyError(
                f"FinalObservations: expected one of the end flags {[public(key) for key in self.end_keys]}, got none of them. Name the "
                "flags of your rows with end_keys=."
            )
        flags = [torch.as_tensor(find(data, key)).unsqueeze(-1).flatten(1) for key in keys]
        ended = torch.stack([(flag != 0).any(1) for flag in flags]).any(0)
        last = {}
        for key in self.keys:
            here, there = find(data, key), find(data, ("next", *key))
            for name, value in ((key, here), (("next", *key), there)):
                if value is None:
                    raise KeyError(f"FinalObservations: expected an entry {public(name)!r} in what is written.")
            here, there = torch.as_tensor(here), torch.as_tensor(there)
            if (here.shape, here.dtype) != (there.shape, there.dtype):
                raise RuntimeError(
                    f"FinalObservations: {public(('next', *key))!r}: expected {list(here.shape)} {here.dtype} as "
                    f"{public(key)!r} has, got {list(there.shape)} {there.dtype}."
                )
            last[".".join(key)] = there
        mark = self._keep(last, ended)
        gone = [("next", *key) for key in self.keys]
        stored = ExcludeTransform(*gone).forward(data) if isinstance(data, dict) else data.exclude(*gone)
        put(stored, MARK, mark)
        return stored

    def _keep(self, last: dict[str, Tensor], ended: Tensor) -> Tensor:
        """Write the final observations among those of some steps: int64 ``[n, 2]``, their rows and tags; -1 of the other steps."""
        mark, n = torch.full((len(ended), 2), -1, device="cpu"), len(ended)
        there = self.storage.device != torch.device("cpu") or isinstance(self.storage.memory, DeviceStore)
        if not there:
            last, n = {name: value[ended.to(value.device)] for name, value in last.items()}, int(ended.sum())
        if not n:
            return mark
        if self._follows and not self._made:
            raise RuntimeError(
                "FinalObservations: expected a storage, as no buffer draws with a NextFromFollowing of these final observations, "
                "whose size would be taken. Pass one: FinalObservations(keys, LazyTensorStorage(max_size))."
            )
        tags = torch.frombuffer(bytearray(os.urandom(8 * n)), dtype=torch.int64) & ((1 << 63) - 1)
        prepared, _ = self.storage.prepare({**last, "tag": tags}, "FinalObservations", batched=True)
        if there:
            return cast("DeviceStore", self.storage.store).append_some(prepared[:-1], ended, self._first_tag)
        places = self.storage.write(WritePlan(lane=0), prepared, n).rows
        if not self._warned and self.storage.write_count > self.storage.max_size:
            self._note_replaced(places)
        mark[ended.cpu()] = torch.stack([places, tags], 1)
        return mark

    def _marks(self) -> tuple[Store | None, Tensor]:
        """The store of the rows, and their marks: int64 ``[rows, 2]``, a view. None: there are none yet."""
        rows = None if self._rows is None else self._rows()
        memory = None if rows is None else rows.memory
        numbers = {} if memory is None else numbers_by_path(memory)
        if memory is None or MARK not in numbers:
            return None, torch.empty(0, 2, dtype=torch.int64, device="cpu")
        return memory, memory.tensors[numbers[MARK]].reshape(-1, 2)

    def _note_replaced(self, places: Tensor) -> None:
        """Note the rows whose places were taken: if the write does not overwrite these, their final observations are lost.

        Cost: O(rows of the buffer) once in a round through the storage.
        """
        size = self.storage.max_size
        memory, marks = self._marks()
        if len(places) > size:  # it replaces some of its own
            self._replaced[get_ident()] = None
        if len(places) > size or memory is None:
            return
        turn = (self.storage.write_count - 1) // size
        if self._owners is None or self._owners[0] != turn:
            owners = torch.full((size,), -1, device="cpu")
            known = ((marks[:, 0] >= 0) & (marks[:, 0] < size)).nonzero().flatten()
            known = known[memory.tickets_of(known) >= 0]
            owners[marks[known, 0]] = known
            self._owners = turn, owners
        rows = self._owners[1][places]
        places, rows = places[rows >= 0], rows[rows >= 0]
        live = (marks[rows, 0] == places) & (memory.tickets_of(rows) >= 0)
        if bool(live.any()):
            self._replaced[get_ident()] = rows[live], marks[rows[live]].clone()

    def written(self) -> None:
        """Called after rows were written: warns, once, if final observations of other rows were lost by that.

        >>> from engram import FinalObservations, LazyTensorStorage
        >>> FinalObservations(["obs"], LazyTensorStorage(10)).written()  # nothing was
        """
        if self._warned or get_ident() not in self._replaced:
            return
        replaced, (memory, marks) = self._replaced.pop(get_ident()), self._marks()
        if replaced is not None:
            rows, before = replaced
            if memory is None or not bool(((marks[rows] == before).all(1) & (memory.tickets_of(rows) >= 0)).any()):
                return
        self._warned = True
        words.warn(
            f"FinalObservations: {self.storage!r} holds fewer final observations than the buffer has episodes. The oldest are "
            "overwritten, and the last steps of these episodes are no longer drawn. Give it as many rows as there are episodes, or "
            "no storage, so that it follows the buffer."
        )

    def pass_over(self, memory: Store, mark: int) -> bool:
        """Let rows of a store whose final observations were overwritten be drawn no more: False if they never were.

        Marks them as rows that were made an end after they were written, of which the final observation is not known.

        Args:
            memory: the store of the rows.
            mark: the number of its field of marks.

        >>> import torch
        >>> from engram import FinalObservations, LazyTensorStorage, ReplayBuffer
        >>> finals = FinalObservations(["obs"], LazyTensorStorage(1))
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=finals)
        >>> for _ in range(2):
        ...     _ = rb.extend({"obs": torch.ones(1), "next": {"obs": torch.ones(1), "done": torch.ones(1, dtype=torch.bool)}})
        >>> finals.pass_over(rb.storage.memory, 2), finals.lost
        (True, 1)
        """
        storage = self.storage
        if storage.memory is None or storage.write_count <= storage.max_size:
            return False
        rows = torch.arange(memory.capacity, device="cpu")
        tickets, marks = memory.tickets_of(rows), memory.tensors[mark].reshape(-1, 2).clone()
        kept = (tickets >= 0) & (marks[:, 0] >= 0) & (marks[:, 0] < storage.max_size)
        rows, tickets, marks = rows[kept], tickets[kept], marks[kept]
        gone = storage.memory.tensors[-1].flatten()[marks[:, 0]] != marks[:, 1]
        rows, tickets = rows[gone], tickets[gone]
        try:
            memory.check_writable()
            _, numbers = memory.patch(rows, [mark], [torch.full((len(rows), 2), -1, device="cpu")], tickets)
            self._lost += int((numbers >= 0).sum())
        except ReadOnlyStore:  # they are drawn again and again, and others in their place
            self._lost = len(rows)
        return True

    def read(self, mark: Tensor) -> tuple[list[Tensor], Tensor]:
        """The observations that marks name, one tensor ``[n, *shape]`` per key, and whether they are there: bool ``[n]``.

        Args:
            mark: int64 ``[n, 2]``: entries ``("next", "final")`` of stored rows. ``[-1, -1]`` is of a row within an episode.

        >>> import torch
        >>> from engram import FinalObservations, LazyTensorStorage
        >>> finals = FinalObservations(["obs"], LazyTensorStorage(10))
        >>> rows = {"obs": torch.arange(2), "next": {"obs": torch.arange(1, 3), "done": torch.tensor([False, True])}}
        >>> marks = finals.inv(rows)["next"]["final"]
        >>> observations, found = finals.read(marks[1:])
        >>> observations[0].tolist(), found.tolist()
        ([2], [True])
        """
        columns, found = self.named(mark.cpu().numpy())
        return columns, torch.from_numpy(found)

    def named(self, marks: NDArray[np.int64]) -> tuple[list[Tensor], NDArray[np.bool_]]:
        """As :meth:`read`, of arrays.

        >>> import numpy as np
        >>> from engram import FinalObservations, LazyTensorStorage
        >>> FinalObservations(["obs"], LazyTensorStorage(10)).named(np.array([[3, 0]]))  # nothing is there
        ([], array([False]))
        """
        rows = np.ascontiguousarray(marks[:, 0])
        if self.storage.memory is None or rows.max(initial=0) >= self.storage.max_size:
            return [], np.zeros(len(rows), np.bool_)
        columns, moved = self.storage.read(torch.from_numpy(rows))
        found = columns[-1].numpy() == marks[:, 1]
        found[moved] = False
        return columns[:-1], found

    def state_dict(self) -> dict[str, object]:
        """The state of :attr:`storage`: copies.

        >>> from engram import FinalObservations, LazyTensorStorage
        >>> list(FinalObservations(["obs"], LazyTensorStorage(10)).state_dict())
        ['storage']
        """
        return {"storage": self.storage.state_dict()}

    def prepare_load(self, state_dict: dict[str, object]) -> Commit:
        """Check a state. Raises: as :meth:`TensorStorage.load_state_dict`; nothing is changed.

        >>> import torch
        >>> from engram import FinalObservations, LazyTensorStorage
        >>> finals, other = (FinalObservations(["obs"], LazyTensorStorage(10)) for _ in range(2))
        >>> _ = finals.inv({"obs": torch.zeros(1), "next": {"obs": torch.ones(1), "done": torch.ones(1, dtype=torch.bool)}})
        >>> load = other.prepare_load(finals.state_dict())  # changes nothing
        >>> load.commit()
        >>> len(other.storage)
        1
        """
        check_keys(state_dict, ("storage",), "FinalObservations")
        return self.storage.prepare_load(typed(state_dict, "storage", dict, "FinalObservations"))

    def __repr__(self) -> str:
        return f"FinalObservations({[public(key) for key in self.keys]}, {self.storage!r})"


class NextFromFollowing(Expander):
    """Adds to every sampled step the next observation, which is not stored: it is the observation of the following row.

    Frames are then stored once and not twice. For a drawn row ``t`` and each of the keys ``k``, ``("next", k)`` is
    ``k`` of row ``t + 1``, the next step of the same lane. If ``t`` is the last step of its episode, it is what
    :class:`FinalObservations` kept. This is exact at terminations, truncations and across the end of the ring. The
    newest row of a lane has no next observation yet, unless it ends an episode: another row is drawn in its place,
    until the next step is written. So it is in place of a row whose final observation was overwritten, for good;
    ``rb.stats()["final_observations_lost"]`` counts these. (With a ``PrioritizedSampler``, the others are drawn in proportion to their
    priorities; weights stay those of all rows.) A row that ``rb.end_trajectory`` made an end has none for good. The
    windows of a slice sampler end before such a row.

    An :class:`NStep` inside or around it takes the observation that comes ``n`` steps later, from the same rows;
    the last ``n`` rows of an open episode are not drawn yet. A :class:`FrameStack` of ``k`` inside or around it also
    stacks ``("next", k)``.

    Rows may be on an accelerator if ``sampler`` is a :class:`RandomSampler` or a :class:`PrioritizedSampler`. Nothing is waited for
    then, and a CUDA graph may capture writes and draws. What would raise ``NoSampleable`` is raised by ``rb.stats()``, and the last step
    of an episode that ends by its id, without an end flag, is not drawn.

    Args:
        sampler: draws the rows: a sampler (also of slices), a sampler class, or another expander.
        finals: also the buffer's write transform: ``ReplayBuffer(..., transform=finals)``. Or a list of the keys alone, for rows that
            were written without one, such as those of a data set, in which last steps have no next observation. A last step at which
            a flag called ``terminated``, ``terminals`` or ``terminations`` is set is drawn with its own observation as the next one,
            which the target of a value function multiplies by zero. Other last steps are not drawn, and windows are refused.
        traj_key, end_keys, index, end_when: as for :class:`NStep`.

    Raises: as :class:`NStep`, and
        TypeError: ``finals`` is neither a ``FinalObservations`` nor a list of keys; ``sampler`` is a ``SamplerWithoutReplacement``,
            or one of windows with a ``draw`` of its own: these cannot draw another row or window.
        KeyError: when drawing: rows were written without the transform.
        RuntimeError: when drawing: a final observation is in another storage; an episode ends, by its id, at a row
            without end flag. When a buffer takes it, or when drawing: the buffer is shared and ``finals.storage`` is
            not.
        NoSampleable: no row has a next observation yet.

    Cost: that of a plain sample of rows that store both, and another read for rows that end an episode.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import FinalObservations, LazyTensorStorage, NextFromFollowing, RandomSampler, TensorDictReplayBuffer
    >>> finals = FinalObservations(["obs"], LazyTensorStorage(10))
    >>> sampler = NextFromFollowing(RandomSampler(), finals)
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, transform=finals, batch_size=64)
    >>> steps = TensorDict({"obs": torch.arange(4), "next": {"obs": torch.arange(1, 5),
    ...     "done": torch.tensor([[False], [False], [False], [True]])}}, batch_size=[4])
    >>> _ = rb.extend(steps)
    >>> batch = rb.sample()
    >>> bool((batch["next", "obs"] == batch["obs"] + 1).all()), [field.name for field in rb.storage.store.schema.fields]
    (True, ['obs', "('next', 'done')", "('next', 'final')"])

    A data set in which the last steps of episodes have no next observation. Step 2 terminates, step 5 is a timeout:

    >>> from engram import ReplayBuffer
    >>> rows = {"obs": torch.arange(6), "terminals": torch.arange(6) == 2, "timeouts": torch.arange(6) == 5}
    >>> sampler = NextFromFollowing(RandomSampler(), ["obs"], end_keys=["terminals", "timeouts"])
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=64)
    >>> _ = rb.extend(rows)
    >>> batch = rb.sample()
    >>> sorted(set(zip(batch["obs"].tolist(), batch["next"]["obs"].tolist())))
    [(0, 1), (1, 2), (2, 2), (3, 4), (4, 5)]

    Frames stored once, with stacks of both:

    >>> from engram import FrameStack
    >>> finals = FinalObservations(["frame"], LazyTensorStorage(10))
    >>> sampler = FrameStack(NextFromFollowing(RandomSampler(), finals), n=4, dim=-3, in_keys=["frame"])
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, transform=finals, batch_size=32)
    >>> frame = torch.arange(6, dtype=torch.uint8).reshape(6, 1, 1, 1).expand(6, 1, 84, 84)
    >>> _ = rb.extend({"frame": frame[:5], "next": {"frame": frame[1:], "done": torch.arange(5) == 4}})
    >>> batch = rb.sample()
    >>> batch["frame"].shape, batch["next"]["frame"].shape
    (torch.Size([32, 4, 84, 84]), torch.Size([32, 4, 84, 84]))
    """

    def __init__(
        self,
        sampler: Sampler | type[Sampler],
        finals: FinalObservations | Sequence[str | FieldPath],
        **trajectories: Unpack[TrajectoryArguments],
    ) -> None:
        keys = None if isinstance(finals, FinalObservations) else as_paths(finals, "NextFromFollowing: finals")
        if not (keys or isinstance(finals, FinalObservations)):
            raise TypeError("NextFromFollowing: finals: expected FinalObservations or keys of observations, got None.")
        self.finals = cast("FinalObservations", None if keys else finals)
        self._keys, self.marks = keys or (), keys is None
        super().__init__(sampler, **trajectories)
        source = self.innermost
        if source.traits.draws_windows and keys is not None:
            raise TypeError(
                f"NextFromFollowing: finals: expected FinalObservations around a {type(source).__name__}, got keys: windows would hold "
                "last steps, whose next observations are nowhere. Draw rows, or write them through ReplayBuffer(..., transform=finals)."
            )
        if source.traits.draws_once:
            raise TypeError(
                "NextFromFollowing: sampler: expected one with replacement: in place of a row whose next one is not written yet "
                "another is drawn. Use RandomSampler or PrioritizedSampler."
            )
        if source.traits.draws_windows and not source.traits.reads_windows:
            raise TypeError(
                f"NextFromFollowing: sampler: expected one that draws rows, got a {type(source).__name__}: a window that holds a row whose "
                "next one is not written yet has no other in its place. Store next observations, or use a SliceSampler."
            )
        if any(isinstance(inner, NextFromFollowing) for inner in self.inside):
            raise TypeError("NextFromFollowing: sampler: expected one without a NextFromFollowing inside, got one.")

    #: Where next observations are of rows on an accelerator that were read last.
    _there: Followed | None = None

    @property
    def followed(self) -> tuple[FieldPath, ...]:
        return self._keys if not self.marks else self.finals.keys

    def change(self, reading: Reading) -> None:
        if self.marks and MARK not in reading.numbers:
            raise KeyError(
                f"sample: NextFromFollowing: expected rows with {public(MARK)!r}, got {[*map(public, reading.numbers)]}. Write them "
                "through ReplayBuffer(..., transform=finals)."
            )
        fields = {key: reading.number(key, "NextFromFollowing") for key in self.followed}
        for key in fields:
            if ("next", *key) in reading.numbers:
                raise ValueError(f"sample: NextFromFollowing: rows have a field {public(('next', *key))!r} already.")
        reading.following = Following(reading, fields, self.finals if self.marks else None)

    @property
    def reads_there(self) -> bool:
        of = self._source.traits
        by_priority = isinstance(self._source, PrioritizedSampler) and not of.draws_windows
        return self.marks and not self._inside and (of.draws_uniformly or by_priority)

    @property
    def draws_on_device(self) -> bool:  # type: ignore[override]
        return self.reads_there and (self._source.traits.draws_uniformly or self._source.draws_on_device)

    def _sample_there(self, storage: sampled.SampledStorage, key: blocks.Key, n: int, *, numbered: bool) -> NativeBatch:
        memory, source = cast("DeviceStore", storage.memory), self._source
        followed = self._followed_on(memory)
        info: Info = {}
        if isinstance(source, PrioritizedSampler):
            columns, rows, info = source.sample_natively(storage, key, n, through=followed)
        else:
            *columns, rows, numbers = followed.sample_rows(n, key.value, Drawing())
            info = {"index_generation": numbers} if numbered else info
        stored = len(memory.schema.fields)
        info.update(zip(self.computed_keys, columns[stored:], strict=True))
        return columns[:stored], rows, info

    def _can_sample_there(self, memory: Store) -> bool:
        followed = self._followed_on(cast("DeviceStore", memory))
        with followed.rows, followed.finals:
            return bool(followed.find(torch.arange(memory.capacity, device=memory.device))[0].any())

    def _followed_on(self, memory: DeviceStore) -> Followed:
        """Where next observations are. Raises as for rows on the host."""
        storage, found, name = self.finals.storage, self._there, type(self).__name__
        if found is None or found.store is not memory or found.finals_store is not storage.memory:
            Expansion.check_rows(memory, name)
            following = self._reading(memory.schema.fields).following
            episodes = self._rules.episodes(memory, f"sample: {name}")
            assert following is not None  # change() has set it
            if storage.memory is None:  # the rows are of a checkpoint in which none has a final observation
                last = {".".join(key): memory.tensors[number][:1] for key, number in following.fields.items()}
                storage.prepare({**last, "tag": torch.zeros(1, dtype=torch.int64, device="cpu")}, name, batched=True)
            ends = [End(number, "id") for number in episodes.boundaries.ids]
            for number, types, whole in zip(*episodes.ends(), strict=True):
                ends.append(End(number, "step type" if types else "all flags" if whole else "any flag"))
            finals = storage.store
            if not isinstance(finals, DeviceStore):  # device="auto", and the first row was elsewhere
                raise RuntimeError(self._elsewhere(f"rows of {memory.place}"))
            found = Followed(memory, finals, following.mark, [*following.fields.values()], ends)
            self._there = self.finals.there = found
            vars(self)["computed_keys"] = dict.fromkeys(map(public, following.names), False)
        return found

    def beside_bytes(self, stored: Sequence[schema.Field]) -> int:
        if not self.marks:
            return 0
        observations = sum(field.row_bytes for field in stored if field.key in self.finals.keys)
        return self.finals.storage.max_size * (observations + 8)  # and a tag

    def bind(self, storage: sampled.SampledStorage) -> None:
        """As for every expander. Raises ``RuntimeError``: ``storage`` is shared, and that of final observations is not.

        >>> from engram import FinalObservations, LazyTensorStorage, NextFromFollowing, RandomSampler, ReplayBuffer
        >>> finals = FinalObservations(["obs"], LazyTensorStorage(10))
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100)).share()
        >>> NextFromFollowing(RandomSampler(), finals).bind(rb.storage)
        Traceback (most recent call last):
        RuntimeError: NextFromFollowing: the buffer is one that processes share, but the storage of final observations is not. ...
        """
        if self.marks and isinstance(storage, TensorStorage):
            self.finals.follow(storage)
        super().bind(storage)

    def moved(self) -> None:
        """As for every sampler. Final observations that follow the rows are moved, too.

        >>> from engram import FinalObservations, LazyTensorStorage, NextFromFollowing, RandomSampler
        >>> NextFromFollowing(RandomSampler(), FinalObservations(["obs"], LazyTensorStorage(10))).moved()
        """
        super().moved()
        if self.marks:
            self.finals.move()

    def observe(self, write: Write | None, data: object) -> None:
        """As for every sampler. Warns, once, if the write lost final observations of other rows.

        >>> from engram import FinalObservations, LazyTensorStorage, NextFromFollowing, RandomSampler
        >>> NextFromFollowing(RandomSampler(), FinalObservations(["obs"], LazyTensorStorage(10))).observe(None, None)
        """
        if self.marks:
            self.finals.written()
        super().observe(write, data)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return super().traits if not self.marks else super().traits._replace(listens=True)

    @property
    def recordable(self) -> bool:
        """Whether final observations lie in a directory, which a store can note."""
        return (not self.marks or self.finals.folder is not None) and super().recordable

    def config(self) -> dict[str, object]:
        return {**super().config(), "finals": plain(self._keys) if not self.marks else self.finals}

    def __repr__(self) -> str:
        finals = [*map(public, self._keys)] if not self.marks else self.finals
        return f"NextFromFollowing({self.sampler!r}, {finals!r})"


def finals_of(sampler: object) -> FinalObservations | None:
    """Those that a sampler reads. None: it reads none."""
    chain = sampler.chain if isinstance(sampler, Expander) else ()
    return next((one.finals for one in chain if isinstance(one, NextFromFollowing) and one.marks), None)


#: What comes after a step where it is no step of its trajectory, as the native core numbers it: another trajectory, without an end flag.
_ANOTHER = 3
#: Flags that tell a terminated last step from a truncated one.
_TERMINATED = ("terminated", "terminals", "terminations")


class Following:
    """Takes the next observations of a batch from the following rows, and those of last steps from ``finals``.

    A row whose next observation is nowhere is drawn again: the newest one of a lane, or one that was made an end after it was written.
    """

    def __init__(self, reading: Reading, fields: dict[FieldPath, int], finals: FinalObservations | None) -> None:
        """``fields``: the observations, by path. ``finals``: None: last steps have no next observations but, if terminated, their own."""
        self.names = [("next", *path) for path in fields]
        #: The field in which a row names its final observation; -1: there is none.
        self.mark = -1 if finals is None else reading.numbers[MARK]
        self.fields = fields
        self._reading, self._finals = reading, finals
        self._terminated = [number for key, number in reading.numbers.items() if key[-1] in _TERMINATED]

    def check(self, memory: Store) -> None:
        """Raise ``RuntimeError`` unless every process of the store can read the final observations."""
        if self._finals is not None and memory.directory is not None:
            self._finals.check_shared()

    def columns(self, others: list[Column]) -> list[Column]:
        """The next observations, stacked as the observations are, then what comes after the observed row, for :meth:`complete`."""
        ahead = self._ahead(others)
        following = [others[number]._replace(ahead=ahead, following=True) for number in self.fields.values()]
        return [*following, Column("after", ahead=ahead)]

    def _ahead(self, others: list[Column]) -> int:
        return self._reading.ahead if self._finals is None else others[self.mark].ahead

    def finished(self, others: list[Column]) -> tuple[int, int]:
        """The field :attr:`mark`, and how many steps at the end of a trajectory have no next observation if that is negative."""
        return self.mark, self._ahead(others) + 1

    def complete(
        self, memory: Store, rows: Tensor, tensors: list[Tensor], moved: list[int], ended: list[int]
    ) -> tuple[list[int], bool]:
        """Put final observations where no row follows: ``(places to draw again, whether all of those wait for a next step)``.

        Args:
            memory: the store of the rows.
            rows: int64 ``[B]``.
            tensors: what was read: columns, then tickets. The column before the tickets is removed.
            moved: places whose rows have changed since they were drawn.
            ended: places of rows that no step follows.

        Rows whose final observations were overwritten are drawn again, as those whose next step is not there yet.

        Raises ``RuntimeError``: a final observation is in another storage, or none was kept.
        """
        numbers, after = tensors.pop(), tensors.pop()
        tensors.append(numbers)
        if not (at := sorted({*ended}.difference(moved))):  # all have a step after them
            return moved, False
        places = np.array(at)
        marks = tensors[self.mark].numpy()[places] if self._finals is not None else np.full((len(at), 1), -1)
        kept = marks[:, 0] >= 0
        final, alone = places[kept], places[~kept]
        for number in self._terminated if self._finals is None else ():  # what was read as the next one is their own
            alone = alone[(tensors[number][alone] == 0).reshape(len(alone), -1).all(1).numpy()]
        if self._finals is not None and len(unmarked := alone[after.numpy()[alone] == _ANOTHER]):
            raise RuntimeError(
                f"sample: NextFromFollowing: row {int(rows[unmarked[0]])}, or one that follows it, is the last of its trajectory, but was "
                "written without an end flag, so its final observation was not kept. Set one of the end keys of FinalObservations at the "
                "last step of every episode."
            )
        if self._finals is not None and len(final):
            columns, found = self._finals.named(marks[kept])
            gone, final = final[~found], final[found]
            if len(gone):  # unless the row is gone, too
                lost = gone[(memory.tickets_of(rows[gone]) == numbers[gone]).numpy()]
                if len(lost) and not self._finals.pass_over(memory, self.mark):
                    raise RuntimeError(
                        f"sample: NextFromFollowing: the final observation of row {int(rows[lost[0]])} is not in "
                        f"{self._finals.storage!r}: that is not the one that was written to. Draw with the FinalObservations that the "
                        "rows were written through."
                    )
                alone = np.union1d(alone, lost)  # they wait for good
                moved = [*moved, *np.setdiff1d(gone, lost).tolist()]
            for number, column in zip(range(-1 - len(self.fields), -1), columns, strict=False):
                last = as_words(tensors[number]).numpy()
                # Of frames, [B, frames, *shape], the newest one. Rows may have been cast at the door.
                newest = last if last.ndim == column.ndim else last[:, -1]
                newest[final] = as_words(column.to(tensors[number].dtype)).numpy()[found]
        return sorted({*moved, *alone.tolist()}), bool(len(alone)) and not moved
