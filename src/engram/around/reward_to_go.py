"""The return that is still to come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram.around.expander import Expander, check_discount
from engram.around.reading import TO_THE_END, Column
from engram.field_paths import as_path

if TYPE_CHECKING:
    from engram.around.reading import Reading
    from engram.types import Sampler


class RewardToGo(Expander):
    """Adds to every sampled step the discounted sum of the rewards from it to the end of its trajectory.

    Let ``t`` be the drawn row and ``T`` the last stored step of its trajectory. A batch then has::

        reward_to_go            sum of gamma ** i * reward[t + i] for i in 0 ... T - t, as reward: [B, ...]
        reward_to_go_complete   whether the trajectory ends with T, bool [B, 1]

    Of a trajectory that is still being written, only a part of the return is known. The flag is false there, and
    becomes true when the end is written. It is true if ``T`` has an end flag, also of a truncation, or if another
    trajectory follows. The rewards are the stored ones, even if an :class:`NStep` inside changes them. (Return: Sutton
    and Barto 2018, eq. 3.8; as an input: Chen et al., "Decision Transformer", NeurIPS 2021.)

    Args:
        sampler: draws the rows: a sampler (also of slices), a sampler class, or another expander.
        gamma: discount in [0, 1].
        reward_key: a field of floats, integers or bools, of any shape. Summed in double precision; the sums are float32, those of
            float64 are float64.
        out_key: the name of the sum. The name of the flag is the same followed by ``_complete``.
        steps_key: the name of an entry with the number of summed steps, ``T - t + 1``, int64 ``[B, 1]``. Default: there is none.
        traj_key, end_keys, index, end_when: as for :class:`NStep`.

    Raises: as :class:`NStep`. When drawing also
        ValueError: the rows have a field with the name of the sum or of the steps.

    Cost: O(steps from the drawn rows to the ends of their trajectories) for a batch. Their rewards and flags are read,
    with 30 bytes of memory for each of 2 ** 18 of them, or of one trajectory if that is longer. Writers wait while so
    many are listed (about a millisecond for 10^5).

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, RandomSampler, RewardToGo, TensorDictReplayBuffer
    >>> steps = TensorDict({"step": torch.arange(3), "next": {"reward": torch.tensor([[1.0], [2.0], [3.0]]),
    ...     "done": torch.tensor([[False], [False], [True]])}}, batch_size=[3])
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=RewardToGo(RandomSampler()), batch_size=64)
    >>> _ = rb.extend(steps)
    >>> batch = rb.sample()
    >>> batch["reward_to_go"][batch["step"] == 1].unique(), bool(batch["reward_to_go_complete"].all())
    (tensor([5.]), True)
    """

    noted: tuple[str, ...] = ("gamma", "reward_key", "out_key")

    def __init__(
        self,
        sampler: Sampler | type[Sampler],
        gamma: float = 1.0,
        *,
        reward_key: object = ("next", "reward"),
        out_key: object = "reward_to_go",
        steps_key: object = None,
        traj_key: object = None,
        end_keys: object = None,
        index: str | None = None,
        end_when: str | None = None,
    ) -> None:
        self.gamma = check_discount("RewardToGo: gamma", gamma)
        self.reward_key = as_path(reward_key, "RewardToGo: reward_key") or ("next", "reward")
        self.out_key = as_path(out_key, "RewardToGo: out_key") or ("reward_to_go",)
        self.steps_key = as_path(steps_key, "RewardToGo: steps_key")
        if self.steps_key is not None:
            self.noted = (*self.noted, "steps_key")
        super().__init__(sampler, traj_key=traj_key, end_keys=end_keys, index=index, end_when=end_when)

    def change(self, reading: Reading) -> None:
        reward = reading.number_of_reward(self.reward_key, "RewardToGo")
        reading.add(self.out_key, Column("sum", reward, TO_THE_END, self.gamma), "RewardToGo")
        complete = (*self.out_key[:-1], f"{self.out_key[-1]}_complete")
        reading.add(complete, Column("over", reward, TO_THE_END), "RewardToGo")
        if self.steps_key is not None:
            reading.add(self.steps_key, Column("steps", reward, TO_THE_END), "RewardToGo")
