"""Transforms see where windows end: nothing that a transform joins is of two windows, in any form of batches."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from engram import (
    ActionChunkTransform,
    CatFrames,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    WindowSpec,
)
from engram.buffer.window_marks import WindowMarks
from engram.transforms.windows import ends_of
from tests.serving.servers import serving

N, EPISODE = 120, 10


def rows(n=N, *, ends=True):
    """Episodes of ten steps; by ids alone without ``ends``."""
    at = torch.arange(n)
    data = {"episode": at // EPISODE, "i": at, "action": at.float().unsqueeze(1), "next": {"reward": torch.ones(n, 1)}}
    if ends:
        data["next"]["done"] = (at % EPISODE == EPISODE - 1).unsqueeze(1)
    return data


class Seen:
    """A transform of one's own: keeps what it is given."""

    def __call__(self, batch):
        self.done = batch["next"]["done"].clone()
        self.keys = {key if isinstance(key, str) else key[-1] for key in batch.keys()}
        return batch


def transforms(**keys):
    stack = CatFrames(N=3, dim=-1, in_keys=["action"], out_keys=["stack"], **keys)
    return [ActionChunkTransform(3, **keys), stack]


def made(sampler=None, *, td=True, data=None, storage=None, keys=None, **more):
    kind = TensorDictReplayBuffer if td else ReplayBuffer
    rb = kind(storage=storage or LazyTensorStorage(200), sampler=sampler or RandomSampler(), **more)
    data = rows() if data is None else data
    rb.extend(TensorDict(data, [len(data["i"])]) if td else data)
    for transform in transforms(**(keys or {})):
        rb.append_transform(transform)
    return rb


def check(batch, ends):
    """Refuse chunks and stacks of another window. ``ends``: bool ``[total]``, the last step of each window, before its padding."""
    i, ends = batch["i"].flatten(), ends.flatten()
    total = len(i)
    chunk, stack = batch["vla_action"]["chunk"].reshape(total, 3), batch["stack"].reshape(total, 3)
    pad = batch["action_is_pad"].reshape(total, 3)
    last = torch.where(ends, torch.arange(total), total).flip(0).cummin(0).values.flip(0)
    begins = torch.cat([torch.tensor([True]), ends[:-1]])
    first = torch.where(begins, torch.arange(total), 0).cummax(0).values
    ahead = torch.arange(total).unsqueeze(1) + torch.arange(3)
    back = torch.arange(total).unsqueeze(1) - torch.arange(2, -1, -1)
    assert torch.equal(pad, ahead > last.unsqueeze(1))
    assert torch.equal(chunk.long(), i[ahead.minimum(last.unsqueeze(1))])
    assert torch.equal(stack.long(), i[back.maximum(first.unsqueeze(1))])


def every(length, total):
    return torch.arange(1, total + 1) % length == 0


SAMPLERS = {
    "slices": lambda **more: SliceSampler(slice_len=4, **more),
    "number": lambda **more: SliceSampler(num_slices=8, **more),
    "epoch": lambda **more: SliceSamplerWithoutReplacement(slice_len=4, **more),
    "priority": lambda **more: PrioritizedSliceSampler(200, 0.7, 0.5, slice_len=4, **more),
    "spec": lambda **more: SliceSampler(window=WindowSpec(length=3, burn_in=1), **more),
    "shaped": lambda **more: SliceSampler(window=WindowSpec(length=3, burn_in=1), flat=False, **more),
    "returns": lambda **more: NStep(SliceSampler(slice_len=4, **more), 2, 0.9),
}


@pytest.mark.parametrize("td", [True, False])
@pytest.mark.parametrize("name", SAMPLERS)
def test_of_every_sampler(name, td):
    for more in ({}, {"truncated_key": None}, {"truncated_key": ("a", "cut")}):
        rb = made(
            SAMPLERS[name](**more), td=td, data=rows(ends=name != "returns")
        )  # whose flags are those of later steps
        for _ in range(3):
            batch = rb.sample(8 if name == "shaped" else 32)
            check(batch, every(4, batch["i"].numel()))  # the last batch of an epoch is shorter
            assert ".engram" not in batch.keys()


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("keys", [{"done_key": "over"}, {}])
def test_whatever_flag_the_transforms_read(keys, ends):
    data = rows(ends=ends)
    check(made(SliceSampler(slice_len=5), data=data, keys=keys).sample(40), every(5, 40))
    check(made(SliceSampler(slice_len=5), data=data, keys=keys, td=False).sample(40), every(5, 40))


@pytest.mark.parametrize("td", [True, False])
def test_windows_of_several_lengths(td):
    data = {**rows(), "episode": torch.arange(N) // 3}
    data["next"]["done"] = torch.zeros(N, 1, dtype=torch.bool)
    for sampler in (SliceSampler(slice_len=4, strict_length=False), SliceSampler(slice_len=3, span=True)):
        batch, info = made(sampler, td=td, data=data).sample(36, return_info=True)
        check(batch, info["next", "truncated"].clone())


@pytest.mark.parametrize("td", [True, False])
def test_padding_is_of_no_window(td):
    data = {**rows(), "episode": torch.arange(N) // 3}
    data["next"]["done"] = torch.zeros(N, 1, dtype=torch.bool)
    padded = SliceSampler(slice_len=5, strict_length=False, pad_output=True)
    spec = SliceSampler(window=WindowSpec(length=4, burn_in=2, padding=2), strict_length=False)
    for sampler, length, mask in ((padded, 5, ("collector", "mask")), (spec, 6, "validity_mask")):
        batch, info = made(sampler, td=td, data=data).sample(10 * length, return_info=True)
        valid = info[mask].flatten()
        assert not valid.all()
        assert torch.equal(batch["i"] // 3, (batch["i"].reshape(10, length)[:, 2:3] // 3).expand(10, length).flatten())
        check(batch, every(length, 10 * length) | (valid != valid.roll(-1)))


@pytest.mark.parametrize("td", [True, False])
@pytest.mark.parametrize("unit", [{}, {"episode_boundary": "stop"}, {"burn_in": 2, "bootstrap": 1}, {"done_key": None}])
def test_of_sequences(unit, td):
    seen, rb = Seen(), made(td=td, sample_unit=Sequence(4, **unit))
    rb.append_transform(seen)
    batch, info = rb.sample(10, return_info=True)
    total = 4 + unit.get("burn_in", 0) + unit.get("bootstrap", 0)
    valid = info["validity_mask"]
    stored = batch["i"] % EPISODE == EPISODE - 1
    check(batch, every(total, 10 * total) | (valid != valid.roll(-1)) | stored)
    assert torch.equal(batch["next"]["done"].flatten(), stored)  # as it is stored
    if unit.get("done_key", 1) is not None:
        assert seen.done.flatten()[every(total, 10 * total)].all()


def test_of_sequences_that_cross_episodes():
    batch = made(sample_unit=Sequence(4, "include_reset")).sample(50)
    check(batch, every(4, 200) | (batch["i"] % EPISODE == EPISODE - 1))


@pytest.mark.parametrize("td", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_own_transforms_see_flags_which_batches_of_dicts_have_as_stored(td, ends):
    seen = Seen()
    rb = made(SliceSampler(slice_len=4), td=td, data=rows(ends=ends))
    rb.append_transform(seen)
    batch, info = rb.sample(32, return_info=True)
    marks = every(4, 32) | (batch["i"] % EPISODE == EPISODE - 1 if ends else False)
    assert torch.equal(seen.done.flatten(), marks)
    assert torch.equal(info["next", "done"].flatten(), marks)
    if td:
        assert torch.equal(batch["next", "done"].flatten(), marks)
    else:
        assert set(batch["next"]) == ({"reward", "done"} if ends else {"reward"})
        assert not ends or torch.equal(batch["next"]["done"], rows()["next"]["done"][batch["i"]])


@pytest.mark.parametrize("td", [True, False])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda **more: SliceSampler(slice_len=4, strict_length=False, **more),
        lambda **more: SliceSampler(slice_len=4, span=True, **more),
        lambda **more: SliceSampler(num_slices=9, span=(True, 2), **more),
        lambda **more: PrioritizedSliceSampler(200, 0.7, 0.5, slice_len=4, strict_length=False, **more),
        lambda **more: SliceSamplerWithoutReplacement(slice_len=4, strict_length=False, **more),
    ],
)
def test_windows_of_several_lengths_that_nothing_marks(sampler, td):
    data = {**rows(), "episode": torch.arange(N) // 6}
    data["next"]["done"] = torch.zeros(N, 1, dtype=torch.bool)
    both = []
    for more in ({}, {"truncated_key": None}):
        made_with = sampler(**more)
        both.append(made(made_with, td=td, data=data, generator=torch.Generator().manual_seed(5)))
        assert made_with.rows_together() == (0, 0)
    (expected, marked), (batch, info) = (rb.sample(36, return_info=True) for rb in both)
    assert torch.equal(batch["i"], expected["i"])
    check(batch, marked["next", "truncated"].clone())
    assert not {key for key in (*batch.keys(), *info) if ".engram" in key}
    plain = ReplayBuffer(storage=both[1].storage, sampler=both[1].sampler)
    for found in (plain.sample(36, return_info=True)[1], plain.sampler.sample(plain.storage, 36)[1]):
        assert ".engram" not in found


@pytest.mark.parametrize("td", [True, False])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("stored", "keys", "seen"),
    [
        (("done",), {}, ["done"]),
        (("done", "truncated", "terminated"), {}, ["done", "truncated"]),
        ((("next", "over"),), {"end_keys": [("next", "over")]}, [("next", "over")]),
        (("over", "cut"), {"end_keys": ["over", "cut"]}, ["over", "cut"]),
        (("over",), {"end_key": "over"}, ["over"]),
        (("done", ("next", "done")), {}, [("next", "done")]),  # of this observation, and of the next
    ],
)
def test_own_transforms_see_flags_of_other_names(stored, keys, seen, strict, td):
    at = torch.arange(N)
    data, end = {"episode": at // EPISODE, "i": at, "next": {"reward": torch.ones(N)}}, at % EPISODE == EPISODE - 1
    for key in stored:
        (data if isinstance(key, str) else data["next"])[key if isinstance(key, str) else key[1]] = end
    found = {}

    def own(batch):
        found.update({key: batch[key] if isinstance(key, str) else batch[key[0]][key[1]] for key in stored})
        found.update({key: flag.clone() for key, flag in found.items()})
        return batch

    rb = (TensorDictReplayBuffer if td else ReplayBuffer)(
        storage=LazyTensorStorage(200), sampler=SliceSampler(slice_len=4, strict_length=strict, **keys), transform=own
    )
    rb.extend(TensorDict(data, [N]) if td else data)
    batch = rb.sample(64)
    real, i = end[batch["i"]], batch["i"]
    ends = torch.cat([i[1:] != i[:-1] + 1, torch.tensor([True])])  # and where two windows meet, if they are even
    for key in stored:
        flag = found[key].flatten()
        assert not strict or torch.equal(flag, real | every(4, 64) if key in seen else real)
        assert bool((flag | ~ends).all()) == (key in seen)
        if key != ("next", "done"):  # which the sampler marks in batches of TensorDicts
            after = batch[key] if isinstance(key, str) else batch[key[0]][key[1]]
            assert torch.equal(after.flatten(), real)


def test_step_types_are_no_flags():
    at = torch.arange(N)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=SliceSampler(slice_len=4, end_keys=["step_type"]),
        transform=lambda batch: {**batch, "seen": batch["step_type"].clone()},
    )
    rb.extend({"i": at, "step_type": torch.where(at % EPISODE == EPISODE - 1, 2, torch.where(at % EPISODE == 0, 0, 1))})
    batch = rb.sample(64)
    assert torch.equal(batch["seen"], batch["step_type"])


@pytest.mark.parametrize(
    "more", [{"truncated_key": None}, {"truncated_key": ("a", "cut")}, {"truncated_key": None, "strict_length": False}]
)
def test_a_server_says_where_windows_end(tmp_path, more):
    padded = {"pad_output": True, "slice_len": 3} if "strict_length" in more else {"slice_len": 4}
    for number, form in enumerate(
        (padded, {"slice_len": 4}, {"window": WindowSpec(length=3, burn_in=1), "flat": False})
    ):
        folder, size = tmp_path / str(number), 8 if "window" in form else 24
        storage = LazyMemmapStorage(200, scratch_dir=folder)
        rb = TensorDictReplayBuffer(storage=storage, batch_size=size, sampler=SliceSampler(**form, **more))
        rb.extend(TensorDict(rows(), [N]))
        rb.close()
        with serving(folder) as server:
            rb = TensorDictReplayBuffer.connect(server.address)
            assert ".engram" not in rb.sample().keys()
            for transform in transforms():
                rb.append_transform(transform)
            batch = rb.sample()
            check(batch, every(form.get("slice_len", 4), batch["i"].numel()))
            assert ".engram" not in batch.keys()
            rb.close()


@pytest.mark.parametrize("td", [True, False])
def test_ensembles_of_windows_that_nothing_marks(td):
    members = []
    for _ in range(2):
        sampler = SliceSampler(slice_len=4, strict_length=False, truncated_key=None)
        members.append(
            (TensorDictReplayBuffer if td else ReplayBuffer)(storage=LazyTensorStorage(200), sampler=sampler)
        )
        data = {**rows(ends=False), "episode": torch.arange(N) // 4}
        members[-1].extend(TensorDict(data, [N]) if td else data)
    rb = ReplayBufferEnsemble(*members, num_buffer_sampled=2)
    assert ".engram" not in rb.sample(64, return_info=True)[1].keys()
    for transform in transforms():
        rb.append_transform(transform)
    batch, info = rb.sample(64, return_info=True)
    check(batch, every(4, 64))
    assert not {key for key in (*batch.keys(), *info.keys()) if key == ".engram"}


def test_ends_are_where_the_flags_are():
    flags = torch.zeros(4, dtype=torch.bool, device="meta")  # no device of its own is needed
    assert (
        ends_of({"next": {"done": flags}, ".engram": every(4, 4).unsqueeze(1)}, "done", 1, "test").device
        == flags.device
    )
    rb = made(SliceSampler(slice_len=4, truncated_key=None))
    storage = SimpleNamespace(device=flags.device)
    wiring = SimpleNamespace(unit=None, source=rb.sampler, storage=storage)
    assert WindowMarks(wiring, {}, (8,), ()).ends.device == flags.device


def test_flags_that_a_transform_moves_or_changes():
    rb = made(SliceSampler(slice_len=4), td=False)
    rb.append_transform(lambda batch: {**batch, "next": {"done": ~batch["next"]["done"]}})
    batch = rb.sample(16)
    assert torch.equal(batch["next"]["done"].flatten(), ~every(4, 16))
    rb = made(SliceSampler(slice_len=4), td=False, data=TensorDict(rows(), [N]))
    rb.append_transform(lambda batch: batch.reshape(-1, 4))
    batch = rb.sample(16)
    assert batch.shape == (4, 4)
    assert torch.equal(batch["next", "done"].squeeze(-1), batch["i"] % EPISODE == EPISODE - 1)
    assert set(batch["next"].keys()) == {"reward", "done"}


def test_a_window_per_row_after_a_transform():
    rb = ReplayBuffer(storage=LazyTensorStorage(200), sampler=SliceSampler(slice_len=4, truncated_key=None))
    rb.extend(TensorDict(rows(), [N]))
    for transform in (lambda batch: batch.reshape(-1, 4), *transforms(done_key="none")):
        rb.append_transform(transform)
    check(rb.sample(16), every(4, 16))


@pytest.mark.parametrize("td", [True, False])
def test_of_ensembles(td):
    members = []
    for length in (4, 4):
        members.append(
            (TensorDictReplayBuffer if td else ReplayBuffer)(
                storage=LazyTensorStorage(200), sampler=SliceSampler(slice_len=length)
            )
        )
        members[-1].extend(TensorDict(rows(), [N]) if td else rows())
    rb = ReplayBufferEnsemble(*members, num_buffer_sampled=2)
    for transform in transforms():
        rb.append_transform(transform)
    check(rb.sample(64), every(4, 64))


@pytest.mark.parametrize("where", ["directory", "columns", "prefetch", "connection"])
@pytest.mark.parametrize("name", ["slices", "sequence"])
def test_wherever_they_are_drawn(tmp_path, where, name):
    more = {"sample_unit": Sequence(4)} if name == "sequence" else {"sampler": SliceSampler(slice_len=4)}
    size = 8 if name == "sequence" else 32

    def stored(batch):
        return batch["i"] % EPISODE == EPISODE - 1 if name == "sequence" else False

    storage = LazyMemmapStorage(200, scratch_dir=tmp_path / "rows") if where == "directory" else None
    if where == "columns":
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(200, ndim=2), **more)
        rb.extend(torch.stack([TensorDict(rows(60), [60])] * 2))
        for transform in transforms():
            rb.append_transform(transform)
    elif where == "connection":
        folder = tmp_path / "rows"
        rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(200, scratch_dir=folder), batch_size=size, **more)
        rb.extend(TensorDict(rows(), [N]))
        rb.close()
        with serving(folder) as server:
            rb = TensorDictReplayBuffer.connect(server.address)
            for transform in transforms():
                rb.append_transform(transform)
            batch = rb.sample()
            rb.close()
    else:
        rb = made(storage=storage, batch_size=size, prefetch=2 if where == "prefetch" else None, **more)
    if where != "connection":
        batch = rb.sample(size)
    valid = batch["validity_mask"] if name == "sequence" else torch.ones(32, dtype=torch.bool)
    check(batch, every(4, 32) | (valid != valid.roll(-1)) | stored(batch))
    rb.close()


def test_transforms_that_convert_everything():
    to_numpy = lambda batch: {k: to_numpy(v) if isinstance(v, dict) else v.numpy() for k, v in batch.items()}  # noqa: E731
    to_float = lambda batch: {k: to_float(v) if isinstance(v, dict) else v.float() for k, v in batch.items()}  # noqa: E731
    for change in (to_numpy, to_float):
        rb = ReplayBuffer(storage=LazyTensorStorage(200), sampler=SliceSampler(slice_len=4), transform=change)
        rb.extend(rows())
        batch = rb.sample(32)
        assert set(batch) == {"episode", "i", "action", "next"}
        assert set(batch["next"]) == {"reward", "done"}
        assert type(batch["next"]["done"]) is type(batch["i"])
        assert batch["next"]["done"].flatten().tolist() == (batch["i"] % EPISODE == EPISODE - 1).tolist()
