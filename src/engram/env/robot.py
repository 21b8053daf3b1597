"""A recorder of robots: cameras and sensors, each at a rate of its own, whose rows and episodes outlive the process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch

from engram._support.checks import check_number, check_path
from engram._support.words import count, warn
from engram.env.extras import Leaf
from engram.errors import CorruptStore, IncompatibleStore, RateLimited
from engram.format import files
from engram.storages import LazyMemmapStorage
from engram.types import WritePlan

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from engram.env.values import Array

#: Fields that every row has besides the features.
_EPISODE, _TIMESTAMP = "episode", "timestamp"
_SETTINGS, _VIDEOS = "robot.json", "videos"
#: Frames that are read at a time.
_FRAMES = 16
#: Encoders that may end in a row without a video; seconds between looks.
_MOST_SILENT, _LOOK_S = 5, 0.05


def record_robot(
    directory: str | os.PathLike[str],
    features: Mapping[str, Mapping[str, object]] | None = None,
    *,
    fps: float = 30,
    room_s: float = 60,
    hours: float = 10,
    encode: bool = True,
    tolerance: float = 6,
) -> RobotRecorder:
    """Record a robot into a directory, or go on with one that is there.

    Args:
        directory: made if it is not there.
        features: as LeRobot has them, by name: ``{"dtype": "video", "shape": (480, 640, 3)}`` of a camera, whose frames are uint8 RGB,
            ``{"dtype": "float32", "shape": (14,)}`` of sensors and actions. ``"fps"`` of a feature says that it has another rate than
            the rest. None: those that the directory has.
        fps: the rate of features that name none.
        room_s: seconds of frames of each camera that may wait for their video. Their space on the disk is reserved.
        hours: how long sensors can be recorded in all. Their space is reserved, too.
        encode: whether closed episodes become videos, in a process of their own. Without it frames stay as they are.
        tolerance: how far a frame of a video may be from what was recorded, in levels of 255 on average.

    Every camera has a store of one lane, and so have the other features of each rate: they are written when they come, each row with
    its timestamp and the number of its episode. A row that :meth:`RobotRecorder.add` has acknowledged is there after ``kill -9``. When
    the directory is opened again, an episode that was torn ends where it was cut, and is not :attr:`RobotEpisode.complete`.

    Raises:
        TypeError, ValueError: features that cannot be. IncompatibleStore: the directory has other ones. FileNotFoundError: no features
            were given, and the directory has none. OSError: no space.
        ModuleNotFoundError: videos are to be encoded, and PyAV is not installed; says how to install it.

    >>> import tempfile
    >>> from engram import record_robot
    >>> folder = tempfile.mkdtemp()
    >>> with record_robot(folder, {"state": {"dtype": "float32", "shape": (2,)}}, hours=0.01) as recorder:
    ...     for step in range(3):
    ...         recorder.add({"state": [step, step]}, timestamp=step / 30)
    ...     recorder.end_episode()
    0
    >>> with record_robot(folder) as recorder:
    ...     for episode in recorder.episodes():
    ...         print(episode.number, episode.complete, episode.read("state").tolist())
    0 True [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    """
    path = check_path("record_robot: directory", directory)
    try:
        known = json.loads((path / _SETTINGS).read_bytes())
        specs = [] if known is None else _described(**known)
    except FileNotFoundError:
        known = None
    except (ValueError, TypeError) as error:
        raise CorruptStore(f"{str(path / _SETTINGS)!r}: expected what record_robot wrote, got {error}.") from error
    if features is None and known is None:
        raise FileNotFoundError(
            2, "record_robot: expected features=…, or a directory that was recorded into", str(path)
        )
    if features is not None:
        given = {"features": features, "fps": fps, "room_s": room_s, "hours": hours}
        wanted, raw = _described(features, fps, room_s, hours), json.dumps(given).encode()
        if known is None:
            specs = wanted
        elif [spec[:3] for spec in specs] != [spec[:3] for spec in wanted]:
            raise IncompatibleStore(
                f"record_robot: {str(path)!r} has other features: expected {known['features']}, got {features}. Leave features= out, or "
                "record into another directory."
            )
    encode = encode and any(spec.is_video for spec in specs)
    if encode:
        from engram.env import video  # noqa: F401 - says how to install what it needs
    recorder = RobotRecorder(path, specs, check_number("record_robot: tolerance", tolerance, least=0), encode=encode)
    if known is None:
        files.write_atomically(path / _SETTINGS, raw)
    recorder.recover()
    return recorder


class StreamSpec(NamedTuple):
    """What is recorded together: a camera, or the sensors of one rate."""

    name: str
    """Of its folder."""
    fps: float
    features: dict[str, Leaf]
    rows: int
    """How many there is room for."""
    is_video: bool


def _described(features: object, fps: float, room_s: float, hours: float) -> list[StreamSpec]:
    """What is recorded together. Raises ``TypeError``, ``ValueError``."""
    if not isinstance(features, Mapping) or not features:
        raise TypeError(f"record_robot: features: expected a dict of features by name, got {features!r}.")
    found: dict[str, StreamSpec] = {}
    for name, feature in features.items():
        what = f"record_robot: features: {name!r}"
        if not isinstance(feature, Mapping) or not isinstance(feature.get("dtype"), str) or "shape" not in feature:
            raise TypeError(f"{what}: expected a dict with 'dtype' and 'shape', got {feature!r}.")
        if name in ("", _EPISODE, _TIMESTAMP) or "/" in name:
            raise ValueError(
                f"{what}: expected a name without '/', other than 'episode' and 'timestamp'. Use another one."
            )
        rate = check_number(f"{what}: fps", feature.get("fps", fps), least=0.001)
        is_video, shape = feature["dtype"] == "video", tuple(feature["shape"])
        if is_video and (len(shape) != 3 or shape[2] != 3):
            raise ValueError(f"{what}: expected the shape (height, width, 3) of RGB frames, got {list(shape)}.")
        try:
            leaf = Leaf.of(np.zeros(shape, np.uint8 if is_video else feature["dtype"]), what)
        except TypeError:
            raise TypeError(f"{what}: expected 'video' or a dtype of numbers, got {feature['dtype']!r}.") from None
        stream = name if is_video else f"sensors-{rate:g}"
        seconds = check_number("record_robot: room_s, hours", room_s if is_video else 3600 * hours, least=0.1)
        known = found.setdefault(stream, StreamSpec(stream, rate, {}, max(2, round(rate * seconds)), is_video))
        known.features[name] = leaf
    return [*found.values()]


class Stream:
    """A store of one lane: the rows of a camera, or of the sensors of one rate. Rows of an episode follow each other.

    Raises: as ``LazyMemmapStorage.open_or_create``.
    """

    def __init__(self, directory: Path, spec: StreamSpec) -> None:
        self.spec = spec
        self.storage = LazyMemmapStorage.open_or_create(directory / spec.name, spec.rows, 1, 1, None, unclean="accept")
        if self.storage.memory is None:  # the first row is not to wait for its space
            empty = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in spec.features.items()}
            self.storage.prepare(_row(0, 0.0, empty), "record_robot", batched=False)
        self._numbers = {field.key[0]: number for number, field in enumerate(self.storage.store.schema.fields)}
        #: Rows that must stay: those of a camera that no video has yet, all of sensors.
        self.held = 0
        #: Rows of the open episode, and the timestamp of the newest one.
        self.open, self.last = 0, -np.inf

    def write(self, episode: int, timestamp: float, values: Mapping[str, Array]) -> None:
        """Append a row."""
        row = _row(episode, timestamp, values)
        if self.storage.add_row(0, row) is None:
            prepared, n = self.storage.prepare(row, "add", batched=False)
            self.storage.write(WritePlan(lane=0), prepared, n)
        self.held, self.open, self.last = self.held + 1, self.open + 1, timestamp

    def rows(self) -> tuple[Tensor, Tensor]:
        """The rows that are there, in the order in which they were written, and the episode of each."""
        extent = self.storage.extent()
        begin = extent.seam[0] if extent.filled[0] == extent.capacity else 0
        rows = (torch.arange(extent.filled[0], device="cpu") + begin) % extent.capacity
        (episodes,), gone = self.storage.store.read(rows, which=[self._numbers[_EPISODE]])
        there = torch.ones(len(rows), dtype=torch.bool, device="cpu")
        there[gone] = False
        return rows[there], episodes[there]

    def of_episode(self, episode: int) -> Tensor:
        """The rows of an episode."""
        rows, episodes = self.rows()
        return rows[episodes == episode]

    def read(self, rows: Tensor, name: str, episode: int) -> Array:
        """A feature of some rows of an episode, ``[T, *shape]``. Raises ``RuntimeError``: they were written over."""
        which = [self._numbers[_EPISODE], self._numbers[name]]
        (episodes, found), gone = self.storage.store.read(rows.contiguous(), which=which)
        if gone or bool((episodes != episode).any()):
            raise RuntimeError(
                f"read: {name!r}: expected the rows of episode {episode}, but some made place for others."
            )
        return found.numpy()

    def frames(self, rows: Tensor, episode: int) -> Iterator[NDArray[np.uint8]]:
        """The frames of a camera, some at a time in memory."""
        for begin in range(0, len(rows), _FRAMES):
            yield from self.read(rows[begin : begin + _FRAMES], self.spec.name, episode)


def _row(episode: int, timestamp: float, values: Mapping[str, Array]) -> dict[str, object]:
    return {_EPISODE: np.int64(episode), _TIMESTAMP: np.float64(timestamp), **values}


def _video(directory: Path, camera: str, episode: int) -> Path:
    return directory / _VIDEOS / f"{camera}-{episode:06d}.mp4"


#: A store of episodes that have ended.
_ENDED = StreamSpec("episodes", 1, {"complete": Leaf(np.dtype(np.bool_), ())}, 100_000, is_video=False)


class RobotEpisode:
    """An episode of a robot: what :meth:`RobotRecorder.episodes` yields, for training and exporters.

    >>> import tempfile
    >>> from engram import record_robot
    >>> with record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01) as recorder:
    ...     recorder.add({"state": 1.5}, timestamp=0.0)
    ...     number = recorder.end_episode()
    ...     episode = next(recorder.episodes())
    >>> number, episode.number, episode.complete
    (0, 0, True)
    """

    def __init__(self, recorder: RobotRecorder, number: int, *, complete: bool) -> None:
        self._recorder = recorder
        self.number = number
        """From 0 on, in order."""
        self.complete = complete
        """Whether it was ended; False: it was cut by the end of the process."""

    def timestamps(self, name: str) -> NDArray[np.float64]:
        """The timestamps of a feature, float64 ``[T]``, in seconds. Raises ``KeyError``: no such feature.

        >>> import tempfile
        >>> from engram import record_robot
        >>> recorder = record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01)
        >>> recorder.add({"state": 1.5}, timestamp=0.25)
        >>> _ = recorder.end_episode()
        >>> next(recorder.episodes()).timestamps("state")
        array([0.25])
        >>> recorder.close()
        """
        path, stream = self.video(name), self._recorder.stream_of(name)
        if path is None:
            return stream.read(stream.of_episode(self.number), _TIMESTAMP, self.number).astype(np.float64)
        times: NDArray[np.float64] = np.load(path.with_suffix(".npy"))
        return times

    def read(self, name: str) -> Array:
        """A feature, ``[T, *shape]``; frames from the video, if there is one. Raises ``KeyError``: no such feature.

        >>> import tempfile
        >>> from engram import record_robot
        >>> recorder = record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01)
        >>> recorder.add({"state": 1.5}, timestamp=0.25)
        >>> _ = recorder.end_episode()
        >>> next(recorder.episodes()).read("state")
        array([1.5], dtype=float32)
        >>> recorder.close()
        """
        stream = self._recorder.stream_of(name)
        if self.video(name):
            return np.stack([*self.frames(name)])
        return stream.read(stream.of_episode(self.number), name, self.number)

    def frames(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """The frames of a camera one by one, uint8 ``[H, W, 3]``, in constant memory. Raises ``KeyError``: no such camera.

        >>> import tempfile
        >>> import numpy as np
        >>> from engram import record_robot
        >>> recorder = record_robot(tempfile.mkdtemp(), {"camera": {"dtype": "video", "shape": (4, 4, 3)}}, room_s=1, encode=False)
        >>> recorder.add({"camera": np.zeros((4, 4, 3), np.uint8)}, timestamp=0.25)
        >>> _ = recorder.end_episode()
        >>> [frame.shape for frame in next(recorder.episodes()).frames("camera")]
        [(4, 4, 3)]
        >>> recorder.close()
        """
        path, stream = self.video(name), self._recorder.stream_of(name)
        if path is None:
            return stream.frames(stream.of_episode(self.number), self.number)
        from engram.env import video

        return video.decode(path)

    def video(self, name: str) -> Path | None:
        """The verified video of a camera; None: there is none. Raises ``KeyError``: no such feature.

        >>> import tempfile
        >>> import numpy as np
        >>> from engram import record_robot
        >>> recorder = record_robot(tempfile.mkdtemp(), {"camera": {"dtype": "video", "shape": (4, 4, 3)}}, room_s=1, encode=False)
        >>> recorder.add({"camera": np.zeros((4, 4, 3), np.uint8)}, timestamp=0.25)
        >>> _ = recorder.end_episode()
        >>> next(recorder.episodes()).video("camera") is None  # frames stay as they are
        True
        >>> recorder.close()
        """
        path = _video(self._recorder.directory, self._recorder.stream_of(name).spec.name, self.number)
        return path if path.exists() else None


class RobotRecorder:
    """Records cameras and sensors in episodes: what :func:`record_robot` returns. Use it as a context.

    One process records into a directory, from one thread or several.

    >>> import tempfile
    >>> from engram import record_robot
    >>> with record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01) as recorder:
    ...     recorder.add({"state": 1.5}, timestamp=0.0)
    ...     number = recorder.end_episode()
    ...     episode = next(recorder.episodes())
    >>> number, episode.number, episode.complete
    (0, 0, True)
    """

    def __init__(self, directory: Path, specs: list[StreamSpec], tolerance: float, *, encode: bool) -> None:
        self.directory = directory
        (directory / _VIDEOS).mkdir(parents=True, exist_ok=True)
        self.streams = [Stream(directory, spec) for spec in specs]
        """One per camera, and one per rate of the other features."""
        self._of = {name: stream for stream in self.streams for name in stream.spec.features}
        self._ended = Stream(directory, _ENDED)
        self._encode, self._tolerance = encode, tolerance
        self._lock = RLock()
        self._encoder: subprocess.Popen[bytes] | None = None
        #: How many encoders have ended in a row without a video.
        self._silent = 0
        self._waiting: dict[tuple[str, int], int] = {}
        self.kept: dict[int, str] = {}
        """Episodes that have no verified video, and why: their frames stay as they are."""
        self.episode = 0
        """The number of the episode that is recorded, or of the next one."""

    def recover(self) -> None:
        """Continue behind what is there; :func:`record_robot` calls it.

        >>> import tempfile
        >>> from engram import record_robot
        >>> with record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01) as recorder:
        ...     recorder.recover()
        ...     recorder.episode
        0
        """
        for left in (self.directory / _VIDEOS).glob("*.part"):  # of an encoder that died
            left.unlink(missing_ok=True)
        ended = self._ended.rows()[1]
        self.episode = int(ended[-1]) + 1 if len(ended) else 0
        counts = {stream: torch.unique_consecutive(stream.rows()[1], return_counts=True) for stream in self.streams}
        newest = max((int(numbers[-1]) for numbers, _ in counts.values() if len(numbers)), default=-1)
        if newest >= self.episode:  # the process ended within it
            self._end(newest, complete=False)
        for stream, (numbers, lengths) in counts.items():
            stream.held = int(lengths.sum())
            if stream.spec.is_video:
                self._waiting |= {
                    (stream.spec.name, number): n for number, n in zip(numbers.tolist(), lengths.tolist(), strict=True)
                }
        self._free()
        self._ask()

    @property
    def waiting(self) -> int:
        """How many closed episodes wait for their videos."""
        self._free()
        return len({episode for _, episode in self._waiting})

    def stream_of(self, name: str) -> Stream:
        """The stream of a feature. Raises ``KeyError``: no such feature.

        >>> import tempfile
        >>> from engram import record_robot
        >>> with record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01) as recorder:
        ...     recorder.stream_of("state").spec.name
        'sensors-30'
        """
        if name not in self._of:
            raise KeyError(f"record_robot: expected a feature, one of {[*self._of]}, got {name!r}.")
        return self._of[name]

    def add(self, values: Mapping[str, object], timestamp: float) -> None:
        """Record what was seen at a time: a frame, the sensors of one rate, or several of these.

        Args:
            values: by name. Of the sensors of one rate all are given, since they are one row.
            timestamp: in seconds. Within an episode those of a camera or of sensors grow.

        Raises:
            KeyError: no such feature, or some of a rate are missing. TypeError, ValueError: a value of another dtype or shape; a
                timestamp that goes back. RateLimited: so many frames wait for their videos that there is no place, or sensors have
                filled theirs. Nothing is written.

        Cost: a copy of the values, within the page cache.

        >>> import tempfile
        >>> from engram import record_robot
        >>> with record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01) as recorder:
        ...     recorder.add({"state": 1.5}, timestamp=0.0)
        ...     recorder.stream_of("state").open
        1
        """
        rows: dict[Stream, dict[str, Array]] = {}
        for name, value in values.items():
            stream = self.stream_of(name)
            leaf = stream.spec.features[name]
            rows.setdefault(stream, {})[name] = leaf.fitted(value, (), f"add: {name!r}", "record_robot(features=…)")
        with self._lock:
            for stream, row in rows.items():
                self._check(stream, row, timestamp)
            for stream, row in rows.items():
                stream.write(self.episode, timestamp, row)

    def _check(self, stream: Stream, row: Mapping[str, Array], timestamp: float) -> None:
        spec = stream.spec
        if row.keys() != spec.features.keys():
            raise KeyError(f"add: expected all features of a rate in one row, {[*spec.features]}, got {[*row]}.")
        if not stream.last < timestamp < np.inf:
            raise ValueError(
                f"add: {[*row]}: expected a timestamp after {stream.last:g} s of the same episode, got {timestamp:g}."
            )
        if stream.held >= spec.rows:
            self._free()
        if stream.held >= spec.rows:
            more = f"{count(self.waiting, 'episode')} wait for videos; room_s=…" if spec.is_video else "hours=…"
            raise RateLimited(
                f"add: {[*row]}: expected place for a row, but all {spec.rows} are taken: {more} makes more in a new directory."
            )

    def end_episode(self) -> int:
        """End the episode: what comes is of the next one. Returns its number. Its frames become videos in the background.

        Raises ``RuntimeError``: nothing was recorded since the last one.

        >>> import tempfile
        >>> from engram import record_robot
        >>> with record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01) as recorder:
        ...     recorder.add({"state": 1.5}, timestamp=0.0)
        ...     recorder.end_episode()
        0
        """
        with self._lock:
            if not any(stream.open for stream in self.streams):
                raise RuntimeError(
                    "end_episode: expected rows of an episode, got none since the last one. Call add() first."
                )
            number = self.episode
            cameras = [stream for stream in self.streams if stream.spec.is_video and stream.open]
            self._waiting |= {(stream.spec.name, number): stream.open for stream in cameras}
            self._end(number, complete=True)
            self._free()
            self._ask()
            return number

    def _end(self, episode: int, *, complete: bool) -> None:
        self._ended.write(episode, time.time(), {"complete": np.array(complete)})
        self.episode = episode + 1
        for stream in self.streams:
            stream.last, stream.open = -np.inf, 0

    def episodes(self) -> Iterator[RobotEpisode]:
        """The episodes that have ended, in order, each read when it is asked: an exporter needs no more memory than one feature.

        Each says its :attr:`~RobotEpisode.number`, whether it is :attr:`~RobotEpisode.complete`, and what was recorded.

        >>> import tempfile
        >>> from engram import record_robot
        >>> with record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01) as recorder:
        ...     recorder.add({"state": 1.5}, timestamp=0.25)
        ...     _ = recorder.end_episode()
        ...     [(one.number, one.read("state").tolist(), one.timestamps("state").tolist()) for one in recorder.episodes()]
        [(0, [1.5], [0.25])]
        """
        for row, number in zip(*self._ended.rows(), strict=True):
            complete = self._ended.read(row[None], "complete", int(number))
            yield RobotEpisode(self, int(number), complete=bool(complete[0]))

    # ---- videos ----------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Let an encoder run while closed episodes wait. It finds them by itself. One that has died is followed by another."""
        if not self._encode or not self._waiting or (self._encoder is not None and self._encoder.poll() is None):
            return
        self._silent += 1
        if self._silent > _MOST_SILENT:
            self.kept |= {
                episode: "the encoder ends without a video. Its errors are above" for _, episode in self._waiting
            }
            return
        command = [sys.executable, "-m", __name__, str(self.directory), str(self._tolerance)]
        self._encoder = subprocess.Popen(command)  # noqa: S603 - ourselves

    def _free(self) -> None:
        """Free the rows of frames whose videos are there."""
        with self._lock:
            for (camera, episode), n in [*self._waiting.items()]:
                path = _video(self.directory, camera, episode)
                if path.exists():
                    self._of[camera].held -= n
                    self._silent = 0
                    del self._waiting[camera, episode]
                elif path.with_suffix(".kept").exists():
                    self.kept[episode] = path.with_suffix(".kept").read_text()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every closed episode has its videos, or could not have them. False: not within ``timeout`` seconds.

        >>> import tempfile
        >>> from engram import record_robot
        >>> with record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01) as recorder:
        ...     recorder.wait()
        True
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._encode and self.waiting and not {episode for _, episode in self._waiting} <= self.kept.keys():
            if deadline is not None and time.monotonic() > deadline:
                return False
            with self._lock:
                self._ask()
            time.sleep(_LOOK_S)
        return True

    def close(self) -> None:
        """Wait for the videos, and close the stores. An episode that was not ended is not complete.

        >>> import tempfile
        >>> from engram import record_robot
        >>> recorder = record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01)
        >>> recorder.close()
        """
        self.wait()
        if self._encoder is not None:
            self._encoder.kill()
            self._encoder.wait()
        for stream in [*self.streams, self._ended]:
            stream.storage.close()
        for episode, why in self.kept.items():
            warn(f"record_robot: episode {episode} keeps its frames: {why}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_video(directory: Path, stream: Stream, episode: int, tolerance: float) -> None:
    """A video of an episode, which is decoded and compared with the frames before it gets its name.

    If it differs by more than the tolerance, a file says so in its place. Raises ``OSError``, ``RuntimeError``.
    """
    from engram.env import video

    target, rows = _video(directory, stream.spec.name, episode), stream.of_episode(episode)
    if not len(rows) or target.exists() or target.with_suffix(".kept").exists():
        return
    part = target.with_suffix(f".{os.getpid()}.part")
    video.encode(stream.frames(rows, episode), part, stream.spec.fps)
    differs = video.difference(stream.frames(rows, episode), part)
    if differs > tolerance:
        part.unlink()
        why = f"{stream.spec.name}: expected frames within {tolerance:g} levels of those recorded, got {differs:.1f}."
        files.write_atomically(target.with_suffix(".kept"), why.encode())
        return
    times = io.BytesIO()
    np.save(times, stream.read(rows, _TIMESTAMP, episode))
    files.write_atomically(target.with_suffix(".npy"), times.getvalue())  # before the video is there
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.rename(target)


def _main(directory: str, tolerance: str) -> None:
    """The encoder: it makes videos of episodes that have ended, as long as the process that has started it lives."""
    os.nice(10)
    path, parent, done = Path(directory), os.getppid(), 0
    cameras = [
        Stream(path, spec) for spec in _described(**json.loads((path / _SETTINGS).read_bytes())) if spec.is_video
    ]
    ended = Stream(path, _ENDED)
    while os.getppid() == parent:
        for episode in ended.rows()[1].tolist()[done:]:
            for camera in cameras:
                _make_video(path, camera, episode, float(tolerance))
            done += 1
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    _main(*sys.argv[1:])
