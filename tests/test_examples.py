"""Every file in examples/ runs as it stands, and says what it shows."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests import interpreter

EXAMPLES = Path(__file__).parents[1] / "examples"
#: Algorithms, whose curves benchmarks/learning.py draws.
AGENTS = ("c51", "dqn", "dqn_atari", "rainbow", "sac", "td3")


def output_of(name, folder, *arguments):
    command = [interpreter.executable(), str(EXAMPLES / name), *(arguments or QUICKLY.get(name, []))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def check_actors_and_learner(said):
    (left,) = re.findall(r"^actor 0 was killed; its (\d+) rows stay, and the learner continues$", said, re.MULTILINE)
    assert int(left) > 0
    assert "actor 2 writes in its lane: True" in said
    assert re.search(r"^\d+ updates, \d+ rows written; the learner knows the way: True$", said, re.MULTILINE)


def check_checkpointed_training(said):
    assert said.count("found no checkpoint: a new training") == 2
    assert "killed after step 850 of 1200" in said
    (step,) = re.findall(r"^restored the replay of step (\d+), \1 rows, and the model of step \1$", said, re.MULTILINE)
    assert step in ("600", "800")
    assert "network, rows, priorities and the next batch are as in a training that was never killed: True" in said


def check_ddp_dqn(said):
    assert "saved step 100: 1600 rows of 2 ranks" in said
    assert "restored step 100: 2 shards on 1 ranks" in said
    before, after = (float(mean) for mean in re.findall(r"mean return (-?[\d.]+)$", said, re.MULTILINE))
    assert after > before
    assert re.search(r"^saved step 200: \d{4} rows of 1 ranks$", said, re.MULTILINE)


def check_ddp_one_store(said):
    device, transport = ("cuda", "direct") if torch.cuda.is_available() else ("cpu", "none")
    assert re.search(rf"^2 ranks on {device}, transport {transport}: [\d,]+ rows in one store$", said, re.MULTILINE)
    assert "rank 0 drew rows of 2 ranks; last batches differ: True" in said
    a, b = map(float, re.search(r"^y = (-?[\d.]+) x0 \+ (-?[\d.]+) x1$", said, re.MULTILINE).groups())
    assert abs(a - 3) + abs(b + 2) < 1.5


def check_resumable_training(said):
    starts = re.findall(r"^starts at step (\d+): \1 rows are there$", said, re.MULTILINE)
    assert starts == ["0", "151", "401"]
    assert said.split("\n").count("killed") == 2
    assert said.endswith("done after 600 steps: y = 3.0 a + -2.0 b\nended\n")


def check_larger_than_memory(said):
    assert re.search(r"^1627 rows, 20 MB$", said, re.MULTILINE)
    assert re.search(r"^60 updates of 64 rows, \d+ per second$", said, re.MULTILINE)
    assert re.search(r"^read from files: \d+ MB; memory at most: 0 MB$", said, re.MULTILINE)
    (right,) = re.findall(r"^in the end: right in (\d+)% of the frames$", said, re.MULTILINE)
    assert int(right) > 70


def check_grpo(said):
    assert "the first generator was killed: True\n" in said
    assert "an answer of 2 tokens is finished by another generator\n" in said
    assert "the learner was killed: True\n" in said
    assert "192 answers were trained on, 0 of them twice\n" in said
    assert "of 25 answers of the first generator 25 are there\n" in said
    assert re.search(r"^mean reward of the first batches: 0\.\d\d, of the last: 0\.\d\d$", said, re.MULTILINE)


def check_own_storage(said):
    assert said.startswith("600 rows; error after 100 updates: ")
    assert "opened again: 600 rows, as they were: True" in said
    first, last = (float(error) for error in re.findall(r"updates: ([\d.]+)$", said, re.MULTILINE))
    assert last < first < 5
    assert said.endswith("windows of 5 steps, each inside an episode: True\n")


def check_two_indexes(said):
    assert "1000 rows for the critic, 1000 for the model, in one storage: True" in said
    before, after = re.findall(r"critic draws ([\d.]+) on average, the model ([\d.]+)", said)
    assert [float(mean) for mean in before] == pytest.approx([0.5, 0.5], abs=0.05)
    assert [float(mean) for mean in after] == pytest.approx([2 / 3, 0.5], abs=0.05)
    assert "the model draws 32 windows of 8 steps, each from one episode: True" in said


def check_her(said):
    """The same agent with hindsight and without. Without, hardly any random episode tells it anything."""
    shares = dict(
        re.findall(r"^(with hindsight|without): (\d+)% of the last episodes end as wanted$", said, re.MULTILINE)
    )
    assert int(shares["with hindsight"]) > 60
    assert int(shares["without"]) < 20


def check_offline_to_online(said):
    """Recordings know another world; with rows of this one, the agent arrives."""
    before, after = (int(share) for share in re.findall(r": (\d+)% arrive$", said, re.MULTILINE))
    assert before < 20
    assert after > 60
    assert "24000 rows more, a share of 0 recordings in the end" in said


def check_offline_minari(said):
    """Few random walks cross the lake; an agent that has seen nothing else does."""
    episodes, steps, arrived = map(
        int, re.search(r"^(\d+) episodes of (\d+) steps: (\d+) arrive$", said, re.MULTILINE).groups()
    )
    assert episodes < steps
    assert 0 < arrived < episodes / 10
    assert said.endswith("the agent arrives: True\n")


def check_recurrent_slices(said):
    assert "32 windows of up to 12 steps, each from one episode: True" in said
    assert len(re.findall(r"^step \d+, \d+ s: right in \d+%$", said, re.MULTILINE)) == 10
    assert re.search(r"^in the end: right in [\d.]+% of the mazes; without memory at most 50%$", said, re.MULTILINE)


def check_r2d2(said):
    assert len(re.findall(r"^step \d+, \d+ s: right in \d+%$", said, re.MULTILINE)) == 20
    (replaced,) = re.findall(r"^(\d+) states were replaced by newer ones$", said, re.MULTILINE)
    assert int(replaced) > 1000
    (right,) = re.findall(r"^in the end: right in ([\d.]+)% of the games; without memory 33%$", said, re.MULTILINE)
    assert float(right) > 50


def check_gpu_learner(said):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert said.endswith(f"101 updates on {device}\n")


def check_sampling_log(said):
    assert said == ("10 of 10 batches come again\nfrom the checkpoint: 10\nwhen their rows were overwritten: 0\n")


def check_simulated_environments(said):
    assert re.search(r"^1,024 environments on (cpu|cuda): 70 steps of all, 65,536 rows kept$", said, re.MULTILINE)
    assert re.search(r"^mean reward -[\d.]+, in the end -[\d.]+$", said, re.MULTILINE)


def check_returns(said):
    """An agent that learns tells the return of every episode."""
    assert re.fullmatch(r"(step \d+: return -?\d+\n)+", said)


CHECKS = {
    **dict.fromkeys((f"{agent}.py" for agent in AGENTS), check_returns),
    "actors_and_learner.py": check_actors_and_learner,
    "checkpointed_training.py": check_checkpointed_training,
    "ddp_dqn.py": check_ddp_dqn,
    "ddp_one_store.py": check_ddp_one_store,
    "gpu_learner.py": check_gpu_learner,
    "her.py": check_her,
    "grpo.py": check_grpo,
    "larger_than_memory.py": check_larger_than_memory,
    "r2d2.py": check_r2d2,
    "recurrent_slices.py": check_recurrent_slices,
    "resumable_training.py": check_resumable_training,
    "offline_minari.py": check_offline_minari,
    "offline_to_online.py": check_offline_to_online,
    "own_storage.py": check_own_storage,
    "sampling_log.py": check_sampling_log,
    "simulated_environments.py": check_simulated_environments,
    "two_indexes.py": check_two_indexes,
}
#: Arguments of those that take longer to show all they can.
QUICKLY = {
    **{f"{agent}.py": ["--steps", "210", "--warmup", "180"] for agent in AGENTS},
    **{f"{agent}.py": ["--steps", "290", "--warmup", "260"] for agent in ("sac", "td3")},  # of larger batches
    "ddp_dqn.py": ["--worlds", "2,1", "--steps", "100"],
    "ddp_one_store.py": ["--updates", "120"],
    "gpu_learner.py": ["--steps", "300", "--warmup", "200"],
    "her.py": ["--bits", "10", "--steps", "1600"],
    "grpo.py": ["--updates", "8"],
    "larger_than_memory.py": ["--memory", "0", "--updates", "60"],
    "offline_to_online.py": ["--updates", "1500"],
    "r2d2.py": ["--steps", "400"],
    "simulated_environments.py": ["--steps", "70"],
    "recurrent_slices.py": ["--steps", "300", "--seed", "1"],
}


#: What needs more than the tests have: tests/doors runs it.
APART = {"jax_dqn.py"}


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - APART))
def test_example(name, tmp_path):
    CHECKS[name](output_of(name, tmp_path))
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


def test_an_agent_goes_on_where_it_was(tmp_path):
    """``sac`` with a folder: rows and weights of the last start are there, and steps are counted on."""
    first, second = (
        output_of("sac.py", tmp_path, "--steps", steps, "--warmup", steps, "--folder", str(tmp_path))
        for steps in ("250", "460")
    )
    assert re.findall(r"^step (\d+)", first + second, re.MULTILINE) == ["200", "450"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.pt", "replay"]


def test_examples_are_short_enough_to_copy():
    assert CHECKS
    for name in {*CHECKS} | APART:
        assert len((EXAMPLES / name).read_text().splitlines()) < 180, name
