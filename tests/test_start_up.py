"""What a program that only imports engram, or only writes dicts, does not load: each in a process of its own."""

import subprocess
import sys
import textwrap

BEGIN = """
import sys

def loaded():
    return {name for name in ("torch", "tensordict", "sympy") if name in sys.modules}
"""

DICTS = """
import tempfile
import numpy as np
import torch
from engram import (
    Checkpointer, Compose, LazyTensorStorage, ListStorage, ObservationNorm, PrioritizedSampler, ReplayBuffer,
    SamplerWithoutReplacement, SelectTransform,
)

def rows(n):
    done = np.arange(n) % 5 == 4
    next = {"reward": np.ones(n, np.float32), "done": done, "obs": np.zeros((n, 3), np.float32)}
    return {"obs": np.zeros((n, 3), np.float32), "action": torch.arange(n), "next": next}

def written(storage=None, n=100, **components):
    rb = ReplayBuffer(storage=storage or LazyTensorStorage(100), **components)
    rb.extend(rows(n))
    return rb
"""


def run(*codes):
    code = "\n".join(textwrap.dedent(code) for code in (BEGIN, *codes))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_engram_loads_neither_torch_nor_tensordict():
    run("import engram; assert not loaded()")


def test_no_public_name_loads_tensordict():
    """But for a class that is a tensorclass."""
    run(
        "import engram; [getattr(engram, name) for name in engram.__all__ if name != 'Trajectory']; assert loaded() == {'torch'}, loaded()"
    )


LOOPS = """
def rows_of_all_kinds():
    rb = written()
    rb.add({"obs": np.zeros(3, np.float32), "action": torch.tensor(1), "next": {key: value[0] for key, value in rows(1)["next"].items()}})
    rb[3], rb[:], rb[2:4], rb["obs"]
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    rb.extend((np.ones(5), {"a": np.ones(5)}))
    rb.sample(3)
    rb = ReplayBuffer(storage=ListStorage(100))
    rb.extend([{"a": torch.ones(2)}] * 5)
    rb.sample(3)

def samplers():
    written().sample(2, return_info=True)
    list(written(sampler=SamplerWithoutReplacement(), batch_size=10))
    rb = written(sampler=PrioritizedSampler(100, 0.6, 0.4))
    rb.update_priority([0, 1], torch.ones(2))
    rb.sample(5)

def prefetching():
    rb = written(batch_size=4, prefetch=2)
    rb.sample(), rb.sample()
    rb.close()

def transforms():
    normal = ObservationNorm(0.0, 1.0, in_keys=["obs"])
    written(transform=Compose(normal, SelectTransform("obs"))).sample(3)

def saving():
    rb, other = written(), ReplayBuffer(storage=LazyTensorStorage(100))
    other.load_state_dict(rb.state_dict())
    with tempfile.TemporaryDirectory() as place:
        rb.dumps(place)
        rb.loads(place)
    with tempfile.TemporaryDirectory() as place:
        checkpoints = Checkpointer(place, rb)
        checkpoints.save(1)
        checkpoints.restore()

def display():
    repr(written()), written().stats()

for loop in (rows_of_all_kinds, samplers, prefetching, transforms, saving, display):
    loop()
    assert loaded() == {"torch"}, (loop.__name__, loaded())
"""


def test_programs_that_write_dicts_to_memory_do_without_tensordict():
    run(DICTS, LOOPS)


def test_what_comes_after_dicts_may_be_tensordicts():
    """Types that were asked about before tensordict was imported keep their answer; its own types get theirs."""
    run(
        DICTS,
        """
        rb = written()
        rb.sample(3)
        import tensordict
        from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, is_non_tensor, is_tensorclass, tensorclass
        from engram import TensorDictReplayBuffer
        from engram._support import tensordicts as _tensordict

        @tensorclass
        class Step:
            obs: torch.Tensor

        td = TensorDict(rows(10), batch_size=[10])
        stack = LazyStackedTensorDict.lazy_stack([td, td.clone()])
        values = [
            None, 1, "a", {}, (), torch.ones(2), np.ones(2), rows(2), td, stack, NonTensorData("x"), Step(torch.ones(4), batch_size=[4]),
            tensordict.MemoryMappedTensor.from_tensor(torch.ones(2)), tensordict.TensorDictParams(td),
        ]
        for value in values:
            assert _tensordict.is_tensor_collection(value) == tensordict.is_tensor_collection(value), value
            assert _tensordict.is_tensorclass(value) == is_tensorclass(value), value
            assert _tensordict.is_non_tensor(value) == is_non_tensor(value), value
            assert _tensordict.is_plain_tensordict(value) == (type(value) is TensorDict), value
            assert _tensordict.is_lazy_stack(value) == isinstance(value, LazyStackedTensorDict), value
        for data, kind in ((td, TensorDict), (Step(torch.ones(4), batch_size=[4]), Step)):
            rb = ReplayBuffer(storage=LazyTensorStorage(100))
            rb.extend(data)
            assert type(rb.sample(3)) is kind
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        rb.extend(td)
        assert type(rb.sample()) is TensorDict
        """,
    )


def test_a_store_of_tensordicts_opens_in_a_program_that_has_not_imported_tensordict(tmp_path):
    run(
        DICTS,
        f"""
        from tensordict import TensorDict
        from engram import LazyMemmapStorage
        rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir={str(tmp_path)!r}))
        rb.extend(TensorDict(rows(10), batch_size=[10]))
        rb.close()
        """,
    )
    found = run(f"""
    from engram import ReplayBuffer
    assert "tensordict" not in loaded()
    rb = ReplayBuffer.open({str(tmp_path)!r})
    print(type(rb.sample(3)).__name__, rb.sample(3).batch_size)
    """)
    assert found.strip() == "TensorDict torch.Size([3])"


def test_a_directory_of_dicts_does_without_tensordict(tmp_path):
    """Making, opening and unpickling one, as spawned actors do; only a live view is a tensor of tensordict's."""
    store, copy = str(tmp_path / "store"), str(tmp_path / "copy")
    run(
        DICTS,
        f"""
        import pickle
        from engram import LazyMemmapStorage
        storage, sampler = LazyMemmapStorage(100, scratch_dir={store!r}), PrioritizedSampler(100, 0.6, 0.4)
        rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
        rb.extend(rows(100))
        assert len(rb[[0, 1]]["obs"]) == 2 and len(rb.sample()["obs"]) == 4
        open({copy!r}, "wb").write(pickle.dumps(rb))
        assert loaded() == {{"torch"}}, loaded()
        """,
    )
    run(
        DICTS,
        f"""
        import pickle
        for rb in (
            ReplayBuffer.open({store!r}), ReplayBuffer.open({store!r}, readonly=True), pickle.load(open({copy!r}, "rb")),
            pickle.loads(pickle.dumps(ReplayBuffer.open({store!r}, readonly=True))),
        ):
            assert len(rb.sample()["obs"]) == 4 and rb.stats()["size"] == 100
        ReplayBuffer.open({store!r}).extend(rows(3))
        assert loaded() == {{"torch"}}, loaded()
        view = ReplayBuffer.open({store!r})[:]["action"]
        import tensordict
        assert type(view) is tensordict.MemoryMappedTensor and view.filename.endswith("action.memmap")
        """,
    )
