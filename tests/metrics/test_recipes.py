"""The recipes of docs/metrics.md for TensorBoard, W&B and MLflow, with the libraries themselves where they are installed."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.partition("### TensorBoard")[2], re.DOTALL | re.MULTILINE)


@pytest.fixture
def names():
    """What the blocks define, run as the page shows them."""
    rb = ReplayBuffer(storage=LazyTensorStorage(500), sampler=PrioritizedSampler(500, 0.6, 0.4), batch_size=32)
    rb.extend(torch.arange(500))
    found = {"rb": rb}
    for block in BLOCKS:
        exec(block, found)
    return found


def test_what_is_logged_has_names_and_values_that_all_three_take(names):
    ((_, first), *_) = names["run"].said
    assert first["replay/size"] == 500
    for name, value in first.items():
        assert re.fullmatch(r"[\w/. -]+", name), "MLflow takes no other names"
        assert isinstance(value, int | float), name
        float(value)


def test_tensorboard_has_all_numbers(names, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as names["writer"]:
        names["training"](names["rb"], names["log_fn"])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {f"replay/{name}" for name in names["rb"].stats()} == set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("replay/replay_ratio")] == [0, 100, 200]


def test_wandb_has_the_call_of_the_recipe():
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    assert {"data", "step"} <= inspect.signature(wandb.sdk.wandb_run.Run.log).parameters.keys()


def test_mlflow_has_the_call_of_the_recipe():
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    assert {"metrics", "step"} <= inspect.signature(mlflow.log_metrics).parameters.keys()
