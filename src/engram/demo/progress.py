"""What the two training processes hand over: weights, counters and what was measured. Arrays and JSON, no code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engram.demo.task import WINDOW

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Progress"]


@dataclass
class Progress:
    """Where training stands."""

    seed: int
    sampler: str = "uniform"
    steps: int = 0
    updates: int = 0
    solved: bool = False
    returns: list[float] = field(default_factory=list)
    """Of finished episodes."""
    replaced_at: int | None = None
    """Episodes finished when the process was replaced."""
    sample_us: list[float] = field(default_factory=list)
    """Time of each ``sample``, of the last thousands of updates."""
    priority_us: list[float] = field(default_factory=list)
    """Time of each update of priorities, next to nothing without any."""
    update_us: list[float] = field(default_factory=list)
    """Time of sampling, learning and updating priorities together."""
    ages: list[int] = field(default_factory=list)
    """Rows written between a sampled row and its sampling, for some of the samples."""

    @property
    def recent_return(self) -> float:
        """Mean return of the last 20 episodes; 0 before there are 20."""
        return sum(self.returns[-WINDOW:]) / WINDOW if len(self.returns) >= WINDOW else 0.0

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write ``progress.json`` and ``weights.npz``: each is the old file or the new one, never a part."""
        weights = folder / "weights.tmp.npz"
        np.savez(weights, allow_pickle=False, **{name: value.numpy() for name, value in tensors.items()})
        weights.replace(folder / "weights.npz")
        text = folder / "progress.json.tmp"
        text.write_text(json.dumps(asdict(self)))
        text.replace(folder / "progress.json")

    @classmethod
    def load(cls, folder: Path) -> tuple[Progress, dict[str, Tensor]]:
        """What :meth:`save` wrote."""
        progress = cls(**json.loads((folder / "progress.json").read_text()))
        with np.load(folder / "weights.npz", allow_pickle=False) as arrays:
            return progress, {name: torch.from_numpy(arrays[name]) for name in arrays.files}
