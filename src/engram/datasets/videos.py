"""Frames that stay in the videos of a data set: a row has the number of a file and a time, and a transform decodes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import torch

from engram._support import checks, field_paths, fork
from engram.datasets import importing as of
from engram.errors import DatasetError
from engram.transforms._base import Transform, entry, find, put, shallow
from engram.types import StrPath

if TYPE_CHECKING:
    from engram.env.video import Frame, Reader

#: Videos that are open at a time. Each keeps the frames that were asked for last.
MAX_OPEN = 16


class Frames:
    """The frames of an episode, ``[T, H, W, 3]``: a column that is read once, in order, and never in memory as a whole."""

    dtype, ndim = np.dtype(np.uint8), 4

    def __init__(self, shape: tuple[int, ...], frames: Iterator[of.Array]) -> None:
        self.shape, self.nbytes, self._frames = shape, int(np.prod(shape)), frames

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> of.Array:
        return np.stack([*islice(self._frames, len(range(*rows.indices(len(self)))))])


class Videos(msgspec.Struct):
    """What the note of an import says of the videos that its rows refer to."""

    #: The folder of the data set, and files in it. A row has the number of a file, and seconds in it.
    root: str
    files: list[str]
    #: How far a frame may lie from its time, in seconds.
    half: float
    #: The fields with cameras, and ``[H, W, 3]`` of their frames.
    shapes: list[tuple[field_paths.FieldPath, tuple[int, int, int]]]


class _Video:
    """A video that is open."""

    def __init__(self) -> None:
        self.lock = fork.lock()
        self.reader: Reader | None = None
        self.recent: dict[float, Frame] = {}

    def frames(self, path: Path, times: Sequence[float], half: float) -> tuple[list[Frame], int]:
        """Frames at times in order, and how many were decoded for them. Raises ``OSError``: it cannot be read, or has no such frame."""
        with self.lock:
            if self.reader is None:
                self.reader = cast("Reader", of.required("engram.env.video", "robot", "VideoFrames").Reader(path))
            before, found = self.reader.decoded, cast("dict[float, Frame]", {})
            for time in times:
                frame = found.get(time, self.recent.get(time))
                if frame is None and (frame := self.reader.at(time, half)) is None:
                    raise OSError(f"expected a frame at {time:.3f} s: it has fewer than there are rows")
                found[time] = frame
            self.recent = found
            return [found[time] for time in times], self.reader.decoded - before


class VideoFrames(Transform):
    """Decodes frames of batches that refer to videos: the rows of :func:`from_lerobot` with ``video="reference"``.

    A row has a camera as float64 ``[2]``, the number of a file and the seconds in it. In batches it is uint8 ``[H, W, 3]``; of a
    ``Window`` it is ``[T, H, W, 3]``. Next observations are decoded, too. The references of a batch are decoded in order of file and
    time, from key frame on, and each frame once. With ``prefetch`` that happens in the threads that prefetch.

    Args:
        directory: of the store.
        root: the folder of the data set, if it lies elsewhere now.

    Attributes:
        decoded, delivered: how many frames were decoded, and how many batches got.

    Raises:
        DatasetError: the store has no references. Of a batch: a video is missing or damaged, or has fewer frames than rows.
        FileNotFoundError: there is no import.
        ModuleNotFoundError: PyAV is missing, which ``engram-replay[robot]`` brings.

    Cost: that of decoding; a batch far apart decodes from a key frame on for each of its frames.

    >>> import tempfile
    >>> import numpy as np
    >>> from engram import ReplayBuffer
    >>> from engram.datasets import VideoFrames, from_lerobot, from_numpy, to_lerobot
    >>> folder = tempfile.mkdtemp()
    >>> steps = {"camera": np.zeros((4, 16, 16, 3), np.uint8), "episode": [0, 0, 1, 1]}
    >>> from_numpy(steps, folder + "/data").close()
    >>> to_lerobot(folder + "/data", folder + "/dataset", fps=10)
    >>> from_lerobot(folder + "/dataset", folder + "/again", video="reference").close()
    >>> rb = ReplayBuffer.open(folder + "/again", readonly=True, batch_size=8, transform=VideoFrames(folder + "/again"))
    >>> rb.storage[:]["camera"].shape, rb.sample()["camera"].shape  # references; frames
    (torch.Size([4, 2]), torch.Size([8, 16, 16, 3]))
    """

    writes = False

    def __init__(self, directory: StrPath, root: StrPath | None = None) -> None:
        folder = checks.check_path("VideoFrames: directory", directory)
        noted = msgspec.json.decode((folder / of.NOTE).read_bytes(), type=of.Note).about.get("videos")
        if noted is None:
            raise DatasetError(f"VideoFrames: {folder}: expected an import with video='reference', got one without.")
        self._videos = msgspec.convert(noted, Videos)
        #: ``[H, W, 3]`` of each camera.
        self.shapes = dict(self._videos.shapes)
        self._arguments = folder, checks.check_path("VideoFrames: root", self._videos.root if root is None else root)
        self.decoded = self.delivered = 0
        self._lock = fork.lock()
        fork.registered(self).after_fork()

    def after_fork(self) -> None:
        """Forget the open videos: parent and child would read the same files by the same descriptors."""
        self._open = dict[int, _Video]()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments

    def forward(self, data: object) -> object:
        both = {key: shape for path, shape in self.shapes.items() for key in (path, ("next", *path))}
        shapes = {key: shape for key, shape in both.items() if find(data, key) is not None}
        refs = [torch.as_tensor(entry(data, key, "VideoFrames")).to("cpu", torch.float64) for key in shapes]
        leads = [(*ref.shape[:-1], *shape) for ref, shape in zip(refs, shapes.values(), strict=True)]
        made = [torch.empty(shape, dtype=torch.uint8, device="cpu") for shape in leads]
        frames = [one for each in made for one in each.view(-1, *each.shape[-3:]).numpy()]
        flat = np.concatenate([np.zeros((0, 2)), *(ref.reshape(-1, 2).numpy() for ref in refs)])
        for number, group in groupby(np.lexsort(flat.T[::-1]).tolist(), lambda place: float(flat[place, 0])):
            places = [*group]
            for place, frame in zip(places, self.frames(number, flat[places, 1].tolist()), strict=True):
                frames[place][:] = frame
        copied = shallow(data, "VideoFrames") if shapes else data
        for key, each in zip(shapes, made, strict=True):
            put(copied, key, each)
        return copied

    def frames(self, number: float, times: Sequence[float]) -> list[Frame]:
        """The frames of a file at times in order. Raises ``DatasetError``: as the class says."""
        root, files = self._arguments[1], self._videos.files
        if number not in range(len(files)):
            raise DatasetError(f"VideoFrames: expected the number of a file below {len(files)}, got {number}.")
        with self._lock:
            video = self._open[int(number)] = self._open.pop(int(number)) if number in self._open else _Video()
            while len(self._open) > MAX_OPEN:
                del self._open[next(iter(self._open))]  # the one that was used longest ago
        try:
            frames, decoded = video.frames(path := root / files[int(number)], times, self._videos.half)
        except OSError as error:
            self._open.pop(int(number), None)  # the file may be repaired
            what = "a whole video" if path.exists() else "a video, which is not there. root= says where the data set is"
            raise DatasetError(f"VideoFrames: {path}: expected {what} ({error}).") from error
        with self._lock:
            self.decoded, self.delivered = self.decoded + decoded, self.delivered + len(frames)
        return frames

    def column(self, path: field_paths.FieldPath, refs: of.Array) -> Frames:
        """The frames of a camera in rows ``[n, 2]``, in order of time."""
        frames = (self.frames(number, [time])[0] for number, time in refs.tolist())
        return Frames((len(refs), *self.shapes[path]), frames)
