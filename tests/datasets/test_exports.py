"""What is exported is read by the libraries whose format it is, bit for bit."""

import os

import h5py
import minari
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import FinalObservations, LazyMemmapStorage, NextFromFollowing, RandomSampler, ReplayBuffer
from engram.datasets import (
    from_hdf5,
    from_minari,
    from_numpy,
    from_parquet,
    from_torchrl,
    to_hdf5,
    to_minari,
    to_parquet,
    to_torchrl,
)
from engram.datasets import tables as episodes_module
from engram.datasets.tables import written_whole
from engram.errors import DatasetError
from tests.datasets.episodes import flat, minari_dataset, minari_episodes, same, steps

LENGTHS = [5, 1, 1, 17, 2, 30, 1]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(episodes_module, "BLOCK_BYTES", 500)


@pytest.fixture
def store(tmp_path):
    from_numpy(steps(LENGTHS), tmp_path / "store").close()
    return tmp_path / "store"


def test_hdf5(store, tmp_path):
    to_hdf5(store, tmp_path / "out" / "a.hdf5", compression="gzip")
    columns = flat(steps(LENGTHS))
    with h5py.File(tmp_path / "out" / "a.hdf5") as file:
        for name, column in columns.items():
            assert same(file["/".join(name)][()], column)
        assert file["episode"][()].tolist() == np.repeat(np.arange(7), LENGTHS).tolist()
        assert file["observations"].compression == "gzip"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.hdf5"]


def test_parquet(store, tmp_path):
    to_parquet(store, tmp_path / "a.parquet", compression="none")
    table = pq.read_table(tmp_path / "a.parquet")
    columns = steps(LENGTHS)
    assert same(table["next.reward"].to_numpy(), columns["rewards"])
    assert same(np.stack(table["observation"].to_numpy()), columns["observations"])
    assert same(table["next.truncated"].to_numpy(), columns["timeouts"])
    assert pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(0).compression == "UNCOMPRESSED"


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_and_back_again(tmp_path_factory, lengths, seed):
    folder = tmp_path_factory.mktemp("round")
    with from_numpy(steps(lengths, seed), folder / "store") as rb:
        rows = flat(rb[:])
    to_hdf5(folder / "store", folder / "a.hdf5")
    to_parquet(folder / "store", folder / "a.parquet")
    for again in (from_hdf5(folder / "a.hdf5", folder / "h"), from_parquet(folder / "a.parquet", folder / "p")):
        found = flat(again[:])
        assert found.keys() == rows.keys()
        assert all(same(found[name], rows[name]) for name in rows)
        again.close()


def test_minari_and_back_again(tmp_path):
    from_minari(minari_dataset(tmp_path / "in", LENGTHS), tmp_path / "store").close()
    to_minari(tmp_path / "store", tmp_path / "root" / "small-v3")
    for number, (one, kept) in enumerate(
        zip(minari.MinariDataset(tmp_path / "root/small-v3/data"), minari_episodes(LENGTHS), strict=True)
    ):
        assert one.id == number
        for name in ("image", "state"):
            assert same(one.observations[name], kept.observations[name])
        for name in ("actions", "rewards", "terminations", "truncations"):
            assert same(getattr(one, name), getattr(kept, name))
        assert same(one.infos["pose"]["q"], kept.infos["pose"]["q"])
        assert same(one.infos["success"], kept.infos["success"])


@pytest.mark.parametrize(("export", "back"), [(to_hdf5, from_hdf5), (to_parquet, from_parquet)])
@pytest.mark.parametrize("rename", [{}, {"observations": "seen"}])
def test_observations_after_last_steps_are_written(tmp_path, export, back, rename):
    """Minari's transitions are all there again, those of truncated steps too."""
    from_minari(minari_dataset(tmp_path / "in", LENGTHS), tmp_path / "store", rename=rename).close()
    export(tmp_path / "store", tmp_path / "file")
    with back(tmp_path / "file", tmp_path / "again", batch_size=4096) as rb:
        batch, info = rb.sample(return_info=True)
    rows, found = info["index"].numpy(), flat(batch)
    assert set(rows.tolist()) == set(range(sum(LENGTHS)))
    name = rename.get("observations", "observation")
    for key in ("image", "state"):
        seen = [one.observations[key] for one in minari_episodes(LENGTHS)]
        assert same(found[name, key], np.concatenate([one[:-1] for one in seen])[rows])
        assert same(found["next", name, key], np.concatenate([one[1:] for one in seen])[rows])


@pytest.mark.parametrize(
    ("export", "one", "other"),
    [
        (to_hdf5, "action", "actions"),
        (to_hdf5, ("next", "reward"), "rewards"),
        (to_hdf5, "observation", ("observations", "x")),
        (to_parquet, "a.b", ("a", "b")),
    ],
)
def test_fields_that_would_get_one_name_are_refused(tmp_path, export, one, other):
    columns = {"p": np.zeros(3), "q": np.ones(3), "done": np.arange(3) == 2}
    from_numpy(columns, tmp_path / "store", rename={"p": one, "q": other}).close()
    with pytest.raises(DatasetError, match="expected a name for each field in the file, but several would be called"):
        export(tmp_path / "store", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_what_is_made_meanwhile_stays(tmp_path):
    def export(path, what):
        with written_whole(path, "to_hdf5") as partial:
            for folder, text in ((partial, "exported"), (path, "mine")):
                if what == "folder":
                    folder.mkdir()
                (folder / "c" if what == "folder" else folder).write_text(text)

    with pytest.raises(FileExistsError):
        export(tmp_path / "a", "file")
    with pytest.raises(OSError, match=r"exists|not empty"):
        export(tmp_path / "b", "folder")
    assert (tmp_path / "a").read_text() == (tmp_path / "b" / "c").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.parametrize("links", [True, False])
def test_what_appears_is_on_disk(tmp_path, monkeypatch, links):
    synced, appeared, sync = [], [], os.fsync

    def noted(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        appeared.append((tmp_path / "a").exists())
        sync(fd)

    def no_links(*_, **__):
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "fsync", noted)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    with written_whole(tmp_path / "a", "to_hdf5") as partial:
        partial.write_text("exported")
    assert synced == [str(partial), str(tmp_path)]
    assert appeared == [False, True]
    synced.clear()
    with written_whole(tmp_path / "b", "to_minari") as partial:
        (partial / "c").mkdir(parents=True)
        (partial / "c" / "d").write_text("exported")
    assert sorted(synced[:-1]) == [str(partial), str(partial / "c"), str(partial / "c" / "d")]
    assert synced[-1] == str(tmp_path)
    assert (tmp_path / "a").read_text() == (tmp_path / "b" / "c" / "d").read_text() == "exported"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_minari_finds_it_by_name_with_spaces_given(store, tmp_path, monkeypatch):
    from gymnasium import spaces

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    box = spaces.Box(0, 1, (3,), np.float32)
    to_minari(
        store, tmp_path / "root" / "mine-v1", observation_space=box, action_space=spaces.Discrete(9), final="repeat"
    )
    found = minari.load_dataset("mine-v1")
    assert (found.total_steps, found.total_episodes) == (57, 7)
    assert (found.spec.observation_space, found.spec.action_space) == (box, spaces.Discrete(9))
    last = found[3]
    assert (last.observations[-1] == last.observations[-2]).all()
    assert same(found[5].actions, steps(LENGTHS)["actions"][26:56])


def test_minari_of_rows_that_say_only_which_episode(tmp_path):
    rows = {"obs": np.arange(5.0), "actions": np.zeros(5), "episode": np.array([0, 0, 1, 1, 1])}
    from_numpy(rows, tmp_path / "store").close()
    to_minari(tmp_path / "store", tmp_path / "out", dataset_id="aa/bb-v0", final="repeat")
    found = minari.MinariDataset(tmp_path / "out/data")
    assert [one.truncations.tolist() for one in found] == [[False, True], [False, False, True]]
    assert found.spec.dataset_id == "aa/bb-v0"


def test_torchrl_loads_it(store, tmp_path):
    torchrl = pytest.importorskip("torchrl.data")
    to_torchrl(store, tmp_path / "dump", final="repeat")
    columns = steps(LENGTHS)
    for storage in (torchrl.LazyMemmapStorage(57), torchrl.LazyTensorStorage(57)):
        rb = torchrl.TensorDictReplayBuffer(storage=storage, batch_size=16)
        rb.loads(tmp_path / "dump")
        rows = rb[:]
        assert len(rb) == 57
        assert same(rows["observation"].numpy(), columns["observations"])
        assert same(rows["next", "reward"].numpy()[:, 0], columns["rewards"])
        done = columns["terminals"] | columns["timeouts"]
        assert same(rows["next", "done"].numpy()[:, 0], done)
        after = np.where(done[:, None], columns["observations"], np.roll(columns["observations"], -1, 0))
        assert same(rows["next", "observation"].numpy(), after)
        assert rb.sample().shape == (256,)
    again = from_torchrl(tmp_path / "dump", tmp_path / "again")
    assert again["collector", "traj_ids"].tolist() == np.repeat(np.arange(7), LENGTHS).tolist()


def test_a_recorded_buffer_of_lanes_that_went_round(tmp_path):
    """Lanes follow each other, oldest step first; final observations come from where they were kept."""
    finals = FinalObservations.open_or_create(["observation"], tmp_path / "finals", 100)
    sampler = NextFromFollowing(RandomSampler(), finals)
    storage = LazyMemmapStorage(40, scratch_dir=tmp_path / "store", lanes=2)
    rb = ReplayBuffer(storage=storage, sampler=sampler, transform=finals)
    for step in range(50):
        obs = torch.tensor([[0, step], [1, step]])
        done = torch.tensor([step % 6 == 5, step % 10 == 9])
        following = obs + torch.tensor([0, 1]) + 1000 * done.unsqueeze(1)
        rb.extend(
            {"observation": obs, "action": obs[:, 1], "next": {"observation": following, "done": done}}, lane="each"
        )
    rb.close()
    finals.storage.close()
    for export in (to_parquet, to_hdf5):
        with pytest.raises(DatasetError, match=r"expected the observation after the last step.*final='repeat'"):
            export(tmp_path / "store", tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    to_parquet(tmp_path / "store", tmp_path / "a.parquet", final="repeat")
    seen = pq.read_table(tmp_path / "a.parquet")["observation"].to_pylist()
    assert seen == [[lane, step] for lane in (0, 1) for step in range(30, 50)]
    to_minari(tmp_path / "store", tmp_path / "out-v0", final="repeat")
    episodes = [one.observations.tolist() for one in minari.MinariDataset(tmp_path / "out-v0/data")]
    assert episodes[0] == [[0, step] for step in range(30, 36)] + [[1000, 1036]]
    assert episodes[4] == [[1, step] for step in range(30, 40)] + [[1001, 1040]]
    assert episodes[3] == [[0, 48], [0, 49], [0, 49]]  # open still


def test_what_has_no_place_is_refused(store, tmp_path):
    with pytest.raises(
        DatasetError, match=r"to_minari: .*expected the observation after the last step.*'observation'.*final='repeat'"
    ):
        to_minari(store, tmp_path / "a-v0")
    with pytest.raises(DatasetError, match="to_torchrl: .*after the last step"):
        to_torchrl(store, tmp_path / "a")
    with pytest.raises(FileExistsError, match="to_parquet: expected a path where nothing is"):
        to_parquet(store, store)
    with pytest.raises(FileNotFoundError):
        to_hdf5(tmp_path / "absent", tmp_path / "a")
    from_numpy({"observations": np.ones(3), "done": np.ones(3)}, tmp_path / "b").close()
    with pytest.raises(DatasetError, match=r"expected the fields \['action'\]"):
        to_minari(tmp_path / "b", tmp_path / "a-v0")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        with ReplayBuffer(storage=LazyMemmapStorage(3, scratch_dir=tmp_path / str(dtype))) as rb:
            rb.extend({"x": torch.zeros(3).to(dtype), "done": torch.ones(3, dtype=torch.bool)})
        with pytest.raises(DatasetError, match="field x: expected a dtype that NumPy has, got"):
            to_hdf5(tmp_path / str(dtype), tmp_path / "a")
    with ReplayBuffer(storage=LazyMemmapStorage(3, scratch_dir=tmp_path / "c")) as rb:
        rb.extend({"x": torch.zeros(3, dtype=torch.complex64), "done": torch.ones(3, dtype=torch.bool)})
    with pytest.raises(DatasetError, match="'x': expected a dtype of Arrow's, got complex64"):
        to_parquet(tmp_path / "c", tmp_path / "a")
    with ReplayBuffer(storage=LazyMemmapStorage(3, scratch_dir=tmp_path / "d")) as rb:
        rb.extend({"x": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="expected rows with one of the trajectory ids"):
        to_hdf5(tmp_path / "d", tmp_path / "a")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "a"))]
