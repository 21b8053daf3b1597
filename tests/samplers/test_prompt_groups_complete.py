"""PromptGroupSampler: groups that are complete, in order, and waited for."""

import math
import random
import threading
from collections import Counter

import pytest
import torch

from engram import (
    IncompatibleStore,
    LazyStackStorage,
    LazyTensorStorage,
    NoSampleable,
    PromptGroupSampler,
    ReplayBuffer,
)
from tests.samplers.answers import answers, buffer, drawn
from tests.statistics_of import assert_uniform

NAN = math.nan

pytestmark = pytest.mark.filterwarnings("ignore:sample. batch_size")


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


# ---- groups in order ---------------------------------------------------------------------------------------------------


def spread(rewards):
    mean = sum(rewards) / len(rewards)
    return sum((it - mean) ** 2 for it in rewards) / len(rewards)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
@pytest.mark.parametrize("order", ["freshest", "oldest", "spread"])
@pytest.mark.parametrize("rules", [{}, {"max_uses": 1, "ready": ["reward"]}], ids=["always", "once"])
def test_groups_come_in_the_order_asked_for(storage, order, rules):
    """Random writes and edits, beside a list of what is there."""
    dice, capacity = random.Random(1), 24
    rb = buffer(storage(capacity), strategy=("random", order), **rules)
    rows, clock, used = {}, 0, set()
    for step in range(120):
        if rows and dice.randrange(3) == 0:
            row = dice.choice([*rows])
            prompt, answer, _, _ = rows[row]
            reward = float(dice.randrange(50))
            it = rb[row].clone()
            it["reward"] = torch.tensor(reward)
            rb[row] = it
            rows[row] = prompt, answer, reward, clock
            clock += 1
        else:
            prompt, reward = dice.randrange(6), float(dice.randrange(50))
            (row,) = rb.extend(answers([prompt], step, reward)).tolist()
            rows[row] = prompt, step, reward, clock
            clock += 1
        groups = {}
        for prompt, answer, reward, age in rows.values():
            if answer not in used:
                groups.setdefault(prompt, []).append((answer, reward, age))
        groups = [it for it in groups.values() if len(it) >= 2]
        if order == "spread":
            groups.sort(key=lambda it: -spread([reward for _, reward, _ in it]))
            if len({round(spread([reward for _, reward, _ in it]), 6) for it in groups}) < len(groups):
                continue  # which of them is not said
        else:
            groups.sort(key=lambda it: max(age for _, _, age in it), reverse=order == "freshest")
        n = dice.randrange(1, 3)
        if len(groups) < n:
            assert not rb.can_sample(2 * n)
            continue
        if dice.randrange(4) == 0:
            for group, part in zip(drawn(rb.sample(2 * n), 2), groups, strict=False):
                assert set(group) <= {answer for answer, _, _ in part}
                assert len(set(group)) == 2
                used.update(answer for answer, _, _ in part if rules)


def test_groups_in_order_that_were_drawn_and_lost_are_passed_over():
    rb = buffer(LazyTensorStorage(6), strategy=("recency", "oldest"), batch_size=2)
    rb.extend(answers([0, 0, 1, 1, 2, 2]))
    draw = rb.sampler.draw

    def moving(*given):
        made = draw(*given)
        rb.extend(answers([7], 9))  # over an answer of the oldest group
        return made

    rb.sampler.draw = moving
    assert sorted(drawn(rb.sample(), 2)[0]) == [2, 3]


@pytest.mark.parametrize("given", [{"num_groups": 2, "complete": True}, {"samples_per_group": 2, "complete": False}])
def test_only_complete_groups_of_one_size_are_in_order(given):
    with pytest.raises(ValueError, match="'oldest': expected complete groups of one size.*samples_per_group alone"):
        PromptGroupSampler(strategy=("random", "oldest"), **given)


def test_an_order_belongs_to_the_groups_of_a_name():
    rb = buffer(strategy=("reward", "spread"), max_uses=1)
    rb.extend(answers([0, 0, 1, 1]))
    rb.sample()
    rb.set_sampler(PromptGroupSampler(samples_per_group=2, group_key="prompt", strategy=("random", "oldest")))
    with pytest.raises(
        IncompatibleStore, match=r"in the order of the variance of .reward., as .* in the order of their age"
    ):
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
