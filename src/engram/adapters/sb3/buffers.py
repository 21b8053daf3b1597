"""The uniform replay buffer, which the others extend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypedDict, cast

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers as sb3
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape, is_image_space_channels_first
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.utils import get_device

import engram
from engram._support import nested
from engram._support.checks import check_choice, check_count, check_number, check_path
from engram.adapters.scratch import Scratch
from engram.around import FinalObservations, FrameStack, NextFromFollowing, NStep, finals_of
from engram.errors import IncompatibleStore
from engram.format.schema import DTYPES
from engram.samplers import RandomSampler
from engram.samplers._base import DeclaredSampler
from engram.types import Draw, Extent, Sampler

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from stable_baselines3.common.vec_env import VecNormalize

    Array: TypeAlias = NDArray[np.generic]
    Nested: TypeAlias = Array | dict[str, Array]


#: The kinds of spaces that have a dtype and a shape.
_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Column(NamedTuple):
    """A field: the dtype and the shape of one step of one environment."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    def of(self, value: object, n: int, what: str) -> Array:
        """Values of ``n`` environments, ``[n, *shape]``. Raises ``ValueError``: they are not that many numbers."""
        array = np.asarray(value, self.dtype)
        shape = (n, *self.shape)
        try:
            return array if array.shape == shape else array.reshape(shape)
        except ValueError:
            raise ValueError(f"add: {what}: expected {list(shape)}, got {list(array.shape)}.") from None


class Columns:
    """The columns that observations are: one, or one for each key of a ``Dict``.

    Raises ``TypeError``: a space that cannot be stored.
    """

    def __init__(self, who: str, space: spaces.Space[object]) -> None:
        what = f"{who}: observation_space"
        self._nested = isinstance(space, spaces.Dict)
        parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        self.columns = {key: column_of(f"{what}[{key!r}]" if key else what, part) for key, part in parts.items()}

    def of(self, value: object, n: int, what: str) -> Nested:
        """Observations of ``n`` environments. Raises: as :meth:`Column.of`; ``KeyError``: one is missing."""
        if not self._nested:
            return self.columns[""].of(value, n, what)
        given: dict[str, object] = value  # type: ignore[assignment] # as the space says
        return {key: column.of(given[key], n, f"{what}[{key!r}]") for key, column in self.columns.items()}

    def paths(self, *root: str) -> dict[tuple[str, ...], Column]:
        """Where they are stored below ``root``."""
        return {(*root, key) if self._nested else root: column for key, column in self.columns.items()}

    def map(self, function: Callable[[tuple[str, ...]], Array], *root: str) -> Nested:
        """What a function returns for the path of each column below ``root``, nested as observations are."""
        return {key: function((*root, key)) for key in self.columns} if self._nested else function(root)


def column_of(what: str, space: spaces.Space[object]) -> Column:
    """What a space is stored as. Raises ``TypeError``: it cannot be stored."""
    dtype = np.dtype(space.dtype)
    if not isinstance(space, _ARRAYS) or dtype.name not in DTYPES:
        got = type(space).__name__ + (f" of {dtype}" if isinstance(space, _ARRAYS) else "")
        raise TypeError(
            f"{what}: expected a Box, Discrete, MultiDiscrete or MultiBinary of numbers, or for observations a Dict of these, got {got}."
        )
    return Column(dtype, tuple(get_obs_shape(space)))  # type: ignore[arg-type] # of such a space it is a tuple


def action_column(who: str, space: spaces.Space[object]) -> Column:
    """What actions are stored as: flat, and float32 in place of float64. Raises: as :func:`column_of`."""
    dtype = column_of(f"{who}: action_space", space).dtype
    return Column(np.dtype(np.float32) if dtype == np.float64 else dtype, (get_action_dim(space),))


class Frames:
    """How observations that are stacks become single frames: the last of ``n`` along an axis.

    Raises ``ValueError``: observations that are no stacks of so many frames; another padding.
    """

    def __init__(self, who: str, space: spaces.Space[object], n: int, padding: str) -> None:
        shape = space.shape if isinstance(space, spaces.Box) else None
        first = shape is not None and len(shape) == 3 and is_image_space_channels_first(space)  # type: ignore[arg-type]
        #: The axis of a stack, which counts from its end.
        self.axis = -3 if first else -1
        if not shape or shape[self.axis] % n:
            raise ValueError(
                f"{who}: frame_stack: expected observations that are {n} frames, a Box with {n} times as many channels, got {space}."
            )
        check_choice(f"{who}: frame_padding", padding, ("zeros", "first"))
        self.n, self.padding, self.size = n, padding, shape[self.axis] // n
        after = (slice(None),) * (-self.axis - 1)
        #: Of stacks the newest frame, all but the newest one, and all but the oldest one.
        self.newest, self._older, self._newer = (
            (..., frames, *after) for frames in (slice(-self.size, None), slice(-self.size), slice(self.size, None))
        )

    def column(self, stacks: Column) -> Column:
        """What one frame is stored as."""
        shape = [*stacks.shape]
        shape[self.axis] = self.size
        return stacks._replace(shape=tuple(shape))

    def check(self, stacks: Array, following: Array, starts: list[int]) -> None:
        """Raise ``ValueError`` unless sampling can build these stacks again of single frames.

        Args:
            stacks, following: ``[n, *shape]``, observed before and after a step.
            starts: the environments whose episode begins.
        """
        if stacks[self._newer].tobytes() != following[self._older].tobytes():
            raise ValueError(
                f"add: next_obs: expected the last {self.n - 1} frames of obs before its newest, as frame_stack={self.n} says, got others."
            )
        if starts:
            begun = stacks[starts]
            repeated = np.concatenate([begun[self.newest]] * (self.n - 1), self.axis)
            expected = repeated if self.padding == "first" else np.zeros_like(repeated)
            if not np.array_equal(begun[self._older], expected):
                raise ValueError(
                    f"add: obs: expected older frames that are {self.padding} where an episode begins, got others. VecFrameStack pads with "
                    "frame_padding='zeros', FrameStackObservation with 'first'."
                )


class Following:
    """Which episodes begin, of observations that are read from the following rows."""

    def __init__(self, n: int) -> None:
        #: The environments whose next step begins an episode.
        self.starts = [*range(n)]
        self._after: list[bytes] = []

    def cut(self, observed: Nested) -> list[int]:
        """Whose observation is not what followed the last step, though no flag ended the episode."""
        cut: set[int] = set()
        for before, part in zip(self._after, _parts(observed), strict=False):
            if before != (now := part.tobytes()):  # of bytes NaN equals itself
                size = len(now) // len(part)
                cut |= {at for at in range(len(part)) if before[at * size :][:size] != now[at * size :][:size]}
        return sorted(cut.difference(self.starts))

    def stepped(self, following: Nested, ended: list[int]) -> None:
        """Remember what was observed after a step, and which environments ended an episode with it."""
        self._after, self.starts = [part.tobytes() for part in _parts(following)], ended


def _parts(observed: Nested) -> Iterator[Array]:
    yield from observed.values() if isinstance(observed, dict) else (observed,)


class StoreArguments(TypedDict, total=False):
    """The keyword arguments of :class:`ReplayBuffer`, which its subclasses pass on."""

    scratch_dir: str | os.PathLike[str] | None
    n_steps: int
    gamma: float
    frame_stack: int
    frame_padding: str


Path: TypeAlias = tuple[str, ...]
Infos: TypeAlias = "Sequence[Mapping[str, object]]"
Samples: TypeAlias = ReplayBufferSamples | DictReplayBufferSamples
#: A batch of rows.
Rows: TypeAlias = dict[str, object]
Part: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"
Index: TypeAlias = "int | slice | tuple[int | slice | NDArray[np.int64], ...]"
OBSERVATION, ACTION = ("observation",), ("action",)
REWARD, TERMINATED, DONE = ("next", "reward"), ("next", "terminated"), ("next", "done")
#: In place of a next observation: which final observation it is.
FINAL = ("next", "final")
_ONE, _FLAG = Column(np.dtype(np.float32), (1,)), Column(np.dtype(np.bool_), (1,))


class ReplayBuffer(Scratch, sb3.ReplayBuffer):
    """Stable-Baselines3's replay buffer, whose rows lie in RAM or in a directory that survives ``kill -9``.

    ``DQN("MlpPolicy", env, replay_buffer_class=ReplayBuffer, replay_buffer_kwargs={"scratch_dir": "run/replay"})`` goes on with the
    steps that an earlier process wrote there; ``SAC``, ``TD3``, ``DDPG`` and sb3-contrib's ``QRDQN`` and ``TQC`` take the same.
    Batches are those of Stable-Baselines3. Observations are ``Box``, ``Discrete``, ``MultiDiscrete``, ``MultiBinary``, or a ``Dict``
    of these.

    Args:
        buffer_size, observation_space, action_space, device, n_envs, handle_timeout_termination: as in Stable-Baselines3.
        optimize_memory_usage: store each observation once. It may be combined with ``handle_timeout_termination``, ``n_steps`` and
            ``Dict`` observations, which Stable-Baselines3 refuses: next observations are exact at the ends of episodes. The newest step
            of an environment is drawn as soon as the next one is added.
        scratch_dir: the directory of the rows, of one running process at a time. Default: RAM.
        n_steps, gamma: draw returns of ``n_steps`` steps, as ``NStepReplayBuffer`` does, with ``discounts``. The ``n_steps`` of an
            algorithm does not reach a custom class.
        frame_stack: observations are stacks of so many frames, channels first or last, or flat; with ``optimize_memory_usage`` only
            the newest frame of each is stored, and stacks are built again when drawn. Needs a ``Box``. Of a full buffer the oldest
            ``frame_stack - 1`` steps of each environment are not drawn, as their older frames are overwritten. ``observations`` and
            ``next_observations`` of a batch of single steps are views of the same frames: change neither in place.
        frame_padding: what older frames are where an episode begins: ``"zeros"``, as ``VecFrameStack`` has it, or ``"first"``, the
            first frame, as Gymnasium's ``FrameStackObservation`` does.

    Raises:
        TypeError: a space that cannot be stored. ValueError: ``frame_stack`` without ``optimize_memory_usage``, of observations that are
            no such stacks, or another ``frame_padding``; a number out of range; a buffer too small for one whole stack.
        StoreInUse: another process trains with the directory. IncompatibleStore: it holds rows of another ``n_envs``, ``buffer_size`` or
            other spaces. Nothing is changed.

    What was open when the directory is opened counts as truncated, as its environments are reset. :attr:`rb` is the engram buffer, for
    :meth:`stats <engram.ReplayBuffer.stats>`, plots and checkpoints. ``observations``, ``actions``, ``rewards``, ``dones`` and
    ``timeouts`` are copies ``[buffer_size, n_envs, …]``; only ``dones`` takes assignments.

    >>> import gymnasium, tempfile
    >>> from engram.adapters.sb3 import ReplayBuffer
    >>> from stable_baselines3 import DQN
    >>> where = {"scratch_dir": tempfile.mkdtemp() + "/replay"}
    >>> for start in range(2):  # the second time, the steps of the first are there
    ...     model = DQN("MlpPolicy", "CartPole-v1", buffer_size=1_000, replay_buffer_class=ReplayBuffer, replay_buffer_kwargs=where)
    ...     _ = model.learn(40)
    ...     print(model.replay_buffer.size())
    40
    80
    """

    not_pickled: tuple[str, ...] = ("rb", "_source", "_unended", "_hold")

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[object],
        action_space: spaces.Space[object],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        frame_stack: int = 1,
        frame_padding: str = "zeros",
    ) -> None:
        who = type(self).__name__
        self._columns = Columns(who, observation_space)
        self._actions = action_column(who, action_space)
        self.observation_space, self.action_space = observation_space, action_space
        self.obs_shape = get_obs_shape(observation_space)  # type: ignore[assignment] # a dict for Dict, as in Stable-Baselines3
        self.action_dim = get_action_dim(action_space)
        self.n_envs = check_count(f"{who}: n_envs", n_envs)
        self.buffer_size = max(check_count(f"{who}: buffer_size", buffer_size) // n_envs, 1)
        self.device = get_device(device)
        self.optimize_memory_usage, self.handle_timeout_termination = optimize_memory_usage, handle_timeout_termination
        self.n_steps = check_count(f"{who}: n_steps", n_steps)
        self.gamma = check_number(f"{who}: gamma", gamma, least=0, most=1)
        self.scratch_dir = None if scratch_dir is None else check_path(f"{who}: scratch_dir", scratch_dir)
        frames = check_count(f"{who}: frame_stack", frame_stack)
        if frames > 1 and not optimize_memory_usage:
            raise ValueError(f"{who}: frame_stack: expected optimize_memory_usage=True beside it, got False.")
        if frames > 1:
            check_count(f"{who}: buffer_size // n_envs", self.buffer_size, least=frames + self.n_steps)
        self._frames = None if frames == 1 else Frames(who, observation_space, frames, frame_padding)
        self._lane: Literal["each"] | None = "each" if n_envs > 1 else None
        self._form: Callable[..., Samples] = (
            DictReplayBufferSamples if isinstance(observation_space, spaces.Dict) else ReplayBufferSamples
        )
        self._following, self._no_finals = Following(self.n_envs), np.full((self.n_envs, 2), -1)
        self._open()

    # ---- the store -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        observed = [*self._columns.paths(*OBSERVATION)]
        finals = FinalObservations(observed, end_keys=[DONE]) if self.optimize_memory_usage else None
        self._source = self._new_source()
        what = f"steps of n_envs={self.n_envs}, which are lanes, and of buffer_size={self.buffer_size} for each"
        size, sampler = self.buffer_size * self.n_envs, self._around(self._source, finals)
        self._open_rows(size, self.n_envs, what, sampler, finals)
        self._check_fields()
        #: Writes rows that end no episode, past the transform: they have no final observation.
        self._unended = self.rb if finals is None else engram.ReplayBuffer[Rows](storage=self.rb.storage)
        if len(self.rb):
            self.rb.end_trajectory("each")

    def _new_source(self) -> Sampler:
        """What draws rows."""
        return RandomSampler()

    def _around(self, source: Sampler, finals: FinalObservations | None) -> Sampler:
        """A sampler of rows with what batches need of the steps around them."""
        if self.n_steps > 1:
            source = NStep(source, self.n_steps, self.gamma, end_keys=[DONE])
        if finals is not None:
            source = NextFromFollowing(source, finals, end_keys=[DONE])
        if (frames := self._frames) is not None:
            padding = "same" if frames.padding == "first" else "constant"
            at = (frames.n, frames.axis, [OBSERVATION, ("next", *OBSERVATION)])
            source = FrameStack(source, *at, padding=padding, whole=True, views=True, end_keys=[DONE])
        return source

    def _fields(self) -> dict[Path, Column]:
        """What rows have."""
        observed = self._columns.paths(*OBSERVATION)
        if self._frames is not None:
            observed = {path: self._frames.column(column) for path, column in observed.items()}
        following = {("next", *path): column for path, column in observed.items()}
        if self.optimize_memory_usage:
            following = {FINAL: Column(np.dtype(np.int64), (2,))}
        return {**observed, ACTION: self._actions, **following, REWARD: _ONE, TERMINATED: _ONE, DONE: _FLAG}

    def _more(self, infos: Infos) -> dict[str, object]:  # noqa: ARG002 - of a subclass
        """Other fields of rows."""
        return {}

    def _check_fields(self) -> None:
        """Raise ``IncompatibleStore`` if the directory holds rows of other spaces."""
        memory = self.rb.storage.memory
        if memory is None:
            return
        held = {field.key: Column(np.dtype(field.dtype), tuple(field.shape)) for field in memory.schema.fields}
        expected = self._fields()
        for path in {**expected, **held}:
            if held.get(path) != expected.get(path):
                raise IncompatibleStore(
                    f"{type(self).__name__}: scratch_dir: expected {_said(expected.get(path))} under {'.'.join(path)!r}, as the spaces and "
                    f"arguments here say, got {_said(held.get(path))} in {str(self.scratch_dir)!r}. Use another directory."
                )

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        if self.scratch_dir is not None:
            self._following = Following(self.n_envs)

    # ---- writing -------------------------------------------------------------------------------------------------------

    def add(self, obs: object, next_obs: object, action: object, reward: object, done: object, infos: Infos) -> None:
        """Write a step of each environment.

        Args:
            obs, next_obs, action, reward, done: ``[n_envs, …]``.
            infos: of each environment; with ``handle_timeout_termination``, ``"TimeLimit.truncated"`` says that its end is none.

        Raises:
            ValueError: another number of values; with ``frame_stack``, stacks that single frames do not give again. Nothing is written.

        >>> import gymnasium, numpy
        >>> from engram.adapters.sb3 import ReplayBuffer
        >>> space = gymnasium.spaces.Box(-1, 1, (2,))
        >>> buffer = ReplayBuffer(100, space, gymnasium.spaces.Discrete(3), n_envs=2)
        >>> step = numpy.zeros((2, 2))
        >>> buffer.add(step, step, numpy.array([0, 2]), numpy.ones(2), numpy.zeros(2), [{}, {}])
        >>> buffer.size(), buffer.sample(4).actions.shape
        (1, torch.Size([4, 1]))
        """
        n, got = self.n_envs, "a dict" if isinstance(infos, dict) else len(infos)
        # Gymnasium's infos are a dict, which is as good as any where time-outs are not asked for.
        if got != n and (self.handle_timeout_termination or got != "a dict"):
            raise ValueError(f"add: infos: expected one of each of {n} environments, got {got}.")
        over: NDArray[np.bool_] = _FLAG.of(done, n, "done")  # type: ignore[assignment]
        terminated = over.astype(np.float32)
        if self.handle_timeout_termination and any(info.get("TimeLimit.truncated") for info in infos):
            cut = np.array([[bool(info.get("TimeLimit.truncated"))] for info in infos])
            over, terminated = over | cut, np.where(cut, np.float32(0), terminated)
        before, after = self._columns.of(obs, n, "obs"), self._columns.of(next_obs, n, "next_obs")
        then: dict[str, object] = {"reward": _ONE.of(reward, n, "reward"), "terminated": terminated, "done": over}
        row = {"action": self._actions.of(action, n, "action"), "next": then, **self._more(infos)}
        if self.optimize_memory_usage:
            self._add_once(before, after, row, then, over.nonzero()[0].tolist())
        else:
            then["observation"] = after
            self.rb.extend({"observation": before, **row}, lane=self._lane)

    def _add_once(self, before: Nested, after: Nested, row: Rows, then: Rows, ended: list[int]) -> None:
        """Write a step whose next observations are those of the following step, or kept apart where it ends an episode.

        Args:
            row, then: its other fields, and what ``"next"`` holds.
            ended: the environments whose episode ends with it.
        """
        following, observed, last = self._following, before, after
        cut = following.cut(before)
        if self._frames is not None and not (isinstance(before, dict) or isinstance(after, dict)):
            self._frames.check(before, after, following.starts + cut)
            observed, last = before[self._frames.newest], after[self._frames.newest]
        if cut:
            self.rb.end_trajectory(cut)
        if ended:
            rb, then["observation"] = self.rb, last
        else:
            rb, then["final"] = self._unended, self._no_finals
            if isinstance(observed, dict):
                then["observation"] = {}  # as the transform leaves it
        rb.extend({"observation": observed, **row}, lane=self._lane)
        following.stepped(after, ended)

    def reset(self) -> None:
        """Forget all rows, in the directory too."""
        self.rb.empty()
        self._following = Following(self.n_envs)

    # ---- sampling ------------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Samples:  # type: ignore[override]
        """Draw a batch: that of Stable-Baselines3.

        Args:
            batch_size: steps, of all environments alike.
            env: normalizes observations and rewards. Returns of several steps are scaled, and not clipped, as they are sums.

        Raises ``NoSampleable``, a ``RuntimeError``: there is nothing to draw.

        >>> import gymnasium, numpy
        >>> from engram.adapters.sb3 import ReplayBuffer
        >>> buffer = ReplayBuffer(10, gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(3), n_steps=2, gamma=0.5)
        >>> for step in range(2):
        ...     at = numpy.full((1, 2), step)
        ...     buffer.add(at, at + 1, numpy.zeros(1), numpy.ones(1), numpy.full(1, step == 1), [{}])
        >>> batch = buffer.sample(16)
        >>> sorted({*zip(batch.rewards.flatten().tolist(), batch.discounts.flatten().tolist())})
        [(1.0, 0.5), (1.5, 0.25)]
        """
        return self._form(*self._parts(self.rb.sample(batch_size), env))

    def _get_samples(self, batch_inds: NDArray[np.int64], env: VecNormalize | None = None) -> Samples:  # type: ignore[override]
        """The batch of these steps, each of a random environment."""
        lanes = np.random.randint(0, self.n_envs, len(batch_inds))  # noqa: NPY002 - as Stable-Baselines3 draws it
        rows = _Rows(torch.from_numpy(lanes * self.buffer_size + batch_inds))
        finals = finals_of(self.rb.sampler)
        some = engram.ReplayBuffer[Rows](storage=self.rb.storage, sampler=self._around(rows, finals), transform=finals)
        return self._form(*self._parts(some.sample(len(batch_inds)), env))

    def _parts(self, batch: Rows, env: VecNormalize | None) -> tuple[Part | None, ...]:
        """What the named tuple of a batch holds, in its order."""
        now: dict[str, Part] = batch  # type: ignore[assignment]
        after: dict[str, torch.Tensor] = batch["next"]  # type: ignore[assignment]
        seen, following, reward = now["observation"], cast("Part", after["observation"]), after["reward"]
        if env is not None:
            seen, following = (_normalized(part, env) for part in (seen, following))
            reward = self._normalized_reward(reward, env)
        parts: tuple[Part | None, ...] = (seen, now["action"], following, after["terminated"], reward, now.get("gamma"))
        if self.device.type != "cpu":
            parts = nested.map_tensors(parts, lambda x: x.to(self.device))
        return parts

    def _normalized_reward(self, reward: torch.Tensor, env: VecNormalize) -> torch.Tensor:
        if self.n_steps > 1:
            return reward / float(np.sqrt(env.ret_rms.var + env.epsilon)) if env.norm_reward else reward
        return torch.from_numpy(env.normalize_reward(reward.numpy()).astype(np.float32))

    # ---- what Stable-Baselines3 keeps in arrays ---------------------------------------------------------------------------

    @property
    def pos(self) -> int:  # type: ignore[override] # an attribute there
        """Where the next step goes."""
        return self.rb.storage.extent().seam[0] if self.rb.storage.initialized else 0

    @property
    def full(self) -> bool:  # type: ignore[override]
        """Whether steps overwrite others."""
        return len(self.rb) == self.buffer_size * self.n_envs

    @property
    def observations(self) -> Nested:  # type: ignore[override]
        """Stored observations: a copy. With ``frame_stack`` single frames."""
        return self._columns.map(self.stored, *OBSERVATION)

    @property
    def next_observations(self) -> Nested:  # type: ignore[override]
        """Stored next observations: a copy."""
        if self.optimize_memory_usage:
            raise AttributeError("next_observations: expected optimize_memory_usage=False to store them, got True.")
        return self._columns.map(self.stored, "next", *OBSERVATION)

    @property
    def actions(self) -> Array:  # type: ignore[override]
        """Stored actions: a copy."""
        return self.stored(ACTION)

    @property
    def rewards(self) -> Array:  # type: ignore[override]
        """Stored rewards: a copy."""
        return self.stored(REWARD).squeeze(-1)

    @property
    def dones(self) -> Dones:  # type: ignore[override]
        """Which steps end an episode; what is assigned to them is stored."""
        return Dones(self)

    @property
    def timeouts(self) -> NDArray[np.float32]:  # type: ignore[override]
        """Which steps end an episode that was truncated: a copy."""
        return self.flags(DONE) - self.flags(TERMINATED)

    def flags(self, path: Path) -> NDArray[np.float32]:
        """A column of flags, ``[buffer_size, n_envs]``."""
        return self.stored(path).astype(np.float32).squeeze(-1)

    def stored(self, path: Path) -> Array:
        """A column, ``[buffer_size, n_envs, …]``; 0 where no step is."""
        dtype, shape = self._fields()[path]
        rows = np.zeros((self.n_envs * self.buffer_size, *shape), dtype)
        if len(self.rb):
            extent = self.rb.storage.extent()
            rows[extent.rows(torch.arange(extent.size)).numpy()] = self.rb[path].numpy()
        return rows.reshape(self.n_envs, self.buffer_size, *shape).swapaxes(0, 1)


class Dones:
    """End flags of the rows, ``[buffer_size, n_envs]``: an array, of which an assignment ends episodes."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def __array__(self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None) -> Array:
        flags = self._buffer.flags(DONE)
        return flags if dtype is None else flags.astype(dtype)

    def __getitem__(self, index: Index) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._buffer.flags(DONE)[index]
        return found

    def __setitem__(self, index: Index, value: float | Array) -> None:
        before = self._buffer.flags(DONE)
        after = before.copy()
        after[index] = value
        steps, lanes = (before != after).nonzero()
        rows = torch.from_numpy(lanes * self._buffer.buffer_size + steps)
        ends = torch.from_numpy(after[steps, lanes])[:, None]
        self._buffer.rb.set_at_(TERMINATED, ends, rows)
        self._buffer.rb.set_at_(DONE, ends != 0, rows)


class _Rows(DeclaredSampler):
    """Draws rows that were chosen."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:  # noqa: ARG002 - of the protocol
        return Draw(self._rows)


def _normalized(part: Part, env: VecNormalize) -> Part:
    made = env.normalize_obs(nested.map_tensors(part, torch.Tensor.numpy))
    return cast("Part", nested.map_leaves(made, lambda leaf: torch.from_numpy(cast("Array", leaf))))


def _said(column: Column | None) -> str:
    return "nothing" if column is None else f"{column.dtype} {list(column.shape)}"
