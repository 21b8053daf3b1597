"""Several processes that write to one lane, told apart by nothing: the first draws of windows warn, once."""

import multiprocessing
import os
import signal
import warnings

import pytest
import torch

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RewardToGo,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from tests.waiting import ended as process_ended

FORK = multiprocessing.get_context("fork")
SAYS = "several processes write to one lane"


def steps(worker, first, n, length, ids="piece"):
    number = torch.arange(first, first + n)
    return {
        "worker": torch.full((n,), worker),
        "reward": torch.ones(n),
        ids: worker * 1000 + number // length,
        "done": (number % length == length - 1).unsqueeze(-1),
    }


def write_by_turns(rb, *, turns=6, n=5, length=20, lane=None, by_row=False, ids="piece"):
    """Two processes write ``n`` steps each, by turns; ``lane``: of each."""
    tokens = [FORK.Semaphore(1), FORK.Semaphore(0)]

    def work(worker):
        for turn in range(turns):
            tokens[worker].acquire()
            rows = steps(worker, turn * n, n, length, ids)
            at = None if lane is None else lane(worker)
            if by_row:
                for i in range(n):
                    rb.add({key: value[i] for key, value in rows.items()}, lane=at)
            else:
                rb.extend(rows, lane=at)
            tokens[1 - worker].release()

    together([FORK.Process(target=work, args=(worker,)) for worker in range(2)])


def together(processes):
    for process in processes:
        process.start()
    for process in processes:
        process_ended(process)
        assert process.exitcode == 0


def made(tmp_path, sampler=None, *, lanes=1, memory=False, ids="piece", unit=None):
    storage = (
        LazyTensorStorage(400, lanes=lanes) if memory else LazyMemmapStorage(400, scratch_dir=tmp_path, lanes=lanes)
    )
    rb = ReplayBuffer(storage=storage, sampler=sampler or ended(), batch_size=12, sample_unit=unit)
    rb.extend(steps(9, 0, 20 * lanes, 20, ids), lane=torch.arange(20 * lanes) // 20)
    return rb.share() if memory else rb


def ended(**more):
    return SliceSampler(slice_len=4, end_key="done", **more)


def said(rb, draws=20):
    """Warnings of draws."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(draws):
            rb.sample()
    return [str(one.message) for one in found]


SAMPLERS = {
    "slices": ended,
    "no key": lambda: SliceSampler(slice_len=4),
    "without replacement": lambda: SliceSamplerWithoutReplacement(num_slices=3, end_key="done"),
    "by priority": lambda: ended(anchors=PrioritizedSampler(400, 0.6, 0.4)),
}


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_two_processes_by_turns_are_said_once(tmp_path, memory, by_row):
    with made(tmp_path / "rows", memory=memory) as rb:
        write_by_turns(rb, by_row=by_row)
        (line,) = said(rb)
        assert SAYS in line
        assert "lanes=" in line
        assert "traj_key" in line


@pytest.mark.parametrize("name", ["without replacement", "by priority"])
def test_every_sampler_of_windows_says_it(tmp_path, name):
    with made(tmp_path / "rows", SAMPLERS[name]()) as rb:
        write_by_turns(rb)
        (line,) = said(rb)
        assert SAYS in line


def returns(source=None, **keys):
    return NStep(source or RandomSampler(), 2, 0.9, reward_key="reward", **(keys or {"end_keys": ["done"]}))


UNITS = {
    "n-step": lambda **keys: {"sampler": returns(**keys)},
    "returns": lambda **keys: {
        "sampler": RewardToGo(RandomSampler(), 0.9, reward_key="reward", **(keys or {"end_keys": ["done"]}))
    },
    "n-step of windows": lambda **keys: {"sampler": returns(ended(), end_keys=["done"])},
    "by priority": lambda **keys: {"sampler": returns(PrioritizedSampler(400, 0.6, 0.4), **keys)},
    "sequence": lambda **keys: {"sampler": RandomSampler(), "unit": Sequence(3, done_key="done")},
}


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("later", [False, True])
def test_returns_and_sequences_say_it_once(tmp_path, name, later):
    with made(tmp_path / "rows", **UNITS[name]()) as rb:
        if later:
            assert not said(rb, 5)
        write_by_turns(rb)
        (line,) = said(rb, 40)
        assert SAYS in line
        assert not said(rb)


@pytest.mark.parametrize("name", ["n-step", "returns", "by priority"])
def test_returns_by_ids_and_sequences_across_ends_say_nothing(tmp_path, name):
    with made(tmp_path / "rows", **UNITS[name](traj_key="piece")) as rb:
        write_by_turns(rb)
        assert not said(rb)
    with made(tmp_path / "others", RandomSampler(), unit=Sequence(3, done_key=None)) as rb:
        write_by_turns(rb)
        assert not said(rb)


def test_a_reader_in_another_handle_says_it(tmp_path):
    with made(tmp_path / "rows") as rb:
        write_by_turns(rb)
    with ReplayBuffer.open(tmp_path / "rows") as rb:
        assert len(said(rb)) == 1


def test_writers_that_begin_later_are_seen(tmp_path):
    with made(tmp_path / "rows") as rb:
        assert not said(rb, 5)
        write_by_turns(rb)
        assert len(said(rb, 20)) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"lanes": 2},
        {"sampler": SliceSampler(slice_len=4, traj_key="piece")},
        {"sampler": SliceSampler(slice_len=4), "ids": "episode"},  # which finds the ids
    ],
    ids=["lanes", "traj_key", "found ids"],
)
def test_lanes_of_their_own_and_ids_say_nothing(tmp_path, more):
    with made(tmp_path / "rows", **more) as rb:
        lane = (lambda worker: worker) if "lanes" in more else None
        write_by_turns(rb, n=4, length=20, lane=lane, ids=more.get("ids", "piece"))
        assert not said(rb)


def test_whole_episodes_say_nothing(tmp_path):
    with made(tmp_path / "rows") as rb:
        write_by_turns(rb, n=20, length=20)
        assert not said(rb)


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_that_begins_again_says_nothing(tmp_path, killed):
    with made(tmp_path / "rows") as rb:
        rb.extend(steps(0, 0, 20, 20))  # whole

        def work(turn):
            rb.extend(steps(1, turn * 5, 5, 100))
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)

        for turn in range(4):
            process = FORK.Process(target=work, args=(turn,))
            process.start()
            process_ended(process)
            assert process.exitcode == (-signal.SIGKILL if killed else 0)
        assert not said(rb)


def test_one_process_with_several_buffers_of_one_handle_says_nothing(tmp_path):
    with made(tmp_path / "rows") as rb:
        for turn in range(6):
            rb.extend(steps(turn % 2, turn * 5, 5, 100))
        assert not said(rb)


def test_rows_that_were_forgotten_or_written_over_are_not_looked_at(tmp_path):
    with made(tmp_path / "rows") as rb:
        write_by_turns(rb)
        rb.extend(steps(0, 0, 400, 20))
        assert not said(rb)
    with made(tmp_path / "others") as rb:
        write_by_turns(rb)
        rb.empty()
        rb.extend(steps(0, 0, 100, 20))
        assert not said(rb)
