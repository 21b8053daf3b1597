"""Data sets of LeRobot's, in and out: compared with what PyArrow and PyAV read of the files."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from engram import ReplayBuffer, record_robot
from engram.cli import main
from engram.datasets import from_lerobot, from_numpy, importing, libraries, tables, to_lerobot
from engram.errors import DatasetError, IncompatibleStore
from tests import fresh
from tests.datasets import lerobot_data as data
from tests.datasets.episodes import files, flat, same

NUMBERS, LENGTHS, FILES = [0, 1, 2, 5], [7, 12, 1, 6], [0, 0, 1, 1]  # 3 and 4 are gone: a number is no place


def levels(rows):
    return rows["observation", "images", "front"].reshape(len(rows["action",]), -1).mean(1)


def expected_levels(numbers=NUMBERS, lengths=LENGTHS):
    return [data.level(number, step) for number, length in zip(numbers, lengths, strict=True) for step in range(length)]


@pytest.fixture
def small_blocks(monkeypatch):
    for module in (importing, tables):
        monkeypatch.setattr(module, "BLOCK_BYTES", 3 * 48 * 64 * 3)  # of three frames


def check(rb, columns, numbers=NUMBERS, lengths=LENGTHS):
    found = flat(rb[:])
    for name in ("observation.state", "action", "grid", "success", "timestamp", "frame_index", "task_index"):
        assert same(found[tuple(name.split("."))], columns[name]), name
    assert found["collector", "traj_ids"].tolist() == np.repeat(numbers, lengths).tolist()
    assert ("index",) not in found
    np.testing.assert_allclose(levels(found), expected_levels(numbers, lengths), atol=1)


@pytest.mark.usefixtures("small_blocks")
def test_tables_bit_for_bit_and_frames_by_time(tmp_path):
    columns, said = data.write(tmp_path / "in", NUMBERS, LENGTHS, FILES), []
    rb = from_lerobot(tmp_path / "in", tmp_path / "data", show=said.append)
    check(rb, columns)
    assert "('observation', 'images', 'front'): ('observation', 'images', 'front'), uint8[48, 64, 3]" in said
    assert "4 episodes of 26 rows" in said[-1]
    about = json.loads((tmp_path / "data/import.json").read_text())["about"]
    assert (about["tasks"], about["fps"]) == (["push", "lift"], 10)
    rb.close()
    check(from_lerobot(tmp_path / "in", tmp_path / "data"), columns)  # only opens


def test_a_camera_that_is_left_out_is_not_read(tmp_path):
    data.write(tmp_path / "in", NUMBERS, LENGTHS)
    path = data.chunk(tmp_path / "in", f"videos/{data.KEY}", 0, "mp4")
    path.write_bytes(b"no video")
    rb = from_lerobot(
        tmp_path / "in", tmp_path / "data", rename={tuple(data.KEY.split(".")): None, "grid": ("a", "grid")}
    )
    assert {path[-1] for path in flat(rb[:])} == {
        *("state", "action", "grid", "success", "timestamp", "frame_index", "task_index", "traj_ids")
    }


#: Dies when it writes rows for the ``at``-th time.
DIE = """
import os, signal
from engram.datasets import from_lerobot, importing
importing.BLOCK_BYTES, put, done = 30_000, importing._Import._put, 0
def dying(self, buffer, first, columns):
    global done
    done += 1
    if done == at:
        columns = {path: column[: len(column) // 2 + 1] for path, column in columns.items()}
    put(self, buffer, first, columns)
    if done == at:
        os.kill(os.getpid(), signal.SIGKILL)
importing._Import._put = dying
from_lerobot(source, directory)
"""


def test_a_killed_import_goes_on(tmp_path):
    columns = data.write(tmp_path / "in", NUMBERS, LENGTHS, FILES)
    from_lerobot(tmp_path / "in", tmp_path / "whole").close()
    for at in (1, 2, 2, 0):
        program = fresh.start(DIE, source=str(tmp_path / "in"), directory=str(tmp_path / "data"), at=at)
        assert program.wait() == (-9 if at else 0), program.err
    assert files(tmp_path / "data") == files(tmp_path / "whole")
    with ReplayBuffer.open(tmp_path / "data", readonly=True) as rb:
        check(rb, columns)


def damage(folder, how):
    video, table = (
        data.chunk(folder, kind, 0, suffix) for kind, suffix in ((f"videos/{data.KEY}", "mp4"), ("data", "parquet"))
    )
    meta = data.chunk(folder, "meta/episodes", 0, "parquet")
    if how == "truncated video":
        video.write_bytes(video.read_bytes()[:-400])
    elif how == "no video":
        video.unlink()
    elif how == "fewer frames":
        data.video(video, (data.frame(0, step) for step in range(24)))
    elif how == "truncated table":
        table.write_bytes(table.read_bytes()[:-30])
    elif how == "truncated meta":
        meta.write_bytes(meta.read_bytes()[:-30])
    elif how == "an episode less in meta":
        pq.write_table(pq.read_table(meta).slice(1), meta)
    elif how == "an episode less in the table":
        pq.write_table(pq.read_table(table).slice(7), table)
    elif how == "an episode twice":
        found = pq.read_table(meta)
        pq.write_table(pa.concat_tables([found.slice(0, 1), found.slice(0, 3)]), meta)
    elif how == "frames of the next episode":
        found = pq.read_table(meta).to_pylist()
        found[0][f"videos/{data.KEY}/to_timestamp"] -= 0.2
        pq.write_table(pa.Table.from_pylist(found), meta)
    elif how == "no json":
        (folder / "meta/info.json").write_text("{}")


STEPS = np.concatenate([np.arange(n) for n in LENGTHS])


@pytest.mark.parametrize(
    ("how", "changes", "error", "said"),
    [
        (
            "",
            {"codebase_version": "v2.1"},
            DatasetError,
            "meta/: expected whole files of format v3.0: codebase_version is 'v2.1'",
        ),
        ("no json", {}, DatasetError, "meta/: expected whole files of format v3.0.*codebase_version"),
        ("", {"features": None}, DatasetError, "meta/: expected whole files of format v3.0"),
        ("", {"total_episodes": 5}, DatasetError, r"meta/episodes: .*expected \[5, 5, 26, 26\], got \[4, 4, 26, 26\]"),
        ("an episode less in meta", {}, DatasetError, r"expected \[4, 4, 26, 26\], got \[3, 3, 19, 26\]"),
        ("an episode less in the table", {}, DatasetError, r"expected \[4, 4, 26, 26\], got \[4, 4, 26, 19\]"),
        ("an episode twice", {}, DatasetError, r"expected \[4, 4, 26, 26\], got \[3, 4,"),
        ("truncated table", {}, DatasetError, "file-000.parquet: expected a whole Parquet file"),
        ("truncated meta", {}, DatasetError, "meta/: expected whole files of format v3.0"),
        ("no video", {}, FileNotFoundError, "file-000.mp4"),
        (
            "",
            {"episode_index": np.repeat([0, 1, 3, 5], LENGTHS)},
            DatasetError,
            r"the next episode, and its rows: expected \(2, 1\), got \(3, 1\)",
        ),
        ("", {"frame_index": np.maximum(STEPS, 1)}, DatasetError, "episode 0: expected frame_index from 0 on"),
        ("", {"timestamp": (-STEPS / 10).astype(np.float32)}, DatasetError, "episode 0: .*timestamps that grow"),
        ("truncated video", {}, DatasetError, "file-000.mp4: expected "),
        ("fewer frames", {}, DatasetError, "file-000.mp4: expected a frame at 2.400 s: it has fewer"),
        ("frames of the next episode", {}, DatasetError, "file-000.mp4: expected a frame at 0.500 s: it has fewer"),
    ],
)
def test_what_is_damaged_is_refused(tmp_path, how, changes, error, said):
    data.write(tmp_path / "in", NUMBERS, LENGTHS, **changes)
    damage(tmp_path / "in", how)
    with pytest.raises(error, match=said):
        from_lerobot(tmp_path / "in", tmp_path / "data")
    # Whole episodes of an import that had begun stay, and nothing opens as a finished one. Otherwise nothing is there.
    note = tmp_path / "data/import.json"
    assert json.loads(note.read_text())["complete"] is False if note.exists() else not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fps": float("nan")}, "fps: expected a finite number"),
        ({"fps": 0}, "fps: expected a finite number of at least 0.001, got 0"),
        ({"fps": -10}, "fps: expected a finite number of at least 0.001, got -10"),
        ({"fps": "10"}, "fps: expected a finite number.*got str"),
        ({"shape": [48, 64]}, r"three positive ints each, got .*\(48, 64\)"),
        ({"shape": [48, -64, 3]}, "three positive ints"),
        ({"shape": [48, 64.0, 3]}, "three positive ints"),
        ({"shape": "abc"}, "three positive ints"),
        ({"shape": None}, "meta/: expected whole files"),
        ({"shape": [64, 48, 3]}, r"file-000.mp4: the shape of its frames: expected \(64, 48, 3\), got \(48, 64, 3\)"),
        ({"deep": True}, "meta/: expected whole files of format v3.0: .*recursion"),
    ],
)
def test_bad_info_is_refused_in_a_sentence(tmp_path, changes, said):
    data.write(tmp_path / "in", NUMBERS, LENGTHS)
    path = tmp_path / "in/meta/info.json"
    info = json.loads(path.read_text())
    if "shape" in changes:
        info["features"][data.KEY]["shape"] = changes["shape"]
    path.write_text("[" * 200_000 if "deep" in changes else json.dumps(info | changes))
    with pytest.raises(DatasetError, match=said):
        from_lerobot(tmp_path / "in", tmp_path / "data")


@pytest.mark.parametrize("name", ["../../outside", "a/b", "..", "a\0b"])
def test_a_feature_whose_name_leaves_the_folder_is_not_read(tmp_path, name):
    data.write(tmp_path / "sets/in", NUMBERS, LENGTHS)
    path, meta = tmp_path / "sets/in/meta/info.json", data.chunk(tmp_path / "sets/in", "meta/episodes", 0, "parquet")
    path.write_text(
        json.dumps(json.loads(path.read_text().replace(data.KEY, "KEY"))).replace("KEY", json.dumps(name)[1:-1])
    )
    found = pq.read_table(meta)
    pq.write_table(found.rename_columns([one.replace(data.KEY, name) for one in found.column_names]), meta)
    (tmp_path / "sets/in/videos" / data.KEY).rename(tmp_path / "sets/outside")
    with pytest.raises(DatasetError) as caught:
        from_lerobot(tmp_path / "sets/in", tmp_path / "data")
    assert f"cameras: expected names without '/' and three positive ints each, got [({name!r}, " in str(caught.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", ["frames", "numbers"])
@pytest.mark.parametrize("name", ["../../outside", "a/b", ".."])
def test_a_field_whose_name_leaves_the_folder_is_not_written(tmp_path, name, kind):
    column = np.zeros((4, 16, 16, 3), np.uint8) if kind == "frames" else np.zeros(4)
    from_numpy({"action": np.zeros(4), name: column, "episode": np.zeros(4, int)}, tmp_path / "data").close()
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(DatasetError) as caught:
        to_lerobot(tmp_path / "data", tmp_path / "a/b/out", fps=10)
    assert repr(name) in str(caught.value)
    assert "expected names without '/'" in str(caught.value)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [
        ("index", np.array([3, 1, 4, 1]), "index: expected rows 1 apart"),
        ("index", np.array([True, True, False, True]), "index: expected rows 1 apart"),
        ("frame_index", np.array([0, 2, 4, 6], np.uint8), "frame_index: expected rows 1 apart"),
        ("timestamp", np.array([0, 0.1, np.nan, 0.3]), "timestamp: expected rows 0.1 apart"),
        ("timestamp", np.zeros((4, 2)), "timestamp: expected rows 0.1 apart"),
        ("task_index", np.zeros((4, 1), int), r"task_index: expected 4 ints < 1, got int64 \[\[0\]"),
        ("task_index", np.zeros(4), r"task_index: expected 4 ints < 1, got float64"),
        ("task_index", np.array([0, 1, 2, 3]), r"expected 4 ints < 1, got int64 \[0 1 2 3\]"),
        ("task_index", np.array([0, -1, 0, 0]), r"expected 4 ints < 1, got int64 \[ 0 -1"),
    ],
)
def test_fields_that_mean_something_else_are_refused(tmp_path, name, column, said):
    rows = {"action": np.zeros(4), name: column, "episode": np.zeros(4, int)}
    from_numpy(rows, tmp_path / "data").close()
    with pytest.raises(DatasetError, match=said):
        to_lerobot(tmp_path / "data", tmp_path / "out", fps=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_fields_that_count_rows_are_numbered_again(tmp_path):
    rows = {"timestamp": np.arange(4) / 10 + 5, "index": np.arange(7, 11), "frame_index": np.arange(4, dtype=np.uint8)}
    from_numpy({"action": np.zeros(4), **rows, "episode": np.zeros(4, int)}, tmp_path / "data").close()
    to_lerobot(tmp_path / "data", tmp_path / "out", fps=10)
    _, _, found = data.read(tmp_path / "out")
    assert found["index"].tolist() == found["frame_index"].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(found["timestamp"], np.arange(4) / 10, atol=1e-6)


def test_a_data_set_that_has_changed(tmp_path):
    data.write(tmp_path / "in", NUMBERS, LENGTHS)
    from_lerobot(tmp_path / "in", tmp_path / "data").close()
    data.video(data.chunk(tmp_path / "in", f"videos/{data.KEY}", 0, "mp4"), (data.frame(9, step) for step in range(26)))
    with pytest.raises(IncompatibleStore, match="another data set, or of one that has changed"):
        from_lerobot(tmp_path / "in", tmp_path / "data")


def test_memory_does_not_grow_with_an_episode(tmp_path):
    """Three times the frames of 480 x 640 take no more of it."""
    code = """
import json, re
from pathlib import Path
import numpy as np
from engram.datasets import from_lerobot
from tests.datasets import lerobot_data as data

data.SHAPE = (480, 640, 3)
data.write(Path(source), [0], [length])
def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
from_lerobot(source, directory).close()
print(status("VmHWM") - before)
"""
    grown = []
    for length in (80, 240):
        where = {"source": str(tmp_path / f"in-{length}"), "directory": str(tmp_path / f"{length}")}
        grown.append(int(fresh.run(code, length=length, **where)))
    assert grown[1] < grown[0] + 40e6  # of 147 MB


# ---- out ----------------------------------------------------------------------------------------------------------------


def check_stats(found, rows):
    """``rows``: float64 ``[N, *]`` of all that the statistics are of."""
    for key, value in {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}.items():
        np.testing.assert_allclose(np.array(found[key]).reshape(-1), value, rtol=1e-6, atol=1e-9)
    middle = np.array(found["q50"]).reshape(-1)
    assert ((np.array(found["q01"]).reshape(-1) <= middle) & (middle <= np.array(found["q99"]).reshape(-1))).all()


def test_there_and_back(tmp_path):
    columns = data.write(tmp_path / "in", NUMBERS, LENGTHS, FILES)
    from_lerobot(tmp_path / "in", tmp_path / "data").close()
    to_lerobot(tmp_path / "data", tmp_path / "out")
    info, episodes, found = data.read(tmp_path / "out")
    positions = np.repeat(np.arange(4), LENGTHS)
    for name, column in (columns | {"episode_index": positions, "index": np.arange(26)}).items():
        assert same(found[name].astype(column.dtype), column), name
        assert info["features"][name]["dtype"] == str(column.dtype)
    assert info["features"][data.KEY]["names"] == ["height", "width", "channels"]
    assert (info["codebase_version"], info["fps"], info["total_frames"], info["total_tasks"]) == ("v3.0", 10, 26, 2)
    assert [row["tasks"] for row in episodes] == [["push"], ["lift"], ["push"], ["lift"]]
    ends = np.cumsum(LENGTHS)
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in episodes] == [
        *zip(ends - LENGTHS, ends, strict=True)
    ]
    seen = data.decoded(data.chunk(tmp_path / "out", f"videos/{data.KEY}", 0, "mp4"))
    begins = [row[f"videos/{data.KEY}/from_timestamp"] for row in episodes]
    shown = [seen[round(begin * 10) + step] for begin, n in zip(begins, LENGTHS, strict=True) for step in range(n)]
    np.testing.assert_allclose(shown, expected_levels(), atol=2)
    stats = json.loads((tmp_path / "out/meta/stats.json").read_text())
    check_stats(stats["observation.state"], columns["observation.state"].astype(np.float64))
    check_stats(stats["success"], columns["success"].astype(np.float64)[:, None])
    assert np.array(stats[data.KEY]["mean"]).shape == (3, 1, 1)
    np.testing.assert_allclose(np.mean(stats[data.KEY]["mean"]), np.mean(expected_levels()) / 255, atol=0.01)
    table = pq.read_table(tmp_path / "out/meta/tasks.parquet")
    assert table.to_pydict() == {"task_index": [0, 1], "task": ["push", "lift"]}
    with from_lerobot(tmp_path / "out", tmp_path / "again") as rb:
        assert same(flat(rb[:])["grid",], columns["grid"])


def test_files_are_of_lerobots_size(tmp_path, monkeypatch):
    generator, n = np.random.default_rng(0), 12 * 40
    frames = (
        generator.integers(0, 40, (n, *data.SHAPE), np.uint8)
        + np.uint8(2) * np.repeat(np.arange(12, dtype=np.uint8) * 8, 40)[:, None, None, None]
    )
    rows = {"camera": frames, "state": generator.random((n, 8)), "episode": np.repeat(np.arange(12), 40)}
    from_numpy(rows, tmp_path / "data").close()
    limits = {"DATA_MB": 0.016, "VIDEO_MB": 0.25}
    for name, value in (limits | {"CHUNK_FILES": 2}).items():
        monkeypatch.setattr(libraries, name, value)
    to_lerobot(tmp_path / "data", tmp_path / "out", fps=10)
    _, episodes, _ = data.read(tmp_path / "out")
    for kind, suffix, limit in (("data", "parquet", limits["DATA_MB"]), ("videos/camera", "mp4", limits["VIDEO_MB"])):
        places = [(row[f"{kind}/chunk_index"], row[f"{kind}/file_index"]) for row in episodes]
        assert places == sorted(places)
        assert 2 < len(set(places)) < 12
        assert {place[1] for place in places} == {0, 1}
        for place in set(places):
            path = tmp_path / "out" / kind / "chunk-{:03d}/file-{:03d}.{}".format(*place, suffix)
            assert (
                path.stat().st_size < 1.25 * limit * 2**20
            )  # small files: of the newest part some is not yet on the disk
            first = places.index(place)
            if kind == "data":
                assert pq.read_table(path)["episode_index"][0].as_py() == first
            else:
                assert episodes[first]["videos/camera/from_timestamp"] == 0
                assert len(data.decoded(path)) == 40 * places.count(place)
    with from_lerobot(tmp_path / "out", tmp_path / "again") as rb:
        again = flat(rb[:])["camera",].reshape(n, -1)
    np.testing.assert_allclose(again.mean(1), frames.reshape(n, -1).mean(1), atol=2)


FEATURES = {
    data.KEY: {"dtype": "video", "shape": data.SHAPE},
    "observation.images.wrist": {"dtype": "video", "shape": data.SHAPE, "fps": 5},
    "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    "observation.force": {"dtype": "float64", "shape": (), "fps": 40},
}


def record(folder, encode, lengths=(9, 5)):
    """Two cameras and two rates; the front one is late by 20 ms, and its level is that of the step."""
    with record_robot(folder, FEATURES, fps=10, room_s=10, hours=0.01, encode=encode) as recorder:
        for episode, n in enumerate(lengths):
            for step in range(n):
                at = 100 * episode + step / 10
                recorder.add({"observation.state": [episode, step]}, timestamp=at)
                recorder.add({data.KEY: data.frame(episode, step)}, timestamp=at + 0.02)
                if step % 2 == 0:
                    recorder.add({"observation.images.wrist": data.frame(episode + 3, step)}, timestamp=at)
                for part in range(4):
                    recorder.add({"observation.force": at + part / 40}, timestamp=at + part / 40)
            recorder.end_episode()
        recorder.add({"observation.state": [7, 7]}, timestamp=0)  # of an episode that is never ended


def test_an_episode_of_one_frame_comes_first(tmp_path):
    """Of so short a video nothing is written before it is closed."""
    frames = np.full((5, 48, 64, 3), 90, np.uint8)
    from_numpy({"camera": frames, "episode": [0, 1, 1, 2, 2]}, tmp_path / "data").close()
    to_lerobot(tmp_path / "data", tmp_path / "out", fps=10)
    again = flat(from_lerobot(tmp_path / "out", tmp_path / "again")[:])
    assert again["collector", "traj_ids"].tolist() == [0, 1, 1, 2, 2]
    np.testing.assert_allclose(again["camera",], frames, atol=2)


@pytest.mark.parametrize("encode", [False, True])
def test_a_robots_recording(tmp_path, encode):
    record(tmp_path / "robot", encode)
    to_lerobot(tmp_path / "robot", tmp_path / "out", task="wave")
    info, episodes, found = data.read(tmp_path / "out")
    steps = [(episode, step) for episode, n in enumerate((9, 5)) for step in range(n)]
    assert found["observation.state"].tolist() == [[*one] for one in steps]
    np.testing.assert_allclose(found["observation.force"], [100 * episode + step / 10 for episode, step in steps])
    assert found["episode_index"].tolist() == [episode for episode, _ in steps]
    assert [row["tasks"] for row in episodes] == [["wave"]] * 2
    assert info["features"]["observation.state"]["names"] == ["x", "y"]
    front = data.decoded(data.chunk(tmp_path / "out", f"videos/{data.KEY}", 0, "mp4"))
    np.testing.assert_allclose([front[n] for n in range(14)], [data.level(*one) for one in steps], atol=3)
    wrist = data.decoded(data.chunk(tmp_path / "out", "videos/observation.images.wrist", 0, "mp4"))
    for n, (episode, step) in enumerate(steps):  # in the middle of two frames either may stand
        near = [data.level(episode + 3, one) for one in {step - step % 2, min(step + step % 2, (9, 5)[episode] - 1)}]
        assert min(abs(wrist[n] - one) for one in near) < 3


def test_recordings_that_do_not_fit(tmp_path):
    record(tmp_path / "robot", encode=False)
    with pytest.raises(
        DatasetError,
        match=r"episode 0: expected \['observation.images.wrist'\] within 0.05 s of a row, got one 0.100 s away",
    ):
        to_lerobot(tmp_path / "robot", tmp_path / "out", tolerance=0.05)
    with pytest.raises(DatasetError, match="expected an episode that was ended, at a rate of fps=7"):
        to_lerobot(tmp_path / "robot", tmp_path / "out", fps=7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["robot"]


def test_stores_that_do_not_fit(tmp_path):
    rows = {"action": np.zeros(4), "timestamp": np.arange(4) / 10, "episode": np.zeros(4, int)}
    from_numpy(rows, tmp_path / "data").close()
    with pytest.raises(TypeError, match="to_lerobot: fps: expected a finite number .*, got NoneType"):
        to_lerobot(tmp_path / "data", tmp_path / "out")
    with pytest.raises(DatasetError, match="timestamp: expected rows 0.05 apart, one is 0.150 off"):
        to_lerobot(tmp_path / "data", tmp_path / "out", fps=20)
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="expected a path where nothing is"):
        to_lerobot(tmp_path / "data", tmp_path / "out", fps=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]


def test_a_killed_export_leaves_no_data_set(tmp_path):
    data.write(tmp_path / "in", NUMBERS, LENGTHS)
    from_lerobot(tmp_path / "in", tmp_path / "data").close()
    code = """
import os, signal
from engram.datasets import libraries, to_lerobot
encoded, done = libraries._encoded, 0
def dying(*args):
    global done
    done += 1
    if done == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return encoded(*args)
libraries._encoded = dying
to_lerobot(source, out)
"""
    program = fresh.start(code, source=str(tmp_path / "data"), out=str(tmp_path / "out"))
    assert program.wait() == -9, program.err
    assert not (tmp_path / "out").exists()
    to_lerobot(tmp_path / "data", tmp_path / "out")
    assert len(data.read(tmp_path / "out")[1]) == 4


def test_the_commands(tmp_path):
    data.write(tmp_path / "in", NUMBERS, LENGTHS)
    for arguments in (
        ["import", tmp_path / "in", tmp_path / "data"],
        ["export", tmp_path / "data", tmp_path / "out", "--to", "lerobot"],
    ):
        result = CliRunner().invoke(main, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
    assert data.read(tmp_path / "out")[0]["fps"] == 10
    record(tmp_path / "robot", encode=False)
    arguments = ["export", tmp_path / "robot", tmp_path / "recorded", "--to", "lerobot", "--fps", "7"]
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == 1
    assert "expected an episode that was ended, at a rate of fps=7" in result.output
