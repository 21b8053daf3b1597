"""Frames before each step of a window, actions after it: as one step at a time gives them, and as TorchRL's."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    ActionChunkTransform,
    CatFrames,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    SliceSampler,
    TensorDictReplayBuffer,
    WindowSpec,
)
from tests.transforms.batches import same


@pytest.fixture(scope="module")
def torchrl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchrl")
        from torchrl.envs import transforms

        return transforms


@st.composite
def windows(draw):
    """Windows whose frames are numbers, with ends at random. The next frame of a step is the frame of the following one."""
    lead = draw(st.lists(st.integers(1, 3), min_size=0, max_size=2))
    length, shape = draw(st.integers(1, 7)), draw(st.sampled_from([[1], [2, 3]]))
    lanes = int(np.prod(lead, dtype=int))
    done = torch.tensor(draw(st.lists(st.booleans(), min_size=lanes * length, max_size=lanes * length)))
    frames = torch.arange(lanes * length * 2 * int(np.prod(shape))).float().reshape(2, *lead, length, *shape)
    obs, following = frames[0], frames[1].clone()
    done = done.reshape(*lead, length)
    goes_on = ~done[..., :-1]
    following[..., :-1, *[slice(None)] * len(shape)][goes_on] = obs[..., 1:, *[slice(None)] * len(shape)][goes_on]
    return TensorDict(
        {"obs": obs, "action": obs.flatten(len(lead) + 1), "next": {"obs": following, "done": done.unsqueeze(-1)}},
        [*lead, length],
    )


def one_by_one(td, n, padding, future=False):
    """For each lane and step: the numbers of the steps of its window, None where one is missing."""
    done = td["next", "done"].reshape(-1, td.shape[-1])
    found = []
    for lane in done:
        rows = []
        for t in range(len(lane)):
            at, row = t, [t]
            for _ in range(n - 1):
                stop = (at is None) or (lane[at] if future else at == 0 or lane[at - 1])
                if future and at is not None and at == len(lane) - 1:
                    stop = True
                at = None if stop else at + (1 if future else -1)
                row.append(at)
            rows.append(row if future else row[::-1])
        found.append(rows)
    return found


@settings(max_examples=60)
@given(td=windows(), n=st.integers(1, 4), padding=st.sampled_from(["same", "constant"]), future=st.booleans())
def test_frames_one_by_one(td, n, padding, future):
    made = CatFrames(
        n, -1, ["obs"], ["stack"], padding=padding, padding_value=-3, future=future, mask_key="padded"
    ).forward(td)
    obs = td["obs"].reshape(-1, *td["obs"].shape[td.ndim - 1 :])
    stack = made["stack"].reshape(-1, td.shape[-1], *made["stack"].shape[td.ndim :])
    mask = made["padded"].reshape(-1, td.shape[-1], n)
    for lane, rows in enumerate(one_by_one(td, n, padding, future)):
        for t, row in enumerate(rows):
            inside = [step for step in row if step is not None]
            edge = inside[-1 if future else 0]
            frames = [obs[lane, edge if padding == "same" else 0] if step is None else obs[lane, step] for step in row]
            if padding == "constant":
                frames = [torch.full_like(f, -3) if step is None else f for f, step in zip(frames, row, strict=True)]
            assert torch.equal(stack[lane, t], torch.cat(frames, -1))
            assert mask[lane, t].tolist() == [step is None for step in row]
    same(td["obs"], made["obs"])


@pytest.mark.filterwarnings("ignore:The last dimension")
@settings(max_examples=60)
@given(td=windows(), n=st.integers(1, 4), padding=st.sampled_from(["same", "constant"]), dim=st.sampled_from([-1, -2]))
def test_as_torchrls(torchrl, td, n, padding, dim):
    if td["obs"].ndim - td.ndim < -dim:
        return
    beside = {
        "in_keys": ["obs", ("next", "obs")],
        "out_keys": ["stack", ("next", "stack")],
        "padding": padding,
        "padding_value": 9,
    }
    alone = {"in_keys": ["obs"], "padding": padding, "mask_key": "padded"}
    forms = [alone, {**alone, "future": True}]
    if n > 1 and td["obs"].ndim - td.ndim == -dim:  # theirs raises an IndexError, or a RuntimeError, for others
        forms.append(beside)
    for arguments in forms:
        ours, theirs = CatFrames(n, dim, **arguments), torchrl.CatFrames(n, dim, **arguments)
        same(ours.forward(td.clone()).to_dict(), theirs.forward(td.clone()).to_dict())
    chunks = td.select("action", "next")
    same(
        ActionChunkTransform(n).forward(chunks.clone()).to_dict(),
        torchrl.ActionChunkTransform(n).forward(chunks.clone()).to_dict(),
    )


def episodes(n):
    t = torch.arange(n)
    done = (t % 7 == 6).unsqueeze(-1)
    obs = torch.stack([t, 100 + t], -1).float()
    following = torch.where(done, obs + 0.5, torch.roll(obs, -1, 0))
    return TensorDict({"obs": obs, "t": t, "next": {"obs": following, "done": done}}, [n])


@pytest.mark.parametrize("out_keys", [None, ["stack"]])
@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize("disk", [False, True])
def test_a_buffer_of_single_frames(tmp_path, out_keys, padding, disk):
    cat = CatFrames(3, -1, ["obs"], out_keys, padding=padding, padding_value=-1)
    transform, sampler = cat.make_rb_transform_and_sampler(16)
    assert type(sampler) is FrameStack
    storage = LazyMemmapStorage(40, scratch_dir=tmp_path / "s") if disk else LazyTensorStorage(40)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, transform=transform, batch_size=16)
    data = episodes(35)
    if out_keys:
        data["stack"] = torch.zeros(35, 6)  # is not stored
        data["next", "stack"] = torch.zeros(35, 6)
    rb.extend(data)
    assert "stack" not in rb.storage[:].keys(True)
    whole = CatFrames(
        3, -1, ["obs", ("next", "obs")], ["stack", ("next", "stack")], padding=padding, padding_value=-1
    ).forward(episodes(35))
    for _ in range(4):
        batch = rb.sample()
        name = out_keys[0] if out_keys else "obs"
        assert torch.equal(batch[name], whole["stack"][batch["t"]])
        assert torch.equal(batch["next", name], whole["next", "stack"][batch["t"]])
        if out_keys:
            assert torch.equal(batch["obs"], whole["obs"][batch["t"]])
            assert torch.equal(batch["next", "obs"], whole["next", "obs"][batch["t"]])


def test_chunks_of_sampled_windows():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=SliceSampler(window=WindowSpec(5), flat=False),
        transform=ActionChunkTransform(3, action_key="obs"),
        batch_size=20,
    )
    rb.extend(episodes(35))
    batch = rb.sample()
    assert batch["vla_action", "chunk"].shape == (20, 5, 3, 2)
    later = torch.minimum(torch.arange(5).unsqueeze(-1) + torch.arange(3), torch.tensor(4))
    assert torch.equal(batch["vla_action", "chunk"], batch["obs"][:, later])
    assert torch.equal(batch["action_is_pad"][0], torch.arange(5).unsqueeze(-1) + torch.arange(3) > 4)


def test_frames_of_windows_that_are_written():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
    rb.append_transform(CatFrames(2, -1, ["obs"], ["stack"], as_inverse=True))
    data = episodes(12).reshape(3, 4)
    rb.extend(data)
    expected = CatFrames(2, -1, ["obs"], ["stack"]).forward(data)
    assert torch.equal(rb[:]["stack"], expected["stack"])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: CatFrames(0, -1), ValueError, "N: expected at least 1, got 0"),
        (lambda: CatFrames(2, -1.5), TypeError, "dim: expected an int, got float"),
        (lambda: ActionChunkTransform(2, time_dim="x"), TypeError, "time_dim: expected an int, got str"),
        (lambda: CatFrames(2, 0), ValueError, "dim: expected a negative number.*got 0"),
        (lambda: CatFrames(2, -1, padding="zeros"), ValueError, "expected 'same' or 'constant', got 'zeros'"),
        (
            lambda: CatFrames(2, -1, ["a"], ["b", "c"]),
            ValueError,
            "in_keys and out_keys: expected equally many keys, got 1 and 2",
        ),
        (lambda: CatFrames(2, -1, [1.5]), TypeError, "got 1.5"),
        (lambda: ActionChunkTransform(0), ValueError, "chunk_size: expected at least 1, got 0"),
        (lambda: ActionChunkTransform(2, time_dim=1), ValueError, "time_dim: expected a negative number.*got 1"),
    ],
)
def test_arguments_that_are_wrong(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_batches_that_do_not_fit():
    td = episodes(6)
    with pytest.raises(KeyError, match=r"CatFrames: expected the end flag \('next', 'done'\)"):
        CatFrames(2, -1, ["obs"])(td.exclude(("next", "done")))
    with pytest.raises(KeyError, match="expected the key 'frame'"):
        CatFrames(2, -1, ["frame"])(td)
    with pytest.raises(ValueError, match=r"dim: expected one of shape \[2\], got -2"):
        CatFrames(2, -2, ["obs"])(td)
    with pytest.raises(ValueError, match="whose last dimension is time"):
        CatFrames(2, -1, ["obs"])(td[0])
    with pytest.raises(ValueError, match=r"expected 2 dimensions of a batch, got \[6\]"):
        CatFrames(2, -1, ["obs"])({"obs": torch.zeros(6, 3, 1), "next": {"done": torch.zeros(6)}})
    for flags in ((1, 3), (1, 6), (2, 4)):
        batch = {"obs": torch.zeros(1, 4, 1), "action": torch.zeros(1, 4, 1), "next": {"done": torch.zeros(*flags) > 0}}
        for transform in (CatFrames(2, -1, ["obs"]), ActionChunkTransform(2)):
            with pytest.raises(ValueError, match=rf"expected \[{flags[0]}, {flags[1]}\] steps.*got shape \[1, 4, 1\]"):
                transform(batch)
    with pytest.raises(KeyError, match="expected the key 'action'"):
        ActionChunkTransform(2)(td)
    with pytest.raises(ValueError, match="time_dim=-2: got actions"):
        ActionChunkTransform(2)({"action": torch.zeros(3)})
    with pytest.raises(NotImplementedError, match="SliceSampler"):
        CatFrames(2, -1, ["obs"], future=True).make_rb_transform_and_sampler(4)
