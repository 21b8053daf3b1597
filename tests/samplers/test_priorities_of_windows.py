"""One priority for each window of a batch, in place of one for each row."""

import pytest
import torch
from tensordict import TensorDict

from engram import (
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RewardToGo,
    Sequence,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    WindowSpec,
)
from tests.serving.servers import serving

ROWS, EPISODE = 60, 12


def rows(first=0):
    step = torch.arange(first, first + ROWS)
    return {
        "step": step,
        "episode": step // EPISODE,
        "next": {"reward": torch.ones(ROWS, 1), "done": (step % EPISODE == EPISODE - 1).unsqueeze(1)},
    }


def by_priority(**arguments):
    return PrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0.0, **arguments)


def filled(sampler, kind=ReplayBuffer, storage=None, **kwargs):
    rb = kind(storage=LazyTensorStorage(ROWS) if storage is None else storage, sampler=sampler, **kwargs)
    rb.extend(TensorDict(rows(), [ROWS]) if kind is not ReplayBuffer else rows())
    return rb


def leaves(rb):
    sampler = rb.sampler
    while not hasattr(type(sampler), "anchors") and not isinstance(sampler, PrioritizedSampler):
        sampler = sampler.sampler
    tree = sampler if isinstance(sampler, PrioritizedSampler) else sampler.anchors
    return tree.priorities().leaves(ROWS).double()


def expected(before, windows, learned, errors):
    """Leaves: the first step to learn from of each window gets its priority."""
    after = before.clone()
    for window, first, error in zip(windows, learned, errors, strict=True):
        after[window[first]] = error
    return after


WRAPPED = {
    "alone": lambda sampler: sampler,
    "n-step": lambda sampler: NStep(sampler, n=2, gamma=0.5),
    "returns of stacks": lambda sampler: RewardToGo(FrameStack(sampler, n=2, dim=None, in_keys=["episode"]), gamma=0.5),
}


class TestEvenWindows:
    @pytest.mark.parametrize("wrapped", WRAPPED)
    @pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
    def test_flat(self, kind, wrapped):
        rb = filled(WRAPPED[wrapped](by_priority(slice_len=3)), kind)
        _, info = rb.sample(12, return_info=True)
        before, errors = leaves(rb), torch.tensor([2.0, 3.0, 5.0, 7.0])
        rb.update_priority(info, errors)
        windows = info["index"][0].reshape(4, 3).tolist()
        assert torch.equal(leaves(rb), expected(before, windows, [0] * 4, errors))

    @pytest.mark.parametrize("flat", [True, False])
    @pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 1, 1)])
    def test_of_a_spec(self, flat, shape):
        spec = WindowSpec(length=3, burn_in=2, padding=2)
        rb = filled(by_priority(window=spec, flat=flat))
        _, info = rb.sample(20 if flat else 4, return_info=True)
        before, errors = leaves(rb), torch.tensor([2.0, 3.0, 5.0, 7.0])
        rb.update_priority(info, errors.reshape(shape))
        windows = info["index"][0].reshape(4, 5).tolist()
        assert torch.equal(leaves(rb), expected(before, windows, [2] * 4, errors))

    @pytest.mark.parametrize("flat", [True, False])
    def test_of_a_spec_by_its_index(self, flat):
        rb = filled(by_priority(window=WindowSpec(length=3, burn_in=1), flat=flat))
        _, info = rb.sample(8 if flat else 2, return_info=True)
        before, errors = leaves(rb), [3.0, 5.0]
        rb.update_priority(info["index"], errors, generation=info["index_generation"])
        assert torch.equal(leaves(rb), expected(before, info["index"][0].reshape(2, 4).tolist(), [1, 1], errors))

    def test_by_index_and_generation(self):
        rb = filled(SliceSampler(slice_len=4, anchors=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0)))
        _, info = rb.sample(8, return_info=True)
        before, errors = leaves(rb), [3.0, 5.0]
        rb.update_priority(info["index"], errors, generation=info["index_generation"])
        assert torch.equal(leaves(rb), expected(before, info["index"][0].reshape(2, 4).tolist(), [0, 0], errors))

    def test_of_windows_without_marks(self):
        rb = filled(by_priority(num_slices=2, truncated_key=None))
        _, info = rb.sample(8, return_info=True)
        before, errors = leaves(rb), [3.0, 5.0]
        rb.update_priority(info, errors)
        assert torch.equal(leaves(rb), expected(before, info["index"][0].reshape(2, 4).tolist(), [0, 0], errors))

    def test_of_columns(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), sampler=by_priority(slice_len=2))
        step = torch.arange(40).reshape(2, 20)
        rb.extend({"step": step, "done": step % 10 == 9})
        _, info = rb.sample(6, return_info=True)
        before, errors = rb.sampler.anchors.priorities().leaves(40).double(), torch.tensor([2.0, 3.0, 5.0])
        rb.update_priority(info, errors)
        rows = rb.storage.rows_at(torch.stack(info["index"], -1)).reshape(3, 2).tolist()
        assert torch.equal(rb.sampler.anchors.priorities().leaves(40).double(), expected(before, rows, [0] * 3, errors))

    def test_rows_that_were_overwritten_since_keep_theirs(self):
        rb = filled(by_priority(slice_len=3))
        _, info = rb.sample(12, return_info=True)
        rb.extend(rows(ROWS))
        before = leaves(rb)
        rb.update_priority(info, torch.tensor([2.0, 3.0, 5.0, 7.0]))
        assert torch.equal(leaves(rb), before)
        rb.update_priority(info, 3.0, generation=rb.sample(12, return_info=True)[1]["index_generation"] * 0)
        assert torch.equal(leaves(rb), before)


class TestUnevenWindows:
    def test_of_short_trajectories(self):
        rb = filled(by_priority(slice_len=EPISODE - 2, strict_length=False))
        _, info = rb.sample(4 * (EPISODE - 2), return_info=True)
        ends = info["next", "truncated"].flatten().nonzero().flatten().tolist()
        starts = [0, *(end + 1 for end in ends[:-1])]
        index = info["index"][0].tolist()
        windows = [index[start : end + 1] for start, end in zip(starts, ends, strict=True)]
        before, errors = leaves(rb), torch.tensor([2.0, 3.0, 5.0, 7.0])
        rb.update_priority(info, errors)
        assert torch.equal(leaves(rb), expected(before, windows, [0] * 4, errors))

    def test_that_are_padded(self):
        rb = filled(by_priority(slice_len=8, strict_length=False, pad_output=True), TensorDictReplayBuffer)
        _, info = rb.sample(32, return_info=True)
        before, errors = leaves(rb), torch.tensor([2.0, 3.0, 5.0, 7.0])
        rb.update_priority(info, errors)
        assert torch.equal(leaves(rb), expected(before, info["index"][0].reshape(4, 8).tolist(), [0] * 4, errors))


class TestOthers:
    def test_the_info_of_rows(self):
        rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(ROWS))
        rb.extend(rows())
        batch, info = rb.sample(8, return_info=True)
        rb.update_priority(info, batch["step"] + 2.0)
        assert leaves(rb)[batch["step"]].tolist() == (batch["step"] + 2).tolist()
        rb.extend(rows(ROWS))
        before = leaves(rb)
        rb.update_priority(info, 7.0)  # of rows that are not there any more
        assert torch.equal(leaves(rb), before)

    def test_numpy(self):
        rb = filled(by_priority(window=WindowSpec(length=3), flat=False), output="numpy")
        _, info = rb.sample(4, return_info=True)
        before, errors = leaves(rb), torch.tensor([2.0, 3.0, 5.0, 7.0])
        rb.update_priority(info, errors.numpy())
        assert torch.equal(leaves(rb), expected(before, info["index"][0].tolist(), [0] * 4, errors))

    def test_without_priorities_a_warning(self):
        rb = filled(SliceSampler(slice_len=3))
        _, info = rb.sample(12, return_info=True)
        with pytest.warns(UserWarning, match="no priorities"):
            rb.update_priority(info, torch.ones(4))

    def test_neither_of_rows_nor_of_windows(self):
        rb = filled(by_priority(slice_len=3))
        _, info = rb.sample(12, return_info=True)
        before = leaves(rb)
        for named in (info, info["index"]):
            with pytest.raises(RuntimeError, match=r"one priority per row, 12, or per window, 4, got \[5\]"):
                rb.update_priority(named, torch.ones(5))
        with pytest.raises(TypeError, match="expected rows and their priorities, got a dict"):
            rb.update_priority({"priority_weight": torch.ones(12)}, torch.ones(4))
        assert torch.equal(leaves(rb), before)

    def test_of_sequences_their_anchors(self):
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(ROWS), sample_unit=Sequence(4, burn_in=2)
        )
        rb.extend(TensorDict(rows(), [ROWS]))
        _, info = rb.sample(5, return_info=True)
        before, anchors = leaves(rb), info["anchor_index"].reshape(5, 6)[:, 0]
        for errors in (torch.arange(2.0, 7), torch.arange(2.0, 7).repeat_interleave(6)):
            rb.update_priority(info, errors)
            after = before.clone()
            for anchor, error in zip(anchors.tolist(), range(2, 7), strict=True):
                after[anchor] = error
            assert torch.equal(leaves(rb), after)
            rb.update_priority(torch.arange(ROWS), before)


class TestEnsembles:
    def made(self, **kwargs):
        members = [filled(by_priority(slice_len=4), TensorDictReplayBuffer, **kwargs) for _ in range(2)]
        return ReplayBufferEnsemble(*members, batch_size=16)

    def test_the_info_of_windows(self):
        rb = self.made()
        _, info = rb.sample(return_info=True)
        before, errors = [leaves(rb[0]), leaves(rb[1])], torch.tensor([2.0, 3.0, 5.0, 7.0])
        rb.update_priority(info, errors)
        for i in range(2):
            windows = info["index", "index"][i].reshape(2, 4).tolist()
            assert torch.equal(leaves(rb[i]), expected(before[i], windows, [0, 0], errors[2 * i : 2 * i + 2]))

    def test_a_tensordict(self):
        rb = self.made()
        batch = rb.sample()
        batch["td_error"] = batch["step"].unsqueeze(-1) + torch.tensor([1.0, 2.0])
        rb.update_tensordict_priority(batch)
        for i in range(2):
            assert leaves(rb[i])[batch["index", "index"][i]].tolist() == (batch["step"][i] + 2).tolist()

    def test_a_tensordict_without_what_is_needed(self):
        rb = self.made()
        batch, before = rb.sample(), leaves(rb[0])
        with pytest.raises(KeyError, match="update_tensordict_priority: expected the key 'td_error'"):
            rb.update_tensordict_priority(batch)
        with pytest.raises(TypeError, match="expected a sampled TensorDict, got dict"):
            rb.update_tensordict_priority({"td_error": torch.ones(16)})
        assert torch.equal(leaves(rb[0]), before)
        uniform = ReplayBufferEnsemble(TensorDictReplayBuffer(storage=LazyTensorStorage(10)))
        uniform.update_tensordict_priority(batch)  # as of one buffer, no effect


@pytest.mark.parametrize("flat", [True, False])
def test_over_a_connection(tmp_path, flat):
    storage = LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "s")
    rb = filled(by_priority(window=WindowSpec(length=3, burn_in=1), flat=flat), storage=storage)
    with serving(tmp_path / "s") as server, ReplayBuffer.connect(server.address) as remote:
        _, info = remote.sample(16 if flat else 4, return_info=True)
        before, errors = leaves(rb), torch.tensor([2.0, 3.0, 5.0, 7.0])
        remote.update_priority(info, errors)
        remote.sample(16 if flat else 4)  # what was sent before has been done
        assert torch.equal(leaves(rb), expected(before, info["index"][0].reshape(4, 4).tolist(), [1] * 4, errors))
    rb.close()


def test_one_priority_is_that_of_all_windows():
    rb = filled(by_priority(slice_len=4))
    _, info = rb.sample(16, return_info=True)
    rb.update_priority(info, torch.tensor([3.0]))
    assert leaves(rb)[info["index"][0]].tolist() == [3] * 16
