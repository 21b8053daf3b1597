"""Frames as videos, by PyAV."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from fractions import Fraction
from io import BytesIO
from typing import TYPE_CHECKING, cast

import numpy as np

from engram._support import unsupported, words

with unsupported.needs("record_robot: a video, which encode=False does not make", "robot"):
    import av
    from av.video.stream import VideoStream

if TYPE_CHECKING:
    from pathlib import Path

    from av.container import InputContainer

    Frame = np.typing.NDArray[np.uint8]

#: How videos are encoded: fast enough for three cameras beside a robot, and visually lossless.
_CODEC, _OPTIONS = "libx264", {"preset": "ultrafast", "crf": "16"}
#: Colours are converted by the thread that asks: a forked process has no others, and waits for them. Before PyAV 17 there are none.
_ALONE = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}


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
        picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
        self._file.mux(self._stream.encode(picture.reformat(format=self._stream.pix_fmt, **_ALONE)))

    def close(self) -> None:
        if self._stream is not None:
            self._file.mux(self._stream.encode())
        self._file.close()


def encode(frames: Iterable[Frame], path: Path, fps: float) -> None:
    """Write frames into a video. Raises ``OSError``."""
    with closing(Encoder(path, fps)) as encoder:
        for frame in frames:
            encoder.write(frame)


class Reader:
    """The RGB frames ``[H, W, 3]`` of a video, by time; in order of time it decodes none twice.

    All methods raise ``OSError``: the video cannot be read, or is damaged.
    """

    def __init__(self, path: Path | BytesIO) -> None:
        self._name = "an image" if isinstance(path, BytesIO) else repr(str(path))
        self._at, self.decoded = math.inf, 0
        with self._decoding(av.FFmpegError, IndexError):
            self._file = cast("InputContainer", av.open(path if isinstance(path, BytesIO) else str(path)))
            self._stream = self._file.streams.video[0]
        self._stream.thread_count, self._unit = 1, float(cast("Fraction", self._stream.time_base))
        #: How many frames there are; 0: the file does not say.
        self.count = self._stream.frames
        #: When key frames are decoded, which is not after they are shown.
        self._keys: list[float] = []
        with suppress(AttributeError):  # PyAV 14 does not say
            self._keys = [it.timestamp * self._unit for it in self._stream.index_entries if it.is_keyframe]
        self._ahead = self._decode()

    def at(self, time: float, half: float, end: float = math.inf) -> Frame | None:
        """The frame that is shown at a time, at most ``half`` seconds off and not after ``end``. None: there is none."""
        place = bisect_right(self._keys, time + half)
        groups = self._keys[max(0, place - 2) : place]
        if time < self._at - half or (len(groups) == 2 and groups[0] > self._at):
            # Frames may be shown before the key frame that they are decoded after: then the group before it has them.
            for start in (time + half, *reversed(groups), 0.0):
                self._ahead = self._decode(start)
                self._advance()
                if self._at <= time + half:
                    break
        while self._at < time - half:
            self._advance()
        return _rgb(self._frame) if max(self._at, time) <= min(time + half, end) else None

    def _advance(self) -> None:
        """To the next frame; the time is infinite where there is none."""
        self._at = math.inf
        if (frame := next(self._ahead, None)) is not None:
            self._frame, self._at = frame, (frame.pts or 0) * self._unit

    def __iter__(self) -> Iterator[Frame]:
        return map(_rgb, self._ahead)

    def _decode(self, start: float | None = None) -> Iterator[av.VideoFrame]:
        """Frames from the key frame before a time on; None: those that come next."""
        with self._decoding(av.FFmpegError):
            if start is not None:
                self._file.seek(int(start / self._unit), stream=self._stream)
            for frame in self._file.decode(self._stream):
                self.decoded += 1
                if frame.is_corrupt:
                    raise OSError(f"{self._name}: expected a whole video, got a damaged frame.")
                yield frame

    def _decoding(self, *errors: type[Exception]) -> AbstractContextManager[None]:
        """Raises these as what says of which file they are."""
        return words.raise_as(OSError, f"{self._name}: expected a video, got one that cannot be decoded", errors)


def _rgb(frame: av.VideoFrame) -> Frame:
    return frame.reformat(format="rgb24", **_ALONE).to_ndarray().astype(np.uint8, copy=False)


def decode(path: Path) -> Iterator[Frame]:
    """The RGB frames ``[H, W, 3]`` of a video. Raises ``OSError``: it cannot be read."""
    yield from Reader(path)


def difference(frames: Iterable[Frame], path: Path) -> float:
    """How far the frames of a video are from others, in levels of 255: the mean of the worst frame. Infinite: another number of them."""
    worst, decoded = 0.0, decode(path)
    for frame in frames:
        other = next(decoded, None)
        if other is None or other.shape != frame.shape:
            return float("inf")
        worst = max(worst, float((np.maximum(frame, other) - np.minimum(frame, other)).mean()))
    return worst if next(decoded, None) is None else float("inf")
