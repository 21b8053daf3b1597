"""What is imported holds every step of the data set once, bit for bit, with the numbers and returns of episodes."""

import json

import h5py
import minari
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import FinalObservations, NextFromFollowing, ReplayBuffer, SliceSampler
from engram.datasets import from_hdf5, from_minari, from_numpy, from_parquet, from_sb3, from_torchrl, tables
from engram.datasets import importing as blocks_module
from engram.datasets.importing import import_source
from engram.errors import DatasetError, ReadOnlyStore
from tests.datasets.episodes import flat, minari_dataset, minari_episodes, numbers_and_returns, same, steps

LENGTHS = [5, 1, 1, 17, 2, 30, 1]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few rows, so that episodes go on from one to the next."""
    for module in (blocks_module, tables):
        monkeypatch.setattr(module, "BLOCK_BYTES", 200)


def check(rb, columns, lengths):
    """The store holds these columns of D4RL's."""
    rows = flat(rb[:])
    numbers, returns = numbers_and_returns(lengths, columns["rewards"])
    assert same(rows["observation",], columns["observations"])
    assert same(rows["action",], columns["actions"])
    assert same(rows["next", "reward"], columns["rewards"])
    assert same(rows["next", "terminated"], columns["terminals"])
    assert same(rows["next", "truncated"], columns["timeouts"])
    assert same(rows["infos", "qpos"], columns["infos"]["qpos"])
    assert rows["collector", "traj_ids"].tolist() == numbers.tolist()
    np.testing.assert_allclose(rows["episode_return",], returns, rtol=1e-6)
    assert len(rows) == 8


def check_nexts(rb, columns, lengths):
    """Drawn next observations are those of the following rows, and of terminated steps their own. Other last steps are not drawn."""
    observations, terminals = columns["observations"], columns["terminals"]
    after = np.where(terminals[:, None], observations, np.roll(observations, -1, 0))
    ends = {int(end) - 1 for end in np.cumsum(lengths)}
    terminated = {end for end in ends if terminals[end]}
    seen = set()
    for _ in range(20):
        batch, info = rb.sample(256, return_info=True)
        rows = info["index"].numpy()
        assert same(np.asarray(batch["next"]["observation"]), after[rows])
        assert np.asarray(batch["next"]["terminated"]).tolist() == terminals[rows].tolist()
        seen |= set(rows.tolist())
    assert seen & ends == terminated


def hdf5(path, columns):
    with h5py.File(path, "w") as file:
        for name, column in flat(columns).items():
            file["/".join(name)] = column
        file["metadata/algorithm"] = np.bytes_("SAC")
    return path


def parquet(path, columns, row_group_size=7):
    table = {}
    for name, column in flat(columns).items():
        values = pa.array(column.reshape(-1))
        table[".".join(name)] = (
            values if column.ndim == 1 else pa.FixedSizeListArray.from_arrays(values, column.shape[1])
        )
    pq.write_table(pa.table(table), path, row_group_size=row_group_size)
    return path


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["numpy", "hdf5", "parquet"])
def test_steps_by_column(tmp_path, kind):
    columns = steps(LENGTHS)
    directory = tmp_path / "data"
    said = []
    if kind == "numpy":
        rb = from_numpy(columns, directory, show=said.append)
    elif kind == "hdf5":
        rb = from_hdf5(hdf5(tmp_path / "a.hdf5", columns), directory, show=said.append)
    else:
        rb = from_parquet(parquet(tmp_path / "a.parquet", columns), directory, show=said.append)
    check(rb, columns, LENGTHS)
    check_nexts(rb, columns, LENGTHS)
    assert any("'observations': 'observation', float32[3]" in line for line in said)
    assert "7 episodes of 57 rows" in said[-1]
    with pytest.raises(ReadOnlyStore):
        rb.extend(rb[:1])
    assert not (directory / "import.lock").exists()
    rb.close()
    with ReplayBuffer.open(directory, readonly=True) as again:
        assert isinstance(again.sampler, NextFromFollowing)
        check(again, columns, LENGTHS)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    piece=st.integers(1, 4000),
    by_id=st.booleans(),
    seed=st.integers(0, 99),
)
def test_episodes_of_any_length(tmp_path_factory, lengths, piece, by_id, seed):
    columns = steps(lengths, seed)
    if by_id:  # numbers with gaps, without any flag
        del columns["terminals"], columns["timeouts"]
        columns["episode"] = np.repeat(np.arange(len(lengths)) * 3 + 1, lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "BLOCK_BYTES", piece)
        with from_numpy(columns, tmp_path_factory.mktemp("any") / "data") as rb:
            rows = flat(rb[:])
    numbers, returns = numbers_and_returns(lengths, columns["rewards"])
    assert rows["collector", "traj_ids"].tolist() == (numbers * 3 + 1 if by_id else numbers).tolist()
    np.testing.assert_allclose(rows["episode_return",], returns, rtol=1e-6)
    assert same(rows["observation",], columns["observations"])


def test_an_episode_without_a_last_step_ends_with_the_data(tmp_path):
    columns = steps([3, 4])
    columns["timeouts"][-1] = False  # as where D4RL cut the last episode
    rb = from_numpy(columns, tmp_path / "data")
    assert rb["collector", "traj_ids"].tolist() == [0] * 3 + [1] * 4
    check_nexts(rb, columns, [3, 4])


def test_a_terminated_step_without_a_next_observation_is_drawn(tmp_path):
    """As D4RL's own ``qlearning_dataset`` keeps terminals, and leaves out timeouts only."""
    ends = np.arange(20) % 5 == 4
    flat_rows = {"observations": np.arange(20.0), "rewards": np.ones(20), "terminals": ends}
    batch = from_numpy(flat_rows, tmp_path / "data", batch_size=4096).sample()
    pairs = set(zip(batch["observation"].tolist(), batch["next"]["observation"].tolist(), strict=True))
    assert pairs == {(step, step + (step % 5 != 4)) for step in range(20)}


def test_names_and_ends_of_ones_own(tmp_path):
    columns = {
        "pixels": np.arange(12).reshape(6, 2),
        "info": {"x": np.ones(6), "y": np.ones(6)},
        "last": np.arange(6) % 2,
    }
    renamed = {"pixels": ("observation", "pixels"), ("info", "x"): "x", "info": None}
    rb = from_numpy(columns, tmp_path / "data", rename=renamed, end_keys=["last", "absent"], batch_size=5)
    assert sorted(flat(rb[:])) == [("collector", "traj_ids"), ("last",), ("observation", "pixels"), ("x",)]
    assert rb["collector", "traj_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    assert rb.batch_size == 5
    batch = rb.sample()
    assert torch.equal(batch["next"]["observation"]["pixels"], batch["observation"]["pixels"] + 2)


def test_stored_next_observations_are_kept(tmp_path):
    columns = steps(LENGTHS) | {"next_observations": np.random.default_rng(1).random((57, 3), np.float32)}
    rb = from_numpy(columns, tmp_path / "data")
    assert same(np.asarray(rb["next", "observation"]), columns["next_observations"])
    assert not isinstance(rb.sampler, NextFromFollowing)


def test_the_bytes_of_another_machine_are_turned(tmp_path):
    columns = {"obs": np.arange(4, dtype=">f8"), "done": np.arange(4) == 3}
    assert from_numpy(columns, tmp_path / "data")["observation"].tolist() == [0, 1, 2, 3]


def test_parquet_files_of_a_folder_and_their_lists(tmp_path):
    (tmp_path / "in" / "b").mkdir(parents=True)
    for number, name in enumerate(["a.parquet", "b/c.parquet", "d.parquet"]):
        rows = {"obs": [[number, row] for row in range(3)], "next.done": [False, False, number != 1]}
        pq.write_table(pa.table(rows), tmp_path / "in" / name)
    rb = from_parquet(tmp_path / "in", tmp_path / "data")
    assert rb["observation"].tolist() == [[number, row] for number in range(3) for row in range(3)]
    assert rb["collector", "traj_ids"].tolist() == [0] * 3 + [1] * 6
    assert rb["observation"].dtype == torch.int64


def test_the_tables_of_lerobot_version_3(tmp_path):
    """As its writer lays them out: files in chunks, lists of float32, and numbers of episodes and frames."""
    generator, lengths = np.random.default_rng(0), [3, 5, 4]
    states = generator.random((12, 6), np.float32)
    episodes = np.repeat(np.arange(3), lengths)
    frames = np.concatenate([np.arange(n) for n in lengths])
    table = pa.table(
        {
            "observation.state": pa.FixedSizeListArray.from_arrays(states.reshape(-1), 6),
            "action": [[float(row)] * 2 for row in range(12)],
            "next.reward": np.ones(12, np.float32),
            "timestamp": (frames / 30).astype(np.float32),
            "frame_index": frames,
            "episode_index": episodes,
            "index": np.arange(12),
            "task_index": np.zeros(12, np.int64),
        }
    )
    (tmp_path / "in/data/chunk-000").mkdir(parents=True)
    for number, rows in enumerate([slice(0, 8), slice(8, 12)]):
        part = table.slice(rows.start, rows.stop - rows.start)
        pq.write_table(part, tmp_path / f"in/data/chunk-000/file-{number:03d}.parquet")
    rb = from_parquet(tmp_path / "in/data", tmp_path / "data")
    assert same(rb["observation", "state"].numpy(), states)
    assert rb["collector", "traj_ids"].tolist() == episodes.tolist()
    assert rb["episode_return"].tolist() == np.repeat(lengths, lengths).tolist()
    batch, info = rb.sample(256, return_info=True)
    rows = info["index"].numpy()
    assert set(rows.tolist()) == {0, 1, 3, 4, 5, 6, 8, 9, 10}
    assert same(batch["next"]["observation"]["state"].numpy(), states[rows + 1])


# ---- Minari --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
def test_minari(tmp_path):
    rb = from_minari(minari_dataset(tmp_path / "in", LENGTHS), tmp_path / "data")
    episodes = minari_episodes(LENGTHS)
    rows = flat(rb[:])
    for name in ("image", "state"):
        assert same(rows["observation", name], np.concatenate([one.observations[name][:-1] for one in episodes]))
    assert same(rows["action",], np.concatenate([one.actions for one in episodes]))
    assert same(rows["next", "terminated"], np.concatenate([one.terminations for one in episodes]))
    assert rows["collector", "traj_ids"].tolist() == np.repeat(np.arange(len(LENGTHS)), LENGTHS).tolist()
    assert same(rows["infos", "success"], np.concatenate([one.infos["success"] for one in episodes]))
    assert same(rows["infos", "pose", "q"], np.concatenate([one.infos["pose"]["q"][:-1] for one in episodes]))
    after = {name: np.concatenate([one.observations[name][1:] for one in episodes]) for name in ("image", "state")}
    pose = np.concatenate([one.infos["pose"]["q"][1:] for one in episodes])
    for _ in range(5):
        batch, info = rb.sample(256, return_info=True)
        assert same(np.asarray(batch["next"]["infos"]["pose"]["q"]), pose[info["index"].numpy()])
        for name, values in after.items():
            assert same(np.asarray(batch["next"]["observation"][name]), values[info["index"].numpy()])


def test_infos_of_minari_that_cannot_be_stored(tmp_path):
    """They are refused, and left out where that is asked for."""
    folder = minari_dataset(tmp_path / "in", [3, 2])
    with h5py.File(folder / "main_data.hdf5", "r+") as file:
        for number, n in enumerate([3, 2]):
            file[f"episode_{number}/infos/word"] = np.array([b"word"] * n)
        del file["episode_1/infos/success"]
    with pytest.raises(DatasetError, match=r"'infos', 'success'.*expected 2 entries, got 0|word.*expected numbers"):
        from_minari(folder, tmp_path / "data")
    left_out = {("infos", "word"): None}
    with pytest.raises(DatasetError, match=r"episode 1: \('infos', 'success'\): expected 2 entries, got 0"):
        from_minari(folder, tmp_path / "data", rename=left_out)
    assert not (tmp_path / "data").exists()
    with from_minari(folder, tmp_path / "data", rename={"infos": None}) as rb:
        assert not any(path[0] == "infos" for path in flat(rb[:]))


@pytest.mark.parametrize("name", ["state", ("observation", "state"), ("a", "b")])
def test_minari_under_names_of_ones_own(tmp_path, name):
    minari_dataset(tmp_path / "in", LENGTHS)
    names = {"observations": None, ("observations", "state"): name}
    rb = from_minari(tmp_path / "in", tmp_path / "data", rename=names, batch_size=4096)
    after = np.concatenate([one.observations["state"][1:] for one in minari_episodes(LENGTHS)])
    batch, info = rb.sample(return_info=True)
    path = (name,) if isinstance(name, str) else name
    assert same(flat(batch)["next", *path], after[info["index"].numpy()])
    assert set(info["index"].tolist()) == set(range(sum(LENGTHS)))
    assert isinstance(rb.sampler, NextFromFollowing)


def test_episodes_without_steps_change_no_other_ones(tmp_path):
    class Some(blocks_module.Source):
        names, rows, finals = {}, 5, 4

        def blocks(self, row, episode):
            columns = {("observation",): np.arange(5.0), ("next", "reward"): np.array([1.0, 2, 4, 8, 16])}
            last = {("observation",): np.array([100.0, 101, 102, 103])}
            yield blocks_module.Block(columns, np.array([0, 3, 0, 2]), last)

    rb = import_source(Some("from_x", "x"), tmp_path / "data", {})
    assert rb["episode_return"].tolist() == [7, 7, 7, 24, 24]
    assert rb["collector", "traj_ids"].tolist() == [1, 1, 1, 3, 3]
    batch = rb.sample()
    pairs = set(zip(batch["observation"].tolist(), batch["next"]["observation"].tolist(), strict=True))
    assert pairs == {(0, 1), (1, 2), (2, 101), (3, 4), (4, 103)}


def test_minari_by_name_and_its_windows(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    (tmp_path / "root" / "tests" / "small-v0").mkdir(parents=True)
    minari_dataset(tmp_path / "root" / "tests" / "small-v0" / "data", [4, 6, 3])
    assert minari.load_dataset("tests/small-v0").total_episodes == 3
    from_minari("tests/small-v0", tmp_path / "data").close()
    finals = FinalObservations.of_note(
        {"keys": [["observation", "image"], ["observation", "state"]], "end_keys": None, "max_size": 3, "directory": "finals"},
        tmp_path / "data", unclean="refuse", readonly=True, io="auto",
    )  # fmt: skip
    sampler = NextFromFollowing(SliceSampler(slice_len=3), finals)
    with ReplayBuffer.open(tmp_path / "data", readonly=True, sampler=sampler, batch_size=30) as rb:
        batch, info = rb.sample(return_info=True)
    after = np.concatenate([one.observations["state"][1:] for one in minari_episodes([4, 6, 3])])
    assert same(np.asarray(batch["next"]["observation"]["state"]), after[info["index"][0].numpy()])


# ---- TorchRL and SB3 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [7, 14])
def test_torchrl(tmp_path, written):
    """A ring that is not full yet, and one that is, in the order of writing."""
    torchrl = pytest.importorskip("torchrl.data")
    from tensordict import TensorDict

    rb = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10), batch_size=4)
    done = (torch.arange(written) % 4 == 3).unsqueeze(1)
    for step in range(written):
        one = {
            "observation": torch.tensor([step]),
            "next": {"observation": torch.tensor([step + 1]), "reward": torch.ones(1), "done": done[step]},
        }
        rb.add(TensorDict(one, []))
    rb.dumps(tmp_path / "dump")
    with pytest.warns(UserWarning, match="Pickles are never opened"):
        got = from_torchrl(tmp_path / "dump", tmp_path / "data")
    first = max(0, written - 10)
    assert got["observation"].flatten().tolist() == [*range(first, written)]
    assert got["collector", "traj_ids"].tolist() == [step // 4 - first // 4 for step in range(first, written)]
    assert set(got["episode_return"].tolist()) <= {1.0, 2.0, 3.0, 4.0}


def sb3_buffer(steps_written, optimize, size=20):
    """A buffer of SB3's own, of two environments, whose observations say environment and step."""
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    from gymnasium import spaces

    box = spaces.Box(-1e6, 1e6, (2,), np.float32)
    how = {"optimize_memory_usage": optimize, "handle_timeout_termination": not optimize}
    buffer = buffers.ReplayBuffer(size * 2, box, spaces.Discrete(3), device="cpu", n_envs=2, **how)
    for step in range(steps_written):
        obs = np.array([[0, step], [1, step]], np.float32)
        done = np.array([step % 5 == 4, step % 7 == 6])
        infos = [{"TimeLimit.truncated": bool(step % 10 == 9)}, {}]
        buffer.add(obs, obs + np.array([0, 1]), np.array([[1], [2]]), np.array([step, -step], np.float32), done, infos)
    return buffer


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("written", [13, 33])
@pytest.mark.parametrize("how", ["pickle", "object", "arrays"])
def test_sb3(tmp_path, written, optimize, how):
    import pickle

    buffer = sb3_buffer(written, optimize)
    source = buffer
    if how == "pickle":
        source = tmp_path / "buffer.pkl"
        source.write_bytes(pickle.dumps(buffer))
    elif how == "arrays":
        source = {key: value for key, value in vars(buffer).items() if isinstance(value, np.ndarray | int | bool)}
    rb = from_sb3(source, tmp_path / "data")
    kept = [*range(max(0, written - 20), written)]
    kept = (
        kept[1:] if optimize and written > 20 else kept
    )  # SB3 has overwritten the oldest observation, and does not draw it
    assert rb["observation"].tolist() == [[env, step] for env in (0, 1) for step in kept]
    assert rb["next", "reward"].tolist() == kept + [-step for step in kept]
    truncated = [step % 10 == 9 and not optimize for step in kept] + [False] * len(kept)
    assert rb["next", "truncated"].tolist() == truncated
    done = [step % 5 == 4 for step in kept] + [step % 7 == 6 for step in kept]
    assert rb["next", "terminated"].tolist() == [one and not other for one, other in zip(done, truncated, strict=True)]
    batch = rb.sample()
    moved = (~batch["next"]["terminated"] if optimize else torch.ones(256)).long()
    assert torch.equal(batch["next"]["observation"], batch["observation"] + torch.stack([torch.zeros(256), moved], 1))
    assert isinstance(rb.sampler, NextFromFollowing) == optimize


def test_no_code_of_a_pickle_runs(tmp_path):
    import pickle

    class Hostile:
        def __reduce__(self):
            return open, (str(tmp_path / "touched"), "w")

    arrays = {name: np.zeros((3, 1)) for name in ("observations", "actions", "rewards", "dones")}
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(arrays | {"more": Hostile()}))
    assert len(from_sb3(tmp_path / "a.pkl", tmp_path / "data")) == 3
    assert not (tmp_path / "touched").exists()


# ---- once more -----------------------------------------------------------------------------------------------------------


def test_a_finished_import_is_only_opened(tmp_path):
    columns = steps(LENGTHS)
    path = hdf5(tmp_path / "a.hdf5", columns)
    from_hdf5(path, tmp_path / "data").close()
    before = {one: one.stat().st_mtime_ns for one in (tmp_path / "data").rglob("*") if one.is_file()}
    check(from_hdf5(path, tmp_path / "data"), columns, LENGTHS)
    assert {one: one.stat().st_mtime_ns for one in before} == before
    assert json.loads((tmp_path / "data" / "import.json").read_text())["complete"]


def test_progress_is_told(tmp_path):
    told = []
    from_numpy(steps(LENGTHS), tmp_path / "data", progress=told.append)
    assert (told[-1].what, told[-1].done, told[-1].total) == ("importing", 57, 57)
