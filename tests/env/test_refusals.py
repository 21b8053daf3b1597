"""What cannot be recorded is refused before anything is written; libraries of environments are imported by nobody else."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from engram import ImmutableDatasetWriter, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from tests import fresh
from tests.env.tales import TaleEnv


def buffer(lanes=1, kind=ReplayBuffer):
    return kind(storage=LazyTensorStorage(40 * lanes, lanes=lanes))


def vector(n=2):
    return SyncVectorEnv([TaleEnv] * n)


@pytest.mark.parametrize(("lanes", "lane"), [(1, None), (3, None), (3, 1), (3, [0, 0]), (3, [0, 1, 2]), (4, "each")])
def test_lanes_that_are_not_one_per_environment(lanes, lane):
    rb = buffer(lanes)
    with pytest.raises(
        ValueError, match=r"record: lane: expected a lane of its own for each of 2 environments, got .*lanes=2"
    ):
        rb.record(vector(), lane=lane)


def test_one_environment_and_several_lanes():
    with pytest.raises(ValueError, match=r"each of 1 environments, got \[0, 1\].* with lane="):
        buffer(2).record(TaleEnv())


@pytest.mark.parametrize("made", [TaleEnv, lambda: vector(1)], ids=["single", "vector"])
def test_environments_of_one_lane_take_turns_by_whole_episodes(made):
    rb = buffer()
    envs = [rb.record(made()) for _ in range(3)]
    action = np.array([3])[..., 0] if made is TaleEnv else np.array([3])
    for at in (2, 0, 1, 0, 1):  # each leaves an episode open
        envs[at].reset()
        envs[at].step(action)
        envs[at].step(action)
        del envs[2:]  # one that is dropped, too
    assert rb["next", "truncated"].flatten().tolist() == [False, True] * 4 + [False, False]
    with pytest.raises(RuntimeError, match=r"step: another environment .* lanes \[0\] was reset after .*lanes=n"):
        envs[0].step(action)
    envs[1].step(action)  # it goes on
    assert len(rb) == 11
    envs[0].reset()
    with pytest.raises(RuntimeError, match="was reset after this one"):
        envs[1].step(action)


def test_a_list_storage():
    with pytest.raises(TypeError, match=r"record: expected a LazyTensorStorage\(max_size, lanes=2\)"):
        ReplayBuffer(100).record(vector())


def test_columns():
    with pytest.raises(TypeError, match="got ndim=2"):
        ReplayBuffer(storage=LazyTensorStorage(40, ndim=2)).record(TaleEnv())


@pytest.mark.parametrize("env", [None, "CartPole-v1", gymnasium.make, object()], ids=lambda env: type(env).__name__)
def test_no_environment(env):
    with pytest.raises(TypeError, match=r"record: expected a gymnasium.Env .* got \w+\.\w+\."):
        buffer().record(env)


def test_a_read_only_buffer():
    rb = ReplayBuffer(storage=LazyTensorStorage(40), writer=ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="read-only"):
        rb.record(TaleEnv())


def test_a_vector_that_does_not_say_when_it_resets():
    env = vector()
    del env.metadata["autoreset_mode"]
    with pytest.raises(ValueError, match=r"expected env.metadata\['autoreset_mode'\] to be one of .* Set it"):
        buffer(2).record(env)


def test_the_same_step_without_final_observations():
    class Without(gymnasium.vector.VectorWrapper):
        def step(self, actions):
            return (*super().step(actions)[:4], {})

    env = buffer(1).record(Without(SyncVectorEnv([TaleEnv], autoreset_mode=AutoresetMode.SAME_STEP)))
    env.reset()
    for at in range(2):
        env.step(np.array([at]))
    with pytest.raises(RuntimeError, match=r"step: expected infos\['final_obs'\]"):
        env.step(np.array([2]))


def space_of(space):
    env = TaleEnv()
    env.observation_space = space
    return env


@pytest.mark.parametrize(
    ("space", "entry"),
    [
        (spaces.Text(5), "observation"),
        (spaces.Dict(a=spaces.Sequence(spaces.Discrete(3))), r"observation\['a'\]"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Graph(spaces.Box(0, 1), None)]), r"observation\[1\]"),
    ],
    ids=str,
)
def test_spaces_without_a_fixed_shape(space, entry):
    with pytest.raises(
        TypeError, match=f"record: {entry}: expected numbers of a fixed shape, got .* Wrap the environment"
    ):
        buffer().record(space_of(space))


def test_tuples_for_tensordicts():
    with pytest.raises(TypeError, match="a TensorDict holds no tuples"):
        buffer(kind=TensorDictReplayBuffer).record(TaleEnv(form="tuple"))


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (spaces.Box(0, 1, (3,), np.uint8), "observation: expected uint8, as the environment says, got float32"),
        (spaces.Dict(a=spaces.Discrete(3)), r"observation: expected a dict of \['a'\], got ndarray"),
        (spaces.Tuple([spaces.Discrete(3)]), "observation: expected a tuple of 1, got ndarray"),
    ],
    ids=str,
)
def test_observations_that_are_not_of_their_space(space, said):
    rb = buffer()
    env = rb.record(space_of(space))
    with pytest.raises(TypeError, match=f"record: {said}"):
        env.reset()
    assert len(rb) == 0


def test_fractions_as_a_discrete_action():
    rb = buffer()
    env = rb.record(TaleEnv())
    env.reset()
    with pytest.raises(TypeError, match="record: action: expected int64, as the environment says, got float64"):
        env.step(1.0)
    assert len(rb) == 0


def test_only_what_the_program_uses_is_imported():
    program = """
    import json, sys
    import engram

    used = ["gymnasium", "pettingzoo", "dm_env"]
    rb = engram.ReplayBuffer(storage=engram.LazyTensorStorage(10))
    try:
        rb.record(object())
    except TypeError:
        before = [name for name in used if name in sys.modules]
    import gymnasium
    rb.record(gymnasium.make("CartPole-v1"))
    print(json.dumps([before, [name for name in used if name in sys.modules]]))
    """
    assert json.loads(fresh.run(program)) == [[], ["gymnasium"]]
