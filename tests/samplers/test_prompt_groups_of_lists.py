"""PromptGroupSampler over LazyStackStorage: rows are TensorDicts of any shapes, and keys may be strings."""

import pickle
import threading
from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    CompressedListStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
)
from engram.storages.list import ItemGroups
from tests.samplers.test_prompt_groups import STRATEGIES, groups_of, quiet, rows
from tests.statistics_of import assert_uniform


def tds(keys, first=0, rewards=None):
    return TensorDict(rows(keys, first, rewards), [len(keys)])


def texts(keys, first=0):
    """Rows whose keys are strings."""
    made = [row.exclude("query") for row in tds(torch.zeros(len(keys)), first).unbind(0)]
    for row, key in zip(made, keys, strict=True):
        row["query"] = key
        row["tokens"] = torch.zeros(len(key))
    return made


def buffer(data, batch_size=4, *, capacity=None, seed=0, storage=None, **arguments):
    counts = {} if "samples_per_group" in arguments else {"num_groups": 2}
    rb = ReplayBuffer(
        storage=LazyStackStorage(capacity or len(data)) if storage is None else storage,
        sampler=PromptGroupSampler(**counts | arguments),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
    )
    if data is not None and len(data):
        rb.extend(data)
    return rb


def drawn(rb, n=5):
    return [quiet(rb)["row"].tolist() for _ in range(n)]


# ---- which rows --------------------------------------------------------------------------------------------------------------


def test_the_example_of_torchrl_goes():
    rb = ReplayBuffer(
        storage=LazyStackStorage(100), sampler=PromptGroupSampler(num_groups=2, group_key="prompt"), batch_size=8
    )
    prompts = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    rb.extend(TensorDict({"prompt": prompts, "reward": torch.arange(12.0)}, batch_size=[12]))
    sample = rb.sample()
    assert int(sample["prompt"].unique().numel()) == 2
    assert int(sample.shape[0]) == 8


def test_groups_and_rows_are_equally_likely_and_none_comes_twice():
    keys = ["why"] * 3 + ["who"] * 5 + [""] * 4 + ["how"] * 6
    rb = buffer(texts(keys), 6)
    groups, found = Counter(), Counter()
    for _ in range(1_500):
        batch = rb.sample()
        rows_of = batch["row"].reshape(2, 3).tolist()
        assert len({row for of in rows_of for row in of}) == 6
        for of in rows_of:
            (key,) = {keys[row] for row in of}
            groups[key] += 1
            found.update(of)
    assert set(groups) == set(keys)
    assert_uniform(groups.values())
    for key in set(keys):
        assert_uniform([found[row] for row in range(len(keys)) if keys[row] == key])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_draws_are_those_of_a_tensor_storage(strategy):
    """Through a ring that is overwritten, edits, and an emptied buffer."""
    generator = torch.Generator().manual_seed(3)
    listed = buffer(None, 6, storage=LazyStackStorage(30), strategy=strategy)
    tensors = buffer(None, 6, storage=LazyTensorStorage(30), strategy=strategy)
    both, first = (listed, tensors), 0
    for n in (7, 25, 4, 30, 1):
        data = tds(torch.randint(0, 6, (n,), generator=generator), first)
        first += n
        for rb in both:
            rb.extend(data)
        assert drawn(listed) == drawn(tensors)
        for rb in both:
            rb[3] = tds([5], first)[0]
            rb.add(tds([2], first + 1)[0])
        first += 2
        assert drawn(listed) == drawn(tensors)
        assert listed.sampler.groups == tensors.sampler.groups
        if n == 4:
            for rb in both:
                rb.empty()
                assert rb.sampler.groups == 0
                with pytest.raises(NoSampleable):
                    rb.sample()


def test_the_newest_the_best_and_the_most_different_rows():
    rewards = [3.0, 9.0, 9.0, 1.0, -5.0, -1.0, -7.0]
    data = tds([1, 1, 1, 1, 2, 2, 2], rewards=rewards)
    assert dict(groups_of(buffer(data, strategy="recency").sample(), 2)) == {1: [2, 3], 2: [5, 6]}
    assert dict(groups_of(buffer(data, strategy="reward").sample(), 2)) == {1: [2, 1], 2: [5, 4]}
    assert dict(groups_of(buffer(data, strategy="variance").sample(), 2)) == {1: [3, 2], 2: [6, 5]}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_too_few_come_again_with_one_warning(strategy):
    rb = buffer(tds([1, 1, 2]), 12, num_groups=3, strategy=strategy)
    with pytest.warns(UserWarning, match=r"3 groups of 4 rows.*more than once"):
        batch = groups_of(rb.sample(), 4)
    assert {key for key, _ in batch} == {1, 2}
    for key, of in batch:
        assert set(of) == ({0, 1} if key == 1 else {2})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_rows_are_those_of_torchrl(strategy):
    rl = pytest.importorskip("torchrl.data")
    from torchrl.data.replay_buffers.samplers import PromptGroupSampler as Theirs

    keys = [f"prompt {number % 5}" for number in range(40)]
    data = texts(keys)
    rewards = torch.randperm(40, generator=torch.Generator().manual_seed(0)).float()
    for row, reward in zip(data, rewards, strict=True):
        row["next", "reward"] = reward
        del row["tokens"]
    found = []
    for storage, sampler, cls in (
        (rl.LazyStackStorage(40), Theirs, rl.ReplayBuffer),
        (LazyStackStorage(40), PromptGroupSampler, ReplayBuffer),
    ):
        rb = cls(storage=storage, sampler=sampler(num_groups=5, strategy=strategy), batch_size=15)
        rb.extend([row.clone() for row in data])
        batch = rb.sample()
        found.append(sorted(sorted(of) for of in batch["row"].reshape(5, 3).tolist()))
    assert found[0] == found[1]


# ---- what becomes of the list --------------------------------------------------------------------------------------------------


def test_a_draw_looks_at_no_row(monkeypatch):
    rb = buffer(tds(torch.arange(60) // 4), 8, capacity=80, strategy="reward")
    rb.sample()
    looked = []
    for name in ("_key_of", "_reward_of"):
        real = getattr(ItemGroups, name)
        monkeypatch.setattr(ItemGroups, name, lambda self, item, real=real: looked.append(item) or real(self, item))
    drawn(rb, 20)
    assert not looked
    rb.extend(tds([3, 3], 60))
    assert len(looked) == 4
    drawn(rb, 20)
    assert len(looked) == 4


def test_another_buffer_writes_to_the_same_list():
    rb = buffer(tds([1, 2, 3]), 2, capacity=6)
    other = ReplayBuffer(storage=rb.storage, sampler=RandomSampler())
    other.extend(tds([4, 4, 4, 4], 3))
    assert rb.sampler.groups == 3
    assert {int(key) for _ in range(50) for key in rb.sample()["query"]} == {2, 3, 4}


def test_samplers_by_other_keys_need_no_names():
    data = tds([0, 0, 1, 1]).set("user", torch.tensor([0, 1, 1, 1]))
    rb = buffer(data, 2, num_groups=1)
    assert rb.sampler.groups == 2
    rb.set_sampler(PromptGroupSampler(samples_per_group=3, group_key="user", strategy="recency", complete=False))
    assert rb.sampler.groups == 2
    rb.extend(data)
    assert sorted({tuple(quiet(rb, 3)["row"].tolist()) for _ in range(50)}) == [(0, 0, 0), (1, 2, 3)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["state", "dump", "checkpoint", "pickle"])
def test_draws_go_on_with_saved_rows(strategy, how, tmp_path):
    def made(seed):
        return buffer(None, 6, storage=LazyStackStorage(30), seed=seed, strategy=strategy)

    rb, again = made(1), made(2)
    rb.extend(tds([number % 7 for number in range(40)]))
    rb[5] = tds([3], 100)[0]
    quiet(rb)
    again.extend(tds([9, 9]))
    quiet(again)
    if how == "state":
        again.load_state_dict(rb.state_dict())
    elif how == "dump":
        rb.dumps(tmp_path / "dump")
        again.loads(tmp_path / "dump")
    elif how == "checkpoint":
        Checkpointer(tmp_path / "series", rb).save(1)
        Checkpointer(tmp_path / "series", again).restore()
    else:
        again = pickle.loads(pickle.dumps(rb))
    assert drawn(again) == drawn(rb)
    for one in (rb, again):
        one.extend(tds([3, 4, 5], 200))
    assert drawn(again) == drawn(rb)


def test_a_text_that_utf_8_cannot_say_is_a_key():
    rb = buffer(texts(["a", "\ud800", "\ud800"]), 2, num_groups=1)
    assert rb.sampler.groups == 2
    assert {tuple(sorted(rows)) for rows in drawn(rb, 40)} == {(0, 0), (1, 2)}


@pytest.mark.filterwarnings("ignore:PromptGroupSampler")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_group_that_lost_a_row_is_drawn_again_as_a_whole(strategy):
    """Before the first read, another thread overwrites rows that were drawn."""
    rb = buffer(tds([number % 10 for number in range(60)]), 9, num_groups=3, strategy=strategy)
    sampler, asked = rb.sampler, []
    draw, again = sampler.draw, sampler.draw_again

    def moving(*given):
        made = draw(*given)
        for row in made.rows[[0, 4]].tolist():
            rb[row] = tds([100], 1_000)[0]
        return made

    def noted(*given):
        places, made = again(*given)
        asked.append(places)
        return places, made

    sampler.draw, sampler.draw_again = moving, noted
    batch = groups_of(rb.sample(), 3)
    assert asked == [[0, 1, 2, 3, 4, 5]]
    assert len({key for key, _ in batch}) == 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_stay_groups_while_another_thread_writes(strategy):
    rb = buffer(tds(torch.arange(64) % 8), 8, strategy=strategy)
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            rb.extend(tds(torch.arange(number, number + 5) % 8, number))
            number += 5

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            assert len({key for key, _ in groups_of(quiet(rb), 4)}) == 2
    finally:
        stop.set()
        writer.join()


# ---- keys and rewards ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (3, torch.tensor([3], dtype=torch.int16)),
        (True, torch.tensor(1)),
        ("why", torch.tensor([*b"why\0\0"], dtype=torch.uint8)),
        (b"why", "why"),
    ],
)
def test_equal_keys_are_one_group(one, other):
    rb = ReplayBuffer(
        storage=LazyStackStorage(4), sampler=PromptGroupSampler(num_groups=1), batch_size=2, collate_fn=list
    )
    rb.extend([{"query": key} for key in (one, other, 7, "7")])
    assert rb.sampler.groups == 3


@pytest.mark.parametrize(
    ("row", "error", "match"),
    [
        ({"prompt": 1}, KeyError, r"'query'.*got \['prompt'\].*group_key="),
        (3, KeyError, r"'query'.*got \[\]"),
        ({"query": 1.5}, TypeError, "an integer or a text in each row, got float"),
        ({"query": torch.zeros(2)}, TypeError, r"got torch.float32 \[2\]"),
        ({"query": torch.zeros(2, dtype=torch.int64)}, TypeError, r"got torch.int64 \[2\]"),
        ({"query": 1}, KeyError, r"'worth'.*got \['query'\].*reward_key="),
        ({"query": 1, "worth": "much"}, TypeError, "'worth'.*real numbers, got str"),
        ({"query": 1, "worth": torch.tensor([1j])}, TypeError, r"real numbers, got torch.complex64 \[1\]"),
        ({"query": 1, "worth": torch.zeros(0)}, TypeError, r"real numbers, got torch.float32 \[0\]"),
        ({"query": torch.tensor(1, device="meta"), "worth": 1.0}, RuntimeError, "meta"),
        ({"query": 1, "worth": torch.zeros(2, device="meta")}, RuntimeError, "meta"),
        ({"query": 1, "worth": 10**30}, ValueError, "'worth': .*Store another number"),
        ({"query": 1, "worth": float("nan")}, ValueError, "'worth'.*finite rewards, got nan in row 1"),
    ],
)
def test_rows_that_are_in_no_group(row, error, match):
    """Drawing says so, until the row is another one."""
    sampler = PromptGroupSampler(num_groups=1, strategy="reward", reward_key="worth")
    rb = ReplayBuffer(storage=LazyStackStorage(4), sampler=sampler, batch_size=2, collate_fn=list)
    good = {"query": 1, "worth": 2.0}
    rb.extend([good, row, good])
    for _ in range(2):
        with pytest.raises(error, match=match):
            rb.sample()
    rb[1] = {"query": 1, "worth": torch.tensor([3, 5], dtype=torch.int8)}
    assert rb.sampler.groups == 1
    assert rb.sample()[0] is rb[1]  # the mean is larger
    rb.extend([row])
    with pytest.raises(error, match=match.replace("row 1", "row 3")):
        rb.sample()
    rb.empty()
    rb.extend([good, good])
    assert rb.sample() == [good, good]


@pytest.mark.parametrize("strategy", ["random", "recency", "reward", "variance"])
def test_removed_rows_are_in_no_group(strategy):
    """Also of a buffer that was pickled, or whose state was loaded, since."""

    def made():
        sampler = PromptGroupSampler(num_groups=2, strategy=strategy, reward_key="worth")
        return ReplayBuffer(storage=LazyStackStorage(12), sampler=sampler, batch_size=4, collate_fn=list)

    rb = made()
    rb.extend(
        [{"query": torch.tensor(i % 3), "worth": torch.tensor(float(i)), "id": torch.tensor(i)} for i in range(11)]
    )
    rb.extend([{"nothing": torch.tensor(0)}])
    with pytest.raises(KeyError, match="query"):
        rb.sample()
    assert rb.remove([0, 3, 6, 9, 4, 10, 11]) == 7  # all of one group, one of another, and what is in none
    loaded = made()
    loaded.load_state_dict(rb.state_dict())
    for one in (rb, loaded, pickle.loads(pickle.dumps(rb))):
        assert one.sampler.groups == 2
        assert {int(row["id"]) for _ in range(30) for row in one.sample()} <= {1, 7, 2, 5, 8}
        one.extend([{"query": torch.tensor(0), "worth": torch.tensor(9.0), "id": torch.tensor(8)}])
        assert one.sampler.groups == 3


def test_without_a_strategy_by_rewards_none_are_needed():
    rb = buffer([TensorDict({"query": "why"}), TensorDict({"query": "who"})], 2)
    assert sorted(rb.sample()["query"]) == ["who", "why"]


@pytest.mark.parametrize(
    "storage", [ListStorage, lambda n: CompressedListStorage(n, compression_fn=id, decompression_fn=id)]
)
def test_other_lists_are_refused_and_nothing_is_changed(storage):
    with pytest.raises(TypeError, match=r"a LazyStackStorage, got a \w*ListStorage"):
        buffer(None, storage=storage(5))
    rb = ReplayBuffer(storage=storage(5), batch_size=2)
    before = rb.sampler
    with pytest.raises(TypeError, match="LazyStackStorage"):
        rb.set_sampler(PromptGroupSampler(num_groups=1))
    assert rb.sampler is before


def test_a_list_without_a_bound_is_refused():
    with pytest.raises(ValueError, match=r"expected a storage with a bound.*LazyStackStorage\(max_size"):
        buffer(None, storage=LazyStackStorage())
