"""Recipes run with engram's buffers: one written here in the shape of TorchRL's, and TorchRL's own where they are at hand."""

import importlib.util

import pytest
import torch

from tests.recipes import __main__ as command
from tests.recipes import running, settings

pytest.importorskip("torchrl")

OWN = """
import argparse
import torch
import torchrl.data as d
from tensordict import TensorDict
from torchrl.data import (
    Composite,
    LazyTensorStorage,  # rows
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
import helper


def main():
    spec = Composite()
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(32), sampler=SamplerWithoutReplacement(), batch_size=8
    )
    other = d.ReplayBuffer(storage=helper.storage(16), batch_size=4)
    for first in range(0, 64, 16):
        rb.extend(TensorDict({"x": torch.arange(first, first + 16)}, [16]))
        other.extend(torch.arange(16))
        assert sorted(x for batch in rb for x in batch["x"].tolist()) == sorted(rb[:]["x"].tolist())
        assert other.sample().shape == (4,)


if __name__ == "__main__":
    main()
"""
HELPER = (
    "import torchrl.data.replay_buffers as b\n\n\ndef storage(size):\n    return b.storages.LazyMemmapStorage(size)\n"
)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of recipes that holds one of ours, under the name of one that is known."""

    def make(program, **more):
        folder = tmp_path / "recipes"
        (folder / "own").mkdir(parents=True)
        (folder / "own/own.py").write_text(program)
        if "helper" in program:
            (folder / "own/helper.py").write_text(HELPER)
        recipe = settings.Recipe("own/own.py", {}, **{"needs": (), **more})
        monkeypatch.setattr(running, "RECIPES", {"own": recipe})
        return folder

    return make


def test_a_recipe_of_ours_in_that_shape(own):
    folder = own(OWN)
    result = running.run(folder, "own")
    assert result.ran, result.why
    assert result.rows == 64
    assert result.batches >= 8
    assert set(result.classes) == {
        *("TensorDictReplayBuffer", "SamplerWithoutReplacement", "ReplayBuffer", "RandomSampler")
    }
    assert (folder / "own/own.py").read_text() == OWN  # the recipe itself stays


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import torch\n", "it imports no buffer class"),
        (OWN.replace("    main()\n", "    raise SystemExit('tired')\n"), "tired"),
        (OWN.replace("    main()\n", "    pass\n"), "engram's buffers were not used"),
        (OWN.replace("(4,)", "(5,)"), "AssertionError"),
    ],
)
def test_a_recipe_that_fails_says_why(own, program, said):
    result = running.run(own(program), "own")
    assert result.outcome == "failed"
    assert said in result.why


def test_what_is_missing_is_told(own, tmp_path):
    result = running.run(own(OWN, needs=("no_such_module",)), "own")
    assert (result.outcome, result.why) == ("skipped", "needs no_such_module")
    result = running.run(tmp_path, "own")
    assert (result.outcome, result.why) == ("skipped", "there is no own/own.py")


def test_the_command_skips_without_recipes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["recipes", str(tmp_path / "none")])
    assert command.main() == 0
    assert "Skipped: TorchRL's recipes are not at hand" in capsys.readouterr().out


#: Those that `make recipes` has run; they may only become more.
HELD = {
    *("dqn", "ddpg", "td3", "sac", "ppo", "a2c"),
    *("iql, online", "iql, offline", "decision transformer", "dreamer"),
}


def test_none_is_dropped():
    assert set(settings.RECIPES) >= HELD


@pytest.mark.stress(sample=2)
@pytest.mark.parametrize("name", sorted(settings.RECIPES))
def test_a_recipe_of_torchrls(name):
    folder = running.at_hand()
    if folder is None or importlib.util.find_spec("hydra") is None:
        pytest.skip("TorchRL's recipes, or hydra, are not at hand: make recipes")
    torch.manual_seed(0)
    result = running.run(folder, name)
    if result.outcome == "skipped":
        pytest.skip(result.why)
    assert result.ran, result.why
