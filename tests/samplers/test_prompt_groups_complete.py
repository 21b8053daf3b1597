"""PromptGroupSampler: groups that are complete, ready, fresh and not used up."""

import math
import random
import threading
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
    RoundRobinWriter,
)
from tests.statistics_of import assert_uniform

NAN = math.nan

pytestmark = pytest.mark.filterwarnings("ignore:sample. batch_size")


def buffer(storage=None, *, batch_size=4, seed=0, **arguments):
    arguments = {"group_key": "prompt", "reward_key": "reward"} | arguments
    if "num_groups" not in arguments:
        arguments.setdefault("samples_per_group", 2)
    return ReplayBuffer(
        storage=LazyTensorStorage(100) if storage is None else storage,
        sampler=PromptGroupSampler(**arguments),
        writer=RoundRobinWriter(track_generations=not isinstance(storage, LazyStackStorage)),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
    )


def late(rb, rows, **fields):
    """Fields that come later than their rows."""
    rows = torch.as_tensor(rows)
    generation = rb.writer.generations_of(rows)
    assert rb.update_if_present(index=rows, generation=generation, patch=fields).updated.all()


def answers(prompts, first=0, reward=0.0, version=0):
    n = len(prompts)
    return TensorDict(
        {
            "prompt": torch.tensor(prompts),
            "answer": torch.arange(first, first + n),
            "reward": torch.as_tensor(reward, dtype=torch.float32).expand(n).clone(),
            "version": torch.as_tensor(version).expand(n).clone(),
        },
        [n],
    )


def drawn(batch, each):
    return batch["answer"].reshape(-1, each).tolist()


# ---- complete ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"samples_per_group": 3}, {"num_groups": 2, "complete": True}])
@pytest.mark.parametrize("strategy", ["random", "recency", "reward", "variance"])
def test_complete_groups_are_equally_likely_and_no_other_is_drawn(given, strategy):
    prompts = [0] * 3 + [1] * 2 + [2] * 4 + [3] * 1 + [4] * 3 + [5] * 5
    rb = buffer(strategy=strategy, batch_size=6, **given)
    rb.extend(answers(prompts))
    groups, rows = Counter(), Counter()
    for _ in range(400):
        for group in drawn(rb.sample(), 3):
            assert len(set(group)) == 3
            assert len({prompts[row] for row in group}) == 1
            groups[prompts[group[0]]] += 1
            rows.update(group)
    assert set(groups) == {0, 2, 4, 5}
    assert_uniform(groups.values())
    if strategy == "random":
        for prompt in groups:
            assert_uniform([rows[row] for row in range(len(prompts)) if prompts[row] == prompt])


def test_a_group_that_loses_an_answer_to_the_ring_is_not_drawn():
    rb = buffer(LazyTensorStorage(6), batch_size=2)
    rb.extend(answers([0, 0, 1, 1, 2, 2]))
    rb.extend(answers([3], 6))  # over an answer of prompt 0
    assert rb.can_sample(4)
    assert not rb.can_sample(6)
    assert {row for _ in range(50) for group in drawn(rb.sample(), 2) for row in group} == {2, 3, 4, 5}
    rb.extend(answers([3, 3], 7))
    assert {row for _ in range(50) for group in drawn(rb.sample(), 2) for row in group} == {4, 5, 6, 7, 8}
    rb.remove([4])
    assert {row for _ in range(20) for group in drawn(rb.sample(), 2) for row in group} == {6, 7, 8}


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
def test_too_few_complete_groups_are_no_batch(storage):
    rb = buffer(storage(100))
    with pytest.raises(NoSampleable, match="empty"):
        rb.sample()
    rb.extend(answers([0, 0, 1]))
    assert not rb.can_sample()
    with pytest.raises(
        NoSampleable, match=r"2 complete groups, of 2 rows or more each, got 1 of 2 groups\. Add data.*complete=False"
    ):
        rb.sample()
    assert rb.can_sample(2)
    assert not rb.sampler.can_sample(rb.storage, 0)
    rb.add(answers([1], 3)[0])
    assert rb.can_sample()
    assert sorted(map(sorted, drawn(rb.sample(), 2))) == [[0, 1], [2, 3]]


def test_incomplete_groups_are_drawn_where_asked_for():
    rb = buffer(complete=False)
    rb.extend(answers([0, 0, 1]))
    assert rb.can_sample()
    with pytest.warns(UserWarning, match="more than once"):
        assert sorted(map(set, drawn(rb.sample(), 2)), key=min) == [{0, 1}, {2}]
    assert (
        repr(rb.sampler)
        == "PromptGroupSampler(samples_per_group=2, group_key='prompt', reward_key='reward', complete=False)"
    )


def test_groups_of_several_sizes_at_once():
    rb = buffer(LazyTensorStorage(400), num_groups=1, complete=True)
    rb.extend(answers([prompt for prompt in range(20) for _ in range(prompt)]))
    for each in [*range(1, 20)] * 2:
        assert len({*drawn(rb.sample(each), each)[0]}) == each
        assert rb.sampler.can_sample(rb.storage, each)
    assert not rb.can_sample(20)


def test_a_redraw_without_enough_other_groups_is_no_batch():
    rb = buffer()
    rb.extend(answers([0, 0, 1, 1]))
    draw = rb.sampler.draw

    def moving(*given):
        made = draw(*given)
        rb[[int(made.rows[0])]] = answers([7], 9)
        return made

    rb.sampler.draw = moving
    with pytest.raises(NoSampleable, match=r"1 complete groups?, of 2 rows or more each besides the 1 of the batch"):
        rb.sample()


# ---- against a model ---------------------------------------------------------------------------------------------------

RULES = [
    {},
    {"ready": ["reward"]},
    {"max_uses": 1},
    {"max_uses": 3, "ready": ["reward"]},
    {"max_staleness": 2, "policy_version": "version"},
    {"max_staleness": 1, "policy_version": "version", "max_uses": 2, "ready": ["reward"]},
]


class Model:
    """What each row holds, how often that was used, and so which rows are in which group."""

    def __init__(self, rules):
        self.rules, self.rows, self.uses, self.consumer = rules, {}, Counter(), 0

    def groups(self):
        parts = {}
        for row, it in self.rows.items():
            fresh = self.consumer - it["version"] <= self.rules.get("max_staleness", math.inf)
            ready = not self.rules.get("ready") or not math.isnan(it["reward"])
            if fresh and ready and self.uses[it["answer"]] < self.rules.get("max_uses", math.inf):
                parts.setdefault(it["prompt"], []).append((row, it["answer"]))
        return parts


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_drawn_follows_from_the_rows_alone(storage, rules, seed):
    """Random writes, edits, versions and draws."""
    dice, capacity, cursor = random.Random(seed), 24, 0
    rb = buffer(storage(capacity), **rules)
    model = Model(rules)
    for step in range(150):
        action = dice.randrange(8)
        if action < 2:
            n = dice.randrange(1, 8)
            data = answers(
                [dice.randrange(5) for _ in range(n)],
                100 * step,
                torch.tensor([dice.choice([NAN, 1.0, 2.0]) for _ in range(n)]),
                torch.tensor([model.consumer + dice.randrange(-3, 2) for _ in range(n)]),
            )
            rb.extend(data)
            for i in range(n):
                model.rows[cursor % capacity] = {key: data[key][i].item() for key in data.keys()}
                cursor += 1
        elif action < 4 and model.rows:
            row, value = dice.choice([*model.rows]), dice.choice([NAN, 3.0])
            if dice.randrange(3):
                model.rows[row]["reward"] = value
                it = rb[row].clone()
                it["reward"] = torch.tensor(value)
                rb[row] = it
        elif action == 4 and "max_staleness" in rules:
            rb.sampler.increment_consumer_version()
            model.consumer += 1
        elif action == 5 and dice.randrange(8) == 0:
            rb.empty()
            model.rows, cursor, model.consumer = {}, 0, 0 if storage is LazyTensorStorage else model.consumer
        else:
            each, groups = 2, dice.randrange(1, 4)
            parts = {prompt: of for prompt, of in model.groups().items() if len(of) >= each}
            assert rb.can_sample(each * groups) == (len(parts) >= groups)
            if len(parts) < groups:
                with pytest.raises(NoSampleable):
                    rb.sample(each * groups)
                continue
            batch = drawn(rb.sample(each * groups), each)
            by_answer = {answer: prompt for prompt, of in parts.items() for _, answer in of}
            assert len({by_answer[group[0]] for group in batch}) == groups
            for group in batch:
                assert len(set(group)) == each
                assert len({by_answer[answer] for answer in group}) == 1
                model.uses.update(answer for _, answer in parts[by_answer[group[0]]])
        if cursor:
            assert rb.sampler.groups == len(model.groups())


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
        (PromptGroupSampler(samples_per_group=2, max_uses=1), "max_uses=2, got PromptGroupSampler"),
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


# ---- waiting for groups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_a_sample_waits_for_answers_that_become_ready(prefetch, shared):
    """Another thread writes the last reward once the first try has failed."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=PromptGroupSampler(samples_per_group=2, group_key="prompt", ready=["reward"], max_uses=1),
        batch_size=4,
        prefetch=prefetch or None,
    )
    rb.extend(answers([0, 0, 1, 1], reward=torch.tensor([0.0, 0.0, 0.0, NAN])))
    if shared:
        rb.share()
    failed = threading.Event()
    can_sample = rb.sampler.can_sample

    def noted(*given):
        failed.set()
        return can_sample(*given)

    rb.sampler.can_sample = noted

    def finish():
        assert failed.wait(60)
        rb.set_at_("reward", torch.ones(1), torch.tensor([3]))

    thread = threading.Thread(target=finish)
    thread.start()
    assert sorted(map(sorted, drawn(rb.sample(timeout=60), 2))) == [[0, 1], [2, 3]]
    thread.join()
    with pytest.raises(NoSampleable):
        rb.sample(timeout=0)
    with pytest.raises(NoSampleable):
        rb.sample(timeout=0.001)
    rb.close()


def test_a_sample_waits_for_the_first_rows():
    rb = buffer()
    failed = threading.Event()
    rb.sampler.can_sample = lambda *given: failed.set() or PromptGroupSampler.can_sample(rb.sampler, *given)
    thread = threading.Thread(target=lambda: failed.wait(60) and rb.extend(answers([0, 0, 1, 1])))
    thread.start()
    assert len(rb.sample(timeout=None)) == 4
    thread.join()


def test_what_waits_for_groups_ends_with_the_buffer():
    rb = buffer()
    rb.extend(answers([0]))
    rb.sampler.can_sample = lambda *_: rb.shutdown() or False
    with pytest.raises(RuntimeError, match="shut down"):
        rb.sample(timeout=60)


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
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        PromptGroupSampler(samples_per_group=2, **arguments)
