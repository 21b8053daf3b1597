"""Lanes, more dimensions, data that exists already, threads, and what is said."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import engram
from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.fresh import run
from tests.storages.rows import Step, numbered, reopened, state
from tests.storages.test_structure import of_dtype, raw

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


# ---- lanes -----------------------------------------------------------------------------------------------------------


def test_lanes_are_rings_of_their_own(make):
    rb = ReplayBuffer(storage=make(9, lanes=3))
    assert rb.extend(numbered(0, 2), lane=2).tolist() == [6, 7]
    assert rb.extend(numbered(2, 4), lane=0).tolist() == [0, 1, 2, 0]
    assert rb.extend(numbered(6, 5), lane=torch.tensor([1, 2, 1, 2, 1])).tolist() == [3, 8, 4, 6, 5]
    assert rb[:]["a"].tolist() == [5, 3, 4, 6, 8, 10, 9, 1, 7]
    assert rb.storage.extent().seam == (1, 3, 7)
    assert rb.on_lane(1) is rb
    assert rb.add({"a": torch.tensor(99), "next": {"b": torch.zeros(1)}}) == 3
    rb = reopened(rb)
    assert rb.storage.extent().seam == (1, 4, 7)
    rb.close()


# ---- ndim > 1 --------------------------------------------------------------------------------------------------------


def vectorised(envs, steps, start=0):
    """``[envs, steps]``: number = 100 · env + step."""
    number = torch.arange(envs)[:, None] * 100 + torch.arange(start, start + steps)
    return TensorDict({"a": number, "b": number[..., None].float().expand(envs, steps, 2)}, batch_size=[envs, steps])


def test_columns_advance_together(make):
    storage = make(10, ndim=2)
    rb = ReplayBuffer(storage=storage)
    index = rb.extend(vectorised(3, 2))
    assert index.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert (storage.max_size, storage.columns, storage.shape) == (12, (3,), (2, 3))
    assert "max_size=10 asked" in repr(storage)
    assert (len(rb), rb.write_count) == (6, 2)
    grid = storage.grid()
    assert grid.batch_size == (3, 2)
    assert grid["a"].tolist() == [[0, 1], [100, 101], [200, 201]]
    assert grid["b"].shape == (3, 2, 2)
    rb.extend(vectorised(3, 3, 2))
    assert storage.grid()["a"][2].tolist() == [204, 201, 202, 203]
    batch, info = rb.sample(20, return_info=True)
    assert batch.batch_size == (20,)
    stored = storage.grid()["a"]
    assert torch.equal(batch["a"], stored[info["index"][1], info["index"][0]])
    rb = reopened(rb)
    assert rb.storage.grid()["a"][2].tolist() == [204, 201, 202, 203]
    assert rb[1].batch_size == (4,)
    assert (rb.storage.ndim, rb.storage.columns) == (2, (3,))
    rb.close()


def test_three_dimensions(make):
    storage = make(30, ndim=3)
    rb = ReplayBuffer(storage=storage)
    data = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    index = rb.extend({"a": data})
    assert index[:2].tolist() == [[0, 0, 0], [0, 0, 1]]
    assert (storage.max_size, storage.columns, storage.shape, len(rb)) == (30, (2, 3), (4, 2, 3), 24)
    assert torch.equal(storage.grid()["a"], data)
    slot = {"a": torch.arange(6).reshape(2, 3) + 1000}
    assert rb.add(slot).tolist() == [[4, i, j] for i in range(2) for j in range(3)]
    assert torch.equal(storage.grid()["a"][..., 4], slot["a"])


def test_other_columns_are_refused(make):
    storage = make(12, ndim=2)
    rb = ReplayBuffer(storage=storage)
    rb.extend(vectorised(3, 2))
    before = state(storage)
    for data, error, says in (
        (vectorised(4, 2), RuntimeError, r"expected columns \(3,\) as in the first write, got \(4,\)"),
        (vectorised(3, 2)[:, 0], RuntimeError, r"extend: data: expected .* 2 leading dimensions, got \[3\]"),
    ):
        with pytest.raises(error, match=says):
            rb.extend(data)
    with pytest.raises(RuntimeError, match=r"expected columns \(3,\) as in the first write, got \(2,\)"):
        rb.add(vectorised(2, 2)[:, 0])
    assert state(storage) == before


def test_flatten_shows_the_same_rows(make):
    storage = make(12, ndim=2)
    with pytest.raises(RuntimeError, match="nothing was ever written"):
        storage.flatten()
    rb = ReplayBuffer(storage=storage)
    rb.extend(vectorised(3, 2))
    flat = storage.flatten()
    assert (flat.ndim, flat.max_size, len(flat), flat.shape) == (1, 12, 6, (6,))
    assert flat[:]["a"].tolist() == [0, 100, 200, 1, 101, 201]
    flat[0] = flat[5].clone()
    assert storage.grid()["a"][0, 0] == 201
    assert flat.flatten() is flat
    assert make(5).flatten().ndim == 1


# ---- around data that exists -----------------------------------------------------------------------------------------


def test_storage_around_data_shares_its_memory():
    data = TensorDict({"a": torch.arange(4), "next": {"b": torch.zeros(4, 2)}}, batch_size=[4])
    storage = TensorStorage(data)
    rb = ReplayBuffer(storage=storage)
    assert (len(rb), storage.max_size, rb.write_count, storage.initialized) == (4, 4, 0, True)
    data["a"][2] = 50
    assert rb[2]["a"] == 50
    assert rb.extend(data[:1] + 7).tolist() == [0]
    assert data["a"].tolist() == [7, 1, 50, 3]
    assert rb[:]["next", "b"].data_ptr() == data["next", "b"].data_ptr()
    assert set(rb.sample(100)["a"].tolist()) == {7, 1, 50, 3}


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(4),
        (torch.arange(4), torch.zeros(4)),
        {"a": np.arange(4)},
        Step(torch.arange(4), torch.ones(4), batch_size=[4]),
    ],
)
def test_storage_around_other_data(data):
    rb = ReplayBuffer(storage=TensorStorage(data, 4))
    assert len(rb) == 4
    leaf = {torch.Tensor: lambda x: x, tuple: lambda x: x[0], dict: lambda x: x["a"], Step: lambda x: x.obs}[type(data)]
    assert leaf(rb[2]) == 2
    rb.add(rb[3])
    assert leaf(data)[0] == 3


def test_leaves_that_are_not_contiguous_are_copied():
    data = {
        "a": torch.arange(8).reshape(2, 4).t(),
        "b": torch.zeros(1).expand(4),
        "c": torch.ones(4, requires_grad=True),
    }
    storage = TensorStorage(data)
    storage[0] = {"a": torch.tensor([9, 9]), "b": torch.tensor(1.0), "c": torch.tensor(5.0)}
    assert data["a"][0].tolist() == [0, 4]
    assert data["b"].tolist() == [0, 0, 0, 0]
    assert data["c"][0] == 5
    assert not storage[:]["c"].requires_grad


def test_storage_around_slots_of_columns():
    data = torch.arange(12).reshape(4, 3)  # [time, columns]
    storage = TensorStorage(data, ndim=2)
    rb = ReplayBuffer(storage=storage)
    assert (storage.max_size, storage.columns, storage.shape, len(rb)) == (12, (3,), (4, 3), 12)
    assert torch.equal(storage.grid(), data.t())
    rb.extend(torch.full((3, 1), 77))
    assert data[0].tolist() == [77] * 3


@pytest.mark.parametrize(
    ("data", "options", "error", "says"),
    [
        (None, {}, ValueError, "expected data, got None"),
        (torch.zeros(4), {"max_size": 5}, ValueError, "max_size: expected 4, the size of the data, got 5"),
        (torch.zeros(4), {"lanes": 3}, ValueError, "lanes: expected a divisor of the 4 rows, got 3"),
        (torch.zeros(4), {"lanes": 5}, ValueError, "lanes: expected at most max_size=4, got 5"),
        (torch.zeros(0), {}, RuntimeError, "empty batch"),
        (torch.zeros(()), {}, TypeError, "scalar"),
        ({"a": "text"}, {}, TypeError, "'a': expected a tensor or an array"),
        ({"a": torch.zeros(4), "b": torch.zeros(5)}, {}, RuntimeError, "'a' has 4, field 'b' has 5"),
        (torch.zeros(4), {"compilable": "no"}, TypeError, "compilable: expected True or False"),
    ],
)
def test_data_that_no_storage_goes_around(data, options, error, says):
    with pytest.raises(error, match=says):
        TensorStorage(data, **options)


def test_devices():
    for device in ("cpu", torch.device("cpu"), "auto"):
        for storage in (LazyTensorStorage(5, device=device), TensorStorage(torch.arange(5), device=device)):
            ReplayBuffer(storage=storage).extend(torch.arange(2))
            assert storage.device == torch.device("cpu")
    for device in ("cuda", "nowhere", object()):
        with pytest.raises(ValueError, match=rf"LazyMemmapStorage: device: expected 'cpu'.*got '.*{str(device)[:5]}"):
            LazyMemmapStorage(5, device=device)


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", object()])
def test_no_such_device(device):
    for make in (
        lambda: LazyTensorStorage(5, device=device),
        lambda: TensorStorage(torch.arange(5), device=device),
        lambda: ListStorage(5, device=device),
    ):
        with pytest.raises(
            RuntimeError, match=r"Storage: device: (no such device, 'cuda:99'.*has cpu|expected a device)"
        ):
            make()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "bool"])
def test_rows_on_an_accelerator(dtype):
    storage = LazyTensorStorage(5, device="cuda")
    rb = ReplayBuffer(storage=storage)
    data = of_dtype(dtype, (7, 3))
    rb.extend({"a": data[:3]})
    rb.extend({"a": data[3:].cuda()})
    assert rb[:]["a"].is_cuda
    assert raw(rb[:]["a"].cpu()) == raw(torch.cat([data[5:], data[2:5]]))
    assert rb.sample(10)["a"].is_cuda


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_first_writes_of_many_threads_make_one_store(make):
    rb = ReplayBuffer(storage=make(1000))
    gate = threading.Barrier(8)

    def write(number):
        gate.wait()
        for i in range(10):
            rb.extend({"a": torch.full((3, 4), number * 100 + i)})
            rb.add({"a": torch.full((4,), number * 100 + i)})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    rows = rb[:]["a"]
    assert bool((rows == rows[:, :1]).all())
    numbers, counts = rows[:, 0].unique(return_counts=True)
    assert numbers.tolist() == sorted(number * 100 + i for number in range(8) for i in range(10))
    assert counts.tolist() == [4] * 80


# ---- saying what was made --------------------------------------------------------------------------------------------


def test_creation_is_logged(make, caplog):
    caplog.set_level("INFO", "engram")
    storage = make(1000)
    rb = ReplayBuffer(storage=storage)
    assert caplog.messages == []
    rb.extend({"obs": torch.zeros(2, 84, 84, dtype=torch.uint8), "next": {"reward": torch.zeros(2, 1)}})
    folder = getattr(storage, "scratch_dir", None)
    assert caplog.messages == [
        f"1,000 rows in {folder or 'RAM'}, 7.06 MB: obs [84, 84] uint8 (7.06 MB), ('next', 'reward') [1] float32 (4 kB)"
    ]
    rb.extend({"obs": torch.zeros(2, 84, 84, dtype=torch.uint8), "next": {"reward": torch.zeros(2, 1)}})
    assert len(caplog.messages) == 1


def test_creation_is_shown_where_logging_is_configured_so(tmp_path):
    """No handler is added, and no level set."""
    program = """
        import logging, torch
        {first}
        from engram import LazyTensorStorage, ReplayBuffer
        ReplayBuffer(storage=LazyTensorStorage(10)).extend(torch.zeros(2))
        ReplayBuffer(storage=LazyTensorStorage(10)).extend(torch.zeros(2))
        import sys
        sys.stdout.write(str(len(logging.getLogger("engram").handlers)))
    """
    from tests.fresh import start

    said = {}
    for name, first in {
        "default": "",
        "warnings": "logging.basicConfig()",
        "configured": "logging.basicConfig(format='mine: %(message)s', level=logging.INFO)",
    }.items():
        made = start(program.format(first=first))
        assert made.wait() == 0, made.err
        said[name] = made.err.split("\n")[:-1]
        assert made.out == "0"
    line = "10 rows in RAM, 40 B: _-single-tensor-_ [] float32 (40 B)"
    assert said == {"default": [], "warnings": [], "configured": [f"mine: {line}"] * 2}


def test_repr_says_what_matters(make):
    storage = make(10, lanes=3)
    ReplayBuffer(storage=storage).extend(numbered(0, 2), lane=0)
    assert f"{type(storage).__name__}(size=2/9, lanes=3, max_size=10 asked, 2 fields, cpu)" == repr(storage)


def test_collectors_find_what_they_look_for(make):
    """semantics.md, section 4."""
    storage = make(4)
    rb = TensorDictReplayBuffer(storage=storage)
    assert rb._storage is storage
    assert storage.initialized is False
    assert storage.shared_init is True  # so that they write no fake row
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    assert storage.initialized is True
    assert storage._storage.batch_size == (4,)
    assert storage._storage["a"].tolist() == [0, 1, 0, 0]
    rb.empty()
    assert len(storage) == 0
    assert engram.__version__


# ---- a fake row --------------------------------------------------------------------------------------------------------


FAKE = {"a": torch.zeros(3), "done": torch.tensor([False])}
REAL = {"a": torch.ones(4, 5), "_reset": torch.tensor([[True]] * 4)}


def batch_of_one(row):
    return {key: value.unsqueeze(0) for key, value in row.items()}


@pytest.mark.parametrize("call", ["add", "extend"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_fake_row_says_nothing_of_the_rows_to_come(make, shared, call):
    """TorchRL's collectors wrote one to allocate memory, and emptied the buffer."""
    storage = make(10)
    rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(10, 1.0, 1.0), shared=shared, batch_size=4)
    rb.add(FAKE) if call == "add" else rb.extend(batch_of_one(FAKE))
    _, info = rb.sample(return_info=True)
    rb.empty()
    assert (len(rb), rb.write_count) == (0, 0)
    with pytest.raises(NoSampleable):
        rb.sample()
    assert rb.extend(REAL).tolist() == [0, 1, 2, 3]
    rb.update_priority(info["index"], torch.full((4,), 9.0), generation=info["index_generation"])
    assert rb.stats()["priority_updates_dropped"] == 4  # they were drawn before
    assert rb.sample()["_reset"].all()
    rb.empty()
    assert storage.initialized
    with pytest.raises(KeyError, match="expected the fields of the first row"):
        rb.extend(batch_of_one(FAKE))
    rb.close()


def test_what_was_emptied_stays_a_store(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "store"))
    rb.add(FAKE)
    rb.empty()
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "store")
    assert len(rb) == 0
    assert rb.extend(REAL).tolist() == [0, 1, 2, 3]
    rb.close()
    assert ReplayBuffer.open(tmp_path / "store")[:]["_reset"].all()


def test_a_fake_slot_of_columns(make):
    storage = make(12, ndim=2)
    rb = ReplayBuffer(storage=storage)
    rb.extend({"a": torch.zeros(5, 1)})
    assert storage.max_size == 15
    rb.empty()
    rb.extend({"b": torch.ones(5, 2)})
    assert (storage.max_size, storage.columns, len(rb)) == (15, (5,), 10)
    rb.close()


def test_a_fake_row_before_the_buffer_is_shared():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.add(FAKE)
    rb.empty()
    rb.share()
    other = copy.deepcopy(rb)
    assert rb.extend(REAL).tolist() == [0, 1, 2, 3]
    assert other.extend(REAL).tolist() == [4, 5, 6, 7]
    rb.close()


def test_rows_that_were_drawn_fix_the_fields(make):
    rb = ReplayBuffer(storage=make(10))
    rb.add(FAKE)
    rb.add(FAKE)
    rb.sample(1)
    rb.empty()
    with pytest.raises(KeyError, match="expected the fields of the first row"):
        rb.extend(REAL)
    rb.close()


def test_a_count_that_is_kept_keeps_the_fields(make):
    rb = ReplayBuffer(storage=make(10))
    rb.add(FAKE)
    rb.empty(empty_write_count=False)
    assert rb.write_count == 1
    with pytest.raises(KeyError, match="expected the fields of the first row"):
        rb.extend(REAL)
    rb.close()


def test_buffers_that_share_a_storage_go_on_after_a_fake_row(make):
    storage = make(10)
    one, other = (ReplayBuffer(storage=storage, sampler=PrioritizedSampler(10, 1.0, 1.0)) for _ in range(2))
    one.add(FAKE)
    other.sample(1)
    one.empty()
    one.extend(REAL)
    assert other.sample(4)["_reset"].all()
    one.close()


def test_a_fake_row_that_another_handle_sees_keeps_the_fields(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.add(FAKE)
    other = copy.deepcopy(rb)
    rb.empty()
    with pytest.raises(KeyError, match=r"expected the fields of the first row.* others have the store open"):
        rb.extend(REAL)
    other.extend(batch_of_one(FAKE))
    assert len(rb) == 1
    rb.close()
    other.close()


MOVES = ("view.share_memory_()", "torch.multiprocessing.get_context('spawn').SimpleQueue().put(view)")


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("reach", ["rb[:]", "rb[2:5]", "rb.storage[:]", "rb.storage._storage"])
@pytest.mark.parametrize("columns", [(), (2,)])
def test_a_view_that_torch_moves_becomes_a_copy(move, reach, columns):
    """In a process of its own, which a write to memory that torch had freed would end."""
    run(
        f"""
        import gc, torch
        from tensordict import TensorDict
        from engram import LazyTensorStorage, TensorDictReplayBuffer
        shape = [*columns, 1 << 13]
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1 << 14 if columns else 1 << 13, ndim=1 + len(columns)))
        rows = TensorDict(dict(a=torch.ones(*shape, 8), b=torch.ones(shape, dtype=torch.bfloat16)), shape)
        rb.extend(rows)
        before = [tensor.data_ptr() for tensor in rb.storage.store.tensors]
        for key in ("a", "b"):
            view = {reach}[key]
            {move}
            assert view.is_shared()
        gc.collect()
        rb.extend(rows * 3)
        assert before == [tensor.data_ptr() for tensor in rb.storage.store.tensors]
        assert (rb[:]["a"] == 3).all() and (rb.sample(64)["a"] == 3).all()
        assert (view == 1).all()
        """,
        columns=list(columns),
    )
