"""Steps of a robot as LeRobot's learners add them, each of which its number says."""

import numpy as np
import torch

KEYS = ["observation.state", "observation.images.front"]


def step(number):
    return {
        "state": _seen(number),
        "action": torch.full((1, 2), float(number)),
        "reward": float(number),
        "next_state": _seen(number + 1),
        "done": number % 7 == 6,
        "truncated": number % 11 == 10,
        "complementary_info": {"discrete_penalty": float(number % 3), "values": torch.full((1, 2), number % 3)},
    }


def _seen(number):
    rng = np.random.default_rng(number)
    image = rng.integers(256, size=(1, 3, 8, 8), dtype=np.uint8)
    return {KEYS[0]: torch.from_numpy(rng.random((1, 3), np.float32)), KEYS[1]: torch.from_numpy(image)}
