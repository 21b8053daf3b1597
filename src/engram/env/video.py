"""Frames as videos, by PyAV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from fractions import Fraction
from typing import TYPE_CHECKING, cast

import numpy as np

try:
    import av
    from av.video.stream import VideoStream
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"record_robot: videos need PyAV: {error}. pip install 'engram-replay[robot]', or pass encode=False.",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Frame = NDArray[np.uint8]

#: How videos are encoded: fast enough for three cameras beside a robot, and visually lossless.
_CODEC, _OPTIONS = "libx264", {"preset": "ultrafast", "crf": "16"}


class Encoder:
    """A video that RGB frames ``[H, W, 3]`` are written to. Raises ``OSError``. ``keys``: each how many-th frame is a key frame."""

    def __init__(self, path: Path, fps: float, keys: int = 250) -> None:
        self._file, self._rate = av.open(str(path), "w", format="mp4"), Fraction(fps).limit_denominator(1001)
        self._options = {**_OPTIONS, "g": str(keys)}
        self._stream: VideoStream | None = None

    def write(self, frame: Frame) -> None:
        if self._stream is None:
            self._stream = cast("VideoStream", self._file.add_stream(_CODEC, rate=self._rate, options=self._options))
            self._stream.height, self._stream.width = frame.shape[:2]
            self._stream.pix_fmt = "yuv444p" if frame.shape[0] % 2 or frame.shape[1] % 2 else "yuv420p"
            self._stream.thread_count = 1  # the robot has the other cores
        self._file.mux(self._stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))

    def close(self) -> None:
        if self._stream is not None:
            self._file.mux(self._stream.encode())
        self._file.close()


def encode(frames: Iterable[Frame], path: Path, fps: float) -> None:
    """Write frames into a video. Raises ``OSError``."""
    with closing(Encoder(path, fps)) as encoder:
        for frame in frames:
            encoder.write(frame)


def timed(path: Path, start: float = 0) -> Iterator[tuple[float, Frame]]:
    """The RGB frames ``[H, W, 3]`` of a video from a key frame before a time on, each with its time, in seconds.

    Raises ``OSError``: it cannot be read, or is damaged.
    """
    try:
        with av.open(str(path)) as file:
            stream = file.streams.video[0]
            stream.thread_count, unit = 1, cast("Fraction", stream.time_base)
            if start > 0:
                file.seek(int(start / unit), stream=stream)
            for frame in file.decode(stream):
                if frame.is_corrupt:
                    raise OSError(f"{str(path)!r}: expected a whole video, got a damaged frame.")
                yield float((frame.pts or 0) * unit), frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
    except (av.FFmpegError, IndexError) as error:
        raise OSError(f"{str(path)!r}: expected a video, got one that cannot be decoded: {error}.") from error


def decode(path: Path) -> Iterator[Frame]:
    """The RGB frames ``[H, W, 3]`` of a video. Raises ``OSError``: it cannot be read."""
    for _, frame in timed(path):
        yield frame


def difference(frames: Iterable[Frame], path: Path) -> float:
    """How far the frames of a video are from others, in levels of 255: the mean of the worst frame. Infinite: another number of them."""
    worst, decoded = 0.0, decode(path)
    for frame in frames:
        other = next(decoded, None)
        if other is None or other.shape != frame.shape:
            return float("inf")
        worst = max(worst, float((np.maximum(frame, other) - np.minimum(frame, other)).mean()))
    return worst if next(decoded, None) is None else float("inf")
