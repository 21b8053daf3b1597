"""``engram import`` and ``engram export``."""

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from engram import ReplayBuffer
from engram.cli import main
from engram.datasets import from_minari, from_numpy
from tests.datasets.episodes import flat, minari_dataset, minari_episodes, steps

LENGTHS = [4, 1, 6]


def run(*arguments, status=0):
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def store(tmp_path):
    from_numpy(steps(LENGTHS), tmp_path / "store").close()
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("kind", "name"), [("hdf5", "a.hdf5"), ("parquet", "a.parquet"), ("minari", "a-v0"), ("torchrl", "a")]
)
def test_out_and_in(store, tmp_path, kind, name):
    run("export", store, tmp_path / name, "--to", kind, *(["--repeat-final"] if kind in ("minari", "torchrl") else []))
    said = run("import", tmp_path / name, tmp_path / "again")
    assert f"{tmp_path / 'again'}: 3 episodes of 11 rows, mean return " in said
    with ReplayBuffer.open(tmp_path / "again", readonly=True) as rb:
        assert (rb["observation"].numpy() == steps(LENGTHS)["observations"]).all()
        assert rb["collector", "traj_ids"].tolist() == np.repeat([0, 1, 2], LENGTHS).tolist()


def test_final_observations_go_out_and_in(tmp_path):
    from_minari(minari_dataset(tmp_path / "m", LENGTHS), tmp_path / "store").close()
    for name, how in (("a.hdf5", ["--to", "hdf5"]), ("a.parquet", ["--to", "parquet", "--repeat-final"])):
        run("export", tmp_path / "store", tmp_path / name, *how)
        run("import", tmp_path / name, tmp_path / f"again-{name}")
        with ReplayBuffer.open(tmp_path / f"again-{name}", readonly=True) as rb:
            after = np.concatenate([one.observations["state"][1:] for one in minari_episodes(LENGTHS)])
            assert (rb["next", "observation", "state"].numpy() == after).all()


def test_names_and_ends(tmp_path):
    np.savez(tmp_path / "a.npz", pixels=np.arange(6.0), last=np.arange(6) % 2, more=np.zeros(6))
    said = run(
        "import", tmp_path / "a.npz", tmp_path / "data",
        "--rename", "pixels=observation/pixels", "--rename", "more=", "--end-key", "last", "--end-key", "absent",
    )  # fmt: skip
    assert said.splitlines()[:3] == [
        "'pixels': ('observation', 'pixels'), float64[]",
        "'last': 'last', int64[]",
        "'more': left out",
    ]
    with ReplayBuffer.open(tmp_path / "data", readonly=True) as rb:
        assert sorted(flat(rb[:])) == [("collector", "traj_ids"), ("last",), ("observation", "pixels")]
        assert rb["collector", "traj_ids"].tolist() == [0, 0, 1, 1, 2, 2]


def test_what_a_source_is(tmp_path, store):
    from engram.cli.data import kind_of

    minari_dataset(tmp_path / "m", LENGTHS)
    assert kind_of(tmp_path / "m") == "minari"
    assert kind_of(store) == "parquet"
    assert [kind_of(tmp_path / name) for name in ("a.h5", "b.pkl", "D4RL/door/human-v2")] == ["hdf5", "sb3", "minari"]
    with h5py.File(tmp_path / "noname", "w") as file:
        for name, column in flat(steps(LENGTHS)).items():
            file["/".join(name)] = column
    run("import", tmp_path / "noname", tmp_path / "data", "--from", "hdf5")


def test_mistakes(tmp_path, store):
    assert "needs" not in run("import", tmp_path / "absent.hdf5", tmp_path / "data", status=2)
    assert "expected a whole HDF5 file" in run(
        "import", store / "import.json", tmp_path / "data", "--from", "hdf5", status=1
    )
    assert "final='repeat'" in run("export", store, tmp_path / "a-v0", "--to", "minari", status=1)
    assert "expected a path where nothing is" in run("export", store, store, "--to", "parquet", status=2)
