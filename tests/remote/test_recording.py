"""Environments recorded into a store on a server."""

import gymnasium
import pytest

from engram import LazyMemmapStorage, ReplayBuffer, TensorDictReplayBuffer
from tests.serving.servers import serving


def play(env, seed, steps):
    """Two episodes, the second of which is left as it is."""
    env.reset(seed=seed)
    env.action_space.seed(seed)
    for _ in range(steps):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset(seed=seed + 1)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_steps_are_those_of_a_buffer_that_has_the_store(tmp_path, kind):
    def recorded(name):
        rb = kind(storage=LazyMemmapStorage(200, scratch_dir=tmp_path / name, lanes=2))
        play(rb.record(gymnasium.make("CartPole-v1"), lane=0), 1, 30)
        return rb

    with recorded("here") as here, recorded("there") as there:
        with serving(tmp_path / "there") as server, kind.connect(server.address) as remote:
            play(remote.record(gymnasium.make("CartPole-v1"), lane=1), 2, 30)
        play(here.record(gymnasium.make("CartPole-v1"), lane=1), 2, 30)
        assert len(here) == len(there) == 60
        ours, theirs = here[:], there[:]
        for key in ("observation", "action"):
            assert (ours[key] == theirs[key]).all(), key
        for key in ("observation", "reward", "terminated", "truncated"):
            assert (ours["next"][key] == theirs["next"][key]).all(), key


def test_an_open_episode_ends_when_another_one_is_recorded(tmp_path):
    with ReplayBuffer(storage=LazyMemmapStorage(200, scratch_dir=tmp_path / "store")) as rb:
        play(rb.record(gymnasium.make("CartPole-v1")), 1, 5)
        with serving(tmp_path / "store") as server, ReplayBuffer.connect(server.address) as remote:
            with pytest.raises(KeyError):
                remote.end_trajectory(roles={"nothing": "done"})
            assert remote.end_trajectory(roles={("next", "truncated"): "truncated"}).tolist() == [4]
            play(remote.record(gymnasium.make("CartPole-v1")), 2, 5)
        assert rb["next"]["truncated"].tolist()[:5] == [False] * 4 + [True]
