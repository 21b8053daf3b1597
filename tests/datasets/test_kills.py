"""An import that is killed goes on: no episode twice, none missing, and the bytes of one that was not killed."""

import numpy as np
import pytest

from engram import ReplayBuffer, StoreInUse
from engram.datasets import from_numpy, to_hdf5, to_minari, to_parquet
from tests import fresh
from tests.datasets.episodes import files, flat, lance_dataset, minari_dataset, same, steps

LENGTHS = [1 + number * 7 % 13 for number in range(60)]

#: Imports ``source``, in blocks of a few rows, and dies at one of its ``moment``s.
DIE = """
import os, signal
from engram import datasets
from engram.datasets import importing, libraries, tables

libraries.of.BLOCK_BYTES = tables.BLOCK_BYTES = piece
done = 0

def dying(function, before):
    def call(*args, **kwargs):
        global done
        done += 1
        if before and done == at:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if not before and done == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

if moment == "before a note":
    importing.Note.write = dying(importing.Note.write, True)
elif moment == "after a note":
    importing.Note.write = dying(importing.Note.write, False)
elif moment == "before rows":
    importing._Import._put = dying(importing._Import._put, True)
elif moment == "between rows":  # one half of them is written
    put = importing._Import._put
    def half(self, buffer, first, columns):
        global done
        done += 1
        if done == at:
            put(self, buffer, first, {path: column[: len(column) // 2 + 1] for path, column in columns.items()})
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, buffer, first, columns)
    importing._Import._put = half
getattr(datasets, f"from_{kind}")(source, directory)
print("done")
"""

MOMENTS = ["before a note", "after a note", "before rows", "between rows"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    from_numpy(steps(LENGTHS), folder / "store").close()
    to_hdf5(folder / "store", folder / "steps.hdf5")
    to_parquet(folder / "store", folder / "steps.parquet")
    minari_dataset(folder / "minari", LENGTHS)
    lance_dataset(folder / "steps.lance", steps(LENGTHS))
    names = {"hdf5": "steps.hdf5", "parquet": "steps.parquet", "minari": "minari", "lance": "steps.lance"}
    return {kind: folder / name for kind, name in names.items()}


@pytest.fixture(scope="module")
def whole(sources, tmp_path_factory):
    """The bytes of imports that were not killed."""
    from engram import datasets

    found = {}
    for kind, source in sources.items():
        directory = tmp_path_factory.mktemp("whole") / kind
        getattr(datasets, f"from_{kind}")(source, directory).close()
        found[kind] = files(directory)
    return found


def run(sources, kind, directory, moment, at, piece=900):
    program = fresh.start(
        DIE, kind=kind, source=str(sources[kind]), directory=str(directory), moment=moment, at=at, piece=piece
    )
    return program.wait(), program.out, program.err


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["hdf5", "parquet", "minari", "lance"])
def test_killed_at_every_kind_of_moment(sources, whole, tmp_path, kind, moment):
    deaths = 0
    for at in (1, 2, 3, 5, 8, 4, 0):  # each goes on where the one before died; the last one is not killed
        status, out, err = run(sources, kind, tmp_path / "data", moment, at)
        assert status == (-9 if at and "done" not in out else 0), err
        deaths += status == -9
    assert deaths >= 3
    assert files(tmp_path / "data") == whole[kind]
    with ReplayBuffer.open(tmp_path / "data", readonly=True) as rb:
        rows = flat(rb[:])
    assert rows["collector", "traj_ids"].tolist() == np.repeat(np.arange(len(LENGTHS)), LENGTHS).tolist()
    if kind != "minari":
        assert same(rows["observation",], steps(LENGTHS)["observations"])


def test_killed_from_outside_at_any_time(sources, whole, tmp_path):
    for _ in range(4):
        program = fresh.start(
            DIE, kind="hdf5", source=str(sources["hdf5"]), directory=str(tmp_path / "data"), moment="", at=0, piece=60
        )
        while program.poll() is None and not (tmp_path / "data" / "import.json").exists():
            pass
        program.kill()
    status, out, err = run(sources, "hdf5", tmp_path / "data", "", 0)
    assert (status, out.strip()) == (0, "done"), err
    assert files(tmp_path / "data") == whole["hdf5"]


def test_two_at_a_time(sources, tmp_path):
    """The second one is told so."""
    code = """
import time
from engram.datasets import from_hdf5, importing
write = importing._Import._write
def slow(self, block):
    print("writing")
    time.sleep(1000)
importing._Import._write = slow
from_hdf5(source, directory)
"""
    program = fresh.start(code, source=str(sources["hdf5"]), directory=str(tmp_path / "data")).until("writing")
    from engram.datasets import from_hdf5

    with pytest.raises(StoreInUse, match="is in use, by another process"):
        from_hdf5(sources["hdf5"], tmp_path / "data")
    program.kill()
    assert len(from_hdf5(sources["hdf5"], tmp_path / "data")) == sum(LENGTHS)


def test_memory_does_not_grow_with_the_data(tmp_path):
    """Four times the rows take no more of it."""
    import h5py

    code = """
import re
from pathlib import Path
from engram.datasets import from_hdf5

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
from_hdf5(source, directory).close()
print(status("VmHWM") - before)
"""
    grown = []
    for times in (1, 4):
        n = 200_000 * times
        with h5py.File(tmp_path / f"{times}.hdf5", "w") as file:
            file["observations"] = np.zeros((n, 64), np.float32)
            file["rewards"] = np.ones(n, np.float32)
            file["timeouts"] = np.arange(n) % 1000 == 999
        grown.append(int(fresh.run(code, source=str(tmp_path / f"{times}.hdf5"), directory=str(tmp_path / f"{times}"))))
    assert grown[1] < 120e6  # of 210 MB
    assert grown[1] < grown[0] + 40e6


def test_minari_rows_of_a_killed_import_keep_their_final_observations(sources, tmp_path):
    for at in (3, 7, 0):
        run(sources, "minari", tmp_path / "data", "between rows", at)
    with ReplayBuffer.open(tmp_path / "data", readonly=True, batch_size=512) as rb:
        state = flat(rb[:])["observation", "state"]
        ends = set((np.cumsum(LENGTHS) - 1).tolist())
        batch, info = rb.sample(return_info=True)
    rows = info["index"].tolist()
    assert ends & set(rows)
    for row, after in zip(rows, batch["next"]["observation"]["state"].tolist(), strict=True):
        assert row in ends or after == state[row + 1].tolist()


def test_exports_of_killed_programs_leave_nothing(sources, tmp_path):
    from_numpy(steps(LENGTHS), tmp_path / "store").close()
    with pytest.raises(ValueError, match="Malformed"):
        to_minari(tmp_path / "store", tmp_path / "no version")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
