"""Buffers that are saved as a state."""

import itertools

import torch
from tensordict import TensorDict

from engram import (
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from tests.components import Newest
from tests.store.test_device import OnDevice
from tests.twins import Twins, rows

L = 12


STORAGES = {
    "ram": lambda: LazyTensorStorage(L),
    "lanes": lambda: LazyTensorStorage(2 * L, lanes=2),
    "memmap": lambda: LazyMemmapStorage(L),
    "columns": lambda: LazyTensorStorage(2 * L, ndim=2),
    "full": lambda: TensorStorage(rows(L, 500)),
    "device": lambda: OnDevice(L),
    "list": lambda: ListStorage(L),
}
SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "priority": lambda: PrioritizedSampler(2 * L, 0.7, 0.5),
    "live-max": lambda: PrioritizedSampler(
        2 * L, 0.6, 0.4, eps=0.0, max_priority_within_buffer=True, dtype=torch.float64
    ),
    "slices": lambda: SliceSampler(slice_len=2),
    "anchors": lambda: SliceSampler(slice_len=2, uniform_over="anchors"),
    "slice-pass": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "priority-slices": lambda: PrioritizedSliceSampler(2 * L, 0.7, 0.5, slice_len=2),
    "n-step": lambda: NStep(PrioritizedSampler(2 * L, 0.7, 0.5), n=2, gamma=0.9),
    "stack": lambda: FrameStack(SamplerWithoutReplacement(), 2, -1, ["obs"]),
}
WRITERS = {
    "ring": RoundRobinWriter,
    "generations": lambda: TensorDictRoundRobinWriter(track_generations=True),
    "best": lambda: TensorDictMaxValueWriter("score"),
}
WINDOWS = ("slices", "anchors", "slice-pass", "priority-slices", "n-step", "stack")


def kinds():
    """What is made for each other. Files are slow to make, and their rows are those of RAM: one writer will do."""
    for storage, sampler, writer in itertools.product(STORAGES, SAMPLERS, WRITERS):
        windows_there = storage not in ("list", "device") or sampler not in WINDOWS
        order_there = storage not in ("lanes", "columns") or writer != "best"
        if windows_there and order_there and (storage != "memmap" or writer == "generations"):
            yield storage, sampler, writer


def twins(storage="ram", sampler="uniform", writer="ring", seed=0):
    def make():
        return TensorDictReplayBuffer(
            storage=STORAGES[storage](), sampler=SAMPLERS[sampler](), writer=WRITERS[writer](), batch_size=4
        )

    shape = 2 if storage == "columns" else None
    lanes = 2 if storage == "lanes" else 1
    return Twins(make, seed=seed, shape=shape, lanes=lanes, edits=storage != "columns", samples=(2, 4, 8))


# ---- rows --------------------------------------------------------------------------------------------------------------


def buffer(storage=None, sampler=None, writer=None, n=0, **more):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(L) if storage is None else storage,
        sampler=sampler,
        writer=writer,
        batch_size=4,
        **more,
    )
    if n:
        rb.extend(rows(n))
    return rb


# ---- writers -----------------------------------------------------------------------------------------------------------


def best(**more):
    return buffer(writer=TensorDictMaxValueWriter("score"), **more)


# ---- lists -------------------------------------------------------------------------------------------------------------


def items():
    return [
        torch.arange(3.0),
        torch.tensor(2, dtype=torch.int16),
        torch.zeros(0, 4),
        (torch.tensor(True), [torch.rand(2, 2).half(), {}]),
        {"b": torch.arange(2), "a": torch.rand(3)},
        TensorDict({"x": torch.rand(2, 3), "y": {"z": torch.arange(4).reshape(2, 2)}}, batch_size=[2]),
        TensorDict({}, batch_size=[3, 1]),
        torch.tensor(1.5).expand(1),
        torch.view_as_complex(torch.rand(2, 2)).conj(),
    ]


class Counting(Newest):
    """Holds what no state can."""

    def __init__(self, held=None):
        super().__init__()
        self.held = held

    def state_dict(self):
        return {**super().state_dict(), "deep": [{"held": self.held}]}
