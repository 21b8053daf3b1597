"""The recorder of robots: what was acknowledged is there after a kill, and videos show what was recorded."""

import ctypes
import gc
import mmap
import platform
import re
import signal
from types import SimpleNamespace

import av
import numpy as np
import pytest

from engram import CorruptStore, IncompatibleStore, RateLimited, StoreInUse, record_robot
from engram.env import robot
from tests import fresh
from tests.waiting import until

FEATURES = {
    "camera": {"dtype": "video", "shape": (32, 48, 3)},
    "state": {"dtype": "float32", "shape": (3,)},
    "action": {"dtype": "float64", "shape": (2,)},
    "force": {"dtype": "int16", "shape": (), "fps": 60},
}
LINUX = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


def frame(at, height=32, width=48):
    """A smooth picture that moves."""
    y, x = np.mgrid[:height, :width]
    return np.stack([(x * 2 + at) % 200, (y * 3 + at * 2) % 190, (x + y) % 180], -1).astype(np.uint8)


def state(episode, step):
    return {"state": np.array([episode, step, episode * step], np.float32), "action": np.array([step / 3, -episode])}


def play(recorder, episode, steps, camera=True):
    """Steps of an episode: a frame, a row of sensors, and two rows of a force that is measured twice as often."""
    for step in range(steps):
        seen = {**state(episode, step), **({"camera": frame(step + episode)} if camera else {})}
        recorder.add(seen, timestamp=step / 30)
        for half in range(2):
            recorder.add({"force": 2 * step + half + episode}, timestamp=(2 * step + half) / 60)


def check(episode, number, steps, *, complete=True, exact=True, camera=True):
    assert (episode.number, episode.complete) == (number, complete)
    for name in ("state", "action"):
        expected = np.stack([state(number, step)[name] for step in range(steps)])
        found = episode.read(name)
        assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes())
        assert episode.timestamps(name).tolist() == [step / 30 for step in range(steps)]
    assert episode.read("force").tolist() == [half + number for half in range(2 * steps)]
    assert episode.timestamps("force").tolist() == [half / 60 for half in range(2 * steps)]
    if camera:
        expected = np.stack([frame(step + number) for step in range(steps)])
        found = episode.read("camera")
        assert found.shape == expected.shape
        assert episode.timestamps("camera").tolist() == [step / 30 for step in range(steps)]
        difference = np.abs(found.astype(int) - expected)
        assert difference.max() == 0 if exact else difference.mean((1, 2, 3)).max() < 6
        assert [one.tobytes() for one in episode.frames("camera")] == [one.tobytes() for one in found]


@pytest.fixture
def encoders(monkeypatch):
    """Encoders are processes of their own, but none imports torch again. A list of them; ``"before"`` is what each runs first."""
    begun = SimpleNamespace(before="", processes=[])

    def start(command):
        code = f"{begun.before}\nfrom engram.env import robot\nrobot._main(*arguments)"
        begun.processes.append(fresh.start(code, arguments=command[3:]))
        return begun.processes[-1]

    monkeypatch.setattr(robot, "subprocess", SimpleNamespace(Popen=start))
    return begun


def wait(recorder):
    until(lambda: recorder.wait(0), 60, "videos")


def record(recorder, frames, camera="camera"):
    """An episode of these frames."""
    for step, one in enumerate(frames):
        recorder.add({camera: one}, timestamp=step)
    return recorder.end_episode()


def noise(n, height=32, width=48):
    """Frames that no video shows as they are."""
    return np.random.default_rng(0).integers(0, 256, (n, height, width, 3), np.uint8)


CAMERA = {"camera": FEATURES["camera"]}

IN_EPISODE_173 = """
import os, signal
from engram import record_robot
from tests.env.test_robot import FEATURES, play

recorder = record_robot(directory, FEATURES, encode=False, hours=0.05)
for episode in range(172):
    play(recorder, episode, 3)
    assert recorder.end_episode() == episode
play(recorder, 172, 2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def resident(tensor):
    """Of the pages of a mapped tensor, how many are in memory."""
    first, end = tensor.data_ptr() // mmap.PAGESIZE, -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * (end - first))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first * mmap.PAGESIZE), (end - first) * mmap.PAGESIZE, pages) == 0
    return sum(page & 1 for page in pages)


@pytest.mark.skipif(LINUX < (5, 14), reason="the kernel does not know MADV_POPULATE_WRITE")
@pytest.mark.parametrize("written", [1, 13])
def test_pages_are_ready_before_frames_come(written, tmp_path):
    """Also those behind the seam of the ring, and nothing of what was recorded changes."""
    features = {"camera": {"dtype": "video", "shape": (128, 128, 3)}}  # a frame is 12 pages
    with record_robot(tmp_path, features, fps=1, room_s=20, encode=False) as recorder:
        stream = recorder.stream_of("camera")
        frames = next(one for one in stream.storage.store.tensors if one.ndim == 4)
        if resident(frames):
            pytest.skip("this file system has all pages in memory from the beginning")
        for step in range(written):
            recorder.add({"camera": frame(step, 128, 128)}, timestamp=step)
        ahead = frames[written : written + robot._READY], frames[: max(0, written + robot._READY - 20)]
        until(lambda: all(resident(part) == part.nbytes // mmap.PAGESIZE for part in ahead))
        recorder.end_episode()
        (episode,) = recorder.episodes()
        assert episode.read("camera").tobytes() == b"".join(frame(step, 128, 128).tobytes() for step in range(written))


def test_a_recorder_that_is_dropped_ends_its_thread(tmp_path):
    """It is not closed, as in a notebook: the directory can be recorded into again."""
    recorder = record_robot(tmp_path, FEATURES, room_s=1, hours=0.01, encode=False)
    play(recorder, 0, 3)
    thread = recorder._ahead.thread
    del recorder
    until(lambda: gc.collect() is not None and not thread.is_alive())
    with record_robot(tmp_path, encode=False) as again:
        (episode,) = again.episodes()
        check(episode, 0, 3, complete=False)


def test_killed_in_episode_173(tmp_path):
    program = fresh.start(IN_EPISODE_173, directory=str(tmp_path / "robot"))
    assert program.wait() == -signal.SIGKILL
    with record_robot(tmp_path / "robot", encode=False) as recorder:
        assert recorder.episode == 173
        *whole, torn = recorder.episodes()
        assert len(whole) == 172
        for number, episode in enumerate(whole):
            check(episode, number, 3)
        check(torn, 172, 2, complete=False)
        play(recorder, 173, 4)
        recorder.end_episode()
    with record_robot(tmp_path / "robot", FEATURES, encode=False) as recorder:
        assert [episode.complete for episode in recorder.episodes()] == [True] * 172 + [False, True]
        check([*recorder.episodes()][-1], 173, 4)


BESIDE_ITS_ENCODER = """
import os, signal
from engram import record_robot
from tests.env.test_robot import FEATURES, play, wait

recorder = record_robot(directory, FEATURES, room_s=1, hours=0.05)
for episode in range(5):
    play(recorder, episode, 6)
    recorder.end_episode()
    if episode == 2:
        wait(recorder)
play(recorder, 5, 3)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_beside_its_encoder(encoders, tmp_path):
    """33 frames are recorded, and there is room for 30: those that have a verified video make place."""
    program = fresh.start(BESIDE_ITS_ENCODER, directory=str(tmp_path / "robot"))
    assert program.wait() == -signal.SIGKILL, program.err
    with record_robot(tmp_path / "robot") as recorder:
        wait(recorder)
        assert recorder.kept == {}
        assert recorder.stream_of("camera").held == 0
        play(recorder, 6, 20)  # more than were free before
        recorder.end_episode()
    with record_robot(tmp_path / "robot") as recorder:
        found = [*recorder.episodes()]
        assert [episode.video("camera") is not None for episode in found] == [True] * 7
        for number, episode in enumerate(found):
            steps = {5: 3, 6: 20}.get(number, 6)
            check(episode, number, steps, complete=number != 5, exact=False)
            with av.open(str(episode.video("camera"))) as file:
                assert sum(1 for _ in file.decode(video=0)) == steps
    assert not [*(tmp_path / "robot" / "videos").glob("*.part")]


def test_the_encoder_is_killed(encoders, tmp_path):
    with record_robot(tmp_path / "robot", FEATURES, room_s=2, hours=0.05) as recorder:
        for episode in range(3):
            play(recorder, episode, 8)
            recorder.end_episode()
            encoders.processes[-1].kill()
        wait(recorder)
        assert (recorder.waiting, recorder.kept) == (0, {})
        assert len(encoders.processes) == 4
        for number, episode in enumerate(recorder.episodes()):
            check(episode, number, 8, exact=False)


def test_an_encoder_that_cannot_begin(tmp_path, monkeypatch):
    """Frames stay as they are, and nobody waits for ever."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    recorder = record_robot(tmp_path / "robot", FEATURES, room_s=2, hours=0.05)
    play(recorder, 0, 3)
    recorder.end_episode()
    wait(recorder)
    check(next(recorder.episodes()), 0, 3)
    with pytest.warns(UserWarning, match="episode 0 keeps its frames: the encoder ends without a video"):
        recorder.close()


FAULT = """
import os
from engram.env import video

def encode(frames, path, fps, encode=video.encode):
    if "-000000." in path.name:
        {fault}
    encode(frames, path, fps)

video.encode = encode
"""


@pytest.mark.parametrize(
    ("fault", "why", "number"),
    [("raise IndexError('of a codec')", "camera: of a codec", 1), ("os._exit(1)", "3 encoders have died of it", 4)],
)
def test_an_episode_that_cannot_be_encoded(fault, why, number, encoders, tmp_path):
    """The others have their videos."""
    encoders.before = FAULT.format(fault=fault)
    recorder = record_robot(tmp_path / "robot", CAMERA, room_s=2)
    for first in range(4):
        record(recorder, [frame(first), frame(first + 1)])
    wait(recorder)
    assert [episode.video("camera") is not None for episode in recorder.episodes()] == [False, True, True, True]
    assert recorder.kept.keys() == {0}
    assert next(recorder.episodes()).read("camera").tobytes() == np.stack([frame(0), frame(1)]).tobytes()
    assert len(encoders.processes) <= number + 1, "one that had nothing to do may have ended with an episode"
    with pytest.warns(UserWarning, match=f"episode 0 keeps its frames: .*{why}"):
        recorder.close()
    encoders.before = ""
    with record_robot(tmp_path / "robot") as recorder:  # whatever it was, it is tried again
        wait(recorder)
        assert (recorder.kept, recorder.waiting) == ({}, 0)
        assert [episode.video("camera") is not None for episode in recorder.episodes()] == [True] * 4


def test_frames_that_are_kept_are_not_written_over(encoders, tmp_path):
    """Frames go in the order in which they came: those behind a kept one stay, too, until it may go."""
    recorder = record_robot(tmp_path / "robot", CAMERA, fps=10, room_s=3, tolerance=3)
    record(recorder, noise(10))
    for _ in range(2):
        record(recorder, [frame(0)] * 8)
    wait(recorder)
    assert [*recorder.kept] == [0]
    assert (recorder.waiting, recorder.stream_of("camera").held) == (1, 26)
    for step in range(4):
        recorder.add({"camera": frame(step)}, timestamp=step)
    with pytest.raises(RateLimited, match="all 30 are taken: 1 episode have no videos"):
        recorder.add({"camera": frame(4)}, timestamp=4)
    assert next(recorder.episodes()).read("camera").tobytes() == noise(10).tobytes()
    with pytest.warns(UserWarning, match=r"episode 0 keeps its frames: .*camera: expected frames within 3 levels"):
        recorder.close()
    with record_robot(tmp_path / "robot", encode=False) as recorder:
        assert recorder.stream_of("camera").held == 30
        with pytest.raises(RateLimited):
            recorder.add({"camera": frame(4)}, timestamp=4)
        assert next(recorder.episodes()).read("camera").tobytes() == noise(10).tobytes()
    with record_robot(tmp_path / "robot", tolerance=200) as recorder:
        wait(recorder)
        assert recorder.stream_of("camera").held == 0
        assert [len(episode.read("camera")) for episode in recorder.episodes()] == [10, 8, 8, 4]
        for _ in range(2):
            record(recorder, [frame(0)] * 14)  # round the end
            wait(recorder)


def test_an_episode_that_lost_rows_is_not_read(encoders, tmp_path):
    with record_robot(
        tmp_path / "robot", {**CAMERA, "state": FEATURES["state"]}, fps=10, room_s=1, hours=0.01, encode=False
    ) as recorder:
        for step in range(6):
            recorder.add({"camera": frame(step), "state": [0, 0, step]}, timestamp=step)
        recorder.end_episode()
        for step in range(5):
            recorder.stream_of("camera").write(1, step, {"camera": frame(step)})  # over the first one
        (episode,) = recorder.episodes()
        for read in (episode.read, episode.timestamps, episode.frames):
            with pytest.raises(RuntimeError, match=r"camera.*expected the 6 rows of episode 0, got 5"):
                read("camera")
        assert len(episode.read("state")) == 6
    recorder = record_robot(tmp_path / "robot")
    wait(recorder)
    assert next(recorder.episodes()).video("camera") is None
    with pytest.warns(UserWarning, match="episode 0 keeps its frames: .*expected the 6 rows of episode 0, got 5"):
        recorder.close()


def test_cameras_of_several_rates(encoders, tmp_path):
    """One that gives no frame in an episode, one that is slower, and one of an odd size. One of their videos is cut."""
    features = {
        "wrist": {"dtype": "video", "shape": (32, 48, 3), "fps": 15},
        "front": {"dtype": "video", "shape": (33, 47, 3)},
        "state": {"dtype": "float32", "shape": (1,)},
    }
    with record_robot(tmp_path / "robot", features, hours=0.01) as recorder:
        assert sorted(stream.spec.fps for stream in recorder.streams) == [15, 30, 30]
        for step in range(6):
            recorder.add({"front": frame(step, 33, 47), "state": [step]}, timestamp=step / 30)
            if step % 2 == 0:
                recorder.add({"wrist": frame(100 + step)}, timestamp=step / 30 + 0.001)
        recorder.end_episode()
        recorder.add({"front": frame(9, 33, 47)}, timestamp=0)
        recorder.end_episode()
        wait(recorder)
        first, second = recorder.episodes()
        assert (len(first.read("front")), len(first.read("wrist")), len(first.read("state"))) == (6, 3, 6)
        assert first.timestamps("wrist").tolist() == [0.001, 2 / 30 + 0.001, 4 / 30 + 0.001]
        assert (len(second.read("front")), len(second.read("wrist")), second.video("wrist")) == (1, 0, None)
        expected = np.stack([frame(step, 33, 47) for step in range(6)])
        assert np.abs(first.read("front").astype(int) - expected).mean() < 3
        with av.open(str(first.video("wrist"))) as file:
            assert file.streams.video[0].average_rate == 15
        path = first.video("front")
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(OSError, match=r"front-000000.mp4.*expected a video"):
            first.read("front")


def test_names_of_cameras(encoders, tmp_path):
    """None is that of another file."""
    names = ["episodes", ".", "..", "robot.json", "videos", "sensors-30", "a.b", "a-000000"]
    features = {name: {"dtype": "video", "shape": (4, 4, 3)} for name in names}
    features["state"] = {"dtype": "float32", "shape": ()}
    with record_robot(tmp_path / "robot", features, room_s=0.1, hours=0.01) as recorder:
        for at, name in enumerate(names):
            recorder.add({name: np.full((4, 4, 3), 20 * at, np.uint8)}, timestamp=0)
        recorder.add({"state": 3}, timestamp=0)
        recorder.end_episode()
        wait(recorder)
        (episode,) = recorder.episodes()
        assert recorder.kept == {}
        for at, name in enumerate(names):
            assert episode.video(name).parent == tmp_path / "robot" / "videos"
            assert abs(float(episode.read(name).mean()) - 20 * at) < 3
        assert episode.read("state").tolist() == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["robot"]


# ---- what is refused -----------------------------------------------------------------------------------------------------


def test_no_place_for_frames(tmp_path):
    with record_robot(tmp_path / "robot", FEATURES, room_s=0.1, hours=0.01, encode=False) as recorder:
        play(recorder, 0, 3)
        before = recorder.stream_of("state").held
        with pytest.raises(RateLimited, match=r"add: \['camera'\]: expected place for a row, but all 3 are taken"):
            recorder.add({**state(0, 3), "camera": frame(3)}, timestamp=1)
        assert recorder.stream_of("state").held == before, "nothing is written"
        recorder.end_episode()
        check(next(recorder.episodes()), 0, 3)


@pytest.mark.parametrize(
    ("values", "timestamp", "error", "said"),
    [
        ({"lidar": 1}, 1, KeyError, r"expected a feature, one of .*'camera'.*, got 'lidar'"),
        (
            {"state": np.zeros(3)},
            1,
            KeyError,
            r"expected all features of a rate in one row, \['state', 'action'\], got \['state'\]",
        ),
        ({"camera": np.zeros((32, 48), np.uint8)}, 1, ValueError, r"add: 'camera': expected shape \[32, 48, 3\]"),
        ({"camera": np.zeros((32, 48, 3), np.float32)}, 1, TypeError, "expected uint8, as record_robot"),
        ({"force": 1}, 0.5, ValueError, r"add: \['force'\]: expected a timestamp after 0.5 s, got 0.5"),
        ({"force": 1}, float("nan"), ValueError, "expected a timestamp after"),
    ],
)
def test_rows_that_cannot_be(values, timestamp, error, said, tmp_path):
    with record_robot(tmp_path / "robot", FEATURES, room_s=0.5, hours=0.01, encode=False) as recorder:
        recorder.add({"force": 0}, timestamp=0.5)
        with pytest.raises(error, match=said):
            recorder.add(values, timestamp)
        assert [stream.held for stream in recorder.streams if stream.held] == [1]


RECORDING = """
    from engram import record_robot
    recorder = record_robot(directory, {"state": {"dtype": "float32", "shape": ()}}, hours=0.01)
    recorder.add({"state": 1.0}, timestamp=0)
    print("recorded")
    import time
    while True:
        time.sleep(1)
"""


def test_two_recorders_of_one_directory(tmp_path):
    program = fresh.start(RECORDING, directory=str(tmp_path / "robot"))
    program.until("recorded")
    with pytest.raises(StoreInUse, match="record_robot: .*robot' is in use"):
        record_robot(tmp_path / "robot")
    program.kill()
    with record_robot(tmp_path / "robot") as recorder:  # nothing was changed: the kill has cut the episode, nobody else
        assert [(one.number, one.complete, one.read("state").tolist()) for one in recorder.episodes()] == [
            (0, False, [1.0])
        ]
        with pytest.raises(StoreInUse, match="by another process or here"):
            record_robot(tmp_path / "robot")


def test_an_episode_without_rows(tmp_path):
    with record_robot(tmp_path / "robot", FEATURES, room_s=0.5, hours=0.01, encode=False) as recorder:
        with pytest.raises(RuntimeError, match="end_episode: expected rows of an episode"):
            recorder.end_episode()
        assert [*recorder.episodes()] == []


@pytest.mark.parametrize(
    ("features", "error", "said"),
    [
        ({}, TypeError, "features: expected a dict of features by name"),
        ({"a": 3}, TypeError, "features: 'a': expected a dict with 'dtype' and 'shape'"),
        ({"a": {"dtype": "video", "shape": (32, 48)}}, ValueError, r"expected the shape \(height, width, 3\)"),
        ({"a": {"dtype": "words", "shape": ()}}, TypeError, "expected 'video' or a dtype of numbers, got 'words'"),
        ({"timestamp": {"dtype": "float32", "shape": ()}}, ValueError, "expected a name without"),
        ({"a/b": {"dtype": "float32", "shape": ()}}, ValueError, "expected a name without"),
        ({"a\0b": {"dtype": "float32", "shape": ()}}, ValueError, "expected a name without"),
        ({"ä" * 101: {"dtype": "float32", "shape": ()}}, ValueError, "expected a name without"),
        ({3: {"dtype": "float32", "shape": ()}}, ValueError, "expected a name without"),
        ({"a": {"dtype": "video", "shape": (0, 4, 3)}}, ValueError, r"expected the shape \(height, width, 3\)"),
        ({"a": {"dtype": "float32", "shape": (), "fps": 0}}, ValueError, "fps"),
    ],
)
def test_features_that_cannot_be(features, error, said, tmp_path):
    with pytest.raises(error, match=f"record_robot: .*{said}"):
        record_robot(tmp_path / "robot", features, encode=False)
    assert not (tmp_path / "robot").exists()


def test_directories_that_do_not_fit(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected features=… or a directory that was recorded into"):
        record_robot(tmp_path / "robot")
    record_robot(tmp_path / "robot", FEATURES, room_s=0.5, hours=0.01, encode=False).close()
    with pytest.raises(IncompatibleStore, match="has other features"):
        record_robot(tmp_path / "robot", {"state": FEATURES["state"]}, encode=False)
    with pytest.raises(IncompatibleStore, match="has other features"):
        record_robot(tmp_path / "robot", {**FEATURES, "state": {"dtype": "float32", "shape": (4,)}}, encode=False)
    with record_robot(tmp_path / "robot", dict(reversed(FEATURES.items())), encode=False) as recorder:  # another order
        play(recorder, 0, 2)
        recorder.end_episode()
        check(next(recorder.episodes()), 0, 2)
    (tmp_path / "robot" / "robot.json").write_text("[[1")
    with pytest.raises(CorruptStore, match=r"robot.json.*expected what record_robot wrote"):
        record_robot(tmp_path / "robot", encode=False)


def test_without_pyav(tmp_path):
    program = """
    import sys
    sys.modules["av"] = None
    from engram import record_robot

    features = {"camera": {"dtype": "video", "shape": (32, 48, 3)}}
    try:
        record_robot(directory, features)
    except ModuleNotFoundError as error:
        print(error)
    record_robot(directory, features, encode=False, room_s=1).close()
    """
    said = fresh.run(program, directory=str(tmp_path / "robot"))
    assert 'needs av: pip install "engram-replay[robot]"' in said
    assert "encode=False" in said
