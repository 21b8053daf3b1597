"""What the golden files are made of: small buffers, filled in the same way each time, and what must be found in them again.

A case writes a folder, says what its buffers hold without looking at a file, and says what a reader finds in the folder. All
numbers are ones that every machine computes alike: small integers, halves, squares.
"""

import contextlib
import hashlib
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    Compose,
    FinalObservations,
    FrameStack,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NextFromFollowing,
    NStep,
    ObservationNorm,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RewardScaling,
    RewardToGo,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    VecNorm,
)
from tests import stress
from tests.golden.archive import forget_processes
from tests.ranks.jobs import done, job
from tests.twins import timeless

CAPACITY = 12
#: Their square roots are exact, so every machine has the same leaves.
PRIORITIES = torch.tensor([4.0, 0.25, 9.0, 0.0, 16.0], dtype=torch.float64)


def rows(n, first=0):
    """``n`` steps of trajectories of four."""
    steps = torch.arange(first, first + n)
    return TensorDict(
        {
            "obs": steps.unsqueeze(-1) / torch.tensor([1.0, 2.0]),
            "step": steps,
            "score": (steps * 7 % 5).double() / 2,
            "episode": steps // 4,
            "next": {
                "obs": (steps + 1).unsqueeze(-1) / torch.tensor([1.0, 2.0]),
                "done": (steps % 4 == 3).unsqueeze(-1),
                "reward": steps.unsqueeze(-1) / 4.0,
            },
        },
        batch_size=[n],
    )


def plain(value):
    """A value as JSON has it. Large tensors are told by a digest."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)
        what = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if flat.numel() > 100:
            return {what: hashlib.sha256(flat.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()}
        return {what: flat.tolist()}
    if isinstance(value, TensorDict):
        return {"batch_size": list(value.batch_size), **{key: plain(entry) for key, entry in value.items()}}
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def drawn(rb, n):
    """A sample, tickets by their order alone."""
    data, info = rb.sample(n, return_info=True)
    if isinstance(data, TensorDict):
        data = data.exclude("index_generation")
    return plain({"data": data, "info": {key: entry for key, entry in info.items() if key != "index_generation"}})


def written_next(rb):
    """Rows that a write takes now."""
    if not isinstance(rb, TensorDictReplayBuffer) or isinstance(rb.writer, ImmutableDatasetWriter):
        return None
    data = rows(2, 80) if rb.storage.ndim == 1 else rows(2, 80).unsqueeze(-1)
    return rb.extend(data, lane=0).tolist()


def seen(rb, *, n=4, draws=2):
    """What a buffer is, the next draws, all that it holds then, and where it writes next."""
    return {
        "kinds": [type(thing).__name__ for thing in (rb, rb.storage, rb.sampler, rb.writer)],
        "length": len(rb),
        "draws": [drawn(rb, n) for _ in range(draws)],
        "state": None if rb.prefetch else plain(timeless(rb)),  # batches are drawn ahead meanwhile
        "next rows": written_next(rb),
    }


@contextlib.contextmanager
def _folder():
    with tempfile.TemporaryDirectory(dir=stress.RAM, prefix="engram-golden-") as folder:
        yield Path(folder)


class Stores:
    """A directory store: ``make(folder)`` fills one and returns the buffer."""

    def __init__(self, make, n=4):
        self.make, self._n = make, n

    def write(self, folder):
        self.make(folder).close()
        forget_processes(folder)

    def expected(self):
        with _folder() as folder:
            return self._seen(self.make(folder / "store"))

    def found(self, folder, **how):
        return self._seen(ReplayBuffer.open(folder, **how))

    def _seen(self, rb):
        """With the tickets: a directory keeps them as they are."""
        with contextlib.closing(rb):
            state = rb.storage.store.state()
            tickets = {"numbers": state.numbers.tolist(), "lanes": state.lanes.tolist(), "clock": state.clock}
            if not state.writes.equal(state.numbers):
                tickets["writes"] = state.writes.tolist()
            indexes = sorted("/".join(key) for key in rb.storage.store.indexes.refreshed())
            rb.set_rng(torch.Generator().manual_seed(5))  # generators are not part of a store
            return {"tickets": tickets, "indexes": indexes, **seen(rb, n=self._n)}


class Left(Stores):
    """A store as it lies there while a process has it open, or after that died."""

    def write(self, folder):
        with _folder() as live, contextlib.closing(self.make(live / "store")):
            shutil.copytree(live / "store", folder)
        forget_processes(folder)

    def found(self, folder):
        return super().found(folder, unclean="accept")


class Dumps:
    """A dump: ``make()`` gives an empty buffer, ``fill(rb)`` fills it."""

    def __init__(self, make, fill, n=4, draws=2):
        self.make, self._fill, self._n, self._draws = make, fill, n, draws

    def filled(self):
        rb = self.make()
        rb.set_rng(torch.Generator().manual_seed(3))
        self._fill(rb)
        return contextlib.closing(rb)

    def _seen(self, rb):
        return seen(rb, n=self._n, draws=self._draws)

    def write(self, folder):
        torch.manual_seed(0)  # the state of the default generator is saved, too
        with self.filled() as rb:
            rb.dumps(folder)

    def expected(self):
        with self.filled() as rb:
            return self._seen(rb)

    def found(self, folder):
        with contextlib.closing(self.make()) as rb:
            rb.loads(folder)
            return self._seen(rb)


class Series:
    """Two checkpoints of a job, the second of which links what has not changed."""

    def __init__(self, world):
        self._world = world

    def make(self, rank):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY, lanes=2), sampler=_priorities(), batch_size=4)
        rb.set_rng(torch.Generator().manual_seed(rank))
        return rb

    def _play(self, rb, rank, step):
        """The first lane stays as it was at the second step."""
        for lane in range(step - 1, 2):
            written = rb.extend(rows(5, 100 * rank + 20 * step + 10 * lane), lane=lane)
            rb.update_priority(written, PRIORITIES)

    def _seen(self, rb, user):
        return {"user": user, **seen(rb)}

    def write(self, folder):
        def act(ranks, rank):
            rb = self.make(rank)
            saving = Checkpointer(folder, rb, ranks=ranks)
            for step in (1, 2):
                self._play(rb, rank, step)
                saving.save(step, user={"episode": step})

        torch.manual_seed(0)
        done(job(self._world, act))

    def expected(self):
        found = []
        for rank in range(self._world):
            found.append([])
            for last in (1, 2):
                rb = self.make(rank)
                for step in range(1, last + 1):
                    self._play(rb, rank, step)
                found[-1].append(self._seen(rb, {"episode": last}))
        return found

    def found(self, folder):
        def act(ranks, rank):
            found = []
            for step in (1, 2):
                rb = self.make(rank)
                report = Checkpointer(folder, rb, ranks=ranks).restore(step=step, resume="exact")
                found.append(self._seen(rb, report.user))
            return found

        return done(job(self._world, act))


# ---- the cases -----------------------------------------------------------------------------------------------------------


def _priorities(kind=PrioritizedSampler, alpha=0.5, **more):
    return kind(CAPACITY, alpha, 0.5, eps=0.0, dtype=torch.float64, **more)


def _store(sampler=RandomSampler, writer=RoundRobinWriter, *, fill, cls=ReplayBuffer, **storage):
    def make(folder):
        rb = cls(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder, **storage), sampler=sampler(), writer=writer())
        rb.set_rng(torch.Generator().manual_seed(1))
        fill(rb)
        return rb

    return make


def _columns(rb, n=CAPACITY):
    rb.extend(rows(n).reshape(n // 2, 2).permute(1, 0))


def _lap(rb):
    """More than there is room for, a draw, priorities where there are some."""
    rb.extend(rows(7))
    written = rb.extend(rows(8, 7))
    _, info = rb.sample(4, return_info=True)
    if "priority_weight" in info:
        rb.update_priority(written[:5], PRIORITIES)
        rb.sampler.beta = 0.25


def _lanes(rb):
    for lane, n in enumerate((3, 6)):
        written = rb.extend(rows(n, 20 * lane), lane=lane)
        if isinstance(rb.sampler, PrioritizedSampler):
            rb.update_priority(written, PRIORITIES[:3].repeat(n // 3))


def _holes(rb):
    """Rows behind the cursor, and an emptying before them."""
    rb.extend(rows(5))
    rb.empty()
    rb.writer.write_at([2, 7], rows(2, 50))
    rb.extend(rows(1, 60))


def _another_index(rb):
    """Priorities under another name, besides those of the sampler."""
    other = _priorities(index="critic", alpha=1.0)
    mine = rb.sampler
    rb.set_sampler(other)
    rb.extend(rows(7))
    rb.update_priority(torch.arange(5), PRIORITIES)
    rb.set_sampler(mine)
    rb.update_priority(torch.arange(1, 6), PRIORITIES)


def _edited(rb):
    """Edits of some rows, of which one is written over afterwards."""
    rb.extend(rows(7))
    rb.set_at_("score", torch.tensor([8.0, 9.0, 10.0]).double(), torch.tensor([1, 3, 6]))
    rb.extend(rows(8, 7))
    rb[4:6] = rows(2, 70)


def _two_indexes(rb):
    _lap(rb)
    rb.set_sampler(_priorities(index="critic", alpha=1.0))
    rb.update_priority(torch.arange(5), PRIORITIES)


STORES = {
    "tensordict": Stores(_store(fill=_lap, cls=TensorDictReplayBuffer)),
    "tensor": Stores(_store(SamplerWithoutReplacement, fill=lambda rb: (rb.extend(torch.arange(14.0)), rb.sample(5)))),
    "tuple": Stores(
        _store(
            fill=lambda rb: rb.extend(
                (torch.arange(5), {"flag": torch.arange(5) % 2 == 0}, [torch.arange(10.0).reshape(5, 2).half()])
            )
        )
    ),
    "lanes": Stores(_store(_priorities, TensorDictRoundRobinWriter, fill=_lanes, cls=TensorDictReplayBuffer, lanes=2)),
    "columns": Stores(_store(lambda: SliceSampler(slice_len=2), fill=_columns, cls=TensorDictReplayBuffer, ndim=2)),
    "priorities": Stores(_store(_priorities, fill=_two_indexes, cls=TensorDictReplayBuffer)),
    "priority-slices": Stores(
        _store(
            lambda: _priorities(PrioritizedSliceSampler, slice_len=2, max_priority_within_buffer=True),
            fill=_lap,
            cls=TensorDictReplayBuffer,
        )
    ),
    "best": Stores(_store(writer=lambda: TensorDictMaxValueWriter("score"), fill=_lap, cls=TensorDictReplayBuffer)),
    "holes": Stores(_store(fill=_holes, cls=TensorDictReplayBuffer)),
    "edited": Stores(_store(fill=_edited, cls=TensorDictReplayBuffer)),
    "left": Left(_store(_priorities, fill=_lap, cls=TensorDictReplayBuffer)),
}


def _dump(
    sampler=RandomSampler,
    writer=RoundRobinWriter,
    *,
    storage=lambda: LazyTensorStorage(CAPACITY),
    fill=_lap,
    cls=TensorDictReplayBuffer,
    draws=2,
    **more,
):
    def make():
        made = {key: value() if callable(value) else value for key, value in more.items()}
        return cls(storage=storage(), sampler=sampler(), writer=writer(), batch_size=4, **made)

    return Dumps(make, fill, draws=draws)


def _with_finals():
    finals = FinalObservations(["obs"], LazyTensorStorage(6))
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=NextFromFollowing(RandomSampler(), finals),
        transform=finals,
        batch_size=4,
    )


def _not_at_random(rb):
    """Final observations are marked by random numbers."""
    with mock.patch("os.urandom", lambda n: bytes(range(n))):
        rb.extend(rows(9))


def _ahead(rb):
    """Batches that were drawn ahead, one of which was taken."""
    _lap(rb)
    rb.sample()


DUMPS = {
    # storages
    "ram": _dump(),
    "memmap": _dump(storage=lambda: LazyMemmapStorage(CAPACITY)),
    "lanes": _dump(_priorities, storage=lambda: LazyTensorStorage(CAPACITY, lanes=2), fill=_lanes),
    "columns": _dump(storage=lambda: LazyTensorStorage(CAPACITY, ndim=2), fill=_columns),
    "full": _dump(storage=lambda: TensorStorage(rows(CAPACITY, 40))),
    "list": _dump(
        storage=lambda: ListStorage(CAPACITY),
        fill=lambda rb: rb.extend([{"a": torch.tensor(i), "b": [torch.tensor(i / 2)]} for i in range(5)]),
        cls=ReplayBuffer,
        collate_fn=lambda: lambda items: [item["a"] for item in items],
    ),
    "list-of-tensordicts": _dump(storage=lambda: ListStorage(CAPACITY)),
    "tuple": _dump(fill=lambda rb: rb.extend((torch.arange(5), torch.arange(5) % 2 == 0)), cls=ReplayBuffer),
    "never-written": _dump(fill=lambda rb: None, draws=0),
    "holes": _dump(fill=_holes),
    "edited": _dump(fill=_edited),
    # samplers
    "epoch": _dump(SamplerWithoutReplacement),
    "priorities": _dump(_priorities),
    "live-max": _dump(lambda: _priorities(max_priority_within_buffer=True)),
    "two-indexes": _dump(_priorities, fill=_another_index),
    "slices": _dump(lambda: SliceSampler(slice_len=2)),
    "anchors": _dump(lambda: SliceSampler(slice_len=2, uniform_over="anchors")),
    "slice-epoch": _dump(lambda: SliceSamplerWithoutReplacement(slice_len=2)),
    "priority-slices": _dump(lambda: _priorities(PrioritizedSliceSampler, slice_len=2)),
    # writers
    "generations": _dump(writer=lambda: TensorDictRoundRobinWriter(track_generations=True)),
    "best": _dump(writer=lambda: TensorDictMaxValueWriter("score")),
    "immutable": _dump(
        writer=ImmutableDatasetWriter, storage=lambda: TensorStorage(rows(CAPACITY, 40)), fill=lambda rb: rb.sample()
    ),
    # expanders
    "n-step": _dump(lambda: NStep(_priorities(), n=2, gamma=0.5)),
    "stack": _dump(lambda: FrameStack(SamplerWithoutReplacement(), 2, -1, ["obs"])),
    "to-go": _dump(lambda: RewardToGo(RandomSampler(), gamma=0.5)),
    "next": Dumps(_with_finals, _not_at_random),
    # transforms
    "transforms": _dump(
        transform=lambda: Compose(
            VecNorm(["obs"], decay=0.5),
            ObservationNorm(1.0, 2.0, ["score"]),
            RewardScaling(0.0, 2.0, [("next", "reward")]),
        )
    ),
    # buffers
    "prioritized-buffer": Dumps(
        lambda: PrioritizedReplayBuffer(
            alpha=0.5, beta=0.5, eps=0.0, dtype=torch.float64, storage=LazyTensorStorage(CAPACITY), batch_size=4
        ),
        _lap,
    ),
    "prioritized-tensordict-buffer": Dumps(
        lambda: TensorDictPrioritizedReplayBuffer(
            alpha=0.5, beta=0.5, eps=0.0, storage=LazyTensorStorage(CAPACITY), batch_size=4
        ),
        _lap,
    ),
    "ahead": _dump(prefetch=2, fill=_ahead),
}

FAMILIES = {"stores": STORES, "dumps": DUMPS, "series": {"one-rank": Series(1), "two-ranks": Series(2)}}
