"""Copies, states and the life of priorities."""

import copy
import pickle
import struct
import threading

import pytest
import torch
from tensordict import TensorDict

from engram import (
    CorruptStore,
    IncompatibleCheckpoint,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PriorityError,
    RandomSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram._support import progress
from tests import fresh
from tests.samplers.prioritized import ALPHA, BETA, EPS, leaves, made

# ---- life ------------------------------------------------------------------------------------------------------------


def test_rows_that_are_there_already():
    rb = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=32)
    rb.extend(torch.arange(3))
    previous = rb.set_sampler(PrioritizedSampler(5, 1.0, 1.0, 0.0))
    assert isinstance(previous, RandomSampler)
    assert leaves(rb).tolist() == [1, 1, 1, 0, 0]
    rb.update_priority(1, 8.0)
    rb.set_sampler(RandomSampler())
    rb.extend(torch.arange(1))  # kept up to date while nobody looks
    rb.set_sampler(PrioritizedSampler(5, 1.0, 1.0, 0.0))
    assert leaves(rb).tolist() == [1, 8, 1, 8, 0]


def test_a_long_scan_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(progress, "CHUNK", 3)
    monkeypatch.setattr(progress, "_SILENT_S", 0)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=64)
    rb.extend(torch.arange(8))
    rb.set_sampler(PrioritizedSampler(10, 1.0, 1.0, 0.0))
    assert leaves(rb).tolist() == [1.0] * 8 + [0.0] * 2
    assert "engram: giving rows priorities" in capsys.readouterr().err


def test_rows_written_during_a_scan(monkeypatch):
    monkeypatch.setattr(progress, "CHUNK", 1)
    rb = ReplayBuffer(storage=LazyTensorStorage(3_000), batch_size=64)
    rb.extend(torch.arange(1_000))
    stop = threading.Event()

    def write():
        while not stop.is_set():
            rb.extend(torch.arange(7))

    writer = threading.Thread(target=write)
    writer.start()
    rb.set_sampler(PrioritizedSampler(3_000, 1.0, 1.0, 0.0))
    stop.set()
    writer.join()
    assert leaves(rb)[: len(rb)].tolist() == [1.0] * len(rb)
    assert leaves(rb)[len(rb) :].tolist() == [0.0] * (3_000 - len(rb))


def test_an_interrupted_scan_hides_no_row(monkeypatch, tmp_path):
    scanned = []

    def interrupt(pieces, _):
        scanned.append(next(iter(pieces)))
        raise KeyboardInterrupt

    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path), batch_size=64)
    rb.extend(torch.arange(8))
    with monkeypatch.context() as patch:
        patch.setattr(progress, "CHUNK", 3)
        patch.setattr(progress, "watch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rb.set_sampler(PrioritizedSampler(10, 1.0, 1.0, 0.0))
    assert scanned == [7]
    rb.set_sampler(PrioritizedSampler(10, 1.0, 1.0, 0.0))
    assert leaves(rb).tolist() == [1.0] * 8 + [0.0] * 2


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_copies(storage, how):
    rb = made(storage)
    rb.update_priority(torch.arange(10), torch.arange(10.0))
    rb.sampler.beta = 0.8
    other = how(rb)
    assert torch.equal(leaves(other), leaves(rb))
    assert (other.sampler.alpha, other.sampler.beta) == (ALPHA, 0.8)
    assert other.sampler.default_priority == 9.0
    other.update_priority(0, 4.0)
    assert not torch.equal(leaves(other), leaves(rb))
    torch.manual_seed(0)
    rb.update_priority(0, 4.0)
    drawn = rb.sample()
    torch.manual_seed(0)
    assert torch.equal(other.sample(), drawn)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_priority_of_zero_is_copied(storage, how):
    rb = made(storage, rows=4, alpha=1.0, eps=0.0)
    rb.update_priority(torch.tensor([1, 2]), torch.tensor([0.0, 3.0]))
    rb.sampler.alpha = 0.5
    other = how(how(rb))
    assert leaves(other).tolist() == leaves(rb).tolist()
    assert leaves(other)[:4].tolist() == [1, 0, 3**0.5, 1]
    assert not other.sampler.priorities().leaves(10).signbit().any()
    other.extend(list(torch.arange(7)) if storage is ListStorage else torch.arange(7))
    assert leaves(other)[1] == 0  # row 0 was the last one
    state = other.sampler.state_dict()
    other.update_priority(1, 2.0)
    other.sampler.load_state_dict(state)
    assert leaves(how(other))[1] == 0


def test_a_directory_keeps_priorities(tmp_path):
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=ALPHA, beta=BETA, storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "s"), batch_size=16
    )
    rb.extend(TensorDict({"a": torch.arange(12)}, [12]))
    rb.update_priority(torch.arange(12), torch.rand(12))
    rb.sampler.beta = 0.9
    before = rb.sampler.state_dict()
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "s")
    assert type(rb) is TensorDictPrioritizedReplayBuffer
    after = rb.sampler.state_dict()
    assert torch.equal(after.pop("leaves"), before.pop("leaves"))
    assert after == before
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    assert leaves(rb)[12:14].tolist() == pytest.approx([rb.sampler.default_priority**ALPHA] * 2)
    rb.close()
    with pytest.raises(IncompatibleStore, match="eps"):
        ReplayBuffer.open(tmp_path / "s", sampler=PrioritizedSampler(20, ALPHA, BETA, eps=0.5))
    rb = ReplayBuffer.open(tmp_path / "s", sampler=PrioritizedSampler(20, 1.0, 0.1))
    assert (rb.sampler.alpha, rb.sampler.beta) == (1.0, 0.1)
    rb.close()


def test_priorities_after_a_kill(tmp_path):
    program = fresh.start(
        """
        import torch
        from engram import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
        rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=folder), sampler=PrioritizedSampler(8, 1.0, 1.0, 0.0))
        rb.extend(torch.arange(6))
        rb.update_priority(torch.arange(1, 6), torch.arange(1.0, 6.0))
        print("ready", flush=True)
        while True: pass
        """,
        folder=str(tmp_path / "s"),
    )
    program.until("ready").kill()
    rb = ReplayBuffer.open(tmp_path / "s", batch_size=32)
    assert leaves(rb).tolist() == [1, 1, 2, 3, 4, 5, 0, 0]
    assert max(rb.sample().tolist()) <= 5
    rb.close()


def test_another_kind_of_file_is_refused(tmp_path):
    rb = made(lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "s"))
    rb.close()
    path = tmp_path / "s" / ".engram" / "indexes" / "main" / "priorities"
    good = path.read_bytes()
    for content, message in ((good[:-8], "of another size"), (b"x" * 8 + good[8:], "not priorities"), (b"", "header")):
        path.write_bytes(content)
        with pytest.raises(IncompatibleStore, match=message):
            ReplayBuffer.open(tmp_path / "s")
    path.write_bytes(good)
    ReplayBuffer.open(tmp_path / "s").close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1.0])
@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_leaf_that_is_none_is_an_error_when_it_is_drawn(tmp_path, value, opened):
    rb = made(lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "s"), alpha=1.0)
    if opened == "after":
        rb.close()
    with open(tmp_path / "s" / ".engram" / "indexes" / "main" / "priorities", "r+b") as file:
        file.seek(4096)
        file.write(struct.pack("=d", value))
    if opened == "after":
        rb = ReplayBuffer.open(tmp_path / "s", sampler=PrioritizedSampler(10, 1.0, BETA, EPS))

    def draw():
        for _ in range(100):
            _, info = rb.sample(64, return_info=True)
            assert torch.isfinite(info["priority_weight"]).all()

    with pytest.raises(CorruptStore, match="priorities: expected finite leaves"):
        draw()
    with pytest.raises(CorruptStore, match="leaves"):
        rb.state_dict()
    rb.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_sum_that_is_none_is_an_error_when_the_store_is_opened(tmp_path, value):
    rb = made(lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "s"), alpha=1.0)
    rows = rb.storage.max_size
    rb.close()
    path = tmp_path / "s" / ".engram" / "indexes" / "main" / "priorities"
    nodes, at = rows, 4096
    while nodes > 8:  # sums of each level, padded to lines
        at += -(-nodes // 8) * 64
        nodes = -(-nodes // 8)
    at += -(-nodes // 8) * 64
    raw = bytearray(path.read_bytes())
    assert struct.unpack_from("=d", raw, at)[0] > 0
    struct.pack_into("=d", raw, at, value)
    path.write_bytes(raw)
    with pytest.raises(CorruptStore, match="priorities: expected a sum"):
        ReplayBuffer.open(tmp_path / "s")


def test_an_index_of_a_kind_that_is_not_known(tmp_path):
    made(lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "s")).close()
    (tmp_path / "s" / ".engram" / "indexes" / "main" / "something").write_bytes(b"x")
    with pytest.raises(IncompatibleStore, match="newer engram"):
        ReplayBuffer.open(tmp_path / "s")


def test_whoever_writes_keeps_the_priorities_of_a_directory(tmp_path):
    rb = made(lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "s"), rows=4, alpha=1.0, eps=0.0)
    rb.update_priority(torch.arange(4), 5.0)
    rb.update_priority(0, 2.0)
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "s", sampler=RandomSampler())
    rb.extend(torch.arange(7))  # rows 4 to 9, and 0
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "s", sampler=PrioritizedSampler(10, 1.0, 1.0, 0.0))
    assert leaves(rb).tolist() == [5.0] * 10
    rb.close()


def test_state_dict():
    rb, other = made(alpha=0.3), made()
    rb.update_priority(torch.arange(10), torch.arange(10.0))
    state = rb.sampler.state_dict()
    state["leaves"][0] += 0  # a copy
    other.sampler.load_state_dict(state)
    assert torch.equal(leaves(other), leaves(rb))
    assert (other.sampler.alpha, other.sampler.default_priority) == (0.3, 9.0)
    other.sampler.alpha = 0.7
    other.sampler.load_state_dict(state)  # which leaves what was set
    assert torch.allclose(leaves(other), (torch.arange(10.0, dtype=torch.float64) + rb.sampler.eps) ** 0.7)
    assert (other.sampler.alpha, other.sampler.default_priority) == (0.7, 9.0)
    before = leaves(other)
    for change, error in (
        ({"eps": 1.0}, IncompatibleCheckpoint),
        ({"max_priority_within_buffer": True}, IncompatibleCheckpoint),
        ({"leaves": torch.zeros(3)}, TypeError),
        ({"leaves": torch.zeros(11, dtype=torch.float64)}, IncompatibleCheckpoint),
        ({"highest": 1e999}, ValueError),
        ({"highest": "9"}, TypeError),
        ({"leaves": torch.full((10,), -1.0, dtype=torch.float64)}, PriorityError),
        ({"leaves": torch.full((10,), 1e300, dtype=torch.float64)}, PriorityError),
        ({"alpha": -1.0}, ValueError),
        ({"more": 1}, KeyError),
    ):
        with pytest.raises(error):
            other.sampler.load_state_dict({**state, **change})
        assert torch.equal(leaves(other), before)
    with pytest.raises(RuntimeError, match="expected a storage with rows"):
        made(rows=0, alpha=0.3).sampler.load_state_dict(state)


def test_buffers_by_their_names():
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=0.5, eps=0.0, dtype=torch.float64, batch_size=4)
    assert isinstance(rb.storage, ListStorage)
    rb.extend([torch.tensor(1.0), torch.tensor(2.0)])
    _, info = rb.sample(return_info=True)
    assert info["priority_weight"].dtype is torch.float64
    assert rb.sampler.alpha == 1.0
    for kind in (PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer):
        with pytest.raises(TypeError, match="expected alpha and beta"):
            kind(beta=1.0)
        with pytest.raises(TypeError, match="made of alpha and beta"):
            kind(alpha=1.0, beta=1.0, sampler=RandomSampler())
    assert isinstance(TensorDictPrioritizedReplayBuffer(alpha=1, beta=1), TensorDictReplayBuffer)


def test_repr_makes_it_again():
    sampler = PrioritizedSampler(7, 0.5, 0.25, index="x")
    config = sampler.config()
    assert PrioritizedSampler.from_config(config).config() == config
    assert "alpha=0.5" in repr(sampler)


def test_exponents_of_the_buffer_are_those_of_its_sampler():
    rb = TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=LazyTensorStorage(20), batch_size=4)
    rb.extend(TensorDict({"a": torch.arange(12)}, [12]))
    rb.beta, rb.alpha = 1.0, 0.9
    assert (rb.sampler.beta, rb.sampler.alpha) == (rb.beta, rb.alpha) == (1.0, 0.9)
    with pytest.raises(ValueError, match="beta: expected"):
        rb.beta = -1.0
    uniform = ReplayBuffer(storage=LazyTensorStorage(20))
    with pytest.raises(AttributeError, match="'RandomSampler' object has no attribute 'beta'"):
        uniform.beta = 1.0
    assert not hasattr(uniform, "beta")
    assert "beta" not in vars(uniform.sampler)
