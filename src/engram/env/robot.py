"""A recorder of robots: cameras and sensors, each at a rate of its own, whose rows and episodes outlive the process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
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
_VIDEO = "video"
_SETTINGS, _EPISODES, _VIDEOS = "robot.json", "episodes", "videos"
_MOST_EPISODES = 100_000
#: Frames that are read at a time.
_FRAMES = 16
#: Encoders that may die in a row without an answer.
_MOST_SILENT = 5


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
    given = None
    if features is not None:
        rates = (
            check_number("record_robot: fps", fps, least=0.001),
            check_number("record_robot: room_s", room_s, least=0.1),
        )
        given = _described(features, *rates, check_number("record_robot: hours", hours, least=0.0001))
    tolerance = check_number("record_robot: tolerance", tolerance, least=0)
    known = _streams_in(path)
    if known is None and given is None:
        raise FileNotFoundError(
            2, "record_robot: expected a directory that was recorded into, or features=…", str(path)
        )
    if known is not None and given is not None and [one[:3] for one in known] != [one[:3] for one in given]:
        raise IncompatibleStore(
            f"record_robot: {str(path)!r} has other features: expected {[one[:3] for one in known]}, got {[one[:3] for one in given]}. "
            "Leave features= out, or record into another directory."
        )
    settings = known or given
    assert settings is not None  # as was checked above
    if encode and any(one.fps for one in settings if one.is_video):
        from engram.env import video  # noqa: F401 - says how to install what it needs
    if known is None:
        path.mkdir(parents=True, exist_ok=True)
        (path / _VIDEOS).mkdir(exist_ok=True)
        files.write_atomically(path / _SETTINGS, json.dumps([one.plain() for one in settings]).encode())
    return RobotRecorder(path, settings, encode=encode, tolerance=tolerance)


class StreamSpec(NamedTuple):
    """What is recorded together: a camera, or the sensors of one rate."""

    name: str
    """Of its folder."""
    fps: float
    features: dict[str, Leaf]
    rows: int
    """How many there is room for."""
    is_video: bool

    def plain(self) -> list[object]:
        """As JSON values."""
        features = {name: [leaf.dtype.str, list(leaf.shape)] for name, leaf in self.features.items()}
        return [self.name, self.fps, features, self.rows, self.is_video]

    @classmethod
    def of_plain(
        cls, name: str, fps: float, features: Mapping[str, tuple[str, list[int]]], rows: int, is_video: bool
    ) -> Self:
        """From :meth:`plain`."""
        leaves = {one: Leaf(np.dtype(dtype), tuple(shape)) for one, (dtype, shape) in features.items()}
        return cls(name, fps, leaves, rows, is_video)


def _described(features: object, fps: float, room_s: float, hours: float) -> list[StreamSpec]:
    """What is recorded together. Raises ``TypeError``, ``ValueError``."""
    if not isinstance(features, Mapping) or not features:
        raise TypeError(f"record_robot: features: expected a dict of features by name, got {features!r}.")
    found: dict[str, StreamSpec] = {}
    for name, feature in features.items():
        what = f"record_robot: features: {name!r}"
        if not isinstance(feature, Mapping) or not {"dtype", "shape"} <= feature.keys():
            raise TypeError(f"{what}: expected a dict with 'dtype' and 'shape', got {feature!r}.")
        if not isinstance(name, str) or name in (_EPISODE, _TIMESTAMP) or not name or "/" in name:
            raise ValueError(
                f"{what}: expected a name without '/', other than 'episode' and 'timestamp'. Use another one."
            )
        rate = check_number(f"{what}: fps", feature.get("fps", fps), least=0.001)
        shape = tuple(int(size) for size in feature["shape"])
        if is_video := feature["dtype"] == _VIDEO:
            if len(shape) != 3 or shape[2] != 3:
                raise ValueError(f"{what}: expected the shape (height, width, 3) of RGB frames, got {list(shape)}.")
            leaf = Leaf(np.dtype(np.uint8), shape)
        else:
            try:
                leaf = Leaf.of(np.zeros(shape, np.dtype(feature["dtype"])), what)
            except TypeError:
                raise TypeError(f"{what}: expected 'video' or a dtype of numbers, got {feature['dtype']!r}.") from None
        stream = name if is_video else f"sensors-{rate:g}"
        rows = max(2, round(rate * (room_s if is_video else 3600 * hours)))
        known = found.setdefault(stream, StreamSpec(stream, rate, {}, rows, is_video))
        known.features[name] = leaf
    return [*found.values()]


def _streams_in(path: Path) -> list[StreamSpec] | None:
    """What a directory says. None: it was never recorded into. Raises ``CorruptStore``."""
    try:
        return [StreamSpec.of_plain(*one) for one in json.loads((path / _SETTINGS).read_bytes())]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise CorruptStore(
            f"record_robot: {str(path / _SETTINGS)!r}: expected what record_robot wrote, got {error}."
        ) from error


class Stream:
    """A store of one lane: the rows of a camera, or of the sensors of one rate. Rows of an episode follow each other.

    Raises: as ``LazyMemmapStorage.open_or_create``.
    """

    def __init__(self, folder: Path, spec: StreamSpec, *, readonly: bool = False) -> None:
        self.spec = spec
        if readonly:
            self.storage = LazyMemmapStorage.open(folder, unclean="accept", readonly=True)
        else:
            self.storage = LazyMemmapStorage.open_or_create(folder, spec.rows, 1, 1, None, unclean="accept")
            if self.storage.memory is None:  # the first row is not to wait for its space
                empty = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in spec.features.items()}
                self.storage.prepare(_row(0, 0.0, empty), "record_robot", batched=False)
        self._numbers = {field.key[0]: number for number, field in enumerate(self.storage.store.schema.fields)}
        #: Rows that must stay: those of a camera that no video has yet, all of sensors.
        self.held = 0
        #: Rows of the open episode.
        self.open = 0
        self.last = -np.inf
        """The timestamp of the newest row of the open episode."""

    def number(self, name: str) -> int:
        """Of a field."""
        return self._numbers[name]

    def write(self, episode: int, timestamp: float, values: Mapping[str, Array]) -> None:
        """Append a row."""
        row = _row(episode, timestamp, values)
        if self.storage.add_row(0, row) is None:
            prepared, n = self.storage.prepare(row, "add", batched=False)
            self.storage.write(WritePlan(lane=0), prepared, n)
        self.held, self.open, self.last = self.held + 1, self.open + 1, timestamp

    def rows(self) -> tuple[Tensor, NDArray[np.int64]]:
        """The rows that are there, in the order in which they were written, and the episode of each."""
        extent = self.storage.extent()
        n, begin = extent.filled[0], extent.seam[0] if extent.filled[0] == extent.capacity else 0
        rows = (torch.arange(n, device="cpu") + begin) % max(1, extent.capacity)
        (episodes,), gone = self.storage.store.read(rows, which=[self._numbers[_EPISODE]])
        there = torch.ones(n, dtype=torch.bool, device="cpu")
        there[gone] = False
        return rows[there], episodes[there].numpy()

    def of_episode(self, episode: int) -> Tensor:
        """The rows of an episode."""
        rows, episodes = self.rows()
        return rows[torch.from_numpy(episodes == episode)]

    def read(self, rows: Tensor, name: str, episode: int) -> Array:
        """A feature of some rows of an episode, ``[T, *shape]``. Raises ``RuntimeError``: they were written over."""
        which = [self._numbers[_EPISODE], self._numbers[name]]
        (episodes, found), gone = self.storage.store.read(rows.contiguous(), which=which)
        gone += (episodes != episode).nonzero().flatten().tolist()
        if gone:
            raise RuntimeError(
                f"read: {name!r}: expected the rows of the episode, but {count(len(gone), 'row')} made place for others."
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


class RobotEpisode:
    """An episode of a robot: what :meth:`RobotRecorder.episodes` yields, for training and exporters."""

    def __init__(self, recorder: RobotRecorder, number: int, *, complete: bool) -> None:
        self._recorder = recorder
        self.number = number
        """From 0 on, in order."""
        self.complete = complete
        """Whether it was ended; False: it was cut by the end of the process."""

    def timestamps(self, name: str) -> NDArray[np.float64]:
        """The timestamps of a feature, float64 ``[T]``, in seconds. Raises ``KeyError``: no such feature."""
        stream, path = self._place(name)
        if path.exists():
            times: NDArray[np.float64] = np.load(path.with_suffix(".npy"))
            return times
        return stream.read(stream.of_episode(self.number), _TIMESTAMP, self.number)  # type: ignore[return-value]

    def read(self, name: str) -> Array:
        """A feature, ``[T, *shape]``; frames from the video, if there is one. Raises ``KeyError``: no such feature."""
        stream, path = self._place(name)
        if path.exists():
            return np.stack([*self.frames(name)])
        return stream.read(stream.of_episode(self.number), name, self.number)

    def frames(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """The frames of a camera one by one, uint8 ``[H, W, 3]``, in constant memory. Raises ``KeyError``: no such camera."""
        stream, path = self._place(name)
        if path.exists():
            from engram.env import video

            return video.decode(path)
        return stream.frames(stream.of_episode(self.number), self.number)

    def video(self, name: str) -> Path | None:
        """The verified video of a camera; None: there is none yet. Raises ``KeyError``: no such camera."""
        path = self._place(name)[1]
        return path if path.exists() else None

    def _place(self, name: str) -> tuple[Stream, Path]:
        return self._recorder.stream_of(name), _video(self._recorder.directory, name, self.number)


class RobotRecorder:
    """Records cameras and sensors in episodes: what :func:`record_robot` returns. Use it as a context.

    One process records into a directory, from one thread or several.
    """

    def __init__(self, directory: Path, specs: list[StreamSpec], *, encode: bool, tolerance: float) -> None:
        self.directory = directory
        self.streams = [Stream(directory / spec.name, spec) for spec in specs]
        """One per camera, and one per rate of the other features."""
        self._of = {name: stream for stream in self.streams for name in stream.spec.features}
        self._ended = Stream(
            directory / _EPISODES,
            StreamSpec("", 1, {"complete": Leaf(np.dtype(np.bool_), ())}, _MOST_EPISODES, is_video=False),
        )
        self._encode, self._tolerance = encode and any(spec.is_video for spec in specs), tolerance
        self._lock = threading.RLock()
        self._encoder: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._silent = 0
        """How many encoders have died in a row without an answer."""
        self._waiting: dict[int, dict[str, int]] = {}
        """Episodes whose frames have no video yet, and how many each camera has."""
        self.kept: dict[int, str] = {}
        """Episodes whose videos could not be verified, and why: their frames stay as they are."""
        self._recover()

    def _recover(self) -> None:
        """Continue behind what is there."""
        for left in (self.directory / _VIDEOS).glob("*.part"):  # of an encoder that died
            left.unlink(missing_ok=True)
        ended = self._ended.rows()[1]
        episodes = [stream.rows()[1] for stream in self.streams]
        newest = max((int(of[-1]) for of in episodes if len(of)), default=-1)
        self._next = int(ended[-1]) + 1 if len(ended) else 0
        if newest >= self._next:  # the process ended within it
            self._end(newest, complete=False)
        for stream, of in zip(self.streams, episodes, strict=True):
            numbers, counts = np.unique(of, return_counts=True)
            for episode, n in zip(numbers.tolist(), counts.tolist(), strict=True):
                if not (stream.spec.is_video and _video(self.directory, stream.spec.name, episode).exists()):
                    stream.held += n
                    if stream.spec.is_video:
                        self._waiting.setdefault(episode, {})[stream.spec.name] = n
        self._ask([*self._waiting])

    @property
    def episode(self) -> int:
        """The number of the episode that is recorded, or of the next one."""
        return self._next

    @property
    def waiting(self) -> int:
        """How many closed episodes wait for their videos."""
        return len(self._waiting)

    def stream_of(self, name: str) -> Stream:
        """The stream of a feature. Raises ``KeyError``: no such feature."""
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
        """
        rows: dict[int, dict[str, Array]] = {}
        for name, value in values.items():
            stream = self.stream_of(name)
            leaf = stream.spec.features[name]
            rows.setdefault(id(stream), {})[name] = leaf.fitted(value, (), f"add: {name!r}", "record_robot(features=…)")
        streams = [stream for stream in self.streams if id(stream) in rows]
        with self._lock:
            for stream in streams:
                self._check(stream, rows[id(stream)], timestamp)
            for stream in streams:
                stream.write(self._next, timestamp, rows[id(stream)])

    def _check(self, stream: Stream, row: Mapping[str, Array], timestamp: float) -> None:
        spec = stream.spec
        if row.keys() != spec.features.keys():
            raise KeyError(f"add: expected all features of a rate in one row, {[*spec.features]}, got {[*row]}.")
        if not stream.last < timestamp < np.inf:
            raise ValueError(
                f"add: {[*row]}: expected a timestamp after {stream.last:g} s, got {timestamp:g}. End the episode before time begins anew."
            )
        if stream.held >= spec.rows:
            more = (
                f"{count(self.waiting, 'episode')} wait for videos; make more room with room_s=…"
                if spec.is_video
                else "make more room with hours=…"
            )
            raise RateLimited(
                f"add: {[*row]}: expected place for a row, but all {spec.rows} are taken: {more}, in a new directory."
            )

    def end_episode(self) -> int:
        """End the episode: what comes is of the next one. Returns its number. Its frames become videos in the background.

        Raises ``RuntimeError``: nothing was recorded since the last one.
        """
        with self._lock:
            if not any(stream.open for stream in self.streams):
                raise RuntimeError(
                    "end_episode: expected rows of an episode, got none since the last one. Call add() first."
                )
            ended = self._next
            frames = {stream.spec.name: stream.open for stream in self.streams if stream.spec.is_video and stream.open}
            self._end(ended, complete=True)
            if frames:
                self._waiting[ended] = frames
                self._ask([ended])
            return ended

    def _end(self, episode: int, *, complete: bool) -> None:
        self._ended.write(episode, time.time(), {"complete": np.array(complete)})
        self._next = episode + 1
        for stream in self.streams:
            stream.last, stream.open = -np.inf, 0

    def episodes(self) -> Iterator[RobotEpisode]:
        """The episodes that have ended, in order, each read when it is asked: an exporter needs no more memory than one feature.

        Each says its :attr:`~RobotEpisode.number`, whether it is :attr:`~RobotEpisode.complete`, and what was recorded.
        """
        rows, numbers = self._ended.rows()
        complete = self._ended.storage.store.read(rows)[0][self._ended.number("complete")].tolist()
        for number, whole in zip(numbers.tolist(), complete, strict=True):
            yield RobotEpisode(self, number, complete=whole)

    # ---- videos ----------------------------------------------------------------------------------------------------------

    def _ask(self, episodes: list[int]) -> None:
        """Let the encoder make videos of some episodes. One that has died is started again, with all that wait."""
        if not self._encode or not episodes:
            return
        if self._encoder is None or self._encoder.poll() is not None:
            self._leave_encoder()
            self._silent += 1
            if self._silent > _MOST_SILENT:
                self.kept.update(dict.fromkeys(episodes, "the encoder ends without an answer. Its errors are above"))
                return
            command = [sys.executable, "-m", __name__, str(self.directory), str(self._tolerance)]
            self._encoder = subprocess.Popen(  # noqa: S603 - ourselves
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._listener = threading.Thread(target=self._hear, args=(self._encoder,), daemon=True)
            self._listener.start()
            episodes = [episode for episode in self._waiting if episode not in self.kept]
        assert self._encoder.stdin is not None  # it is a pipe
        with contextlib.suppress(BrokenPipeError):  # it has died: the next one is told
            self._encoder.stdin.write("".join(f"{episode}\n" for episode in episodes))
            self._encoder.stdin.flush()

    def _hear(self, encoder: subprocess.Popen[str]) -> None:
        """Free the rows of episodes whose videos are there."""
        assert encoder.stdout is not None  # it is a pipe
        with encoder.stdout as answers:
            for line in answers:
                episode, _, why = line.strip().partition(" ")
                with self._lock:
                    self._silent = 0
                    if why:
                        self.kept[int(episode)] = why
                        continue
                    for name, n in self._waiting.pop(int(episode), {}).items():
                        self._of[name].held -= n

    def _leave_encoder(self) -> None:
        """Let it end: it finishes what it was asked, and makes no more."""
        if self._encoder is not None and self._encoder.stdin is not None and self._encoder.stdout is not None:
            with contextlib.suppress(BrokenPipeError):
                self._encoder.stdin.close()
            self._encoder.wait()
            self._encoder = None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every closed episode has its videos, or could not have them. False: not within ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._encode and any(episode not in self.kept for episode in [*self._waiting]):
            if deadline is not None and time.monotonic() > deadline:
                return False
            if self._encoder is None or self._encoder.poll() is not None:
                with self._lock:
                    self._ask([*self._waiting])
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """Wait for the videos, and close the stores. An episode that was not ended is not complete."""
        self.wait()
        self._leave_encoder()
        if self._listener is not None:
            self._listener.join()
        for stream in [*self.streams, self._ended]:
            stream.storage.close()
        for episode, why in self.kept.items():
            warn(f"record_robot: episode {episode} keeps its frames: {why}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_videos(directory: Path, episode: int, tolerance: float) -> None:
    """The videos of an episode: each is decoded and compared with the frames before it gets its name.

    Raises ``ValueError``: one differs by more than the tolerance. ``OSError``: no space.
    """
    from engram.env import video

    for spec in _streams_in(directory) or []:
        target = _video(directory, spec.name, episode)
        if not spec.is_video or target.exists():
            continue
        stream = Stream(directory / spec.name, spec, readonly=True)
        try:
            rows = stream.of_episode(episode)
            if not len(rows):
                continue
            part = target.with_suffix(f".{os.getpid()}.part")
            video.encode(stream.frames(rows, episode), part, spec.fps)
            differs = video.difference(stream.frames(rows, episode), part)
            if differs > tolerance:
                part.unlink()
                raise ValueError(
                    f"{spec.name}: expected frames within {tolerance:g} levels of those recorded, got {differs:.1f}."
                )
            times = io.BytesIO()
            np.save(times, stream.read(rows, _TIMESTAMP, episode))
            files.write_atomically(target.with_suffix(".npy"), times.getvalue())  # before the video is there
            with part.open("rb") as written:
                os.fsync(written.fileno())
            part.rename(target)
        finally:
            stream.storage.close()


def _main(directory: str, tolerance: str) -> None:
    """The encoder: it makes videos of the episodes that it is told, until nobody tells it more."""
    os.nice(10)
    for line in sys.stdin:
        try:
            make_videos(Path(directory), int(line), float(tolerance))
        except (OSError, ValueError, RuntimeError) as error:
            answer = f"{int(line)} {error}".replace("\n", " ")
        else:
            answer = str(int(line))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
