"""Processes that have one seed draw different batches, reproducibly where they have a rank or are workers."""

import copy
import itertools
import multiprocessing
import os
import pickle
import subprocess

import pytest
import torch

from engram import (
    ConsumingSampler,
    DeviceLoader,
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
)
from engram._support import fork as _fork
from tests import forkserver, interpreter

ROWS = 2_000


def _data():
    i = torch.arange(ROWS)
    return {
        "i": i,
        "episode": i // 10,
        "policy_version": torch.zeros(ROWS, dtype=torch.int64),
        "achieved_goal": i.unsqueeze(1).float(),
        "desired_goal": torch.full((ROWS, 1), -1.0),
        "next": {"reward": torch.zeros(ROWS, 1), "done": (i % 10 == 9).unsqueeze(1)},
    }


def _reward(rows):
    return rows["desired_goal"]


def _batches(rb, n=2):
    return [tuple(rb.sample()["i"].reshape(-1).tolist()) for _ in range(n)]


def _goals(rb, n=2):
    return [tuple(rb.sample()["desired_goal"][:, 0].tolist()) for _ in range(n)]


def _loaded_by_device(rb, n=2):
    return [tuple(batch["i"].tolist()) for batch in itertools.islice(DeviceLoader(rb, "cpu"), n)]


def _are_apart(found):
    batches = list(itertools.chain.from_iterable(found))
    return len(set(batches)) == len(batches)


def _apart(found):
    assert _are_apart(found), found


def _put(out, act, number, arguments):
    try:
        found = act(*arguments)
    except BaseException as error:  # noqa: BLE001 - told, so that no one waits for it
        found = error
    out.put((number, found))


FORK = multiprocessing.get_context("fork")


def _in_processes(contexts, act, *arguments):
    """What a child of each context returns, in their order."""
    out = contexts[0].Queue()
    children = [context.Process(target=_put, args=(out, act, k, arguments)) for k, context in enumerate(contexts)]
    for child in children:
        child.start()
    found = dict(out.get(timeout=90) for _ in children)
    for child in children:
        child.join()
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return [found[k] for k in range(len(contexts))]


SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(ROWS, 0.7, 0.5),
    "without": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=4, traj_key="episode"),
    "slices_without": lambda: SliceSamplerWithoutReplacement(slice_len=4, traj_key="episode"),
    "staleness": StalenessAwareSampler,
    "consuming": lambda: ConsumingSampler(max_sample_count=9),
    "goals": lambda: Hindsight(RandomSampler(), _reward, her_ratio=1.0, achieved_goal_key="achieved_goal"),
}


def _buffer(sampler, *, seed=0, storage=None, **arguments):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS) if storage is None else storage,
        sampler=SAMPLERS[sampler](),
        batch_size=64,
        generator=generator,
        **arguments,
    )
    rb.extend(_data())
    return rb


def _of_all(buffers):
    """What a process draws by each sampler, by a device loader, and as goals: its batches by name."""
    found = {name: _batches(rb) for name, rb in buffers.items()}
    return {**found, "loader": _loaded_by_device(buffers["uniform"]), "as goals": _goals(buffers["goals"])}


def _all_apart(found):
    assert {name for name in found[0] if not _are_apart([one[name] for one in found])} == set()


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("shared", [True, False])
def test_forked_samplers(shared, seed):
    """Of every sampler, and loaders and goals."""
    buffers = {name: _buffer(name, seed=seed, shared=shared) for name in SAMPLERS}
    for rb in buffers.values():
        rb.sample()  # an epoch is under way
    _all_apart([*_in_processes([FORK] * 2, _of_all, buffers), _of_all(buffers)])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("sampler", ["uniform", "slices_without"])
def test_forks_leave_prefetched_batches_to_their_parent(sampler, shared):
    rb = _buffer(sampler, shared=shared, prefetch=2)
    rb.sample()
    found = _in_processes([FORK] * 2, _batches, rb)
    _apart([*found, _batches(rb, 4)])


def test_forked_lists_and_ensembles():
    _apart(_in_processes([FORK] * 2, _batches, _items()))
    members = [_buffer("uniform"), _buffer("uniform")]
    ensemble = ReplayBufferEnsemble(*members, batch_size=64, generator=torch.Generator().manual_seed(0))
    _apart(_in_processes([FORK] * 2, _batches, ensemble))


def _items():
    rb = ReplayBuffer(
        storage=ListStorage(ROWS), batch_size=64, generator=torch.Generator().manual_seed(0), collate_fn=_stacked
    )
    rb.extend(list(range(ROWS)))
    return rb


def _stacked(items):
    return {"i": torch.tensor(items)}


def test_spawned_workers_with_a_pickled_generator():
    """Of every sampler. They come from a server: what they are given is pickled, as for a process that is spawned."""
    buffers = {name: _buffer(name, shared=True) for name in SAMPLERS} | {
        "ahead": _buffer("uniform", shared=True, prefetch=2)
    }
    buffers["ahead"].sample()
    _all_apart([*_in_processes([forkserver.CONTEXT] * 2, _of_all, buffers), _of_all(buffers)])


def _raw_forks(rb):
    """What two forks draw that no library started."""
    found = []
    for _ in range(2):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, pickle.dumps(_batches(rb)))
            os._exit(0)
        os.waitpid(child, 0)
        found.append(pickle.loads(os.read(reading, 1 << 16)))
        os.close(reading), os.close(writing)
    return found


def test_forks_of_forks():
    rb = _buffer("uniform")
    first, *rest = _in_processes([FORK] * 2, _raw_forks, rb)
    _apart([*first, *itertools.chain.from_iterable(rest), *_raw_forks(rb), _batches(rb)])


class _Rows(torch.utils.data.IterableDataset):
    def __init__(self, rb):
        self.rb = rb

    def __iter__(self):
        return iter(_batches(self.rb))


def _loaded(rb):
    return list(torch.utils.data.DataLoader(_Rows(rb), batch_size=None, num_workers=2, collate_fn=list))


def test_workers_of_a_data_loader_are_apart_and_reproducible():
    rb = _buffer("uniform")
    first = _loaded(rb)
    _apart([[tuple(batch) for batch in first]])
    assert _loaded(rb) == first


def _as_rank(folder, rank):
    os.environ["RANK"] = str(rank)
    torch.manual_seed(42)
    with ReplayBuffer.open(folder, batch_size=64) as rb:
        return _batches(rb)


def test_ranks_are_apart_and_reproducible(tmp_path):
    _buffer("uniform", storage=LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "store")).close()
    found = [_in_processes([FORK], _as_rank, tmp_path / "store", rank)[0] for rank in (0, 1, 2, 1)]
    assert found[1] == found[3]
    _apart(found[:3])
    torch.manual_seed(42)
    with ReplayBuffer.open(tmp_path / "store", batch_size=64) as rb:
        assert _batches(rb) == found[0]  # as one process alone


def test_workers_that_inherit_a_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    _apart(_in_processes([FORK] * 2, _batches, _buffer("uniform")))


_OPENED = """
import sys, torch
from engram import ReplayBuffer
torch.manual_seed(42)
sys.stdin.readline()
with ReplayBuffer.open(sys.argv[1], batch_size=64) as rb:
    print(rb.sample()["i"].tolist(), flush=True)
    sys.stdin.readline()
"""


def test_programs_that_open_one_store(tmp_path):
    """The first one draws as it would alone, later ones by their number among those that have the store open."""
    folder = str(tmp_path / "store")
    _buffer("uniform", storage=LazyMemmapStorage(ROWS, scratch_dir=folder)).close()
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    start = [interpreter.executable(), "-c", _OPENED, folder]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    programs = [subprocess.Popen(start, env=environment, **pipes) for _ in range(2)]
    torch.manual_seed(42)
    with ReplayBuffer.open(folder, batch_size=64) as rb:
        alone = rb.sample()["i"].tolist()
    found = []
    for program in programs:
        program.stdin.write("open\n")
        found.append(program.stdout.readline().strip())
    torch.manual_seed(42)
    with ReplayBuffer.open(folder, batch_size=64) as rb:
        found.append(str(rb.sample()["i"].tolist()))
    for program in programs:
        program.communicate("close\n")
    assert found[0] == str(alone)
    assert len(set(found)) == 3


def _saved_in_child(rb, folder):
    rb.dumps(folder / "dump")
    return rb.state_dict()["_rng"][2], _batches(rb)


def test_states_go_on_with_what_was_mixed_in(tmp_path):
    rb = _buffer("uniform")
    assert len(rb.state_dict()["_rng"]) == 2  # as before
    ((mixed, expected),) = _in_processes([FORK], _saved_in_child, rb, tmp_path)
    assert mixed != 0
    other = _buffer("uniform", seed=5)
    other.loads(tmp_path / "dump")
    assert _batches(other) == expected
    state = other.state_dict()
    expected = _batches(other)
    again = _buffer("uniform", seed=6)
    again.load_state_dict(state)
    assert _batches(again) == expected


@pytest.mark.parametrize("entry", [0, -1, 1 << 63, "1", None])
def test_other_entries_are_refused(entry):
    rb = _buffer("uniform")
    state = rb.state_dict()
    state["_rng"] = [*state["_rng"], entry]
    before = copy.deepcopy(rb)
    with pytest.raises((TypeError, ValueError), match="_rng"):
        rb.load_state_dict(state)
    assert _batches(rb) == _batches(before)


def test_one_process_alone_mixes_nothing_in():
    assert _fork.stream() == _fork.stream(0) == _fork.stream(0, 0) == 0
    assert len({0, _fork.stream(1), _fork.stream(2), _fork.stream(0, 1), _fork.stream(1, 0)}) == 5
