"""Data sets that are damaged, or do not fit: a sentence, and what was whole stays or nothing does."""

import os
import shutil
import sys

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engram.datasets import (
    from_hdf5,
    from_minari,
    from_numpy,
    from_parquet,
    from_sb3,
    from_torchrl,
    libraries,
    tables,
    to_torchrl,
)
from engram.errors import CorruptCheckpoint, CorruptStore, DatasetError, IncompatibleStore
from tests.datasets.episodes import minari_dataset, steps

LENGTHS = [5, 1, 8]


def columns(**more):
    return {"obs": np.arange(4.0), "rewards": np.ones(4), "done": np.arange(4) == 3} | more


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "expected at least one row, got none"),
        ({"obs": np.zeros(0), "done": np.zeros(0)}, "expected at least one row, got none"),
        (columns(rewards=np.ones(3)), r"expected as many rows in all fields, 4, got {\('next', 'reward'\): 3}"),
        (columns(task=np.array(["a"] * 4)), "field 'task': expected numbers, got <U1. Leave it out"),
        (columns(task=np.array([None] * 4)), "field 'task': expected numbers, got object"),
        (columns(when=np.zeros(4, "datetime64[s]")), "field 'when': expected numbers"),
        (columns(wide=np.zeros(4, np.longdouble)), "field 'wide': expected numbers"),
        ({"obs": np.arange(4.0)}, "expected the number of the episode, .*or an end flag.*rename= or end_keys="),
        (
            columns(episode=np.array([1, 1, 0, 0])),
            "expected sorted rows, but those of episode 0 follow those of a later one",
        ),
        (
            columns(episode=np.array([0.1, 0.2, 0.7, 0.9])),
            r"'traj_ids'\): expected one whole number .*such as \[0.1, 0.2, 0.7\]",
        ),
        (columns(episode=np.array([0, 1, np.nan, 2])), "expected one whole number of int64 in each row, got float64"),
        (columns(episode=np.array([0, 1, 2, np.inf])), "expected one whole number of int64 in each row, got float64"),
        (columns(episode=np.array([0, 1, 2, 2.0**63])), "expected one whole number of int64 in each row, got float64"),
        (columns(episode=np.array([0, 1, 2, 2**63], np.uint64)), "expected one whole number of int64 .*, got uint64"),
        (columns(episode=np.zeros((4, 2), int)), r"expected one whole number of int64 in each row, got int64\[2\]"),
        (columns(episode=np.array(["a"] * 4)), "expected one whole number of int64 in each row, got <U1"),
        (columns(done=np.array([0, np.nan, 0, 1])), r"end flag .*'done'\): expected numbers, got NaN. Write 0 or 1"),
        (columns(observations=np.ones(4)), "several become {'observation',}|several become {\\('observation',\\)}"),
    ],
)
def test_arrays(tmp_path, data, said):
    with pytest.raises(DatasetError, match=f"^from_numpy: (data: )?{'.*' if said[0] != '^' else ''}{said}"):
        from_numpy(data, tmp_path / "new" / "data")
    assert not (tmp_path / "new" / "data").exists()


@pytest.mark.parametrize(
    "ids", [[0, 0, 2**63 - 2, 2**63 - 1], [-(2**63), -1, 0, 2**62], [0.0, 1.0, 1.0, 2.0], [False, False, True, True]]
)
@pytest.mark.parametrize("column", [False, True])
def test_whole_numbers_of_episodes_are_kept(tmp_path, ids, column):
    given = np.array(ids).reshape(-1, 1) if column else np.array(ids)
    rb = from_numpy({"obs": np.arange(4.0), "rewards": np.array([1.0, 2, 4, 8]), "episode": given}, tmp_path / "data")
    assert rb["collector", "traj_ids"].tolist() == [int(one) for one in ids]
    returns = [sum(2**other for other in range(4) if ids[other] == one) for one in ids]
    assert rb["episode_return"].tolist() == returns


def test_arguments(tmp_path):
    with pytest.raises(
        DatasetError,
        match=r"rename: expected fields of the data set, \['obs', 'rewards', 'done'\], got \['observations'\]",
    ):
        from_numpy(columns(), tmp_path / "data", rename={"observations": "x"})
    with pytest.raises(TypeError, match="from_numpy: rename: expected a mapping of names, got list"):
        from_numpy(columns(), tmp_path / "data", rename=["obs"])
    with pytest.raises(TypeError, match="from_numpy: end_keys: expected a list of keys, got 'done'"):
        from_numpy(columns(), tmp_path / "data", end_keys="done")
    with pytest.raises(TypeError, match="from_numpy: data: expected a dict of arrays, got list"):
        from_numpy([columns()], tmp_path / "data")
    assert not [*tmp_path.iterdir()]


def test_directories(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="expected a new directory, or an import's, got files"):
        from_numpy(columns(), tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]
    from_numpy(columns(), tmp_path / "data").close()
    for other in (columns(rewards=np.zeros(4)), columns(rewards=np.ones(4, np.float32)), columns(more=np.ones(4))):
        with pytest.raises(
            IncompatibleStore, match="holds an import of another data set, or of one that has changed since"
        ):
            from_numpy(other, tmp_path / "data")
    with pytest.raises(IncompatibleStore, match=r"\['names', 'fields'\] differ"):
        from_numpy(columns(), tmp_path / "data", rename={"rewards": "r"})
    (tmp_path / "data" / "import.json").write_text('{"rows": "many"}')
    with pytest.raises(CorruptStore, match="import.json: expected the note of an import"):
        from_numpy(columns(), tmp_path / "data")


def test_arrays_that_changed_anywhere_are_others(tmp_path):
    given = columns(obs=np.zeros((5000, 3)), rewards=np.zeros(5000), done=np.ones(5000))
    from_numpy(given, tmp_path / "data").close()
    for row in (0, 1, 1234, 2500, 4998, 4999):
        changed = given["obs"].copy()
        changed[row, 1] = 1
        with pytest.raises(IncompatibleStore, match="holds an import of another data set, or of one that has changed"):
            from_numpy(given | {"obs": changed}, tmp_path / "data")
    turned = np.asfortranarray(given["obs"])  # the same values, laid out otherwise
    assert len(from_numpy(given | {"obs": turned}, tmp_path / "data")) == 5000


# ---- files ---------------------------------------------------------------------------------------------------------------


def test_hdf5_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        from_hdf5(tmp_path / "absent.hdf5", tmp_path / "data")
    (tmp_path / "text.hdf5").write_text("no file of this kind")
    with pytest.raises(DatasetError, match="from_hdf5: .*text.hdf5: expected a whole HDF5 file"):
        from_hdf5(tmp_path / "text.hdf5", tmp_path / "data")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, column in columns(obs=np.random.default_rng(0).random((4, 1000))).items():
            file[name] = column
    os.truncate(tmp_path / "a.hdf5", 9000)
    with pytest.raises(DatasetError, match="expected a whole HDF5 file: .*truncated"):
        from_hdf5(tmp_path / "a.hdf5", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_an_hdf5_file_that_is_damaged_half_way(tmp_path, monkeypatch):
    """What was whole stays. A file that was put in its place is another one."""
    monkeypatch.setattr(tables, "BLOCK_BYTES", 400)
    path, good = tmp_path / "a.hdf5", steps([20] * 10)
    with h5py.File(path, "w") as file:
        for name in ("observations", "rewards", "timeouts", "terminals"):
            file.create_dataset(name, data=good[name], chunks=(20, *good[name].shape[1:]), compression="gzip")
        place = file["observations"].id.get_chunk_info(7).byte_offset
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + b"\0" * 40 + whole[place + 40 :])
    os.utime(path, ns=(1, 1))
    with pytest.raises(DatasetError, match="rows from 1.. on cannot be read, as the file is damaged: "):
        from_hdf5(path, tmp_path / "data")
    path.write_bytes(whole)
    os.utime(path, ns=(1, 1))
    rb = from_hdf5(path, tmp_path / "data")
    assert (rb["observation"].numpy() == good["observations"]).all()


def table(**more):
    return pa.table({"obs": [[0.0], [1.0], [2.0]], "done": [False, False, True]} | more)


def test_parquet_files(tmp_path):
    def refused(said, name="a.parquet"):
        with pytest.raises(DatasetError, match=said):
            from_parquet(tmp_path / name, tmp_path / "data")
        assert not (tmp_path / "data").exists()

    with pytest.raises(FileNotFoundError):
        from_parquet(tmp_path / "absent.parquet", tmp_path / "data")
    (tmp_path / "folder").mkdir()
    refused("expected Parquet files, got none", "folder")
    writer = pq.ParquetWriter(tmp_path / "open.parquet", table().schema)
    writer.write_table(table())  # and killed
    shutil.copy(tmp_path / "open.parquet", tmp_path / "a.parquet")
    writer.close()
    refused("a.parquet: expected a whole Parquet file, damaged or open still")
    for more, said in (
        ({"x": [1, None, 3]}, "column 'x': expected a value in every row, got 1 empty ones"),
        ({"x": [[1], [1, 2], [3]]}, r"column 'x': expected lists of one length, got \[.*1.*2.*\]"),
        ({"x": [[1], None, [3]]}, "column 'x': expected lists of one length, got empty ones"),
        ({"x": ["a", "b", "c"]}, "column 'x': expected numbers, got string. rename={name: None} omits it"),
        ({"x": [{"y": 1}] * 3}, "column 'x': expected numbers, got struct"),
    ):
        pq.write_table(table(**more), tmp_path / "a.parquet")
        refused(said)
    pq.write_table(table(), tmp_path / "folder" / "a.parquet")
    pq.write_table(table(x=[1, 2, 3]), tmp_path / "folder" / "b.parquet")
    refused("expected the same columns in all files, but b.parquet has others", "folder")


def test_a_parquet_file_that_is_damaged_half_way(tmp_path):
    rows = {"obs": np.random.default_rng(0).random(4000), "done": np.arange(4000) % 10 == 9}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet", row_group_size=500, compression="gzip")
    place = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(6).column(0).data_page_offset
    raw = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(raw[:place] + b"\xff" * 60 + raw[place + 60 :])
    with pytest.raises(DatasetError, match="a.parquet: expected a whole Parquet file, got a damaged one"):
        from_parquet(tmp_path / "a.parquet", tmp_path / "data")


# ---- Minari --------------------------------------------------------------------------------------------------------------


def test_minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"from_minari: expected the folder of a data set, or the name of one.*download=True"
    ):
        from_minari("none/such-v0", tmp_path / "data")
    with pytest.raises(DatasetError, match="expected a data set that Minari .* reads"):
        from_minari("no name", tmp_path / "data", download=True)
    minari_dataset(tmp_path / "in", LENGTHS)
    (tmp_path / "in" / "metadata.json").write_text("{}")
    with pytest.raises(DatasetError, match="expected a data set that Minari .* reads"):
        from_minari(tmp_path / "in", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_hub_that_is_not_reachable(tmp_path, monkeypatch):
    import minari

    def unreachable(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(minari, "load_dataset", unreachable)
    with pytest.raises(
        DatasetError, match=r"none/such-v0: .*a hub within reach for downloads \(ConnectionError: no route to host\)"
    ):
        from_minari("none/such-v0", tmp_path / "data", download=True)


def damaged(tmp_path, change):
    minari_dataset(tmp_path / "in", LENGTHS)
    with h5py.File(tmp_path / "in" / "main_data.hdf5", "a") as file:
        change(file)
    return tmp_path / "in"


def shorter(file, name):
    column = file[name][:-1]
    del file[name]
    file[name] = column


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.pop("episode_1"), "episode 1 of 3 is missing or damaged"),
        (
            lambda file: shorter(file, "episode_2/rewards"),
            r"episode 2: \('observations', '.*'\): expected 8 entries, got 9",
        ),
        (
            lambda file: shorter(file, "episode_0/observations/state"),
            r"episode 0: \('observations', 'state'\): expected 6 entries, got 5",
        ),
        (lambda file: shorter(file, "episode_2/terminations"), "episode 2: 'terminations': expected 8 entries, got 7"),
    ],
)
def test_episodes_of_minari_that_are_damaged(tmp_path, monkeypatch, change, said):
    monkeypatch.setattr(libraries.of, "BLOCK_BYTES", 1)
    with pytest.raises(DatasetError, match=said):
        from_minari(damaged(tmp_path, change), tmp_path / "data")


def test_minari_with_fewer_or_more_episodes_than_it_says(tmp_path):
    import json

    minari_dataset(tmp_path / "in", LENGTHS)
    path = tmp_path / "in" / "metadata.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"total_steps": 20}))
    with pytest.raises(DatasetError, match="expected 20 rows, got 14: steps of it are missing"):
        from_minari(tmp_path / "in", tmp_path / "data")
    path.write_text(json.dumps(said | {"total_steps": 9}))
    with pytest.raises(DatasetError, match="expected 9 rows, got more"):
        from_minari(tmp_path / "in", tmp_path / "other")
    assert not (tmp_path / "other").exists()


# ---- TorchRL and SB3 -----------------------------------------------------------------------------------------------------


def test_torchrl(tmp_path):
    from_numpy(steps(LENGTHS), tmp_path / "store").close()
    to_torchrl(tmp_path / "store", tmp_path / "dump", final="repeat")
    os.truncate(tmp_path / "dump/storage/observation.memmap", 50)
    with pytest.raises(CorruptCheckpoint, match="observation.memmap"):
        from_torchrl(tmp_path / "dump", tmp_path / "data")
    with pytest.raises(FileNotFoundError):
        from_torchrl(tmp_path / "absent", tmp_path / "data")


def test_sb3(tmp_path):
    import pickle

    with pytest.raises(FileNotFoundError):
        from_sb3(tmp_path / "absent.pkl", tmp_path / "data")
    arrays = {name: np.zeros((3, 1)) for name in ("observations", "actions", "rewards", "dones")}
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(arrays)[:-40])
    with pytest.raises(DatasetError, match="from_sb3: .*a.pkl: expected a whole pickle of a ReplayBuffer"):
        from_sb3(tmp_path / "a.pkl", tmp_path / "data")
    for wrong in (
        arrays | {"actions": np.zeros((2, 1))},
        {"observations": np.zeros((3, 1))},
        [1, 2],
        arrays | {"rewards": np.zeros(3)},
    ):
        with pytest.raises(DatasetError, match=r"expected arrays \[steps, environments, …\]"):
            from_sb3(wrong, tmp_path / "data")
    for flag in ("dones", "timeouts"):
        with pytest.raises(DatasetError, match=f"from_sb3: buffer: end flag '{flag}': expected numbers, got NaN"):
            from_sb3(arrays | {flag: np.full((3, 1), np.nan)}, tmp_path / "data")
    with pytest.raises(DatasetError, match="expected at least one row"):
        from_sb3(arrays | {"pos": 0, "full": False}, tmp_path / "data")


@pytest.mark.parametrize(
    ("module", "extra", "call"),
    [
        ("h5py", "hdf5", lambda folder: from_hdf5(folder / "a", folder / "data")),
        ("pyarrow", "datasets", lambda folder: from_parquet(folder / "a", folder / "data")),
        ("minari", "minari", lambda folder: from_minari(folder / "a", folder / "data")),
    ],
)
def test_extras_that_are_missing(tmp_path, monkeypatch, module, extra, call):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf'needs {module}: pip install "engram-replay\[{extra}\]"'):
        call(tmp_path)
