"""``sample(layout=…)`` and ``sample(max_tokens=…)`` of rows of any length."""

import itertools
import random
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    PromptGroupSampler,
    Ragged,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SamplesPerInsert,
    SliceSampler,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)

ROWS, LONGEST, EACH = 60, 40, 4
FIELDS = {
    "tokens": Ragged(torch.int32, max_length=LONGEST),
    "log_prob": Ragged(torch.float32, like="tokens", shape=(2,)),
    "prompt": Ragged(torch.int16, max_length=LONGEST),
    "text": Ragged("utf-8", max_length=200),
}
LENGTHS = [random.Random(5 * number).randrange(LONGEST + 1) for number in range(ROWS)]
PROMPTS = [random.Random(7 * number).randrange(LONGEST // 2) for number in range(ROWS)]
COSTS = [max(pair) for pair in zip(LENGTHS, PROMPTS, strict=True)]


def rows(first=0, last=ROWS):
    numbers = range(first, last)
    return {
        "number": torch.tensor(numbers),
        "group": torch.tensor([number // EACH for number in numbers]),
        "policy_version": torch.zeros(len(numbers)),
        "tokens": [torch.arange(LENGTHS[n], dtype=torch.int32) + 1000 * n for n in numbers],
        "log_prob": [torch.full((LENGTHS[n], 2), float(n)) for n in numbers],
        "prompt": [torch.full((PROMPTS[n],), n, dtype=torch.int16) for n in numbers],
        "text": ["é" * n for n in numbers],  # twice as many bytes as rows have tokens
    }


def buffer(sampler=None, *, layout="packed", storage=LazyTensorStorage, kind=ReplayBuffer, **more):
    where = {"scratch_dir": more.pop("folder")} if "folder" in more else {}
    made = storage(100, ragged=FIELDS, ragged_bytes=1e6, layout=layout, **where)
    more.setdefault("generator", torch.Generator().manual_seed(0))
    rb = kind(storage=made, sampler=sampler, batch_size=6, **more)
    given = rows()
    if kind is TensorDictReplayBuffer:
        ragged = {key: given.pop(key) for key in FIELDS}
        given = TensorDict(given, [ROWS])
        for key, items in ragged.items():
            given[key] = (
                NonTensorStack(*items) if key == "text" else torch.nested.nested_tensor(items, layout=torch.jagged)
            )
    rb.extend(given)
    return rb


def unpacked(packed):
    ends = packed.cu_seqlens.tolist()
    return [packed.values[a:b].tolist() for a, b in itertools.pairwise(ends)]


def expected(field, number):
    return rows(number, number + 1)[field][0].tolist()


# ---- layouts of one call -------------------------------------------------------------------------------------------------


def check_padded(batch, *, left=False, multiple=1):
    numbers = batch["number"].tolist()
    for field, lengths in (("tokens", LENGTHS), ("log_prob", LENGTHS), ("prompt", PROMPTS)):
        longest = max(lengths[n] for n in numbers)
        longest = (longest + multiple - 1) // multiple * multiple
        assert batch[field].values.shape[:2] == batch[field].mask.shape == (len(numbers), longest)
        assert batch[field].mask.dtype == torch.bool
        for at, number in enumerate(numbers):
            items, gap = expected(field, number), longest - lengths[number]
            zero = [0.0, 0.0] if field == "log_prob" else 0
            assert batch[field].values[at].tolist() == ([zero] * gap + items if left else items + [zero] * gap)
            there = [True] * lengths[number]
            assert batch[field].mask[at].tolist() == ([False] * gap + there if left else there + [False] * gap)


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_each_call_has_its_layout(sampler):
    rb = buffer(sampler(), layout="list")
    for _ in range(3):
        batch = rb.sample(layout="packed")
        for field in ("tokens", "log_prob", "prompt"):
            assert unpacked(batch[field]) == [expected(field, n) for n in batch["number"].tolist()]
            assert batch[field].max_seqlen == max(len(row) for row in unpacked(batch[field]))
            assert batch[field].cu_seqlens.dtype == torch.int32
        assert batch["tokens"].cu_seqlens is batch["log_prob"].cu_seqlens
        batch = rb.sample(layout="jagged")
        assert [row.tolist() for row in batch["tokens"].unbind()] == [expected("tokens", n) for n in batch["number"]]
        check_padded(rb.sample(layout="padded"))
        check_padded(rb.sample(layout={"kind": "padded", "multiple": 8}), multiple=8)
        batch = rb.sample(layout={"kind": "padded", "side": "left", "multiple": 16})
        check_padded(batch, left=True, multiple=16)
        assert batch["tokens"].mask is batch["log_prob"].mask
        assert isinstance(rb.sample()["tokens"], list)  # the storage's


def test_rows_without_items_are_padded():
    rb = ReplayBuffer(storage=LazyTensorStorage(10, ragged={"tokens": Ragged(torch.int32, max_length=5)}), batch_size=3)
    rb.extend({"tokens": [torch.zeros(0, dtype=torch.int32)] * 2})
    for multiple in (1, 8):
        padded = rb.sample(layout={"kind": "padded", "multiple": multiple})["tokens"]
        assert padded.values.shape == padded.mask.shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float64, torch.uint8])
def test_items_of_any_dtype_are_padded(dtype):
    rb = ReplayBuffer(storage=LazyTensorStorage(10, ragged={"x": Ragged(dtype, max_length=9, shape=(3, 2))}))
    given = [torch.ones((n, 3, 2), dtype=dtype) for n in (4, 0, 9, 1)]
    rb.extend({"x": given, "number": torch.arange(4)})
    for side in ("left", "right"):
        batch = rb.sample(20, layout={"kind": "padded", "side": side})
        values, mask = batch["x"]
        assert values.dtype == dtype
        assert mask.sum(1).tolist() == [len(given[n]) for n in batch["number"].tolist()]
        assert bool((values[mask] == 1).all())
        assert not bool(values[~mask].bool().any())


def test_layouts_in_every_form_of_batch():
    batch = buffer(output="numpy").sample(layout="padded")
    assert isinstance(batch["tokens"].values, np.ndarray)
    rb = buffer(kind=TensorDictReplayBuffer)
    assert rb.sample(layout="padded")["tokens", "mask"].shape[0] == 6
    rb = buffer(PrioritizedSampler(100, alpha=0.7, beta=0.5), kind=TensorDictReplayBuffer)
    batch = rb.sample(max_tokens=100)
    assert len(batch["index"]) == len(batch["priority_weight"]) == len(batch["number"])


def test_batches_come_after_updates_that_were_submitted():
    rb = buffer(writer=RoundRobinWriter(track_generations=True))
    index = torch.arange(ROWS)
    going = threading.Event()
    update = rb.update_if_present
    rb.update_if_present = lambda **named: (going.wait(), update(**named))[1]
    rb.submit_update_if_present(
        index=index, generation=rb.writer.generations_of(index), patch={"policy_version": torch.ones(ROWS)}
    )
    threading.Timer(0.05, going.set).start()
    for form in ({"layout": "list"}, {"max_tokens": 100}):
        assert rb.sample(**form)["policy_version"].unique().tolist() == [1.0]


# ---- budgets -------------------------------------------------------------------------------------------------------------


def greedy(numbers, most, cost, *, multiple=0, most_rows=ROWS):
    """Batches that a stream of rows is cut into, each before the first row that it would be too large with."""
    batches, batch = [], []
    for number in numbers:
        together = [*batch, number]
        total = sum(cost[n] for n in together)
        if multiple:
            total = len(together) * ((max(cost[n] for n in together) + multiple - 1) // multiple * multiple)
        if batch and (total > most or len(together) > most_rows):
            batches.append(batch)
            batch = []
        batch.append(number)
    return [*batches, batch]


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize(
    ("form", "cost", "more"),
    [
        ({"max_tokens": 90}, COSTS, {}),
        ({"max_tokens": {"tokens": 90}}, LENGTHS, {}),
        ({"max_tokens": {"log_prob": 90}}, LENGTHS, {}),
        ({"max_tokens": {"prompt": 45}}, PROMPTS, {}),
        ({"max_tokens": {"text": 200}}, [2 * n for n in range(ROWS)], {}),
        ({"max_tokens": 90, "batch_size": 3}, COSTS, {"most_rows": 3}),
        ({"max_tokens": 100_000}, COSTS, {}),
        ({"max_tokens": 90, "layout": "padded"}, COSTS, {"multiple": 1}),
        ({"max_tokens": 96, "layout": {"kind": "padded", "multiple": 16}}, COSTS, {"multiple": 16}),
    ],
)
@pytest.mark.filterwarnings("ignore:sample. batch_size")
def test_batches_in_order_end_before_the_row_that_does_not_fit(form, cost, more, folder, tmp_path):
    sampler = SamplerWithoutReplacement(shuffle=False)
    rb = buffer(sampler, storage=LazyMemmapStorage, folder=tmp_path / "s") if folder else buffer(sampler)
    most = form["max_tokens"] if isinstance(form["max_tokens"], int) else next(iter(form["max_tokens"].values()))
    for _ in range(2):  # epochs
        found = []
        while not found or not sampler.ran_out:
            found.append(rb.sample(**form)["number"].tolist())
        assert found == greedy(range(ROWS), most, cost, **more)


def test_an_epoch_in_any_order_goes_on_with_the_row_that_did_not_fit():
    sampler = SamplerWithoutReplacement()
    rb = buffer(sampler)
    for _ in range(5):
        batches = []
        while not batches or not sampler.ran_out:
            batches.append(rb.sample(max_tokens=75)["number"].tolist())
        order = [number for batch in batches for number in batch]
        assert sorted(order) == list(range(ROWS))
        assert batches == greedy(order, 75, COSTS)


def test_processes_share_an_epoch_by_tokens(tmp_path):
    samplers = [SamplerWithoutReplacement() for _ in range(2)]
    first = buffer(samplers[0], storage=LazyMemmapStorage, folder=tmp_path / "s")
    handles = [first, ReplayBuffer.open(tmp_path / "s", sampler=samplers[1])]
    found, turn = [], random.Random(0)
    while not any(sampler.ran_out for sampler in samplers):
        batch = turn.choice(handles).sample(max_tokens=75, layout="packed")
        assert sum(COSTS[n] for n in batch["number"].tolist()) <= 75
        found += batch["number"].tolist()
    assert sorted(found) == list(range(ROWS))


def test_threads_share_an_epoch_by_tokens():
    sampler = SamplerWithoutReplacement()
    rb = buffer(sampler)
    found, errors = [], []

    def draw():
        try:
            for _ in range(40):
                found.extend(rb.sample(max_tokens=60)["number"].tolist())
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=draw) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors
    counts = Counter(found)
    assert max(counts.values()) - min(counts.values()) <= 1  # whole epochs, and a part of one


def test_an_epoch_beside_overwrites_has_its_rows_once():
    sampler = SamplerWithoutReplacement(shuffle=False)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS, ragged=FIELDS, ragged_bytes=1e6, layout="packed"), sampler=sampler
    )
    rb.extend(rows())
    assert rb.sample(max_tokens=75)["number"].tolist() == greedy(range(ROWS), 75, COSTS)[0]
    first = len(greedy(range(ROWS), 75, COSTS)[0])
    rb.extend(rows(0, 20))  # over rows 0 to 19
    found = []
    while not sampler.ran_out:
        found += rb.sample(max_tokens=75)["number"].tolist()
    assert first < 20
    assert found == list(range(20, ROWS))


@pytest.mark.parametrize("uses", [1, 3])
def test_rows_that_do_not_fit_are_not_used_up(uses):
    rb, found = buffer(ConsumingSampler(uses)), []
    while len(rb):
        numbers = rb.sample(max_tokens=75)["number"].tolist()
        assert sum(COSTS[n] for n in numbers) <= 75
        assert len({*numbers}) == len(numbers)
        found += numbers
        assert rb.sampler.ran_out == (len(rb) == 0)
    assert Counter(found) == dict.fromkeys(range(ROWS), uses)
    with pytest.raises(NoSampleable, match="no row is left"):
        rb.sample(max_tokens=75)


def test_consumers_use_each_row_once_between_them():
    rb, found, errors = buffer(ConsumingSampler()), [], []

    def draw():
        try:
            while True:
                found.extend(rb.sample(max_tokens=60)["number"].tolist())
        except NoSampleable:
            pass
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=draw) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    draw()  # what a thread gave back as another one found nothing
    assert not errors
    assert sorted(found) == list(range(ROWS))


def test_prompt_groups_are_drawn_whole_and_once():
    rb = buffer(PromptGroupSampler(samples_per_group=EACH, group_key="group", max_uses=1))
    most, found = max(sum(COSTS[g * EACH : g * EACH + EACH]) for g in range(ROWS // EACH)), []
    while rb.can_sample(EACH):
        batch = rb.sample(max_tokens=most, timeout=0)
        numbers = batch["number"].tolist()
        assert sum(COSTS[n] for n in numbers) <= most
        groups = [numbers[at : at + EACH] for at in range(0, len(numbers), EACH)]
        assert [sorted(group) for group in groups] == [[g[0] // EACH * EACH + i for i in range(EACH)] for g in groups]
        found += numbers
    assert sorted(found) == list(range(ROWS))
    with pytest.raises(NoSampleable, match="complete groups"):
        rb.sample(max_tokens=most, timeout=0)


def test_the_freshest_groups_come_first_and_none_twice():
    rb = buffer(PromptGroupSampler(samples_per_group=EACH, group_key="group", strategy=("random", "freshest")))
    numbers = rb.sample(max_tokens=100_000)["number"].tolist()
    assert sorted(numbers) == list(range(ROWS))
    numbers = rb.sample(max_tokens=300)["number"].tolist()
    assert {n // EACH for n in numbers} == {ROWS // EACH - 1 - i for i in range(len(numbers) // EACH)}


def test_draws_with_replacement_fit_and_depend_on_the_seed_alone():
    def drawn(sampler):
        rb = buffer(sampler())
        batches = [rb.sample(max_tokens=120, return_info=True) for _ in range(30)]
        for batch, info in batches:
            numbers = batch["number"].tolist()
            assert numbers == info["index"].tolist()
            assert unpacked(batch["tokens"]) == [expected("tokens", n) for n in numbers]
            assert sum(COSTS[n] for n in numbers) <= 120
            assert len(numbers) >= 3  # the longest row has 40
        return [batch["number"].tolist() for batch, _ in batches]

    for sampler in (RandomSampler, lambda: PrioritizedSampler(100, alpha=0.7, beta=0.5), StalenessAwareSampler):
        assert drawn(sampler) == drawn(sampler)


def test_a_batch_that_is_drawn_in_several_parts_has_each_row_once_where_samplers_say_so():
    rb = buffer(StalenessAwareSampler())
    for _ in range(30):
        numbers = rb.sample(max_tokens=900)["number"].tolist()
        assert len({*numbers}) == len(numbers) > 16  # rows of the first part


def test_weights_over_the_batch_are_over_the_batch_that_is_handed_out():
    rb = buffer(PrioritizedSampler(100, alpha=1.0, beta=1.0, eps=0.0, normalize="batch"))
    priorities = torch.arange(1.0, ROWS + 1)
    rb.update_priority(torch.arange(ROWS), priorities)
    for _ in range(10):
        batch, info = rb.sample(max_tokens=400, return_info=True)
        weights = 1 / priorities[batch["number"]]
        assert torch.allclose(info["priority_weight"], weights / weights.max(), rtol=1e-4)


# ---- rows that change meanwhile ------------------------------------------------------------------------------------------


def between(rb, monkeypatch, name, act, calls=1):
    """Have something happen before the first calls of a method of the store."""
    store, left = rb.storage.store, [calls]
    method = getattr(store, name)

    def changed(*args, **named):
        if left[0]:
            left[0] -= 1
            act()
        return method(*args, **named)

    monkeypatch.setattr(store, name, changed)


def test_rows_that_are_edited_while_they_are_drawn_are_neither_lost_nor_used(monkeypatch):
    rb = buffer(ConsumingSampler())
    between(rb, monkeypatch, "read_spans", lambda: rb.set_at_("policy_version", torch.ones(ROWS), torch.arange(ROWS)))
    found = rb.sample(max_tokens=75)["number"].tolist()
    while len(rb):
        found += rb.sample(max_tokens=75)["number"].tolist()
    assert sorted(found) == list(range(ROWS))
    assert rb["policy_version"].tolist() == [1.0] * ROWS


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement, ConsumingSampler])
def test_where_all_rows_are_written_over_others_are_drawn(sampler, monkeypatch):
    storage = LazyTensorStorage(ROWS, ragged=FIELDS, ragged_bytes=1e6, layout="packed")
    rb = ReplayBuffer(storage=storage, sampler=sampler())
    rb.extend(rows())
    between(rb, monkeypatch, "read", lambda: rb.extend(rows()), calls=2)
    batch = rb.sample(max_tokens=100)
    numbers = batch["number"].tolist()
    assert unpacked(batch["tokens"]) == [expected("tokens", n) for n in numbers]
    assert 0 < sum(COSTS[n] for n in numbers) <= 100
    if sampler is ConsumingSampler:
        assert len(rb) == ROWS - len(numbers)


@pytest.mark.parametrize("name", ["read_spans", "read"])
def test_rows_that_are_written_over_while_they_are_drawn_are_left_out(name, monkeypatch):
    storage = LazyTensorStorage(ROWS, ragged=FIELDS, ragged_bytes=1e6, layout="packed")
    rb = ReplayBuffer(storage=storage, sampler=PromptGroupSampler(samples_per_group=EACH, group_key="group"))
    rb.extend(rows())
    between(rb, monkeypatch, name, lambda: rb.extend(rows(0, 2 * EACH - 1)))  # over groups 0 and 1
    for _ in range(50):
        batch = rb.sample(max_tokens=100_000)
        numbers = batch["number"].tolist()
        assert unpacked(batch["tokens"]) == [expected("tokens", n) for n in numbers]
        assert sorted(numbers) == sorted({*numbers})
        assert all(count == EACH for count in Counter(n // EACH for n in numbers).values())


@pytest.mark.parametrize(
    "sampler", [ConsumingSampler, lambda: PromptGroupSampler(samples_per_group=EACH, group_key="group", max_uses=1)]
)
@pytest.mark.parametrize(("name", "quiet"), [("read", 0), ("read_spans", 0), ("read_spans", 1)])
def test_drawing_or_reading_that_fails_uses_nothing_up(sampler, name, quiet, monkeypatch):
    rb, left = buffer(sampler()), [quiet]

    def fail():
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    between(rb, monkeypatch, name, fail, calls=quiet + 1)
    with pytest.raises(KeyboardInterrupt):
        rb.sample(max_tokens=900)
    assert sorted(rb.sample(max_tokens=100_000)["number"].tolist()) == list(range(ROWS))


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "most"),
    [
        (lambda: SamplerWithoutReplacement(shuffle=False), 1),
        (ConsumingSampler, 1),
        (lambda: PromptGroupSampler(samples_per_group=EACH, group_key="group", max_uses=1), EACH),
        (RandomSampler, 1),
    ],
)
def test_a_first_row_that_does_not_fit_is_refused_and_nothing_is_used(sampler, most):
    rb, found = buffer(sampler()), []
    said = rf"max_tokens: expected the tokens of (row|the group of rows) [0-9, ]+, which has [0-9]+, got {most}\."

    def until_one_is_too_long():
        for _ in range(100):
            found.extend(rb.sample(max_tokens=most)["number"].tolist())

    with pytest.raises(ValueError, match=said):
        until_one_is_too_long()
    assert all(COSTS[n] <= most for n in found)
    rest = rb.sample(max_tokens=100_000)["number"].tolist()
    if not isinstance(rb.sampler, RandomSampler):
        assert sorted(found + rest) == list(range(ROWS))


def test_a_budget_below_the_rows_of_a_group_is_refused():
    rb = buffer(PromptGroupSampler(samples_per_group=EACH, group_key="group"))
    with pytest.raises(ValueError, match="expected room for the 4 rows of a group"):
        rb.sample(max_tokens=3)


@pytest.mark.parametrize(
    ("made", "form", "error", "said"),
    [
        (buffer, {"max_tokens": 0}, ValueError, "max_tokens: expected at least 1 token, got 0"),
        (buffer, {"max_tokens": 1.5}, TypeError, "max_tokens: expected an int, got float"),
        (
            buffer,
            {"max_tokens": {}},
            ValueError,
            "max_tokens: expected a number, or a dict of one field and its number, got 0 fields",
        ),
        (
            buffer,
            {"max_tokens": {"number": 4}},
            KeyError,
            "max_tokens: expected one of the ragged fields .*'prompt'.*, got 'number'",
        ),
        (buffer, {"max_tokens": 9, "batch_size": 0}, ValueError, "batch_size: expected at least 1"),
        (buffer, {"layout": "square"}, ValueError, "sample: layout: kind: expected one of"),
        (buffer, {"layout": {"kind": "packed", "multiple": 2}}, ValueError, "side and multiple"),
        (lambda: buffer(prefetch=2), {"layout": "list"}, ValueError, "layout: expected a buffer without prefetch"),
        (lambda: buffer(prefetch=2), {"max_tokens": 9}, ValueError, "max_tokens: expected a buffer without prefetch"),
        (
            lambda: buffer(SliceSampler(slice_len=2)),
            {"max_tokens": 9},
            ValueError,
            "expected a sampler that draws rows",
        ),
        (
            lambda: buffer(NStep(RandomSampler(), 2, 0.9)),
            {"max_tokens": 9},
            ValueError,
            "expected a sampler that draws rows",
        ),
        (
            lambda: buffer().limit(SamplesPerInsert(2, min_size=1, tolerance=ROWS)),
            {"max_tokens": 9},
            ValueError,
            "expected a store without limits",
        ),
        (
            lambda: buffer(SamplerWithoutReplacement(drop_last=True)),
            {"max_tokens": 9},
            ValueError,
            "expected drop_last=False",
        ),
        (
            lambda: buffer(PromptGroupSampler(num_groups=2, group_key="group")),
            {"max_tokens": 9},
            ValueError,
            "expected samples_per_group",
        ),
    ],
)
def test_what_cannot_be_is_refused(made, form, error, said):
    with pytest.raises(error, match=said):
        made().sample(**form)


@pytest.mark.parametrize("form", [{"layout": "packed"}, {"max_tokens": 5}])
def test_rows_of_one_size_have_no_layout(form):
    for storage in (LazyTensorStorage(4), ListStorage(4)):
        rb = ReplayBuffer(storage=storage, batch_size=2)
        with pytest.raises(NoSampleable if isinstance(storage, LazyTensorStorage) else ValueError):
            rb.sample(**form)
        rb.extend([{"x": torch.ones(2)}, {"x": torch.ones(2)}])
        with pytest.raises(ValueError, match="expected a buffer with ragged fields"):
            rb.sample(**form)
