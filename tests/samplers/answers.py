"""Buffers of answers to prompts, for samplers of groups."""

import torch
from tensordict import TensorDict

from engram import LazyStackStorage, LazyTensorStorage, PromptGroupSampler, ReplayBuffer, RoundRobinWriter


def buffer(storage=None, *, batch_size=4, seed=0, **arguments):
    arguments = {"group_key": "prompt", "reward_key": "reward"} | arguments
    if "num_groups" not in arguments:
        arguments.setdefault("samples_per_group", 2)
    return ReplayBuffer(
        storage=LazyTensorStorage(100) if storage is None else storage,
        sampler=PromptGroupSampler(**arguments),
        writer=RoundRobinWriter(track_generations=not isinstance(storage, LazyStackStorage)),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
    )


def late(rb, rows, **fields):
    """Fields that come later than their rows."""
    rows = torch.as_tensor(rows)
    generation = rb.writer.generations_of(rows)
    assert rb.update_if_present(index=rows, generation=generation, patch=fields).updated.all()


def answers(prompts, first=0, reward=0.0, version=0):
    n = len(prompts)
    return TensorDict(
        {
            "prompt": torch.tensor(prompts),
            "answer": torch.arange(first, first + n),
            "reward": torch.as_tensor(reward, dtype=torch.float32).expand(n).clone(),
            "version": torch.as_tensor(version).expand(n).clone(),
        },
        [n],
    )


def drawn(batch, each):
    return batch["answer"].reshape(-1, each).tolist()
