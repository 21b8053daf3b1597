"""Returns of several steps, summed when a row is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram.expanders._base import Expander, check_count, check_discount
from engram.expanders.reading import Column
from engram.field_paths import as_path, as_paths, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.expanders.reading import Reading

__all__ = ["NStep"]


class NStep(Expander):
    """Turns every sampled step into one of ``n`` steps: rewards are summed, what comes next is what comes ``n`` steps later.

    Let ``t`` be the drawn row, and ``k`` the number of steps from it, itself included, up to the ``n``-th, the last one of its
    trajectory or the newest one of its lane, whichever comes first: ``1 <= k <= n``. Then a batch holds, ``[B, ...]``::

        reward              sum of gamma ** i * reward[t + i] for i in 0 ... k - 1
        next.*              that of step t + k - 1: observation, done, terminated, truncated
        steps_to_next_obs   k, int64 [B, 1]
        gamma               gamma ** k, float32 [B, 1]
        original_reward     reward[t], beside the reward

    and the target of a value function is ``reward + gamma * (1 - next.terminated) * V(next.observation)``. Nothing is summed
    across the end of a trajectory: at a termination ``V`` is left out; at a truncation, and at the newest row, ``k`` is smaller, and
    with the discount ``gamma ** k`` the target is still exact. (Sutton 1988, n-step returns; Hessel et al., "Rainbow",
    AAAI 2018; Pardo et al., "Time limits in reinforcement learning", ICML 2018, on truncation.) The last rows of a lane can be
    drawn at once, and give longer returns when more has been written.

    Rows stay as they were written: other expanders, or another ``n``, read the same storage. Rewards are summed in double
    precision. ``steps_to_next_obs``, ``gamma`` and ``original_reward`` are the names that TorchRL's ``MultiStepTransform``
    writes. Unlike there they are ``[B, 1]``, as rewards are; ``done``, ``terminated`` and ``truncated`` are those of the last step that
    is summed; and there is no ``nonterminal``, as it is false for every return of one step.

    Args:
        sampler: what draws the rows: a sampler, also of slices, a class of one, or another expander.
        n: steps, at least 1.
        gamma: discount in [0, 1].
        reward_key: float32 or float64 field of any shape.
        next_keys: fields that come from the last step; each names a field, or all below it.
        traj_key: field that is constant within a trajectory. Default ``("collector", "traj_ids")``, else ``"episode"``, if one is
            stored and no ``end_keys`` are given.
        end_keys: fields that are not zero at the last step of a trajectory; those that are not stored are skipped. Default
            ``("next", "done")``, ``("next", "terminated")`` and ``("next", "truncated")``. They count beside a ``traj_key``, too.
            Step types are understood as by :class:`SliceSampler`.
        index: name of the store's table of trajectories, ``"main"`` by default; slice samplers of the same name share it. Around one
            of those, keys and name are its own, if none of them is given.

    Raises:
        TypeError: no sampler, or one of slices with static boundaries; arguments of the wrong type.
        ValueError: ``n`` or ``gamma`` out of range; other boundaries than those of an expander inside.

    Raises (when it meets a storage, or when drawing):
        RuntimeError: a storage that is a list or on an accelerator; rows without keys; neither ids nor end flags.
        KeyError: no such field. TypeError: a reward that is neither float32 nor float64.
        IncompatibleStore: ``index`` is the name of a table with other boundaries.
        WriterStalled: a row, or a step around it, moved at every try for 5 s.

    Cost: a draw of ``B`` rows reads ``B * n`` rewards and flags besides the rows. The first one looks at every row once, and
    every write notes where trajectories end, as for slice samplers: 16 bytes per row.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, NStep, RandomSampler, TensorDictReplayBuffer
    >>> steps = TensorDict({"obs": torch.arange(4), "next": {"obs": torch.arange(1, 5), "reward": torch.ones(4, 1),
    ...     "done": torch.tensor([0, 0, 0, 1]).bool().unsqueeze(1)}}, batch_size=[4])
    >>> sampler = NStep(RandomSampler(), n=3, gamma=0.5)
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=64)
    >>> _ = rb.extend(steps)
    >>> batch = rb.sample()
    >>> first = batch[batch["obs"] == 0][0]
    >>> float(first["next", "reward"]), int(first["next", "obs"]), float(first["gamma"])
    (1.75, 3, 0.125)
    """

    def __init__(
        self,
        sampler: Any,
        n: int,
        gamma: float,
        *,
        reward_key: Any = ("next", "reward"),
        next_keys: Sequence[Any] = ("next",),
        traj_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        index: str | None = None,
    ) -> None:
        self.n = check_count("NStep: n", n)
        self.gamma = check_discount("NStep: gamma", gamma)
        self.reward_key = as_path(reward_key, "NStep: reward_key") or ("next", "reward")
        self.next_keys = as_paths(next_keys, "NStep: next_keys") or ()
        super().__init__(sampler, traj_key=traj_key, end_keys=end_keys, index=index)
        if any(isinstance(inner, NStep) for inner in self.inside):
            raise TypeError("NStep: sampler: expected one without returns of several steps, got an NStep inside.")

    def change(self, reading: Reading) -> None:
        ahead, reward = self.n - 1, reading.number_of_reward(self.reward_key, "NStep")
        for key in self.next_keys:
            below = [number for path, number in reading.numbers.items() if path[: len(key)] == key and number != reward]
            if not below:
                if key == ("next",):
                    continue
                reading.number(key, "NStep: next_keys")
            for number in below:
                reading.columns[number] = reading.columns[number]._replace(ahead=ahead)
        reading.columns[reward] = Column("sum", reward, ahead, self.gamma)
        reading.add((*self.reward_key[:-1], "original_reward"), Column("row", reward), "NStep")
        reading.add(("steps_to_next_obs",), Column("steps", ahead=ahead), "NStep")
        reading.add(("gamma",), Column("discount", ahead=ahead, gamma=self.gamma), "NStep")

    def config(self) -> dict[str, Any]:
        more = {
            "n": self.n,
            "gamma": self.gamma,
            "reward_key": plain(self.reward_key),
            "next_keys": [plain(key) for key in self.next_keys],
        }
        return {**super().config(), **more}
