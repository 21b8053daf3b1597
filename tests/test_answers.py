"""What an impatient user is told: each wrong use is answered with what was expected, what came, where, and what to do."""

import pytest
import torch

from engram import (
    Checkpointer,
    DeviceLoader,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    SchedulerList,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
)


def filled(**how):
    rb = ReplayBuffer(storage=LazyTensorStorage(20), **how)
    rb.extend({"obs": torch.zeros(10, 3)})
    return rb


def stored(folder):
    with ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=folder)) as rb:
        rb.add(torch.zeros(3))


ANSWERS = {
    "a misspelt argument of a sampler": (
        lambda folder: PrioritizedSampler(20, alhpa=0.5, beta=0.4),
        TypeError,
        "PrioritizedSampler: unexpected argument 'alhpa'. Did you mean alpha?",
    ),
    "a sampler without its exponents": (
        lambda folder: PrioritizedSampler(),
        TypeError,
        "expected alpha and beta, got alpha=None, beta=None. Write alpha=0.6, beta=0.4, for instance.",
    ),
    "a buffer without its exponents": (
        lambda folder: PrioritizedReplayBuffer(storage=LazyTensorStorage(5)),
        TypeError,
        "PrioritizedReplayBuffer: expected alpha and beta, got alpha=None, beta=None. Write alpha=0.6, beta=0.4, for instance.",
    ),
    "a TensorDict buffer without its exponents": (
        lambda folder: TensorDictPrioritizedReplayBuffer(storage=LazyTensorStorage(5)),
        TypeError,
        "Write alpha=0.6, beta=0.4, for instance.",
    ),
    "a storage that was not made": (
        lambda folder: ReplayBuffer(storage=LazyTensorStorage),
        TypeError,
        "missing 1 required positional argument: 'max_size'. Write storage=LazyTensorStorage(…).",
    ),
    "a sampler that was not made": (
        lambda folder: ReplayBuffer(sampler=PrioritizedSampler),
        TypeError,
        "expected alpha and beta",
    ),
    "a seed in place of a generator": (
        lambda folder: filled(generator=5),
        TypeError,
        "generator: expected a torch.Generator, got int. Write torch.Generator().manual_seed(0).",
    ),
    "a field that is not there": (
        lambda folder: filled()["rewards"],
        KeyError,
        "rb[key]: expected one of ['obs'], got 'rewards'.",
    ),
    "a nested field that is not there": (
        lambda folder: filled()["next", "reward"],
        KeyError,
        "rb[key]: expected one of ['obs'], got 'next' in ('next', 'reward').",
    ),
    "a checkpointer with its arguments swapped": (
        lambda folder: Checkpointer(filled(), str(folder)),
        TypeError,
        "Checkpointer: buffer: expected a buffer, got str. Write Checkpointer(root, buffer).",
    ),
    "a restore of nothing": (
        lambda folder: Checkpointer(folder, filled()).restore(),
        FileNotFoundError,
        "expected a checkpoint, found none. Call save(step) first, or name another folder.",
    ),
    "a restore of a step of nothing": (
        lambda folder: Checkpointer(folder, filled()).restore(step=5),
        FileNotFoundError,
        "expected a checkpoint of step 5, found none at all. Call save(step) first.",
    ),
    "a folder without a store": (
        ReplayBuffer.open,
        FileNotFoundError,
        "found none. ReplayBuffer.open_or_create(directory, size) makes one where there is none.",
    ),
    "checkpoints in place of a store": (
        lambda folder: (Checkpointer(folder, filled()).save(1), ReplayBuffer.open(folder)),
        FileNotFoundError,
        "found none. It holds checkpoints, of which Checkpointer(directory, buffer).restore() loads the newest into a buffer",
    ),
    "a store in place of checkpoints": (
        lambda folder: (stored(folder), Checkpointer(folder, filled())),
        FileExistsError,
        "Checkpointer: expected a folder for checkpoints, got that of a store. Take another, such as /",
    ),
    "a number in place of a scheduler": (
        lambda folder: SchedulerList([3]),
        TypeError,
        "SchedulerList: expected schedulers, such as a LinearScheduler, got 3.",
    ),
    "a list in place of a buffer": (
        lambda folder: DeviceLoader([1], "cpu"),
        TypeError,
        "DeviceLoader: rb: expected a buffer, got list.",
    ),
    "no path to save to": (
        lambda folder: filled().dumps(None),
        TypeError,
        "dumps: path: expected a path, got NoneType.",
    ),
    "no path to load from": (lambda folder: filled().loads(5), TypeError, "loads: path: expected a path, got int."),
    "no state": (
        lambda folder: filled().load_state_dict(None),
        TypeError,
        "expected a dict that state_dict() returned, got a NoneType.",
    ),
    "a server that is not there": (
        lambda folder: ReplayBuffer.connect(f"unix:{folder}/none", patience=0.0),
        ConnectionError,
        "No such file or directory. Start one with engram serve, or pass another address.",
    ),
    "a slice longer than any trajectory": (
        lambda folder: filled(sampler=SliceSampler(slice_len=3, end_keys=["done"]), batch_size=9).sample(),
        RuntimeError,
        "Name a stored field with traj_key or end_keys.",
    ),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_answers(what, tmp_path):
    use, kind, said = ANSWERS[what]
    with pytest.raises(kind) as raised:
        use(tmp_path)
    text = str(raised.value.args[0]) if kind is KeyError else str(raised.value)
    assert said in text
    assert not any(word in text for word in ("Flight", "gRPC", "__init__() got"))


def test_a_server_that_is_not_there_is_named_before_the_remedy(tmp_path):
    with pytest.raises(ConnectionError, match=f"no server answered at unix:{tmp_path}/none: "):
        ReplayBuffer.connect(f"unix:{tmp_path}/none", patience=0.0)
