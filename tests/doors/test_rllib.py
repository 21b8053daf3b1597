"""RLlib's episodes over a store. Its own buffers say what is right: each episode goes to one of them, too."""

import pickle

import numpy as np
import pytest

pytest.importorskip("ray.rllib")

import torch
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer as Theirs
from ray.rllib.utils.replay_buffers import PrioritizedEpisodeReplayBuffer as TheirPrioritized

from engram.adapters.rllib import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer
from engram.errors import IncompatibleStore, PriorityError, StoreInUse
from tests import fresh
from tests.doors.rllib_steps import Runner, flat, same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
COUNTS = (
    "get_num_episodes",
    "get_num_episodes_evicted",
    "get_num_timesteps",
    "get_added_timesteps",
    "get_sampled_timesteps",
)


def both(capacity=400, ours=EpisodeReplayBuffer, theirs=Theirs, place=None, **how):
    made = ours(capacity, **how, **(place or {})), theirs(capacity, **how)
    return seeded(*made, seed=1)


def seeded(*buffers, seed):
    for buffer in buffers:
        buffer.rng = np.random.default_rng(seed)
    return buffers


def check(ours, theirs, **how):
    for one, other in zip(ours.sample(**how), theirs.sample(**how), strict=True):
        same(one, other)


# ---- steps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["RAM", "directory"])
@pytest.mark.parametrize("kind", ["plain", "lists", "dict", "extras"])
def test_every_call_gives_what_rllibs_own_gives(kind, where, tmp_path):
    ours, theirs = both(place={"scratch_dir": tmp_path / "replay"} if where == "directory" else {})
    runner = Runner(kind)
    evicted = 0
    for count in range(100):
        chunks = runner.chunks()
        before = [flat(one) for one in chunks]
        ours.add(chunks)
        for (about, values), (wanted, held) in zip(map(flat, chunks), before, strict=True):  # it does not change them
            assert about == wanted
            assert all(np.array_equal(value, held[path]) for path, value in values.items())
        theirs.add(chunks)
        for name in COUNTS:
            assert getattr(ours, name)() == getattr(theirs, name)(), (count, name)
        assert len(ours) == len(theirs)
        for one, other in zip(ours.episodes, theirs.episodes, strict=True):
            assert one.id_ == other.id_
        if count % 5 == 4:
            for one, other in zip(ours.episodes, theirs.episodes, strict=True):
                same(one, other)
            check(ours, theirs, num_items=16, n_step=1, sample_episodes=True)
            check(ours, theirs, batch_size_B=16, n_step=3, gamma=0.9, sample_episodes=True)
            extras = {"include_extra_model_outputs": kind == "extras"}
            check(ours, theirs, num_items=16, n_step=(1, 4), sample_episodes=True, **extras)
            check(ours, theirs, num_items=40, n_step=1, batch_length_T=5, lookback=1, sample_episodes=True)
            check(ours, theirs, num_items=8, n_step=1, batch_length_T=3, min_batch_length_T=2, sample_episodes=True)
        evicted = theirs.get_num_episodes_evicted()
    assert evicted > 20
    metrics, wanted = ours.get_metrics(), theirs.get_metrics()
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        values, others = (one if isinstance(one, dict) else {"": one} for one in (metrics[name], value))
        assert {key: one.peek() for key, one in values.items()} == {key: one.peek() for key, one in others.items()}, (
            name
        )
    ours.close()


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


def test_rows_that_are_needed_evict_their_episodes():
    """Episodes of one environment that go on and on beside short ones of another: dead steps lie between."""
    ours = EpisodeReplayBuffer(40)
    held = {}
    rng = np.random.default_rng(0)
    long, start = 0, 0
    for count in range(300):
        chunks = []
        for name, t in ((f"long {long}", start), (f"short {count}", 0)):
            observed = rng.random((4, 2))
            done = name.startswith("short") or start == 27
            one = SingleAgentEpisode(
                id_=name,
                observations=[*observed],
                actions=[0, 1, 2],
                rewards=[1.0, 2.0, 3.0],
                terminated=done,
                t_started=t,
                len_lookback_buffer=0,
            )
            before = held.get(name)
            held[name] = observed if before is None else np.concatenate([before[:-1], observed])
            chunks.append(one)
        ours.add(chunks)
        start, long = (0, long + 1) if start == 27 else (start + 3, long)
        assert ours.get_num_timesteps() <= 40
        for one in ours.episodes:
            wanted = held[one.id_]
            assert np.array_equal(one.get_observations(), wanted[len(wanted) - len(one) - 1 :])
        for one in ours.sample(8, n_step=1, sample_episodes=True):
            assert one.get_observations().shape == (2, 2) if one.is_numpy else len(one.get_observations()) == 2
    assert ours.get_num_timesteps() > 10


# ---- directories ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "dict", "extras"])
def test_a_directory_goes_on(kind, tmp_path):
    where = {"scratch_dir": tmp_path / "replay"}
    ours, theirs = both(place=where)
    runner = Runner(kind)
    for _ in range(80):
        chunks = runner.chunks()
        ours.add(chunks)
        theirs.add(chunks)
    ours.close()
    ours = EpisodeReplayBuffer(400, **where)
    assert ours.get_num_timesteps() == theirs.get_num_timesteps()
    for one, other in zip(ours.episodes, theirs.episodes, strict=True):
        other.is_truncated = not other.is_terminated  # what was open has ended
        same(one, other)
    again = Theirs(400)  # with its steps in the order of its episodes
    again.add(list(theirs.episodes))
    seeded(ours, again, seed=3)
    check(ours, again, num_items=16, n_step=2, sample_episodes=True)
    runner = Runner(kind, seed=7)
    runner.number = 1_000
    for _ in range(20):
        chunks = runner.chunks()
        chunks = [one for one in chunks if one.t_started == 0 or one.id_ in theirs.episode_id_to_index]
        ours.add(chunks)
        theirs.add(chunks)
    for one, other in zip(ours.episodes, theirs.episodes, strict=True):
        same(one, other)
    ours.close()
    with pytest.raises(IncompatibleStore, match="EpisodeReplayBuffer: scratch_dir: expected steps of capacity=300"):
        EpisodeReplayBuffer(300, **where)


@pytest.mark.parametrize("how", ["state", "pickle"])
@pytest.mark.parametrize("ours", [EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer])
@pytest.mark.parametrize("where", ["RAM", "directory"])
def test_states_and_pickles(ours, how, where, tmp_path):
    place = {"scratch_dir": tmp_path / "replay"} if where == "directory" else {}
    first = ours(200, **place)
    runner = Runner("dict")
    for _ in range(40):
        first.add(runner.chunks())
    first.sample(32, n_step=1, sample_episodes=True)
    wanted = [flat(one) for one in first.episodes]
    if how == "pickle":
        held = pickle.dumps(first)
        first.close()
        second = pickle.loads(held)
    else:
        held = pickle.dumps(first.get_state())
        second = first if where == "directory" else ours(200)
        second.set_state(pickle.loads(held))
    assert len(second.episodes) == len(wanted)
    for one, (about, values) in zip(second.episodes, wanted, strict=True):
        found, there = flat(one)
        assert found[:3] == about[:3]
        assert all(np.array_equal(there[path], value) for path, value in values.items())
    second.add(Runner("dict", seed=5).chunks())
    assert len(second.sample(8, n_step=1, sample_episodes=True)) == 8
    with pytest.raises(
        ValueError, match=r"set_state: expected a state of \w*EpisodeReplayBuffer, got one with \['_indices'"
    ):
        second.set_state(Theirs(200).get_state())
    assert second.get_num_timesteps() > 100
    second.close()


DYING = """
from engram.adapters.rllib import {kind}
from tests.doors.rllib_steps import Runner

buffer, runner = {kind}(300, scratch_dir=folder), Runner("dict")
for count in range(10_000_000):
    buffer.add(runner.chunks())
    print(count)
"""


@pytest.mark.parametrize("least", [10, 90])
@pytest.mark.parametrize("kind", ["EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer"])
def test_a_process_is_killed_while_it_adds(tmp_path, kind, least):
    program = fresh.start(DYING.replace("{kind}", kind), folder=str(tmp_path / "replay"))
    program.until(f"\n{least}\n")
    with pytest.raises(StoreInUse, match="EpisodeReplayBuffer: scratch_dir: .*replay' is in use, by another process"):
        globals()[kind](300, scratch_dir=tmp_path / "replay")
    program.kill()
    last = int(program.out.rsplit("\n", 1)[0].rsplit("\n", 1)[-1])
    ours = globals()[kind](300, scratch_dir=tmp_path / "replay")
    runner, wanted = Runner("dict"), {}
    for _ in range(last + 2):  # the call that was under way may have written some of its steps
        for chunk in runner.chunks():
            (_, t, terminated, _), values = flat(chunk)
            for step in range(len(chunk)):
                over = step == len(chunk) - 1
                observed = [values[path][step : step + 2].tobytes() for path in values if path[0] == "observations"]
                row = (*observed, values["actions",][step], values["rewards",][step], over and terminated)
                wanted[chunk.id_, t + step] = row
    by_row = {row: name for name, row in wanted.items()}
    names = []
    for one in ours.episodes:
        (n, t, terminated, _), values = flat(one)
        found = []
        for step in range(n):
            observed = [values[path][step : step + 2].tobytes() for path in values if path[0] == "observations"]
            over = step == n - 1 and terminated
            found.append(by_row[(*observed, values["actions",][step], values["rewards",][step], over)])
        assert len({name for name, _ in found}) == 1
        assert [at for _, at in found] == [*range(t, t + n)]
        assert one.is_done
        names += found
    assert len(names) == len({*names}) == ours.get_num_timesteps() <= 300
    newest = [name for name in [*wanted][-400:] if name in names]
    assert len(newest) == len(names)  # none of an older one
    assert len(names) > 30
    ours.add(Runner("dict", seed=9).chunks())
    ours.close()


# ---- priorities ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["RAM", "directory"])
def test_draws_and_weights_go_by_priority(where, tmp_path):
    place = {"scratch_dir": tmp_path / "replay"} if where == "directory" else {}
    ours, theirs = both(ours=PrioritizedEpisodeReplayBuffer, theirs=TheirPrioritized, place=place, alpha=0.6)
    runner, rng = Runner("plain"), np.random.default_rng(2)
    for count in range(90):
        chunks = runner.chunks()
        weight = {} if count % 7 else {"weight": 0.5}
        ours.add(chunks, **weight)
        theirs.add(chunks, **weight)
        assert ours.get_num_timesteps() == theirs.get_num_timesteps()
        for n_step in (1, 3, (1, 4)):
            check(ours, theirs, num_items=16, n_step=n_step, beta=0.4, gamma=0.9)
        errors = rng.random(16) * 4
        ours.update_priorities(errors)
        theirs.update_priorities(errors)
    assert ours.get_num_episodes_evicted() > 5
    leaves = ours.rb.sampler.priorities().leaves_of(
        torch.from_numpy(np.concatenate([one.rows for one in ours.episodes]))
    )
    kept = [theirs._sum_segment[node] for _, _, node in theirs._indices]
    by_step = {(number, at): theirs._sum_segment[node] for number, at, node in theirs._indices}
    assert len(kept) == len(by_step)
    held = [
        by_step[i, at] for i, one in enumerate(ours.episodes, ours.get_num_episodes_evicted()) for at in range(len(one))
    ]
    assert np.allclose(leaves.numpy(), held, rtol=1e-12)
    if where == "directory":
        ours.close()
        ours = PrioritizedEpisodeReplayBuffer(400, alpha=0.6, **place)
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
    with pytest.raises(RuntimeError, match="priorit"):
        ours.update_priorities(np.ones(3))
    assert [ours._sum_segment[node] for _, _, node in ours._indices] == before
    with pytest.raises(ValueError, match="add: weight"):
        ours.add(runner.chunks(), weight=-1.0)
    ours.close()


def _steps(buffer):
    for one in buffer.episodes:
        for at in range(len(one)):
            yield one[at : at + 1]


# ---- what is refused -----------------------------------------------------------------------------------------------------


def episode(n=3, **how):
    given = {
        "observations": [np.zeros(2)] * (n + 1),
        "actions": [0] * n,
        "rewards": [0.0] * n,
        "len_lookback_buffer": 0,
    }
    return SingleAgentEpisode(**given | how)


@pytest.mark.parametrize("ours", [EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer])
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
            "add: expected the first episode's fields, dtypes and shapes.*'observation'",
        ),
        (
            episode(extra_model_outputs={"late": [1.0] * 3}),
            ValueError,
            "add: expected the first episode's fields, dtypes and shapes.*'extra_model_outputs.late'",
        ),
        (
            episode(id_="a", t_started=5),
            ValueError,
            "add: episode 'a': expected its steps from 3 on, got those from 5 on",
        ),
        (episode(30), ValueError, "add: expected up to 20 steps, 25 an episode, got more. Raise capacity"),
        (_of_several_agents(), TypeError, "add: expected episodes of a single agent, got MultiAgentEpisode"),
    ):
        with pytest.raises(error, match=said):
            buffer.add([episode(), bad])
        assert (buffer.get_num_timesteps(), buffer.get_num_episodes(), len(buffer.rb)) == (3, 1, 3)
    buffer.add([episode(2, id_="a", t_started=3), episode(2, id_="a", t_started=5, terminated=True)])
    with pytest.raises(ValueError, match="add: episode 'a': expected no more steps, as it is over"):
        buffer.add(episode(2, id_="a", t_started=7))
    assert buffer.get_num_timesteps() == 7
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
