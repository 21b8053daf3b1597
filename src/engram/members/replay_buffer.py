"""Several buffers that are drawn from, and written to, as one. The names are TorchRL's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, ClassVar, Generic, Literal, Self, TypedDict, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor

from engram._support import checks, closing, overrides, tensordicts, unsupported
from engram.buffer.base import BufferBase, Shows
from engram.buffer.configuration import NOT_YET, Settings, returns_itself
from engram.buffer.field_updates import ConditionalUpdateResult, submit_update_if_present
from engram.buffer.output import Output, View, moved, target_of
from engram.buffer.prefetching import Prefetching, go_back, place_of
from engram.buffer.read_path import ReadPath
from engram.buffer.replay_buffer import ReplayBuffer
from engram.buffer.services import as_remote
from engram.buffer.wiring import Wiring
from engram.device.pinning import pinning_for
from engram.members.components import (
    OfMembers,
    SamplerEnsemble,
    StorageEnsemble,
    WriterEnsemble,
    asks_a_member,
    members_named,
    naming,
    split_index,
)
from engram.members.reading import EnsembleReadPath, Member, collated
from engram.members.routing import Keys, RoutedWrites, Routing, end_streams
from engram.members.saving import EnsembleSaving
from engram.store.limits import WAIT_S, checked_timeout
from engram.transforms import Compose
from engram.types import Device, Size, StrPath, Wait

__all__ = ["ReplayBufferEnsemble"]

Batch = TypeVar("Batch")
T = TypeVar("T")
Components = TypeVar("Components", bound=Sized)

#: Methods of components that an ensemble never calls, as each member has its own, and what to override in their place.
_UNCALLED = ("sample", "get", "set", "add", "extend", "mark_update", "get_insert_index", "_empty")
_OF_MEMBERS = {**dict.fromkeys(_UNCALLED, "that of the components of members"), "generations_of": ""}  # it is called


def check_components(call: str, given: object, kind: type[Components], members: int) -> Components:
    """Components of one kind, one for each member.

    Raises ``TypeError``: something else, or a class that overrides what is never called. ``ValueError``: another number.
    """
    given = checks.check_type(call, given, kind, f"a {kind.__name__}, one for each member")
    if len(given) != members:
        raise ValueError(f"{call}: expected a {kind.__name__} of {members}, one for each member, got {len(given)}.")
    overrides.refuse_others(given, **_OF_MEMBERS)
    return given


class EnsemblePrefetching(Prefetching):
    """Draws batches ahead. Where it drops some, their rows go back to the epochs of members."""

    def __init__(self, wiring: Wiring, settings: Settings, reading: ReadPath, members: Sequence[Member]) -> None:
        super().__init__(wiring, settings, reading)
        self._members = members

    def place(self) -> dict[str, object] | None:
        """The states of samplers of members by number, of those that can go back; None: there are none."""
        places = {str(member.number): place_of(member.wiring) for member in self._members}
        found = {number: place for number, place in places.items() if place is not None}
        return cast("dict[str, object]", found) or None

    def go_back(self, before: dict[str, object]) -> None:
        for number, place in before.items():
            go_back(self._members[int(number)].wiring, cast("dict[str, object]", place))


class _EnsembleOptions(TypedDict, total=False):
    """Keywords of the constructor that a buffer has, too, and ``collate_fns``."""

    collate_fns: Sequence[Callable[..., object] | None] | None
    generator: torch.Generator | None
    shared: bool
    prefetch: int | None
    pin_memory: bool | None
    output: Output


_shows: Shows[ReplayBufferEnsemble[Any]] = Shows()


class ReplayBufferEnsemble(BufferBase, Generic[Batch]):
    """Draws batches from several buffers, the members, and divides rows among them.

    A batch has ``num_buffer_sampled`` parts of ``batch_size / num_buffer_sampled`` rows: ``[parts, rows, ...]``. Each part is of one
    member: it was drawn by its sampler, collated by it and went through its transforms. Rows with ragged fields have one dimension,
    ``[batch_size]``, one part after another; their members have no transforms. ``len`` is the number of members.

    Args:
        *rbs: the members. They stay buffers: write to them, and sample from them, as before. Change their components before, or by
            :meth:`set_sampler`, :meth:`set_storage` and :meth:`set_writer` of the ensemble.
        storages, samplers, writers: of members that the ensemble makes, in place of ``rbs``.
        transform: applied to whole batches, after those of members; and to rows that the ensemble divides, before.
        batch_size: rows of all parts. Default: said in each call.
        collate_fn: makes a batch of the list of parts. Default: they are put on top of each other, and must have the same fields.
        collate_fns: of members that the ensemble makes, one for each.
        p: how likely a part is of each member, relative to the others, or ``"sampleable"``: by the rows (or windows) that each could
            draw from at this moment. Default: all are equally likely.
        sample_from_all: each member gives one part of every batch, in order.
        num_buffer_sampled: parts of a batch. Default: as many as there are members; always with ``sample_from_all``.
        routing_key: a field with the number of the member of each row, by which :meth:`extend` divides rows.
        routing_dim: a dimension of the data of :meth:`extend`, whose entries go to one member each.
        generator, shared, prefetch, pin_memory, output: as for :class:`ReplayBuffer`. One generator draws all; those of the members are
            not used. With ``prefetch``, batches ahead do not see later writes to members, and do not wait for limits of theirs.

    TensorDicts have ``("index", "buffer_ids")``, the member of each row, and ``("index", "index")``, its row there, and what samplers say:
    ``"priority_weight"`` is 1 for members without priorities, and over the smallest priority of its member else.

    Members may be of any storage, sampler, writer and transform, shared, in a directory or connected; a buffer may be a member of several
    ensembles. Save each member with a ``Checkpointer`` of its own; :meth:`dumps` and :meth:`state_dict` have all of them.

    Raises:
        TypeError: no members, or no buffers; components that are none, or whose class overrides what an ensemble never calls.
        RuntimeError: members and components both; ``p`` and ``sample_from_all`` both. ValueError: another number of components, weights
            that are none, both ways of routing.

    Cost: that of a draw from each member that is chosen, and a copy that puts the parts together.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, ReplayBufferEnsemble, TensorDictReplayBuffer
    >>> members = [TensorDictReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2)]
    >>> rb = ReplayBufferEnsemble(*members, p=[3, 1], num_buffer_sampled=4, batch_size=32, routing_key="task")
    >>> written = rb.extend(TensorDict({"obs": torch.arange(10), "task": torch.arange(10) % 2}, [10]))
    >>> batch = rb.sample()
    >>> batch.shape
    torch.Size([4, 8])
    >>> bool((batch["index", "buffer_ids"] == batch["task"]).all())
    True
    """

    #: Whether :meth:`close` was called.
    closed = False

    def __init__(
        self,
        *rbs: ReplayBuffer[Batch],
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: object = None,
        batch_size: int | None = None,
        collate_fn: Callable[..., Batch] | None = None,
        p: Sequence[float] | Tensor | str | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        routing_key: str | tuple[str, ...] | None = None,
        routing_dim: int | None = None,
        **others: Unpack[_EnsembleOptions],
    ) -> None:
        who = type(self).__name__
        unknown = {name: value for name, value in others.items() if name not in _EnsembleOptions.__annotations__}
        unsupported.reject_unsupported(who, unknown, NOT_YET, type(self))
        components = storages, samplers, writers
        if rbs:
            if any(one is not None for one in (*components, others.get("collate_fns"))):
                raise RuntimeError(f"{who}: expected members, or storages, samplers and writers of some, got both.")
            for number, rb in enumerate(rbs):
                rb = checks.check_type(f"{who}: member {number}", rb, ReplayBuffer, "a ReplayBuffer")
            samplers = SamplerEnsemble(
                *(rb.sampler for rb in rbs), p=p, sample_from_all=sample_from_all, num_buffer_sampled=num_buffer_sampled
            )
            storages, writers = StorageEnsemble(*(rb.storage for rb in rbs)), WriterEnsemble(*(rb.writer for rb in rbs))
        else:
            rbs = _made(who, components, others.get("collate_fns"))
            samplers = cast("SamplerEnsemble", samplers)
            if p is not None or sample_from_all or num_buffer_sampled is not None:
                raise RuntimeError(
                    f"{who}: p, sample_from_all, num_buffer_sampled: expected none of them beside samplers. Pass them to SamplerEnsemble."
                )
        checks.check_callable(f"{who}: collate_fn", collate_fn, "a callable", optional=True)
        self._rbs: tuple[ReplayBuffer[Batch], ...] = tuple(rbs)
        self._routing = Routing(routing_key, routing_dim)
        self._settings = Settings(who, batch_size, others.get("prefetch"), None, others.get("output", "torch"), None)
        ensemble = cast("StorageEnsemble", storages)
        pinning, generator = pinning_for(others.get("pin_memory"), who), others.get("generator")
        wiring = Wiring(ensemble, Compose.of(transform), collate_fn=collate_fn, pinning=pinning, generator=generator)
        self._assemble(wiring, samplers, cast("WriterEnsemble", writers))
        if others.get("shared"):
            self.share()

    def _assemble(self, wiring: Wiring, samplers: SamplerEnsemble, writers: WriterEnsemble) -> None:
        """Make the parts around the components."""
        settings, self._wiring = self._settings, wiring
        wiring.connect(samplers, writers, settings.batch_size)
        self._members = [Member(number, rb) for number, rb in enumerate(self._rbs)]
        reading = EnsembleReadPath(wiring, self._members)
        self._prefetching = EnsemblePrefetching(wiring, settings, reading, self._members) if settings.prefetch else None
        source = reading if self._prefetching is None else self._prefetching
        self._reading = source if settings.output == "torch" else View(settings.output, source)
        self._writing = RoutedWrites(self._members, wiring, self._routing)
        self._saving = EnsembleSaving(type(self).__name__, self._members, wiring, settings, self._prefetching)

    # ---- sampling ------------------------------------------------------------------------------------------------------

    @overload
    def sample(
        self, batch_size: Size = ..., return_info: Literal[False] = ..., *, device: Device = ..., timeout: Wait = ...
    ) -> Batch: ...
    @overload
    def sample(
        self, batch_size: Size = ..., *, return_info: Literal[True], device: Device = ..., timeout: Wait = ...
    ) -> tuple[Batch, tensordicts.TensorDict]: ...
    @overload
    def sample(self, batch_size: Size, return_info: bool, *, device: Device = ..., timeout: Wait = ...) -> object: ...
    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, device: Device = None, timeout: Wait = WAIT_S
    ) -> object:
        """Draw a batch.

        Args:
            batch_size: rows of all parts: a multiple of ``num_buffer_sampled``. Default: the constructor's.
            return_info: return ``(batch, info)``, a TensorDict ``[parts, rows]`` with ``("index", "buffer_ids")``, ``("index", "index")``
                and what the samplers say.
            device, timeout: as for ``ReplayBuffer.sample``; the time is that of each member.

        Returns:
            New tensors ``[parts, rows, ...]``, in the form of the members' batches.

        Raises:
            ValueError: the batch size cannot be divided. NoSampleable: a member that was chosen has nothing to draw; with
                ``p="sampleable"`` none has.
            KeyError, RuntimeError: members have other fields, dtypes or shapes; names two of them. Else as ``ReplayBuffer.sample``.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> members = [ReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2)]
        >>> for number, member in enumerate(members):
        ...     _ = member.extend({"task": torch.full((10,), number)})
        >>> batch, info = ReplayBufferEnsemble(*members, sample_from_all=True).sample(6, return_info=True)
        >>> batch["task"].tolist()
        [[0, 0, 0], [1, 1, 1]]
        >>> info["index", "buffer_ids"].tolist()
        [[0, 0, 0], [1, 1, 1]]
        """
        settings = self._settings
        size = settings.batch_size_of(batch_size)
        if size % self._wiring.sampler.num_buffer_sampled:
            self._wiring.sampler.rows_of_part(size)  # raises, in this thread
        self._wiring.gate.check_open("sample")
        if timeout is not WAIT_S:
            timeout = checked_timeout(timeout, "sample")
        target = None if device is None else target_of(device, settings.output)
        sample = self._reading.sample(size, bool(return_info), timeout)
        return sample if target is None else moved(sample, target)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether drawing a batch could find data now: with ``sample_from_all`` in all members, else in one at least.

        Raises ``RuntimeError`` if no batch size is known.

        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100))).can_sample(4)
        False
        """
        size = self._settings.batch_size_of(batch_size, drawing=False)
        sources = [(member.wiring.source, member.wiring.storage) for member in self._members]
        return bool(self._wiring.sampler.ready(sources, size))

    def __iter__(self) -> Iterator[Batch]:
        """Batches for ever: members whose epoch ends begin another one. Needs the constructor's ``batch_size``."""
        if self._settings.batch_size is None:
            raise RuntimeError("iteration: expected a batch size: pass ReplayBufferEnsemble(batch_size=…).")
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        while True:
            yield self.sample()

    def next(self) -> Batch:
        """The next batch, as :meth:`sample`; of TensorDicts without a device.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> member = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = member.extend(torch.arange(10))
        >>> ReplayBufferEnsemble(member, batch_size=4).next().shape
        torch.Size([1, 4])
        """
        batch = self.sample()
        return batch.clear_device_() if tensordicts.is_tensor_collection(batch) else batch

    # ---- writing -------------------------------------------------------------------------------------------------------

    def extend(self, data: object, *, update_priority: bool | None = None) -> tensordicts.TensorDict:
        """Divide rows among the members, each of which writes its own, in their order.

        Args:
            data: a TensorDict of any batch size. With ``routing_key``, that field has the number of the member of each row,
                ``[*batch]`` or ``[*batch, 1]``, and is stored, too. With ``routing_dim``, that dimension has an entry for each member.
            update_priority: None.

        Returns:
            A TensorDict ``[n]`` for the rows of ``data.reshape(-1)``: ``"buffer_ids"``, ``"index"``, the row in that member, -1 where
            a transform of the member made other rows of those that it was given; and where all writers track generations
            ``"index_generation"``, -1 for a row that a later one replaced.

        Raises:
            RuntimeError: the ensemble has no routing; a member is read-only, or has ``ndim > 1``. TypeError: no TensorDict, or
                numbers of members that are no ints. KeyError: no such field. ValueError: no such member, not a number for each row,
                or another size of the dimension. NotImplementedError: ``update_priority``. What the members raise for their rows.
                Nothing is written then; but what a member's own write transforms, or its limits, raise comes after the members before
                it have written.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, ReplayBufferEnsemble, TensorDictReplayBuffer
        >>> members = [TensorDictReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2)]
        >>> rb = ReplayBufferEnsemble(*members, routing_dim=0)
        >>> written = rb.extend(TensorDict({"obs": torch.arange(6).view(2, 3)}, [2, 3]))
        >>> written["buffer_ids"].tolist(), rb[1][:]["obs"].tolist()
        ([0, 0, 0, 1, 1, 1], [3, 4, 5])
        """
        if update_priority is not None:
            raise NotImplementedError("extend: update_priority: expected None: members take their rows' priorities.")
        self._materialize()
        return self._writing.extend(data)

    def add(self, data: object) -> tensordicts.TensorDict:
        """Write one row to the member that its ``routing_key`` names.

        Returns:
            As :meth:`extend`, a TensorDict ``[]``.

        Raises:
            RuntimeError: the ensemble routes by a dimension, which a row has not. ValueError: more than one row. Else as :meth:`extend`.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, ReplayBufferEnsemble, TensorDictReplayBuffer
        >>> members = [TensorDictReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2)]
        >>> rb = ReplayBufferEnsemble(*members, routing_key="task")
        >>> rb.add(TensorDict({"obs": 1.0, "task": 1}))["buffer_ids"].item()
        1
        """
        if self._routing.dim is not None:
            raise RuntimeError("add: expected an ensemble with routing_key, got routing_dim. Use extend().")
        if not tensordicts.is_tensor_collection(data):
            raise TypeError(f"add: expected a TensorDict, got {type(data).__name__}.")
        if data.batch_size:
            raise ValueError(f"add: expected one row, got batch size {list(data.batch_size)}. Did you mean extend()?")
        self._materialize()
        written = self._writing.extend(data.unsqueeze(0), "add")
        return written[0] if len(written) else written

    def update_if_present(
        self,
        *,
        index: object,
        generation: object,
        patch: object,
        version_key: object = None,
        version: object = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """As ``ReplayBuffer.update_if_present``, in the members that an index names.

        Args:
            index: ``batch["index"]``, or what :meth:`extend` returned.
            generation: ``batch["index_generation"]``, of the shape of ``"buffer_ids"``.
            patch, version_key, version, require_newer: as there.

        Raises:
            TypeError: another index. ValueError: no such member. Else as there, for any of the members. Nothing is written.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, ReplayBufferEnsemble, TensorDictReplayBuffer, TensorDictRoundRobinWriter
        >>> writer = TensorDictRoundRobinWriter(track_generations=True)
        >>> rb = ReplayBufferEnsemble(TensorDictReplayBuffer(storage=LazyTensorStorage(100), writer=writer), routing_key="task")
        >>> new = rb.extend(TensorDict({"obs": torch.zeros(2), "task": torch.zeros(2, dtype=torch.int64)}, [2]))
        >>> patch = {"obs": torch.ones(2)}
        >>> rb.update_if_present(index=new, generation=new["index_generation"], patch=patch).updated_count
        2
        """
        self._materialize()
        return self._writing.update_if_present(index, generation, patch, version_key, version, newer=require_newer)

    submit_update_if_present = submit_update_if_present

    def update_priority(self, index: object, priority: object = None, *, generation: Tensor | None = None) -> None:
        """New priorities of rows; nothing happens to those of members without priorities.

        Args:
            index: ``batch["index"]``, or what :meth:`extend` returned; or the whole ``info`` of a batch, which has the generations, too.
            priority: a number for all, or one for each row; with the ``info`` of windows also one for each, as for a ``ReplayBuffer``.
            generation: ``batch["index_generation"]``: rows rewritten since they were drawn are dropped and counted.

        Raises:
            PriorityError, RowError, RuntimeError, TypeError: as ``ReplayBuffer.update_priority``, for any of the members. ValueError: no
                such member. Nothing is changed.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, ReplayBufferEnsemble, TensorDictPrioritizedReplayBuffer
        >>> rb = ReplayBufferEnsemble(TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(100)))
        >>> _ = rb[0].extend(TensorDict({"obs": torch.arange(10)}, [10]))
        >>> batch = rb.sample(8)
        >>> rb.update_priority(batch["index"], batch["obs"].float(), generation=batch["index_generation"])
        """
        self._materialize()
        self._writing.update_priority(index, priority, generation)

    def update_tensordict_priority(self, data: tensordicts.TensorDict) -> None:
        """Hand the priorities of a sampled batch to the members that it is of; no effect on those without priorities.

        Args:
            data: a TensorDict with ``"index"`` and the ``priority_key`` of the first member that has priorities, a number per row or
                several, of which that member's ``reduction`` makes one.

        Raises:
            KeyError: no such entry. TypeError: no TensorDict. The others as :meth:`update_priority`. Nothing is changed.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, ReplayBufferEnsemble, TensorDictPrioritizedReplayBuffer
        >>> rb = ReplayBufferEnsemble(TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(100)))
        >>> _ = rb[0].extend(TensorDict({"obs": torch.arange(10)}, [10]))
        >>> batch = rb.sample(8)
        >>> batch["td_error"] = batch["obs"].float()  # of your model
        >>> rb.update_tensordict_priority(batch)
        """
        self._materialize()
        self._writing.update_tensordict_priority(data)

    def mark_update(self, index: object) -> None:
        """Rows were rewritten: as ``ReplayBuffer.mark_update``, of the members that an index names.

        Args:
            index: ``batch["index"]``, or what :meth:`extend` returned.

        Raises ``TypeError``, ``ValueError``, ``RowError``: as :meth:`update_priority`. Nothing is changed.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, ReplayBufferEnsemble, TensorDictPrioritizedReplayBuffer
        >>> rb = ReplayBufferEnsemble(TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(100)))
        >>> _ = rb[0].extend(TensorDict({"obs": torch.arange(10)}, [10]))
        >>> rb.mark_update(rb.sample(8)["index"])
        """
        self._materialize()
        self._writing.mark_update(index)

    def remove(self, rows: object, *, generation: object = None) -> int:
        """Remove rows of the members that an index names, as ``ReplayBuffer.remove``.

        Args:
            rows: ``batch["index"]``, or what :meth:`extend` returned; some of their rows, too.
            generation: ``batch["index_generation"]``, one for each row: rows that were overwritten since then stay.

        Returns:
            How many rows were removed.

        Raises:
            TypeError: another index. ValueError: no such member, or another number of generations than of rows. RowError, RuntimeError: as
                ``ReplayBuffer.remove``, for any of the members. Nothing is removed.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, ReplayBufferEnsemble, TensorDictReplayBuffer
        >>> members = [TensorDictReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2)]
        >>> rb = ReplayBufferEnsemble(*members, routing_key="task")
        >>> written = rb.extend(TensorDict({"obs": torch.arange(4), "task": torch.tensor([0, 1, 1, 1])}, [4]))
        >>> rb.remove(written[1:3])
        2
        >>> [len(member) for member in members]
        [1, 1]
        """
        self._materialize()
        return self._writing.remove(rows, generation)

    def end_streams(
        self,
        *,
        end_key: str | tuple[str, ...] = ("next", "done"),
        terminated_key: str | tuple[str, ...] | None = ("next", "terminated"),
        truncated_key: str | tuple[str, ...] | None = ("next", "truncated"),
    ) -> None:
        """Make the newest row of each member an end, before producers that write to it start again: no window runs across.

        Each member is one stream: ``end_key`` of its newest row becomes true, and ``truncated_key``, where it is stored, unless the row
        was an end already. Nothing may write to the members meanwhile. Empty ones are passed over.

        Args:
            end_key: the field that the members' samplers read.
            terminated_key: is only read. None: there is none.
            truncated_key: None: it is left alone.

        Raises:
            RuntimeError: a member without a tensor storage with ``ndim=1`` and one lane, a ring writer that tracks generations, and a
                :class:`SliceSampler` that reads ``end_key``. TypeError: the end flag is no bool.
                ValueError: two keys are the same. Nothing is changed.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, ReplayBufferEnsemble, SliceSampler, TensorDictReplayBuffer, TensorDictRoundRobinWriter
        >>> writer, sampler = TensorDictRoundRobinWriter(track_generations=True), SliceSampler(slice_len=2, end_key=("next", "done"))
        >>> member = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, writer=writer)
        >>> _ = member.extend(TensorDict({("next", "done"): torch.zeros(3, 1, dtype=torch.bool)}, [3]))
        >>> ReplayBufferEnsemble(member).end_streams()
        >>> member["next", "done"].flatten().tolist()
        [False, False, True]
        """
        keys = Keys.checked(end_key, terminated_key, truncated_key)
        self._materialize()
        end_streams(self._members, keys)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget the rows of all members. Raises ``RuntimeError``: one is read-only. Nothing is changed.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> rb = ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100)))
        >>> _ = rb[0].extend(torch.arange(3))
        >>> rb.empty()
        >>> len(rb[0])
        0
        """
        for member in self._members:
            member.check_editable("empty")
        self._discard_prefetched("empty")
        for rb in self._rbs:
            rb.empty(empty_write_count)

    # ---- members and their rows ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many members there are."""
        return len(self._rbs)

    @overload
    def __getitem__(self, index: int) -> ReplayBuffer[Batch]: ...
    @overload
    def __getitem__(self, index: slice | list[int] | Tensor) -> Self: ...
    @overload
    def __getitem__(self, index: tuple[object, ...]) -> Batch: ...
    def __getitem__(self, index: object) -> object:
        """``rb[i]``: a member; ``rb[i, j]``: rows ``j`` of it; ``rb[[0, 2]]`` and ``rb[1:]``: an ensemble of some, which draws from these
        members; ``rb[:, j]``: rows ``j`` of each, ``[members, ...]``, collated, without the ensemble's transform.

        Raises:
            IndexError: no such member; of rows ``RowError``. TypeError: no index, or floats. RuntimeError: one of two dimensions.
        """
        of_members, rows = split_index(index, "rb[index]")
        named = members_named(of_members, len(self._rbs), "rb[index]")
        if isinstance(named, int):
            return self._rbs[named] if rows is None else self._rbs[named][rows]
        if rows is not None:
            how = self._wiring.collate_fn
            parts = [self._rows(member, rows) for member in named]
            return collated(parts, [self._members[number] for number in named]) if how is None else how(parts)
        if named == list(range(len(self._rbs))):
            return self
        wiring, settings, some = self._wiring, self._settings, self._wiring.sampler.some(named)
        made: ReplayBufferEnsemble[Batch] = object.__new__(type(self))
        made._rbs, made._routing = tuple(self._rbs[member] for member in named), Routing(None, None)
        made._settings = Settings(settings.kind, settings.batch_size, None, None, settings.output, None)
        collate_fn, pinning, generator = wiring.collate_fn, wiring.pinning, wiring.generator
        around = Wiring(
            wiring.storage[named], wiring.transform[:], collate_fn=collate_fn, pinning=pinning, generator=generator
        )
        made._assemble(around, some, wiring.writer.some(named))
        return made

    def _rows(self, member: int, rows: object) -> object:
        with naming(member):
            return self._rbs[member][rows]

    query = asks_a_member("query", TypeError)
    set_, set_at_, update_ = (asks_a_member(call) for call in ("set_", "set_at_", "update_"))
    read_all_in_order, write_all = asks_a_member("read_all_in_order"), asks_a_member("write_all")
    __setitem__ = asks_a_member("rb[index] = value")

    # ---- components ----------------------------------------------------------------------------------------------------

    storage: StorageEnsemble = _shows(lambda self: self._wiring.storage, "Their storages: a :class:`StorageEnsemble`.")
    sampler: SamplerEnsemble = _shows(lambda self: self._wiring.sampler, "Their samplers: a :class:`SamplerEnsemble`.")
    writer: WriterEnsemble = _shows(lambda self: self._wiring.writer, "Their writers: a :class:`WriterEnsemble`.")

    @property
    def routing_key(self) -> tuple[str, ...] | None:
        """The field that says the member of a row, as a tuple, or None."""
        return self._routing.key

    @property
    def routing_dim(self) -> int | None:
        """The dimension whose entries are of one member each, or None."""
        return self._routing.dim

    def set_sampler(self, sampler: SamplerEnsemble) -> SamplerEnsemble:
        """Give each member another sampler, and choose members as ``sampler`` says; the previous ones are returned.

        Members draw with it, too. Raises ``TypeError``: no :class:`SamplerEnsemble`. ``ValueError``: of another number of samplers. What
        ``ReplayBuffer.set_sampler`` raises, for any of the members. Nothing is changed.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SamplerEnsemble, SamplerWithoutReplacement
        >>> member = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = member.extend(torch.arange(3))
        >>> rb = ReplayBufferEnsemble(member)
        >>> before = rb.set_sampler(SamplerEnsemble(SamplerWithoutReplacement(shuffle=False)))
        >>> rb.sample(3).tolist()
        [[0, 1, 2]]
        """
        previous = self.sampler
        self._swap("set_sampler", sampler, SamplerEnsemble, ReplayBuffer.set_sampler)
        return self._rewired(previous, sampler=sampler)

    def set_writer(self, writer: WriterEnsemble) -> WriterEnsemble:
        """Give each member another writer; the previous ones are returned. Raises as :meth:`set_sampler`.

        >>> from engram import ImmutableDatasetWriter, LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, WriterEnsemble
        >>> rb = ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100)))
        >>> before = rb.set_writer(WriterEnsemble(ImmutableDatasetWriter()))
        >>> rb.empty()
        Traceback (most recent call last):
        RuntimeError: ...
        """
        previous = self.writer
        self._swap("set_writer", writer, WriterEnsemble, ReplayBuffer.set_writer)
        return self._rewired(previous, writer=writer)

    def set_storage(self, storage: StorageEnsemble, collate_fn: Callable[..., object] | None = None) -> StorageEnsemble:
        """Give each member another storage (and the ensemble another collate function, if one is given); the previous ones are returned.

        Raises as :meth:`set_sampler`. ``ValueError``: an ensemble with transforms, as members keep theirs.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, StorageEnsemble
        >>> rb = ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100)))
        >>> _ = rb[0].extend(torch.arange(3))
        >>> before = rb.set_storage(StorageEnsemble(LazyTensorStorage(50)))
        >>> len(before[0]), len(rb[0])
        (3, 0)
        """
        previous = self.storage
        if check_components("set_storage", storage, StorageEnsemble, len(self)).transforms is not None:
            raise ValueError("set_storage: expected storages without transforms, got some: members keep their own.")
        self._swap("set_storage", storage, StorageEnsemble, ReplayBuffer.set_storage)
        self._wiring.storage, self._wiring.collate_fn = storage, collate_fn or self._wiring.collate_fn
        return self._rewired(previous)

    def _swap(
        self, call: str, given: OfMembers[T], kind: type[OfMembers[T]], put: Callable[[ReplayBuffer[Batch], T], T]
    ) -> None:
        """Give each member one of the components, by ``put``, which returns the one before.

        Raises as :func:`check_components`, and what one of the members raises, whose number it says. Nothing is changed.
        """
        components = check_components(call, given, kind, len(self))
        self._discard_prefetched(call)
        before: list[T] = []
        try:
            for member, component in zip(self._rbs, components, strict=True):
                before.append(put(member, component))
        except BaseException as error:  # an interrupt, too
            error.add_note(f"Raised by member {len(before)} of the ensemble. Nothing was changed.")
            for member, one in zip(self._rbs, before, strict=False):
                put(member, one)
            raise

    def _rewired(self, previous: T, sampler: SamplerEnsemble | None = None, writer: WriterEnsemble | None = None) -> T:
        """``previous``, once others have its place."""
        wiring = self._wiring
        wiring.connect(sampler or wiring.sampler, writer or wiring.writer, self._settings.batch_size)
        self._rewire()
        return previous

    def share(self, shared: bool = True) -> Self:
        """Let processes that receive the ensemble from now on see the same rows, as ``ReplayBuffer.share`` of every member.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100))).share().shared
        True
        """
        if shared:
            self._materialize()
            for number, rb in enumerate(self._rbs):
                with naming(number):
                    rb.share()
        return self

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """All state, as tensors and plain values: copies. Members, which may be written to meanwhile, one after the other.

        Keys: ``_storage``, ``_sampler`` and ``_writer``: of each member, by its number; ``_members``: the rest of each, by its number;
        and of the ensemble ``_transforms``, ``_batch_size``, ``_iterating``, ``_rng``, ``_default_rng`` and ``_prefetch_state``.

        Raises ``TypeError``: as ``ReplayBuffer.state_dict``.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> rb, other = (ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100))) for _ in range(2))
        >>> _ = rb[0].extend(torch.arange(3))
        >>> other.load_state_dict(rb.state_dict())
        >>> other[0][:].tolist()
        [0, 1, 2]
        """
        return self._saving.state_dict()

    def load_state_dict(self, state_dict: dict[str, object], *, default_rng: bool = False) -> None:
        """Take over a saved state: every later operation gives what it would have given then. All of it is checked first.

        Args:
            state_dict: of an ensemble of as many members, of the kinds of components as here.
            default_rng: set torch's default generator, too.

        Raises: as ``ReplayBuffer.load_state_dict``, for any of the members. Nothing is changed.

        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> rb = ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100)))
        >>> rb.load_state_dict(rb.state_dict())
        """
        self._saving.prepare_state(state_dict, default_rng=default_rng).commit()

    def dumps(self, path: StrPath, *, prefetch: str = "save") -> None:
        """Save the ensemble as a folder, which in one step replaces one that was saved there: all members at one moment.

        Each member is a dump of its own, in ``members/0``, ``members/1`` and so on, which a buffer like it can load by itself.

        Args:
            path: a free name, an empty folder, or what an earlier call has made.
            prefetch: ``"drop"`` leaves out batches that were drawn ahead, and saves the epochs of members as if they had never been
                drawn; but not those of shared members, and rows that are used up stay so.

        Raises: as ``ReplayBuffer.dumps``.

        >>> import tempfile, torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> rb, other = (ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100))) for _ in range(2))
        >>> _ = rb[0].extend(torch.arange(3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rb.dumps(f"{folder}/replay")
        ...     other.loads(f"{folder}/replay")
        >>> other[0][:].tolist()
        [0, 1, 2]
        """
        self._saving.dumps(path, prefetch)

    def loads(self, path: StrPath, *, convert: bool = False, default_rng: bool = False) -> None:
        """Take over what :meth:`dumps` saved, or TorchRL's. All of it is checked first.

        Args:
            path: the folder.
            convert, default_rng: as for ``ReplayBuffer.loads``, of every member.

        Raises: as ``ReplayBuffer.loads``. IncompatibleCheckpoint, too: of another number of members. Nothing is changed.

        >>> import tempfile
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> rb = ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rb.dumps(f"{folder}/replay")
        ...     rb.loads(f"{folder}/replay")
        """
        self._saving.loads(path, convert=convert, default_rng=default_rng)

    dump = save = dumps
    load = loads

    # ---- seeing it, and its end ----------------------------------------------------------------------------------------

    @property
    def write_count(self) -> int:
        """Rows written to all members since each was last emptied."""
        return sum(rb.write_count for rb in self._rbs)

    def stats(self) -> dict[str, float]:
        """A flat dict of numbers: ``size, capacity, utilization, write_count, bytes`` of all members, ``prefetch_queue_size``,
        ``initialized`` and ``num_buffers``. ``rb[i].stats()`` says more of each.

        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100))).stats()["capacity"]
        100
        """
        storages = self._wiring.storage.storages
        size, capacity = sum(map(len, storages)), sum(one.max_size for one in storages)
        return {
            "size": size,
            "write_count": self.write_count,
            "prefetch_queue_size": 0 if self._prefetching is None else len(self._prefetching),
            "initialized": 1,
            "capacity": capacity,
            "utilization": size / capacity,
            "bytes": self._wiring.storage.nbytes,
            "num_buffers": len(storages),
        }

    service_backend = "direct"
    dim_extend = 0
    as_remote: ClassVar[object] = classmethod(as_remote)
    start = returns_itself("Returns the ensemble: it runs already.")
    client = returns_itself("Returns the ensemble itself.")

    def shutdown(self, timeout: float | None = None) -> None:
        """Refuse sampling from the ensemble from now on, and end the threads of ``prefetch``. Repeatable. Members go on.

        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100))).shutdown()
        """
        self._wiring.gate.shut_down(None)
        if self._prefetching is not None:
            self._prefetching.close(timeout)

    def close(self) -> None:
        """Close the ensemble and all of its members, as ``ReplayBuffer.close``. Repeatable.

        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> with ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(100))) as rb:  # closes it at the end
        ...     member = rb[0]
        >>> member.closed
        True
        """
        if self._prefetching is not None:
            self._prefetching.close()
        self._wiring.gate.close(None)
        members = self._rbs
        closing.end(self, "the ensemble was closed. Make another one of buffers that are open.")
        for rb in members:
            rb.close()

    def __getstate__(self) -> dict[str, object]:
        wiring, sampler = self._wiring, self._wiring.sampler
        generator = None if wiring.generator is None else wiring.generator.get_state().numpy()
        choice = {"p": sampler.p, "sample_from_all": sampler.sample_from_all, "num_buffer_sampled": sampler.asked_parts}
        return {
            "_rbs": self._rbs,
            "_routing": self._routing,
            "_settings": self._settings,
            "_choice": choice,
            "_around": (wiring.transform, wiring.collate_fn, wiring.pinning, generator, wiring.gate),
            "_prefetched": None if self._prefetching is None or self.shared else self._prefetching.copy(),
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        prefetched, choice, around = (cast("Any", state.pop(name)) for name in ("_prefetched", "_choice", "_around"))
        self.__dict__.update(state, _settings=copy.copy(state["_settings"]))
        transform, collate_fn, pinning, generator_state, gate = around
        generator = None if generator_state is None else torch.Generator().manual_seed(0)
        if generator is not None:
            generator.set_state(torch.from_numpy(generator_state.copy()))
        rbs = self._rbs
        storages = StorageEnsemble(*(rb.storage for rb in rbs))
        wiring = Wiring(storages, transform, collate_fn=collate_fn, pinning=pinning, generator=generator)
        wiring.gate = copy.copy(gate)
        samplers = SamplerEnsemble(*(rb.sampler for rb in rbs), **choice)
        self._assemble(wiring, samplers, WriterEnsemble(*(rb.writer for rb in rbs)))
        apart = any(member.wiring.is_apart for member in self._members)
        if self._prefetching is not None and prefetched is not None and not apart:
            self._prefetching.restore(prefetched)

    def __repr__(self) -> str:
        sampler = self._wiring.sampler
        how = "sample_from_all=True" if sampler.sample_from_all else f"num_buffer_sampled={sampler.num_buffer_sampled}"
        rows = ", ".join(f"{len(rb.storage):,}/{rb.storage.max_size:,}" for rb in self._rbs)
        members = f"{type(self).__name__}({len(self)} members of {rows} rows"
        return f"{members}, {how}, batch_size={self._settings.batch_size})"


def _made(
    who: str, components: tuple[object, object, object], collate_fns: Sequence[Callable[..., object] | None] | None
) -> tuple[ReplayBuffer[Batch], ...]:
    """The members that components are of."""
    storages = checks.check_type(f"{who}: storages", components[0], StorageEnsemble, "members, or a StorageEnsemble")
    samplers = checks.check_type(f"{who}: samplers", components[1], SamplerEnsemble, "members, or a SamplerEnsemble")
    writers = checks.check_type(f"{who}: writers", components[2], WriterEnsemble, "members, or a WriterEnsemble")
    for one in components:
        overrides.refuse_others(one, **_OF_MEMBERS)
    n = len(storages)
    transforms = storages.transforms or (None,) * n
    collates = (None,) * n if collate_fns is None else tuple(collate_fns)
    if {len(samplers), len(writers), len(collates)} != {n}:
        raise ValueError(
            f"{who}: expected {n} samplers and writers, and collate_fns, one for each storage, got {len(samplers)}, {len(writers)} and "
            f"{len(collates)}."
        )
    rbs: list[ReplayBuffer[Batch]] = []
    parts = zip(storages.storages, samplers.samplers, writers.writers, transforms, collates, strict=True)
    for storage, sampler, writer, transform, how in parts:
        with naming(len(rbs)):
            rbs.append(
                ReplayBuffer(storage=storage, sampler=sampler, writer=writer, transform=transform, collate_fn=how)
            )
    return tuple(rbs)
