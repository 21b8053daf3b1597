"""Windows around rows beside writers, in other processes, in stores that are opened again, ahead of the caller, and in checkpoints."""

import copy
import pickle
import threading
import warnings
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SampleUnit,
    Sequence,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    Transition,
)
from tests import fresh
from tests.around.model import UNIT, check, episodes
from tests.serving.servers import serving


class Pairs(SampleUnit):
    """A row and the one after it."""

    def expand(self, index, info, storage):
        following = (index + 1) % len(storage)
        info = {name: value.repeat_interleave(2, 0) for name, value in info.items()}
        return torch.stack([index, following], -1).flatten(), info | {"second": torch.tensor([0, 1]).repeat(len(index))}


def buffer(kind=TensorDictReplayBuffer, storage=None, batch_size=8, rows=60, **kwargs):
    storage = LazyTensorStorage(rows) if storage is None else storage
    return kind(storage=storage, sample_unit=UNIT, batch_size=batch_size, **kwargs)


class TestBesideWriters:
    @pytest.mark.parametrize("kind", ["uniform", "prioritized", "epoch"])
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_no_window_is_torn(self, kind, prefetch):
        sampler = {
            "uniform": RandomSampler,
            "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
            "epoch": SamplerWithoutReplacement,
        }[kind]()
        rb = buffer(storage=LazyTensorStorage(140, lanes=2), sampler=sampler, prefetch=prefetch)
        for lane in range(2):
            rb.extend(episodes(0, 10, 7, lane), lane=lane)
        stop = threading.Event()

        def write(lane):
            first = 10
            while not stop.is_set():
                rb.extend(episodes(first, 2, 7, lane), lane=lane)
                first += 2

        threads = [threading.Thread(target=write, args=(lane,)) for lane in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(300):
                batch = rb.sample()
                check(batch)
                if kind == "prioritized":
                    batch["td_error"] = torch.rand(len(batch))
                    rb.update_tensordict_priority(batch)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        rb.close()

    def test_rows_of_a_unit_of_ones_own_are_those_of_one_moment(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(8), sample_unit=Pairs(), batch_size=4)
        rb.extend({"lap": torch.zeros(8, dtype=torch.int64), "wide": torch.zeros(8, 20_000)})
        stop = threading.Event()

        def write():
            lap = 0
            # Each write replaces all rows: without a pause there may be no moment for a read.
            while not stop.wait(0.0005):
                lap += 1
                rb.extend({"lap": torch.full((8,), lap), "wide": torch.full((8, 20_000), float(lap))})

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(300):
                batch, info = rb.sample(return_info=True)
                assert bool((batch["wide"] == batch["lap"].unsqueeze(1)).all())
                pairs = info["index"].reshape(-1, 2)
                assert bool(((pairs[:, 1] - pairs[:, 0]) % 8 == 1).all())
        finally:
            stop.set()
            thread.join()


class TestProcesses:
    def test_draw_what_others_write(self, tmp_path):
        rb = buffer(storage=LazyMemmapStorage(70, scratch_dir=tmp_path / "s"))
        rb.extend(episodes(0, 2, 7))
        program = fresh.start(
            """
            import sys

            sys.path.insert(0, root)
            from engram import TensorDictReplayBuffer
            from tests.around.model import check, episodes

            rb = TensorDictReplayBuffer.open(folder)
            assert rb.batch_size == 8
            print("ready", flush=True)
            for first in range(2, 200, 2):
                rb.extend(episodes(first, 2, 7))
                check(rb.sample())
            print("over", flush=True)
            rb.close()
            """,
            folder=str(tmp_path / "s"),
            root=str(Path(__file__).parents[2]),
        )
        program.until("ready")
        while program.poll() is None:
            check(rb.sample())
        assert program.wait() == 0, program.err
        check(rb.sample())
        assert int(rb["episode"].max()) == 199
        rb.close()

    def test_copies_draw_alike(self):
        rb = buffer(generator=torch.Generator().manual_seed(1))
        rb.extend(episodes(0, 8, 7))
        other = pickle.loads(pickle.dumps(copy.copy(rb)))
        for batch in (rb.sample(), other.sample()):
            check(batch)
        rb.share()
        check(rb.sample())
        rb.close()


class TestOpenedAgain:
    def test_the_unit_is_noted(self, tmp_path):
        unit = Sequence(3, "stop", ("next", "done"), 1, 2, 2, priority_eta=0.9, init_key=None)
        rb = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(70, scratch_dir=tmp_path / "s"), sample_unit=unit, batch_size=8
        )
        rb.extend(episodes(0, 8, 7))
        rb.close()
        again = ReplayBuffer.open(tmp_path / "s")
        assert again.sample().keys() >= {"validity_mask"}
        assert len(again.sample()) == 8 * 6
        assert repr(again._wiring.unit) == repr(unit)
        again.close()
        again = ReplayBuffer.open(tmp_path / "s", sample_unit=Transition())
        assert len(again.sample()) == 8
        again.close()
        again = ReplayBuffer.open(tmp_path / "s", readonly=True)
        assert len(again.sample()) == 8 * 6
        again.close()

    def test_one_of_ones_own_must_be_given(self, tmp_path):
        rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "s"), sample_unit=Pairs(), batch_size=2)
        rb.extend({"step": torch.arange(10)})
        rb.close()
        with pytest.raises(TypeError, match=r"custom sample_unit 'Pairs': pass sample_unit="):
            ReplayBuffer.open(tmp_path / "s")
        again = ReplayBuffer.open(tmp_path / "s", sample_unit=Pairs())
        assert len(again.sample()["step"]) == 4
        again.close()


class TestServed:
    def test_batches_and_priorities(self, tmp_path):
        unit = Sequence(4, burn_in=2, bootstrap=1, priority_eta=0.5)
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0,
            beta=1.0,
            eps=0.0,
            storage=LazyMemmapStorage(60, scratch_dir=tmp_path / "s"),
            sample_unit=unit,
            batch_size=8,
        )
        rb.extend(episodes(0, 8, 7))
        with serving(tmp_path / "s") as server:
            with ReplayBuffer.connect(server.address) as remote:
                batch = remote.sample()
                check(batch)
                assert batch.keys() >= {"anchor_index", "anchor_generation", "priority_weight"}
                batch["td_error"] = torch.rand(len(batch)) + 0.5
                remote.update_tensordict_priority(batch)
                expected = unit.anchor_priorities(batch["td_error"], batch)
                remote.sample()  # what was sent before has been done
                with pytest.raises(NotImplementedError, match="on a server"):
                    remote.submit_update_if_present(index=[0], generation=[1], patch={"step": torch.zeros(1)})
            leaves = torch.tensor(rb.state_dict()["_sampler"]["leaves"].tolist())
            assert leaves[expected.anchors].tolist() == pytest.approx(expected.priority.tolist())
            assert set(leaves.tolist()) == {1.0, 0.0} | set(leaves[expected.anchors].tolist())
        rb.close()


class TestAhead:
    def test_batches_are_those_without_prefetching(self):
        def drawn(prefetch):
            rb = buffer(prefetch=prefetch, generator=torch.Generator().manual_seed(7))
            rb.extend(episodes(0, 8, 7))
            found = [rb.sample() for _ in range(5)]
            rb.close()
            return found

        for one, other in zip(drawn(0), drawn(3), strict=True):
            assert bool((one == other).all())

    def test_a_state_goes_on(self):
        rb = buffer(
            TensorDictPrioritizedReplayBuffer,
            alpha=0.6,
            beta=0.5,
            prefetch=2,
            generator=torch.Generator().manual_seed(7),
        )
        rb.extend(episodes(0, 8, 7))
        rb.sample()
        state = rb.state_dict()
        other = buffer(TensorDictPrioritizedReplayBuffer, alpha=0.6, beta=0.5, prefetch=2, generator=torch.Generator())
        other.extend(episodes(3, 2, 7))
        other.load_state_dict(state)
        for _ in range(4):
            ours, theirs = rb.sample(), other.sample()
            assert bool((ours == theirs).all())
            for rows, numbers in (("anchor_index", "anchor_generation"), ("index", "index_generation")):
                tickets = other.storage.tickets_of(theirs[rows])
                assert torch.equal(theirs[numbers], other.storage.writes_of(theirs[rows], tickets))
        rb.close()
        other.close()


class TestCheckpoints:
    def test_of_one_process(self, tmp_path):
        rb = buffer(generator=torch.Generator().manual_seed(3))
        rb.extend(episodes(0, 12, 7))
        Checkpointer(tmp_path, rb).save(step=1)
        other = buffer(generator=torch.Generator())
        Checkpointer(tmp_path, other).restore()
        for _ in range(3):
            assert bool((rb.sample() == other.sample()).all())

    @pytest.mark.parametrize(("rows", "lanes"), [(40, 1), (200, 4)])
    def test_of_other_sizes(self, tmp_path, rows, lanes):
        rb = buffer(storage=LazyTensorStorage(140, lanes=2))
        for lane in range(2):
            rb.extend(episodes(0, 13, 7, lane), lane=lane)
        rb.dumps(tmp_path / "x")
        other = buffer(storage=LazyTensorStorage(rows, lanes=lanes), batch_size=64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other.loads(tmp_path / "x", convert=True)
        check(other.sample())
        other.extend(episodes(500, 1, 7), lane=0)
        check(other.sample())


def test_batches_as_arrays():
    rb = ReplayBuffer(storage=LazyTensorStorage(60), sample_unit=UNIT, batch_size=8, output="numpy")
    rb.extend(episodes(0, 8, 7).to_dict())
    batch, info = rb.sample(return_info=True)
    assert batch["step"].shape == info["validity_mask"].shape == (8 * 7,)


class TestPriorities:
    def made(self, unit, **kwargs):
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(12, **kwargs), sample_unit=unit, batch_size=6
        )
        rb.extend(episodes(0, 2, 6))
        return rb

    @staticmethod
    def leaves(rb):
        return rb.state_dict()["_sampler"]["leaves"].tolist()

    @pytest.mark.parametrize("eta", [None, 0.0, 0.9, 1.0])
    @pytest.mark.parametrize("flat", [True, False])
    def test_go_to_anchors(self, eta, flat):
        unit = Sequence(3, burn_in=1, priority_eta=eta)
        rb = self.made(unit)
        batch = rb.sample()
        errors = torch.rand(24, generator=torch.Generator().manual_seed(2)) + 0.1
        expected = dict(enumerate([1.0] * 12))
        of_anchor = {}
        for k in range(24):
            counts = bool(batch["validity_mask"][k]) and (eta is None or bool(batch["learning_mask"][k]))
            if counts:
                of_anchor.setdefault(int(batch["anchor_index"][k]), []).append(float(errors[k]))
        for row, found in of_anchor.items():
            weight = 1.0 if eta is None else eta
            expected[row] = weight * max(found) + (1 - weight) * sum(found) / len(found)
        batch["td_error"] = errors
        if not flat:
            batch = batch.reshape(6, 4)
        rb.update_tensordict_priority(batch)
        assert self.leaves(rb) == pytest.approx(list(expected.values()), rel=1e-5)

    def test_are_those_of_torchrl(self):
        from torchrl.data import LazyTensorStorage as Theirs
        from torchrl.data import Sequence as TheirSequence
        from torchrl.data import TensorDictReplayBuffer as TheirBuffer

        other = TheirBuffer(storage=Theirs(12), sample_unit=TheirSequence(3, burn_in=1), batch_size=6)
        other.extend(episodes(0, 2, 6))
        batch = other.sample()
        errors = torch.rand(24)
        anchors, priority = other._anchor_reduced_priority(batch, errors)
        ours = Sequence(3, burn_in=1).anchor_priorities(errors, batch)
        assert ours.anchors.tolist() == anchors.tolist()
        assert ours.priority.tolist() == priority.tolist()
        assert ours.generation is None

    def test_of_anchors_that_were_overwritten_are_dropped(self):
        rb = self.made(Sequence(3))
        batch = rb.sample()
        rb.extend(episodes(9, 1, 6))  # rows 0 ... 5
        batch["td_error"] = torch.full((len(batch),), 5.0)
        rb.update_tensordict_priority(batch)
        leaves = self.leaves(rb)
        assert set(leaves[:6]) == {1.0}
        drawn = set(batch["anchor_index"].tolist())
        assert [leaf == 5.0 for leaf in leaves[6:]] == [row in drawn for row in range(6, 12)]

    def test_of_columns(self):
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(12, ndim=2), sample_unit=Sequence(2), batch_size=4
        )
        data = torch.stack([episodes(0, 1, 6), episodes(5, 1, 6)])
        rb.extend(data)
        batch = rb.sample()
        batch["td_error"] = torch.arange(8.0) + 2
        rb.update_tensordict_priority(batch)
        expected = [1.0] * 12
        for row, k in ((int(2 * a[0] + a[1]), k) for k, a in enumerate(batch["anchor_index"])):
            if batch["validity_mask"][k]:
                expected[row] = max(expected[row], k + 2.0)
        assert self.leaves(rb) == expected

    def test_need_a_batch_of_sequences(self):
        with pytest.raises(KeyError, match="validity_mask"):
            Sequence(2).anchor_priorities(torch.rand(2), {"index": torch.arange(2)})
        rb = self.made(Sequence(3))
        _, info = rb.sample(return_info=True)
        with pytest.raises(RuntimeError, match="error per record"):
            Sequence(3).anchor_priorities(torch.rand(5), info)


class TestR2D2:
    def test_by_hand(self):
        from engram import r2d2_priority

        errors = torch.tensor([[1.0, -4.0, 2.0], [3.0, 0.0, 9.0]])
        mask = torch.tensor([[True, True, True], [True, True, False]])
        assert r2d2_priority(errors).tolist() == pytest.approx([0.9 * 4 + 0.1 * 7 / 3, 0.9 * 9 + 0.1 * 4])
        assert r2d2_priority(errors, mask, eta=0.5).tolist() == pytest.approx([2 + 7 / 6, 1.5 + 0.75])
        assert r2d2_priority(errors[:, :, None], torch.zeros_like(mask)).tolist() == [0, 0]
        assert not r2d2_priority(errors.requires_grad_()).requires_grad

    def test_bad_input(self):
        from engram import r2d2_priority

        for eta in (-0.1, 1.1, float("nan")):
            with pytest.raises(ValueError, match="eta"):
                r2d2_priority(torch.rand(2, 3), eta=eta)
        with pytest.raises(RuntimeError, match=r"\[B, T"):
            r2d2_priority(torch.rand(3))
        with pytest.raises(RuntimeError, match="mask"):
            r2d2_priority(torch.rand(2, 3), torch.ones(2, dtype=torch.bool))
        with pytest.raises(TypeError, match="floats"):
            r2d2_priority(torch.ones(2, 3, dtype=torch.int64))


class TestUnitsOfOnesOwn:
    def test_say_what_is_read(self):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Pairs(), batch_size=3)
        rb.extend(TensorDict({"step": torch.arange(10)}, [10]))
        batch, info = rb.sample(return_info=True)
        assert batch["step"].tolist() == batch["index"].tolist() == info["index"].tolist()
        assert batch["second"].tolist() == [0, 1] * 3

    def test_of_lists(self):
        rb = ReplayBuffer(10, sample_unit=Pairs(), batch_size=3)
        rb.extend(list(torch.arange(10)))
        assert rb.sample().shape == (6,)

    def test_with_priorities(self):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(10),
            sampler=PrioritizedSampler(alpha=1.0, beta=1.0),
            sample_unit=Pairs(),
            batch_size=3,
        )
        rb.extend({"step": torch.arange(10)})
        _, info = rb.sample(return_info=True)
        assert info["priority_weight"].shape == (6,)
        assert info["index_generation"].tolist() == rb.storage.tickets_of(info["index"]).tolist()

    def test_of_a_sequence_that_says_more(self):
        class Named(Sequence):
            def expand(self, index, info, storage):
                index, info = super().expand(index, info, storage)
                return index, info | {"mine": info["step_in_sequence"] * 2}

        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sample_unit=Named(3), batch_size=4)
        rb.extend(episodes(0, 2, 7))
        assert rb.sample()["mine"].tolist() == [0, 2, 4] * 4

    def test_that_are_wrong(self):
        class Wrong(SampleUnit):
            def __init__(self, made):
                self.made = made

            def expand(self, index, info, storage):
                return self.made

        for made, error, message in (
            (3, TypeError, r"expected \(index, info\), an index and a dict, got int"),
            ((torch.rand(3), {}), TypeError, "ints"),
            ((torch.tensor([7]), {}), Exception, "row 7"),
            ((torch.tensor([11]), {}), Exception, "11"),
        ):
            rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Wrong(made), batch_size=2)
            rb.extend({"step": torch.arange(5)})
            with pytest.raises(error, match=message):
                rb.sample()
        with pytest.raises(NotImplementedError, match="expand"):
            SampleUnit().expand(torch.arange(2), {}, None)

    def test_that_change_nothing(self):
        def drawn(**kwargs):
            rb = ReplayBuffer(
                storage=LazyTensorStorage(10), batch_size=4, generator=torch.Generator().manual_seed(0), **kwargs
            )
            rb.extend({"step": torch.arange(10)})
            return rb.sample()["step"].tolist()

        assert drawn() == drawn(sample_unit=Transition()) == drawn(sample_unit=None)
