"""The learning curve of a run."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path


def plot(returns: list[float], kills: list[int], window: int, solved: float, path: Path) -> None:
    """Draw the return of every episode, the mean of the last ``window``, and the episodes at which processes were killed."""
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    axes.plot(range(1, len(returns) + 1), returns, color="0.75", linewidth=1, label="return of an episode")
    means = [statistics.fmean(returns[i - window : i]) for i in range(window, len(returns) + 1)]
    axes.plot(range(window, len(returns) + 1), means, label=f"mean of the last {window}")
    axes.axhline(solved, color="0.4", linestyle=":", label="solved")
    for number, kill in enumerate(kills):
        axes.axvline(kill, color="tab:red", linestyle="--", label="" if number else "kill -9")
    axes.set(xlabel="episode", ylabel="return", title="DQN on CartPole-v1")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
