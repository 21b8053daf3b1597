"""Windows of a :class:`WindowSpec`: steps, masks and shapes against what is counted by hand, by every sampler and kind of rows."""

import pickle
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    WindowSpec,
)
from tests.samplers.slicing import seeded
from tests.statistics_of import assert_uniform


class Windowed(NamedTuple):
    """A window as it must be."""

    episode: int
    steps: tuple[int, ...]
    valid: tuple[bool, ...]

    @property
    def last(self):
        """Place of the last real step."""
        return max(i for i, real in enumerate(self.valid) if real)


def by_hand(episodes, spec, *, strict=True):
    """All windows of episodes ``{number: [steps that are stored]}``, step by step."""
    found = []
    for number, stored in episodes.items():
        begin = -spec.padding * spec.dilation
        while True:
            at = [begin + i * spec.dilation for i in range(spec.burn_in + spec.length)]
            whole = at[-1] < len(stored)
            if not whole and (strict or begin != -spec.padding * spec.dilation):
                break
            steps = tuple(stored[min(max(i, 0), len(stored) - 1)] for i in at)
            found.append(Windowed(number, steps, tuple(0 <= i < len(stored) for i in at)))
            begin += spec.period
            if not whole:
                break
    return found


def rows_of(lengths, *, ids=True):
    """Fields of episodes that are as long as ``lengths`` says, the last one open."""
    episode = np.repeat(np.arange(len(lengths)), lengths)
    t = np.concatenate([np.arange(n) for n in lengths])
    done = np.concatenate([np.arange(n) == n - 1 for n in lengths])
    done[-1] = False
    named = {"episode": episode} if ids else {"number": episode}
    return {**named, "t": t, "is_init": t == 0, "next": {"done": done}}


def as_tensordict(rows):
    n = len(rows["t"])
    return TensorDict({k: TensorDict(v, [n]) if k == "next" else torch.from_numpy(v) for k, v in rows.items()}, [n])


def drawn(rb, batch_size, spec, *, flat):
    """The windows of a batch, whose masks and marks are checked."""
    batch, info = rb.sample(batch_size, return_info=True)
    steps = spec.burn_in + spec.length
    shape = (batch_size,) if flat else (batch_size, steps)
    assert batch["t"].shape == info["validity_mask"].shape == info["learning_mask"].shape == shape
    assert info["next", "truncated"].shape == (*shape, 1)
    number = batch["episode" if "episode" in batch.keys() else "number"].reshape(-1, steps)
    assert bool((number == number[:, :1]).all())
    learned = [False] * spec.burn_in + [True] * spec.length
    assert info["learning_mask"].reshape(-1, steps).tolist() == [learned] * len(number)
    valid = info["validity_mask"].reshape(-1, steps)
    index = info["index"][0].reshape(-1, steps)
    found = []
    for i, (name, t, real) in enumerate(
        zip(number[:, 0].tolist(), batch["t"].reshape(-1, steps).tolist(), valid.tolist(), strict=True)
    ):
        window = Windowed(name, tuple(t), tuple(real))
        truncated = info["next", "truncated"].reshape(-1, steps)[i]
        assert truncated.nonzero().flatten().tolist() == [window.last]
        done = batch["next"]["done"].reshape(-1, steps)[i] | truncated
        assert torch.equal(info["next", "done"].reshape(-1, steps)[i], done)
        assert bool(info["is_init"].reshape(-1, steps)[i, 0])
        assert torch.equal(rb[index[i]]["t"], batch["t"].reshape(-1, steps)[i])
        found.append(window)
    return found


SPECS = st.builds(
    lambda length, burn_in, period, dilation, padding: WindowSpec(
        length, period, dilation, burn_in, padding % (length + burn_in)
    ),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 6),
)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=6),
    spec=SPECS,
    strict=st.booleans(),
    flat=st.booleans(),
    kind=st.sampled_from(["uniform", "anchors", "epoch", "priorities"]),
    form=st.sampled_from(["dict", "tensordict"]),
    ids=st.booleans(),
    capacity=st.sampled_from([100, 20]),
)
def test_windows_are_those_that_are_counted_by_hand(lengths, spec, strict, flat, kind, form, ids, capacity):
    if kind == "priorities":
        spec = WindowSpec(spec.length, spec.period, spec.dilation, spec.burn_in, min(spec.padding, spec.burn_in))
    sampler = {
        "uniform": SliceSampler,
        "anchors": lambda **options: SliceSampler(uniform_over="anchors", **options),
        "epoch": SliceSamplerWithoutReplacement,
        "priorities": lambda **options: PrioritizedSliceSampler(capacity, 0.5, 0.5, **options),
    }[kind](window=spec, flat=flat, strict_length=strict)
    cls = TensorDictReplayBuffer if form == "tensordict" else ReplayBuffer
    rb = cls(storage=LazyTensorStorage(capacity), sampler=sampler, generator=seeded())
    rows = rows_of(lengths, ids=ids)
    for part in range(0, len(rows["t"]), 7):  # in pieces, so that a small ring is overwritten
        piece = {
            k: {"done": v["done"][part : part + 7]} if k == "next" else v[part : part + 7] for k, v in rows.items()
        }
        rb.extend(as_tensordict(piece) if form == "tensordict" else piece)
    live = list(zip(np.repeat(np.arange(len(lengths)), lengths).tolist(), rows["t"].tolist(), strict=True))[-capacity:]
    episodes = {number: [t for n, t in live if n == number] for number, _ in live}
    expected = by_hand(episodes, spec, strict=strict)
    if kind == "priorities":  # the row that is drawn is the first to learn from, so it must be there
        expected = [w for w in expected if w.valid[spec.burn_in]]
    steps = spec.burn_in + spec.length
    # Every trajectory once in an epoch, so that a batch may be short.
    batch = min(4, len({w.episode for w in expected})) if kind == "epoch" else 4
    if not expected:
        with pytest.raises(RuntimeError, match="sample: "):
            rb.sample(4 * (steps if flat else 1))
        return
    if kind == "epoch":
        seen = []
        while not rb.sampler.ran_out:
            found = epoch_batch(rb, batch, spec, flat=flat)
            assert set(found) <= set(expected)
            seen += [w.episode for w in found]
        assert sorted(seen) == sorted({w.episode for w in expected})
        return
    for _ in range(3):
        assert set(drawn(rb, batch * (steps if flat else 1), spec, flat=flat)) <= set(expected)


def epoch_batch(rb, n, spec, *, flat):
    """A batch of an epoch, perhaps short or without a window."""
    steps = spec.burn_in + spec.length
    try:
        batch, info = rb.sample(n * (steps if flat else 1), return_info=True)
    except NoSampleable:  # its trajectories are too short
        return []
    number = batch["episode" if "episode" in batch.keys() else "number"].reshape(-1, steps)[:, 0].tolist()
    table = (batch["t"].reshape(-1, steps).tolist(), info["validity_mask"].reshape(-1, steps).tolist())
    return [Windowed(e, tuple(t), tuple(real)) for e, t, real in zip(number, *table, strict=True)]


LENGTHS = [9, 3, 14, 1, 20, 6]


@pytest.mark.parametrize(
    "spec",
    [
        WindowSpec(3, burn_in=1, padding=1),
        WindowSpec(4, period=5),
        WindowSpec(3, 2, 2, 1, 2),
        WindowSpec(2, 9, 1, 1, 1),
    ],
    ids=["padded", "period", "all", "far"],
)
@pytest.mark.parametrize("over", ["trajectories", "anchors"])
def test_windows_are_drawn_in_equal_shares(spec, over):
    sampler = SliceSampler(window=spec, flat=False, uniform_over=over)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, generator=seeded())
    rb.extend(rows_of(LENGTHS))
    every = by_hand(dict(enumerate([list(range(n)) for n in LENGTHS])), spec)
    counts = Counter(dict.fromkeys(every, 0))
    for _ in range(8):
        batch, info = rb.sample(500, return_info=True)
        rows = zip(batch["episode"].tolist(), batch["t"].tolist(), info["validity_mask"].tolist(), strict=True)
        counts.update(Windowed(e[0], tuple(t), tuple(real)) for e, t, real in rows)
    assert set(counts) == set(every)
    if over == "anchors":
        assert_uniform(list(counts.values()))
        return
    by_episode = {
        number: [n for w, n in counts.items() if w.episode == number] for number in {w.episode for w in every}
    }
    assert_uniform([sum(starts) for starts in by_episode.values()])
    for starts in by_episode.values():
        if len(starts) > 1:
            assert_uniform(starts)


def test_windows_are_drawn_by_the_priority_of_the_first_step_to_learn_from():
    spec = WindowSpec(2, burn_in=2, padding=2)
    sampler = PrioritizedSliceSampler(40, alpha=1.0, beta=1.0, eps=0.0, window=spec, flat=False)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, generator=seeded())
    index = rb.extend(as_tensordict(rows_of([4, 3, 12])))
    rb.update_priority(index, torch.where(index < 2, 1.0 + index, 0.0))
    batch = rb.sample(600)
    assert batch["priority_weight"].shape == batch["index_generation"].shape == (600, 4)
    first = batch["t"][:, 2]
    assert batch["t"][first == 0].unique(dim=0).tolist() == [[0, 0, 0, 1]]
    assert batch["t"][first == 1].unique(dim=0).tolist() == [[0, 0, 1, 2]]
    assert abs((first == 1).float().mean() - 2 / 3) < 0.1
    assert batch["priority_weight"].unique(dim=1).shape == (600, 1)
    assert torch.equal(batch["priority_weight"][:, 0], torch.where(first == 0, 1.0, 0.5))
    # Priorities go back to the rows, as always.
    batch["td_error"] = torch.full((600, 4), 3.0)
    rb.update_tensordict_priority(batch)
    tree = rb.sampler.anchors.priorities().core
    assert [tree.leaf(row) for row in range(4)] == [3.0, 3.0, 3.0, 0.0]


def test_tuples_and_columns():
    spec = WindowSpec(2, burn_in=1, padding=1)
    rb = ReplayBuffer(storage=LazyTensorStorage(60, ndim=2), sampler=SliceSampler(window=spec, flat=False))
    t = np.tile(np.arange(10), (3, 1))
    rb.extend({"t": t, "column": np.repeat(np.arange(3), 10).reshape(3, 10), "next": {"done": t % 5 == 4}})
    batch, info = rb.sample(50, return_info=True)
    assert [part.shape for part in info["index"]] == [(50, 3), (50, 3)]
    assert torch.equal(info["index"][0] % 10, batch["t"])
    assert torch.equal(info["index"][1], batch["column"])
    assert bool((batch["column"] == batch["column"][:, :1]).all())
    found = {
        (tuple(t), tuple(real)) for t, real in zip(batch["t"].tolist(), info["validity_mask"].tolist(), strict=True)
    }
    first = {((0, 0, 1), (False, True, True)), ((5, 5, 6), (False, True, True))}
    assert found & first
    assert found <= first | {((k, k + 1, k + 2), (True,) * 3) for k in (0, 1, 2, 5, 6, 7)}


def test_expanders_around_windows():
    rows = rows_of([6, 9])
    rows["next"]["reward"] = np.ones(15, np.float32)
    spec = WindowSpec(2, burn_in=1, padding=1)
    sampler = NStep(SliceSampler(window=spec, flat=False), n=3, gamma=0.5)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    rb.extend(as_tensordict(rows))
    batch = rb.sample(40)
    assert batch.batch_size == (40, 3)
    size = torch.tensor([6, 9])[batch["episode"]]
    left = (size - batch["t"]).clamp(max=3)
    assert torch.equal(batch["next", "reward"], torch.tensor([0.0, 1.0, 1.5, 1.75])[left])
    assert torch.equal(~batch["validity_mask"], (batch["t"] == 0) & (torch.arange(3) == 0) & (batch["t"][:, 1:2] == 0))


def test_flags_that_are_stored_as_numbers():
    rows = rows_of([4, 4])
    rows["next"]["done"] = rows["next"]["done"].astype(np.float32)
    spec = WindowSpec(3)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(window=spec, flat=False, init_key=None))
    rb.extend(rows)
    batch, info = rb.sample(30, return_info=True)
    assert info["next", "done"].shape == (30, 3, 1)
    expected = (batch["next"]["done"] != 0) | (torch.arange(3) == 2)
    assert torch.equal(info["next", "done"].squeeze(-1), expected)


def test_pinned_batches_and_prefetched_ones_are_the_same():
    def buffer(**options):
        sampler = SliceSampler(window=WindowSpec(3, burn_in=1, padding=1), flat=False)
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(40), sampler=sampler, batch_size=5, generator=seeded(), **options
        )
        rb.extend(as_tensordict(rows_of([9, 9, 9])))
        return rb

    plain, ahead = buffer(), buffer(prefetch=2)
    plain.append_transform(lambda td: td.set("shape", torch.ones(td.batch_size)))
    ahead.append_transform(lambda td: td.set("shape", torch.ones(td.batch_size)))
    for _ in range(5):
        one, other = plain.sample(), ahead.sample()
        assert one.batch_size == other.batch_size == (5, 4)
        assert bool((one == other).all())
    ahead.shutdown()


# ---- reopening -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["slices", "epoch", "priorities", "anchors"])
def test_a_directory_and_a_pickle_know_the_spec(tmp_path, kind):
    spec = WindowSpec(3, 2, 2, 1, 1)
    options = {"window": spec, "flat": False}
    sampler = {
        "slices": lambda: SliceSampler(**options, online=True),
        "epoch": lambda: SliceSamplerWithoutReplacement(**options),
        "priorities": lambda: PrioritizedSliceSampler(40, 0.5, 0.5, **options),
        "anchors": lambda: SliceSampler(**options, anchors=PrioritizedSampler(40, 0.5, 0.5)),
    }[kind]()
    rb = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path / "store"), sampler=sampler, batch_size=3)
    rb.extend(rows_of([9, 12]))
    copy = pickle.loads(pickle.dumps(rb.sampler))
    assert (copy.window, copy.flat, repr(copy)) == (spec, False, repr(rb.sampler))
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "store")
    assert (rb.sampler.window, rb.sampler.flat, repr(rb.sampler)) == (spec, False, repr(copy))
    assert rb.sample()["t"].shape == (2 if kind == "epoch" else 3, 4)
    rb.close()


def test_what_a_store_notes_of_other_samplers_stays():
    assert not {"window", "flat", "online"} & SliceSampler(slice_len=3).config().keys()


# ---- arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": 0}, ValueError, "WindowSpec: length: expected at least 1 steps, got 0."),
        ({"length": 2.0}, TypeError, "WindowSpec: length: expected an int, got float. Write 2."),
        ({"length": 2, "period": 0}, ValueError, "WindowSpec: period: expected at least 1 steps, got 0."),
        ({"length": 2, "dilation": -1}, ValueError, "WindowSpec: dilation: expected at least 1 steps, got -1."),
        ({"length": 2, "burn_in": -1}, ValueError, "WindowSpec: burn_in: expected at least 0 steps, got -1."),
        (
            {"length": 2, "burn_in": 1, "padding": 3},
            ValueError,
            r"padding: expected less than burn_in \+ length = 3 steps",
        ),
        ({"length": 1 << 41}, ValueError, "WindowSpec: length: expected at most"),
        ({"length": 1 << 30, "dilation": 1 << 30}, ValueError, "expected windows over at most"),
    ],
)
def test_specs_that_are_none(arguments, error, message):
    with pytest.raises(error, match=message):
        WindowSpec(**arguments)


def test_a_spec_is_a_value():
    spec = WindowSpec(np.int64(3), burn_in=1)
    assert spec == WindowSpec(length=3, period=1, dilation=1, burn_in=1, padding=0)
    assert hash(spec) == hash(WindowSpec(3, burn_in=1))
    assert type(spec.length) is int
    assert (spec.steps, spec.reach, WindowSpec(3, dilation=4, burn_in=1).reach) == (4, 4, 13)
    with pytest.raises(AttributeError):
        spec.length = 4


@pytest.mark.parametrize(
    ("sampler", "arguments", "error", "message"),
    [
        (SliceSampler, {}, TypeError, "expected one of num_slices, slice_len and window"),
        (
            SliceSampler,
            {"slice_len": 3, "window": WindowSpec(3)},
            TypeError,
            "expected one of num_slices, slice_len and window",
        ),
        (
            SliceSamplerWithoutReplacement,
            {"num_slices": 3, "window": WindowSpec(3)},
            TypeError,
            "expected one of num_slices",
        ),
        (SliceSampler, {"window": 3}, TypeError, "window: expected a WindowSpec, got int"),
        (SliceSampler, {"slice_len": 3, "flat": False}, TypeError, "flat=False: expected window=WindowSpec"),
        (SliceSampler, {"slice_len": 3, "online": True}, TypeError, "online=True: expected window=WindowSpec"),
        (SliceSampler, {"window": WindowSpec(3), "span": 1}, TypeError, "expected one of window and span, got both"),
        (
            SliceSampler,
            {"window": WindowSpec(3), "strict_length": False, "pad_output": True},
            TypeError,
            "expected one of window and pad_output, got both",
        ),
        (
            SliceSampler,
            {"window": WindowSpec(3, padding=1), "anchors": PrioritizedSampler(9, 1, 1)},
            ValueError,
            "expected padding of at most burn_in=0 with priorities",
        ),
        (SliceSamplerWithoutReplacement, {"window": WindowSpec(3), "online": True}, TypeError, "online"),
    ],
)
def test_arguments_that_do_not_go_together(sampler, arguments, error, message):
    with pytest.raises(error, match=message):
        sampler(**arguments)


def test_batches_that_cannot_be_drawn():
    spec = WindowSpec(3, burn_in=2, dilation=2, padding=1)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(window=spec))
    rb.extend(rows_of([6]))
    with pytest.raises(
        RuntimeError, match=r"expected a multiple of the 5 steps of WindowSpec\(.*flat=False it counts windows"
    ):
        rb.sample(7)
    assert not rb.can_sample(5)
    with pytest.raises(
        NoSampleable, match="expected a trajectory of at least 7 steps, got 1 of at most 6. Draw shorter windows"
    ):
        rb.sample(5)
    rb.extend({**rows_of([7]), "episode": np.ones(7, int)})
    assert rb.can_sample(5)
    assert rb.sample(5)["t"].tolist() == [0, 0, 2, 4, 6]
    rb.sampler.window = WindowSpec(2)  # settings can be changed at any time
    assert rb.sample(2)["t"].diff().tolist() == [1]
