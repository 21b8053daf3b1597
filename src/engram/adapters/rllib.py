"""RLlib's replay buffers of episodes over engram's stores: on disk if asked, and by priority.

DQN of the new API stack takes them by their name:
``replay_buffer_config={"type": "engram.adapters.rllib.EpisodeReplayBuffer"}``. A subclass of SAC
makes them. :mod:`engram.adapters.rllib` is imported by programs that use RLlib, and by nothing of
engram.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy, deepcopy
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Self, cast

import numpy as np
import torch

import engram
from engram._support import checks, field_paths, unsupported
from engram.adapters.scratch import Array, Path, Rows, Scratch, leaves
from engram.types import StrPath

with unsupported.needs("engram.adapters.rllib", "rllib"):
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode as Episode
    from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
    from ray.rllib.utils import force_list, replay_buffers

__all__ = ["EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer"]

_EXTRA, _NUMBER, _T = "extra_model_outputs", ("collector", "traj_ids"), ("t",)
_REWARD, _TERMINATED, _TRUNCATED, _DONE = (("next", name) for name in ("reward", "terminated", "truncated", "done"))
_ARGUMENTS = ("batch_size_B", "batch_length_T", "metrics_num_episodes_for_smoothing")


class EpisodeReplayBuffer(Scratch, replay_buffers.EpisodeReplayBuffer):  # type: ignore[misc] # typed where it is installed only
    """RLlib's ``EpisodeReplayBuffer``; its steps lie in RAM or in a directory that survives ``kill -9``.

    DQN takes it by its name. With
    ``config.training(replay_buffer_config={"type": "engram.adapters.rllib.EpisodeReplayBuffer",
    "scratch_dir": "run/replay"})`` it goes on with the episodes that an earlier process wrote
    there. Samples, draws, evictions and metrics are those of RLlib.

    Args:
        capacity, batch_size_B, batch_length_T, metrics_num_episodes_for_smoothing: as in RLlib.
        scratch_dir: the directory of the steps, of one running process at a time. Default: RAM.
        exclude: what is not stored, by its name: ``"extra_model_outputs"``, or one entry,
            ``"extra_model_outputs.action_logp"``.

    Raises:
        ValueError: a capacity below 1. StoreInUse: another process trains with the directory.
        IncompatibleStore: it holds steps of another ``capacity``. Nothing is changed.

    Observations and actions are numbers, or dicts of these. Infos are not stored: those of samples
    are empty. An episode that is open when the directory is opened counts as truncated. Where one
    episode alone outgrows the capacity, its oldest steps go, an eighth of the capacity at a time.
    :attr:`rb` is the engram buffer, for :meth:`stats <engram.ReplayBuffer.stats>`, plots and
    checkpoints.

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

    _max_priority: float = 1.0
    #: Exponents of priorities, ``alpha``, and of weights, ``beta``, of a buffer that draws by priority.
    _by: Mapping[str, float] = {}
    #: Episodes and steps that the running call adds, and evicts, beside those that RLlib's own ``add`` counts.
    _uncounted = (0, 0), (0, 0)

    def __init__(
        self, capacity: int = 10_000, *, scratch_dir: StrPath | None = None, exclude: Collection[str] = (), **kw: int
    ) -> None:
        who = type(self).__name__
        unsupported.reject_unsupported(who, {name: kw[name] for name in kw if name not in _ARGUMENTS}, {}, _ARGUMENTS)
        self._arguments = {"capacity": checks.check_count(f"{who}: capacity", capacity), **kw, **self._by}
        self.scratch_dir = None if scratch_dir is None else checks.check_path(f"{who}: scratch_dir", scratch_dir)
        self.exclude, self.spaces = frozenset(exclude), (None, None)
        self._open()

    # ---- the store -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        size, by = int(self._arguments["capacity"]), self._by
        sampler = engram.PrioritizedSampler(size, by["alpha"], by["beta"], eps=0.0) if by else engram.RandomSampler()
        self._open_rows(size, 1, f"steps of capacity={size}", sampler)
        # The remover is never asked: rows of evicted episodes are free before others are written.
        self.rb.set_writer(engram.RemovingWriter(engram.Lifo()))
        self._index()

    def _index(self) -> None:
        """Make RLlib's table of the stored steps, as if they had been added.

        Where steps are missing, another episode begins.
        """
        super().__init__(**self._arguments)
        self.stored = self._stored_columns()
        if not self.stored:
            return
        tickets = self.rb.storage.tickets_of(torch.arange(self.capacity, device="cpu")).numpy()
        rows = tickets.argsort()[np.count_nonzero(tickets < 0) :]  # as they were written
        numbers, t = self.stored[_NUMBER][rows], self.stored[_T][rows]
        order = numbers.argsort(kind="stable")
        follows = (np.diff(numbers[order]) == 0) & (np.diff(t[order]) == 1)
        parts = np.split(rows[order], np.flatnonzero(~follows) + 1) if len(rows) else []
        parts.sort(key=lambda part: int(tickets[part[0]]))
        super().add([_Stored(self, f"engram-{part[0]}", part, ended=True) for part in parts])

    def _rows_of(self, indices: Iterable[tuple[int, ...]]) -> torch.Tensor:
        """The rows of entries of RLlib's ``_indices``."""
        return torch.tensor([int(self.episodes[i - self._num_episodes_evicted].rows[at]) for i, at, *_ in indices])

    def __reduce__(self) -> tuple[object, ...]:
        made = partial(type(self), **self._arguments, scratch_dir=self.scratch_dir, exclude=self.exclude)  # type: ignore[arg-type]
        return made, (), self.get_state()

    def __deepcopy__(self, memo: dict[int, Self]) -> Self:
        made = type(self)(**self._arguments, exclude=self.exclude)  # type: ignore[arg-type]
        made.set_state(deepcopy(self.get_state(), memo))
        return made

    def get_state(self) -> dict[str, object]:
        """The state that RLlib's own buffer has, with all steps."""
        return {name: copy(value) for name, value in super().get_state().items()}

    def set_state(self, state: dict[str, object]) -> None:
        """Be as the buffer of a state was, also one of RLlib's own; a directory, too.

        The oldest episodes beyond the capacity go. With another capacity, all priorities are 1.

        Raises:
            ValueError: the state of a buffer that draws otherwise. As :meth:`add`: its steps cannot
                be stored. Nothing is changed.
        """
        tree = cast("list[float] | None", state.get("_sum_segment"))
        if "episodes" not in state or (tree is None) == bool(self._by):
            raise ValueError(f"set_state: expected a state of {type(self).__name__}, got one with {sorted(state)}.")
        chunks = [Episode.from_state(one) for one in cast("list[dict[str, object]]", state["episodes"])]
        self._steps_of(chunks)  # raises before anything is changed
        self._evict(len(self.episodes), 0)
        self.add(chunks, *((1.0,) if self._by else ()))
        whole = self._num_timesteps == sum(map(len, chunks)) and len(self.episodes) == len(chunks)
        if whole and (tree is None or len(tree) == len(self._sum_segment.value)):
            super().set_state({name: copy(value) for name, value in state.items()})
            if self._by and self._indices:
                leaves = torch.tensor([self._sum_segment[node] for _, _, node in self._indices], dtype=torch.float64)
                self.rb.update_priority(self._rows_of(self._indices), leaves ** (1 / (self._by["alpha"] or 1)))

    __setstate__ = set_state

    # ---- writing -------------------------------------------------------------------------------------------------------

    def add(self, episodes: Episode | list[Episode], weight: float | None = None) -> None:
        """Write episodes, or the next steps of some, after the oldest ones have made room.

        Args:
            weight: of a buffer that draws by priority: that of the steps. Default: the largest one
                so far.

        Raises:
            TypeError: what is no number: a tuple, a text; an episode of several agents.
            ValueError: steps that do not follow those of the episode that are there; other fields,
                shapes or dtypes than the first episode has; a negative weight. Nothing is changed.
        """
        chunks = [one for one in force_list(episodes) if not isinstance(one, Episode) or len(one)]
        priority = checks.check_number("add: weight", self._max_priority if weight is None else weight, least=0)
        steps = self._steps_of(chunks)
        gone, trimmed, kept = self._planned(chunks)
        there, before = min(gone, len(self.episodes)), self._num_timesteps
        self._evict(there, trimmed)
        # Episodes and steps that are gone at once: they are never written. By priority, RLlib does not count them.
        begun, dropped = (0, 0) if self._by else (gone - there, len(kept) - int(kept.sum()))
        self._uncounted = (begun, dropped), (begun + there, dropped + before - self._num_timesteps)
        self._num_episodes_evicted += begun
        self._num_timesteps_added += dropped
        made = []
        if kept.any():
            rows = self.rb.extend(field_paths.nested({path: column[kept] for path, column in steps.items()}))
            if self._by:
                self.rb.update_priority(rows, priority)
            self.stored = self.stored or self._stored_columns()
            parts = np.split(rows.numpy(), np.cumsum(kept)[np.cumsum([*map(len, chunks)])[:-1] - 1])
            made = [_Stored(self, one.id_, part) for one, part in zip(chunks, parts, strict=True) if len(part)]
            self.spaces = chunks[-1].observation_space, chunks[-1].action_space
        super().add(made, *((priority,) if self._by else ()))

    def _planned(self, chunks: list[Episode]) -> tuple[int, int, np.typing.NDArray[np.bool_]]:
        """What goes if chunks are added, by RLlib's rule, and which of their steps stay.

        Returns how many of the oldest episodes go, those that begin here included; how many steps
        of the next one; and bool ``[n]``. Raises ``ValueError``: as :meth:`add`.
        """
        total, gone, there = self._num_timesteps, 0, {one.id_: [one] for one in self.episodes}  # the oldest first
        for count, chunk in enumerate(chunks, 1):
            parts = there.setdefault(chunk.id_, [])
            if parts and (parts[-1].is_done or parts[-1].t != chunk.t_started):
                expected = "no more steps, as it is over" if parts[-1].is_done else f"its steps from {parts[-1].t} on"
                raise ValueError(f"add: episode {chunk.id_!r}: expected {expected}, got those from {chunk.t_started}.")
            parts.append(chunk)
            total += len(chunk)
            while (not self._by or count == len(chunks)) and total > self.capacity and len(there) > 1:
                total -= sum(map(len, there.pop(next(iter(there)))))
                gone += 1
        over = total - self.capacity + self.capacity // 8 if total > self.capacity else 0  # of the only episode
        oldest = len(self.episodes[gone]) if gone < len(self.episodes) else 0
        trimmed, stay = min(over, oldest), {id(one) for parts in there.values() for one in parts}
        kept = np.array([id(one) in stay for one in chunks for _ in range(len(one))], bool)
        kept[np.flatnonzero(kept)[: over - trimmed]] = False
        return (gone + 1, 0, kept) if trimmed == oldest > 0 else (gone, trimmed, kept)

    def _evict(self, gone: int, trimmed: int) -> list[int]:
        """Remove the oldest episodes, and the first steps of the only one that is left.

        Returns their nodes in RLlib's trees.
        """
        lost = [one.rows for one in islice(self.episodes, gone)]
        if trimmed:
            lost.append(self.episodes[gone].rows[:trimmed])
            self.episodes[gone] = _Stored(self, self.episodes[gone].id_, self.episodes[gone].rows[trimmed:])
        if not lost:
            return []
        self.rb.remove(torch.from_numpy(np.concatenate(lost)))
        for _ in range(gone):
            del self.episode_id_to_index[self.episodes.popleft().id_]
        self._num_episodes_evicted += gone
        left, first = sum(map(len, lost)), (self._num_episodes_evicted, trimmed)
        self._num_timesteps -= left
        # Those of the oldest episodes are the first ones, or nearly so.
        *_, last = islice((at for at, entry in enumerate(self._indices) if entry[:2] < first), left)
        nodes = [node for entry in self._indices[: last + 1] if entry[:2] < first for node in entry[2:]]
        self._indices[: last + 1] = [entry for entry in self._indices[: last + 1] if entry[:2] >= first]
        if trimmed:
            self._indices[:] = [(number, at - trimmed, *node) for number, at, *node in self._indices]
        return nodes

    def _update_add_metrics(self, **counts: int | dict[str, int]) -> None:
        for name, count in counts.items():
            more = self._uncounted["evicted" in name]["steps" in name]
            counts[name] = {key: n + more for key, n in count.items()} if isinstance(count, dict) else count + more
        super()._update_add_metrics(**counts)

    def _steps_of(self, chunks: list[Episode]) -> dict[Path, Array]:
        """The rows of episodes. Raises ``TypeError``, ``ValueError``: as :meth:`add`."""
        steps = [*map(self._rows, chunks)]
        parts = [self.stored, *steps] if self.stored else steps
        kinds = {frozenset((".".join(path), one.dtype, one.shape[1:]) for path, one in part.items()) for part in parts}
        if unlike := {name for kind in kinds for other in kinds for name, *_ in kind - other}:
            raise ValueError(f"add: expected the first episode's fields, dtypes, shapes, got other {sorted(unlike)}.")
        return {path: np.concatenate([one[path] for one in steps]) for path in (steps[0] if steps else ())}

    def _rows(self, chunk: Episode) -> dict[Path, Array]:
        """The rows of an episode's steps. Raises ``TypeError``: as :meth:`add`."""
        checks.check_type("add", chunk, Episode, "episodes of a single agent")
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
    infos = property(lambda self: InfiniteLookbackBuffer([{}] * (len(self) + 1)))
    extra_model_outputs = property(lambda self: {p[1]: self.read(*p[:2]) for p in self.buffer.stored if p[0] == _EXTRA})

    def __init__(self, buffer: EpisodeReplayBuffer, id_: str, rows: Rows, *, ended: bool = False) -> None:
        self.buffer, self.id_, self.rows, self.t_started = buffer, id_, rows, int(buffer.stored[_T][rows[0]])
        self.t = self.t_started + len(rows)
        self.is_terminated, is_truncated = (bool(buffer.stored[path][rows[-1]]) for path in (_TERMINATED, _TRUNCATED))
        self.is_truncated = is_truncated or (ended and not self.is_terminated)

    def __deepcopy__(self, memo: object) -> _Stored:
        return self

    def concat_episode(self, other: _Stored) -> None:
        self.rows, self.t = np.concatenate([self.rows, other.rows]), other.t
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated

    def get_state(self) -> dict[str, object]:
        return cast("dict[str, object]", self.slice(slice(None)).get_state())

    def read(self, *root: str, following: Path = ("",)) -> InfiniteLookbackBuffer:
        """A field, or dicts of the fields below it, as RLlib's episodes have it."""
        columns, n = self.buffer.stored, len(root)
        ends = {path: columns.get((*following, *path[n:])) for path in columns if path[:n] == root}
        found = {path[n:]: _Field(columns[path], self.rows, after) for path, after in ends.items()}
        return InfiniteLookbackBuffer(found[()] if () in found else field_paths.nested(found))


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
    """An :class:`EpisodeReplayBuffer` that draws steps by priority; a directory keeps priorities, too.

    Args:
        alpha, beta: exponents of priorities, and of the weights of :attr:`rb`. RLlib gives
            :meth:`sample` its own ``beta``.
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
        self._by = {"alpha": alpha, "beta": beta}
        super().__init__(capacity, **kwargs)  # type: ignore[arg-type] # as there

    def _index(self) -> None:
        super()._index()
        if self._indices:
            sampler = cast("engram.PrioritizedSampler", self.rb.sampler)
            self._max_priority = max(1.0, sampler.default_priority)
            priorities = sampler.priorities().leaves_of(self._rows_of(self._indices)).tolist()
            for (_, _, node), priority in zip(self._indices, priorities, strict=True):
                self._sum_segment[node] = self._min_segment[node] = priority

    def _evict(self, gone: int, trimmed: int) -> list[int]:
        nodes = super()._evict(gone, trimmed)
        if nodes:
            for node in nodes:
                self._free_nodes.appendleft(node)
                self._max_idx -= self._max_idx == node
                self._sum_segment[node], self._min_segment[node] = 0.0, float("inf")
            self._tree_idx_to_sample_idx = {node: at for at, (_, _, node) in enumerate(self._indices)}
            self._last_sampled_indices[:] = [None if node in nodes else node for node in self._last_sampled_indices]
        return nodes

    def update_priorities(self, priorities: Array, module_id: str | None = None) -> None:
        """Give the steps of the last sample their priorities; those evicted since are left out.

        Raises:
            PriorityError: one is not finite. ValueError: there are more or fewer than steps.
                Nothing is changed.
        """
        drawn = self._last_sampled_indices
        if len(priorities) != len(drawn):
            raise ValueError(f"update_priorities: expected {len(drawn)}, of the last sample, got {len(priorities)}.")
        nodes = [node for node in drawn if node is not None]
        kept = np.asarray(priorities)[[node is not None for node in drawn]]
        rows = self._rows_of(self._indices[self._tree_idx_to_sample_idx[node]] for node in nodes)
        self.rb.update_priority(rows, torch.from_numpy(np.maximum(kept, 1e-12)))
        self._last_sampled_indices[:] = nodes
        super().update_priorities(kept, module_id)
