"""Steps of environments as tianshou's collectors add them, drawn at random."""

import numpy as np
import torch
from tianshou.data import Batch


class Steps:
    """Steps of one kind: ``plain``; ``dict``, ``stacks``: the observations; ``extras``: fields that come and go, and tensors."""

    def __init__(self, kind, seed=0, width=3):
        self.rng, self.kind, self.width, self.count = np.random.default_rng(seed), kind, width, 0

    def rows(self, ids):
        n, rng = len(ids), self.rng
        self.count += 1
        terminated, truncated = rng.random(n) < 0.1, rng.random(n) < 0.1
        rows = Batch(
            obs=self._observed(n),
            act=rng.integers(5, size=n),
            rew=rng.random(n).astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            obs_next=self._observed(n),
            info=Batch(env_id=np.array(ids)),
            policy=Batch(),
        )
        if self.kind == "extras":
            rows.policy = Batch(hidden_state=torch.from_numpy(rng.random((n, 2), np.float32)))
            if self.count > 4:
                rows.info.late = rng.random((n, 2))
            if self.count % 3 == 0:
                rows.info.seldom = rng.random(n) < 0.5
        return rows

    def _observed(self, n):
        rng = self.rng
        if self.kind == "dict":
            return Batch(at=rng.random((n, 2)), seen=Batch(depth=rng.integers(256, size=(n, 4, 4), dtype=np.uint8)))
        return rng.random((n, 2, self.width) if self.kind == "stacks" else (n, self.width))


def leaves(batch, *root):
    for key in sorted(batch.get_keys()):
        value = batch[key]
        if isinstance(value, Batch):
            yield from leaves(value, *root, key)
        else:
            yield (*root, key), np.asarray(value)


def same(one, other):
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        assert value.dtype == theirs[path].dtype, path
        assert np.array_equal(value, theirs[path], equal_nan=value.dtype.kind == "f"), path
