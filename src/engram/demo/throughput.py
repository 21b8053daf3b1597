"""How much a run writes and samples over time, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

#: Seconds over which rates are counted.
BIN_S = 0.5


class Mark(NamedTuple):
    """Something that happened at a second of the run. ``fatal``: a kill."""

    at: float
    text: str
    fatal: bool


class Throughput:
    """The seconds of a run at which rows were acknowledged and batches drawn.

    Args:
        batch: rows of a batch.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.rows: list[float] = []
        self.batches: list[float] = []
        self.marks: list[Mark] = []

    def rates(self, times: Sequence[float], each: int = 1) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Events per second in every bin of the run: the bins' middles, and ``each`` times as many as ``times`` fall into them."""
        last = max([*self.rows, *self.batches, *(mark.at for mark in self.marks)], default=0)
        edges = np.arange(0, last + 2 * BIN_S, BIN_S)
        counts, _ = np.histogram(times, edges)
        return edges[:-1] + BIN_S / 2, counts * (each / BIN_S)

    def plot(self, path: Path) -> None:
        """Draw rows and samples per second, and the marks, into a PNG."""
        from matplotlib.figure import Figure  # takes a second

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        above, below = figure.subplots(2, sharex=True)
        self._draw(above, self.rows, 1, "rows written /s", "tab:blue")
        self._draw(below, self.batches, self.batch, "rows sampled /s", "tab:green")
        for mark in self.marks:
            above.annotate(
                f" {mark.text}", (mark.at, 1), xycoords=("data", "axes fraction"), va="bottom", rotation=20, fontsize=8
            )
        below.set_xlabel("seconds")
        figure.savefig(path, dpi=120)

    def _draw(self, axes: Axes, times: Sequence[float], each: int, label: str, color: str) -> None:
        seconds, rates = self.rates(times, each)
        axes.fill_between(seconds, rates, step="mid", color=color, alpha=0.6, linewidth=0)
        for mark in self.marks:
            axes.axvline(mark.at, color="tab:red" if mark.fatal else "0.4", linestyle="--" if mark.fatal else ":")
        first = min([*self.rows, *(mark.at for mark in self.marks)], default=0)
        axes.set(ylabel=label, xlim=(max(first - 2, 0), seconds.max(initial=0) + 1), ylim=(0, None))
        axes.yaxis.set_major_formatter("{x:,.0f}")
