"""RLlib's episodes over a store. Its own buffers say what is right: each episode goes to one of them, too."""

import copy
import pickle

import numpy as np
import pytest

pytest.importorskip("ray.rllib")

import torch
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer as RLlibs
from ray.rllib.utils.replay_buffers import PrioritizedEpisodeReplayBuffer as TheirPrioritized

import engram
from engram.adapters.rllib import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer
from engram.errors import IncompatibleStore, PriorityError, StoreInUse
from tests import fresh
from tests.doors.rllib_steps import Rule, Runner, flat, same, steps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
COUNTS = (
    "get_num_episodes",
    "get_num_episodes_evicted",
    "get_num_timesteps",
    "get_added_timesteps",
    "get_sampled_timesteps",
)
KINDS = [EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer]


class Theirs(RLlibs):
    """RLlib's own. It reads one entry beyond its last one where it evicts the episode that was added last: here there is one."""

    @property
    def _indices(self):
        return self.entries

    @_indices.setter
    def _indices(self, entries):
        self.entries = Entries(entries)


class Entries(list):
    def __getitem__(self, at):
        return (None,) if isinstance(at, int) and at == len(self) else super().__getitem__(at)


def both(capacity=400, ours=EpisodeReplayBuffer, place=None, **how):
    theirs = Theirs if ours is EpisodeReplayBuffer else TheirPrioritized
    made = ours(capacity, **how, **(place or {})), theirs(capacity, **how)
    return seeded(*made, seed=1)


def place(where, tmp_path):
    return {"scratch_dir": tmp_path / "replay"} if where == "directory" else {}


def seeded(*buffers, seed):
    for buffer in buffers:
        buffer.rng = np.random.default_rng(seed)
    return buffers


def check(ours, theirs, **how):
    for one, other in zip(ours.sample(**how), theirs.sample(**how), strict=True):
        same(one, other)


def check_counts(ours, theirs):
    assert [getattr(ours, name)() for name in COUNTS] == [getattr(theirs, name)() for name in COUNTS]
    assert len(ours) == len(theirs) == len(ours.rb)
    assert [one.id_ for one in ours.episodes] == [one.id_ for one in theirs.episodes]


def check_metrics(ours, theirs):
    metrics, wanted = ours.get_metrics(), theirs.get_metrics()
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        values, others = (one if isinstance(one, dict) else {"": one} for one in (metrics[name], value))
        assert {key: one.peek() for key, one in values.items()} == {key: one.peek() for key, one in others.items()}, (
            name
        )


def check_draws(ours, theirs, extras):
    check(ours, theirs, num_items=16, n_step=1, sample_episodes=True)
    check(ours, theirs, batch_size_B=16, n_step=3, gamma=0.9, sample_episodes=True, to_numpy=True)
    check(ours, theirs, num_items=16, n_step=(1, 4), sample_episodes=True, include_extra_model_outputs=extras)
    if isinstance(theirs, TheirPrioritized):
        check(ours, theirs, num_items=16, n_step=2, beta=0.4, gamma=0.9)
        errors = np.random.default_rng(len(ours)).random(16) * 4
        for buffer in (ours, theirs):
            buffer.update_priorities(errors)
    else:
        check(ours, theirs, num_items=40, n_step=1, batch_length_T=5, lookback=1, sample_episodes=True)
        check(ours, theirs, n_step=1, batch_length_T=3, min_batch_length_T=2, sample_episodes=True, beta=0.5)


# ---- steps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["RAM", "directory"])
@pytest.mark.parametrize("kind", ["plain", "lists", "dict", "extras"])
@pytest.mark.parametrize("ours", KINDS)
def test_every_call_gives_what_rllibs_own_gives(ours, kind, where, tmp_path):
    ours, theirs = both(120, ours, place(where, tmp_path))
    runner = Runner(kind)
    for count in range(40):
        chunks = runner.chunks()
        before = [flat(one) for one in chunks]
        ours.add(chunks)
        for (about, values), (wanted, held) in zip(map(flat, chunks), before, strict=True):  # it does not change them
            assert about == wanted
            assert all(np.array_equal(value, held[path]) for path, value in values.items())
        theirs.add(chunks)
        check_counts(ours, theirs)
        if count % 5 == 4:
            for one, other in zip(ours.episodes, theirs.episodes, strict=True):
                same(one, other)
            check_draws(ours, theirs, kind == "extras")
    assert theirs.get_num_episodes_evicted() > 20
    check_metrics(ours, theirs)
    ours.close()


@pytest.mark.parametrize(
    "runner",
    [
        {"environments": 40, "most": 1, "over": 0.02},  # a step of each
        {"environments": 12, "most": 9, "over": 0.01, "longest": 90},  # the oldest episodes go on
        {"environments": 4, "most": 45, "over": 0.01, "longest": 50},  # nearly the capacity in a call
    ],
)
@pytest.mark.parametrize("ours", KINDS)
def test_chunks_of_many_environments_lie_between_each_other(ours, runner):
    """A call may bring more than there is room for, and steps of episodes that go for them."""
    ours, theirs = both(200, ours)
    runner = Runner(**runner)
    for count in range(80):
        chunks = runner.chunks()
        ours.add(chunks)
        theirs.add(chunks)
        check_counts(ours, theirs)
        if count % 8 == 7:
            for one, other in zip(ours.episodes, theirs.episodes, strict=True):
                same(one, other)
            check_draws(ours, theirs, False)
    assert theirs.get_num_episodes_evicted() > 20
    check_metrics(ours, theirs)


@pytest.mark.parametrize("where", ["RAM", "directory"])
@pytest.mark.parametrize("ours", KINDS)
def test_no_call_is_too_large(ours, where, tmp_path):
    """Steps of any number, of one episode or many: RLlib's own grows without end, or fails."""
    held = ours(64, **place(where, tmp_path))
    rule = Rule(64, ours is PrioritizedEpisodeReplayBuffer)
    rng = np.random.default_rng(3)
    alone = 0
    for seed in range(25):
        environments, most = ((1, 300), (1, 20), (3, 90), (30, 8), (6, 6))[seed % 5]
        runner = Runner(seed=seed, environments=environments, most=most, over=0.02 if environments < 4 else 0.2)
        runner.number = 1_000 * seed
        runner.open = [runner._new() for _ in range(environments)]
        for _ in range(int(rng.integers(1, 9))):
            chunks = runner.chunks()
            held.add(chunks)
            rule.add(chunks)
            assert {one.id_: steps(one) for one in held.episodes} == rule.held
            assert held.get_num_timesteps() == len(held.rb) == rule.total
            alone += len(rule.held) == 1 and rule.total >= 56
            for one in held.sample(32, n_step=1, sample_episodes=True):
                (number, t, _), (after, following, _) = one.get_observations()
                assert (after, following) == (number, t + 1)
                assert one.get_rewards(0) == pytest.approx(int(number) + t / 1000)
                assert t in [step[0] for step in rule.held[f"episode {int(number)}"]]
    assert alone > 5
    held.close()


def test_batches_of_dreamer():
    ours, theirs = both(batch_size_B=4, batch_length_T=8)
    runner = Runner("plain")
    for _ in range(30):
        chunks = runner.chunks()
        ours.add(chunks)
        theirs.add(chunks)
    for how in ({}, {"num_items": 6}, {"batch_size_B": 3, "batch_length_T": 20}):
        found, wanted = ours.sample(**how), theirs.sample(**how)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert np.array_equal(found[name], value), name


def test_samples_are_copies():
    ours, _ = both()
    runner = Runner("plain")
    for _ in range(5):
        ours.add(runner.chunks())
    held = ours.rb[:]["observation"].clone()
    for one in ours.sample(30, n_step=1, sample_episodes=True):
        for observed in one.get_observations():
            observed[:] = -1
    assert torch.equal(ours.rb[:]["observation"], held)


def test_what_is_left_out_is_not_stored():
    ours, theirs = both(place={"exclude": ["extra_model_outputs.state_out"]})
    chunks = Runner("extras").chunks()
    ours.add(chunks)
    theirs.add(chunks)
    for one, other in zip(ours.episodes, theirs.episodes, strict=True):
        assert set(one.extra_model_outputs) == {"logits"}
        assert np.array_equal(one.get_extra_model_outputs("logits"), other.get_extra_model_outputs("logits"))


# ---- directories ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "dict", "extras"])
@pytest.mark.parametrize("ours", KINDS)
def test_a_directory_goes_on(ours, kind, tmp_path):
    where = {"scratch_dir": tmp_path / "replay"}
    ours, theirs = both(150, ours, where)
    runner = Runner(kind)
    for _ in range(40):
        chunks = runner.chunks()
        ours.add(chunks)
        theirs.add(chunks)
    ours.close()
    ours = type(ours)(150, **where)
    assert ours.get_num_timesteps() == theirs.get_num_timesteps()
    for one, other in zip(ours.episodes, theirs.episodes, strict=True):
        other.is_truncated = not other.is_terminated  # what was open has ended
        same(one, other)
    again = type(theirs)(150)  # with its steps in the order of its episodes
    again.add(list(theirs.episodes))
    seeded(ours, again, seed=3)
    check_draws(ours, again, kind == "extras")
    runner = Runner(kind, seed=7)
    runner.number = 1_000
    runner.open = [runner._new() for _ in range(3)]
    for _ in range(20):
        chunks = runner.chunks()
        ours.add(chunks)
        again.add(chunks)
        assert ours.get_num_episodes() == again.get_num_episodes()
    check_draws(ours, again, kind == "extras")
    ours.close()
    with pytest.raises(IncompatibleStore, match=r"\w+: scratch_dir: expected steps of capacity=100"):
        type(ours)(100, **where)
    held = engram.ReplayBuffer.open(where["scratch_dir"])
    assert len(held) == again.get_num_timesteps()
    held.close()


DYING = """
from engram.adapters.rllib import {kind}
from tests.doors.rllib_steps import Runner

buffer, runner = {kind}(300, scratch_dir=folder), Runner("dict")
for count in range(10_000_000):
    buffer.add(runner.chunks())
    print(count)
"""


@pytest.mark.parametrize("least", [10, 90])
@pytest.mark.parametrize("ours", KINDS)
def test_a_process_is_killed_while_it_adds(tmp_path, ours, least):
    program = fresh.start(DYING.replace("{kind}", ours.__name__), folder=str(tmp_path / "replay"))
    program.until(f"\n{least}\n")
    with pytest.raises(StoreInUse, match=r"\w+: scratch_dir: .*replay' is in use, by another process"):
        ours(300, scratch_dir=tmp_path / "replay")
    program.kill()
    last = int(program.out.rsplit("\n", 1)[0].rsplit("\n", 1)[-1])
    held = ours(300, scratch_dir=tmp_path / "replay")
    runner, rule = Runner("dict"), Rule(300, ours is PrioritizedEpisodeReplayBuffer)
    for _ in range(last + 1):
        rule.add(runner.chunks())
    before = rule.names
    rule.add(runner.chunks())  # the call that was under way may have evicted and written some of its steps
    after = rule.names
    known = {step[1]: name for names in (before, after) for name, step in names.items()}
    found = {}
    for one in held.episodes:
        assert one.is_done
        here = steps(one)
        names = [known[step[1]] for step in here]  # with each byte
        assert len({name for name, _ in names}) == 1
        assert [t for _, t in names] == [step[0] for step in here] == [*range(one.t_started, one.t)]
        for name, step in zip(names, here, strict=True):
            wanted = after[name] if name in after else before[name]
            assert step[2] == wanted[2]
            assert step[3] == wanted[3] or step is here[-1]  # what was open has ended
            found[name] = step
    assert len(found) == held.get_num_timesteps() == len(held.rb)
    assert before.keys() & after.keys() <= found.keys()
    held.add(Runner("dict", seed=9).chunks())
    held.close()


# ---- states --------------------------------------------------------------------------------------------------------------


def filled(ours, capacity=200, where=None, calls=40):
    ours, theirs = both(capacity, ours, where)
    runner = Runner("dict")
    for count in range(calls):
        chunks = runner.chunks()
        for buffer in (ours, theirs):
            buffer.add(chunks)
            if isinstance(theirs, TheirPrioritized):
                buffer.sample(8, n_step=1)
                buffer.update_priorities(np.random.default_rng(count).random(8))
    return ours, theirs, runner


@pytest.mark.parametrize(
    ("theirs", "ours"), [(RLlibs, EpisodeReplayBuffer), (TheirPrioritized, PrioritizedEpisodeReplayBuffer)]
)
def test_a_state_of_one_episode_beyond_the_capacity_is_cut(theirs, ours):
    """RLlib's own buffer lets it grow."""
    kept, buffer = theirs(64), ours(64)
    for first in (0, 50):
        times = np.arange(first, first + 51, dtype=np.float32)
        said = {"observations": [*times[:, None]], "actions": [0] * 50, "rewards": [*times[:-1]]}
        kept.add(SingleAgentEpisode(id_="x", **said, len_lookback_buffer=0, t_started=first))
    buffer.set_state(kept.get_state())
    assert len(buffer.rb) == buffer.get_num_timesteps() == len(buffer._indices) == 56
    for one in buffer.sample(64, n_step=1, sample_episodes=True):
        assert one.get_observations(0)[0] == one.get_rewards(0) >= 44


@pytest.mark.parametrize("where", ["RAM", "directory"])
@pytest.mark.parametrize("ours", KINDS)
def test_states_go_from_and_to_rllibs_own(ours, where, tmp_path):
    first, theirs, runner = filled(ours, where=place(where, tmp_path))
    states = [pickle.loads(pickle.dumps(one.get_state())) for one in (first, theirs)]
    held = first.get_state()
    again = type(theirs)(200)
    again.set_state(states[0])
    second = ours(200)
    second.set_state(states[1])
    third = pickle.loads(pickle.dumps(ours(200)))
    third.set_state(held)
    if where == "directory":
        first.set_state(states[1])
    buffers = seeded(first, theirs, again, second, third, seed=4)
    for _ in range(20):
        chunks = runner.chunks()
        for buffer in buffers:
            buffer.add(chunks)
            assert buffer.get_num_timesteps() == first.get_num_timesteps()
    for buffer in buffers:
        if buffer is not theirs:
            theirs.rng = np.random.default_rng(6)
            buffer.rng = np.random.default_rng(6)
            for one, other in zip(buffer.episodes, theirs.episodes, strict=True):
                same(one, other)
            check(buffer, theirs, num_items=16, n_step=1, sample_episodes=True)
    first.close()
    if where == "directory":
        found = ours(200, **place(where, tmp_path))
        assert found.get_num_timesteps() == theirs.get_num_timesteps()
        if ours is PrioritizedEpisodeReplayBuffer:
            found = sorted(found._sum_segment[node] for _, _, node in found._indices)
            wanted = sorted(theirs._sum_segment[node] for _, _, node in theirs._indices)
            assert np.allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("where", ["RAM", "directory"])
@pytest.mark.parametrize("ours", KINDS)
def test_pickles(ours, where, tmp_path):
    first, theirs, _ = filled(ours, where=place(where, tmp_path))
    held = pickle.dumps(first)
    first.close()
    second = pickle.loads(held)
    seeded(second, theirs, seed=6)
    check_counts(second, theirs)
    check_draws(second, theirs, False)
    assert second.scratch_dir == first.scratch_dir
    second.close()


@pytest.mark.parametrize("ours", KINDS)
def test_a_deep_copy_of_a_directory_is_in_ram(ours, tmp_path):
    first, theirs, runner = filled(ours, where=place("directory", tmp_path))
    before = {one.id_: steps(one) for one in first.episodes}
    second = copy.deepcopy(first)
    assert second.scratch_dir is None
    second.add(runner.chunks())
    assert {one.id_: steps(one) for one in first.episodes} == before
    third = copy.deepcopy(first)
    seeded(third, theirs, seed=6)
    check_counts(third, theirs)
    check_draws(third, theirs, False)
    first.close()


@pytest.mark.parametrize("capacity", [30, 120, 199, 1_000])
@pytest.mark.parametrize("ours", KINDS)
def test_another_capacity_than_a_state_has(ours, capacity):
    first, _, runner = filled(ours)
    rule = Rule(capacity, ours is PrioritizedEpisodeReplayBuffer)
    rule.held = {one.id_: steps(one) for one in first.episodes}
    rule.add([])
    second = ours(capacity)
    second.add(Runner("dict", seed=8).chunks())
    second.set_state(first.get_state())
    assert {one.id_: steps(one) for one in second.episodes} == rule.held
    for _ in range(60):
        chunks = [one for one in runner.chunks() if one.t_started == 0 or one.id_ in rule.held]
        second.add(chunks)
        rule.add(chunks)
        assert {one.id_: steps(one) for one in second.episodes} == rule.held
        assert len(second.sample(8, n_step=1, sample_episodes=True)) == 8
    assert len(second.rb) == rule.total


@pytest.mark.parametrize("ours", KINDS)
def test_states_that_do_not_fit_change_nothing(ours):
    held, _, _ = filled(ours)
    other, _, _ = filled(KINDS[ours is EpisodeReplayBuffer])
    plain = ours(50)
    plain.add(Runner().chunks())
    before = [steps(one) for one in held.episodes]
    for state, said in (
        (other.get_state(), r"set_state: expected a state of \w*EpisodeReplayBuffer, got one with \['_"),
        ({}, r"set_state: expected a state of \w*EpisodeReplayBuffer, got one with \[\]"),
        (plain.get_state(), "expected the first episode's fields, dtypes, shapes"),
    ):
        with pytest.raises(ValueError, match=said):
            held.set_state(state)
        assert [steps(one) for one in held.episodes] == before


# ---- priorities ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["RAM", "directory"])
def test_draws_and_weights_go_by_priority(where, tmp_path):
    ours, theirs = both(200, PrioritizedEpisodeReplayBuffer, place(where, tmp_path), alpha=0.6)
    runner, rng = Runner("plain"), np.random.default_rng(2)
    for count in range(60):
        chunks = runner.chunks()
        weight = {} if count % 7 else {"weight": 0.5}
        ours.add(chunks, **weight)
        theirs.add(chunks, **weight)
        for n_step in (1, 3, (1, 4)):
            check(ours, theirs, num_items=16, n_step=n_step, beta=0.4, gamma=0.9)
        errors = rng.random(16) * 4
        ours.update_priorities(errors)
        theirs.update_priorities(errors)
    assert ours.get_num_episodes_evicted() > 5
    leaves = ours.rb.sampler.priorities().leaves_of(
        torch.from_numpy(np.concatenate([one.rows for one in ours.episodes]))
    )
    by_step = {(number, at): theirs._sum_segment[node] for number, at, node in theirs._indices}
    held = [
        by_step[i, at] for i, one in enumerate(ours.episodes, ours.get_num_episodes_evicted()) for at in range(len(one))
    ]
    assert np.allclose(leaves.numpy(), held, rtol=1e-12)
    if where == "directory":
        ours.close()
        ours = PrioritizedEpisodeReplayBuffer(200, alpha=0.6, **place(where, tmp_path))
        seeded(ours, seed=3)
        again = [ours._sum_segment[node] for _, _, node in ours._indices]
        assert np.allclose(sorted(again), sorted(held), rtol=1e-12)
        drawn = ours.sample(4_000, n_step=1, beta=0.4)
        first = {one.get_observations(0).tobytes(): number for number, one in enumerate(_steps(ours))}
        counts = np.bincount([first[one.get_observations(0).tobytes()] for one in drawn], minlength=len(first))
        likely = 4_000 * np.array(held) / np.sum(held)
        assert ((counts - likely) ** 2 / likely).sum() < len(first) + 5 * np.sqrt(2 * len(first))
    before = [ours._sum_segment[node] for _, _, node in ours._indices]
    ours.sample(2, n_step=1)
    with pytest.raises(PriorityError, match="expected finite priorities"):
        ours.update_priorities(np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match="update_priorities: expected 2, of the last sample, got 3"):
        ours.update_priorities(np.ones(3))
    assert [ours._sum_segment[node] for _, _, node in ours._indices] == before
    with pytest.raises(ValueError, match="add: weight"):
        ours.add(runner.chunks(), weight=-1.0)
    ours.close()


def _steps(buffer):
    for one in buffer.episodes:
        for at in range(len(one)):
            yield one[at : at + 1]


def test_priorities_of_steps_that_went_meanwhile_are_dropped():
    """RLlib's own gives them to the steps that have come in their place, or to none."""
    held = PrioritizedEpisodeReplayBuffer(40)
    held.add(episode(20, id_="first", rewards=[float(at) for at in range(20)]))
    held.add(episode(20, id_="second", rewards=[float(at) for at in range(20, 40)]))
    held.rng = np.random.default_rng(1)
    drawn = [int(one.get_rewards(0)) for one in held.sample(64, n_step=1)]
    held.add(episode(20, id_="third"))
    held.update_priorities(np.array([7.0 + reward for reward in drawn]))
    first, second = (held.rb.sampler.priorities().leaves_of(torch.from_numpy(one.rows)) for one in held.episodes)
    assert second.tolist() == [1.0] * 20
    assert first.tolist() == [7.0 + reward if reward in drawn else 1.0 for reward in range(20, 40)]
    assert min(drawn) < 20
    assert sorted({held._sum_segment[node] for _, _, node in held._indices}) == sorted({*first.tolist(), 1.0})


# ---- what is refused -----------------------------------------------------------------------------------------------------


def episode(n=3, **how):
    given = {
        "observations": [np.zeros(2)] * (n + 1),
        "actions": [0] * n,
        "rewards": [0.0] * n,
        "len_lookback_buffer": 0,
    }
    return SingleAgentEpisode(**given | how)


@pytest.mark.parametrize("ours", KINDS)
def test_what_cannot_be_stored(ours):
    buffer = ours(20)
    buffer.add(episode(id_="a"))
    for bad, error, said in (
        (
            episode(observations=[(np.zeros(2), np.zeros(2))] * 4),
            TypeError,
            "add: observation: expected numbers.*got a tuple",
        ),
        (episode(observations=["text"] * 4), TypeError, "add: observation: expected numbers"),
        (
            episode(observations=[np.zeros(3)] * 4),
            ValueError,
            "add: expected the first episode's fields, dtypes, shapes.*'observation'",
        ),
        (
            episode(extra_model_outputs={"late": [1.0] * 3}),
            ValueError,
            "add: expected the first episode's fields, dtypes, shapes.*'extra_model_outputs.late'",
        ),
        (episode(id_="a", t_started=5), ValueError, "add: episode 'a': expected its steps from 3 on, got those from 5"),
        (_of_several_agents(), TypeError, "add: expected episodes of a single agent, got MultiAgentEpisode"),
    ):
        with pytest.raises(error, match=said):
            buffer.add([episode(), bad])
        assert (buffer.get_num_timesteps(), buffer.get_num_episodes(), len(buffer.rb)) == (3, 1, 3)
    buffer.add([episode(2, id_="a", t_started=3), episode(2, id_="a", t_started=5, terminated=True)])
    with pytest.raises(ValueError, match="add: episode 'a': expected no more steps, as it is over"):
        buffer.add(episode(2, id_="a", t_started=7))
    assert buffer.get_num_timesteps() == 7
    buffer.add([])
    buffer.add([episode(0)])
    assert buffer.get_num_episodes() == 1
    with pytest.raises(
        TypeError, match=f"{ours.__name__}: unexpected argument 'batch_size'. Did you mean batch_size_B"
    ):
        ours(20, batch_size=3)
    with pytest.raises(ValueError, match=f"{ours.__name__}: capacity: expected"):
        ours(0)


def _of_several_agents():
    made = MultiAgentEpisode()
    made.add_env_reset(observations={"a": 0, "b": 0}, infos={})
    made.add_env_step({"a": 1, "b": 1}, {"a": 0, "b": 0}, {"a": 0.0, "b": 0.0}, {})
    return made
