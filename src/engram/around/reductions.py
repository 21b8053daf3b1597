"""What is computed from the steps around a row: frames joined, rewards of n steps added up, returns to go."""

from __future__ import annotations

from typing import Unpack

import torch

from engram._support import checks, field_paths, nested
from engram.around import expander
from engram.samplers import RandomSampler
from engram.transforms import Compose, ExcludeTransform, Transform
from engram.transforms._base import Key, KeyedTransform, Keys, as_key, entry, find, path_of, put, shallow
from engram.transforms.windows import Windows, checked_dim, ends_of
from engram.types import Sampler


class CatFrames(KeyedTransform):
    """Joins each frame of a window with the ``N - 1`` frames before it. TorchRL's, for batches of windows.

    Batches are ``[*batch, T]``, TensorDicts or dicts ``[B, T]``, as those of slice samplers with ``flat=False``; or flat batches of a
    buffer, which says where each window ends. A frame ``[*shape]``
    becomes ``[..., N * shape[dim], ...]``, oldest first. Where a trajectory begins inside the window, at its first step or after
    ``("next", done_key)``, its first frame (``padding="same"``) or ``padding_value`` (``"constant"``) replaces the missing ones. A key
    ``("next", k)`` beside ``k`` gives the frames up to the next one: the frame before the first of them is ``k``.

    A buffer that stores single steps needs no windows: :class:`FrameStack` stacks in the core, and :meth:`make_rb_transform_and_sampler`
    gives one.

    Args:
        N: number of frames, at least 1.
        dim: the dimension of a frame along which frames are joined, negative.
        in_keys: the frames; default ``["pixels"]``.
        out_keys: the names of the results; default ``in_keys``.
        padding: ``"same"`` or ``"constant"``.
        padding_value: for ``"constant"``.
        as_inverse: join frames of windows that are written instead.
        done_key: the end flag beside the next observation; default ``"done"``.
        future: each frame and the ``N - 1`` frames after it. End flags need not be there then.
        mask_key: an entry ``[*batch, T, N]``, bool, which says what was padded.
        reset_key: not used: TorchRL's, of environments.

    Raises:
        ValueError: ``N``, ``dim`` or ``padding`` is out of range, or there are not as many ``out_keys`` as ``in_keys``; on use: a batch
            without dimensions, or a frame has no such dimension.
        KeyError: on use: there is no such entry, or no end flag.

    Cost: a copy of ``N`` times the bytes of the frames, and one look at the end flags, for each batch. Nothing of the buffer is read.

    (Mnih et al. 2015, "Human-level control through deep reinforcement learning", preprocessing.)

    >>> import torch
    >>> from engram import CatFrames
    >>> window = {"obs": torch.arange(4.0).reshape(1, 4, 1), "next": {"done": torch.tensor([[False, True, False, False]])}}
    >>> CatFrames(2, -1, in_keys=["obs"])(window)["obs"].tolist()
    [[[0.0, 0.0], [0.0, 1.0], [2.0, 2.0], [2.0, 3.0]]]
    """

    shown = ("N", "dim", "in_keys", "out_keys")

    def __init__(
        self,
        N: int,  # noqa: N803 - TorchRL's name
        dim: int,
        in_keys: Keys = None,
        out_keys: Keys = None,
        padding: str = "same",
        padding_value: float = 0,
        as_inverse: bool = False,
        done_key: Key | None = None,
        future: bool = False,
        mask_key: Key | None = None,
        reset_key: Key | None = None,
    ) -> None:
        self.N = checks.check_count("CatFrames: N", N)
        self.dim, self.padding = checked_dim("CatFrames: dim", dim), padding
        self.padding_value = _checked_padding("CatFrames", padding, padding_value)
        super().__init__(["pixels"] if in_keys is None else in_keys, out_keys, None, None)
        self.as_inverse, self.future = bool(as_inverse), bool(future)
        self.done_key = as_key("done" if done_key is None else done_key, "CatFrames: done_key")
        self.mask_key = None if mask_key is None else as_key(mask_key, "CatFrames: mask_key")
        self.reads, self.writes = not self.as_inverse, self.as_inverse

    def forward(self, data: object) -> object:
        """Join the frames of a batch that was read. What it is given stays as it is; other entries are not copied.

        >>> import torch
        >>> from engram import CatFrames
        >>> window = {"obs": torch.tensor([[[1.0], [2.0]]]), "next": {"done": torch.zeros(1, 2).bool()}}
        >>> CatFrames(3, -1, in_keys=["obs"], padding="constant").forward(window)["obs"].tolist()
        [[[0.0, 0.0, 1.0], [0.0, 1.0, 2.0]]]
        """
        return data if self.as_inverse else self._joined(data)

    def inv(self, data: object) -> object:
        """With ``as_inverse=True``, join the frames of windows that will be written.

        >>> import torch
        >>> from engram import CatFrames
        >>> window = {"obs": torch.tensor([[[1.0], [2.0]]]), "next": {"done": torch.zeros(1, 2).bool()}}
        >>> CatFrames(2, -1, in_keys=["obs"], as_inverse=True).inv(window)["obs"].tolist()
        [[[1.0, 1.0], [1.0, 2.0]]]
        """
        return self._joined(data) if self.as_inverse else data

    def _joined(self, data: object) -> object:
        made, dims = shallow(data, "CatFrames"), _dims(data)
        ends = ends_of(data, self.done_key, dims, "CatFrames")
        if ends is None:
            if not self.future:
                raise KeyError(f"CatFrames: expected the end flag {('next', self.done_key)!r}, got none.")
            frames = torch.as_tensor(entry(data, self.in_keys[0], "CatFrames"))
            ends = torch.zeros(frames.shape[:dims], dtype=torch.bool, device=frames.device)
        windows = Windows.of(ends, self.N, self.future)
        if self.mask_key is not None:
            put(made, self.mask_key, windows.beyond > 0)
        for key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            put(made, out_key, self._join(self._frames(data, key, windows), dims))
        return made

    def _frames(self, data: object, key: Key, windows: Windows) -> torch.Tensor:
        """``[*batch, T, N, *shape]``, padded."""
        value = torch.as_tensor(entry(data, key, "CatFrames"))
        frames, beyond = windows.read(value, "CatFrames"), windows.beyond
        shape = (*beyond.shape, *(1,) * (frames.ndim - beyond.ndim))
        path = path_of(key)
        root: Key = path[1] if len(path) == 2 else path[1:]
        if path[0] == "next" and root in self.in_keys and not self.future:
            before = windows.read(torch.as_tensor(entry(data, root, "CatFrames")), "CatFrames")
            frames = torch.where((beyond > 0).reshape(shape), before, frames)
            beyond = beyond - 1
        if self.padding == "constant":
            frames = frames.masked_fill((beyond > 0).reshape(shape), self.padding_value)
        return frames

    def _join(self, frames: torch.Tensor, dims: int) -> torch.Tensor:
        if frames.ndim - dims - 1 < -self.dim:
            raise ValueError(f"CatFrames: dim: expected one of shape {list(frames.shape[dims + 1 :])}, got {self.dim}.")
        at = frames.ndim + self.dim - 1
        return frames.movedim(dims, at).flatten(at, at + 1)

    def make_rb_transform_and_sampler(
        self, batch_size: int, *, traj_key: object = None, end_keys: object = None
    ) -> tuple[Compose, FrameStack]:
        """The transform and the sampler of a buffer that stores single frames and samples stacks of them, next ones too.

        Rows are drawn alike, and those at the beginning of a trajectory are padded. (TorchRL draws windows of ``N`` steps, so that
        the first ``N - 1`` steps of a trajectory are drawn with ``strict_length=False`` only.) Stacks that are written under
        ``out_keys`` are dropped.

        Args:
            batch_size: TorchRL's, which makes its sampler draw ``N`` rows for each. Here, a batch has as many rows as the buffer
                is asked for.
            traj_key, end_keys: as for :class:`NStep`.

        Raises:
            NotImplementedError: ``future=True``, or ``mask_key``.

        >>> import torch
        >>> from engram import CatFrames, LazyTensorStorage, ReplayBuffer
        >>> transform, sampler = CatFrames(3, -1, in_keys=["obs"], out_keys=["stack"]).make_rb_transform_and_sampler(32)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, transform=transform, batch_size=32)
        >>> obs = torch.arange(9.0).reshape(9, 1)
        >>> _ = rb.extend({"obs": obs, "next": {"obs": obs + 1, "done": torch.zeros(9, 1).bool()}})
        >>> batch = rb.sample()
        >>> batch["stack"].shape, batch["obs"].shape, batch["next"]["stack"].shape
        (torch.Size([32, 3]), torch.Size([32, 1]), torch.Size([32, 3]))
        """
        checks.check_count("make_rb_transform_and_sampler: batch_size", batch_size)
        if self.future or self.mask_key is not None:
            raise NotImplementedError(
                "make_rb_transform_and_sampler: expected frames before a step, without a mask. For frames after it, draw windows with "
                "SliceSampler(window=WindowSpec(…), flat=False) and use CatFrames as the transform."
            )
        in_keys, out_keys = (keys + [("next", *path_of(key)) for key in keys] for keys in (self.in_keys, self.out_keys))
        sampler = FrameStack(
            RandomSampler(),
            self.N,
            self.dim,
            in_keys,
            padding=self.padding,
            padding_value=self.padding_value,
            traj_key=traj_key,
            end_keys=end_keys,
        )
        moved = [(key, out_key) for key, out_key in zip(in_keys, out_keys, strict=True) if key != out_key]
        if not moved:
            return Compose(), sampler
        return Compose(
            _Unstack(self.N, self.dim, moved), ExcludeTransform(*[out_key for _, out_key in moved], inverse=True)
        ), sampler


class _Unstack(Transform):
    """Gives stacks another name, and their newest frame the old one."""

    writes = False

    def __init__(self, n: int, dim: int, keys: list[tuple[Key, Key]]) -> None:
        self.n, self.dim, self.keys = n, dim, keys

    def forward(self, data: object) -> object:
        made = shallow(data, "CatFrames")
        for key, out_key in self.keys:
            stack = torch.as_tensor(entry(data, key, "CatFrames"))
            size = stack.shape[self.dim] // self.n
            put(made, out_key, stack)
            put(made, key, stack.narrow(self.dim, (self.n - 1) * size, size))
        return made


def _checked_padding(who: str, padding: str, value: object) -> float:
    """The value of padding. Raises ``ValueError``: an unknown kind. ``TypeError``: no number."""
    checks.check_choice(f"{who}: padding", padding, ("same", "constant"))
    return checks.check_number(f"{who}: padding_value", value)


def _dims(data: object) -> int:
    """How many dimensions a batch of windows has; the last one is time. Raises ``ValueError``: it has none."""
    ends = find(data, field_paths.WINDOW_ENDS)
    dims = len(data.batch_size) if nested.is_tensordict(data) else 2 if ends is None else ends.ndim - 1
    if not dims:
        raise ValueError("CatFrames: expected a batch whose last dimension is time, got one without dimensions.")
    return dims


class FrameStack(expander.Expander):
    """Stacks every sampled frame with the ``n - 1`` frames before it, so that each frame needs to be stored only once.

    A field ``[*shape]`` under one of the ``in_keys`` becomes ``[..., n * shape[dim], ...]`` in the batch, or ``[n, *shape]`` with
    ``dim=None``: the frames of steps ``t - n + 1 ... t`` of the trajectory of the drawn row ``t``, oldest first. If the trajectory has
    fewer, at its beginning or where its older steps were overwritten, its first frame (``padding="same"``) or ``padding_value``
    (``"constant"``) replaces the missing ones. With a ``dim`` this is TorchRL's ``CatFrames``.

    A key ``("next", k)`` gives the frames up to the next one: ``("next", k)`` of steps ``t - n + 1 ... t``. The frame
    before the first of them is ``k`` of the trajectory's first step, if that is stored in the same shape and dtype. So it is
    with ``next_k`` and ``k_next``.
    Around an :class:`NStep` they end with the frame that comes ``k`` steps later. (Mnih et al. 2015, "Human-level
    control through deep reinforcement learning", preprocessing.)

    With a :class:`NextFromFollowing` around or inside it, in any order, one frame is stored per step. Naming ``k``
    then stacks both: ``("next", k)`` holds the frames up to the following one, or to the final observation of the
    episode. :class:`NextFromFollowing` has an example, :func:`plan` says what memory this spares.

    Args:
        sampler: draws the rows: a sampler (also of slices), a sampler class, or another expander.
        n: number of frames, at least 1.
        dim: the dimension of a frame along which frames are concatenated, negative: -3 for ``[C, H, W]``, -1 for
            ``[features]``. None: a dimension of their own, before the others: ``[84, 84]`` becomes ``[4, 84, 84]``. It and the first
            dimension of a frame need no further copy.
        in_keys: the fields.
        padding: ``"same"`` or ``"constant"``.
        padding_value: for ``"constant"``.
        whole: draw no row whose older frames may be overwritten: where a lane is full, its oldest ``n - 1`` steps. Rows of windows are
            padded all the same.
        views: around or inside a :class:`NextFromFollowing`, let ``k`` and ``("next", k)`` be views of the same ``n + 1`` frames, in
            place of ``2 * n`` that are copied: a change of one in place changes the other. Next to an :class:`NStep` they are copies.
        traj_key, end_keys, index, end_when: as for :class:`NStep`.

    Raises: as :class:`NStep`, and
        ValueError: ``dim`` is not negative, or ``padding`` is unknown; when drawing: a frame has no such dimension.
        KeyError: when drawing: a field is not stored.
        TypeError: an expander inside has already changed a field; when a buffer takes it: ``("next", k)`` of a
            :class:`NextFromFollowing` is named, but not ``k``.

    Cost: drawing ``B`` rows copies ``B * n`` frames, with a :class:`NextFromFollowing` ``2 * B * n``, and with ``views``
    ``B * (n + 1)``. The first draw scans every row once, and every write records where trajectories end, as for slice samplers.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import FrameStack, LazyTensorStorage, RandomSampler, TensorDictReplayBuffer
    >>> steps = TensorDict({"pixels": torch.arange(5.).reshape(5, 1), "next": {"done": torch.zeros(5, 1).bool()}}, batch_size=[5])
    >>> sampler = FrameStack(RandomSampler(), n=3, dim=-1, in_keys=["pixels"])
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=64)
    >>> _ = rb.extend(steps)
    >>> rb.sample()["pixels"].unique(dim=0).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]
    """

    noted = ("n", "dim", "in_keys", "padding", "padding_value", "whole", "views")

    def __init__(
        self,
        sampler: Sampler | type[Sampler],
        n: int,
        dim: int | None,
        in_keys: object,
        *,
        padding: str = "same",
        padding_value: float = 0,
        whole: bool = False,
        views: bool = False,
        **trajectories: Unpack[expander.TrajectoryArguments],
    ) -> None:
        self.n = expander.check_steps("FrameStack: n", n)
        self.dim = None if dim is None else checked_dim("FrameStack: dim", dim)
        self.padding_value = _checked_padding("FrameStack", padding, padding_value)
        self.in_keys = field_paths.checked_paths(in_keys, "FrameStack: in_keys")
        self.padding, self.whole, self.views = padding, whole, views
        super().__init__(sampler, **trajectories)

    @property
    def changed(self) -> tuple[field_paths.FieldPath, ...]:
        return self.in_keys

    def change(self, reading: expander.Reading) -> None:
        if self.whole and self._windows is None:
            reading.oldest = max(reading.oldest, self.n - 1)
        for key in self.in_keys:
            if key[0] == "next" and key[1:] in reading.followed:
                continue  # as the frames of which these are the following ones
            number = reading.number(key, "FrameStack: in_keys")
            field, column = reading.fields[number], reading.columns[number]
            if self.dim is not None and -self.dim > len(field.shape):
                raise ValueError(
                    f"sample: FrameStack: field {field.name}: expected a dimension {self.dim} of a frame, got shape {list(field.shape)}. "
                    f"With dim=None stacks have a dimension of their own, {[self.n, *field.shape]}."
                )
            if column.kind != "row":
                raise TypeError(
                    f"sample: FrameStack: in_keys: expected a field as it is stored, but an expander inside has changed "
                    f"{field_paths.public(key)!r}."
                )
            before = reading.numbers.get(expander.observed_before(key), -1) if expander.is_of_next_step(key) else -1
            earlier = reading.fields[before]
            if before >= 0 and (earlier.dtype, earlier.shape) != (field.dtype, field.shape):
                before = -1
            padding = self.padding_value if self.padding == "constant" else None
            stack = column._replace(kind="frames", frames=self.n, dim=self.dim, first=before, padding=padding)
            reading.columns[number] = stack._replace(views=self.views)


class NStep(expander.Expander):
    """Turns every sampled step into one of ``n`` steps: sums rewards and takes the observation ``n`` steps later.

    Let ``t`` be the drawn row, and ``k`` the number of steps from ``t`` (included) to the ``n``-th, to the last step of
    its trajectory, or to the newest step of its lane, whichever comes first: ``1 <= k <= n``. A batch then has,
    ``[B, ...]``::

        reward              sum of gamma ** i * reward[t + i] for i in 0 ... k - 1
        next.*              that of step t + k - 1: observation, done, terminated, truncated
        next_obs, obs_next  the same, whatever begins with next_ or ends with _next, at any depth
        done, terminated    the same, where these flags, truncated and end_keys are stored beside the observation only
        steps_to_next_obs   k, int64 [B, 1]
        gamma               gamma ** k, float32 [B, 1]
        original_reward     reward[t], next to the reward

    The target of a value function is ``reward + gamma * ~next.terminated * V(next.observation)``. Nothing is
    summed across the end of a trajectory. At a termination, ``V`` has no weight. At a truncation, and at the newest
    row, ``k`` is smaller, and the discount ``gamma ** k`` keeps the target exact. (Sutton 1988, n-step returns; Hessel
    et al., "Rainbow", AAAI 2018; Pardo et al., "Time limits in reinforcement learning", ICML 2018, on truncation.) The
    last rows of a lane can be drawn at once; their returns grow longer when more rows are written.

    Rows stay as they were written, so other expanders, or another ``n``, can read the same storage. Rewards are summed
    in double precision. ``steps_to_next_obs``, ``gamma`` and ``original_reward`` are the names of TorchRL's
    ``MultiStepTransform``. Unlike there, they are ``[B, 1]``, as rewards are (in batches of
    dicts ``[B]``, where rewards are); ``done``, ``terminated`` and ``truncated`` are those of the last summed step; and
    there is no ``nonterminal``, which would be false for every return of one step.

    Args:
        sampler: draws the rows: a sampler (also of slices), a sampler class, or another expander.
        n: number of steps, at least 1.
        gamma: discount in [0, 1].
        reward_key: a field of floats, integers or bools, of any shape. Sums are float32, those of float64 are float64.
        next_keys: the fields to take from the last step, beside the flags; each names a field, or all fields below it, and ``"next"``
            also those that are called so, as above. Name next observations that are called otherwise: ``["obs2"]``.
        traj_key: a field that is constant within a trajectory. Default: ``("collector", "traj_ids")``, ``"traj_ids"`` or
            ``"episode"``, the first that is stored.
        end_keys: fields that are nonzero at the last step of a trajectory, which ends there also where its id comes again. Those that
            are not stored are skipped; an empty list: ids alone count. Default: as for :class:`SliceSampler`.
        index: the name of the store's trajectory table, ``"main"`` by default; slice samplers of the same name share
            it. Around a slice sampler, keys and name are those of the slice sampler, if none is given.
        end_when: of flags of which a step has several, ``[B, agents, 1]``: ``"any"``, the default, ends the trajectory where one of a
            field's is set, ``"all"`` where all of one field's are.

    Raises:
        TypeError: ``sampler`` is not a sampler, or a slice sampler with static boundaries; an argument has the wrong
            type.
        ValueError: ``n`` or ``gamma`` is out of range; the boundaries differ from those of an expander inside.

    Raises (when a buffer takes it, or when drawing):
        RuntimeError: the storage is a list or on an accelerator; rows have no keys; there are neither ids nor end
            flags.
        KeyError: a field is not stored.
        TypeError: the reward is complex, or of 8 bits in floating point.
        IncompatibleStore: ``index`` names a table with other boundaries.
        WriterStalled: for 5 s, a row or a step around it was rewritten at every attempt.

    Cost: drawing ``B`` rows also reads ``B * n`` rewards and flags. The first draw scans every row once, and every
    write records where trajectories end, as for slice samplers: 16 bytes per row.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, NStep, RandomSampler, TensorDictReplayBuffer
    >>> steps = TensorDict({"obs": torch.arange(4), "next": {"obs": torch.arange(1, 5), "reward": torch.ones(4, 1),
    ...     "done": torch.tensor([0, 0, 0, 1]).bool().unsqueeze(1)}}, batch_size=[4])
    >>> sampler = NStep(RandomSampler(), n=3, gamma=0.5)
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=64)
    >>> _ = rb.extend(steps)
    >>> batch = rb.sample()
    >>> first = batch[batch["obs"] == 0][0]
    >>> float(first["next", "reward"]), int(first["next", "obs"]), float(first["gamma"])
    (1.75, 3, 0.125)
    """

    noted = ("n", "gamma", "reward_key", "next_keys")

    def __init__(
        self,
        sampler: Sampler | type[Sampler],
        n: int,
        gamma: float,
        *,
        reward_key: object = ("next", "reward"),
        next_keys: object = ("next",),
        **trajectories: Unpack[expander.TrajectoryArguments],
    ) -> None:
        self.n = expander.check_steps("NStep: n", n)
        self.gamma = checks.check_number("NStep: gamma", gamma, least=0, most=1)
        self.reward_key = field_paths.as_path(reward_key, "NStep: reward_key") or ("next", "reward")
        self.next_keys = field_paths.as_paths(next_keys, "NStep: next_keys") or ()
        if isinstance(sampler, expander.Expander) and any(isinstance(inner, NStep) for inner in sampler.chain):
            raise TypeError("NStep: sampler: expected one without returns of several steps, got an NStep inside.")
        super().__init__(sampler, **trajectories)

    @property
    def changed(self) -> tuple[field_paths.FieldPath, ...]:
        return (self.reward_key,)

    def change(self, reading: expander.Reading) -> None:
        ahead, reward = self.n - 1, reading.number_of_reward(self.reward_key, "NStep")
        moved = set(reading.flags(self.rules))
        for key in self.next_keys:
            found = reading.below(key)
            followed = any(("next", *path)[: len(key)] == key for path in reading.followed)
            reading.ahead = ahead if followed else reading.ahead
            if key == ("next",):
                found += [number for path, number in reading.numbers.items() if expander.is_of_next_step(path)]
            elif not (found or followed):
                reading.number(key, "NStep: next_keys")
            moved.update(found)
        for number in moved - {reward}:
            reading.columns[number] = reading.columns[number]._replace(ahead=ahead)
        reading.columns[reward] = expander.Column("sum", reward, ahead, self.gamma)
        reading.add((*self.reward_key[:-1], "original_reward"), expander.Column("row", reward), "NStep")
        reading.add(("steps_to_next_obs",), expander.Column("steps", reward, ahead), "NStep")
        reading.add(("gamma",), expander.Column("discount", reward, ahead, self.gamma), "NStep")


class RewardToGo(expander.Expander):
    """Adds to every sampled step the discounted sum of the rewards from it to the end of its trajectory.

    Let ``t`` be the drawn row and ``T`` the last stored step of its trajectory. A batch then has::

        reward_to_go            sum of gamma ** i * reward[t + i] for i in 0 ... T - t, as reward: [B, ...]
        reward_to_go_complete   whether the trajectory ends with T, bool [B, 1]

    Of a trajectory that is still being written, only a part of the return is known. The flag is false there, and
    becomes true when the end is written. It is true if ``T`` has an end flag, also of a truncation, or if another
    trajectory follows. The rewards are the stored ones, even if an :class:`NStep` inside changes them. (Return: Sutton
    and Barto 2018, eq. 3.8; as an input: Chen et al., "Decision Transformer", NeurIPS 2021.)

    Args:
        sampler: draws the rows: a sampler (also of slices), a sampler class, or another expander.
        gamma: discount in [0, 1].
        reward_key: a field of floats, integers or bools, of any shape. Summed in double precision; the sums are float32, those of
            float64 are float64.
        out_key: the name of the sum. The name of the flag is the same followed by ``_complete``.
        steps_key: the name of an entry with the number of summed steps, ``T - t + 1``, int64 ``[B, 1]``. Default: there is none.
        traj_key, end_keys, index, end_when: as for :class:`NStep`.

    Raises: as :class:`NStep`. When drawing also
        ValueError: the rows have a field with the name of the sum or of the steps.

    Cost: O(steps from the drawn rows to the ends of their trajectories) for a batch. Their rewards and flags are read,
    with 30 bytes of memory for each of 2 ** 18 of them, or of one trajectory if that is longer. Writers wait while so
    many are listed (about a millisecond for 10^5).

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, RandomSampler, RewardToGo, TensorDictReplayBuffer
    >>> steps = TensorDict({"step": torch.arange(3), "next": {"reward": torch.tensor([[1.0], [2.0], [3.0]]),
    ...     "done": torch.tensor([[False], [False], [True]])}}, batch_size=[3])
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=RewardToGo(RandomSampler()), batch_size=64)
    >>> _ = rb.extend(steps)
    >>> batch = rb.sample()
    >>> batch["reward_to_go"][batch["step"] == 1].unique(), bool(batch["reward_to_go_complete"].all())
    (tensor([5.]), True)
    """

    noted: tuple[str, ...] = ("gamma", "reward_key", "out_key")

    def __init__(
        self,
        sampler: Sampler | type[Sampler],
        gamma: float = 1.0,
        *,
        reward_key: object = ("next", "reward"),
        out_key: object = "reward_to_go",
        steps_key: object = None,
        **trajectories: Unpack[expander.TrajectoryArguments],
    ) -> None:
        self.gamma = checks.check_number("RewardToGo: gamma", gamma, least=0, most=1)
        self.reward_key = field_paths.as_path(reward_key, "RewardToGo: reward_key") or ("next", "reward")
        self.out_key = field_paths.as_path(out_key, "RewardToGo: out_key") or ("reward_to_go",)
        self.steps_key = field_paths.as_path(steps_key, "RewardToGo: steps_key")
        if self.steps_key is not None:
            self.noted = (*self.noted, "steps_key")
        super().__init__(sampler, **trajectories)

    def change(self, reading: expander.Reading) -> None:
        reward = reading.number_of_reward(self.reward_key, "RewardToGo")
        reading.add(self.out_key, expander.Column("sum", reward, expander.TO_THE_END, self.gamma), "RewardToGo")
        complete = (*self.out_key[:-1], f"{self.out_key[-1]}_complete")
        reading.add(complete, expander.Column("over", reward, expander.TO_THE_END), "RewardToGo")
        if self.steps_key is not None:
            reading.add(self.steps_key, expander.Column("steps", reward, expander.TO_THE_END), "RewardToGo")
