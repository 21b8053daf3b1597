"""Observations that show what came before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram._checks import check_count, check_number
from engram.expanders._base import Expander, check_steps
from engram.expanders.reading import is_of_next_step, observed_before
from engram.field_paths import as_paths, public

if TYPE_CHECKING:
    from engram.expanders.reading import Reading
    from engram.field_paths import FieldPath
    from engram.types import Sampler


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
        dim = None if dim is None else check_count("FrameStack: dim", dim, least=-(1 << 31))
        if dim is not None and dim >= 0:
            raise ValueError(
                f"FrameStack: dim: expected a negative number, counted from the last dimension, got {dim}."
            )
        if padding not in ("same", "constant"):
            raise ValueError(f"FrameStack: padding: expected 'same' or 'constant', got {padding!r}.")
        keys = as_paths(in_keys, "FrameStack: in_keys")
        if keys is None:
            raise TypeError("FrameStack: in_keys: expected a list of keys, got None.")
        self.dim = dim
        self.in_keys = keys
        self.padding = padding
        self.padding_value = check_number("FrameStack: padding_value", padding_value)
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
