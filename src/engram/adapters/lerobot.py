"""The replay buffer of LeRobot's learners (``lerobot.rl.buffer``) over engram's stores: on disk if asked.

LeRobot is not needed to import it.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self, cast

import numpy as np
import torch
from torch.nn import functional

from engram._support import field_paths, nested
from engram._support.checks import check_count, check_path
from engram.adapters.scratch import Path, Scratch
from engram.datasets import from_lerobot, from_numpy, to_lerobot
from engram.datasets.importing import flat_names
from engram.errors import NoSampleable
from engram.samplers import RandomSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lerobot.datasets import LeRobotDataset
    from lerobot.rl.buffer import BatchTransition
    from torch import Tensor

    from engram.types import StrPath

__all__ = ["ReplayBuffer", "random_shift"]

#: What names of images begin with.
_IMAGE = "observation.image"
_INFO = "complementary_info"


class ReplayBuffer(Scratch):
    """LeRobot's ``ReplayBuffer``, whose rows lie in RAM or in a directory that survives ``kill -9``.

    ``ReplayBuffer(capacity, device, state_keys, scratch_dir="run/replay")`` goes on with the steps that an earlier process wrote there.
    Values are stored in the dtypes that they have, so that images of uint8 take a quarter of the room that LeRobot gives them; batches
    are float32, as LeRobot's.

    Args:
        capacity: steps.
        device: where batches go.
        state_keys: which entries of states are stored. Default: all.
        image_augmentation_function: changes images ``[B, C, H, W]``, of those names that begin with ``observation.image``. Default:
            :func:`random_shift`.
        use_drq: whether to change them at all.
        storage_device: ``"cpu"``.
        optimize_memory: for the same call as LeRobot's; every next state is stored, and exact at the ends of episodes.
        scratch_dir: the directory of the rows, of one running process at a time. Default: RAM.

    Raises:
        ValueError: a capacity below 1, or another ``storage_device``. StoreInUse: another process has the directory.
        IncompatibleStore: it holds another capacity. Nothing is changed.

    :attr:`rb` is the engram buffer, for :meth:`stats <engram.ReplayBuffer.stats>`, plots and checkpoints. Several threads may add and
    sample.

    >>> import tempfile, torch
    >>> from engram.adapters.lerobot import ReplayBuffer
    >>> where = tempfile.mkdtemp() + "/replay"
    >>> for start in range(2):  # the second time, the step of the first is there
    ...     buffer = ReplayBuffer(100, "cpu", ["observation.state"], scratch_dir=where)
    ...     state = {"observation.state": torch.zeros(1, 3)}
    ...     buffer.add(state, torch.zeros(1, 2), 1.0, state, done=False, truncated=False)
    ...     print(len(buffer), buffer.sample(4)["action"].shape)
    ...     buffer.close()
    1 torch.Size([1, 2])
    2 torch.Size([2, 2])
    """

    not_pickled = ("rb", "_hold")

    def __init__(
        self,
        capacity: int,
        device: str = "cuda:0",
        state_keys: Sequence[str] | None = None,
        image_augmentation_function: Callable[[Tensor], Tensor] | None = None,
        use_drq: bool = True,
        storage_device: str = "cpu",
        optimize_memory: bool = False,
        *,
        scratch_dir: StrPath | None = None,
    ) -> None:
        who = type(self).__name__
        self.capacity = check_count(f"{who}: capacity", capacity)
        self.device, self.optimize_memory = device, optimize_memory
        if torch.device(storage_device).type != "cpu":
            raise ValueError(f"{who}: storage_device: expected 'cpu', where a store lies, got {storage_device!r}.")
        self.state_keys = list(state_keys or [])
        self.image_augmentation_function, self.use_drq = image_augmentation_function or random_shift, use_drq
        self.scratch_dir = None if scratch_dir is None else check_path(f"{who}: scratch_dir", scratch_dir)
        self._open()

    def _open(self) -> None:
        self._open_rows(self.capacity, 1, f"{self.capacity} steps in one lane", RandomSampler())
        if len(self.rb):
            self.rb.end_trajectory()

    def __len__(self) -> int:
        return len(self.rb)

    def add(
        self,
        state: Mapping[str, Tensor],
        action: Tensor,
        reward: float,
        next_state: Mapping[str, Tensor],
        done: bool,
        truncated: bool,
        complementary_info: Mapping[str, Tensor | float] | None = None,
    ) -> None:
        """Write a step.

        Args:
            state, action, next_state: tensors ``[1, ...]``.
            complementary_info: tensors ``[1, ...]`` and numbers. What the first step had is stored: 0 of a step that lacks it.

        Raises:
            KeyError: an entry of ``state_keys`` is missing. RuntimeError: another shape or dtype than the first step has. TypeError: what
                is no tensor or number. Nothing is written.
        """
        row: dict[Path, Tensor] = {("action",): _first(action), ("reward",): torch.tensor(float(reward))}
        row |= {("done",): torch.tensor(bool(done)), ("truncated",): torch.tensor(bool(truncated))}
        for name, values in (("state", state), ("next_state", next_state)):
            if missing := [key for key in self.state_keys if key not in values]:
                raise KeyError(f"add: {name}: expected {missing}, as state_keys says, got {[*values]}.")
            row |= {(name, key): _first(values[key]) for key in self.state_keys or values}
        info: dict[Path, Tensor] = {(_INFO, key): _first(value) for key, value in (complementary_info or {}).items()}
        if held := self._stored_columns():
            zeros = {key: torch.from_numpy(np.zeros_like(column[0])) for key, column in held.items() if key[0] == _INFO}
            info = {key: info.get(key, zero) for key, zero in zeros.items()}
        self.rb.add(field_paths.nested({**row, **info}))

    def sample(self, batch_size: int) -> BatchTransition:
        """Draw a batch, of all steps where there are fewer. Raises ``NoSampleable``, a ``RuntimeError``: there are none."""
        rows = self.rb.sample(max(min(batch_size, len(self)), 1))
        floats = nested.map_leaves(rows, lambda one: cast("Tensor", one).to(self.device, torch.float32))
        batch: BatchTransition = {_INFO: None, **floats}
        states = batch["state"], batch["next_state"]
        images = [key for key in states[0] if key.startswith(_IMAGE)] if self.use_drq else []
        if images:
            changed = self.image_augmentation_function(torch.cat([part[key] for key in images for part in states]))
            for at, part in enumerate(changed.chunk(2 * len(images))):
                states[at % 2][images[at // 2]] = part
        return batch

    def get_iterator(
        self, batch_size: int, async_prefetch: bool = True, queue_size: int = 2
    ) -> Iterator[BatchTransition]:
        """Batches without an end, of which ``async_prefetch`` has ``queue_size`` drawn ahead by a thread."""
        while not async_prefetch:
            yield self.sample(batch_size)
        with ThreadPoolExecutor(1) as pool:
            ahead = deque(pool.submit(self.sample, batch_size) for _ in range(queue_size))
            while True:
                ahead.append(pool.submit(self.sample, batch_size))
                yield ahead.popleft().result()

    @classmethod
    def from_lerobot_dataset(
        cls,
        lerobot_dataset: StrPath | LeRobotDataset,
        device: str = "cuda:0",
        state_keys: Sequence[str] = (),
        **kwargs: object,
    ) -> Self:
        """A buffer with the steps of a data set of LeRobot's, format v3.0, as LeRobot's own makes one.

        Args:
            lerobot_dataset: a ``LeRobotDataset``, of which ``root`` is read, or its folder.
            state_keys: the features that are observed; at least one. Images become float32 ``[3, H, W]`` from 0 to 1.
            device, kwargs: of the class. Default of ``capacity``: as many as steps.

        Raises:
            ValueError: no ``state_keys``, or a ``capacity`` below the steps. KeyError: a feature is missing. Others as
                :func:`engram.datasets.from_lerobot`, which reads the files.
        """
        what = "from_lerobot_dataset"
        check_count(f"{what}: len(state_keys)", len(state_keys))
        root = lerobot_dataset if isinstance(lerobot_dataset, str | PathLike) else lerobot_dataset.root
        with TemporaryDirectory() as folder, from_lerobot(root, f"{folder}/rows") as data:
            capacity = check_count(f"{what}: capacity", kwargs.pop("capacity", None) or len(data), least=len(data))
            buffer = cls(capacity, device, state_keys, **kwargs)  # type: ignore[arg-type] # as there
            ends = np.diff(data["collector", "traj_ids"].numpy(), append=-1) != 0
            rows = map(_features, map(data.__getitem__, range(len(data))))
            row = next(rows)
            for end in ends.tolist():
                following = next(rows, row)
                done = bool(row.get("next.done", end))
                seen = ({key: one[key] for key in state_keys} for one in (row, row if done or end else following))
                info = {key.removeprefix(f"{_INFO}."): row[key] for key in row if key.startswith(f"{_INFO}.")}
                buffer.add(next(seen), row["action"], float(row["next.reward"]), next(seen), done, False, info or None)
                row = following
        return buffer

    def to_lerobot_dataset(
        self, repo_id: str, fps: float = 1, root: StrPath | None = None, task_name: str = "from_replay_buffer"
    ) -> StrPath:
        """Write the steps as a data set of LeRobot's, an episode for each end. Returns its folder.

        Args:
            repo_id: the name of the data set, which is its folder without ``root``.
            fps: the steps of a second.
            root: the folder. It must not exist.
            task_name: the text of the task.

        Images ``[3, H, W]``, from 0 to 1 or of uint8, become videos. Raises: as :func:`engram.datasets.to_lerobot`, which writes the
        files; ``NoSampleable``: there are no steps.
        """
        if not len(self):
            raise NoSampleable("to_lerobot_dataset: expected steps, got none. Add some first.")
        steps = self.rb.read_all_in_order(lane=0)
        over = steps["done"] | steps["truncated"]
        columns = {**steps["state"], "action": steps["action"]}
        columns |= {"next.reward": steps["reward"], "next.done": steps["done"]}
        columns |= {f"{_INFO}.{key}": value for key, value in steps.get(_INFO, {}).items()}
        found = {
            tuple(key.split(".")): _frames(value) if key.startswith(_IMAGE) else value for key, value in columns.items()
        }
        with TemporaryDirectory() as folder:
            from_numpy({**field_paths.nested(found), "episode": over.cumsum(0) - over.long()}, f"{folder}/rows").close()
            to_lerobot(f"{folder}/rows", root or repo_id, fps=fps, task=task_name)
        return root or repo_id


def random_shift(images: Tensor, pad: int = 4) -> Tensor:
    """Move each image ``[B, C, H, W]`` by up to ``pad`` pixels in both directions, its edges repeated.

    >>> import torch
    >>> from engram.adapters.lerobot import random_shift
    >>> random_shift(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 3, 8, 8])
    """
    n, _, height, width = images.shape
    wide = functional.pad(images, (pad,) * 4, mode="replicate").permute(0, 2, 3, 1)
    tops, lefts = (torch.randint(0, 2 * pad + 1, (n,), device=images.device)[:, None] for _ in range(2))
    at, down, right = (torch.arange(size, device=images.device) for size in (n, height, width))
    return wide[at[:, None, None], (down + tops)[:, :, None], (right + lefts)[:, None, :]].permute(0, 3, 1, 2)


def _first(value: Tensor | float) -> Tensor:
    """A value without its batch dimension of one. Raises ``TypeError``: no tensor or number."""
    if not isinstance(value, torch.Tensor | int | float):
        raise TypeError(f"add: expected tensors and numbers, got {type(value).__name__}.")
    tensor = torch.as_tensor(value).detach()
    return tensor if tensor.ndim == 0 else tensor.squeeze(0)


def _features(row: Mapping[str, object]) -> dict[str, Tensor]:
    """The features of a step as LeRobot's data sets have them, ``[1, …]``."""
    found = {".".join(path): cast("Tensor", one)[None] for path, one in flat_names(row)}
    images = {
        key: one.permute(0, 3, 1, 2) / 255 for key, one in found.items() if key.startswith(_IMAGE) and one.ndim == 4
    }
    return found | images


def _frames(images: Tensor) -> Tensor:
    """Images ``[N, 3, H, W]`` as frames of uint8 ``[N, H, W, 3]``."""
    frames = images.permute(0, 2, 3, 1)
    return (frames * 255).round().to(torch.uint8) if images.is_floating_point() else frames
