"""RLlib's replay buffers of episodes over engram's stores: on disk if asked, and by priority.

DQN of the new API stack takes them by their name: ``replay_buffer_config={"type": "engram.adapters.rllib.EpisodeReplayBuffer"}``. A
subclass of SAC makes them.
:mod:`engram.adapters.rllib` is imported by programs that use RLlib, and by nothing of engram.
"""

from __future__ import annotations

from copy import deepcopy
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from engram._support.checks import check_count, check_number, check_path
from engram._support.field_paths import nested
from engram._support.unsupported import needs, reject_unsupported
from engram.adapters.scratch import Scratch, leaves
from engram.samplers import PrioritizedSampler, RandomSampler

with needs("engram.adapters.rllib", "rllib"):
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode as Episode
    from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
    from ray.rllib.utils import force_list, replay_buffers

if TYPE_CHECKING:
    from collections.abc import Collection

    from engram.adapters.scratch import Array, Path, Rows
    from engram.types import StrPath

__all__ = ["EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer"]

_EXTRA, _NUMBER, _T = "extra_model_outputs", ("collector", "traj_ids"), ("t",)
_REWARD, _TERMINATED, _TRUNCATED, _DONE = (("next", name) for name in ("reward", "terminated", "truncated", "done"))
_ARGUMENTS = ("batch_size_B", "batch_length_T", "metrics_num_episodes_for_smoothing")


class EpisodeReplayBuffer(Scratch, replay_buffers.EpisodeReplayBuffer):  # type: ignore[misc] # typed where it is installed only
    """RLlib's ``EpisodeReplayBuffer``, whose steps lie in RAM or in a directory that survives ``kill -9``.

    ``config.training(replay_buffer_config={"type": "engram.adapters.rllib.EpisodeReplayBuffer", "scratch_dir": "/data/replay"})`` goes on
    with the episodes that an earlier process wrote there. Samples, draws, evictions and metrics are those of RLlib.

    Args:
        capacity, batch_size_B, batch_length_T, metrics_num_episodes_for_smoothing: as in RLlib.
        scratch_dir: the directory of the steps, of one running process at a time. Default: RAM.
        exclude: what is not stored, by its name: ``"extra_model_outputs"``, or one entry, ``"extra_model_outputs.action_logp"``.

    Raises:
        ValueError: a capacity below 1.
        StoreInUse: another process trains with the directory. IncompatibleStore: it holds steps of another ``capacity``. Nothing is
            changed.

    Observations and actions are numbers, or dicts of these. Infos are not stored: those of samples are empty. An episode that is open
    when the directory is opened counts as truncated. The store has a quarter more rows than ``capacity``, for steps of evicted episodes
    between those of others. :attr:`rb` is the engram buffer, for :meth:`stats <engram.ReplayBuffer.stats>`, plots and checkpoints.

    >>> import tempfile
    >>> from engram.adapters.rllib import EpisodeReplayBuffer
    >>> from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    >>> where = tempfile.mkdtemp() + "/replay"
    >>> steps = {"observations": [0.0, 0.1, 0.2], "actions": [1, 0], "rewards": [1.0, 1.0], "len_lookback_buffer": 0}
    >>> for start in range(2):  # the second time, the steps of the first are there
    ...     buffer = EpisodeReplayBuffer(100, scratch_dir=where)
    ...     buffer.add([SingleAgentEpisode(**steps, terminated=True)])
    ...     print(buffer.get_num_timesteps(), len(buffer.sample(4, n_step=1, sample_episodes=True)))
    ...     buffer.close()
    2 4
    4 4
    """

    not_pickled = ("rb", "_hold", "stored", "metrics", "_sum_segment", "_min_segment")
    _max_priority: float = 1.0
    #: Exponents of priorities and weights, of a buffer that draws by priority.
    _by: tuple[float, float] | None = None

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        scratch_dir: StrPath | None = None,
        exclude: Collection[str] = (),
        **kwargs: int,
    ) -> None:
        who = type(self).__name__
        reject_unsupported(who, {name: kwargs[name] for name in kwargs if name not in _ARGUMENTS}, {}, _ARGUMENTS)
        self._arguments = {"capacity": check_count(f"{who}: capacity", capacity), **kwargs}
        self._size = capacity + capacity // 4
        self.scratch_dir = None if scratch_dir is None else check_path(f"{who}: scratch_dir", scratch_dir)
        self.exclude, self.spaces = frozenset(exclude), (None, None)
        self._open()

    # ---- the store -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        sampler = PrioritizedSampler(self._size, *self._by, eps=0.0) if self._by is not None else RandomSampler()
        self._open_rows(self._size, 1, f"steps of capacity={self._arguments['capacity']}", sampler)
        self._index()

    def _index(self) -> None:
        """Have the episodes of the store as if they had just been added. Where steps are missing another one begins."""
        super().__init__(**self._arguments, **({"alpha": self._by[0]} if self._by else {}))
        self.stored = self._stored_columns()
        if self.stored:
            extent = self.rb.storage.extent()
            ring = (extent.seam[0] + np.arange(-extent.filled[0], 0)) % self._size
            rows = ring[extent.contains(torch.from_numpy(ring)).numpy()]
            _, first, which = np.unique(self.stored[_NUMBER][rows], return_index=True, return_inverse=True)
            rows = rows[np.argsort(first[which], kind="stable")]
            follows = (np.diff(self.stored[_NUMBER][rows]) == 0) & (np.diff(self.stored[_T][rows]) == 1)
            for part in np.split(rows, np.flatnonzero(~follows) + 1) if len(rows) else ():
                super().add([_Stored(self, f"engram-{part[0]}", part, truncated=True)])

    def close(self) -> None:
        """Give the directory up: of a buffer that is used no more."""
        self.stored, self._hold = {}, None
        self.rb.close()

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._index()

    get_state = Scratch.__getstate__

    def set_state(self, state: dict[str, object]) -> None:
        """Be as the buffer of a state was. Raises ``ValueError``: a state of RLlib's own buffer. Nothing is changed."""
        if "_size" not in state:
            raise ValueError(f"set_state: expected a state of {type(self).__name__}, got one with {sorted(state)}.")
        self.close()
        self.__setstate__(dict(state))

    # ---- writing -------------------------------------------------------------------------------------------------------

    def add(self, episodes: Episode | list[Episode], weight: float | None = None) -> None:
        """Write episodes, or the next steps of some, and evict the oldest ones beyond the capacity.

        Args:
            weight: of a buffer that draws by priority: that of the steps. Default: the largest one so far.

        Raises:
            TypeError: what is no number: a tuple, a text; an episode of several agents. ValueError: steps that do not follow those of the
                episode that are there; other fields, shapes or dtypes than the first episode has; more steps than the store has rows; a
                negative weight. Nothing is written.
        """
        chunks = [one for one in force_list(episodes) if len(one)]
        if not chunks:
            return
        steps, n, capacity = self._checked(chunks), sum(map(len, chunks)), self._arguments["capacity"]
        priority = check_number("add: weight", self._max_priority if weight is None else weight, least=0)
        seam = self.rb.storage.extent().seam[0] if self.stored else 0
        lost = [*takewhile(lambda one: (one.rows[0] - seam) % self._size < n, self.episodes)]
        ids = {*self.episode_id_to_index, *(one.id_ for one in chunks)}
        if n > capacity or (lost and ids <= {one.id_ for one in lost}):
            raise ValueError(
                f"add: expected up to {capacity} steps, {self._size} an episode, got more. Raise capacity."
            )
        rows = self.rb.extend(nested({path: np.concatenate([one[path] for one in steps]) for path in steps[0]}))
        if self._by:
            self.rb.update_priority(rows, priority)
        self.stored = self.stored or self._stored_columns()
        parts = np.split(rows.numpy(), np.cumsum([*map(len, chunks)])[:-1])
        made = [_Stored(self, one.id_, part) for one, part in zip(chunks, parts, strict=True)]
        self.spaces = chunks[-1].observation_space, chunks[-1].action_space
        self.capacity = min(
            capacity, self._num_timesteps + n - sum(map(len, lost))
        )  # whose rows have been written over
        super().add(made, *((priority,) if self._by else ()))
        self.capacity = capacity

    def _checked(self, chunks: list[Episode]) -> list[dict[Path, Array]]:
        """The rows of episodes. Raises: as :meth:`add`."""
        newest: dict[str, Episode] = {}
        for one in chunks:
            if not isinstance(one, Episode):
                raise TypeError(f"add: expected episodes of a single agent, got {type(one).__name__}.")
            at = self.episode_id_to_index.get(one.id_)
            before = newest.get(one.id_, None if at is None else self.episodes[at - self._num_episodes_evicted])
            if before and (before.is_done or before.t != one.t_started):
                expected = "no more steps, as it is over" if before.is_done else f"its steps from {before.t} on"
                raise ValueError(f"add: episode {one.id_!r}: expected {expected}, got those from {one.t_started} on.")
            newest[one.id_] = one
        steps = [*map(self._steps, chunks)]
        parts = [self.stored, *steps] if self.stored else steps
        kinds = {frozenset((".".join(path), one.dtype, one.shape[1:]) for path, one in part.items()) for part in parts}
        if unlike := {name for kind in kinds for other in kinds for name, *_ in kind - other}:
            raise ValueError(
                f"add: expected the first episode's fields, dtypes and shapes, got others: {sorted(unlike)}."
            )
        return steps

    def _steps(self, chunk: Episode) -> dict[Path, Array]:
        """The rows of an episode's steps. Raises ``TypeError``: as :meth:`add`."""
        chunk = chunk if chunk.is_numpy else deepcopy(chunk).to_numpy()
        given: dict[str, object] = {"observation": chunk.get_observations(), "action": chunk.get_actions()}
        given[_EXTRA] = {key: one.get() for key, one in chunk.extra_model_outputs.items()}
        rows = dict(leaves(given, self.exclude))
        for path in [path for path in rows if path[0] == "observation"]:
            rows["next", *path], rows[path] = rows[path][1:], rows[path][:-1]
        number = int.from_bytes(blake2b(chunk.id_.encode(), digest_size=8).digest()) >> 1
        rows |= {_NUMBER: np.full(len(chunk), number), _T: np.arange(chunk.t_started, chunk.t)}
        last = np.arange(1 - len(chunk), 1) == 0
        rows |= {_TERMINATED: last & chunk.is_terminated, _TRUNCATED: last & chunk.is_truncated}
        return {**rows, _DONE: last & chunk.is_done, _REWARD: np.asarray(chunk.get_rewards(), np.float64)}


class _Stored(Episode):  # type: ignore[misc] # as above
    """An episode whose steps lie in the store, where each is read when it is asked for."""

    observation_space = property(lambda self: self.buffer.spaces[0])
    action_space = property(lambda self: self.buffer.spaces[1])
    observations = property(lambda self: self.read("observation", following=("next", "observation")))
    actions = property(lambda self: self.read("action"))
    rewards = property(lambda self: self.read(*_REWARD))
    infos = property(lambda self: InfiniteLookbackBuffer([{} for _ in range(len(self) + 1)]))
    extra_model_outputs = property(lambda self: {p[1]: self.read(*p[:2]) for p in self.buffer.stored if p[0] == _EXTRA})

    def __init__(self, buffer: EpisodeReplayBuffer, id_: str, rows: Rows, *, truncated: bool = False) -> None:
        self.buffer, self.id_, self.rows, self.t_started = buffer, id_, rows, int(buffer.stored[_T][rows[0]])
        self.t = self.t_started + len(rows)
        self.is_terminated, is_truncated = (bool(buffer.stored[path][rows[-1]]) for path in (_TERMINATED, _TRUNCATED))
        self.is_truncated = is_truncated or (truncated and not self.is_terminated)

    def __deepcopy__(self, memo: object) -> _Stored:
        return self

    def concat_episode(self, other: _Stored) -> None:
        self.rows, self.t = np.concatenate([self.rows, other.rows]), other.t
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated

    def read(self, *root: str, following: Path = ("",)) -> InfiniteLookbackBuffer:
        """A field, or dicts of the fields below it, as RLlib's episodes have it."""
        columns, n = self.buffer.stored, len(root)
        ends = {path: columns.get((*following, *path[n:])) for path in columns if path[:n] == root}
        found = {path[n:]: _Field(columns[path], self.rows, after) for path, after in ends.items()}
        return InfiniteLookbackBuffer(found[()] if () in found else nested(found))


class _Field:
    """A field of an episode's steps as an array; ``after``: the field that has what follows the last one."""

    def __init__(self, column: Array, rows: Rows, after: Array | None) -> None:
        self._column, self._rows, self._after = column, rows, after

    def __len__(self) -> int:
        return len(self._rows) + (self._after is not None)

    def __getitem__(self, index: int | slice) -> Array:
        at, last = np.arange(len(self))[index], len(self._rows) - 1
        found = self._column[self._rows[np.minimum(at, last)]]
        if self._after is None:
            return found.copy()
        over = (at > last).reshape(at.shape + (1,) * (self._column.ndim - 1))
        return cast("Array", np.where(over, self._after[self._rows[last]], found)[()])


class PrioritizedEpisodeReplayBuffer(EpisodeReplayBuffer, replay_buffers.PrioritizedEpisodeReplayBuffer):  # type: ignore[misc] # as above
    """An :class:`EpisodeReplayBuffer` that draws steps in proportion to their priorities, which a directory keeps, too.

    Args:
        alpha, beta: exponents of priorities, and of weights of :attr:`rb`; RLlib gives :meth:`sample` its own ``beta``.
        capacity, …, exclude: of :class:`EpisodeReplayBuffer`.

    Raises: as :class:`EpisodeReplayBuffer` and ``engram.PrioritizedSampler``.

    >>> import numpy
    >>> from engram.adapters.rllib import PrioritizedEpisodeReplayBuffer
    >>> from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    >>> buffer = PrioritizedEpisodeReplayBuffer(100)
    >>> steps = {"observations": [0.0, 0.1, 0.2], "actions": [1, 0], "rewards": [1.0, 1.0], "len_lookback_buffer": 0}
    >>> buffer.add(SingleAgentEpisode(**steps, terminated=True))
    >>> drawn = buffer.sample(64, n_step=1)
    >>> buffer.update_priorities(numpy.array([1e9 if one.get_actions(0) else 0.0 for one in drawn]))
    >>> {int(one.get_actions(0)) for one in buffer.sample(8, n_step=1)}
    {1}
    """

    def __init__(self, capacity: int = 10_000, *, alpha: float = 1.0, beta: float = 0.4, **kwargs: object) -> None:
        self._by = alpha, beta
        super().__init__(capacity, **kwargs)  # type: ignore[arg-type] # as there

    def _index(self) -> None:
        super()._index()
        if self._indices:
            sampler = cast("PrioritizedSampler", self.rb.sampler)
            self._max_priority = max(1.0, sampler.default_priority)
            rows = torch.from_numpy(np.concatenate([one.rows for one in self.episodes]))
            for (_, _, node), leaf in zip(self._indices, sampler.priorities().leaves_of(rows).tolist(), strict=True):
                self._sum_segment[node] = self._min_segment[node] = leaf

    def update_priorities(self, priorities: Array, module_id: str | None = None) -> None:
        """Give the steps of the last sample their priorities.

        Raises ``PriorityError``: one is not finite. ``RuntimeError``: another number of them than of steps. Nothing is changed.
        """
        drawn = [self._indices[self._tree_idx_to_sample_idx[node]] for node in self._last_sampled_indices]
        rows = [self.episodes[number - self._num_episodes_evicted].rows[at] for number, at, _ in drawn]
        self.rb.update_priority(torch.tensor(rows), torch.from_numpy(np.maximum(priorities, 1e-12)))
        super().update_priorities(priorities, module_id)
