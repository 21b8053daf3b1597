"""Imports and exports of data sets, as the commands ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from engram import datasets

_OF_SUFFIX = {".hdf5": "hdf5", ".h5": "hdf5", ".parquet": "parquet", ".npz": "numpy", ".pkl": "sb3"}
_OF_FILE = {"buffer_metadata.json": "torchrl", "metadata.json": "minari", "data/metadata.json": "minari"}
_OF_FILE |= {"meta/info.json": "lerobot", "_versions": "lance"}


def kind_of(source: Path) -> str:
    """What a file or folder holds, as its name and files say. What is not there is the name of a data set of Minari's."""
    if source.is_dir():
        return next((kind for name, kind in _OF_FILE.items() if (source / name).exists()), "parquet")
    return _OF_SUFFIX.get(source.suffix, "minari")


def load(source: str, directory: Path, kind: str | None, rename: Sequence[str], end_keys: Sequence[str]) -> None:
    """Import a data set, and say what its fields become. Raises: as :func:`engram.datasets.from_numpy`."""
    pairs = [pair.partition("=") for pair in rename]
    names = {tuple(old.split("/")): tuple(new.split("/")) if new else None for old, _, new in pairs}
    how = {"rename": names, "show": click.echo, "end_keys": [tuple(key.split("/")) for key in end_keys] or None}
    kind = kind or kind_of(Path(source))
    data = dict(np.load(source, allow_pickle=False)) if kind == "numpy" else source
    getattr(datasets, f"from_{kind}")(data, directory, **how).close()


def export(directory: Path, out: Path, kind: str, *, repeat_final: bool, fps: float | None) -> None:
    """Export a store. Raises: as :func:`engram.datasets.to_minari`."""
    how = {"fps": fps} if kind == "lerobot" else {"final": "repeat" if repeat_final else "refuse"}
    getattr(datasets, f"to_{kind}")(directory, out, **how)
