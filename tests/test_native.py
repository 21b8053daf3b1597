"""Tensors that the extension makes, with a torch that publishes DLPack's exchange table and with one that does not."""

from __future__ import annotations

import ast
import threading
import weakref
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from engram._support import native
from engram.format.schema import DTYPES


@pytest.fixture
def older_torch():
    """As before torch 2.10."""
    assert not native._core.use_tensor_type(object)
    yield
    assert native._core.use_tensor_type(torch.Tensor) == native.HAS_EXCHANGE


def rows_of(dtype: str, n: int) -> torch.Tensor:
    bits = torch.randint(0, 256, (n, 3, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    values = bits.view(getattr(torch, dtype)) if dtype != "bool" else bits > 127
    return values.contiguous()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_samples_of_every_dtype(dtype, older_torch):
    data = rows_of(dtype, 8)
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=20)
    rb.extend(data)
    batch, info = rb.sample(return_info=True)
    assert (batch.dtype, batch.shape) == (data.dtype, (20, *data.shape[1:]))
    assert batch.is_contiguous()
    assert torch.equal(batch.view(torch.uint8), data.view(torch.uint8)[info["index"]])
    assert torch.equal(rb[:].view(torch.uint8), data.view(torch.uint8))


def test_tensors_own_their_memory(older_torch):
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    rb.extend(torch.arange(8))
    batches = [rb.sample() for _ in range(50)]
    copies = [batch.clone() for batch in batches]
    del rb
    assert all(torch.equal(a, b) for a, b in zip(batches, copies, strict=True))


def test_the_same_windows(older_torch):
    def sample() -> TensorDict:
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(40),
            sampler=SliceSampler(slice_len=3),
            batch_size=6,
            generator=torch.Generator().manual_seed(1),
        )
        rb.extend(TensorDict({"episode": torch.arange(40) // 9, "x": torch.arange(40.0)}, [40]))
        return rb.sample()

    older = sample()
    native._core.use_tensor_type(torch.Tensor)
    assert (older == sample()).all()
    assert older["next", "truncated"].shape == (6, 1)


class TestMaking:
    """Tensors made by somebody else, for a block and a thread."""

    def test_every_dtype_has_a_name_of_its_own(self):
        assert {str(dtype).removeprefix("torch.") for dtype in native._DTYPES.values()} == set(DTYPES)

    def test_for_a_block_and_a_thread(self):
        asked = []

        def empty(shape, dtype):
            asked.append((shape, dtype))
            return torch.empty(shape, dtype=dtype)

        def inner(shape, dtype):
            asked.append("inner")
            return torch.empty(shape, dtype=dtype)

        with native.making(empty):
            native.empty_rows(3)
            with native.making(inner):
                native.empty_rows(3)
            with native.making(None):
                native.empty_rows(2)
            other = threading.Thread(target=native.empty_rows, args=(9,))
            other.start()
            other.join()
        native.empty_rows(4)
        assert asked == [((3,), torch.int64), "inner", ((2,), torch.int64)]

    def test_whatever_it_raises_comes_through_and_the_block_ends(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(8))
        rb.extend({"a": torch.arange(8), "b": torch.arange(8)})

        def refuse(shape, dtype):
            raise MemoryError("none left")

        with pytest.raises(MemoryError, match="none left"), native.making(refuse):
            rb.sample(4)
        assert rb.sample(4)["a"].shape == (4,)

    def test_nobody_is_held(self):
        class Maker:
            def __call__(self, shape, dtype):
                return torch.empty(shape, dtype=dtype)

        maker = Maker()
        gone = weakref.ref(maker)
        with native.making(maker):
            held = native.empty_rows(3)
        del maker
        assert gone() is None
        assert held.shape == (3,)


def test_the_stub_names_what_the_extension_has():
    stub = ast.parse(Path(native._core.__file__).with_name("_core.pyi").read_text())
    said = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    named = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    numbers = {name for name in named if not name.startswith("_")}
    there = {name for name in dir(native._core) if not name.startswith("_")}
    assert set(said) | numbers == there
    for name, node in said.items():
        if isinstance(node, ast.ClassDef):
            members = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            members |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
            own = {member for member in vars(getattr(native._core, name)) if not member.startswith("__")}
            assert {member for member in members if not member.startswith("__")} <= own, name
            if name == "Store":
                assert own <= members
