"""Windows around drawn rows, compared with a model that shares no code, and with TorchRL's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RowError,
    SamplerWithoutReplacement,
    SampleUnit,
    Sequence,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.around.model import rows_of, steps_of, window

FLAGS = st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=9)


@st.composite
def sequences(draw):
    length, burn_in, bootstrap = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    return Sequence(
        length,
        draw(st.sampled_from(["pad", "stop", "include_reset"])),
        draw(st.sampled_from([("next", "done"), ("next", "done"), None])),
        burn_in,
        bootstrap,
        draw(st.integers(1, 2)),
    )


def filled(lanes, length, writes, unit, **kwargs):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(lanes * length, lanes=lanes), sample_unit=unit, **kwargs)
    for at, (lane, flags) in enumerate(writes):
        rb.extend(rows_of(100 * at, flags), lane=lane)
    return rb


def check(rb, unit, index, info, steps, *, expected_anchors=None):
    """Compare records with the model, anchor by anchor."""
    total = unit.burn_in + unit.length + unit.bootstrap
    where = {step.row: (lane, at) for lane in steps for at, step in enumerate(lane)}
    anchors = info["anchor_index"].reshape(-1, total)
    n = len(anchors)
    assert bool((anchors == anchors[:, :1]).all())
    if expected_anchors is not None:
        assert anchors[:, 0].tolist() == expected_anchors
    for k, (anchor, rows, valid) in enumerate(
        zip(
            anchors[:, 0].tolist(),
            index.reshape(n, total).tolist(),
            info["validity_mask"].reshape(n, total).tolist(),
            strict=True,
        )
    ):
        assert (rows, valid) == window(*where[anchor], unit), (k, anchor)
    learned = [unit.burn_in <= i < unit.burn_in + unit.length for i in range(total)]
    assert info["learning_mask"].tolist() == learned * n
    assert info["step_in_sequence"].tolist() == list(range(total)) * n
    assert info["sequence_id"].tolist() == [k for k in range(n) for _ in range(total)]


class TestWindows:
    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def test_are_those_of_a_model(self, data):
        unit = data.draw(sequences())
        lanes, spare = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 6))
        length = unit.reach + spare
        writes = data.draw(st.lists(st.tuples(st.integers(0, lanes - 1), FLAGS), min_size=1, max_size=5))
        steps = steps_of(None, lanes, length, writes)
        rb = filled(lanes, length, writes, unit)
        live = [step.row for lane in steps for step in lane]
        index, info = unit.expand(torch.tensor(live), {"mine": torch.tensor(live), "one": 3}, rb.storage)
        check(rb, unit, index, info, steps, expected_anchors=live)
        assert info["one"] == 3
        assert info["mine"].tolist() == info["anchor_index"].tolist()
        batch, info = rb.sample(17, return_info=True)
        check(rb, unit, info["index"], info, steps)
        assert batch["step"].tolist() == rb[info["index"]]["step"].tolist()
        for name in ("index", "sequence_id", "step_in_sequence", "learning_mask", "validity_mask", "anchor_index"):
            assert torch.equal(batch[name], info[name])

    @pytest.mark.parametrize("boundary", ["pad", "stop", "include_reset"])
    def test_are_those_of_torchrl(self, boundary):
        theirs = pytest.importorskip("torchrl.data")
        for seed in range(12):
            random = torch.Generator().manual_seed(seed)

            def number(low, high, random=random):
                return int(torch.randint(low, high, (), generator=random))

            sizes = {"burn_in": number(0, 3), "bootstrap": number(0, 3), "dilation": number(1, 3)}
            length = number(1, 4)
            ours = Sequence(length, boundary, **sizes)
            capacity = ours.reach + number(0, 8)
            rb = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity))
            other = theirs.TensorDictReplayBuffer(storage=theirs.LazyTensorStorage(capacity))
            for at in range(3):
                flags = (torch.rand(number(1, capacity), generator=random) < 0.3).tolist()
                rb.extend(rows_of(100 * at, flags))
                other.extend(rows_of(100 * at, flags))
            rows = torch.arange(len(rb))
            index, info = ours.expand(rows, {}, rb.storage)
            expected, said = theirs.Sequence(length, boundary, **sizes).expand(rows, {}, other.storage)
            assert index.tolist() == expected.tolist()
            assert info.keys() == said.keys()
            for name, value in said.items():
                assert info[name].tolist() == value.tolist(), name
                assert info[name].dtype is value.dtype

    def test_of_columns(self):
        unit = Sequence(3, burn_in=1, bootstrap=1)
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(24, ndim=2), sample_unit=unit, batch_size=64)
        flags = torch.zeros(3, 10, 1, dtype=torch.bool)
        flags[0, 3] = flags[1, 7] = flags[2, 8] = True
        data = {"step": torch.arange(30).reshape(3, 10), "next": {"done": flags}}
        rb.extend(TensorDict(data, [3, 10]))  # 8 steps of each of 3 columns stay
        batch, info = rb.sample(return_info=True)
        assert batch["index"].shape == batch["anchor_index"].shape == (64 * 5, 2)
        assert len(info["index"]) == 2
        steps = batch["step"].reshape(64, 5)
        assert bool((steps // 10 == steps[:, :1] // 10).all())  # of one column
        anchors = batch["anchor_index"].reshape(64, 5, 2)[:, 1]
        for k in range(64):
            column = int(anchors[k, 1])
            anchor = next(s for s in range(2, 10) if s % 8 == int(anchors[k, 0]))
            done = [int(s) for s in flags[column, :, 0].nonzero()]
            start = max([2] + [d + 1 for d in done if d < anchor])
            stop = min([9] + [d for d in done if d >= anchor])
            expected = [min(max(anchor + i, start), stop) for i in range(-1, 4)]
            assert steps[k].tolist() == [column * 10 + s for s in expected]

    def test_of_one_step_are_the_rows(self):
        rb = filled(1, 10, [(0, [False] * 7)], Sequence(1))
        batch = rb.sample(50)
        assert batch["index"].tolist() == batch["anchor_index"].tolist() == batch["step"].tolist()
        assert bool(batch["validity_mask"].all())
        assert bool(batch["learning_mask"].all())

    def test_longer_than_every_trajectory_are_padded(self):
        unit = Sequence(6, "stop", burn_in=2)
        rb = filled(1, 20, [(0, [False, True] * 10)], unit)
        batch = rb.sample(100)
        assert batch["validity_mask"].reshape(100, 8).sum(1).tolist() == [2] * 100
        rows = batch["index"].reshape(100, 8)
        assert bool((rows // 2 == rows[:, :1] // 2).all())

    def test_of_rows_that_are_dicts(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Sequence(2, done_key="done"), batch_size=4)
        rb.extend({"step": torch.arange(6), "done": torch.tensor([False, True] * 3)})
        batch, info = rb.sample(return_info=True)
        assert batch.keys() == {"step", "done"}
        assert batch["step"].tolist() == info["index"].tolist()
        assert torch.equal(info["index"].reshape(4, 2)[:, 0], info["anchor_index"].reshape(4, 2)[:, 0])


class TestFirstSteps:
    def test_are_marked(self):
        rb = filled(1, 10, [(0, [False] * 10)], Sequence(3, burn_in=1))
        batch, info = rb.sample(5, return_info=True)
        assert batch["is_init"].reshape(5, 4).tolist() == [[True, False, False, False]] * 5
        assert torch.equal(info["is_init"], batch["is_init"])
        assert not rb["is_init"].any()

    def test_stay_as_they_are_stored(self):
        rb = filled(1, 10, [(0, [False] * 10)], Sequence(3, burn_in=1, init_key=None))
        batch, info = rb.sample(5, return_info=True)
        assert not batch["is_init"].any()
        assert "is_init" not in info


class TestSamplers:
    def test_without_replacement_each_row_is_an_anchor_once(self):
        rb = filled(
            2, 6, [(0, [False] * 9), (1, [True] * 4)], Sequence(2), sampler=SamplerWithoutReplacement(), batch_size=5
        )
        anchors = torch.cat([batch["anchor_index"][::2] for batch in rb])
        assert sorted(anchors.tolist()) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    def test_uniform_anchors(self):
        rb = filled(1, 8, [(0, [False, True] * 4)], Sequence(3), generator=torch.Generator().manual_seed(3))
        counts = torch.bincount(rb.sample(8000)["anchor_index"][::3], minlength=8).double()
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 24.3  # chi-square, 7 degrees of freedom, p = 0.001

    def test_anchors_by_priority(self):
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0,
            beta=1.0,
            eps=0.0,
            storage=LazyTensorStorage(8),
            sample_unit=Sequence(3),
            generator=torch.Generator().manual_seed(5),
        )
        rb.extend(rows_of(0, [False] * 8))
        priorities = torch.tensor([1.0, 0, 3, 0, 2, 0, 1, 1])
        rb.update_priority(torch.arange(8), priorities)
        batch = rb.sample(8000)
        counts = torch.bincount(batch["anchor_index"][::3], minlength=8).double()
        expected = priorities.double() * 1000
        assert counts[expected == 0].sum() == 0
        drawn = expected > 0
        assert float(((counts - expected)[drawn] ** 2 / expected[drawn]).sum()) < 18.5  # 4 degrees of freedom
        weights = {1.0: 1.0, 2.0: 0.5, 3.0: 1 / 3}
        assert batch["priority_weight"].tolist() == pytest.approx(
            [weights[p] for p in priorities[batch["anchor_index"]].tolist()]
        )
        assert batch["index_generation"].tolist() == rb.storage.tickets_of(batch["index"]).tolist()
        assert batch["anchor_generation"].tolist() == rb.storage.tickets_of(batch["anchor_index"]).tolist()

    def test_what_a_sampler_of_ones_own_says_is_repeated(self):
        class Oldest:
            def draw(self, extent, batch_size, key):
                from engram import Draw

                rows = torch.arange(batch_size)
                return Draw(rows, None, {"age": rows * 10, "pair": torch.zeros(2)})

            def observe(self, write, data):
                pass

            update_priority = state_dict = load_state_dict = observe

        rb = filled(1, 10, [(0, [False] * 10)], Sequence(2), sampler=Oldest())
        _, info = rb.sample(3, return_info=True)
        assert info["age"].tolist() == [0, 0, 10, 10, 20, 20]
        assert info["pair"].tolist() == [0, 0]


class TestBadInput:
    @pytest.mark.parametrize("name", ["length", "dilation"])
    def test_sizes_below_one(self, name):
        with pytest.raises(ValueError, match=f"Sequence: {name}"):
            Sequence(**{"length": 3, name: 0})

    @pytest.mark.parametrize("name", ["burn_in", "bootstrap"])
    def test_sizes_below_zero(self, name):
        with pytest.raises(ValueError, match=f"Sequence: {name}"):
            Sequence(3, **{name: -1})

    def test_other_values(self):
        with pytest.raises(ValueError, match=r"episode_boundary.*'pad'.*'wrap'"):
            Sequence(3, "wrap")
        with pytest.raises(TypeError, match="Sequence: length"):
            Sequence(2.5)
        with pytest.raises(TypeError, match="done_key"):
            Sequence(2, done_key=1.5)
        with pytest.raises(ValueError, match="priority_eta"):
            Sequence(2, priority_eta=1.5)
        with pytest.raises(TypeError, match="priority_eta"):
            Sequence(2, priority_eta="much")
        with pytest.raises(ValueError, match="steps"):
            Sequence(1 << 30, dilation=1 << 30)

    @pytest.mark.parametrize("unit", [3, "pad", object(), Sequence])
    def test_no_unit(self, unit):
        with pytest.raises(TypeError, match="sample_unit: expected a SampleUnit"):
            ReplayBuffer(10, sample_unit=unit)

    def test_a_list(self):
        with pytest.raises(TypeError, match=r"tensor storage.*ListStorage"):
            ReplayBuffer(storage=ListStorage(10), sample_unit=Sequence(2))
        with pytest.raises(TypeError, match="tensor storage"):
            Sequence(2).expand(torch.tensor([0]), {}, ListStorage(10))

    def test_rows_of_one_tensor(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Sequence(2), batch_size=2)
        rb.extend(torch.arange(5))
        with pytest.raises(TypeError, match="rows with fields"):
            rb.sample()

    def test_no_flag(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Sequence(2, done_key="over"), batch_size=2)
        rb.extend({"step": torch.arange(5), "done": torch.zeros(5, dtype=torch.bool)})
        with pytest.raises(KeyError, match=r"done_key.*step.*'over'"):
            rb.sample()

    def test_longer_than_a_lane(self):
        rb = filled(2, 5, [(0, [False] * 3)], Sequence(4, burn_in=2))
        with pytest.raises(ValueError, match=r"at most 5 steps.*got 6"):
            rb.sample(2)

    def test_nothing_to_draw(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Sequence(2), batch_size=2)
        with pytest.raises(NoSampleable, match="Cannot sample from an empty storage"):
            rb.sample()
        with pytest.raises(RuntimeError, match="with rows, got an empty one"):
            Sequence(2).expand(torch.tensor([0]), {}, rb.storage)

    def test_rows_that_hold_nothing(self):
        rb = filled(1, 10, [(0, [False] * 4)], Sequence(2))
        for row in (7, 12, -1):
            with pytest.raises(RowError):
                Sequence(2).expand(torch.tensor([row]), {}, rb.storage)

    @pytest.mark.parametrize(
        ("answer", "error", "said"),
        [
            (lambda index, info: (index + 10, info), RowError, r"Own.expand: expected rows in \[0, 10\), got 1"),
            (lambda index, info: (index - 9, info), RowError, r"Own.expand: expected rows in \[0, 10\), got -"),
            (lambda index, info: (index * 0 + 7, info), RowError, "Own.expand: expected live rows, got row 7"),
            (lambda index, info: index, TypeError, r"Own.expand: expected \(index, info\), .* got Tensor"),
            (lambda index, info: (index, None), TypeError, r"expected .* got \['Tensor', 'NoneType'\]"),
        ],
    )
    def test_what_a_unit_of_ones_own_must_not_return(self, answer, error, said):
        class Own(SampleUnit):
            def expand(self, index, info, storage):
                return answer(index, info)

        rb = filled(1, 10, [(0, [False] * 4)], Own())
        with pytest.raises(error, match=said):
            rb.sample(2)

    def test_samplers_that_draw_more_than_rows(self):
        storage = LazyTensorStorage(10)
        with pytest.raises(TypeError, match="SliceSampler"):
            ReplayBuffer(storage=storage, sampler=SliceSampler(num_slices=2), sample_unit=Sequence(2))
        with pytest.raises(TypeError, match="NStep"):
            ReplayBuffer(storage=storage, sampler=NStep(RandomSampler(), 2, 0.9), sample_unit=Sequence(2))
        rb = ReplayBuffer(storage=storage, sample_unit=Sequence(2))
        before = rb.sampler
        with pytest.raises(TypeError, match="SliceSampler"):
            rb.set_sampler(SliceSampler(num_slices=2))
        assert rb.sampler is before
        rb.set_sampler(PrioritizedSampler(alpha=0.6, beta=0.4))


def test_memory_mapped(tmp_path):
    unit = Sequence(3, "stop", burn_in=1)
    writes = [(0, [False, False, True, False, False]), (0, [False, True, False])]
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(6, scratch_dir=tmp_path / "s"), sample_unit=unit, batch_size=40
    )
    for at, (_, flags) in enumerate(writes):
        rb.extend(rows_of(100 * at, flags))
    _, info = rb.sample(return_info=True)
    check(rb, unit, info["index"], info, steps_of(None, 1, 6, writes))
    rb.close()


@pytest.mark.parametrize("shape", [(5,), (2,), (11,), (4, 2)])
def test_another_number_of_priorities_is_named_by_the_call(shape):
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(8), sample_unit=Sequence(3), batch_size=4
    )
    rb.extend(rows_of(0, [False] * 8))
    _, info = rb.sample(return_info=True)
    for good in ((4,), (12,), (4, 3), (12, 2)):
        rb.update_priority(info, torch.ones(good))
    with pytest.raises(
        RuntimeError, match="^update_priority: expected one priority per record, 12, or per window, 4, got"
    ):
        rb.update_priority(info, torch.ones(shape))
