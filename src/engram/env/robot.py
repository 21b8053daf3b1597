"""A recorder of robots: cameras and sensors, each at a rate of its own, whose rows and episodes outlive the process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Event, RLock, Thread
from typing import NamedTuple

import numpy as np
import torch

from engram._support import closing, mappings, words
from engram._support.checks import check_number, check_path
from engram.env.values import Array, Leaf
from engram.errors import CorruptStore, IncompatibleStore, RateLimited
from engram.format import files
from engram.storages import LazyMemmapStorage
from engram.store.lifetime import Hold, Process
from engram.types import WritePlan

#: Fields that every row has besides the features.
_EPISODE, _TIMESTAMP = "episode", "timestamp"
_SETTINGS, _VIDEOS = "robot.json", "videos"
#: Frames that are read at a time.
_FRAMES = 16
#: Frames ahead whose pages are made ready.
_READY = 8
#: Encoders that may end in a row without a video; of how many one episode may be the end; seconds between looks.
_MOST_SILENT, _MOST_DEATHS, _LOOK_S = 5, 3, 0.05


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
        TypeError, ValueError: features that cannot be. StoreInUse: another recorder has the directory open. OSError: no space.
            IncompatibleStore: the directory has other features. FileNotFoundError: no features were given, and it has none.
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
        raise FileNotFoundError(2, "record_robot: expected features=… or a directory that was recorded into", str(path))
    if features is not None:
        given = {"features": features, "fps": fps, "room_s": room_s, "hours": hours}
        wanted, raw = _described(features, fps, room_s, hours), json.dumps(given).encode()
        if known is None:
            specs = wanted
        elif {spec.name: spec[:3] for spec in specs} != {spec.name: spec[:3] for spec in wanted}:
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

    #: Of its folder, ``camera-…`` or ``sensors-…``: no name of a camera makes it that of another one.
    name: str
    fps: float
    features: dict[str, Leaf]
    #: How many there is room for.
    rows: int
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
        bad = not isinstance(name, str) or name in ("", _EPISODE, _TIMESTAMP) or not {"/", "\0"}.isdisjoint(name)
        if bad or len(name.encode()) > 200:
            raise ValueError(f"{what}: expected a name without '/' of up to 200 bytes, not 'episode' nor 'timestamp'.")
        rate = check_number(f"{what}: fps", feature.get("fps", fps), least=0.001)
        is_video, shape = feature["dtype"] == "video", tuple(feature["shape"])
        if is_video and (len(shape) != 3 or shape[2] != 3 or min(shape) < 1):
            raise ValueError(f"{what}: expected the shape (height, width, 3) of RGB frames, got {list(shape)}.")
        try:
            leaf = Leaf.of(np.zeros(shape, np.uint8 if is_video else feature["dtype"]), what)
        except TypeError:
            raise TypeError(f"{what}: expected 'video' or a dtype of numbers, got {feature['dtype']!r}.") from None
        stream = f"camera-{name}" if is_video else f"sensors-{rate:g}"
        seconds = check_number("record_robot: room_s, hours", room_s if is_video else 3600 * hours, least=0.1)
        spec = StreamSpec(stream, rate, {}, max(2, round(rate * seconds)), is_video)
        found.setdefault(stream, spec).features[name] = leaf
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
        #: Rows that were ever written, as far as they count, and those that were before the oldest one that must stay: of a camera
        #: the oldest one that no video has yet, of sensors the first one.
        self.written, self.needed = 0, 0
        #: Rows of the open episode, and the timestamp of the newest one.
        self.open, self.last = 0, -np.inf

    @property
    def held(self) -> int:
        """For how many rows there is no place: rows go in the order in which they came, so the oldest one that must stay keeps all."""
        return self.written - self.needed

    def write(self, episode: int, timestamp: float, values: Mapping[str, Array]) -> None:
        """Append a row."""
        row = _row(episode, timestamp, values)
        if self.storage.add_row(0, row) is None:
            prepared, n = self.storage.prepare(row, "add", batched=False)
            self.storage.write(WritePlan(lane=0), prepared, n)
        self.written, self.open, self.last = self.written + 1, self.open + 1, timestamp

    def make_pages_ready(self) -> None:
        """Let the kernel prepare the pages that the next frames go to."""
        (begin,), (name,) = self.storage.extent().seam, self.spec.features
        frames = self.storage.store.tensors[self._numbers[name]]
        for ahead in (frames[begin : begin + _READY], frames[: max(0, begin + _READY - len(frames))]):
            mappings.advise(ahead.data_ptr(), ahead.nbytes, mappings.POPULATE_WRITE)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows that are there, in the order in which they were written, the episode of each, and how many were before it."""
        extent = self.storage.extent()
        begin = extent.seam[0] if extent.filled[0] == extent.capacity else 0
        rows = (torch.arange(extent.filled[0], device="cpu") + begin) % extent.capacity
        (episodes,), gone = self.storage.store.read(rows, which=[self._numbers[_EPISODE]])
        there = torch.ones(len(rows), dtype=torch.bool, device="cpu")
        there[gone] = False
        return rows[there], episodes[there], there.nonzero()[:, 0]

    def of_episode(self, episode: int, length: int) -> torch.Tensor:
        """The rows of an episode, which had ``length``. Raises ``RuntimeError``: some are gone."""
        rows, episodes, _ = self.rows()
        found = rows[episodes == episode]
        if len(found) != length:
            what = f"{self.spec.name}: expected the {length} rows of episode {episode}, got {len(found)}"
            raise RuntimeError(f"{what}: the others were lost.")
        return found

    def read(self, rows: torch.Tensor, name: str, episode: int | torch.Tensor) -> Array:
        """A feature of some rows of an episode, ``[T, *shape]``. Raises ``RuntimeError``: they were written over."""
        which = [self._numbers[_EPISODE], self._numbers[name]]
        (episodes, found), gone = self.storage.store.read(rows.contiguous(), which=which)
        if gone or bool((episodes != episode).any()):
            raise RuntimeError(f"read: {name!r}: expected the rows of episode {episode}, but some were overwritten.")
        return found.numpy()

    def frames(self, rows: torch.Tensor, episode: int) -> Iterator[np.typing.NDArray[np.uint8]]:
        """The frames of a camera, some at a time in memory."""
        (name,) = self.spec.features
        for begin in range(0, len(rows), _FRAMES):
            yield from self.read(rows[begin : begin + _FRAMES], name, episode)


class PagesAhead:
    """A thread that makes pages of cameras ready before frames come, which would wait for the file system."""

    def __init__(self, cameras: list[Stream]) -> None:
        self._cameras = cameras
        #: Set when frames have come.
        self.moved = Event()
        self.thread = Thread(target=self._run, name="engram-record", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self.moved.wait() and self._cameras:
            self.moved.clear()
            for camera in [*self._cameras]:
                camera.make_pages_ready()

    def stop(self) -> None:
        self._cameras.clear()
        self.moved.set()


def _row(episode: int, timestamp: float, values: Mapping[str, Array]) -> dict[str, object]:
    return {_EPISODE: np.int64(episode), _TIMESTAMP: np.float64(timestamp), **values}


def _video(directory: Path, camera: str, episode: int) -> Path:
    return directory / _VIDEOS / f"{camera}-{episode:06d}.mp4"


def _ended(directory: Path, specs: list[StreamSpec]) -> Stream:
    """The store of episodes that have ended, with the number of rows that each stream has of them."""
    features = {"complete": Leaf(np.dtype(np.bool_), ()), "lengths": Leaf(np.dtype(np.int64), (len(specs),))}
    return Stream(directory, StreamSpec("episodes", 1, features, 100_000, is_video=False))


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

    def __init__(self, recorder: RobotRecorder, number: int, *, complete: bool, lengths: list[int]) -> None:
        self._recorder = recorder
        self._lengths = dict(zip(recorder.streams, lengths, strict=True))
        #: From 0 on, in order.
        self.number = number
        #: Whether it was ended; False: it was cut by the end of the process.
        self.complete = complete

    def timestamps(self, name: str) -> np.typing.NDArray[np.float64]:
        """The timestamps of a feature, float64 ``[T]``, in seconds. Raises as :meth:`read`.

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
            return stream.read(self._rows(stream), _TIMESTAMP, self.number).astype(np.float64)
        times: np.typing.NDArray[np.float64] = np.load(path.with_suffix(".npy"))
        return times

    def read(self, name: str) -> Array:
        """A feature, ``[T, *shape]``; frames from the video, if there is one.

        Raises ``KeyError``: no such feature. ``RuntimeError``: some of its rows were lost.

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
        return stream.read(self._rows(stream), name, self.number)

    def frames(self, name: str) -> Iterator[np.typing.NDArray[np.uint8]]:
        """The frames of a camera one by one, uint8 ``[H, W, 3]``, in constant memory. Raises as :meth:`read`.

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
            return stream.frames(self._rows(stream), self.number)
        from engram.env import video

        return video.decode(path)

    def _rows(self, stream: Stream) -> torch.Tensor:
        return stream.of_episode(self.number, self._lengths[stream])

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


class RobotRecorder(closing.Closes):
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
        self._hold: Hold | None = Hold(directory / "robot.lock", "record_robot", directory)
        #: One per camera, and one per rate of the other features.
        self.streams = [Stream(directory, spec) for spec in specs]
        self._of = {name: stream for stream in self.streams for name in stream.spec.features}
        self._ended = _ended(directory, specs)
        self._encode, self._tolerance = encode, tolerance
        self._lock = RLock()
        self._encoder: subprocess.Popen[bytes] | None = None
        #: How many encoders have ended in a row without a video.
        self._silent = 0
        #: Cameras and episodes without a video, and how many rows were before theirs.
        self._waiting: dict[tuple[str, int], int] = {}
        #: Episodes that have no verified video, and why: their frames stay as they are.
        self.kept: dict[int, str] = {}
        #: The number of the episode that is recorded, or of the next one.
        self.episode = 0
        self._ahead = PagesAhead([stream for stream in self.streams if stream.spec.is_video])
        weakref.finalize(self, self._ahead.stop)

    def recover(self) -> None:
        """Continue behind what is there; :func:`record_robot` calls it.

        >>> import tempfile
        >>> from engram import record_robot
        >>> with record_robot(tempfile.mkdtemp(), {"state": {"dtype": "float32", "shape": ()}}, hours=0.01) as recorder:
        ...     recorder.recover()
        ...     recorder.episode
        0
        """
        for left in (self.directory / _VIDEOS).glob("*.[pk]??t"):  # .part of dead encoders, .kept: what is tried again
            left.unlink(missing_ok=True)
        self.episode = max(self._ended.rows()[1].tolist(), default=-1) + 1
        numbers: dict[Stream, list[int]] = {}
        for stream in self.streams:
            _, episodes, places = stream.rows()
            stream.written, numbers[stream] = stream.storage.extent().filled[0], episodes.tolist()
            for number, place in zip(numbers[stream], places.tolist(), strict=True):
                if stream.spec.is_video:
                    self._waiting.setdefault((stream.spec.name, number), place)
        for torn in sorted({number for each in numbers.values() for number in each if number >= self.episode}):
            for stream in self.streams:  # the process ended within it
                stream.open = numbers[stream].count(torn)
            self._end(torn, complete=False)
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

        Cost: a copy of the values, within the page cache. Pages for the next frames are made ready before these come.

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
            self._ahead.moved.set()

    def _check(self, stream: Stream, row: Mapping[str, Array], timestamp: float) -> None:
        spec = stream.spec
        if row.keys() != spec.features.keys():
            raise KeyError(f"add: expected all features of a rate in one row, {[*spec.features]}, got {[*row]}.")
        if not stream.last < timestamp < np.inf:
            raise ValueError(f"add: {[*row]}: expected a timestamp after {stream.last:g} s, got {timestamp:g}.")
        if stream.held >= spec.rows:
            self._free()
        if stream.held >= spec.rows:
            more = f"{words.count(self.waiting, 'episode')} have no videos; room_s=…" if spec.is_video else "hours=…"
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
                raise RuntimeError("end_episode: expected rows of an episode, got none since the last one. Call add().")
            number = self.episode
            cameras = [stream for stream in self.streams if stream.spec.is_video and stream.open]
            self._waiting |= {(stream.spec.name, number): stream.written - stream.open for stream in cameras}
            self._end(number, complete=True)
            self._free()
            self._ask()
            return number

    def _end(self, episode: int, *, complete: bool) -> None:
        lengths = np.array([stream.open for stream in self.streams])
        self._ended.write(episode, time.time(), {"complete": np.array(complete), "lengths": lengths})
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
        for row, number in zip(*self._ended.rows()[:2], strict=True):
            complete, lengths = (self._ended.read(row[None], name, int(number))[0] for name in ("complete", "lengths"))
            yield RobotEpisode(self, int(number), complete=bool(complete), lengths=lengths.tolist())

    # ---- videos ----------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Let an encoder run while closed episodes wait. It finds them by itself. One that has died is followed by another."""
        if not self._encode or not self._waiting or (self._encoder is not None and self._encoder.poll() is None):
            return
        self._silent += 1
        if self._silent > _MOST_SILENT:
            why = "the encoder ends without a video. Its errors are above"
            self.kept = {episode: why for _, episode in self._waiting} | self.kept
            return
        command = [sys.executable, "-m", __name__, str(self.directory), str(self._tolerance), *map(str, Process.this())]
        self._encoder = subprocess.Popen(command)  # noqa: S603 - ourselves

    def _free(self) -> None:
        """Free the rows of frames whose videos are there, as far as none is older that must stay."""
        with self._lock:
            for camera, episode in [*self._waiting]:
                path = _video(self.directory, camera, episode)
                if path.exists():
                    self._silent = 0
                    del self._waiting[camera, episode]
                elif episode not in self.kept and path.with_suffix(".kept").exists():
                    self._silent, self.kept[episode] = 0, path.with_suffix(".kept").read_text()
            for stream in [stream for stream in self.streams if stream.spec.is_video]:
                places = [place for (camera, _), place in self._waiting.items() if camera == stream.spec.name]
                stream.needed = min(places, default=stream.written - stream.open)

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
            with self._lock:
                self._ask()
            if deadline is not None and time.monotonic() > deadline:
                return False
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
        self._ahead.stop()
        self._ahead.thread.join()
        for stream in [*self.streams, self._ended]:
            stream.storage.close()
        self._hold = None
        for episode, why in self.kept.items():
            words.warn(f"record_robot: episode {episode} keeps its frames: {why}")


def _make_video(target: Path, camera: Stream, episode: int, length: int, tolerance: float, died: int) -> None:
    """A video of an episode, which is decoded and compared with the frames before it gets its name.

    Raises ``RuntimeError``: it differs by more than the tolerance, rows were lost, or it was the end of several encoders; and whatever
    encoding raises.
    """
    from engram.env import video

    if target.exists() or target.with_suffix(".kept").exists():
        return
    if died >= _MOST_DEATHS:
        raise RuntimeError(f"{died} encoders have died of it.")
    rows, part = camera.of_episode(episode, length), target.with_suffix(f".{os.getpid()}.part")
    part.touch()  # stays if this is the end of the encoder
    try:
        video.encode(camera.frames(rows, episode), part, camera.spec.fps)
        if (differs := video.difference(camera.frames(rows, episode), part)) > tolerance:
            raise RuntimeError(f"expected frames within {tolerance:g} levels of those recorded, got {differs:.1f}.")
        times = io.BytesIO()
        np.save(times, camera.read(rows, _TIMESTAMP, episode))
        files.write_atomically(target.with_suffix(".npy"), times.getvalue())  # before the video is there
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)


def _main(directory: str, tolerance: str, *recorder: str) -> None:
    """The encoder: it makes videos of episodes that have ended, as long as the process lives that has started it.

    One that was the end of others comes last. If there can be none of an episode, a file says why.
    """
    os.nice(10)
    path, started_by, seen = Path(directory), Process(*map(int, recorder)), 0
    specs = _described(**json.loads((path / _SETTINGS).read_bytes()))
    cameras = [(at, Stream(path, spec)) for at, spec in enumerate(specs) if spec.is_video]
    ended, died = _ended(path, specs), Counter(one.with_suffix("").stem for one in (path / _VIDEOS).glob("*.part"))
    while started_by.runs():
        rows, episodes, _ = ended.rows()
        todo = list[tuple[Path, Stream, int, int]]()
        lengths = ended.read(rows[seen:], "lengths", episodes[seen:])
        for episode, each in zip(episodes[seen:].tolist(), lengths.tolist(), strict=True):
            todo += [(_video(path, one.spec.name, episode), one, episode, each[at]) for at, one in cameras if each[at]]
        for target, camera, episode, length in sorted(todo, key=lambda one: died[one[0].stem]):
            try:
                _make_video(target, camera, episode, length, float(tolerance), died[target.stem])
            except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
                if started_by.runs() and not isinstance(error, FileNotFoundError):  # else another one is at it
                    files.write_atomically(target.with_suffix(".kept"), f"{camera.spec.name}: {error}".encode())
        seen = len(rows)
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    _main(*sys.argv[1:])
