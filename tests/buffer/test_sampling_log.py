"""A sampling log gives the batches that were drawn again, bit for bit, or says why not."""

import copy
import os
import pickle
import threading
import warnings

import pytest
import torch

from engram import (
    Checkpointer,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    RandomSampler,
    ReplayBuffer,
    SamplingLog,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    replay_draws,
)
from engram.format import disk
from engram.format.draws import FORM, Batch, Form, Records
from engram.format.files import Descriptor
from engram.format.strict import decode
from tests.buffer.logged import CAPACITY, SAMPLERS, Newest, following, made, play, same, steps

PLAIN = [name for name, (_, around) in SAMPLERS.items() if not around]
TIMES = 14


@pytest.fixture
def path(tmp_path):
    return tmp_path / "draws.log"


def check_replayed(path, rb, drawn):
    """All batches come again as they were."""
    replay = replay_draws(path, rb)
    for number, (batch, info) in enumerate(drawn):
        again = next(replay)
        assert (again.number, again.state, again.rows_gone) == (number, "same", 0)
        assert same(again.batch, batch), number
        assert same(again.info, info), number
    assert next(replay, None) is None
    assert (replay.same, replay.gone, replay.different, replay.torn_bytes) == (len(drawn), 0, 0, 0)


# ---- every sampler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_batches_and_the_log_changes_none(path, sampler):
    plain = play(made(sampler), TIMES)
    rb = made(sampler)
    with SamplingLog(path, rb) as log:
        drawn = play(rb, TIMES)
    assert same(drawn, plain), "the log changes nothing"
    assert log.batches == TIMES
    check_replayed(path, rb, drawn)
    check_replayed(path, rb, drawn)
    state = rb.sampler.state_dict()
    list(replay_draws(path, rb))
    assert same(rb.sampler.state_dict(), state)


@pytest.mark.parametrize(
    "sampler", ["uniform", "prioritized", "slices", "windows", "frames", "n-step slices", "epoch", "own"]
)
def test_of_plain_buffers_without_tickets(path, sampler):
    def rows(first, n):
        return steps(first, n).to_dict()

    plain = play(made(sampler, kind=ReplayBuffer), TIMES, data=rows)
    rb = made(sampler, kind=ReplayBuffer)
    with SamplingLog(path, rb):
        drawn = play(rb, TIMES, data=rows)
    assert same(drawn, plain)
    check_replayed(path, rb, drawn)


@pytest.mark.parametrize("sampler", ["uniform", "slices", "own", "n-step", "epoch"])
def test_of_a_writer_that_tracks_tickets(path, sampler):
    writer = TensorDictRoundRobinWriter(track_generations=True)
    plain = play(made(sampler, writer=copy.deepcopy(writer)), TIMES)
    rb = made(sampler, writer=writer)
    with SamplingLog(path, rb):
        drawn = play(rb, TIMES)
    assert same(drawn, plain)
    assert "index_generation" in drawn[0][1]
    check_replayed(path, rb, drawn)


def test_next_observations_of_following_rows(path):
    rb = following()
    with SamplingLog(path, rb):
        drawn = play(rb, TIMES)
    check_replayed(path, rb, drawn)


@pytest.mark.parametrize("sampler", PLAIN)
def test_overwritten_rows_are_counted(path, sampler):
    rb = made(sampler)
    with SamplingLog(path, rb):
        drawn = play(rb, TIMES)
        rb.extend(steps(2_000, CAPACITY - 30))
        drawn.append(rb.sample(return_info=True))
    live = set(rb[:]["at"].tolist())
    replay = replay_draws(path, rb)
    for again, (batch, _) in zip(replay, drawn, strict=True):
        lost = sum(at not in live for at in batch["at"].flatten().tolist())
        assert (again.state, again.rows_gone) == ("gone" if lost else "same", lost)
        assert (again.batch is None) == bool(lost)
        if not lost:
            assert same(again.batch, batch)
    assert replay.gone
    assert replay.rows == sum(batch["at"].numel() for batch, _ in drawn)
    assert replay.rows_gone == sum(at not in live for batch, _ in drawn for at in batch["at"].flatten().tolist())


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in PLAIN])
def test_never_another_batch_where_rows_around_are_overwritten(path, sampler):
    rb = made(sampler)
    with SamplingLog(path, rb):
        drawn = play(rb, TIMES)
    for first in range(0, CAPACITY, 8):
        rb.extend(steps(3_000 + first, 8))
        live, states = set(rb[:]["at"].tolist()), set()
        for again, (batch, info) in zip(replay_draws(path, rb), drawn, strict=True):
            states.add(again.state)
            if again.state == "same":
                assert same((again.batch, again.info), (batch, info))
            elif again.state == "gone":
                assert not live.issuperset(batch["at"].flatten().tolist())
    assert "same" not in states


def test_changed_rows_are_found(path):
    rb = made("uniform")
    rb.extend(steps(0, 40))
    with SamplingLog(path, rb):
        drawn = [rb.sample(return_info=True) for _ in range(20)]
    rb[:]["obs"][7] += 1  # a live view, which leaves no trace
    rb.set_at_("obs", torch.zeros(1, 3), [11])
    for again, (batch, _) in zip(replay_draws(path, rb), drawn, strict=True):
        at = batch["at"].tolist()
        state = "different" if {7, 11} & {*at} else "same"
        assert (again.state, again.rows_gone) == (state, 0)
        assert (again.batch is None) == (state != "same")


# ---- every storage -------------------------------------------------------------------------------------------------------


def test_lanes_and_columns(path, tmp_path):
    for number, storage in enumerate((LazyTensorStorage(CAPACITY, lanes=3), LazyTensorStorage(CAPACITY, ndim=2))):
        for sampler in ("uniform", "slices", "n-step", "frames"):
            log, rb = tmp_path / f"{number}-{sampler}", made(sampler, storage=copy.deepcopy(storage))

            def data(first, n, ndim=rb.storage.ndim):
                if ndim > 1:
                    return torch.stack([steps(first, n), steps(first, n, lane=1)])
                return torch.cat([steps(first, n, lane=lane) for lane in range(3)])

            with SamplingLog(log, rb):
                drawn = []
                for turn in range(5):
                    if rb.storage.ndim > 1:
                        rb.extend(data(turn * 5, 5))
                    else:
                        rb.extend(data(turn * 5, 5), lane=torch.arange(3).repeat_interleave(5))
                    drawn.append(rb.sample(return_info=True))
            check_replayed(log, rb, drawn)


def test_shared_memory_and_a_copy_elsewhere(path, tmp_path):
    rb = made("prioritized").share()
    with SamplingLog(path, rb):
        drawn = play(rb, TIMES)
        other = pickle.loads(pickle.dumps(rb))
        unlogged = other.sample()
        with SamplingLog(tmp_path / "other.log", other):
            drawn_there = play(other, 3, first=500)
    assert len(unlogged) == 8
    check_replayed(path, rb, drawn)
    check_replayed(tmp_path / "other.log", rb, drawn_there)
    check_replayed(path, other, drawn)


@pytest.mark.parametrize("sampler", ["prioritized", "slices", "n-step"])
def test_a_directory_that_is_opened_again(path, tmp_path, sampler):
    rb = made(sampler, storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "store"))
    with SamplingLog(path, rb):
        drawn = play(rb, 8)
    rb.close()
    with TensorDictReplayBuffer.open(tmp_path / "store", batch_size=8) as again:
        check_replayed(path, again, drawn)
        with SamplingLog(path, again):
            drawn += play(again, 4, first=700)
        check_replayed(path, again, drawn)
    with ReplayBuffer.open(tmp_path / "store", readonly=True) as reader:
        check_replayed(path, reader, drawn)


# ---- how batches are handed out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "epoch", "slices"])
def test_prefetched_batches(path, sampler):
    plain = play(made(sampler, prefetch=3), TIMES)
    rb = made(sampler, prefetch=3)
    with SamplingLog(path, rb) as log:
        drawn = play(rb, TIMES)
        rb.synchronize()
    assert same(drawn, plain)
    assert log.batches >= TIMES
    replayed = list(replay_draws(path, rb))
    assert all(again.state == "same" for again in replayed)
    at = 0
    for batch, _ in drawn:  # in order, with batches between that nobody took
        while not same(replayed[at].batch, batch):
            at += 1
        at += 1


def test_a_batch_that_was_dropped_comes_again_under_its_key(path):
    rb = made("prioritized", prefetch=2)
    with SamplingLog(path, rb):
        rb.extend(steps(0, 40))
        drawn = [rb.sample()]
        rb.append_transform(lambda td: td)  # drops what is ahead
        drawn += [rb.sample() for _ in range(3)]
        rb.synchronize()
    by_key = {again.key: again.batch for again in replay_draws(path, rb)}  # the last one of each
    for taken, batch in zip(by_key.values(), drawn, strict=False):
        assert same(taken, batch)


def test_transforms_collate_functions_and_output(path):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        batch_size=8,
        transform=lambda td: td.set("twice", td["obs"] * 2),
        collate_fn=lambda td: td.set("more", td["at"] + 1),
    )
    with SamplingLog(path, rb):
        drawn = play(rb, 5)
    assert torch.equal(drawn[0][0]["twice"], drawn[0][0]["obs"] * 2)
    check_replayed(path, rb, drawn)


def test_arrays_and_other_batch_sizes(path):
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=8, output="numpy")
    rb.extend(steps(0, 50).to_dict())
    with SamplingLog(path, rb), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = [rb.sample(n, return_info=True) for n in (1, 8, 100, 3)]
    check_replayed(path, rb, drawn)
    assert [again.batch_size for again in replay_draws(path, rb)] == [1, 8, 100, 3]
    assert [again.number for again in replay_draws(path, rb, start=2)] == [2, 3]


def test_rows_of_every_dtype(path):
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=5)
    rb.extend({str(dtype): torch.arange(20).to(dtype) for dtype in dtypes} | {"none": torch.empty(20, 0)})
    with SamplingLog(path, rb):
        drawn = [rb.sample(return_info=True) for _ in range(3)]
    check_replayed(path, rb, drawn)


def test_threads(path):
    rb = made("prioritized")
    rb.extend(steps(0, 60))
    drawn = [[] for _ in range(3)]

    def draw(mine):
        for _ in range(40):
            mine.append(rb.sample())

    with SamplingLog(path, rb) as log:
        threads = [threading.Thread(target=draw, args=(mine,)) for mine in drawn]
        for thread in threads:
            thread.start()
        for first in range(20):
            rb.extend(steps(5_000 + first * 4, 4))
        for thread in threads:
            thread.join(100)
    assert log.batches == 120
    handed_out = [batch for mine in drawn for batch in mine]
    live = set(rb[:]["at"].tolist())
    replay = replay_draws(path, rb)
    for again in replay:
        if again.state == "same":
            assert any(same(again.batch, batch) for batch in handed_out)
    assert replay.different == 0
    assert replay.same == sum(live.issuperset(batch["at"].tolist()) for batch in handed_out)


# ---- checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "slices", "windows", "n-step", "frames and n-step"])
def test_after_a_restore_and_in_the_run_that_goes_on(path, tmp_path, sampler):
    rb = made(sampler)
    with SamplingLog(path, rb):
        drawn = play(rb, 9)
    Checkpointer(tmp_path / "ckpt", rb).save(1)
    rb.close()

    again = made(sampler, seed=5)
    again.extend(steps(9_000, 50))  # so that tickets are others here
    Checkpointer(tmp_path / "ckpt", again).restore(resume="exact")
    replayed = list(replay_draws(path, again))
    for drawn_again, (batch, info) in zip(replayed, drawn, strict=True):
        assert drawn_again.state == "same"
        assert ("index_generation" in info) == ("prioritized" in sampler or "and n-step" in sampler)
        if "index_generation" in info:
            shifted = [drawn_again.batch.pop("index_generation"), drawn_again.info.pop("index_generation")]
            was = [batch.pop("index_generation"), info.pop("index_generation")]
            assert all(len((one - other).unique()) == 1 for one, other in zip(shifted, was, strict=True))
        assert same((drawn_again.batch, drawn_again.info), (batch, info))
    with SamplingLog(path, again):
        more = play(again, 5, first=300)
    replay = replay_draws(path, again, start=9)
    for later, (batch, _) in zip(replay, more, strict=True):
        assert same(later.batch, batch)
    assert replay.same == 5
    assert sum(it.state == "same" for it in replay_draws(path, again)) == 14


def test_batches_drawn_after_a_checkpoint_are_gone_where_their_rows_are(path, tmp_path):
    rb = made("uniform")
    rb.extend(steps(0, 40))
    Checkpointer(tmp_path / "ckpt", rb).save(1)
    rb.extend(steps(40, 40))
    with SamplingLog(path, rb):
        drawn = [rb.sample() for _ in range(30)]
    again = made("uniform")
    Checkpointer(tmp_path / "ckpt", again).restore(resume="exact")
    for replayed, batch in zip(replay_draws(path, again), drawn, strict=True):
        lost = int((batch["at"] >= 40).sum())
        assert (replayed.state, replayed.rows_gone) == ("gone" if lost else "same", lost)


def test_a_directory_into_which_a_checkpoint_was_restored_and_that_was_opened_again(path, tmp_path):
    rb = made("uniform")
    rb.extend(steps(0, 60))
    Checkpointer(tmp_path / "ckpt", rb).save(1)
    stored = made("uniform", storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "store"))
    stored.extend(steps(5_000, 100))
    Checkpointer(tmp_path / "ckpt", stored).restore(resume="exact")
    with SamplingLog(path, stored):
        drawn = [stored.sample(return_info=True) for _ in range(9)]
    stored.close()
    with ReplayBuffer.open(tmp_path / "store") as again:  # which does not know of the load any more
        check_replayed(path, again, drawn)


def test_rows_that_were_redistributed_are_never_taken_for_those_of_the_log(path, tmp_path):
    rb = made("uniform", storage=LazyTensorStorage(CAPACITY, lanes=2))
    with SamplingLog(path, rb):
        for lane in (0, 1):
            rb.extend(steps(0, 45, lane=lane), lane=lane)
        drawn = [rb.sample() for _ in range(20)]
    Checkpointer(tmp_path / "ckpt", rb).save(1)
    other = made("uniform", storage=LazyTensorStorage(CAPACITY, lanes=2))
    keep = {"open": "keep", "headless": "keep"}
    Checkpointer(tmp_path / "ckpt", other).restore(incomplete=keep)  # moves rows
    for again, batch in zip(replay_draws(path, other), drawn, strict=True):
        assert again.state != "same" or same(again.batch, batch)
    smaller = made("uniform", storage=LazyTensorStorage(CAPACITY, lanes=4))
    Checkpointer(tmp_path / "ckpt", smaller).restore(incomplete=keep)
    with pytest.raises(IncompatibleCheckpoint, match=r"rows and lanes \[120, 2\] of the log, got \[120, 4\]"):
        list(replay_draws(path, smaller))


# ---- bad input -----------------------------------------------------------------------------------------------------------


def test_another_buffer_is_refused_by_name(path):
    rb = made("n-step")
    with SamplingLog(path, rb):
        play(rb, 2)
    plain, frames, fields = made("uniform"), made("frames"), made("n-step")
    play(plain, 1)
    play(frames, 1)
    fields.extend(steps(0, 20).set("more", torch.zeros(20)))
    for other, what in ((plain, "expanders"), (frames, "expanders"), (fields, "fields")):
        with pytest.raises(IncompatibleCheckpoint, match=f"expected a buffer with the {what}"):
            list(replay_draws(path, other))
    longer = made("uniform")
    longer.set_sampler(NStep(RandomSampler(), n=5, gamma=0.9))
    play(longer, 2)
    assert {again.state for again in replay_draws(path, longer)} == {"different"}
    assert [again.state for again in replay_draws(path, made("n-step"))] == ["gone", "gone"]


def test_buffers_that_cannot_be_logged(path, tmp_path):
    items = ReplayBuffer(storage=ListStorage(10), batch_size=2)
    for refused in (lambda: SamplingLog(path, items), lambda: replay_draws(path, items)):
        with pytest.raises(TypeError, match="storage of tensors in this process, got a"):
            refused()
    rb = made("uniform")
    rb.extend(steps(0, 10))
    Checkpointer(tmp_path / "ckpt", rb).save(1)
    with ReplayBuffer.follow(tmp_path / "ckpt") as reader, pytest.raises(RuntimeError, match="SamplingLog"):
        SamplingLog(path, reader)
    with SamplingLog(tmp_path / "free", rb):
        pass


def test_components_that_are_made_at_the_first_use(path):
    rb = ReplayBuffer(storage=lambda: LazyTensorStorage(10), batch_size=2, delayed_init=True)
    with SamplingLog(path, rb):
        rb.extend(torch.arange(10))
        drawn = [rb.sample(return_info=True) for _ in range(3)]
    check_replayed(path, rb, drawn)


def test_one_log_for_a_buffer_and_one_writer_for_a_file(path, tmp_path):
    rb, other = made("uniform"), made("uniform")
    with SamplingLog(path, rb):
        with pytest.raises(RuntimeError, match="expected a TensorDictReplayBuffer without a log"):
            SamplingLog(tmp_path / "second", rb)
        with pytest.raises(RuntimeError, match="another process or SamplingLog writes to it"):
            SamplingLog(path, other)
        other.extend(steps(0, 10))
        other.sample()
    with SamplingLog(path, other) as log:
        other.sample()
        assert log.batches == 1
        assert repr(log) == f"SamplingLog('{path}', batches=1)"
    assert repr(log) == f"SamplingLog('{path}', batches=1, closed)"
    log.close()
    other.sample()
    assert len(list(replay_draws(path, other))) == 1


@pytest.mark.parametrize("content", [b"x", b"engram.drawn", b"engram.draws\x02\x00\x00\x00", b"\x00" * 4096])
def test_a_file_that_is_no_log(path, content):
    path.write_bytes(content)
    rb = made("uniform")
    for opened in (lambda: SamplingLog(path, rb), lambda: list(replay_draws(path, rb))):
        with pytest.raises(CorruptCheckpoint, match="expected a sampling log of version 1.0"):
            opened()
    assert path.read_bytes() == content
    rb.extend(steps(0, 10))
    rb.sample()


def test_paths(path, tmp_path):
    rb = made("uniform")
    with pytest.raises(FileNotFoundError):
        next(replay_draws(path, rb))
    with pytest.raises(OSError, match="directory"):
        SamplingLog(tmp_path, rb)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        SamplingLog(tmp_path / "link", rb)
    with pytest.raises(ValueError, match="start: expected at least 0"):
        replay_draws(path, rb, start=-1)


def test_a_full_disk_loses_one_batch_and_not_the_log(path, monkeypatch):
    rb = made("uniform")
    rb.extend(steps(0, 40))
    with SamplingLog(path, rb):
        drawn = [rb.sample(return_info=True)]

        def half(fd, data, offset):
            os.pwrite(fd, bytes(data)[: len(data) // 2], offset)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(disk, "write", half)
            with pytest.raises(OSError, match="No space"):
                rb.sample()
        drawn.append(rb.sample(return_info=True))
    check_replayed(path, rb, drawn)


def test_a_sampler_whose_info_is_no_array(path):
    class Speaks(Newest):
        def draw(self, extent, batch_size, key):
            return super().draw(extent, batch_size, key)._replace(info={"why": "because"})

    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=Speaks(), batch_size=4)
    rb.extend(steps(0, 10))
    with (
        SamplingLog(path, rb),
        pytest.raises(TypeError, match=r"info\['why'\]: expected a tensor or an array, got str"),
    ):
        rb.sample(return_info=True)


def test_a_forked_child_does_not_write_to_its_parents_log(path, tmp_path):
    rb = made("uniform").share()
    rb.extend(steps(0, 40))
    with SamplingLog(path, rb) as log:
        rb.sample()
        child = os.fork()
        if not child:
            code = 1
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    rb.sample()
                    rb.sample()
                assert ["is the parent's" in str(one.message) for one in caught] == [True]
                with SamplingLog(tmp_path / "child.log", rb):
                    rb.sample()
                log.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        rb.sample()
    assert [again.state for again in replay_draws(path, rb)] == ["same"] * 2
    assert [again.state for again in replay_draws(tmp_path / "child.log", rb)] == ["same"]


def test_the_file_is_free_when_it_is_closed_though_a_forked_child_goes_on(path):
    rb = made("uniform")
    rb.extend(steps(0, 40))
    ends, end = os.pipe()
    with SamplingLog(path, rb):
        rb.sample()
        child = os.fork()
        if not child:
            os.close(end)
            os.read(ends, 1)  # until the parent has ended it
            os._exit(0)
    try:
        with SamplingLog(path, rb):
            rb.sample()
    finally:
        os.close(end)
        os.waitpid(child, 0)
        os.close(ends)
    assert [again.state for again in replay_draws(path, rb)] == ["same"] * 2


def test_samplers_that_are_taken_by_turns(path):
    """Python gives the address of one that is gone to another."""
    rb = made("uniform")
    rb.extend(steps(0, 60))
    names = ["uniform", "n-step", "epoch", "frames"]
    turns = [names[k] for k in torch.randint(4, (100,), generator=torch.Generator().manual_seed(1))]
    with SamplingLog(path, rb):
        for name in turns:
            rb.set_sampler(SAMPLERS[name][0]())
            rb.sample()
    forms = {}
    with Descriptor.open(path, os.O_RDONLY) as fd:
        found = []
        for record in Records(path, fd):
            if record.kind == FORM:
                forms[record.begin] = decode(bytes(record.raw), path, Form)
            else:
                found.append(forms[Batch.unpacked(record.raw, "test")[0].form])
    inner, around = {"epoch": "SamplerWithoutReplacement"}, {"n-step": ("NStep",), "frames": ("FrameStack",)}
    assert [form.sampler for form in found] == [inner.get(name, "RandomSampler") for name in turns]
    assert [form.around for form in found] == [around.get(name, ()) for name in turns]
