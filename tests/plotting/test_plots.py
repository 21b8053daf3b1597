"""Figures: what they show is computed again, with NumPy, from the rows and what was written to them."""

import itertools
import math

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MinSize,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplesPerInsert,
)
from engram.inspect import plots
from tests.fresh import run

mpl.use("Agg")

FIGURES = ("priority", "weights", "age", "usage", "returns", "map", "throughput", "ratio")


@pytest.fixture
def ax():
    return Figure().subplots()


def steps(n, done=()):
    ends = torch.zeros(n, dtype=torch.bool)
    ends[list(done)] = True
    return {"obs": torch.arange(n), "next": {"reward": torch.arange(n, dtype=torch.float32), "done": ends}}


def stairs(axes):
    """Counts and edges of every histogram."""
    return [(patch.get_data().values, patch.get_data().edges) for patch in axes.patches]


def prioritized(n=60, alpha=0.6, beta=0.4, storage=LazyTensorStorage, **more):
    rb = ReplayBuffer(storage=storage(50), sampler=PrioritizedSampler(50, alpha, beta, **more))
    rb.extend(steps(n))
    return rb


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_priorities_of_rows_and_draws(ax, alpha):
    rb = prioritized(alpha=alpha, eps=0.5)
    priorities = np.random.default_rng(0).gamma(1.0, size=50)
    priorities[:5] = 0
    rb.update_priority(torch.arange(50), torch.from_numpy(priorities))
    assert rb.plot.priority(ax=ax) is ax
    (count, edges), (draws, _) = stairs(ax)
    assert np.allclose(edges, np.linspace(priorities.min(), priorities.max(), 51), atol=1e-6)
    leaves = (priorities + 0.5) ** alpha
    inside = np.clip(np.digitize(priorities, edges - 1e-9) - 1, 0, 49)
    assert np.allclose(count, np.bincount(inside, minlength=50))
    assert np.allclose(draws, np.bincount(inside, leaves / leaves.sum() * 50, minlength=50), atol=1e-5)
    assert f"effective {leaves.sum() ** 2 / (leaves**2).sum():,.0f} of 50 rows" in ax.get_title()


def test_weights_are_those_of_batches(ax):
    rb = prioritized(alpha=0.7, beta=0.5)
    rb.update_priority(torch.arange(50), torch.linspace(0.1, 3, 50))
    rb.update_priority(7, 0.0)  # eps is tiny, so that row 7 has by far the smallest leaf
    _, info = rb.sample(4000, return_info=True)
    of = dict(zip(info["index"].tolist(), info["priority_weight"].tolist(), strict=True))
    rb.plot.weights(ax=ax)
    (count, edges), _ = stairs(ax)
    assert count.sum() == 50
    assert math.isclose(edges[-1], 1, rel_tol=1e-6)  # row 7 itself, which is hardly ever drawn
    assert math.isclose(edges[0], min(of.values()), rel_tol=1e-4)


@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
def test_priorities_are_found_inside_other_samplers_and_of_lists(make, ax):
    def drawing(sampler):
        rb = ReplayBuffer(storage=make(50), sampler=sampler)
        rb.extend(steps(40, [9, 39]) if make is LazyTensorStorage else list(range(40)))
        rb.update_priority(torch.arange(40), torch.arange(40.0))
        return rb

    samplers = [PrioritizedSampler(50, 1.0, 1.0)]
    if make is LazyTensorStorage:
        samplers += [
            NStep(PrioritizedSampler(50, 1.0, 1.0), 2, 0.9),
            PrioritizedSliceSampler(50, 1.0, 1.0, slice_len=2),
        ]
    for sampler in samplers:
        axes = drawing(sampler).plot.priority(ax=Figure().subplots())
        (count, edges), _ = stairs(axes)
        assert math.isclose(edges[-1], 39, abs_tol=1e-6)
        assert count.sum() == 40


def test_without_alpha_all_priorities_are_one(ax):
    prioritized(alpha=0.0).plot.priority(ax=ax)
    assert stairs(ax)[0][0].sum() == 50
    assert "effective 50 of 50 rows" in ax.get_title()


@pytest.mark.parametrize("priority", [False, True])
def test_ages(priority, ax):
    rb = prioritized(130) if priority else ReplayBuffer(storage=LazyTensorStorage(50))
    if not priority:
        rb.extend(steps(130))
    rb.plot.age(ax=ax)
    assert ax.get_title() == "Age: mean 24, largest 49 writes"  # of 0 to 49: 24.5
    assert [values.tolist() for values, _ in stairs(ax)] == [pytest.approx([1.0] * 50)] * (1 + priority)


def test_large_buffers_are_looked_at_in_part(ax, monkeypatch):
    monkeypatch.setattr(plots.Scan.__init__, "__defaults__", (100,))
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000))
    rb.extend(steps(10_000))
    rb.plot.age(ax=ax)
    assert stairs(ax)[0][0].tolist() == [pytest.approx(200)] * 50


def test_usage_counts_draws(ax):
    rb = ReplayBuffer(storage=LazyTensorStorage(50), sampler=ConsumingSampler(3), batch_size=20)
    rb.extend(steps(40))
    seen = np.zeros(40, dtype=int)
    for _ in range(4):
        seen[rb.sample(return_info=True)[1]["index"].numpy()] += 1
    rb.plot.usage(ax=ax)
    assert [bar.get_height() for bar in ax.patches] == np.bincount(seen, minlength=4).tolist()
    assert ax.get_title() == f"{100 * (seen == 0).mean():.3g} % of the rows were never drawn"


def returns_of(rb, **more):
    points, _ = rb.plot.returns(ax=Figure().subplots(), **more).lines
    return points.get_xdata().tolist(), points.get_ydata().tolist()


@settings(max_examples=30)
@given(
    capacity=st.integers(1, 20),
    lanes=st.integers(1, 3),
    writes=st.lists(st.lists(st.booleans(), min_size=1), max_size=12),
)
def test_returns_of_whole_trajectories(capacity, lanes, writes):
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity * lanes, lanes=lanes))
    kept, number = [[] for _ in range(lanes)], itertools.count()  # per lane (ticket, reward, done)
    overwritten = [False] * lanes
    for i, done in enumerate(writes):
        lane = i % lanes
        done = done[:capacity]
        at = [next(number) for _ in done]
        ends = torch.tensor(done)
        rb.extend({"reward": torch.tensor([float(n % 7) for n in at]), "done": ends}, lane=lane)
        kept[lane] += zip(at, done, strict=True)
        overwritten[lane] |= len(kept[lane]) >= capacity  # of a full lane the first trajectory may lack its head
        kept[lane] = kept[lane][-capacity:]
    written, expected = next(number), {}
    for lane, part in enumerate(kept):
        total, whole = 0, not overwritten[lane]
        for at, done in part:
            total += at % 7
            if done:
                if whole:
                    expected[written - 1 - at] = total
                total, whole = 0, True
    if expected:
        ages, values = returns_of(rb)
        assert dict(zip(ages, values, strict=True)) == expected
        assert ages == sorted(ages, reverse=True)
    else:
        with pytest.raises(
            RuntimeError,
            match=r"^plot.returns: (the buffer is empty|expected a trajectory with its first and last step)",
        ):
            rb.plot.returns()


def test_returns_of_several_columns_of_ids_and_of_a_named_reward():
    rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2))
    gain = torch.arange(24.0).reshape(2, 12, 1).expand(2, 12, 3)
    rb.extend({"gain": gain, "episode": torch.arange(12).expand(2, 12) // 4})
    _, values = returns_of(rb, reward="gain")
    columns = np.arange(24).reshape(2, 3, 4).sum(-1)[:, :2] * 3  # the last trajectory of each is open
    assert sorted(values) == sorted(columns.flatten().tolist())


def test_a_step_type_and_a_truncation_end_trajectories():
    rb = ReplayBuffer(storage=LazyTensorStorage(40))
    rb.extend({"reward": torch.ones(6), "step_type": torch.tensor([0, 1, 2, 0, 1, 1])})
    rb.end_trajectory()
    assert returns_of(rb)[1] == [3, 3]


def image_of(rb):
    axes = rb.plot.map(ax=Figure().subplots())
    return axes.images[0].get_array().filled(np.nan), axes.lines[0].get_xydata().tolist()


def test_a_map_of_lanes():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, lanes=3))
    rb.extend(steps(6), lane=0)
    rb.extend(steps(2), lane=2)
    image, marks = image_of(rb)
    blank = np.nan
    assert np.array_equal(image, [[3, 2, 5, 4], [blank] * 4, [1, 0, blank, blank]], equal_nan=True)
    assert marks == [[2, 0], [0, 1], [2, 2]]


def test_a_map_of_one_lane_is_folded():
    rb = ReplayBuffer(storage=LazyTensorStorage(1_000_000))
    rb.extend(steps(1000))
    image, marks = image_of(rb)
    cells = image.flatten()
    assert cells.size >= 1 << 14
    filled = np.flatnonzero(~np.isnan(cells))
    assert np.array_equal(cells[filled], 999 - filled * 1_000_000 // (1 << 14))
    (x, y), width = marks[0], image.shape[1]
    assert y * width + x == 1000 * (1 << 14) // 1_000_000


def test_usage_counts_samples_of_any_sampler(ax):
    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=20)
    rb.extend(steps(40))
    rb.count_usage()
    seen = np.bincount(
        np.concatenate([rb.sample(return_info=True)[1]["index"].numpy() for _ in range(4)]), minlength=40
    )
    rb.plot.usage(ax=ax)
    assert [bar.get_height() for bar in ax.patches] == np.bincount(seen).tolist()
    assert ax.get_title() == f"{100 * (seen == 0).mean():.3g} % of the rows were never drawn"


def test_ratio_without_a_limit_is_what_the_store_counted(ax):
    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=20)
    rb.extend(steps(40))
    rb.sample()
    rb.plot.ratio(ax=ax)
    path, now = ax.lines
    assert path.get_xydata()[-1].tolist() == now.get_xydata()[-1].tolist() == [40, 20]
    with pytest.raises(RuntimeError, match=r"^plot.ratio: expected a store that counts samples"):
        ReplayBuffer(storage=ListStorage(10)).plot.ratio()


def test_throughput_is_the_curve_of_the_store(ax):
    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=20)
    rb.extend(steps(40))
    rb.sample()
    rb.plot.throughput(ax=ax)
    edges = stairs(ax)[0][1]
    totals = [(rates * np.diff(edges)).sum() for rates, _ in stairs(ax)]
    assert totals == pytest.approx([40, 20])


def test_throughput_of_a_history(ax):
    history = [(10.0, {"write_count": 5}), (12.0, {"write_count": 25}), (13.0, {"write_count": 0})]
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.plot.throughput(history, ax=ax)
    ((rates, edges),) = stairs(ax)
    assert rates.tolist() == [10, 0]
    assert edges.tolist() == [0, 2, 3]


def test_throughput_that_is_watched(ax):
    rb = ReplayBuffer(storage=LazyTensorStorage(10)).limit(MinSize(1))
    rb.extend(steps(4))
    rb.plot.throughput(seconds=0.01, ax=ax)
    assert [rates.sum() for rates, _ in stairs(ax)] == [0, 0]  # written, sampled


@pytest.mark.parametrize("history", [[], [(1.0, {})], [(2.0, {}), (1.0, {})]])
def test_a_history_without_time(history):
    with pytest.raises(ValueError, match=r"^plot.throughput: history: expected two moments"):
        ReplayBuffer(storage=LazyTensorStorage(10)).plot.throughput(history)


@pytest.mark.parametrize("seconds", [0, -1, math.nan])
def test_seconds_that_do_not_pass(seconds):
    with pytest.raises(ValueError, match=r"^plot.throughput: seconds: expected a number above 0"):
        ReplayBuffer(storage=LazyTensorStorage(10)).plot.throughput(seconds=seconds)


def test_ratio_in_its_band(ax):
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=5)
    rb.extend(steps(10))
    rb.limit(SamplesPerInsert(2, min_size=10, tolerance=0.5))
    history = []
    for _ in range(3):
        rb.extend(steps(5), timeout=0)
        rb.sample(timeout=0)
        rb.sample(timeout=0)
        history.append((0.0, rb.stats()))
    rb.plot.ratio(history, ax=ax)
    _, path, now = ax.lines
    assert path.get_xydata().tolist() == [[5, 10], [10, 20], [15, 30]]
    assert now.get_xydata().tolist() == [[15, 30]]
    # From a level of 20 in the middle, 10 either way.
    corners = {tuple(corner) for corner in ax.collections[0].get_paths()[0].vertices.tolist()}
    assert {(0, 0), (18, 36 - 10), (18, 36 + 10), (0, 10)} <= corners
    assert rb.plot.ratio(ax=Figure().subplots()).lines[2].get_xydata().tolist() == [[15, 30]]


LACKS = {
    "priority": "expected a sampler with priorities, such as PrioritizedSampler, got RandomSampler",
    "weights": "expected a sampler with priorities, such as PrioritizedSampler, got RandomSampler",
    "usage": "expected draws to be counted, got RandomSampler without. Call rb.count_usage",
    "returns": "expected a field called 'reward', got \\['obs'\\]",
}


@pytest.mark.parametrize("name", LACKS)
def test_what_a_buffer_lacks_is_named(name):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler()).limit(MinSize(1))
    rb.extend({"obs": torch.arange(5)})
    with pytest.raises(RuntimeError, match=f"^plot.{name}: {LACKS[name]}"):
        getattr(rb.plot, name)()


def test_returns_need_ends_and_a_key():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"reward": torch.ones(5)})
    with pytest.raises(RuntimeError, match=r"^plot.returns: expected a field that ends trajectories"):
        rb.plot.returns()
    with pytest.raises(KeyError, match=r"plot.returns: reward: expected one of the fields \['reward'\], got 'gain'"):
        rb.plot.returns(reward="gain")
    with pytest.raises(TypeError, match=r"^plot.returns: reward: expected a string"):
        rb.plot.returns(reward=3.5)


@pytest.mark.parametrize("name", sorted({*FIGURES} - {"throughput", "ratio"}))
@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
def test_an_empty_buffer_says_so(name, make):
    with pytest.raises(RuntimeError, match=f"^plot.{name}: the buffer is empty. Add data before drawing it.$"):
        getattr(ReplayBuffer(storage=make(10)).plot, name)()


@pytest.mark.parametrize("name", FIGURES)
def test_plots_of_a_closed_buffer_refuse(name):
    rb = prioritized()
    plots = rb.plot
    rb.close()
    with pytest.raises(RuntimeError, match="was closed"):
        getattr(plots, name)()
    with pytest.raises(RuntimeError, match="^plot: the buffer was closed"):
        rb.plot  # noqa: B018


def test_a_reader_sees_what_the_writer_does(tmp_path, ax):
    rb = prioritized(storage=lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "store"))
    rb.update_priority(torch.arange(50), torch.arange(50.0))
    reader = ReplayBuffer.open(tmp_path / "store", readonly=True)
    (count, edges), _ = stairs(reader.plot.priority(ax=ax))
    assert math.isclose(edges[-1], 49, abs_tol=1e-5)
    assert count.sum() == 50


def test_nothing_is_imported_and_no_display_is_needed():
    code = """
    import io, sys, torch
    from engram import LazyTensorStorage, ReplayBuffer
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.arange(5))
    rb.plot
    assert "matplotlib" not in sys.modules
    rb.plot.age().figure.savefig(io.BytesIO(), format="png")
    sys.modules["matplotlib"] = None
    del sys.modules["matplotlib.pyplot"]
    try:
        rb.plot.age()
    except ModuleNotFoundError as error:
        print(error)
    """
    assert run(code).splitlines()[-1] == 'plot: needs matplotlib: pip install "engram-replay[plot]".'
