"""Data sets that Lance itself has written."""

import shutil

import lance
import numpy as np
import pytest
from click.testing import CliRunner

from engram import DatasetError, IncompatibleStore
from engram.cli import main
from engram.datasets import from_lance
from tests.datasets.episodes import flat, lance_dataset, numbers_and_returns, same, steps

LENGTHS = [5, 1, 60, 100, 3, 7]


def test_all_columns_bit_for_bit(tmp_path):
    columns = steps(LENGTHS)
    lance_dataset(tmp_path / "steps.lance", columns)
    with from_lance(tmp_path / "steps.lance", tmp_path / "data") as rb:
        rows = flat(rb[:])
    numbers, returns = numbers_and_returns(LENGTHS, columns["rewards"])
    assert rows["collector", "traj_ids"].tolist() == numbers.tolist()
    assert np.allclose(rows["episode_return",], returns, rtol=1e-6)
    expected = {
        ("observation",): columns["observations"],
        ("action",): columns["actions"],
        ("next", "reward"): columns["rewards"],
        ("next", "terminated"): columns["terminals"],
        ("next", "truncated"): columns["timeouts"],
        ("infos", "qpos"): columns["infos"]["qpos"],
    }
    assert {*rows} == {*expected, ("collector", "traj_ids"), ("episode_return",)}
    assert all(same(rows[path], column) for path, column in expected.items())


def test_structs_within_structs_are_nested_names(tmp_path):
    n = np.arange(6)
    lance_dataset(tmp_path / "x", {"obs": {"arm": {"joints": n * 1.0}, "grip": n}, "episode": n // 3, "note": n})
    with from_lance(tmp_path / "x", tmp_path / "data", rename={"note": None}) as rb:
        rows = flat(rb[:])
    assert rows["observation", "arm", "joints"].tolist() == n.tolist()
    assert rows["observation", "grip"].tolist() == n.tolist()
    assert ("note",) not in rows


def test_deleted_rows_are_left_out(tmp_path):
    columns = {"obs": np.arange(300), "episode": np.arange(300) // 10}
    dataset = lance_dataset(tmp_path / "x", columns)
    dataset.delete("episode = 4 or obs = 120")
    kept = [row for row in range(300) if row // 10 != 4 and row != 120]
    with from_lance(tmp_path / "x", tmp_path / "data") as rb:
        assert rb["observation"].tolist() == kept
        assert rb["collector", "traj_ids"].tolist() == [row // 10 for row in kept]


def test_another_version_is_another_data_set(tmp_path):
    columns = {"obs": np.arange(30), "episode": np.arange(30) // 10}
    lance_dataset(tmp_path / "x", columns)
    from_lance(tmp_path / "x", tmp_path / "data").close()
    from_lance(tmp_path / "x", tmp_path / "data").close()  # is only opened
    lance.write_dataset(lance.dataset(tmp_path / "x").to_table(), tmp_path / "x", mode="append")
    with pytest.raises(IncompatibleStore, match="another data set, or of one that has changed since"):
        from_lance(tmp_path / "x", tmp_path / "data")


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="from_lance: expected the folder of a Lance data set"):
        from_lance(tmp_path / "nothing", tmp_path / "data")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"from_lance: .*empty: expected a whole Lance data set"):
        from_lance(tmp_path / "empty", tmp_path / "data")
    lance_dataset(tmp_path / "y", {"obs": np.arange(3)})
    with pytest.raises(DatasetError, match=r"y: expected the number of the episode, .* or an end flag"):
        from_lance(tmp_path / "y", tmp_path / "data")
    words = {"obs": np.array(["a", "b"]), "episode": np.zeros(2, int)}
    lance_dataset(tmp_path / "words", words)
    with pytest.raises(DatasetError, match="column 'obs': expected numbers, got string"):
        from_lance(tmp_path / "words", tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_damaged_files(tmp_path, damage):
    """What comes before the damage stays. The data set as it was goes on from there."""
    columns = {"obs": np.arange(40_000), "episode": np.arange(40_000) // 10}
    lance_dataset(tmp_path / "x", columns, rows_per_file=20_000)
    shutil.copytree(tmp_path / "x", tmp_path / "whole")
    second = [part.data_files()[0].path for part in lance.dataset(tmp_path / "x").get_fragments()][1]
    file = tmp_path / "x" / "data" / second
    if damage == "lost":
        file.unlink()
        with pytest.raises(FileNotFoundError, match=second):
            from_lance(tmp_path / "x", tmp_path / "data")
        assert not (tmp_path / "data").exists()
        return
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DatasetError, match=r"rows from \d+ on: expected rows that Lance can read"):
        from_lance(tmp_path / "x", tmp_path / "data")


def test_the_command_knows_it(tmp_path):
    lance_dataset(tmp_path / "steps", {"obs": np.arange(9), "episode": np.arange(9) // 3})
    result = CliRunner().invoke(main, ["import", str(tmp_path / "steps"), str(tmp_path / "data")])
    assert result.exit_code == 0, result.output
    assert "9 rows" in result.output
