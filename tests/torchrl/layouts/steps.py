"""Steps in TorchRL's format, episode after episode, as a model keeps them: a dict per step."""

import torch
from tensordict import TensorDict


def episodes(lengths, seed=0, agents=False):
    """Steps ``[sum(lengths)]``: each episode ends with ``done`` but the last one, which goes on. Every value is distinct."""
    n = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    done = torch.zeros(n, 1, dtype=torch.bool)
    stops = torch.tensor(lengths).cumsum(0) - 1
    done[stops[:-1]] = True
    terminated = done & (torch.rand(n, 1, generator=generator) < 0.5)
    obs, after = [], []
    for length in lengths:
        values = torch.rand(length + 1, 3, generator=generator)
        obs.append(values[:-1])
        after.append(values[1:])
    root = {
        "observation": torch.cat(obs),
        "action": torch.rand(n, 2, generator=generator, dtype=torch.float64),
        "number": torch.arange(n),
        "collector": {"traj_ids": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))},
    }
    beyond = {"observation": torch.cat(after), "reward": torch.rand(n, 1, generator=generator)}
    for name, flag in (("done", done), ("terminated", terminated), ("truncated", done & ~terminated)):
        root[name], beyond[name] = torch.zeros_like(flag), flag
    if agents:
        root["agents"] = {"view": root["observation"][:, :2].clone()}
        beyond["agents"] = {"view": beyond["observation"][:, :2].clone()}
    return TensorDict({**root, "next": beyond}, [n])


def in_columns(lengths, width, seed=0):
    """Steps ``[width, sum(lengths)]``, each column with other values and the same ends, as collectors return them."""
    return torch.stack([episodes(lengths, seed + number) for number in range(width)])


def same(a, b):
    """Bit by bit."""
    keys = set(a.keys(True, True)) & set(b.keys(True, True)) - {"index"}
    assert set(a.keys(True, True)) - {"index"} == set(b.keys(True, True)) - {"index"}
    return all(
        a.get(key).shape == b.get(key).shape
        and a.get(key).contiguous().numpy().tobytes() == b.get(key).contiguous().numpy().tobytes()
        for key in keys
    )
