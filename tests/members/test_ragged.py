"""Batches of several buffers whose rows have ragged fields: each row holds what its number says, in every layout."""

import itertools

import pytest
import torch
from tensordict import TensorDict

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    OfflineToOnlineReplayBuffer,
    PrioritizedSampler,
    Ragged,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    TensorDictReplayBuffer,
    WindowSpec,
    prefill_replay_buffer,
)

LAYOUTS = ["jagged", "packed", "padded", "list"]
SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "priority": lambda: PrioritizedSampler(alpha=1.0, beta=1.0),
    "consuming": lambda: ConsumingSampler(1000),
    "slices": lambda: SliceSampler(slice_len=2, traj_key="episode"),
    "returns": lambda: NStep(RandomSampler(), 2, 0.5, traj_key="episode"),
}


def length_of(number):
    return number * 7 % 13


def text_of(number):
    return f"row {number} " + "é" * (number % 5)


def row_of(number):
    tokens = torch.full((length_of(number),), number, dtype=torch.int32)
    row = {"number": torch.tensor(number), "episode": torch.tensor(number // 5), "tokens": tokens}
    return {**row, "log_prob": -tokens.float(), "text": text_of(number), "next": {"reward": torch.ones(())}}


def storage(layout, capacity=64, folder=None, most=12, **given):
    fields = {
        "tokens": Ragged(torch.int32, max_length=most),
        "log_prob": Ragged(torch.float32, like="tokens"),
        "text": Ragged("utf-8", max_length=40),
    }
    given |= {"ragged": fields, "layout": layout}
    return (
        LazyTensorStorage(capacity, **given)
        if folder is None
        else LazyMemmapStorage(capacity, scratch_dir=folder, **given)
    )


def member(first, n, layout, sampler=RandomSampler, cls=ReplayBuffer, folder=None, **given):
    rb = cls(storage=storage(layout, folder=folder), sampler=sampler(), **given)
    for number in range(first, first + n):
        rb.add(row_of(number) if cls is ReplayBuffer else TensorDict(row_of(number)))
    return rb


def items(batch, name, layout):
    """What rows hold, as lists."""
    found = batch[name]
    part = (lambda key: found[key]) if isinstance(batch, TensorDict) else (lambda key: getattr(found, key))
    if layout == "packed":
        ends = part("cu_seqlens").tolist()
        assert (ends[0], ends[-1]) == (0, len(part("values")))
        longest = max(end - begin for begin, end in itertools.pairwise(ends))
        assert part("max_seqlen") == longest
        return [part("values")[begin:end].tolist() for begin, end in itertools.pairwise(ends)]
    if layout == "padded":
        values, mask = part("values"), part("mask")
        assert not values[~mask].any()
        return [row[there].tolist() for row, there in zip(values, mask, strict=True)]
    return [row.tolist() for row in (found.unbind() if layout == "jagged" else found)]


def check(batch, layout):
    """That each row of a batch holds what its number says. The numbers."""
    numbers = batch["number"].tolist()
    assert items(batch, "tokens", layout) == [[number] * length_of(number) for number in numbers]
    assert items(batch, "log_prob", layout) == [[-float(number)] * length_of(number) for number in numbers]
    assert list(batch["text"]) == [text_of(number) for number in numbers]
    return numbers


# ---- ensembles -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_batch_has_the_rows_of_all_parts_one_after_the_other(kind, layout, cls):
    torch.manual_seed(1)
    members = [member(100 * i, 20, layout, SAMPLERS[kind], cls) for i in range(3)]
    rb = ReplayBufferEnsemble(*members, batch_size=24, num_buffer_sampled=4)
    seen = set()
    for _ in range(4):
        batch, info = rb.sample(return_info=True)
        numbers = check(batch, layout)
        assert len(numbers) == 24
        ids, index = info["index", "buffer_ids"], info["index", "index"]
        assert [100 * of + row for of, row in zip(ids.tolist(), index.tolist(), strict=True)] == numbers
        parts = ids.reshape(4, 6)
        assert bool((parts == parts[:, :1]).all())  # each part is of one member
        if kind == "slices":
            assert all(b == a + 1 for a, b in zip(numbers[::2], numbers[1::2], strict=True))
        if kind == "returns":
            steps = [1 if number % 5 == 4 else 2 for number in numbers]
            assert batch["steps_to_next_obs"].flatten().tolist() == steps
            assert batch["next"]["reward"].tolist() == [1 + 0.5 * (it - 1) for it in steps]
        seen.update(ids.tolist())
    assert seen == {0, 1, 2}


def test_priorities_of_a_batch_go_to_the_rows_it_names():
    members = [
        member(100 * i, 20, "packed", SAMPLERS["priority"], TensorDictReplayBuffer, priority_key="td") for i in range(2)
    ]
    rb = ReplayBufferEnsemble(*members, batch_size=16)
    rb.update_priority({"buffer_ids": torch.tensor([0, 1]), "index": torch.tensor([3, 7])}, torch.tensor([1e6, 1e6]))
    assert set(rb.sample()["number"].tolist()) == {3, 107}
    _, info = rb.sample(return_info=True)
    rb.update_priority(info["index"], torch.full((16,), 1e-9))
    assert not {3, 107} & set(rb.sample()["number"].tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_member_in_a_folder_and_batches_ahead_are_joined_as_well(tmp_path, layout):
    members = [member(0, 20, layout, folder=tmp_path / "rows"), member(100, 20, layout)]
    rb = ReplayBufferEnsemble(*members, batch_size=8, prefetch=2)
    for _ in range(5):
        check(rb.sample(), layout)


def test_rows_are_laid_out_as_in_the_first_part():
    rb = ReplayBufferEnsemble(member(0, 9, "list"), member(100, 9, "list"), batch_size=8, transform=lambda it: it)
    check(rb.sample(), "list")
    rb = ReplayBufferEnsemble(member(0, 9, "list"), member(100, 9, "list"), batch_size=8, collate_fn=list)
    parts = rb.sample()
    assert len(parts) == 2
    for part in parts:
        assert len(check(part, "list")) == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_cannot_be_stacked_is_refused_with_what_to_do(layout):
    first, second = member(0, 20, layout), member(100, 20, layout)
    rb = ReplayBufferEnsemble(first, second, batch_size=8)
    with pytest.raises(RuntimeError, match=r"expected parts of one shape.*got ragged fields.*rb\[i, rows\]"):
        rb[:, [1, 2]]
    assert check(rb[1, [1, 2]], layout) == [101, 102]
    second.append_transform(lambda batch: batch)
    for _ in range(10):  # whichever members are drawn
        with pytest.raises(RuntimeError, match=r"expected parts of one shape.*Give transforms"):
            rb.sample()


def test_windows_with_a_dimension_of_their_own_are_refused():
    def windows():
        spec = WindowSpec(length=2, burn_in=0, padding=1, period=1)
        return SliceSampler(window=spec, flat=False, traj_key="episode")

    rb = ReplayBufferEnsemble(member(0, 20, "jagged", windows), member(100, 20, "jagged", windows), batch_size=8)
    with pytest.raises(RuntimeError, match=r"expected one batch dimension of rows with ragged fields.*flat windows"):
        rb.sample()


@pytest.mark.parametrize(
    "given", [{"ragged_bytes": 9_000}, {"ragged_layout": "slots"}, {"capacity": 30}, {"most": 20}], ids=repr
)
def test_members_need_no_rings_of_one_size(given):
    other = ReplayBuffer(storage=storage("list", **given))
    for number in range(100, 120):
        other.add(row_of(number))
    for members in ((member(0, 9, "list"), other), (other, member(0, 9, "list"))):
        numbers = check(ReplayBufferEnsemble(*members, batch_size=8).sample(), "list")
        assert len({number < 100 for number in numbers}) == 2


def test_members_with_other_ragged_fields_are_refused():
    other = ReplayBuffer(storage=LazyTensorStorage(9, ragged={"tokens": Ragged(torch.int64, max_length=12)}))
    other.extend({"number": torch.arange(4), "tokens": [torch.arange(n) for n in range(4)]})
    rb = ReplayBufferEnsemble(member(0, 20, "list"), other, batch_size=8)
    with pytest.raises((KeyError, RuntimeError), match="expected"):
        rb.sample()


def test_units_that_name_several_rows_are_joined():
    members = [
        member(100 * i, 20, "packed", sample_unit=Sequence(length=2, traj_key="episode", done_key=None))
        for i in range(2)
    ]
    rb = ReplayBufferEnsemble(*members, batch_size=8)
    assert len(check(rb.sample(), "packed")) == 16


# ---- offline to online -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_the_dataset_come_first_then_those_that_were_added(layout, cls):
    rb = OfflineToOnlineReplayBuffer(
        member(0, 30, layout, cls=cls), online_storage=storage(layout), offline_fraction=0.25, batch_size=12
    )
    assert all(number < 30 for number in check(rb.sample(), layout))
    for number in range(100, 120):
        rb.add(row_of(number) if cls is ReplayBuffer else TensorDict(row_of(number)))
    seen = set()
    for _ in range(20):
        batch = rb.sample()
        numbers = check(batch, layout)
        assert [number < 30 for number in numbers] == [True] * 3 + [False] * 9
        assert "index" not in batch.keys()
        seen.update(numbers)
    assert len(seen) > 30  # drawn, not the first ones again and again


def test_the_same_seed_joins_the_same_rows():
    def drawn():
        torch.manual_seed(7)
        rb = OfflineToOnlineReplayBuffer(member(0, 30, "list"), online_storage=storage("list"), batch_size=12)
        rb.add(row_of(100))
        rb.add(row_of(101))
        return [rb.sample()["number"].tolist() for _ in range(3)]

    assert drawn() == drawn()


def test_datasets_whose_ragged_rows_cannot_be_joined_are_refused():
    class Other:
        def __len__(self):
            return 4

        def sample(self, n):
            return {"number": torch.arange(n)}

    rb = OfflineToOnlineReplayBuffer(Other(), online_storage=storage("list"), batch_size=4)
    rb.add(row_of(1))
    with pytest.raises(TypeError, match=r"expected a ReplayBuffer with ragged fields as offline_dataset.*got a Other"):
        rb.sample()
    offline = member(0, 9, "list")
    offline.append_transform(lambda batch: batch)
    rb = OfflineToOnlineReplayBuffer(offline, online_storage=storage("list"), batch_size=4)
    rb.add(row_of(1))
    with pytest.raises(RuntimeError, match=r"whose batches are what was read.*transform="):
        rb.sample()
    fixed = ReplayBuffer(storage=ListStorage(9))
    fixed.extend([1, 2])
    rb = OfflineToOnlineReplayBuffer(fixed, online_storage=storage("list"), batch_size=4)
    rb.add(row_of(1))
    with pytest.raises(TypeError, match=r"expected a ReplayBuffer with ragged fields"):
        rb.sample()


@pytest.mark.parametrize("layout", ["jagged", "packed", "list"])
def test_a_buffer_is_filled_with_ragged_rows_of_another(layout):
    fresh = prefill_replay_buffer(ReplayBuffer(storage=storage("list")), member(0, 30, layout), 10, chunk_size=4)
    assert check(fresh[:], "list") == list(range(10))
