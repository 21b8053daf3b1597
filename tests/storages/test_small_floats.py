"""Floats of 8 bits: every storage holds them, bit by bit, and so does what is saved, served and loaded."""

import pytest
import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    CompressedListStorage,
    FrameStack,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.store.device.store import DeviceStore
from tests.serving.servers import serving

DTYPES = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
every_dtype = pytest.mark.parametrize(
    "dtype", DTYPES, ids=[str(dtype).removeprefix("torch.float8_") for dtype in DTYPES]
)


def values(dtype, n=12, first=0):
    """Rows of every bit pattern, NaN and infinities among them."""
    return (torch.arange(first * 4, (first + n) * 4) * 37 % 256).to(torch.uint8).view(dtype).reshape(n, 2, 2)


def rows(dtype, n=12, first=0):
    return {
        "x": values(dtype, n, first),
        "one": values(dtype, n, first)[:, 0, 0],
        "done": torch.arange(first, first + n) % 4 == 3,
    }


def check(found, dtype, first=0):
    assert found["x"].dtype is found["one"].dtype is dtype
    n = len(found["x"])
    assert torch.equal(found["x"].view(torch.uint8), values(dtype, n, first).view(torch.uint8))
    assert torch.equal(found["one"].view(torch.uint8), values(dtype, n, first)[:, 0, 0].view(torch.uint8))


class OnDevice(LazyTensorStorage):
    """As a storage on an accelerator, without one."""

    def _allocate(self, schema):
        return DeviceStore.on(schema, self._device)


STORAGES = {
    "RAM": lambda folder: LazyTensorStorage(16),
    "lanes": lambda folder: LazyTensorStorage(32, lanes=2),
    "folder": lambda folder: LazyMemmapStorage(16, scratch_dir=folder / "store"),
    "device": lambda folder: OnDevice(16),
}


@every_dtype
@pytest.mark.parametrize("storage", STORAGES)
def test_rows_are_written_read_and_replaced(storage, dtype, tmp_path):
    rb = ReplayBuffer(storage=STORAGES[storage](tmp_path), batch_size=8)
    rb.extend(rows(dtype), lane=0)
    check(rb[:], dtype)
    batch, info = rb.sample(return_info=True)
    assert torch.equal(batch["x"].view(torch.uint8), values(dtype)[info["index"]].view(torch.uint8))
    rb.add({name: value[0] for name, value in rows(dtype, 1, 12).items()}, lane=0)
    rb[0] = {name: value[0] for name, value in rows(dtype, 1, 5).items()}
    rb.storage.set([1, 2], rows(dtype, 2, 6))
    assert torch.equal(rb["x"][:3].view(torch.uint8), values(dtype, 3, 5).view(torch.uint8))
    rb.close()


@every_dtype
@pytest.mark.parametrize("storage", ["RAM", "folder", "list"])
def test_what_is_saved_is_loaded(storage, dtype, tmp_path):
    def make(name):
        made = {"RAM": LazyTensorStorage, "list": ListStorage, "folder": LazyMemmapStorage}[storage]
        arguments = {"scratch_dir": tmp_path / name} if storage == "folder" else {}
        return ReplayBuffer(storage=made(16, **arguments), batch_size=8)

    rb = make("first")
    data = rows(dtype)
    rb.extend(TensorDict(data, [12]) if storage == "list" else data)
    rb.dumps(tmp_path / "dump")
    Checkpointer(tmp_path / "series", rb).save(1)

    dumped, from_state, restored = make("dumped"), make("state"), make("restored")
    dumped.loads(tmp_path / "dump")
    from_state.load_state_dict(rb.state_dict())
    Checkpointer(tmp_path / "series", restored).restore()
    for other in (rb, dumped, from_state, restored):
        check(torch.stack(other[:]) if storage == "list" else other[:], dtype)
        other.close()
    if storage == "folder":
        opened = ReplayBuffer.open(tmp_path / "first")
        check(opened[:], dtype)
        opened.close()


@every_dtype
def test_other_processes_and_connections_see_them(dtype, tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(16, scratch_dir=tmp_path / "store"), batch_size=8)
    rb.extend(TensorDict(rows(dtype), [12]))
    with serving(tmp_path / "store") as served:
        client = ReplayBuffer.connect(served.address)
        client.extend(TensorDict(rows(dtype, 2, 12), [2]))
        batch = client.sample()
        expected = values(dtype, 14)[batch["index"]]
        assert torch.equal(batch["x"].view(torch.uint8), expected.view(torch.uint8))
        client.close()
    check(rb[:], dtype)
    rb.close()
    shared = ReplayBuffer(storage=LazyTensorStorage(16), shared=True)
    shared.extend(rows(dtype))
    check(shared[:], dtype)
    shared.close()


@every_dtype
def test_windows_stacks_and_tensors_of_ones_own(dtype):
    rb = ReplayBuffer(storage=LazyTensorStorage(16), sampler=SliceSampler(slice_len=2, end_key="done"), batch_size=8)
    rb.extend(rows(dtype))
    assert rb.sample()["x"].dtype is dtype
    rb.set_sampler(FrameStack(RandomSampler(), 2, -1, ["x"], end_keys=["done"], padding="constant"))
    assert rb.sample()["x"].shape[-1] == 4
    own = TensorStorage({"x": values(dtype)})
    assert ReplayBuffer(storage=own).sample(4)["x"].dtype is dtype


@every_dtype
def test_lists_of_them(dtype):
    for storage in (ListStorage(16), LazyStackStorage(16)):
        rb = ReplayBuffer(storage=storage, batch_size=8)
        rb.extend([TensorDict({"x": row}) for row in values(dtype)])
        assert rb.sample()["x"].dtype is dtype


@every_dtype
def test_compressed_lists_of_them(dtype):
    rb, other = (ReplayBuffer(storage=CompressedListStorage(16), batch_size=8) for _ in range(2))
    rb.extend([{"x": row} for row in values(dtype)])
    other.load_state_dict(rb.state_dict())
    found = other[:]["x"]
    assert torch.equal(found.view(torch.uint8), values(dtype).view(torch.uint8))


@every_dtype
def test_a_field_of_them_is_added(dtype):
    rb = ReplayBuffer(storage=LazyTensorStorage(16))
    rb.extend({"a": torch.arange(3)})
    rb.add_field("x", torch.zeros(2, dtype=dtype), fill=2)
    rb.extend({"a": torch.arange(2)})
    assert rb["x"].dtype is dtype
    assert rb["x"].float().eq(2).all()
    rb[:] = {"a": torch.arange(5), "new": values(dtype, 5)}
    assert torch.equal(rb["new"].view(torch.uint8), values(dtype, 5).view(torch.uint8))


@every_dtype
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.float16, torch.int64, torch.bool])
def test_what_is_written_to_a_field_of_them_is_cast(dtype, given):
    storage = LazyTensorStorage(16, dtypes={"x": dtype})
    rb = ReplayBuffer(storage=storage)
    written = torch.tensor([1, 2, 4, 8]).to(given)
    rb.extend({"x": written})
    rb.add({"x": 4})
    rb.add({"x": 2.0})
    assert rb["x"].dtype is dtype
    assert rb["x"].float().tolist() == [*written.float().tolist(), 4.0, 2.0]
    if given in (torch.float32, torch.float64):
        with pytest.raises(RuntimeError, match="expected values that float8"):
            rb.extend({"x": torch.tensor([1e6]).to(given)})
    assert len(rb) == 6


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.complex64])
def test_a_directory_notes_that_values_are_cast_to_them(dtype, tmp_path):
    for _ in range(2):
        rb = ReplayBuffer.open_or_create(tmp_path / "store", 16, dtypes={"x": dtype})
        rb.extend({"x": torch.arange(4.0)})
        rb.close()
        rb = ReplayBuffer.open(tmp_path / "store")
        rb.extend({"x": torch.tensor([8.0])})
        assert rb["x"].to(torch.complex64).real.tolist()[-5:] == [0.0, 1.0, 2.0, 3.0, 8.0]
        rb.close()


def test_they_are_cast_to_others():
    storage = LazyTensorStorage(16, dtypes={"x": torch.float32})
    rb = ReplayBuffer(storage=storage)
    rb.extend({"x": torch.zeros(2)})
    for dtype in DTYPES:
        rb.extend({"x": torch.tensor([1.0, 2.0]).to(dtype)})
    assert rb["x"].tolist() == [0.0, 0.0, *[1.0, 2.0] * len(DTYPES)]
