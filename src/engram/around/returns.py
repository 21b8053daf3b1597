"""Returns of several steps, summed when a row is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram._support.field_paths import as_path, as_paths
from engram.around.expander import Expander, check_discount, check_steps
from engram.around.reading import TO_THE_END, Column

if TYPE_CHECKING:
    from engram._support.field_paths import FieldPath
    from engram.around.reading import Reading
    from engram.types import Sampler


class NStep(Expander):
    """Turns every sampled step into one of ``n`` steps: sums rewards and takes the observation ``n`` steps later.

    Let ``t`` be the drawn row, and ``k`` the number of steps from ``t`` (included) to the ``n``-th, to the last step of
    its trajectory, or to the newest step of its lane, whichever comes first: ``1 <= k <= n``. A batch then has,
    ``[B, ...]``::

        reward              sum of gamma ** i * reward[t + i] for i in 0 ... k - 1
        next.*              that of step t + k - 1: observation, done, terminated, truncated
        next_obs, obs_next  the same, whatever begins with next_ or ends with _next, at any depth
        done, terminated    the same, where these flags, truncated and end_keys are stored beside the observation only
        steps_to_next_obs   k, int64 [B, 1]
        gamma               gamma ** k, float32 [B, 1]
        original_reward     reward[t], next to the reward

    The target of a value function is ``reward + gamma * ~next.terminated * V(next.observation)``. Nothing is
    summed across the end of a trajectory. At a termination, ``V`` has no weight. At a truncation, and at the newest
    row, ``k`` is smaller, and the discount ``gamma ** k`` keeps the target exact. (Sutton 1988, n-step returns; Hessel
    et al., "Rainbow", AAAI 2018; Pardo et al., "Time limits in reinforcement learning", ICML 2018, on truncation.) The
    last rows of a lane can be drawn at once; their returns grow longer when more rows are written.

    Rows stay as they were written, so other expanders, or another ``n``, can read the same storage. Rewards are summed
    in double precision. ``steps_to_next_obs``, ``gamma`` and ``original_reward`` are the names of TorchRL's
    ``MultiStepTransform``. Unlike there, they are ``[B, 1]``, as rewards are (in batches of
    dicts ``[B]``, where rewards are); ``done``, ``terminated`` and ``truncated`` are those of the last summed step; and
    there is no ``nonterminal``, which would be false for every return of one step.

    Args:
        sampler: draws the rows: a sampler (also of slices), a sampler class, or another expander.
        n: number of steps, at least 1.
        gamma: discount in [0, 1].
        reward_key: a field of floats, integers or bools, of any shape. Sums are float32, those of float64 are float64.
        next_keys: the fields to take from the last step, beside the flags; each names a field, or all fields below it, and ``"next"``
            also those that are called so, as above. Name next observations that are called otherwise: ``["obs2"]``.
        traj_key: a field that is constant within a trajectory. Default: ``("collector", "traj_ids")``, ``"traj_ids"`` or
            ``"episode"``, the first that is stored.
        end_keys: fields that are nonzero at the last step of a trajectory, which ends there also where its id comes again. Those that
            are not stored are skipped; an empty list: ids alone count. Default: as for :class:`SliceSampler`.
        index: the name of the store's trajectory table, ``"main"`` by default; slice samplers of the same name share
            it. Around a slice sampler, keys and name are those of the slice sampler, if none is given.
        end_when: of flags of which a step has several, ``[B, agents, 1]``: ``"any"``, the default, ends the trajectory where one of a
            field's is set, ``"all"`` where all of one field's are.

    Raises:
        TypeError: ``sampler`` is not a sampler, or a slice sampler with static boundaries; an argument has the wrong
            type.
        ValueError: ``n`` or ``gamma`` is out of range; the boundaries differ from those of an expander inside.

    Raises (when a buffer takes it, or when drawing):
        RuntimeError: the storage is a list or on an accelerator; rows have no keys; there are neither ids nor end
            flags.
        KeyError: a field is not stored.
        TypeError: the reward is complex, or of 8 bits in floating point.
        IncompatibleStore: ``index`` names a table with other boundaries.
        WriterStalled: for 5 s, a row or a step around it was rewritten at every attempt.

    Cost: drawing ``B`` rows also reads ``B * n`` rewards and flags. The first draw scans every row once, and every
    write records where trajectories end, as for slice samplers: 16 bytes per row.

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

    noted = ("n", "gamma", "reward_key", "next_keys")

    def __init__(
        self,
        sampler: Sampler | type[Sampler],
        n: int,
        gamma: float,
        *,
        reward_key: object = ("next", "reward"),
        next_keys: object = ("next",),
        traj_key: object = None,
        end_keys: object = None,
        index: str | None = None,
        end_when: str | None = None,
    ) -> None:
        self.n = check_steps("NStep: n", n)
        self.gamma = check_discount("NStep: gamma", gamma)
        self.reward_key = as_path(reward_key, "NStep: reward_key") or ("next", "reward")
        self.next_keys = as_paths(next_keys, "NStep: next_keys") or ()
        if isinstance(sampler, Expander) and any(isinstance(inner, NStep) for inner in sampler.chain):
            raise TypeError("NStep: sampler: expected one without returns of several steps, got an NStep inside.")
        super().__init__(sampler, traj_key=traj_key, end_keys=end_keys, index=index, end_when=end_when)

    @property
    def changed(self) -> tuple[FieldPath, ...]:
        return (self.reward_key,)

    def change(self, reading: Reading) -> None:
        ahead, reward = self.n - 1, reading.number_of_reward(self.reward_key, "NStep")
        moved = set(reading.flags(self.rules))
        for key in self.next_keys:
            found = reading.below(key)
            if key == ("next",):
                found += reading.of_next_step()
            elif not found:
                reading.number(key, "NStep: next_keys")
            moved.update(found)
        for number in moved - {reward}:
            reading.columns[number] = reading.columns[number]._replace(ahead=ahead)
        reading.columns[reward] = Column("sum", reward, ahead, self.gamma)
        reading.add((*self.reward_key[:-1], "original_reward"), Column("row", reward), "NStep")
        reading.add(("steps_to_next_obs",), Column("steps", reward, ahead), "NStep")
        reading.add(("gamma",), Column("discount", reward, ahead, self.gamma), "NStep")


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
