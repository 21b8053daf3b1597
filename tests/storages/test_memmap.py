"""Folders of memory-mapped files: whose they are, when they go, who else can read them."""

import copy
import gc
import json
import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict

from engram import LazyMemmapStorage, ReplayBuffer, StoreInUse, TensorDictReplayBuffer
from tests.fresh import run, start


def td(start, n):
    number = torch.arange(start, start + n)
    return TensorDict({"a": number, "next": {"b": number[:, None] * 2.0}}, batch_size=[n])


def filled(scratch_dir, n=3, **options):
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=scratch_dir, **options))
    rb.extend(td(0, n), lane=0)
    return rb


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


# ---- temporary folders -----------------------------------------------------------------------------------------------


def test_temporary_folders_go_when_the_buffer_is_closed(temporary):
    rb = filled(None)
    (folder,) = temporary.iterdir()
    assert rb.storage.scratch_dir == folder
    assert folder.name.startswith("engram-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    rb.close()
    assert everything(temporary) == []
    rb.close()
    assert rb.storage.cleanup() is False


def test_temporary_folders_go_when_the_buffer_is_collected(temporary):
    rb = filled(None)
    rb.sample(2)
    assert len(list(temporary.iterdir())) == 1
    del rb
    gc.collect()
    assert everything(temporary) == []


def test_temporary_folders_are_made_by_the_first_write(temporary):
    storage = LazyMemmapStorage(5)
    assert storage.scratch_dir is None
    assert everything(temporary) == []
    storage.close()


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "1 / 0", "os.kill(os.getpid(), signal.SIGINT)", "del rb"])
def test_temporary_folders_go_when_the_program_ends(tmp_path, ending):
    program = start(
        f"""
        import os, signal, sys, tempfile, torch
        tempfile.tempdir = place
        from engram import LazyMemmapStorage, ReplayBuffer
        rb = ReplayBuffer(storage=LazyMemmapStorage(5))
        rb.extend(torch.arange(3))
        print(len(os.listdir(place)))
        sys.stdout.flush()
        {ending}
        """,
        place=str(tmp_path),
    )
    program.wait()
    assert program.out == "1\n"
    assert everything(tmp_path) == []


def test_forked_children_remove_nothing(tmp_path):
    out = run(
        """
        import gc, os, sys, tempfile, torch
        tempfile.tempdir = place
        from engram import LazyMemmapStorage, ReplayBuffer
        rb = ReplayBuffer(storage=LazyMemmapStorage(5))
        rb.extend(torch.arange(3))
        for way in ("close", "cleanup", "collect", "exit"):
            pid = os.fork()
            if pid == 0:
                if way == "close":
                    rb.close()
                elif way == "cleanup":
                    assert rb.storage.cleanup() is False
                elif way == "collect":
                    del rb
                    gc.collect()
                if way == "exit":
                    sys.exit(0)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0, way
            assert len(os.listdir(place)) == 1, way
        rb.extend(torch.arange(3))
        print(len(rb), len(os.listdir(place)))
        """,
        place=str(tmp_path),
    )
    assert out == "5 1"
    assert everything(tmp_path) == []


def test_a_copy_keeps_a_temporary_folder_alive(temporary):
    rb = filled(None)
    twin = copy.deepcopy(rb.storage)
    del rb
    gc.collect()
    assert len(list(temporary.iterdir())) == 1
    assert twin[:]["a"].tolist() == [0, 1, 2]
    del twin
    gc.collect()
    assert everything(temporary) == []


# ---- folders of the user's -------------------------------------------------------------------------------------------

PARTS = [".engram", "a.memmap", "meta.json", "next"]


@pytest.mark.parametrize("way", ["close", "collect", "exit"])
def test_folders_of_the_users_are_never_removed(tmp_path, way):
    folder = tmp_path / "deep" / "store"
    if way == "exit":
        run(
            """
            import torch
            from engram import LazyMemmapStorage, ReplayBuffer
            from tensordict import TensorDict
            rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
            rb.extend(TensorDict({"a": torch.arange(3), "next": {"b": torch.zeros(3)}}, [3]))
            """,
            folder=str(folder),
        )
    else:
        rb = filled(str(folder))
        if way == "close":
            rb.close()
        del rb
        gc.collect()
    assert sorted(os.listdir(folder)) == PARTS
    rb = ReplayBuffer.open(folder)
    assert rb.storage.store.repair is None
    assert rb[:]["a"].tolist() == [0, 1, 2]
    rb.close()


@pytest.mark.parametrize(
    ("auto_cleanup", "scratch", "stays"),
    [(True, True, False), (False, False, True), (None, True, True), (None, False, False)],
)
def test_auto_cleanup(tmp_path, temporary, auto_cleanup, scratch, stays):
    rb = filled(tmp_path / "store" if scratch else None, auto_cleanup=auto_cleanup)
    folder = rb.storage.scratch_dir
    assert folder.exists()
    rb.close()
    assert folder.exists() == stays
    if stays:
        assert len(ReplayBuffer.open(folder)) == 3


def test_auto_cleanup_when_collected(tmp_path):
    rb = filled(tmp_path / "store", auto_cleanup=True)
    del rb
    gc.collect()
    assert everything(tmp_path) == []


@pytest.mark.parametrize("way", ["auto_cleanup", "cleanup", "existsok"])
def test_files_that_are_not_the_stores_stay(tmp_path, way):
    (tmp_path / "next").mkdir()
    for name in ("mine.txt", "next/mine.txt", "b.memmap"):
        (tmp_path / name).write_text("mine")
    rb = filled(tmp_path, auto_cleanup=way == "auto_cleanup" or None)
    if way == "cleanup":
        assert rb.storage.cleanup() is True
    rb.close()
    if way == "existsok":
        rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True))
        rb.extend({"z": torch.arange(2)})
        assert rb.storage.cleanup() is True
    assert everything(tmp_path) == ["b.memmap", "mine.txt", "next", "next/mine.txt"]
    assert {(tmp_path / name).read_text() for name in ("b.memmap", "mine.txt", "next/mine.txt")} == {"mine"}


def test_cleanup(tmp_path):
    storage = LazyMemmapStorage(5, scratch_dir=tmp_path / "store")
    assert storage.cleanup() is False
    rb = ReplayBuffer(storage=storage)
    rb.extend(td(0, 3))
    view = rb[:]
    assert storage.cleanup() is True
    assert everything(tmp_path) == []
    assert storage.cleanup() is False
    assert view["a"].tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="was closed"):
        rb.extend(td(0, 3))


def test_cleanup_leaves_a_store_that_somebody_else_has_opened(tmp_path):
    rb = filled(tmp_path / "store")
    rb.close()
    other = ReplayBuffer.open(tmp_path / "store")
    with pytest.raises(StoreInUse):
        rb.storage.cleanup()
    assert other[:]["a"].tolist() == [0, 1, 2]
    other.close()
    assert rb.storage.cleanup() is True


# ---- folders that hold something already -----------------------------------------------------------------------------


def test_a_folder_that_holds_a_store_is_refused_at_once(tmp_path):
    filled(tmp_path / "store").close()
    before = everything(tmp_path)
    says = r"scratch_dir='.*' already holds a store\. Use ReplayBuffer\.open\('.*'\) to go on with it\. .*existsok=True erases it"
    with pytest.raises(RuntimeError, match=says):
        LazyMemmapStorage(5, scratch_dir=tmp_path / "store")
    assert everything(tmp_path) == before


def test_a_folder_that_came_to_hold_a_store_is_refused_at_the_first_write(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / "store"))
    filled(tmp_path / "store").close()
    with pytest.raises(
        RuntimeError, match=r"already holds a store\. Use ReplayBuffer\.open\(.*existsok=True erases it"
    ):
        rb.extend(td(0, 3))
    assert not rb.storage.initialized
    assert len(ReplayBuffer.open(tmp_path / "store")) == 3


@pytest.mark.parametrize("name", ["a.memmap", "meta.json", "next/b.memmap", "next/meta.json"])
def test_files_of_the_same_names_are_refused(tmp_path, name):
    path = tmp_path / "store" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / "store"))
    says = rf"expected a folder without data of the same name, found '.*{name}'\. Choose another .*existsok=True erases"
    with pytest.raises(RuntimeError, match=says):
        rb.extend(td(0, 3))
    assert path.read_text() == "mine"
    assert not rb.storage.initialized
    assert not (tmp_path / "store" / ".engram").exists()


def test_another_tensordict_in_the_folder_is_refused(tmp_path):
    TensorDict({"other": torch.arange(4)}, [4]).memmap(tmp_path)
    before = everything(tmp_path)
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path))
    with pytest.raises(RuntimeError, match=r"found '.*meta\.json'"):
        rb.extend(td(0, 3))
    assert everything(tmp_path) == before
    assert TensorDict.load_memmap(tmp_path)["other"].tolist() == [0, 1, 2, 3]


def test_existsok_replaces(tmp_path):
    filled(tmp_path).close()
    storage = LazyMemmapStorage(7, scratch_dir=tmp_path, existsok=True)
    assert len(ReplayBuffer.open(tmp_path)) == 3  # until the first write
    gc.collect()
    rb = ReplayBuffer(storage=storage)
    rb.extend({"a": torch.zeros(2), "c": torch.ones(2)})
    assert rb[:]["a"].tolist() == [0.0, 0.0]
    assert everything(tmp_path) == sorted(
        [".engram", "a.memmap", "c.memmap", "meta.json"]
        + [f".engram/{name}" for name in ("alive", "buffer.json", "control", "maker", "store.json", "tickets")]
    )
    rb.close()
    rb = ReplayBuffer.open(tmp_path)
    assert (rb.storage.max_size, list(rb[:])) == (7, ["a", "c"])
    rb.close()


def test_existsok_replaces_loose_files_and_damaged_stores(tmp_path):
    (tmp_path / "a.memmap").write_text("x")
    rb = filled(tmp_path, existsok=True)
    assert rb[:]["a"].tolist() == [0, 1, 2]
    rb.close()
    (tmp_path / ".engram" / "store.json").write_text("{}")
    rb = filled(tmp_path, existsok=True)
    assert rb[:]["a"].tolist() == [0, 1, 2]
    rb.close()


def test_existsok_does_not_replace_a_store_in_use(tmp_path):
    rb = filled(tmp_path)
    other = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True))
    with pytest.raises(StoreInUse):
        other.extend(td(0, 2))
    assert rb[:]["a"].tolist() == [0, 1, 2]
    said = run(
        """
        import torch
        from engram import *
        rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder, existsok=True))
        try:
            rb.extend(torch.zeros(3))
        except StoreInUse:
            print("in use")
        """,
        folder=str(tmp_path),
    )
    assert said == "in use"
    rb.add(td(9, 1)[0])
    rb.close()
    assert ReplayBuffer.open(tmp_path)[:]["a"].tolist() == [0, 1, 2, 9]


def test_a_scratch_dir_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/below", "file/deep/below"):
        with pytest.raises(NotADirectoryError, match=r"scratch_dir: expected a folder, found a file.*file'"):
            LazyMemmapStorage(5, scratch_dir=tmp_path / name)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(OSError, match="link"):
        filled(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
    assert (tmp_path / "file").read_text() == "mine"


def test_relative_folders_mean_the_folder_at_construction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir="store"))
    monkeypatch.chdir("/")
    rb.extend(td(0, 3))
    assert sorted(os.listdir(tmp_path / "store")) == PARTS
    rb.close()


# ---- read by others --------------------------------------------------------------------------------------------------


def test_tensordict_reads_a_store(tmp_path):
    rb = filled(tmp_path, 4)
    rb.close()
    loaded = TensorDict.load_memmap(tmp_path)
    assert loaded.batch_size == (5,)
    assert loaded["a"].tolist() == [0, 1, 2, 3, 0]
    assert loaded["next", "b"].tolist() == [[0], [2], [4], [6], [0]]
    assert set(loaded.keys()) == {"a", "next"}
    assert loaded["next"].batch_size == (5,)


def test_other_forms_are_tensordicts_on_disk(tmp_path):
    for i, (data, key) in enumerate(
        [
            (torch.arange(3), "_-single-tensor-_"),
            ((torch.arange(3), torch.zeros(3)), "0"),
            ({"x": (torch.zeros(3), torch.arange(3))}, ("x", "1")),
        ]
    ):
        rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / str(i)))
        rb.extend(data)
        rb.close()
        assert TensorDict.load_memmap(tmp_path / str(i)).get(key).tolist() == [0, 1, 2, 0, 0]


def test_the_description_says_what_is_there(tmp_path):
    filled(tmp_path, lanes=2).close()
    told = json.loads((tmp_path / ".engram" / "store.json").read_text())
    assert (told["format"], told["version"], told["capacity"], told["lanes"]) == ("engram.store", [2, 4], 4, 2)
    assert told["fields"] == [
        {"key": ["a"], "dtype": "int64", "shape": []},
        {"key": ["next", "b"], "dtype": "float32", "shape": [1]},
    ]


# ---- views and samples -----------------------------------------------------------------------------------------------


def test_slices_show_the_files_and_are_locked(tmp_path):
    rb = filled(tmp_path)
    view = rb[:]
    assert view.is_locked
    assert isinstance(view["a"], MemoryMappedTensor)
    with pytest.raises(RuntimeError, match="lock"):
        view["new"] = torch.zeros(3)
    batch = rb.sample(4)
    assert not batch.is_locked
    assert type(batch["a"]) is torch.Tensor
    assert not rb[1].is_locked
    rb.extend(td(10, 1))
    assert rb[:]["a"].tolist() == [0, 1, 2, 10]
    rb.close()


def test_samples_are_plain_tensors(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path))
    rb.extend(td(0, 3))
    for batch in (rb.sample(4), rb[[0, 1]], rb[2]):
        assert {type(value) for value in batch.values(include_nested=True, leaves_only=True)} == {torch.Tensor}
    rb.close()


def test_a_folder_is_opened_by_any_path(tmp_path):
    with ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "store")) as rb:
        rb.extend(torch.arange(4))
    for directory in (tmp_path / "store", str(tmp_path / "store"), os.fsencode(tmp_path / "store")):
        storage = LazyMemmapStorage.open(directory)
        assert len(storage) == 4
        storage.close()
    with pytest.raises(TypeError, match=r"LazyMemmapStorage\.open: directory: expected a path, got int\."):
        LazyMemmapStorage.open(3)
