"""Frames of windows joined, as TorchRL's CatFrames does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram._support.checks import check_count, check_number
from engram._support.field_paths import WINDOW_ENDS, as_paths, public
from engram._support.nested import is_tensordict
from engram.around.expander import Expander, check_steps
from engram.around.reading import is_of_next_step, observed_before
from engram.samplers import RandomSampler
from engram.transforms import Compose, ExcludeTransform, Transform
from engram.transforms._base import as_key, as_keys, entry, find, path_of, put, shallow
from engram.transforms.windows import Windows, checked_dim, ends_of

if TYPE_CHECKING:
    from torch import Tensor

    from engram._support.field_paths import FieldPath
    from engram.around.reading import Reading
    from engram.transforms._base import Key, Keys
    from engram.types import Sampler


class CatFrames(Transform):
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
        self.N = check_count("CatFrames: N", N)
        self.dim, self.padding = checked_dim("CatFrames: dim", dim), padding
        self.padding_value = _checked_padding("CatFrames", padding, padding_value)
        self.in_keys = as_keys(["pixels"] if in_keys is None else in_keys, "CatFrames: in_keys")
        self.out_keys = list(self.in_keys) if out_keys is None else as_keys(out_keys, "CatFrames: out_keys")
        if len(self.in_keys) != len(self.out_keys):
            raise ValueError(
                f"CatFrames: expected equally many in_keys and out_keys, got {len(self.in_keys)} and {len(self.out_keys)}."
            )
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
        made, dims = shallow(data, "CatFrames"), _dims(data, "CatFrames")
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

    def _frames(self, data: object, key: Key, windows: Windows) -> Tensor:
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

    def _join(self, frames: Tensor, dims: int) -> Tensor:
        if frames.ndim - dims - 1 < -self.dim:
            raise ValueError(
                f"CatFrames: expected frames with a dimension {self.dim}, got shape {list(frames.shape[dims + 1 :])}."
            )
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
        check_count("make_rb_transform_and_sampler: batch_size", batch_size)
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

    def __repr__(self) -> str:
        return f"CatFrames(N={self.N}, dim={self.dim}, in_keys={self.in_keys}, out_keys={self.out_keys})"


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
    if padding not in ("same", "constant"):
        raise ValueError(f"{who}: padding: expected 'same' or 'constant', got {padding!r}.")
    return check_number(f"{who}: padding_value", value)


def _dims(data: object, name: str) -> int:
    """How many dimensions a batch of windows has; the last one is time. Raises ``ValueError``: it has none."""
    ends = find(data, WINDOW_ENDS)
    dims = len(data.batch_size) if is_tensordict(data) else 2 if ends is None else ends.ndim - 1
    if not dims:
        raise ValueError(f"{name}: expected a batch whose last dimension is time, got one without dimensions.")
    return dims


class FrameStack(Expander):
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
        traj_key, end_keys, index, end_when: as for :class:`NStep`.

    Raises: as :class:`NStep`, and
        ValueError: ``dim`` is not negative, or ``padding`` is unknown; when drawing: a frame has no such dimension.
        KeyError: when drawing: a field is not stored.
        TypeError: an expander inside has already changed a field; when a buffer takes it: ``("next", k)`` of a
            :class:`NextFromFollowing` is named, but not ``k``.

    Cost: drawing ``B`` rows copies ``B * n`` frames. The first draw scans every row once, and every write records where
    trajectories end, as for slice samplers.

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

    noted = ("n", "dim", "in_keys", "padding", "padding_value")

    def __init__(
        self,
        sampler: Sampler | type[Sampler],
        n: int,
        dim: int | None,
        in_keys: object,
        *,
        padding: str = "same",
        padding_value: float = 0,
        traj_key: object = None,
        end_keys: object = None,
        index: str | None = None,
        end_when: str | None = None,
    ) -> None:
        self.n = check_steps("FrameStack: n", n)
        dim = None if dim is None else checked_dim("FrameStack: dim", dim)
        value = _checked_padding("FrameStack", padding, padding_value)
        keys = as_paths(in_keys, "FrameStack: in_keys")
        if keys is None:
            raise TypeError("FrameStack: in_keys: expected a list of keys, got None.")
        self.dim = dim
        self.in_keys = keys
        self.padding = padding
        self.padding_value = value
        super().__init__(sampler, traj_key=traj_key, end_keys=end_keys, index=index, end_when=end_when)

    @property
    def changed(self) -> tuple[FieldPath, ...]:
        return self.in_keys

    def change(self, reading: Reading) -> None:
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
                    f"sample: FrameStack: in_keys: expected a field as it is stored, but an expander inside has changed {public(key)!r}."
                )
            before = reading.numbers.get(observed_before(key), -1) if is_of_next_step(key) else -1
            if before >= 0 and (reading.fields[before].dtype, reading.fields[before].shape) != (
                field.dtype,
                field.shape,
            ):
                before = -1
            padding = self.padding_value if self.padding == "constant" else None
            reading.columns[number] = column._replace(
                kind="frames", frames=self.n, dim=self.dim, first=before, padding=padding
            )
