"""What the agent computes, and entries of infos, go into the rows of recorded environments. The oracle is lists of what was said."""

import signal

import dm_env
import gymnasium
import numpy as np
import pytest
import torch
from dm_env import specs
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from pettingzoo import ParallelEnv
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from tests import fresh
from tests.env.tales import TaleEnv, rows_of

MODES = list(AutoresetMode)
KINDS = [ReplayBuffer, TensorDictReplayBuffer]


def mask_of(seen):
    """What a tale allows in a state."""
    return np.array([sum(seen) % 2, seen[2] % 3 == 0, seen[1] % 2], np.int8)


class Masked(gymnasium.Wrapper):
    """A tale whose infos hold a mask of every state, and the discount of every step."""

    def reset(self, **arguments):
        observation, _ = super().reset(**arguments)
        return observation, {"action_mask": mask_of(self.unwrapped.tale.seen), "deep": {"step": 0}}

    def step(self, action):
        *result, _ = super().step(action)
        seen = self.unwrapped.tale.seen
        info = {"action_mask": mask_of(seen), "discount": 0.5 + seen[2] / 64, "deep": {"step": seen[2]}}
        return *result, info


STORE = {"log_prob": 0.0, "state": {"h": torch.zeros(3), "n": np.zeros((), np.int16)}}
INFO_KEYS = {
    "action_mask": np.zeros(3, np.int8),
    ("next", "action_mask"): np.zeros(3, np.int8),
    ("next", "discount"): np.float64(1),
    ("next", "deep", "step"): 0,
}


def noted(at, which):
    """What the agent computes for the step ``at`` of an environment."""
    return {"log_prob": -at - which / 4, "state": {"h": [at, which, at * which], "n": at * 10 + which}}


def check(rb, lane, tale, actions):
    """The rows of a lane hold what was noted with their actions, and what the infos said of their states."""
    rows, log = rows_of(rb, lane), tale.log
    assert rows == log
    length = rb.storage.max_size // rb.lanes
    data = rb[range(lane * length, lane * length + len(log))]
    for i, step in enumerate(log):
        at = actions[lane].index(step["action"])
        expected = noted(at, lane)
        assert float(data["log_prob"][i]) == expected["log_prob"]
        assert data["state"]["h"][i].tolist() == expected["state"]["h"]
        assert int(data["state"]["n"][i]) == expected["state"]["n"]
        assert data["action_mask"][i].tolist() == mask_of(step["observation"]).tolist()
        assert data["next"]["action_mask"][i].tolist() == mask_of(step["next"]).tolist()
        assert float(data["next"]["discount"][i]) == 0.5 + step["next"][2] / 64
        assert int(data["next"]["deep"]["step"][i]) == step["next"][2]
    assert len(log) > 3


def numpy_of(many):
    return {
        "log_prob": np.array([one["log_prob"] for one in many]),
        "state": {
            "h": np.array([one["state"]["h"] for one in many], np.float32),
            "n": np.array([one["state"]["n"] for one in many], np.int16),
        },
    }


def tensors_of(many):
    values = numpy_of(many)
    state = {key: torch.from_numpy(value) for key, value in values["state"].items()}
    return {
        "log_prob": torch.from_numpy(values["log_prob"]).float().requires_grad_(),
        "state": TensorDict(state, [len(many)]),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("told", [numpy_of, tensors_of])
@pytest.mark.parametrize("mode", MODES)
def test_a_vector(mode, told, kind):
    lengths = [[1, 4], [3], [2, 5]]
    makers = [lambda i=i, one=one: Masked(TaleEnv(i, one)) for i, one in enumerate(lengths)]
    rb = kind(storage=LazyTensorStorage(600, lanes=3))
    env = rb.record(SyncVectorEnv(makers, autoreset_mode=mode), store=STORE, info_keys=INFO_KEYS)
    over, actions = np.zeros(3, bool), [[], [], []]
    env.reset()
    for at in range(30):
        if at == 17:
            env.reset()
            over[:] = False
        if mode is AutoresetMode.DISABLED and over.any():
            env.reset(options={"reset_mask": over.copy()})
        action = 3 * at + np.arange(3)
        for lane in range(3):
            actions[lane].append(int(action[lane]))
        values = told([noted(at, lane) for lane in range(3)])
        rb.note(**values)
        for leaf in (values["log_prob"], values["state"]["h"]):  # it was copied
            leaf.detach().zero_() if isinstance(leaf, torch.Tensor) else leaf.fill(0)
        _, _, terminated, truncated, _ = env.step(action)
        over = terminated | truncated
    for lane, one in enumerate(env.unwrapped.envs):
        check(rb, lane, one.unwrapped.tale, actions)


@pytest.mark.parametrize("kind", KINDS)
def test_one_environment(kind):
    rb = kind(storage=LazyTensorStorage(100))
    env = rb.record(Masked(TaleEnv(0, [3, 1, 5])), store=STORE, info_keys=INFO_KEYS)
    over, actions = True, [[]]
    for at in range(30):
        if over or at == 17:
            env.reset()
        actions[0].append(at)
        rb.note(log_prob=noted(at, 0)["log_prob"])
        rb.note({("state", "h"): torch.tensor(noted(at, 0)["state"]["h"])}, state={"n": at * 10})
        *_, terminated, truncated, _ = env.step(at)
        over = terminated or truncated
    check(rb, 0, env.unwrapped.tale, actions)


def test_other_processes_say_the_same():
    """The infos of an ``AsyncVectorEnv`` are those of a ``SyncVectorEnv``."""
    found = []
    for kind in (SyncVectorEnv, AsyncVectorEnv):
        rb = ReplayBuffer(storage=LazyTensorStorage(200, lanes=2))
        vector = kind([lambda: Masked(TaleEnv(0, [2])), lambda: Masked(TaleEnv(1, [3]))], autoreset_mode="SameStep")
        env = rb.record(vector, info_keys=INFO_KEYS)
        env.reset()
        for at in range(12):
            env.step(np.array([at, at]))
        env.close()
        found.append(rb[[*range(12), *range(100, 112)]])
    assert torch.equal(found[0]["next"]["discount"], found[1]["next"]["discount"])
    assert torch.equal(found[0]["action_mask"], found[1]["action_mask"])


class Discounted(dm_env.Environment):
    """Three steps, whose discounts fall."""

    def reset(self):
        self.at = 0
        return dm_env.restart(np.zeros(1, np.float32))

    def step(self, action):
        self.at += 1
        observation = np.full(1, self.at, np.float32)
        if self.at == 3:
            return dm_env.truncation(1.0, observation, discount=0.25)
        return dm_env.transition(1.0, observation, discount=1 - self.at / 8)

    def observation_spec(self):
        return specs.Array((1,), np.float32)

    def action_spec(self):
        return specs.DiscreteArray(9)


def test_discounts_of_dm_env():
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    env = rb.record(Discounted(), store={"value": np.zeros(2)}, info_keys={("next", "discount"): np.float32(1)})
    for at in range(7):
        if at % 3 == 0:
            env.reset()
        rb.note(value=[at, -at])
        env.step(at)
    assert rb[:]["next"]["discount"].tolist() == [0.875, 0.75, 0.25, 0.875, 0.75, 0.25, 0.875]
    assert rb[:]["value"].tolist() == [[at, -at] for at in range(7)]


class Agents(ParallelEnv):
    """Two agents with masks; the second leaves after two steps."""

    metadata = {"name": "masked_v0"}
    possible_agents = ["a", "b"]

    def observation_space(self, agent):
        return spaces.Box(0, 9, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(9)

    def _told(self):
        seen = {agent: np.full(1, self.at, np.float32) for agent in self.agents}
        return seen, {agent: {"mask": np.array([self.at, agent == "b"], np.int64)} for agent in self.agents}

    def reset(self, seed=None, options=None):
        self.agents, self.at = ["a", "b"], 0
        return self._told()

    def step(self, actions):
        self.at += 1
        seen, infos = self._told()
        ends = {agent: agent == "b" and self.at == 2 for agent in self.agents}
        result = seen, dict.fromkeys(self.agents, 0.0), ends, dict.fromkeys(self.agents, False), infos
        self.agents = [agent for agent in self.agents if not ends[agent]]
        return result


def test_agents_of_pettingzoo():
    rb = ReplayBuffer(storage=LazyTensorStorage(20, lanes=2))
    keys = {"mask": np.zeros(2, np.int64), ("next", "mask"): np.zeros(2, np.int64)}
    env = rb.record(Agents(), store={"who": 0}, info_keys=keys)
    env.reset()
    for _ in range(4):
        rb.note(who=torch.tensor([7, 8]))
        env.step(dict.fromkeys(env.agents, 1))
    for lane, rows in enumerate((range(4), range(10, 12))):
        data = rb[rows]
        assert data["who"].tolist() == [7 + lane] * len(rows)
        assert data["mask"].tolist() == [[at, lane] for at in range(len(rows))]
        assert data["next"]["mask"].tolist() == [[at + 1, lane] for at in range(len(rows))]


# ---- what is refused -----------------------------------------------------------------------------------------------------


def recorded(n=2, lengths=(9,), **arguments):
    rb = ReplayBuffer(storage=LazyTensorStorage(40 * n, lanes=n))
    env = rb.record(SyncVectorEnv([lambda: Masked(TaleEnv(0, lengths))] * n), **arguments)
    env.reset()
    return rb, env


def test_a_step_without_a_note_is_not_taken():
    rb, env = recorded(store={"log_prob": 0.0, "value": 0.0})
    rb.note(log_prob=np.zeros(2))
    with pytest.raises(
        RuntimeError, match=r"step: expected rb.note\(log_prob=…, value=…\) before it.* none of \['value'\]"
    ):
        env.step(np.array([1, 1]))
    assert [len(one.unwrapped.tale.log) for one in env.unwrapped.envs] == [0, 0]
    rb.note(value=np.ones(2))  # the other one is still there
    env.step(np.array([2, 2]))
    with pytest.raises(RuntimeError, match=r"none of \['log_prob', 'value'\]"):
        env.step(np.array([3, 3]))
    assert rb[[0, 40]]["value"].tolist() == [1, 1]
    assert len(rb) == 2


def test_a_step_that_only_resets_needs_none_and_forgets_them():
    rb, env = recorded(1, (1,), store={"log_prob": 0.0})
    rb.note(log_prob=np.array([5.0]))
    env.step(np.array([1]))
    env.step(np.array([2]))
    rb.note(log_prob=np.array([6.0]))
    env.step(np.array([3]))
    rb.note(log_prob=np.array([7.0]))
    env.step(np.array([4]))
    with pytest.raises(RuntimeError, match="step: expected rb.note"):
        env.step(np.array([5]))
    assert rb[:]["log_prob"].tolist() == [5, 6]


def test_a_note_does_not_outlive_a_reset():
    """It answers to what was observed before."""
    rb = ReplayBuffer(storage=LazyTensorStorage(9))
    env = rb.record(Masked(TaleEnv(0, [9])), store={"value": 0.0, "log_prob": 0.0})
    env.reset()
    rb.note(value=1.0, log_prob=1.0)
    env.step(1)
    rb.note(value=2.0)
    env.reset()
    rb.note(log_prob=3.0)
    with pytest.raises(RuntimeError, match=r"none of \['value'\]"):
        env.step(2)
    assert rb[:]["value"].tolist() == [1]


@pytest.mark.parametrize("mask", [[True, True], [False, True]])
def test_a_note_does_not_outlive_a_reset_of_some(mask):
    rb = ReplayBuffer(storage=LazyTensorStorage(40, lanes=2))
    makers = [lambda: Masked(TaleEnv(0, [9]))] * 2
    env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    env = rb.record(env, store={"value": 0.0, "log_prob": 0.0})
    env.reset()
    rb.note(value=np.ones(2))
    env.reset(options={"reset_mask": np.array(mask)})
    rb.note(log_prob=np.ones(2))
    with pytest.raises(RuntimeError, match=r"none of \['value'\]"):
        env.step(np.array([1, 1]))
    assert len(rb) == 0


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        (
            {"probability": 0.0},
            KeyError,
            r"note: expected fields .* some of \['log_prob', 'count'\], got 'probability'",
        ),
        ({"log_prob": {"a": 0.0}}, KeyError, r"got \('log_prob', 'a'\)"),
        ({"log_prob": np.zeros((2, 1))}, ValueError, r"note: 'log_prob': expected shape \[2\], .* got \[2, 1\]"),
        ({"log_prob": 0.0}, ValueError, r"expected shape \[2\], .* got \[\]"),
        ({"count": np.array([0.5, 1])}, TypeError, r"expected int64, as record\(store=…\) says, got float64"),
        ({"log_prob": "much"}, TypeError, "expected float32"),
    ],
)
def test_notes_that_cannot_be(values, error, said):
    rb, env = recorded(store={"log_prob": 0.0, "count": 0})
    with pytest.raises(error, match=said):
        rb.note(**{"count": np.array([1, 2]), **values})
    with pytest.raises(RuntimeError, match=r"none of \['log_prob', 'count'\]"):  # nothing was kept
        env.step(np.array([1, 1]))


def test_a_note_to_nobody():
    with pytest.raises(KeyError, match=r"fields of record\(env, store=…\), some of \[\], got 'log_prob'"):
        ReplayBuffer(storage=LazyTensorStorage(9)).note(log_prob=1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"store": {"a": "text"}}, TypeError, "record: store: 'a': expected an example: numbers"),
        ({"store": ["a"]}, TypeError, "record: store: expected a dict of examples by name, got list"),
        ({"info_keys": ["action_mask"]}, TypeError, "record: info_keys: expected a dict of examples by name"),
        ({"store": {"action": 0.0}}, ValueError, "collide"),
        ({"store": {"a": 0.0}, "info_keys": {"a": 0.0}}, ValueError, "collide"),
        ({"store": {1.5: 0.0}}, TypeError, "record: store: expected a string"),
    ],
)
def test_declarations_that_cannot_be(arguments, error, said):
    rb = ReplayBuffer(storage=LazyTensorStorage(9))
    with pytest.raises(error, match=said):
        rb.record(TaleEnv(), **arguments)
    assert not rb.initialized or len(rb) == 0


def test_infos_that_lack_an_entry():
    rb, env = recorded(info_keys={("next", "mask"): np.zeros(3, np.int8)})
    with pytest.raises(
        KeyError, match=r"step: infos\['mask'\]: expected this entry, .* got \['action_mask', 'discount', 'deep'\]"
    ):
        env.step(np.array([1, 1]))
    assert len(rb) == 0


def test_infos_that_only_some_have():
    rb = ReplayBuffer(storage=LazyTensorStorage(80, lanes=2))
    env = rb.record(
        SyncVectorEnv([lambda: Masked(TaleEnv(0, [9])), lambda: TaleEnv(1, [9])]), info_keys={("next", "discount"): 0.0}
    )
    env.reset()
    with pytest.raises(KeyError, match=r"expected it of all environments, got it of \[0\]"):
        env.step(np.array([1, 1]))


def test_an_info_of_another_shape():
    _, env = recorded(info_keys={("next", "action_mask"): np.zeros(4, np.int8)})
    with pytest.raises(
        ValueError, match=r"infos\['action_mask'\]: expected shape \[2, 4\], as record\(info_keys=…\) says"
    ):
        env.step(np.array([1, 1]))


# ---- the memory of prepared rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_transform_keeps_is_not_written_again(kind, n):
    kept = []

    def keep(rows):
        kept.append(rows)
        return rows

    rb = kind(storage=LazyTensorStorage(40 * n, lanes=n))
    env = rb.record(TaleEnv(0, [99]) if n == 1 else SyncVectorEnv([lambda: TaleEnv(0, [99])] * n))
    env.reset()
    for at in range(5):
        env.step(at if n == 1 else np.full(n, at))
    rb.append_transform(keep, invert=True)
    for at in range(5, 12):
        env.step(at if n == 1 else np.full(n, at))
    assert [int(rows["observation"].reshape(-1)[2]) for rows in kept] == list(range(5, 12))
    assert [int(rows["action"].reshape(-1)[0]) for rows in kept] == list(range(5, 12))
    assert rb[range(12)]["observation"][:, 2].tolist() == list(range(12))


def test_observations_of_another_shape_are_refused_and_not_stretched():
    class Shrinking(gymnasium.Wrapper):
        def step(self, action):
            observation, *rest = super().step(action)
            return observation[:1] if action == 3 else observation, *rest

    rb = ReplayBuffer(storage=LazyTensorStorage(40))
    env = rb.record(Shrinking(TaleEnv(0, [99])))
    env.reset()
    for at in range(3):
        env.step(at)
    with pytest.raises(RuntimeError, match="observation"):
        env.step(3)
    assert len(rb) == 3


# ---- after a kill --------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal
import numpy as np
from gymnasium.vector import SyncVectorEnv
from engram import LazyMemmapStorage, ReplayBuffer
from tests.env.tales import TaleEnv
from tests.env.test_notes import INFO_KEYS, STORE, Masked, noted, numpy_of

rb = ReplayBuffer(storage=LazyMemmapStorage(400, lanes=2, scratch_dir=directory))
env = rb.record(SyncVectorEnv([lambda: Masked(TaleEnv(0, [3, 9])), lambda: Masked(TaleEnv(1, [5]))]), store=STORE, info_keys=INFO_KEYS)
env.reset()
for at in range(40):
    rb.note(**numpy_of([noted(at, 0), noted(at, 1)]))
    env.step(np.array([2 * at, 2 * at + 1]))
rb.note(**numpy_of([noted(40, 0), noted(40, 1)]))  # of a step that never comes
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_and_opened_again(tmp_path):
    program = fresh.start(KILLED, directory=str(tmp_path / "store"))
    assert program.wait() == -signal.SIGKILL
    same = SyncVectorEnv([lambda: Masked(TaleEnv(0, [3, 9])), lambda: Masked(TaleEnv(1, [5]))])
    same.reset()
    for at in range(40):
        same.step(np.array([2 * at, 2 * at + 1]))
    rb = ReplayBuffer.open(tmp_path / "store")
    actions = [[2 * at + lane for at in range(40)] for lane in range(2)]
    for lane, one in enumerate(same.envs):
        check(rb, lane, one.unwrapped.tale, actions)
    env = rb.record(TaleEnv(0, [5]), lane=0, store=STORE, info_keys={})  # rows need the same fields
    env.reset()
    rb.note(**noted(0, 0))
    with pytest.raises((KeyError, RuntimeError), match="action_mask"):
        env.step(1)
    rb.close()
