"""tianshou's replay buffers over engram's stores: on disk if asked, and by priority.

A ``Collector`` takes them in place of tianshou's own. :mod:`engram.adapters.tianshou` is imported by programs that use tianshou 2, and by
nothing of engram.
"""

from __future__ import annotations

from copy import deepcopy
from typing import NoReturn, cast

import h5py
import numpy as np
import torch

from engram._support import checks, field_paths, unsupported
from engram.adapters.scratch import Scratch, leaves
from engram.samplers import PrioritizedSampler, RandomSampler

with unsupported.needs("engram.adapters.tianshou", "tianshou"):
    from tianshou import data
    from tianshou.data.utils.converter import to_hdf5

import os
from collections.abc import Collection, Mapping, Sequence

from engram.adapters.scratch import Array, Path, Rows
from engram.types import Sampler

__all__ = ["PrioritizedVectorReplayBuffer", "VectorReplayBuffer"]

_ROLES: Mapping[Path, str] = {(name,): name for name in ("done", "terminated", "truncated")}
#: What tianshou stores as these, whatever the first row is.
_DTYPES: Mapping[Path, type[np.generic]] = {("rew",): np.float64, **dict.fromkeys(_ROLES, np.bool_)}


class VectorReplayBuffer(Scratch, data.VectorReplayBuffer):  # type: ignore[misc] # typed where it is installed only
    """tianshou's ``VectorReplayBuffer``, whose rows lie in RAM or in a directory that survives ``kill -9``.

    ``Collector(policy, envs, VectorReplayBuffer(20_000, len(envs), scratch_dir="run/replay"))`` goes on with the steps that an earlier
    process wrote there. Indices, batches and draws are those of tianshou, bit for bit.

    Args:
        total_size, buffer_num, stack_num, ignore_obs_next, save_only_last_obs, sample_avail: as in tianshou.
        scratch_dir: the directory of the rows, of one running process at a time. Default: RAM.
        exclude: what is not stored, by its name in a batch: ``"info"``, or one entry, ``"info.name"``. Rows hold numbers and flags only:
            tianshou's own keep Python objects.

    Raises:
        StoreInUse: another process trains with the directory. IncompatibleStore: it holds rows of another ``total_size`` or
            ``buffer_num``. Nothing is changed.

    What was open when the directory is opened counts as truncated, as its environments are reset. ``buffer.obs``, ``buffer.rew`` and the
    like are read-only views of the stored rows. :attr:`rb` is the engram buffer, for :meth:`stats <engram.ReplayBuffer.stats>`, plots and
    checkpoints.

    >>> import numpy, tempfile
    >>> from engram.adapters.tianshou import VectorReplayBuffer
    >>> from tianshou.data import Batch
    >>> where = tempfile.mkdtemp() + "/replay"
    >>> for start in range(2):  # the second time, the steps of the first are there
    ...     buffer = VectorReplayBuffer(100, 2, scratch_dir=where)
    ...     flags, at = numpy.zeros(2, bool), numpy.zeros((2, 3))
    ...     rows = Batch(obs=at, obs_next=at, act=numpy.zeros(2), rew=numpy.ones(2), terminated=flags, truncated=flags)
    ...     _ = buffer.add(rows)
    ...     print(len(buffer))
    ...     buffer.close()
    2
    4
    """

    not_pickled = ("rb", "_hold", "_meta", "_stored")

    def __init__(
        self,
        total_size: int,
        buffer_num: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        exclude: Collection[str] = (),
        **kwargs: object,
    ) -> None:
        who = type(self).__name__
        checks.check_count(f"{who}: buffer_num", buffer_num)
        super().__init__(checks.check_count(f"{who}: total_size", total_size), buffer_num, **kwargs)
        self.scratch_dir = None if scratch_dir is None else checks.check_path(f"{who}: scratch_dir", scratch_dir)
        self.exclude = frozenset(exclude)
        self._open()

    # ---- the store -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        what = f"steps of buffer_num={self.buffer_num}, which are lanes, and of total_size={self.maxsize}"
        self._open_rows(self.maxsize, self.buffer_num, what, self._new_sampler())
        if len(self.rb):
            self.rb.end_trajectory("each", roles=_ROLES)
        else:
            self.rb.empty()
        self._attach()
        self._follow()

    def _new_sampler(self) -> Sampler:
        """What priorities are kept by."""
        return RandomSampler()

    def _attach(self) -> None:
        """Have the columns of the store, which it may just have got, as arrays."""
        self._stored = self._stored_columns()
        if self._stored:
            self._fill_holes()
        for column in self._stored.values():
            column.flags.writeable = False
        self._meta = data.Batch(field_paths.nested(self._stored))
        self._set_batch_for_children()

    def _fill_holes(self) -> None:
        """Have what a killed process began to write be a copy of the step before, which has become an end: tianshou reads all rows."""
        extent = self.rb.storage.extent()
        if extent.holes is not None:
            every = torch.arange(extent.capacity, device="cpu")
            live = every[extent.contains(every)].numpy()
            holes = extent.holes.numpy()
            before = live[np.searchsorted(live, holes) - 1]
            for column in self._stored.values():
                column[holes] = column[before]

    def _follow(self) -> None:
        """Have the cursors of the store."""
        if self.rb.storage.initialized:
            extent = self.rb.storage.extent()
            self._lengths = np.array(extent.filled)
            ahead = np.array(extent.seam) - self._offset
            self.last_index = self._offset + (ahead - 1) % np.maximum(self._lengths, 1)
            for buffer, filled, at in zip(self.buffers, extent.filled, ahead.tolist(), strict=True):
                vars(buffer).update(_size=filled, _insertion_idx=at, _ep_start_idx=at, _ep_return=0.0, _ep_len=0)

    def __getstate__(self) -> dict[str, object]:
        without = {id(vars(one)["_meta"]): data.Batch() for one in self.buffers}  # views of all rows
        return {**super().__getstate__(), "buffers": deepcopy(self.buffers, without)}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._attach()

    def close(self) -> None:
        """Give the directory up: of a buffer that is used no more."""
        self._meta, self._stored = data.Batch(), {}
        self._set_batch_for_children()
        super().close()

    def reset(self, keep_statistics: bool = False) -> None:
        """Forget all rows, in the directory too."""
        self.rb.empty()
        super().reset(keep_statistics=keep_statistics)

    # ---- writing -------------------------------------------------------------------------------------------------------

    def add(
        self, batch: data.Batch, buffer_ids: Sequence[int] | Rows | None = None
    ) -> tuple[Array, Array, Array, Array]:
        """Write a step of each environment, as tianshou does.

        Returns arrays of where they are, and the returns, lengths and first rows of episodes; 0 of one that goes on for the first two.

        Raises:
            TypeError: Python objects, which rows cannot hold. KeyError: a field that is required is missing. RuntimeError: another shape
                than the first row has. Nothing is written.
        """
        ids = np.arange(self.buffer_num) if buffer_ids is None else np.asarray(buffer_ids)
        rows = self._rows_of(batch, len(ids))
        self.rb.extend(field_paths.nested(rows), lane=ids)
        if rows.keys() != self._stored.keys():
            self._attach()
        said = []
        for number, reward, done in zip(ids, batch.rew, rows["done",], strict=True):
            at, *episode, start = self.buffers[number]._update_state_pre_add(reward, done)  # noqa: SLF001 - as tianshou does
            offset = self._offset[number]
            self.last_index[number], self._lengths[number] = at + offset, len(self.buffers[number])
            said.append((at + offset, *episode, start + offset))
        where, lengths, returns, starts = map(np.array, zip(*said, strict=True))
        return where, lengths, returns, starts

    def _rows_of(self, batch: data.Batch, n: int) -> dict[Path, Array]:
        """What is written of a batch, with zeros for stored fields that it lacks; new ones get a column. Raises: as :meth:`add`."""
        names = set(self._reserved_keys).intersection(batch.get_keys()) - {"done"}
        if missing := self._required_keys_for_add - names - {"done"}:
            raise KeyError(f"add: expected {sorted(missing)} in the batch, got {sorted(map(str, batch.get_keys()))}.")
        given = {name: batch[name] for name in self._reserved_keys if name in names}  # in the same order each time
        if not self._save_obs_next:
            given.pop("obs_next", None)
        for name in ("obs", "obs_next") if self._save_only_last_obs else ():
            if name in given:
                given[name] = given[name][:, -1]
        rows = dict(leaves(given, self.exclude, of=data.Batch))
        rows["done",] = np.logical_or(rows["terminated",], rows["truncated",])
        for path, value in rows.items():
            dtype = self._stored.get(path, value).dtype
            rows[path] = value.astype(_DTYPES.get(path, dtype), copy=False)
        fits = all(value.shape == (n, *self._stored.get(path, value).shape[1:]) for path, value in rows.items())
        for path in [path for path in rows if fits and self._stored and path not in self._stored]:
            self.rb.add_field(path, torch.from_numpy(np.zeros_like(rows[path][0])))
        for path in self._stored.keys() - rows.keys():
            rows[path] = np.zeros((n, *self._stored[path].shape[1:]), self._stored[path].dtype)
        return rows

    def set_array_at_key(
        self, seq: Array, key: str, index: Rows | slice | None = None, default_value: float | None = None
    ) -> None:
        """Set one field of rows, as tianshou does; a new one has ``default_value`` elsewhere. Raises as ``rb.set_at_``."""
        if (key,) not in self._stored:
            fill = 0 if default_value is None and seq.dtype.kind not in "fc" else default_value
            self.rb.add_field(key, torch.from_numpy(np.zeros_like(seq[0])), fill=np.nan if fill is None else fill)
            self._attach()
        rows = self._indices if index is None else self._indices[index]
        values = np.ascontiguousarray(seq, self._stored[key,].dtype)
        self.rb.set_at_(key, torch.from_numpy(values), torch.from_numpy(rows))

    def set_batch(self, *batch: object) -> NoReturn:
        """Raise ``NotImplementedError``: the store has the rows."""
        raise NotImplementedError(f"{type(self).__name__}: expected rows that are added, and stay. Call add(batch).")

    dropnull = set_batch

    def _set_batch_for_children(self) -> None:
        for offset, buffer in zip(self._offset, self.buffers, strict=True):
            vars(buffer)["_meta"] = self._meta[offset : offset + buffer.maxsize] if self._stored else data.Batch()

    # ---- reading -------------------------------------------------------------------------------------------------------

    def _compile(self) -> None:
        """Nothing is compiled: :meth:`prev` and :meth:`next` are NumPy's."""

    def prev(self, index: int | Rows) -> Rows:
        """The steps before: of the first one of an episode itself."""
        start, length, last = self._around(index)
        before = (np.asarray(index) % self.maxsize - start - 1) % length
        end = self.done[before + start] | (before + start == last)
        return cast("Rows", (before + end) % length + start)

    def next(self, index: int | Rows) -> Rows:
        """The steps after: of the last one of an episode itself."""
        start, length, last = self._around(index)
        at = np.asarray(index) % self.maxsize
        end = self.done[at] | (at == last)
        return cast("Rows", (at - start + 1 - end) % length + start)

    def _around(self, index: int | Rows) -> tuple[Rows, Rows, Rows]:
        """Of the environments of rows: where they begin, how many rows they have, and the newest one."""
        number = np.asarray(index) % self.maxsize // (self.maxsize // self.buffer_num)
        return self._offset[number], np.maximum(self._lengths[number], 1), self.last_index[number]

    def save_hdf5(self, path: str, compression: str | None = None) -> None:
        """Save the rows, or the directory's name, to a file that :meth:`load_hdf5` reads."""
        with h5py.File(path, "w") as file:
            to_hdf5(self.__getstate__(), file, compression=compression)


class PrioritizedVectorReplayBuffer(VectorReplayBuffer):
    """A :class:`VectorReplayBuffer` that draws steps in proportion to their priorities, which a directory keeps, too.

    Algorithms of tianshou weigh their losses by ``batch.weight`` and write the errors back, as with its own buffer of that name.

    Args:
        alpha: exponent of priorities.
        beta: exponent of weights, between 0, no correction, and 1.
        weight_norm: divide weights by the largest one of the batch; else by the largest one of all rows.
        total_size, buffer_num, …, kwargs: of :class:`VectorReplayBuffer`.

    Draws come from NumPy's global state, as in tianshou. Raises: as :class:`VectorReplayBuffer` and ``engram.PrioritizedSampler``.

    >>> import numpy
    >>> from engram.adapters.tianshou import PrioritizedVectorReplayBuffer
    >>> from tianshou.data import Batch
    >>> buffer = PrioritizedVectorReplayBuffer(100, 2, alpha=1.0, beta=0.4)
    >>> flags, at = numpy.zeros(2, bool), numpy.zeros((2, 3))
    >>> where, *_ = buffer.add(Batch(obs=at, obs_next=at, act=[0, 1], rew=numpy.ones(2), terminated=flags, truncated=flags))
    >>> buffer.update_weight(where, numpy.array([0.0, 1e9]))  # the step of the second environment
    >>> batch, indices = buffer.sample(8)
    >>> set(batch.act.tolist())
    {1}
    """

    def __init__(
        self, total_size: int, buffer_num: int, *, alpha: float, beta: float, weight_norm: bool = True, **kwargs: object
    ) -> None:
        self._by, self._weight_norm = (alpha, beta), weight_norm
        super().__init__(total_size, buffer_num, **kwargs)  # type: ignore[arg-type] # as there
        self.options.update(alpha=alpha, beta=beta)

    def _new_sampler(self) -> PrioritizedSampler:
        return PrioritizedSampler(self.maxsize, *self._by, eps=float(np.finfo(np.float32).eps))

    def set_beta(self, beta: float) -> None:
        """Set the exponent of weights."""
        self._by = self._by[0], beta
        self._priorities.beta = beta

    @property
    def _priorities(self) -> PrioritizedSampler:
        return cast("PrioritizedSampler", self.rb.sampler)

    def sample_indices(self, batch_size: int | None) -> Rows:
        """Rows by priority; all of them for 0 or None, as in tianshou."""
        if batch_size is None or batch_size <= 0 or len(self) == 0:
            return cast("Rows", super().sample_indices(batch_size))
        key = int(np.random.randint(2**63))  # noqa: NPY002 - as tianshou draws
        return self._priorities.priorities().draw(key, batch_size)[0].numpy()

    def get_weight(self, index: int | Rows) -> np.typing.NDArray[np.float64]:
        """Weights of rows, 1 for the row that is drawn least often."""
        rows = np.atleast_1d(np.asarray(index))
        return self._priorities.priorities().weights(torch.from_numpy(rows)).numpy().reshape(np.shape(index))

    def update_weight(self, index: Rows, new_weight: Array | torch.Tensor) -> None:
        """Give rows their priorities: ``abs(new_weight)``. Raises ``PriorityError``: they are not finite."""
        errors = new_weight.detach().cpu() if isinstance(new_weight, torch.Tensor) else torch.as_tensor(new_weight)
        self._priorities.update_priority(torch.from_numpy(np.asarray(index)), errors.abs().reshape(-1))

    def __getitem__(self, index: object) -> data.Batch:
        rows = index
        if isinstance(index, slice):
            rows = self.sample_indices(0) if index == slice(None) else self._indices[: len(self)][index]
        batch, weight = super().__getitem__(rows), self.get_weight(cast("Rows", rows))
        batch.weight = weight / weight.max() if self._weight_norm else weight
        return batch
