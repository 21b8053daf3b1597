"""PromptGroupSampler: whole groups of rows that share a key."""

import itertools
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tensordict import TensorDict

from engram import (
    Checkpointer,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    NStep,
    PromptGroupSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.store.indexes import INDEX_KINDS
from engram.store.row_indexes import GroupIndex
from tests import stress
from tests.samplers.machine import SETTINGS, StoreMachine, stressed
from tests.statistics_of import assert_uniform

STRATEGIES = ["random", "recency", "reward", "variance"]


def buffer(keys, batch_size, *, storage=None, seed=0, rewards=None, **arguments):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(max(len(keys), 1)) if storage is None else storage,
        sampler=PromptGroupSampler(**({"num_groups": 2} if "samples_per_group" not in arguments else {}) | arguments),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
    )
    if len(keys):
        rb.extend(rows(keys, rewards=rewards))
    return rb


def rows(keys, first=0, rewards=None):
    """Rows that say which they are."""
    n = len(keys)
    reward = torch.arange(first, first + n).double() if rewards is None else torch.as_tensor(rewards)
    return {
        "query": torch.as_tensor(keys),
        "row": torch.arange(first, first + n),
        "next": {"reward": reward, "done": torch.ones(n, 1, dtype=torch.bool)},
    }


def groups_of(batch, each, key="query"):
    """The rows of each group of a batch, which are of that group."""
    keys = batch[key].reshape(-1, each)
    assert (keys == keys[:, :1]).all()
    return list(zip(keys[:, 0].tolist(), batch["row"].reshape(-1, each).tolist(), strict=True))


# ---- which rows --------------------------------------------------------------------------------------------------------


def test_groups_and_rows_are_equally_likely_and_none_comes_twice():
    keys = [7] * 3 + [-2] * 5 + [40] * 4 + [9] * 6
    rb = buffer(keys, 6, num_groups=2)
    groups, drawn = Counter(), Counter()
    for _ in range(3_000):
        batch = groups_of(rb.sample(), 3)
        assert len({key for key, _ in batch}) == 2
        for key, of in batch:
            assert len(set(of)) == 3
            assert all(keys[row] == key for row in of)
            groups[key] += 1
            drawn.update(of)
    assert_uniform(groups.values())
    for key in set(keys):
        assert_uniform([drawn[row] for row in range(len(keys)) if keys[row] == key])


@pytest.mark.parametrize("each", [{"num_groups": 3}, {"samples_per_group": 4}])
def test_the_other_count_follows_from_the_batch_size(each):
    rb = buffer([i // 5 for i in range(50)], 12, **each)
    assert len({key for key, _ in groups_of(rb.sample(), 4)}) == 3


def test_the_newest_rows_come_last():
    rb = buffer([1, 1, 1, 1, 2, 2, 2], 4, strategy="recency", storage=LazyTensorStorage(7))
    assert dict(groups_of(rb.sample(), 2)) == {1: [2, 3], 2: [5, 6]}
    rb.extend(rows([2, 2], 7))  # over two rows of group 1
    rb[[2]] = rows([1], 100)
    assert dict(groups_of(rb.sample(), 2)) == {1: [3, 100], 2: [7, 8]}


def test_the_highest_rewards_come_first():
    rb = buffer([1, 1, 1, 1, 2, 2, 2], 4, strategy="reward", rewards=[3.0, 9.0, 9.0, 1.0, -5.0, -1.0, -7.0])
    assert dict(groups_of(rb.sample(), 2)) == {1: [2, 1], 2: [5, 4]}


@pytest.mark.parametrize("seed", range(30))
def test_the_largest_variance_is_that_of_all_subsets(seed):
    """Against all of them; where several have it, the sum is the largest."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(-3, 4, (20,), generator=generator).double() + 100
    keys = torch.randint(0, 3, (20,), generator=generator)
    each = 1 + seed % 4
    rb = buffer(keys, 3 * each, num_groups=3, strategy="variance", rewards=rewards)
    for key, of in groups_of(quiet(rb), each):
        own = [row for row in range(20) if keys[row] == key]
        if len(own) < each:
            assert set(of) == set(own)
            continue
        best = max(
            (round(float(rewards[list(some)].var(correction=0)), 9), float(rewards[list(some)].sum()))
            for some in itertools.combinations(own, each)
        )
        assert (round(float(rewards[of].var(correction=0)), 9), float(rewards[of].sum())) == best
        assert rewards[of].tolist() == sorted(rewards[of].tolist())


@pytest.mark.parametrize("scale", [1e308, 1e-300])
def test_the_largest_variance_of_very_large_and_very_small_rewards(scale):
    rewards = torch.tensor([0.25, 1, -1, 0.5], dtype=torch.float64) * scale
    rb = buffer([1, 1, 1, 1], 3, num_groups=1, strategy="variance", rewards=rewards)
    assert dict(groups_of(rb.sample(), 3)) == {1: [2, 3, 1]}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32])
def test_rewards_are_the_means_of_any_real_numbers(dtype):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8), sampler=PromptGroupSampler(num_groups=1, strategy="reward"), batch_size=3
    )
    reward = torch.tensor([[0, 1], [1, 1], [0, 0]]).to(dtype)
    rb.extend({"query": torch.zeros(3, dtype=torch.int64), "row": torch.arange(3), "next": {"reward": reward}})
    assert rb.sample()["row"].tolist() == [1, 0, 2]


def quiet(rb, *size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return rb.sample(*size)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_rows_are_those_of_torchrl(strategy):
    rl = pytest.importorskip("torchrl.data")
    from torchrl.data.replay_buffers.samplers import PromptGroupSampler as Theirs

    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randint(0, 6, (60,), generator=generator)
        rewards = torch.randperm(60, generator=generator).float()
        data = TensorDict({"query": keys, "row": torch.arange(60), ("next", "reward"): rewards}, [60])
        found = []
        for library, sampler in ((rl, Theirs), (None, PromptGroupSampler)):
            make = TensorDictReplayBuffer if library is None else rl.TensorDictReplayBuffer
            storage = (LazyTensorStorage if library is None else rl.LazyTensorStorage)(60)
            rb = make(storage=storage, sampler=sampler(num_groups=int(keys.unique().numel()), strategy=strategy))
            rb.extend(data.clone())
            batch = rb.sample(int(keys.unique().numel()) * 4)
            found.append({key: sorted(of) for key, of in groups_of(batch, 4)})
        assert found[0] == found[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_too_few_come_again_with_one_warning(strategy):
    rb = buffer([1, 1, 2], 12, num_groups=3, strategy=strategy)
    with pytest.warns(UserWarning, match=r"3 groups of 4 rows.*more than once") as caught:
        batch = groups_of(rb.sample(), 4)
    assert {key for key, _ in batch} == {1, 2}
    for key, of in batch:
        assert set(of) == ({0, 1} if key == 1 else {2})
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.sample()


# ---- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_integers_are_keys(dtype, shape):
    keys = torch.tensor([0, 1, 1, 0, 1, 0]).to(dtype).reshape(6, *shape)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(6), sampler=PromptGroupSampler(num_groups=2, group_key=("meta", "prompt"))
    )
    rb.extend({"meta": {"prompt": keys}, "row": torch.arange(6)})
    batch = rb.sample(6)
    assert sorted(map(sorted, batch["row"].reshape(2, 3).tolist())) == [[0, 3, 5], [1, 2, 4]]


def test_bytes_are_keys():
    prompts = ["why", "", "why", "wh", "", "why not, if one may ask"]
    keys = torch.stack([torch.tensor([*prompt.encode().ljust(40, b"\0")], dtype=torch.uint8) for prompt in prompts])
    rb = ReplayBuffer(storage=LazyTensorStorage(6), sampler=PromptGroupSampler(samples_per_group=1), batch_size=4)
    rb.extend({"query": keys, "row": torch.arange(6)})
    assert rb.sampler.groups == 4
    drawn = [prompts[row] for row in rb.sample()["row"].tolist()]
    assert sorted(drawn) == sorted(set(prompts))


def test_many_groups_with_keys_that_share_their_low_bits():
    keys = torch.arange(3_000) * (1 << 40)
    rb = buffer(keys.repeat(2), 64, num_groups=32, storage=LazyTensorStorage(6_000))
    assert rb.sampler.groups == 3_000
    for key, of in groups_of(rb.sample(), 2):
        assert {row % 3_000 for row in of} == {key >> 40}
    rb.extend(rows([5] * 6_000))
    assert rb.sampler.groups == 1


# ---- against a model ---------------------------------------------------------------------------------------------------


def key_of(step):
    return (step.episode + step.step) % 4


class Groups(StoreMachine):
    """Which groups there are, and what is drawn of them, follows from what rows hold."""

    def make_sampler(self, draw):
        self.strategy = draw(st.sampled_from(STRATEGIES))
        return PromptGroupSampler(num_groups=2, group_key="key", strategy=self.strategy, reward_key="worth")

    def begin_order(self):
        return getattr(self, "order", [])

    @staticmethod
    def data(steps):
        data = StoreMachine.data(steps)
        data["key"] = torch.tensor([[key_of(step)] for step in steps])
        data["worth"] = torch.tensor([float(step.step % 3) for step in steps])
        return data

    def wrote(self, rows):
        self.order = [row for row in self.begin_order() if row not in rows] + [
            row for i, row in enumerate(rows) if row not in rows[i + 1 :]
        ]

    def edited(self, row, before):
        self.wrote([row])

    def emptied(self):
        self.order = []

    @rule(each=st.integers(1, 4))
    def draw(self, each):
        parts = {}
        live = self.rings.live()
        for row in self.begin_order():
            parts.setdefault(key_of(live[row]), []).append(row)
        if not parts:
            with pytest.raises(NoSampleable):
                self.rb.sample(2 * each)
            return
        assert self.rb.sampler.groups == len(parts)
        rows, _ = self.drawn(2 * each)
        drawn = [rows[:each], rows[each:]]
        keys = [key_of(live[of[0]]) for of in drawn]
        assert len(set(keys)) == min(2, len(parts))
        for key, of in zip(keys, drawn, strict=True):
            self.check(parts[key], of, live)

    def check(self, part, drawn, live):
        once, again = drawn[: len(part)], drawn[len(part) :]
        assert len(set(once)) == len(once)
        assert set(drawn) <= set(part)
        worth = {row: live[row].step % 3 for row in part}
        if self.strategy == "recency":
            assert once == part[-len(once) :]
        elif self.strategy == "reward":
            newest_first = part[::-1]
            assert once == sorted(newest_first, key=lambda row: -worth[row])[: len(once)]
        assert not again or set(once) == set(part)


TestGroups = pytest.mark.filterwarnings("ignore:sample. batch_size", "ignore:PromptGroupSampler")(Groups.TestCase)
TestGroups.settings = settings(SETTINGS, max_examples=stress.size(40, 2_000))
stressed(TestGroups)


# ---- where the rows are ------------------------------------------------------------------------------------------------


def draws(rb, n=5):
    return [rb.sample()["row"].tolist() for _ in range(n)]


def test_groups_go_with_a_store_through_reopening(tmp_path):
    rb = buffer([i % 9 for i in range(60)], 6, storage=LazyMemmapStorage(60, scratch_dir=tmp_path / "s"), num_groups=3)
    rb.sample()
    assert (tmp_path / "s" / ".engram" / "indexes" / "main" / GroupIndex.kind).exists()
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "s", batch_size=6, sampler=None)
    assert repr(rb.sampler) == "PromptGroupSampler(num_groups=3)"
    rb.extend(rows([77] * 10, 60))
    assert rb.sampler.groups == 10
    rb.close()


def test_a_writer_with_another_sampler_keeps_the_groups(tmp_path):
    rb = buffer([1, 2, 3], 2, storage=LazyMemmapStorage(6, scratch_dir=tmp_path / "s"))
    assert rb.sampler.groups == 3
    other = ReplayBuffer.open(tmp_path / "s", sampler=None)
    from engram import RandomSampler

    other.set_sampler(RandomSampler())
    other.extend(rows([4, 4, 4, 4], 3))
    assert rb.sampler.groups == 3
    assert {key for _ in range(50) for key, _ in groups_of(rb.sample(), 1)} == {2, 3, 4}
    other.close()
    rb.close()


def test_a_buffer_that_only_reads_sees_what_others_write(tmp_path):
    rb = buffer([1, 2], 2, storage=LazyMemmapStorage(6, scratch_dir=tmp_path / "s"))
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True, batch_size=2)
    assert reader.sampler.groups == 2
    rb.extend(rows([8, 9, 9], 2))
    assert reader.sampler.groups == 4
    assert {key for _ in range(60) for key, _ in groups_of(reader.sample(), 1)} == {1, 2, 8, 9}
    rb[[0]] = rows([2])
    assert reader.sampler.groups == 3
    rb.empty()
    assert reader.sampler.groups == 0
    reader.close()
    rb.close()


def test_a_shared_buffer_keeps_its_groups():
    rb = buffer([1, 1, 2, 2, 3, 3], 4, storage=LazyTensorStorage(8))
    other = buffer([1, 1, 2, 2, 3, 3], 4, storage=LazyTensorStorage(8))
    other.sample()
    rb.sample()
    other.share()
    assert other.sampler.groups == 3
    assert draws(other) == draws(rb)
    other.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_draws_go_on_after_a_state_is_loaded(strategy):
    rb = buffer([i % 7 for i in range(40)], 6, strategy=strategy, storage=LazyTensorStorage(30))
    rb.extend(rows([i % 7 for i in range(10)], 40))
    rb.sample()
    state = rb.state_dict()
    other = buffer([], 6, strategy=strategy, storage=LazyTensorStorage(30), seed=9)
    other.load_state_dict(state)
    assert draws(other) == draws(rb)


@pytest.mark.filterwarnings("ignore:restore.*did not fit", "ignore:PromptGroupSampler")
def test_checkpoints_restore_groups_into_fewer_and_more_rows(tmp_path):
    rb = buffer([i % 7 for i in range(40)], 6, storage=LazyTensorStorage(40))
    Checkpointer(tmp_path / "c", rb).save(1)
    same = buffer([], 6, storage=LazyTensorStorage(40), seed=3)
    Checkpointer(tmp_path / "c", same).restore()
    assert draws(same) == draws(rb)
    for capacity in (20, 90):
        other = buffer([], 6, storage=LazyTensorStorage(capacity))
        Checkpointer(tmp_path / "c", other).restore(convert=True)
        live = {int(row) for row in other[:]["row"]}
        assert len(live) == min(capacity, 40)
        assert other.sampler.groups == len({row % 7 for row in live})
        for key, of in groups_of(other.sample(), 3):
            assert set(of) <= {row for row in live if row % 7 == key}


def test_an_older_engram_refuses_the_index_by_name(tmp_path, monkeypatch):
    rb = buffer([1, 2], 2, storage=LazyMemmapStorage(6, scratch_dir=tmp_path / "s"))
    rb.sample()
    rb.close()
    monkeypatch.delitem(INDEX_KINDS, GroupIndex.kind)
    with pytest.raises(IncompatibleStore, match=r"indexes/main/groups.*newer engram"):
        ReplayBuffer.open(tmp_path / "s")


# ---- rows that move between their draw and their read ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:PromptGroupSampler")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", [lambda it: it, lambda it: NStep(it, n=1, gamma=0.5)], ids=["alone", "n-step"])
def test_a_group_that_lost_a_row_is_drawn_again_as_a_whole(strategy, wrap):
    """At the first looks, another thread overwrites rows that were drawn."""
    keys = [i % 10 for i in range(60)]
    sampler = PromptGroupSampler(num_groups=3, strategy=strategy)
    storage = LazyTensorStorage(60)
    rb = ReplayBuffer(storage=storage, sampler=wrap(sampler), batch_size=9, generator=torch.Generator().manual_seed(1))
    rb.extend(rows(keys))
    for moves in range(1, 4):
        left = [moves]
        drawn, again = sampler.draw, sampler.draw_again
        asked = []

        def moving(made, left=left):
            if left[0]:
                left[0] -= 1
                some = made.rows[[0, 4]]
                rb[some.tolist()] = rows([100 + left[0]] * 2, 1_000)
            return made

        def noted(*given, again=again, asked=asked, moving=moving):
            places, made = again(*given)
            asked.append(places)
            return places, moving(made)

        sampler.draw = lambda *given, drawn=drawn, moving=moving: moving(drawn(*given))
        sampler.draw_again = noted
        batch = groups_of(rb.sample(), 3)
        del sampler.draw, sampler.draw_again
        assert asked[0] == [0, 1, 2, 3, 4, 5]
        assert len(asked) == moves
        assert len({key for key, _ in batch}) == 3


@pytest.mark.filterwarnings("ignore:PromptGroupSampler")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", [lambda it: it, lambda it: NStep(it, n=1, gamma=0.5)], ids=["alone", "n-step"])
def test_a_group_that_was_read_and_then_overwritten_does_not_come_twice(strategy, wrap):
    """Of the first group a row moves before it is read; of the second one all rows move after they were read."""
    for seed in range(30):
        sampler = PromptGroupSampler(num_groups=4, strategy=strategy)
        generator = torch.Generator().manual_seed(seed)
        rb = ReplayBuffer(storage=LazyTensorStorage(60), sampler=wrap(sampler), batch_size=12, generator=generator)
        rb.extend(rows([i % 10 for i in range(60)]))
        drawn, again = sampler.draw, sampler.draw_again

        def draw(*given, rb=rb, drawn=drawn):
            made = drawn(*given)
            rb[[int(made.rows[0])]] = rows([100], 1_000)
            return made

        def draw_again(extent, before, moved, key, rb=rb, again=again):
            rb[before.rows[3:6].tolist()] = rows([101] * 3, 1_000)
            return again(extent, before, moved, key)

        sampler.draw, sampler.draw_again = draw, draw_again
        assert len({key for key, _ in groups_of(rb.sample(), 3)}) == 4, seed


def test_the_warning_of_a_redraw_names_the_groups_of_the_batch():
    sampler = PromptGroupSampler(num_groups=3)
    rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=9)
    rb.extend(rows([0, 0, 0, 1, 1, 1, 2, 2, 2]))
    drawn = sampler.draw

    def draw(*given):
        made = drawn(*given)
        rb[made.rows[:1].tolist()] = rows(
            [int(rb[made.rows[3:4]]["query"])], 1_000
        )  # two rows are left of the first group
        return made

    sampler.draw = draw
    with pytest.warns(UserWarning, match="expected 3 groups of 3 rows"):
        rb.sample()


def test_prefetched_batches_are_groups():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100), sampler=PromptGroupSampler(num_groups=4), batch_size=12, prefetch=3
    )
    rb.extend(rows([i % 20 for i in range(100)]))
    for _ in range(20):
        assert len(groups_of(rb.sample(), 3)) == 4
    rb.close()


# ---- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, TypeError, "one of num_groups and samples_per_group"),
        ({"num_groups": 2, "samples_per_group": 3}, TypeError, "one of num_groups and samples_per_group"),
        ({"num_groups": True}, TypeError, "num_groups"),
        ({"num_groups": 1.5}, TypeError, "num_groups"),
        ({"num_groups": 0}, ValueError, "num_groups"),
        ({"samples_per_group": -1}, ValueError, "samples_per_group"),
        ({"num_groups": 1, "strategy": "best"}, ValueError, "strategy.*random"),
        ({"num_groups": 1, "group_key": 1.5}, TypeError, "group_key"),
        ({"num_groups": 1, "reward_key": 1.5}, TypeError, "reward_key"),
        ({"num_groups": 1, "index": "a/b"}, ValueError, "index"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        PromptGroupSampler(**arguments)


def test_batch_sizes_that_do_not_divide():
    for each in ({"num_groups": 3}, {"samples_per_group": 3}):
        with pytest.raises(ValueError, match=rf"multiple of {next(iter(each))}=3.*got 8.*Use 6"):
            buffer([1, 2, 3], 8, **each).sample()
    with pytest.raises(ValueError, match="Use 3"):
        buffer([1, 2, 3], 1, samples_per_group=3).sample()


def test_storages_without_groups():
    with pytest.raises(TypeError, match="ListStorage"):
        buffer([], 2, storage=ListStorage(5))
    with pytest.raises(NotImplementedError, match="ndim=2"):
        buffer([], 2, storage=LazyTensorStorage(6, ndim=2))
    with pytest.raises(NoSampleable, match="empty storage"):
        buffer([], 2).sample()
    assert buffer([], 2).sampler.groups == 0
    assert not buffer([], 2).can_sample()


@pytest.mark.parametrize(
    ("key", "match"),
    [
        (torch.zeros(4), r"one integer per row.*float32"),
        (torch.zeros(4, 2, dtype=torch.int64), r"one integer per row.*int64 \[2\]"),
        (torch.zeros(4, 1025, dtype=torch.uint8), r"at most 1024"),
    ],
)
def test_fields_that_are_no_keys(key, match):
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=PromptGroupSampler(num_groups=2), batch_size=2)
    rb.extend({"query": key, "x": torch.zeros(4)})
    with pytest.raises(TypeError, match=match):
        rb.sample()


def test_fields_that_are_missing():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=PromptGroupSampler(num_groups=2), batch_size=2)
    rb.extend({"prompt": torch.arange(4)})
    with pytest.raises(KeyError, match=r"query.*prompt.*group_key"):
        rb.sample()
    rb.set_sampler(PromptGroupSampler(num_groups=2, group_key="prompt", strategy="reward"))
    with pytest.raises(KeyError, match=r"reward.*reward_key"):
        rb.sample()


def test_rewards_that_are_no_real_numbers():
    rb = buffer([1, 1], 2, num_groups=1, strategy="reward", rewards=torch.tensor([1j, 2j]))
    with pytest.raises(TypeError, match=r"reward.*real numbers, got complex64"):
        rb.sample()


def test_rewards_that_cannot_be_compared():
    rb = buffer([1, 1, 2, 2], 4, strategy="reward", rewards=[1.0, 2.0, float("nan"), 4.0])
    with pytest.raises(ValueError, match=r"finite rewards, got nan in row 2"):
        rb.sample()
    rb[[2]] = rows([2], 2, [float("inf")])
    with pytest.raises(ValueError, match=r"got inf in row 2"):
        rb.sample()
    rb[[2]] = rows([2], 2, [3.0])
    assert dict(groups_of(rb.sample(), 2)) == {1: [1, 0], 2: [3, 2]}


def test_one_name_stands_for_one_key():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=PromptGroupSampler(num_groups=2), batch_size=2)
    rb.extend({"query": torch.arange(4), "user": torch.zeros(4, dtype=torch.int64)})
    rb.sample()
    rb.set_sampler(PromptGroupSampler(num_groups=2, group_key="user"))
    with pytest.raises(IncompatibleStore, match=r"groups by 'query'.*got groups by 'user'.*index"):
        rb.sample()
    rb.set_sampler(PromptGroupSampler(num_groups=1, group_key="user", index="users"))
    rb.sample()


def test_an_index_whose_maker_died_before_it_had_scanned_the_rows_scans_them(tmp_path):
    """The other process has attached it with its last write, and is the first to ask for it."""
    rb = buffer([1, 2, 3], 2, storage=LazyMemmapStorage(6, scratch_dir=tmp_path / "s"))
    other = ReplayBuffer.open(tmp_path / "s", batch_size=2)
    assert rb.sampler.groups == 3
    folder = tmp_path / "s" / ".engram" / "indexes" / "main"
    (folder / f".unscanned-{GroupIndex.kind}").touch()
    other.extend(rows([4], 3))
    assert other.sampler.groups == 4
    assert not (folder / f".unscanned-{GroupIndex.kind}").exists()
    other.close()
    rb.close()
