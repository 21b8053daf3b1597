"""Arguments of slice samplers: which are refused, and settings that change between draws."""

import pickle
import re
import threading
import time

import pytest
import torch

from engram import (
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StreamingSliceSampler,
)
from engram.around.episodes import StaticTable
from tests.samplers.slicing import BOTH, buffer, steps, windows

# ---- mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({}, TypeError),
        ({"num_slices": 2, "slice_len": 3}, TypeError),
        ({"slice_len": 0}, ValueError),
        ({"num_slices": -1}, ValueError),
        ({"slice_len": 2.0}, TypeError),
        ({"slice_len": True}, TypeError),
        ({"slice_len": 1, "end_key": "a", "end_keys": ["b"]}, RuntimeError),
        ({"slice_len": 1, "ends": [1], "trajectories": [1]}, RuntimeError),
        ({"slice_len": 1, "ends": [1], "traj_key": "a"}, RuntimeError),
        ({"slice_len": 1, "trajectories": [1], "end_key": "a"}, RuntimeError),
        ({"slice_len": 1, "trajectories": [1], "end_keys": ["a"]}, RuntimeError),
        ({"slice_len": 1, "end_key": 1.5}, TypeError),
        ({"slice_len": 1, "traj_key": ()}, TypeError),
        ({"slice_len": 1, "end_keys": "done"}, TypeError),
        ({"slice_len": 1, "truncated_key": 1.5}, TypeError),
        ({"slice_len": 1, "init_key": ("a", 1.5)}, TypeError),
        ({"slice_len": 1, "index": ""}, ValueError),
        ({"slice_len": 1, "index": "a/b"}, ValueError),
        ({"slice_len": 1, "index": "x" * 65}, ValueError),
        ({"slice_len": 1, "index": 1}, TypeError),
        ({"slice_len": 1, "fragmented": True, "step_key": 1.5}, TypeError),
        ({"slice_len": 1, "unheard": 1}, TypeError),
        ({"slice_len": 1, "ends": True}, TypeError),
    ],
)
def test_mistaken_arguments(cls, arguments, kind):
    with pytest.raises(kind, match="Slice"):
        cls(**arguments)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"slice_len": 1, "ends": [1]}, RuntimeError),
        ({"slice_len": 1, "pad_output": True}, ValueError),
        ({"slice_len": 1, "uniform_over": "rows"}, ValueError),
        ({"slice_len": 3, "span": "left"}, TypeError),
        ({"slice_len": 3, "span": (1, 2, 3)}, TypeError),
        ({"slice_len": 3, "span": -1}, ValueError),
    ],
)
def test_mistaken_arguments_with_replacement(arguments, kind):
    with pytest.raises(kind, match="SliceSampler"):
        SliceSampler(**arguments)


def test_variants():
    made = SliceSampler(replacement=False, slice_len=2, drop_last=True)
    assert type(made) is SliceSamplerWithoutReplacement
    assert made.drop_last
    assert type(SliceSampler(replacement=True, slice_len=2)) is SliceSampler
    assert type(SliceSamplerWithoutReplacement(replacement=False, slice_len=2)) is SliceSamplerWithoutReplacement
    with pytest.raises(TypeError, match="replacement=False"):
        SliceSamplerWithoutReplacement(replacement=True, slice_len=2)


def test_arguments_that_change_nothing():
    def drawn(**arguments):
        return buffer(SliceSampler(slice_len=3, **arguments), steps([5, 9])).sample(12)["index"].tolist()

    assert drawn() == drawn(cache_values=True) == drawn(compile={"mode": "x"}) == drawn(use_gpu=True)
    SliceSamplerWithoutReplacement(slice_len=3, compile=True, use_gpu="cuda:0")


@pytest.mark.parametrize("cls", BOTH)
def test_mistakes_when_drawing(cls):
    with pytest.raises(RuntimeError, match="batch_size: expected a multiple of slice_len=4, got 10"):
        buffer(cls(slice_len=4), steps([9])).sample(10)
    with pytest.raises(RuntimeError, match="batch_size: expected a multiple of num_slices=4, got 2"):
        buffer(cls(num_slices=4), steps([9])).sample(2)
    with pytest.raises(NoSampleable, match="^Cannot sample from an empty storage"):
        buffer(cls(slice_len=4)).sample(4)
    with pytest.raises(RuntimeError, match="expected a tensor storage"):
        buffer(cls(slice_len=4), steps([9]), storage=ListStorage(20)).sample(4)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=cls(slice_len=2))
    rb.extend(torch.zeros(4))
    with pytest.raises(RuntimeError, match="got rows of one tensor each"):
        rb.sample(2)
    with pytest.raises(RuntimeError, match="expected a storage"):
        cls(slice_len=2).draw(rb.storage.extent(), 2, 0)


def test_a_length_that_no_trajectory_has_costs_nothing():
    """Whole trajectories are asked for so: room for what there is, not for what there might be."""
    rb = buffer(SliceSampler(num_slices=4, strict_length=False), steps([5, 3]), batch_size=4 << 40)
    assert 12 <= len(rb.sample()) <= 20


@pytest.mark.parametrize("cls", BOTH)
def test_another_thread_may_draw_from_another_buffer_meanwhile(cls):
    class Interrupted(cls):
        other = None

        def _sample(self, *arguments):
            other, self.other = self.other, None
            if other is not None:
                other.sample()
            return super()._sample(*arguments)

    sampler = Interrupted(slice_len=4)
    one = buffer(sampler, steps([5] * 12), batch_size=40)
    other = buffer(sampler, steps([7] * 8 + [4]), batch_size=40)
    for _ in range(5):
        sampler.other = other
        windows(one.sample(), 4)


def test_threads_that_draw_first_place_static_boundaries_once(monkeypatch):
    """Else one draws from the other's table, which knows no boundaries yet."""
    made, make = [], StaticTable

    def slowly(*arguments, **more):
        made.append(make(*arguments, **more))
        time.sleep(0.05)
        return made[-1]

    monkeypatch.setattr("engram.around.windows.StaticTable", slowly)
    rb = buffer(SliceSampler(slice_len=4, ends=torch.arange(200) % 5 == 4, cache_values=True), steps([5] * 40))
    batches = []
    threads = [threading.Thread(target=lambda: batches.append(rb.sample(40))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(batches) == 3
    for batch in batches:
        windows(batch, 4)


def test_settings_may_change_between_draws():
    rb = buffer(SliceSampler(slice_len=4), steps([6, 6, 2]))
    ends = ("next", "truncated")
    assert rb.sample(12)[ends].sum() == 3
    rb.sampler.slice_len = 2
    assert rb.sample(12)[ends].sum() == 6
    rb.sampler.slice_len = 4
    rb.sampler.strict_length = False
    assert len(rb.sample(400)) < 400
    rb.sampler.pad_output = True
    assert len(rb.sample(400)) == 400
    rb.sampler.truncated_key = None
    assert ends not in rb.sample(400).keys(include_nested=True)


def test_can_sample():
    rb = buffer(SliceSampler(slice_len=4))
    assert not rb.can_sample(4)
    rb.extend(steps([3, 3], open_end=True))
    assert not rb.can_sample(4)
    assert buffer(SliceSampler(slice_len=4, strict_length=False), steps([3])).can_sample(4)
    more = steps([2], first=1)
    more["step"] += 3
    rb.extend(more)
    assert rb.can_sample(8)
    assert not rb.can_sample(9)
    assert len(rb.sample(4)) == 4


def test_torchrls_verbs():
    rb = buffer(RandomSampler(), steps([5, 9]))
    sampler = SliceSampler(slice_len=3)
    (rows,), info = sampler.sample(rb.storage, 6)
    assert rows.shape == (6,)
    assert info["next", "truncated"].flatten().tolist() == [False, False, True] * 2
    assert sampler.can_sample(rb.storage, 6)


class MineOfNone(SliceSampler):
    """A subclass says its own name."""


@pytest.mark.parametrize(
    ("make", "arguments", "kind", "message"),
    [
        (StreamingSliceSampler, {"span": 4}, ValueError, "span: expected less than the 4 steps"),
        (StreamingSliceSampler, {"span": "x"}, TypeError, "span: expected a bool or an int"),
        (StreamingSliceSampler, {"span": -1}, ValueError, "span: expected at least 0 steps"),
        (StreamingSliceSampler, {"pad_output": True}, ValueError, "pad_output: expected strict_length=False"),
        (StreamingSliceSampler, {"replacement": False}, TypeError, "expected replacement=True"),
        (PrioritizedSliceSampler, {"span": (0, 4)}, ValueError, "span: expected less than the 4 steps"),
        (PrioritizedSliceSampler, {"pad_output": True}, ValueError, "pad_output: expected strict_length=False"),
        (MineOfNone, {"span": 4}, ValueError, "span: expected less than the 4 steps"),
        (MineOfNone, {"ends": [True]}, RuntimeError, "ends and trajectories need cache_values=True"),
        (MineOfNone, {"uniform_over": "x"}, ValueError, "uniform_over: expected 'trajectories' or 'anchors'"),
    ],
)
def test_messages_say_the_class_that_was_used(make, arguments, kind, message):
    own = {"alpha": 1.0, "beta": 1.0} if make is PrioritizedSliceSampler else {}
    with pytest.raises(kind, match=f"^{make.__name__}: {re.escape(message)}"):
        make(slice_len=4, **own, **arguments)


def test_slices_without_replacement_are_of_both_kinds():
    made = SliceSamplerWithoutReplacement(slice_len=2)
    for kind in (SliceSampler, SamplerWithoutReplacement):
        assert isinstance(made, kind)
        assert issubclass(SliceSamplerWithoutReplacement, kind)
        assert not isinstance(RandomSampler(), kind)
    assert not isinstance(SliceSampler(slice_len=2), SamplerWithoutReplacement)
    assert not isinstance(SamplerWithoutReplacement(), SliceSampler | SliceSamplerWithoutReplacement)
    assert not isinstance(PrioritizedSliceSampler(alpha=1.0, beta=1.0, slice_len=2), SliceSamplerWithoutReplacement)
    assert made.own_indexes == ()
    assert type(pickle.loads(pickle.dumps(made))) is SliceSamplerWithoutReplacement
