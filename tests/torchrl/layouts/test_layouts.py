"""Storages saved with each observation once: what is loaded is what was saved, bit by bit, and wrong data is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import engram
from engram import (
    CorruptCheckpoint,
    Flat2TED,
    FlatStorageCheckpointer,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Nested2TED,
    ReplayBuffer,
    StorageCheckpointerBase,
    TED2Flat,
    TED2Nested,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)
from tests.torchrl.layouts.steps import episodes, in_columns, same

KINDS = ["Flat", "Nested"]


def checkpointer(kind, **arguments):
    return getattr(engram, f"{kind}StorageCheckpointer")(**arguments)


def buffer(capacity=10, kind=None, storage=LazyTensorStorage, **arguments):
    own = {} if kind is None else {"checkpointer": checkpointer(kind)}
    return TensorDictReplayBuffer(storage=storage(capacity, **arguments), batch_size=2, **own)


@pytest.fixture(params=KINDS)
def kind(request):
    checkpointer(request.param)
    return request.param


# ---- round trips -----------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_come_back_bit_by_bit(tmp_path, kind, data):
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6), label="lengths")
    capacity = data.draw(st.integers(1, 20), label="capacity")
    width = data.draw(st.integers(1, 3), label="columns")
    ndim = 1 if width == 1 else 2
    steps = episodes(lengths, agents=True) if ndim == 1 else in_columns(lengths, width)
    rb, other, theirs = (buffer(capacity * width, k, ndim=ndim) for k in (kind, None, None))
    for i in range(sum(lengths)):  # one at a time: a batch larger than the storage would keep its end alone
        rb.extend(steps[i : i + 1] if ndim == 1 else steps[:, i : i + 1])
    target = tmp_path / "dump"
    shutil.rmtree(target, ignore_errors=True)
    rb.dumps(target)
    other.loads(target)
    assert same(other[:], rb[:])
    checkpointer(kind).loads(theirs.storage, target / "storage")
    assert same(theirs[:], rb[:])
    more = episodes([2], seed=9) if ndim == 1 else in_columns([2], width, seed=9)
    if ndim == 1:
        more = more.update(episodes([2], seed=9, agents=True))
    assert torch.equal(rb.extend(more), other.extend(more))
    assert same(other[:], rb[:])


def without_engram(folder):
    """What TorchRL would have written: the files without engram's state beside them."""
    shutil.rmtree(folder / ".engram")


@pytest.mark.parametrize("lengths", [(3, 2), (4, 4, 2), (5, 4, 5)])
def test_the_files_alone_say_all_rows(tmp_path, kind, lengths):
    rb = buffer(10, kind)
    for step in episodes(lengths):
        rb.add(step)
    rb.storage.dumps(tmp_path / "storage")
    without_engram(tmp_path / "storage")
    for target in (LazyTensorStorage(10), LazyMemmapStorage(10, scratch_dir=tmp_path / "store")):
        checkpointer(kind).loads(target, tmp_path / "storage")
        read = TensorDictReplayBuffer(storage=target)
        assert same(read[:], rb[:])
        read.extend(episodes([1], seed=5))
        assert read.writer is not None
    rb.extend(episodes([1], seed=5))
    assert same(read[:], rb[:])


def test_a_directory_and_shared_rows(tmp_path, kind):
    rb = buffer(10, kind, storage=LazyMemmapStorage, scratch_dir=tmp_path / "store")
    rb.extend(episodes([4, 3, 2]))
    rb.dumps(tmp_path / "dump")
    shared = buffer(10)
    shared.share()
    shared.loads(tmp_path / "dump")
    assert same(shared[:], rb[:])
    shared.storage.checkpointer = checkpointer(kind)
    shared.dumps(tmp_path / "again")
    rb.empty()
    rb.loads(tmp_path / "again")
    assert same(shared[:], rb[:])


def test_priorities_and_the_generator_come_back(tmp_path, kind):
    def made():
        return TensorDictPrioritizedReplayBuffer(
            alpha=0.7,
            beta=0.5,
            storage=LazyTensorStorage(10),
            batch_size=4,
            checkpointer=checkpointer(kind),
            generator=torch.Generator().manual_seed(3),
        )

    rb, other = made(), made()
    rb.extend(episodes([4, 3, 2]))
    rb.update_priority(torch.arange(9), torch.arange(1.0, 10.0))
    rb.sample()
    rb.dumps(tmp_path / "dump")
    other.loads(tmp_path / "dump")
    assert torch.equal(rb.sample()["number"], other.sample()["number"])


def test_observations_are_there_once(tmp_path):
    rb = buffer(10, "Flat")
    rb.extend(episodes([4, 3, 2]))
    rb.dumps(tmp_path / "dump")
    flat = TensorDict.load_memmap(tmp_path / "dump" / "storage")
    assert flat["observation"].shape == (10 + 3, 3)
    assert "next" not in flat.keys()
    expected = torch.cat([rb[:]["observation"][:4], rb[:]["next", "observation"][3:4], rb[:]["observation"][4:7]])
    assert torch.equal(flat["observation"][:8], expected)
    assert (flat.get_non_tensor("shift"), flat.get_non_tensor("is_full")) == (9, False)


def test_the_command_verifies_layouts(tmp_path, kind):
    from engram.saved.inspection import verify

    rb = buffer(10, kind)
    rb.extend(episodes([4, 3]))
    rb.dumps(tmp_path / "dump")
    assert verify(tmp_path / "dump").problems == []
    victim = tmp_path / "dump" / "storage" / "action.memmap"
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.chmod(0o600)
    victim.write_bytes(raw)
    assert [problem.path for problem in verify(tmp_path / "dump").problems] == [victim]
    stored = rb[:].clone()
    with pytest.raises(CorruptCheckpoint, match=victim.name):
        rb.loads(tmp_path / "dump")
    assert same(rb[:], stored)


def test_other_flags_and_rewards(tmp_path, kind):
    steps = episodes([4, 3])
    steps["next", "points"] = steps["next", "reward"].clone()
    steps["over"] = torch.zeros(7, 1, dtype=torch.bool)
    steps["next", "over"] = steps["next", "done"].clone()
    own = {"done_keys": ("done", "terminated", "truncated", "over"), "reward_keys": ("reward", "points")}
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), checkpointer=checkpointer(kind, **own))
    rb.extend(steps)
    rb.dumps(tmp_path / "dump")
    other = buffer()
    other.loads(tmp_path / "dump")
    assert same(other[:], rb[:])
    with pytest.raises(IncompatibleCheckpoint, match="'over'|'points'"):
        checkpointer(kind).dumps(rb.storage, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def over(steps):
    """Steps whose trajectories end with ``over``."""
    steps["over"], steps["next", "over"] = steps["done"], steps["next", "done"]
    return steps.exclude("done", ("next", "done"))


def test_other_names_of_the_end_and_of_what_is_noted(tmp_path):
    own = {"shift_key": "oldest", "is_full_key": "all"}
    flags = ("over", "terminated", "truncated")
    hooked = TensorStorageCheckpointer()
    hooked.register_save_hook(TED2Flat(("next", "over"), done_keys=flags, **own))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), checkpointer=hooked)
    rb.extend(over(episodes([4, 3])))
    rb.dumps(tmp_path / "dump")
    other = buffer()
    other.loads(tmp_path / "dump")
    assert same(other[:], rb[:])


# ---- what cannot be saved ----------------------------------------------------------------------------------------------------


def multi_step(steps):
    steps["next", "observation"][:3] = steps["observation"][2:5]
    return steps


def flag_at_the_root(steps):
    steps["terminated"][2] = True
    return steps


WRONG = {
    "multi-step": (multi_step, r"row 0: expected \('next', 'observation'\) to be \('observation',\) of row 1"),
    "flag": (flag_at_the_root, r"\('terminated',\) False in every row"),
    "no done": (lambda steps: steps.exclude(("next", "done")), r"expected the field \('next', 'done'\)"),
    "no next": (lambda steps: steps.exclude("next"), r"expected the field \('next', 'done'\)"),
    "alone": (lambda steps: steps.set(("next", "goal"), torch.zeros(7)), r"\[\('goal',\)\] both at the root"),
    "reward": (lambda steps: steps.set("reward", torch.zeros(7, 1)), r"rewards below \"next\" only"),
    "name": (lambda steps: steps.set("shift", torch.zeros(7)), "needs the names"),
    "shape": (lambda steps: steps.set(("next", "observation"), torch.zeros(7, 2)), "of the same shape and dtype"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_would_be_lost_is_refused(tmp_path, kind, change, message):
    rb = buffer(10, kind)
    rb.extend(episodes([4, 3]))
    rb.dumps(tmp_path / "dump")
    wrong = buffer(10, kind)
    wrong.extend(change(episodes([5, 2])))
    with pytest.raises(IncompatibleCheckpoint, match=message):
        wrong.dumps(tmp_path / "dump")
    other = buffer(10)
    other.loads(tmp_path / "dump")  # what lay there before still does
    assert same(other[:], rb[:])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "dump") == []


NAMES = ["shape", "device", "_type", ("nested", "shape"), ("meta.json", "a"), ("storage_metadata.json", "a")]


@pytest.mark.parametrize("key", [("shift", "a"), *NAMES, "observation.shape", "plain"], ids=str)
def test_a_field_is_saved_or_refused_whatever_its_name(tmp_path, kind, key):
    rb, other = buffer(10, kind), buffer(10)
    rb.extend(episodes([4, 3]).set(key, torch.arange(7)))
    kept = key == "plain" or (kind, key) == ("Flat", "observation.shape")
    if kept:
        rb.dumps(tmp_path / "dump")
        other.loads(tmp_path / "dump")
        assert same(other[:], rb[:])
    else:
        with pytest.raises(IncompatibleCheckpoint, match="Rename"):
            rb.dumps(tmp_path / "dump")
        assert list(tmp_path.iterdir()) == []


def test_storages_that_cannot_be_saved(tmp_path, kind):
    for storage, error in ((LazyTensorStorage(10), RuntimeError), (ListStorage(10), TypeError)):
        with pytest.raises(error, match="expected"):
            checkpointer(kind).dumps(storage, tmp_path / "a")
    with pytest.raises(RuntimeError, match="never written"):
        TensorStorageCheckpointer().dumps(LazyTensorStorage(10), tmp_path / "a")
    rb = buffer(10, kind, lanes=2)
    rb.extend(episodes([2]), lane=0)
    with pytest.raises(IncompatibleCheckpoint, match="one lane"):
        rb.dumps(tmp_path / "a")
    rb = buffer(10, kind)
    rb.extend(episodes([4, 4]))
    rb.empty()
    with pytest.raises(RuntimeError, match="empty"):
        rb.dumps(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_store_with_other_fields_is_not_changed(tmp_path, kind):
    rb = buffer(10, kind)
    rb.extend(episodes([4, 3]))
    rb.storage.dumps(tmp_path / "storage")
    without_engram(tmp_path / "storage")
    for steps, capacity in ((episodes([3]).exclude("action"), 10), (episodes([3]), 12)):
        other = buffer(capacity)
        other.extend(steps)
        before = other[:].clone()
        with pytest.raises(IncompatibleCheckpoint, match="expected"):
            checkpointer(kind).loads(other.storage, tmp_path / "storage")
        assert same(other[:], before)


# ---- damage ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["truncated", "missing", "empty", "noise"])
def test_damaged_files_are_refused(tmp_path, kind, change):
    rb = buffer(10, kind)
    rb.extend(episodes([4, 3]))
    rb.storage.dumps(tmp_path / "storage")
    without_engram(tmp_path / "storage")
    victim = tmp_path / "storage" / "done.memmap"
    raw = victim.read_bytes()
    victim.unlink()
    new = {"truncated": raw[: len(raw) // 2], "empty": b"", "noise": b"\x07" * len(raw)}
    if change in new:
        victim.write_bytes(new[change])
    before = rb[:].clone()
    with pytest.raises((CorruptCheckpoint, IncompatibleCheckpoint)):
        checkpointer(kind).loads(rb.storage, tmp_path / "storage")
    assert same(rb[:], before)


def test_a_folder_without_a_layout(tmp_path):
    (tmp_path / "empty").mkdir()
    for one in (FlatStorageCheckpointer(), TensorStorageCheckpointer()):
        with pytest.raises(IncompatibleCheckpoint, match="expected one saved flat or nested, found none"):
            one.loads(LazyTensorStorage(10), tmp_path / "empty")


# ---- hooks ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("save", "load"), [(TED2Flat, Flat2TED), (TED2Nested, Nested2TED)])
@pytest.mark.parametrize("lengths", [(3, 2), (4, 4, 2), (5, 4, 5)])
def test_hooks_of_a_buffer(tmp_path, save, load, lengths):
    rb, other = buffer(10), buffer(10)
    rb.register_save_hook(save())
    other.register_load_hook(load())
    for step in episodes(lengths):
        rb.add(step)
    rb.dumps(tmp_path / "dump")
    other.loads(tmp_path / "dump")
    assert same(other[:], rb[:])
    without_engram(tmp_path / "dump" / "storage")
    other.empty()
    other.storage.loads(tmp_path / "dump" / "storage")
    assert same(other[:], rb[:])


@pytest.mark.parametrize("columns", [(), (2,), (2, 3)])
@pytest.mark.parametrize(("shift", "full"), [(6, True), (2, True), (4, False)])
@pytest.mark.parametrize("nested", [False, True])
def test_hooks_called_by_hand(tmp_path, columns, shift, full, nested):
    width = torch.Size(columns).numel()
    steps = in_columns([3, 2, 1], width).transpose(0, 1).reshape(6, *columns)
    live = 6 if full else 4
    ring = steps[[(i - shift) % 6 for i in range(6)]].clone() if full else steps.clone()
    save, load = (TED2Nested(), Nested2TED()) if nested else (TED2Flat(), Flat2TED())
    save.shift, save.is_full = shift, full
    for path in (None, tmp_path / "files"):
        made = load(save(ring, path=path))
        assert made.batch_size == ring.batch_size
        assert same(made[:live], ring[:live])
    out = torch.zeros_like(ring)
    load(save(ring), out=out)
    assert same(out[:live], ring[:live])


def test_a_hook_needs_the_moment():
    with pytest.raises(RuntimeError, match="shift and is_full"):
        TED2Flat()(episodes([3]))


class Halved:
    """A hook that knows what it is told."""

    shift = is_full = None

    def __call__(self, data, path=None):
        assert isinstance(path, Path)
        return data.exclude("action").set("half", data["action"] / 2)


def doubled(data, out=None):
    assert out is None
    return data.exclude("half").set("action", data["half"] * 2)


def test_a_hook_of_ones_own(tmp_path):
    rb, other = buffer(10), buffer(10)
    hook = Halved()
    rb.register_save_hook(hook)
    rb.extend(episodes([4, 3]))
    rb.dumps(tmp_path / "dump")
    assert (hook.shift, hook.is_full) == (7, False)
    with pytest.raises(IncompatibleCheckpoint, match="register_load_hook"):
        other.loads(tmp_path / "dump")
    other.register_load_hook(doubled)
    other.loads(tmp_path / "dump")
    assert same(other[:], rb[:])
    rb.storage.dumps(tmp_path / "storage")
    other.storage.loads(tmp_path / "storage")
    assert same(other[:], rb[:])
    (tmp_path / "storage" / ".engram").rename(tmp_path / "aside")
    alone = buffer(10)
    alone.register_load_hook(doubled)
    alone.storage.loads(tmp_path / "storage")
    assert same(alone[:], rb[:])
    (tmp_path / "storage" / "other.pickle").write_bytes(b"")
    with pytest.raises(IncompatibleCheckpoint, match="never opened"):
        alone.storage.loads(tmp_path / "storage")


# ---- checkpointers of buffers ------------------------------------------------------------------------------------------------------


class OnesOwn(StorageCheckpointerBase):
    def dumps(self, storage, path):
        Path(path).write_text(str(len(storage)))

    def loads(self, storage, path):
        storage.empty(keep_write_count=int(Path(path).read_text()) > 0)


def test_a_checkpointer_is_given_in_three_ways(tmp_path):
    assert isinstance(
        ReplayBuffer(10, checkpointer=FlatStorageCheckpointer).storage.checkpointer, FlatStorageCheckpointer
    )
    storage = LazyTensorStorage(10)
    assert isinstance(storage.checkpointer, TensorStorageCheckpointer)
    storage.checkpointer = known = FlatStorageCheckpointer()
    assert storage.checkpointer is known
    storage.checkpointer = None
    assert storage.checkpointer.is_plain
    for wrong in (3, object()):
        with pytest.raises(TypeError, match="checkpointer"):
            storage.checkpointer = wrong
        with pytest.raises(TypeError, match="checkpointer"):
            ReplayBuffer(10, checkpointer=wrong)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), checkpointer=OnesOwn())
    rb.extend(episodes([4]))
    rb.storage.dumps(tmp_path / "length")
    assert (tmp_path / "length").read_text() == "4"
    rb.storage.loads(tmp_path / "length")
    assert len(rb) == 0
    with pytest.raises(TypeError, match="rb.storage.dumps"):
        rb.dumps(tmp_path / "dump")


def test_the_default_checkpointer_saves_what_the_storage_does(tmp_path):
    rb = buffer(10)
    rb.extend(episodes([4, 3]))
    TensorStorageCheckpointer().dumps(rb.storage, tmp_path / "a")
    assert rb.storage.checkpointer.is_plain
    rb.storage.dumps(tmp_path / "b")
    files = [
        {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "a", tmp_path / "b")
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "wrong", [{"done_keys": "done"}, {"reward_keys": (3,)}, {"done_keys": ((),)}], ids=["str", "int", "empty"]
)
def test_keys_that_are_none(kind, wrong):
    with pytest.raises(TypeError, match="expected"):
        checkpointer(kind, **wrong)
