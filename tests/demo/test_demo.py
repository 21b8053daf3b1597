import os
import re
import signal
import subprocess
import sys
import time

import click.testing
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import ReplayBuffer, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from engram.cli import main
from engram.demo import run as demo
from engram.demo.agent import Agent
from engram.demo.progress import Progress
from engram.demo.training import Training


def batch(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    observation = torch.rand(n, 4, generator=g)
    action = torch.randint(2, (n,), generator=g)
    return TensorDict(
        {
            "observation": observation,
            "action": action,
            "next": {
                "observation": torch.rand(n, 4, generator=g),
                "reward": (action == (observation[:, 0] > 0.5).long()).float().unsqueeze(1),  # one action is right
                "terminated": torch.ones(n, 1, dtype=torch.bool),
                "truncated": torch.zeros(n, 1, dtype=torch.bool),
                "done": torch.ones(n, 1, dtype=torch.bool),
            },
        },
        batch_size=[n],
    )


def test_the_agent_learns_which_action_is_right():
    torch.manual_seed(0)
    agent = Agent()
    for seed in range(300):
        agent.learn(batch(128, seed))
    unseen = torch.rand(200, 4, generator=torch.Generator().manual_seed(1))
    unseen = unseen[(unseen[:, 0] - 0.5).abs() > 0.1]
    right = [agent.act(observation) == int(observation[0] > 0.5) for observation in unseen]
    assert np.mean(right) > 0.9


def test_only_what_did_not_terminate_is_bootstrapped():
    torch.manual_seed(0)
    ending, going_on = Agent(), Agent()
    going_on.restore(ending.arrays())
    data = batch(32)
    data["next", "reward"] = torch.zeros(32, 1)
    other = data.clone()
    other["next", "terminated"] = torch.zeros(32, 1, dtype=torch.bool)
    assert ending.learn(data) != going_on.learn(other)


def test_an_agent_restored_goes_on_as_the_first_one_would():
    torch.manual_seed(0)
    first, second = Agent(), Agent()
    for seed in range(5):
        first.learn(batch(16, seed))
    second.restore(first.arrays())
    for seed in range(5, 10):
        assert first.learn(batch(16, seed)) == second.learn(batch(16, seed))


def losses_by_row(agent, data):
    """The loss of every row, each from an agent that has not learned yet."""
    losses = []
    for i in range(len(data)):
        fresh = Agent()
        fresh.restore(agent.arrays())
        losses.append(fresh.learn(data[i : i + 1].clone()))
    return torch.tensor(losses)


def test_weights_multiply_the_losses():
    torch.manual_seed(0)
    agent, data = Agent(), batch(6)
    losses = losses_by_row(agent, data)
    assert len(losses.unique()) == 6
    weights = torch.tensor([1.0, 0.5, 0.25, 0.0, 0.1, 0.9])
    unweighted, weighted = Agent(), Agent()
    unweighted.restore(agent.arrays())
    weighted.restore(agent.arrays())
    assert unweighted.learn(data.clone()) == pytest.approx(float(losses.mean()))
    assert weighted.learn(data.clone().set("priority_weight", weights)) == pytest.approx(
        float((weights * losses).mean())
    )


def test_weights_of_zero_teach_nothing():
    torch.manual_seed(0)
    agent, same, other = Agent(), Agent(), Agent()
    same.restore(agent.arrays())
    other.restore(agent.arrays())
    same.learn(batch(8).set("priority_weight", torch.zeros(8)))
    other.learn(batch(8).set("priority_weight", torch.ones(8)))
    observations = batch(8)["observation"]
    before, unmoved, moved = (a._online(observations) for a in (agent, same, other))
    assert torch.equal(before, unmoved)
    assert not torch.equal(before, moved)


def test_learning_says_how_wrong_the_agent_was():
    torch.manual_seed(0)
    agent, data = Agent(), batch(16)  # every step ends its episode: the target is the reward
    with torch.no_grad():
        value = agent._online(data["observation"] * agent._scale).gather(1, data["action"].unsqueeze(1))
    agent.learn(data)
    torch.testing.assert_close(data["td_error"], (data["next", "reward"] - value).abs().squeeze(1))


def test_progress_round_trip(tmp_path):
    progress = Progress(
        seed=3,
        sampler="prioritized",
        steps=10,
        returns=[1.0, 2.5],
        replaced_at=1,
        ages=[4, 5],
        sample_us=[1.5],
        priority_us=[0.5],
        update_us=[2.0],
    )
    tensors = Agent().arrays()
    progress.save(tmp_path, tensors)
    again, arrays = Progress.load(tmp_path)
    assert again == progress
    assert arrays.keys() == tensors.keys()
    assert all(torch.equal(arrays[name], tensors[name]) for name in tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress.json", "weights.npz"]


def test_numbered_folders(tmp_path):
    assert demo.new_folder(tmp_path) == tmp_path / "run-001"
    (tmp_path / "run-001").mkdir()
    assert demo.new_folder(tmp_path) == tmp_path / "run-002"


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    result = click.testing.CliRunner().invoke(main, ["demo", "--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "expected a new or empty folder" in result.output.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def engram(*arguments, **options):
    command = [sys.executable, "-c", "from engram.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "run"
    return folder, engram(
        "demo", "--steps", "900", "--dir", str(folder), "--seed", "5", env={**os.environ, "COLUMNS": "500"}
    )


def test_the_demo_replaces_its_process_and_reports(finished):
    folder, done = finished
    assert done.returncode == 0, done.stderr
    progress, _ = Progress.load(folder)
    assert (progress.steps, progress.updates, progress.seed) == (900, 201, 5)
    assert progress.replaced_at is not None
    assert "New process: reopened 450 rows" in done.stdout
    assert f"{folder / 'replay'}" in done.stdout
    assert "not solved" in done.stdout.lower()
    assert "900 of 20000 rows" in done.stdout
    assert "(uniform sampling, seed 5)" in done.stdout
    assert re.search(r"Uniform sampling of 128 rows took [\d.]+ µs per update \(median\)", done.stdout)
    assert "dropped" not in done.stdout
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_store_of_the_demo_reopens(finished):
    folder, _ = finished
    rb = ReplayBuffer.open(folder / "replay")
    assert type(rb) is TensorDictReplayBuffer
    assert (len(rb), rb.write_count) == (900, 900)
    rows = rb[:]
    ended = rows["next", "done"].squeeze(1)
    assert torch.equal(ended, (rows["next", "terminated"] | rows["next", "truncated"]).squeeze(1))
    # Within an episode what follows is what was observed next. A process that stops ends its episode.
    inside = (~ended[:-1]).nonzero().squeeze(1)
    assert torch.equal(rows["next", "observation"][inside], rows["observation"][inside + 1])
    assert bool(ended[449]), "the process was replaced here"
    assert bool(ended[-1])
    assert rb.sample()["index_generation"].shape == (128,)
    rb.close()


def test_a_seed_is_a_run(tmp_path):
    runs = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        training = Training(tmp_path / name, seed=seed, steps=60, sampler="uniform")
        for _ in range(60):
            training.step()
        runs.append(training.replay["observation"].clone())
        training.replay.close()
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_prioritized(tmp_path):
    folder = tmp_path / "run"
    arguments = ("--steps", "900", "--dir", str(folder), "--seed", "5", "--sampler", "prioritized")
    done = engram("demo", *arguments, env={**os.environ, "COLUMNS": "500"})
    assert done.returncode == 0, done.stderr
    progress, _ = Progress.load(folder)
    assert (progress.steps, progress.updates, progress.sampler) == (900, 201, "prioritized")
    assert progress.replaced_at is not None
    assert "(prioritized sampling, seed 5)" in done.stdout
    assert re.search(
        r"Prioritized sampling of 128 rows took [\d.]+ µs and updating their priorities [\d.]+ µs per update \(median\)",
        done.stdout,
    )
    assert "Updates dropped because their row was rewritten meanwhile: 0." in done.stdout
    rb = ReplayBuffer.open(folder / "replay")
    assert type(rb) is TensorDictPrioritizedReplayBuffer
    state = rb.sampler.state_dict()
    assert (state["alpha"], state["beta"]) == (0.6, 1.0)  # the last step was the last update
    live, rest = state["leaves"][:900], state["leaves"][900:]
    assert bool((live > 0).all())
    assert not bool(rest.any())
    assert len(live.unique()) > 500
    assert len(rb.sample()["priority_weight"].unique()) > 50
    rb.close()


def test_priorities_and_beta_survive_the_process(tmp_path):
    first = Training(tmp_path, seed=5, steps=1_000, sampler="prioritized")
    betas = set()
    for _ in range(600):
        first.step()
        betas.add(round(first.replay.sampler.beta, 6))
    assert len(betas) == 52, "0.4 until there is enough to learn from, then another one for each update"
    before = first.replay.sampler.state_dict()
    first.save()
    second = Training(tmp_path, seed=5, steps=1_000, sampler="prioritized")
    after = second.replay.sampler.state_dict()
    assert before["beta"] == after["beta"] == pytest.approx(0.4 + 0.6 * 600 / 1_000)
    assert torch.equal(before["leaves"], after["leaves"])
    assert len(after["leaves"].unique()) > 300
    second.step()
    second.replay.close()


def started(folder):
    command = [sys.executable, "-c", "from engram.cli import main; main()", "demo", "--dir", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists()


@pytest.mark.parametrize("group", [True, False], ids=["as a terminal does", "to the parent alone"])
def test_control_c_leaves_a_store_that_reopens(tmp_path, group):
    folder = tmp_path / "run"
    process = started(folder)
    wait_for(folder / "replay" / ".engram" / "store.json")
    time.sleep(1)
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "engram.ReplayBuffer.open(" in out
    rb = ReplayBuffer.open(folder / "replay")
    assert rb.storage.store.repair is None  # closed in order
    assert len(rb) > 0
    assert len(rb.sample()) == 128
    rb.close()


def test_control_c_before_it_has_begun(tmp_path):
    """The training process is still importing torch."""
    folder = tmp_path / "run"
    process = started(folder)
    wait_for(folder)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert ("engram.ReplayBuffer.open(" in out) == (folder / "replay" / ".engram").exists()


def test_the_training_ends_with_the_demo(tmp_path):
    folder = tmp_path / "run"
    process = started(folder)
    wait_for(folder / "replay" / ".engram" / "store.json")
    process.kill()
    wait_for(folder / "progress.json")
    process.communicate(timeout=60)  # until the training process, which has the same pipes, is gone, too
    assert Progress.load(folder)[0].replaced_at is None, "it went on to the end of the first half"
    rb = ReplayBuffer.open(folder / "replay")
    assert rb.storage.store.repair is None  # closed in order
    rb.close()
