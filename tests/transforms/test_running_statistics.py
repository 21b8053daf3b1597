"""Running statistics."""

import copy
import pickle
import threading

import pytest
import torch

from engram import LazyTensorStorage, ReplayBuffer, VecNorm
from tests.transforms.batches import rows, same

# ---- running statistics ----------------------------------------------------------------------------------------------------


class TestVecNorm:
    def test_of_all_that_was_read(self):
        data = torch.randn(1000, 3) * 5 + 7
        norm = VecNorm(["a"], decay=1.0)
        for part in data.split([1, 99, 400, 500]):
            out = norm({"a": part})["a"]
        assert torch.allclose(norm.loc["a"], data.double().mean(0))
        assert torch.allclose(norm.scale["a"], data.double().std(0, correction=0))
        assert torch.allclose(out, (part - data.mean(0)) / data.std(0, correction=0), atol=1e-5)

    def test_far_from_zero(self):
        """Sums of squares in float32 would be all noise."""
        data = torch.randn(100_000, dtype=torch.float64) + 1e7
        norm = VecNorm(["a"], decay=1.0)
        for part in data.split(1000):
            norm({"a": part})
        assert abs(float(norm.scale["a"]) - float(data.std())) < 1e-3

    def test_integers(self):
        out = VecNorm(["pixels"])(rows())["pixels"]
        assert out.dtype is torch.float32
        assert abs(float(out.mean())) < 1e-5

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_nan_changes_nothing(self, bad):
        norm = VecNorm(["obs", "reward"])
        norm(rows())
        before = norm.state_dict()
        data = rows()
        data["reward"][2] = bad
        with pytest.raises(ValueError, match="reward.*unchanged"):
            norm(data)
        same(norm.state_dict(), before)
        norm.freeze()(data)

    def test_frozen(self):
        norm = VecNorm(["obs"])
        with pytest.raises(RuntimeError, match="nothing was read"):
            norm.freeze()(rows())
        norm.unfreeze()(rows())
        still = norm.frozen_copy()
        before = still.state_dict()
        for _ in range(3):
            norm({"obs": rows()["obs"] * 2})
            still({"obs": rows()["obs"] * 2})
        same(still.state_dict(), before)
        assert not torch.equal(norm.loc["obs"], still.loc["obs"])

    def test_shapes(self):
        norm = VecNorm(["a"], shapes=[torch.Size([3])], decay=1.0)
        norm({"a": torch.randn(4, 5, 3)})
        assert norm.loc["a"].shape == (3,)
        assert norm.state_dict()["0.weight"] == 20
        with pytest.raises(RuntimeError, match=r"'a'.*\[3\].*\[4, 2\]"):
            norm({"a": torch.randn(4, 2)})
        with pytest.raises(RuntimeError, match="empty"):
            norm({"a": torch.randn(0, 3)})
        row = VecNorm(["a"])
        row({"a": torch.randn(4, 3)})
        assert row({"a": torch.randn(3)})["a"].shape == (3,)

    def test_state_goes_on(self):
        torch.manual_seed(1)
        first, second = VecNorm(["a", "b"]), VecNorm(["a", "b"])
        first({"a": torch.randn(5, 2)})
        state = first.state_dict()
        assert all(isinstance(value, torch.Tensor) for value in state.values())
        second.load_state_dict(state)
        more = {"a": torch.randn(5, 2), "b": torch.randn(5)}
        same(first(more), second(more))
        same(pickle.loads(pickle.dumps(first))(more), copy.deepcopy(second)(more))
        for wrong in ({}, {**state, "2.mean": state["0.mean"]}, {k: v for k, v in state.items() if k != "0.mean"}):
            with pytest.raises(KeyError, match="VecNorm"):
                second.load_state_dict(wrong)

    def test_to_observation_norm(self):
        norm = VecNorm(["obs", ("next", "obs")], ["o", ("next", "obs")])
        norm(rows())
        fixed = norm.to_observation_norm()
        expected = norm.freeze()(rows())
        found = fixed(rows())
        assert torch.allclose(found["o"], expected["o"], atol=1e-4)
        assert torch.allclose(found["next"]["obs"], expected["next"]["obs"], atol=1e-4)

    def test_of_what_is_written(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(200), generator=torch.Generator().manual_seed(1))
        norm = VecNorm(["obs"], decay=1.0)
        rb.append_transform(norm, invert=True)
        rb.extend({"obs": torch.randn(100) * 3 + 5})
        before = norm.state_dict()
        assert abs(float(rb[:]["obs"].mean())) < 1e-5
        rb.sample(10)
        same(norm.state_dict(), before)

    def test_threads(self):
        norm = VecNorm(["a"], decay=1.0)
        threads = [threading.Thread(target=lambda: [norm({"a": torch.randn(10)}) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert norm.state_dict()["0.weight"] == 4 * 50 * 10
