"""Rows of the page on moving from TorchRL: each has a test that exists, and rows only become more."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/moving/torchrl.md"
TRANSFORMS = "tests/transforms/test_torchrls_transforms.py::test_as_in_torchrls_buffer"
FAMILY = "tests/buffer/test_trainers.py::test_a_trainer_of_each_family"
RECIPE = "tests/recipes/test_recipes.py::test_a_recipe_of_torchrls"
#: What the first cell of a row begins with, and a test of it. Add rows; take none away.
HELD = {
    "`dqn/dqn_cartpole.py`": RECIPE,
    "`ddpg/ddpg.py`": RECIPE,
    "`ppo/ppo_mujoco.py`": RECIPE,
    "`iql/iql_online.py`": RECIPE,
    "`iql/iql_offline.py`": RECIPE,
    "`dreamer/dreamer.py`": RECIPE,
    "`Collector`": "tests/buffer/test_collectors.py::test_collectors_with_an_env_creator",
    "`DQNTrainer`": FAMILY,
    "`Trainer` with": "tests/buffer/test_trainers.py::test_a_trainer_is_saved_and_goes_on",
    "`MultiStepTransform`": TRANSFORMS,
    "`CatFrames`": TRANSFORMS,
    "`ActionChunkTransform`": TRANSFORMS,
    "`Reward2GoTransform`": TRANSFORMS,
    "`NextStateReconstructor`": TRANSFORMS,
    "`NextObservationDelta`": TRANSFORMS,
    "`BurnInTransform`": TRANSFORMS,
    "`PolicyAgeFilter`": TRANSFORMS,
    "`MCAdvantage`": TRANSFORMS,
    "`RandomCropTensorDict`": "tests/transforms/test_torchrls_transforms.py::test_a_random_piece_of_every_window",
    "`PinMemoryTransform`": "tests/transforms/test_torchrls_transforms.py::test_pinning_is_asked_for",
    "`VecNormV2`": (
        "tests/transforms/test_torchrls_transforms.py::test_statistics_of_the_second_kind_are_of_environments_only"
    ),
    "`TopKRewardSelector`": "tests/transforms/test_torchrls_transforms.py::test_the_best_answers_to_each_prompt",
}


@pytest.mark.parametrize("row", HELD)
def test_a_row_is_there_and_so_is_its_test(row):
    assert re.search(rf"^\| {re.escape(row)}", PAGE.read_text(), re.MULTILINE), row
    file, _, function = HELD[row].partition("::")
    names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert function in names
