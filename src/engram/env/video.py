"""Frames as videos, by PyAV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


def encode(frames: Iterable[Frame], path: Path, fps: float) -> None:
    """Write RGB frames ``[H, W, 3]`` into a video. Raises ``OSError``."""
    with av.open(str(path), "w", format="mp4") as file:
        stream: VideoStream | None = None
        for frame in frames:
            if stream is None:
                stream = cast(
                    "VideoStream", file.add_stream(_CODEC, rate=Fraction(fps).limit_denominator(1001), options=_OPTIONS)
                )
                stream.height, stream.width = frame.shape[:2]
                stream.pix_fmt = "yuv444p" if frame.shape[0] % 2 or frame.shape[1] % 2 else "yuv420p"
                stream.thread_count = 1  # the robot has the other cores
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        if stream is not None:
            file.mux(stream.encode())


def decode(path: Path) -> Iterator[Frame]:
    """The RGB frames ``[H, W, 3]`` of a video. Raises ``OSError``: it cannot be read."""
    try:
        with av.open(str(path)) as file:
            file.streams.video[0].thread_count = 1
            for frame in file.decode(video=0):
                yield frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
    except (av.FFmpegError, IndexError) as error:
        raise OSError(f"{str(path)!r}: expected a video, got one that cannot be decoded: {error}.") from error


def difference(frames: Iterable[Frame], path: Path) -> float:
    """How far the frames of a video are from others, in levels of 255: the mean of the worst frame. Infinite: another number of them."""
    worst, decoded = 0.0, decode(path)
    for frame in frames:
        other = next(decoded, None)
        if other is None or other.shape != frame.shape:
            return float("inf")
        worst = max(worst, float((np.maximum(frame, other) - np.minimum(frame, other)).mean()))
    return worst if next(decoded, None) is None else float("inf")
