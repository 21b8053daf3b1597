"""PromptGroupSampler: rows that are ready and fresh, and groups that are used up."""

import math
from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    NoSampleable,
    PromptGroupSampler,
    ReplayBuffer,
)
from tests.samplers.answers import answers, buffer, drawn, late

NAN = math.nan

pytestmark = pytest.mark.filterwarnings("ignore:sample. batch_size")


# ---- rows that are ready -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_row_is_ready_once_no_entry_of_a_field_is_nan(dtype):
    rb = buffer(ready=["score", ("meta", "log_prob")], batch_size=2)
    rows = rb.extend(
        {
            "prompt": torch.zeros(2, dtype=torch.int64),
            "answer": torch.arange(2),
            "score": torch.full((2, 3), NAN, dtype=dtype),
            "meta": {"log_prob": torch.full((2,), NAN)},
        }
    )
    for _ in range(2):
        assert not rb.can_sample()
        late(rb, rows, meta={"log_prob": torch.zeros(2)})
        late(rb, rows, score=torch.tensor([[0, NAN, 0], [1, 1, 1]], dtype=dtype))
        assert not rb.can_sample()
        with pytest.raises(
            NoSampleable, match=r"0 of 1 groups; rows do not count: those that are not ready=\('score', .*'log_prob'\)"
        ):
            rb.sample()
        rb["score"] = torch.ones(2, 3, dtype=dtype)
        assert sorted(drawn(rb.sample(), 2)[0]) == [0, 1]
        late(rb, rows[1:], meta={"log_prob": torch.tensor([NAN])})  # and not ready again


def test_fields_that_are_always_ready_are_refused():
    rb = buffer(ready=["answer"])
    rb.extend(answers([0, 0]))
    with pytest.raises(TypeError, match=r"ready: 'answer': expected floating numbers.*int64.*float32"):
        rb.sample()
    rb.set_sampler(PromptGroupSampler(samples_per_group=2, group_key="prompt", ready=["score"]))
    with pytest.raises(KeyError, match=r"ready.*'score'.*NaN until.*prompt"):
        rb.sample()


def test_items_of_a_list_are_ready_once_they_have_their_entries():
    rb = buffer(LazyStackStorage(10), ready=["reward"], batch_size=2)
    item = TensorDict({"prompt": torch.tensor(1), "answer": torch.tensor(0)})
    rb.add(item)
    rb.add(item.clone().update({"answer": torch.tensor(1), "reward": torch.tensor(1.0)}))
    assert not rb.can_sample()
    rb[0] = item.clone().update({"reward": torch.tensor(2.0)})
    assert sorted(drawn(rb.sample(), 2)[0]) == [0, 1]
    rb.add(TensorDict({"prompt": torch.tensor(1), "answer": torch.tensor(2), "reward": torch.tensor(1j)}))
    with pytest.raises(TypeError, match=r"ready: 'reward'.*complex64"):
        rb.sample()


# ---- groups that are used up -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
@pytest.mark.parametrize("strategy", ["random", "recency", "reward", "variance"])
def test_each_group_is_handed_out_so_often(storage, strategy):
    rb = buffer(storage(100), max_uses=3, strategy=strategy)
    rb.extend(answers([i // 2 for i in range(20)]))
    groups = Counter(tuple(sorted(group)) for _ in range(14) for group in drawn(rb.sample(), 2))
    while rb.can_sample(2):
        groups.update(tuple(sorted(group)) for group in drawn(rb.sample(2), 2))
    assert groups == {(i, i + 1): 3 for i in range(0, 20, 2)}
    with pytest.raises(NoSampleable, match=r"used max_uses=3 times"):
        rb.sample()
    rb.extend(answers([0, 0, 1, 1], 20))  # other answers to these prompts
    assert sorted(map(sorted, drawn(rb.sample(), 2))) == [[20, 21], [22, 23]]


def test_a_use_is_one_of_all_rows_of_a_group():
    rb = buffer(max_uses=1, batch_size=2)
    rb.extend(answers([5] * 7))
    assert len(set(drawn(rb.sample(), 2)[0])) == 2
    assert not rb.can_sample()
    rb.add(answers([5], 7)[0])
    assert not rb.can_sample()  # it is alone
    stats = rb.stats()
    assert (stats["groups"], stats["used_rows"], stats["evicted_rows"], stats["starved_draws"]) == (1, 7, 0, 0)
    rb.extend(answers([6] * 92, 8))
    rb.extend(answers([6] * 8, 100))  # over all rows of prompt 5, of which one was not used
    with pytest.raises(NoSampleable):
        rb.sample(4)
    assert (rb.stats()["evicted_rows"], rb.stats()["starved_draws"]) == (1, 1)


def test_edits_keep_uses_and_other_rows_have_none():
    rb = buffer(max_uses=1, batch_size=2)
    rows = rb.extend(answers([0, 0]))
    rb.sample()
    rb["reward"] = torch.ones(2)
    late(rb, rows, reward=torch.zeros(2))
    assert not rb.can_sample()
    rb.remove([1])
    rb.empty()
    rb.extend(answers([0, 0], 2))
    assert sorted(drawn(rb.sample(), 2)[0]) == [2, 3]


@pytest.mark.parametrize("strategy", ["random", "reward"])
def test_a_group_that_is_edited_between_draw_and_read_is_handed_out(strategy):
    """As other rows would count once more."""
    rb = buffer(max_uses=1, strategy=strategy)
    rb.extend(answers([0, 0, 1, 1]))
    draw = rb.sampler.draw

    def moving(*given):
        made = draw(*given)
        late(rb, made.rows[:1], reward=torch.ones(1))
        return made

    rb.sampler.draw = moving
    assert sorted(map(sorted, drawn(rb.sample(), 2))) == [[0, 1], [2, 3]]


def test_groups_of_a_batch_that_could_not_be_filled_are_not_used():
    rb = buffer(LazyTensorStorage(4), max_uses=1)
    rb.extend(answers([0, 0, 1, 1]))
    draw = rb.sampler.draw

    def moving(*given):
        made = draw(*given)
        rb.extend(answers([7], 9))  # over an answer of prompt 0
        return made

    rb.sampler.draw = moving
    with pytest.raises(NoSampleable):
        rb.sample()
    del rb.sampler.draw
    assert rb.can_sample(2)
    assert sorted(drawn(rb.sample(2), 2)[0]) == [2, 3]


def test_groups_whose_rewards_cannot_be_compared_are_not_used():
    rb = buffer(max_uses=1, strategy="reward", batch_size=2)
    rb.extend(answers([0, 0], reward=torch.tensor([1.0, NAN])))
    with pytest.raises(ValueError, match="finite rewards, got nan in row 1"):
        rb.sample()
    rb["reward"] = torch.tensor([1.0, 2.0])
    assert drawn(rb.sample(), 2) == [[1, 0]]


def test_a_buffer_that_uses_rows_up_uses_groups_up():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=PromptGroupSampler(samples_per_group=2, group_key="prompt"),
        batch_size=2,
        consume_after_n_samples=2,
    )
    assert repr(rb.sampler) == "PromptGroupSampler(samples_per_group=2, group_key='prompt', max_uses=2)"
    rb.extend(answers([0, 0]))
    assert sorted(drawn(rb.sample(), 2) + drawn(rb.sample(), 2), key=str)
    assert not rb.can_sample()
    for sampler, error in (
        (PromptGroupSampler(samples_per_group=2, max_uses=1), "as many draws, got PromptGroupSampler"),
        (PromptGroupSampler(num_groups=2), "complete=True"),
    ):
        with pytest.raises(ValueError, match=error):
            ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, consume_after_n_samples=2)


# ---- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float32])
def test_rows_of_old_policies_are_in_no_group(dtype):
    rb = buffer(max_staleness=1, policy_version="version", batch_size=2)
    data = answers([0, 0, 1, 1, 2, 2], version=torch.tensor([0, 1, 1, 1, 2, 2]))
    rb.extend(data.set("version", data["version"].to(dtype)))
    assert rb.can_sample(6)
    rb.sampler.consumer_version = 2
    assert rb.can_sample(4)
    assert not rb.can_sample(6)
    assert {row for _ in range(30) for row in drawn(rb.sample(), 2)[0]} == {2, 3, 4, 5}
    rb.sampler.increment_consumer_version()
    assert {row for _ in range(10) for row in drawn(rb.sample(), 2)[0]} == {4, 5}
    rb.sampler.consumer_version = 1  # it only grows
    assert rb.sampler.consumer_version == 3
    rb.sampler.increment_consumer_version()
    with pytest.raises(NoSampleable, match=r"'version' is below 3"):
        rb.sample()
    assert rb.stats()["expired_rows"] == 6
    assert rb.stats()["consumer_version"] == 4
    rb["version"] = torch.full((6,), 4, dtype=dtype)
    assert rb.sampler.groups == 3
    rb.empty()  # begins again at 0
    rb.extend(data.set("version", data["version"].to(dtype)))
    assert rb.can_sample(6)


def test_versions_that_are_none():
    rb = buffer(max_staleness=1)
    rb.extend(answers([0, 0]))
    with pytest.raises(KeyError, match=r"policy_version.*'policy_version'.*version.*another field"):
        rb.sample()
    rb.set_sampler(PromptGroupSampler(samples_per_group=2, group_key="prompt", max_staleness=1, policy_version="two"))
    rb.empty()
    rb = buffer(max_staleness=1, policy_version="two")
    rb.extend({"prompt": torch.zeros(2, dtype=torch.int64), "two": torch.zeros(2, 2)})
    with pytest.raises(TypeError, match=r"policy_version: 'two': expected one real number per row.*\[2\]"):
        rb.sample()
    rb = buffer(LazyStackStorage(10), max_staleness=1)
    rb.extend(answers([0, 0]))
    with pytest.raises(KeyError, match="policy_version"):
        rb.sample()


# ---- states, stores and refusals ---------------------------------------------------------------------------------------

KEPT = {"max_uses": 2, "max_staleness": 3, "policy_version": "version", "ready": ["reward"]}


@pytest.mark.parametrize("how", ["state", "checkpoint", "reopened", "shared"])
def test_uses_and_versions_go_with_the_rows(how, tmp_path):
    storage = LazyMemmapStorage(30, scratch_dir=tmp_path / "s") if how == "reopened" else LazyTensorStorage(30)
    rb = buffer(storage, **KEPT)
    rb.extend(answers([i // 2 for i in range(20)]))
    rb.sampler.consumer_version = 2
    first = Counter(tuple(sorted(group)) for _ in range(4) for group in drawn(rb.sample(), 2))
    if how == "reopened":
        rb.close()
        rb = ReplayBuffer.open(tmp_path / "s", batch_size=4)
        assert rb.sampler.config()["max_uses"] == 2
    elif how == "shared":
        rb.share()
    else:
        other = buffer(LazyTensorStorage(30), **KEPT)
        if how == "state":
            other.load_state_dict(rb.state_dict())
        else:
            Checkpointer(tmp_path / "c", rb).save(1)
            Checkpointer(tmp_path / "c", other).restore()
        rb = other
    assert rb.sampler.consumer_version == 2
    while rb.can_sample(2):
        first.update(tuple(sorted(group)) for group in drawn(rb.sample(2), 2))
    assert first == {(i, i + 1): 2 for i in range(0, 20, 2)}
    rb.close()


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({}, KeyError),
        ({"uses": torch.zeros(3, dtype=torch.int32), "consumer_version": 1, "other": 1}, KeyError),
        ({"uses": torch.zeros(3), "consumer_version": 1}, TypeError),
        ({"uses": torch.zeros(101, dtype=torch.int32), "consumer_version": 1}, ValueError),
        ({"uses": torch.tensor([-1], dtype=torch.int32), "consumer_version": 1}, ValueError),
        ({"uses": torch.zeros(3, dtype=torch.int32), "consumer_version": 1.5}, TypeError),
    ],
)
def test_states_that_are_none_change_nothing(state, error):
    rb = buffer(**KEPT)
    rb.extend(answers([0, 0, 1, 1]))
    rb.sample()
    rb.sampler.consumer_version = 3
    with pytest.raises(error):
        rb.sampler.load_state_dict(state)
    assert rb.sampler.consumer_version == 3
    assert rb.sampler.state_dict()["uses"].tolist() == [1, 1, 1, 1]


def test_one_name_stands_for_one_set_of_rules():
    rb = buffer(ready=["reward"], max_uses=1)
    rb.extend(answers([0, 0, 1, 1]))
    rb.sample()
    given = {"samples_per_group": 2, "group_key": "prompt"}
    rb.set_sampler(PromptGroupSampler(**given))
    with pytest.raises(
        IncompatibleStore,
        match=r"by 'prompt', ready=\('reward',\), max_uses=1, as .* got groups by 'prompt'\. Give it another name",
    ):
        rb.sample()
    rb.set_sampler(PromptGroupSampler(**given, max_uses=1, index="once"))
    assert len(rb.sample()) == 4  # with uses of its own


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"complete": 1}, TypeError, "complete: expected True, False or None, got 1"),
        ({"max_uses": 0}, ValueError, "max_uses"),
        ({"max_uses": 1.5}, TypeError, "max_uses"),
        ({"max_uses": 1 << 24}, ValueError, "max_uses"),
        ({"max_uses": 1, "complete": False}, ValueError, r"max_uses: expected complete groups.*complete=True"),
        ({"max_staleness": -2}, ValueError, "max_staleness"),
        ({"max_staleness": None}, TypeError, "max_staleness"),
        (
            {"ready": "reward"},
            TypeError,
            r'ready: expected a sequence of fields, such as \("reward",\), got \'reward\'',
        ),
        ({"ready": [1.5]}, TypeError, "ready"),
        ({"ready": [f"field {i}" for i in range(17)]}, ValueError, "ready: expected at most 16 fields, got 17"),
        ({"policy_version": 1.5}, TypeError, "policy_version"),
        ({"strategy": "newest"}, ValueError, "strategy: expected one of .*or a pair .*'spread'.*got 'newest'"),
        ({"strategy": ("random", "newest")}, ValueError, r"got \('random', 'newest'\)"),
        ({"strategy": ("random",)}, ValueError, "a pair"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        PromptGroupSampler(samples_per_group=2, **arguments)
