"""The program whose calls :mod:`tests.structure.calls` counts: trips through the package, printed as JSON."""

import json
import logging
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    HERReplayBuffer,
    LazyTensorStorage,
    PrioritizedSampler,
    Ranks,
    ReplayBuffer,
    TensorDictReplayBuffer,
    serve,
)
from engram.saved import disk, rows

logging.getLogger("engram").setLevel(logging.ERROR)
disk.THREADS = rows.READERS = 1  # no profile sees the bare threads that help, so this one makes their calls
POLLING = ("/engram/checkpoint/ranks.py",)
trips = []
counting = threading.Event()


def profile(frame, event, argument):
    if event == "call" and counting.is_set():
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if (
            "/engram/" in file
            and not any(part in file for part in POLLING)
            and not name.endswith(("comp>", "genexpr>"))
        ):
            trips[-1].append(f"{file.rpartition('/engram/')[2]}:{name}")


def count(act, times=1):
    """The calls of the trip with the fewest."""
    for _ in range(times):
        trips.append([])
        counting.set()
        act()
        counting.clear()
    return min(trips[-times:], key=len)


def rows(first, n):
    steps = torch.arange(first, first + n)
    return TensorDict(
        {"obs": steps.float(), "episode": steps // 16, "next": {"done": steps % 16 == 15, "reward": steps.double()}},
        [n],
    )


def buffer(sampler=None, cls=TensorDictReplayBuffer):
    return cls(storage=LazyTensorStorage(1024), sampler=sampler, batch_size=32)


def buffer_of(storage, sampler):
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=32)


def prioritized():
    return PrioritizedSampler(1024, 0.7, 0.5)


def steady(act):
    for _ in range(3):
        act()
    return count(act)


threading.setprofile(profile)  # of threads that start from now on
sys.setprofile(profile)

flat = TensorDict({"obs": torch.arange(32.0), "action": torch.arange(32)}, [32])
found = {}
storages, samplers = ([make() for _ in range(4)] for make in (lambda: LazyTensorStorage(1024), prioritized))
found["construction, uniform"] = steady(lambda: ReplayBuffer(storage=storages.pop(), batch_size=32))
storages += [LazyTensorStorage(1024) for _ in range(4)]
found["construction, prioritized TensorDict"] = steady(lambda: buffer_of(storages.pop(), samplers.pop()))
rb = buffer()
rb.extend(flat)
found["sample, uniform"] = steady(rb.sample)
rb = buffer(prioritized())
rb.extend(rows(0, 256))
found["sample, prioritized TensorDict"] = steady(rb.sample)
rb = HERReplayBuffer(lambda rows: rows["next", "reward"], storage=LazyTensorStorage(1024), batch_size=32)
goals = torch.zeros(256, 2)
rb.extend(rows(0, 256).update({"desired_goal": goals, "next": {"achieved_goal": goals}}))
found["sample, hindsight"] = steady(rb.sample)
rb = buffer(cls=ReplayBuffer)
found["extend"] = steady(lambda: rb.extend(flat))
shared = buffer(prioritized()).share()
shared.extend(rows(0, 256))
with serve(shared) as address:
    rb = ReplayBuffer.connect(address)
    found["sample, over a connection"] = steady(rb.sample)
    rb.close()

with tempfile.TemporaryDirectory() as folder:
    root = Path(folder) / "one"
    rb = buffer(prioritized())
    ck = Checkpointer(root, rb)
    rb.extend(rows(0, 128))
    ck.save(1)
    rb.extend(rows(128, 128))
    found["save of 128 rows over a parent"] = count(lambda: ck.save(2))

    loader = Checkpointer(root, buffer(prioritized()))
    loader.restore()
    found["restore"] = count(loader.restore, times=5)

    root = Path(folder) / "two"

    def play(n, act):
        every, errors = Ranks.threads(n), []

        def body(ranks):
            try:
                act(ranks)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        threads = [threading.Thread(target=body, args=(ranks,)) for ranks in every]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def save(ranks):
        rb = buffer(prioritized())
        ck = Checkpointer(root, rb, ranks=ranks, timeout=100.0)
        for step in (1, 2):
            rb.extend(rows(128 * step, 64))
            ck.save(step)

    def load(ranks):
        Checkpointer(root, buffer(prioritized()), ranks=ranks, timeout=100.0).restore()

    play(2, save)
    play(3, load)
    found["restore of 2 ranks on 3"] = count(lambda: play(3, load), times=5)

sys.setprofile(None)
threading.setprofile(None)
print(json.dumps({name: [len(calls), Counter(calls).most_common()] for name, calls in found.items()}))
