"""Jobs of several ranks, played by threads: what each saved, and what each has, as sets of steps that can be compared."""

import threading

import numpy as np
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
from engram.checkpoint.checkpointer import Checkpointer
from engram.checkpoint.ranks import Ranks
from engram.saved import attempts
from tests.ranks.processes import wait_for


def job(n, act, *more):
    """What ``act(ranks, rank, *more)`` gives or raises on each of ``n`` ranks."""
    return played(Ranks.threads(n), act, *more)


def played(every, act, *more):
    """As :func:`job`, with these ranks."""
    n, results = len(every), [None] * len(every)

    def body(rank):
        try:
            results[rank] = act(every[rank], rank, *more)
        except BaseException as error:  # noqa: BLE001 - whoever asks gets it
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "a rank hangs"
    return results


def done(results):
    """The results, if nobody raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def buffer(lanes=2, length=32, seed=None):
    capacity = lanes * length
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity, lanes=lanes),
        sampler=PrioritizedSampler(capacity, alpha=0.7, beta=0.5),
        batch_size=8,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )


def episode(rank, lane, number, steps, *, ends=True):
    """A trajectory all of whose steps say who they are."""
    who = ((rank * 100 + lane) * 1000 + number) * 1000
    over = torch.zeros(steps, dtype=torch.bool)
    over[-1] = ends
    return TensorDict(
        {
            "who": who + torch.arange(steps),
            "obs": torch.randn(steps, 3, generator=torch.Generator().manual_seed(who)),
            "env_id": torch.full((steps,), lane, dtype=torch.int32),
            "episode": torch.full((steps,), number, dtype=torch.int64),
            ("next", "done"): over,
            ("next", "truncated"): torch.zeros(steps, dtype=torch.bool),
            ("next", "terminated"): over.clone(),
        },
        [steps],
    )


def play(rb, rank, lane, lengths, *, first=0, open_end=False):
    """Write trajectories of these lengths to a lane, and give each step a priority of its own."""
    for i, steps in enumerate(lengths):
        last = i == len(lengths) - 1
        data = episode(rank, lane, first + i, steps, ends=not (last and open_end))
        rows = rb.extend(data, lane=lane)
        rb.update_priority(rows, data["who"].to(torch.float64).sqrt() + 0.1)


def filled(rank):
    """A buffer of two lanes that a rank has played five trajectories to."""
    rb = buffer(2, 64)
    play(rb, rank, 0, [5, 7, 3])
    play(rb, rank, 1, [9, 4])
    return rb


def columns_of(rb):
    """All rows as they are, also such as hold nothing, by field."""
    store = rb.storage.store
    return {".".join(field.key): tensor for field, tensor in zip(store.schema.fields, store.tensors, strict=True)}


def steps_of(rb):
    """Each live step: who it is, its bytes but for what a move rewrites, and the bits of its priority."""
    state = rb.state_dict()
    numbers = state["_storage"]["numbers"].numpy()
    rows = np.flatnonzero(numbers)
    if not len(rows):
        return set()
    leaves = state["_sampler"]["leaves"].numpy()
    leaves = np.append(leaves, np.zeros(max(0, len(numbers) - len(leaves))))
    columns = columns_of(rb)
    who, payload = columns["who"][rows].tolist(), columns["obs"][rows].numpy()
    return {(w, p.tobytes(), leaves[row].tobytes()) for w, p, row in zip(who, payload, rows.tolist(), strict=True)}


def whos(steps):
    return {step[0] for step in steps}


def layout(rb):
    """Per lane, in the order of their positions, who is there; None where a row holds nothing."""
    state = rb.state_dict()["_storage"]
    numbers = state["numbers"].numpy()
    length = rb.storage.max_size // rb.storage.lanes
    data = columns_of(rb)["who"].tolist() if rb.storage.initialized else []
    found = []
    for lane, (position, live) in enumerate(state["lanes"][:, :2].tolist()):
        rows = [lane * length + at % length for at in range(position - live, position)]
        found.append([data[row] if row < len(numbers) and numbers[row] else None for row in rows])
    return found


def decides_when_voted(ck, ranks, timeout):
    """Let the time for votes begin once these ranks have voted; the others alone are missed, on a slow machine too."""
    real, joined = ck._job.protocol.decided, ck._job.protocol.joined

    def decided(folder, _):
        wait_for(lambda: all(attempts.votes(folder)[rank].shard for rank in ranks))
        return real(folder, timeout)

    ck._job.protocol.decided = decided
    ck._job.protocol.joined = lambda number, _: joined(number, timeout)
    return ck


def checkpointer(root, rb, ranks, **more):
    return Checkpointer(root, rb, ranks=ranks, **{"timeout": 60.0, **more})
