"""A user's program: `make check` lets mypy --strict and pyright read it, and a test runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, assert_type

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

import engram
from engram import (
    Checkpointer,
    DeviceLoader,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SaveHandle,
    SaveReport,
    SliceSampler,
    TensorDictReplayBuffer,
)

Rows: TypeAlias = dict[str, Tensor]


def gymnasium_loop() -> None:
    rb: ReplayBuffer[Rows] = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=32)
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    for _ in range(100):
        action = env.action_space.sample()
        following, reward, terminated, truncated, _ = env.step(action)
        rb.add({"obs": obs, "action": action, "reward": reward, "next": following, "terminated": terminated})
        obs = env.reset()[0] if terminated or truncated else following
    batch = rb.sample()
    assert_type(batch, Rows)
    assert_type(batch["obs"], Tensor)
    batch, info = rb.sample(return_info=True)
    assert_type(batch, Rows)
    assert_type(info["index"], Any)
    for one in rb:
        assert_type(one, Rows)
        break
    assert_type(len(rb), int)
    assert_type(rb.next(), Rows | None)


def folders_and_servers() -> None:
    with ReplayBuffer[Rows].open_or_create("rows", 100, batch_size=4) as rb:
        rb.add({"obs": torch.zeros(3)})
        assert_type(rb.sample(), Rows)
    with ReplayBuffer[Rows].open("rows", batch_size=4) as again:
        assert_type(again.sample(), Rows)
        with engram.serve(again) as address, ReplayBuffer[Rows].connect(address, batch_size=4) as remote:
            assert_type(remote.sample(), Rows)


def tensordicts(policy: Callable[[Tensor], Tensor]) -> Tensor:
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(10_000, scratch_dir="replay"),
        sampler=PrioritizedSampler(10_000, alpha=0.6, beta=0.4),
        batch_size=256,
        prefetch=2,
        priority_key="loss",
    )
    assert_type(rb, TensorDictReplayBuffer)
    rows = rb.extend(TensorDict({"obs": torch.randn(50, 3)}, batch_size=[50]))
    assert_type(rows, Tensor)
    batch = rb.sample()
    loss = policy(batch["obs"])
    batch["loss"] = loss
    rb.update_tensordict_priority(batch)
    with rb:
        rb.dumps("folder")
    return rows


def windows() -> Iterator[Any]:
    sampler = SliceSampler(num_slices=8, strict_length=False)
    assert_type(sampler, SliceSampler)
    with ReplayBuffer(storage=LazyTensorStorage(1_000, lanes=4), sampler=sampler, batch_size=64) as rb:
        assert_type(rb.batch_size, int | None)
        assert_type(rb.prefetch, int)
        rb.extend({"obs": torch.zeros(4, 3), "episode": torch.zeros(4, dtype=torch.int64)}, lane=[0, 1, 2, 3])
        assert_type(rb, ReplayBuffer[Any])
        assert_type(rb.lanes, int)
        yield rb.sample(timeout=1.0)


def other_buffers() -> None:
    items: ReplayBuffer[list[str]] = ReplayBuffer(storage=ListStorage(10), sampler=RandomSampler(), collate_fn=list)
    items.extend(["a", "b"])
    assert_type(items.sample(2), list[str])
    prioritized = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(100), batch_size=8)
    prioritized.extend(torch.arange(50))
    _, drawn = prioritized.sample(return_info=True)
    prioritized.update_priority(drawn["index"], torch.ones(8))
    passes = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=8)
    passes.extend(torch.arange(50))
    for batch in DeviceLoader(passes, "cpu"):
        print(batch)


def later_in_the_run(step: int) -> None:
    with ReplayBuffer.open("replay", batch_size=32) as rb:
        checkpoints = Checkpointer("checkpoints", rb, every_steps=100, keep=2)
        checkpoints.poll(step)
        assert_type(checkpoints.save(step), SaveReport)
        assert_type(checkpoints.save(step + 1, wait=False), SaveHandle)
        rb.set_sampler(PrioritizedSampler(rb.storage.max_size, 0.6, 0.4))
        rb.empty()
        try:
            rb.sample()
        except engram.NoSampleable as error:
            print(error)


def expanders() -> ReplayBuffer:
    n_step = NStep(RandomSampler(), 3, 0.99)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=n_step, batch_size=8)
    assert_type(FrameStack(RandomSampler, 4, None, ["obs"]), FrameStack)
    return rb
