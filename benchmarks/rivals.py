"""The libraries compared: which versions, what of them loaded, and the same buffer built with each.

A library that cannot be imported is no error: its cells stay empty and the report says why.
"""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

TORCH_LIKE = ("engram", "TorchRL")
STORAGES = {"list": "ListStorage", "tensor": "LazyTensorStorage", "memmap": "LazyMemmapStorage"}

SHORT = {key: name.removesuffix("Storage") for key, name in STORAGES.items()}

_DISTRIBUTIONS = {
    "engram": "engram",
    "TorchRL": "torchrl",
    "cpprb": "cpprb",
    "rlox": "rlox",
    "SB3": "stable-baselines3",
    "CleanRL": "cleanrl",
}
_MODULES = {
    "engram": "engram",
    "TorchRL": "torchrl.data",
    "cpprb": "cpprb",
    "rlox": "rlox",
    "SB3": "stable_baselines3.common.buffers",
    "CleanRL": "cleanrl",
}
_PINS = Path(__file__).parents[1] / "constraints.txt"


@dataclass(frozen=True)
class Library:
    """``module`` holds the buffer classes, None where the import failed; ``notes`` is for the report."""

    name: str
    module: Any
    version: str
    notes: tuple[str, ...]


Libraries = dict[str, Library]


def load() -> Libraries:
    """Import all of them and silence their creation logs, which filling would write inside the clock."""
    libraries = {name: _load(name) for name in _MODULES}
    for logger in ("torchrl", "engram"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return libraries


def _load(name: str) -> Library:
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        return Library(name, None, "absent", (f"{name} could not be imported: {_without_paths(error)}.",))
    found = getattr(module, "__version__", None) or _installed(_DISTRIBUTIONS[name])
    notes = []
    pinned = _pin(_DISTRIBUTIONS[name])
    if pinned is not None and found != pinned:
        notes.append(f"{name} {found} is not the pinned version, {pinned}.")
    if name == "TorchRL":
        notes.extend(_torchrl_extension(found))
    return Library(name, module, found, tuple(notes))


def _torchrl_extension(found: str) -> list[str]:
    """TorchRL's C++ extension fits one torch; with another it is missing, silently until it is needed."""
    try:
        importlib.import_module("torchrl._torchrl")
    except ImportError as error:
        torch_version = torch.__version__.partition("+")[0]
        missing = f"its C++ extension did not load with torch {torch_version} ({_without_paths(error)})"
        return [f"TorchRL {found}: {missing}. Its prioritized samplers need it."]
    return []


def _without_paths(error: ImportError) -> str:
    """Only the reason: the loader's message starts with a path and contains mangled names."""
    reason = str(error).rsplit(".so: ", 1)[-1]
    return reason.split(": ", 1)[0] if reason.startswith("undefined symbol") else reason


def _pin(distribution: str) -> str | None:
    """The version that ``make`` installs; None for what it does not pin, such as engram itself."""
    for line in _PINS.read_text().splitlines():
        name, _, pinned = line.partition("==")
        if name == distribution:
            return pinned
    return None


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def set_threads(libraries: Libraries, count: int) -> None:
    """One setting for everybody: TorchRL copies with torch's threads, engram with its own; cpprb knows only
    one.
    """
    torch.set_num_threads(count)
    engram = libraries["engram"].module
    if engram is not None:
        engram.set_num_threads(count)


def torch_like(
    library: Library,
    storage: str,
    capacity: int,
    folder: Path,
    *,
    batch_size: int,
    collate_fn: Any = None,
    buffer: str = "ReplayBuffer",
    shared: bool = False,
    prefetch: int = 0,
    **more: Any,
) -> Any:
    """An empty buffer of engram or TorchRL, which take the same arguments; ``storage`` is a key of
    ``STORAGES``, ``more`` is for it.

    Both get a folder for memory-mapped files, so both are on the same file system. ``shared`` is for other
    processes; TorchRL's storage in RAM is one for all of them only with ``shared_init``, which keeps it in a file.
    """
    options: dict[str, Any] = dict(more)
    if storage == "memmap":
        folder.mkdir(parents=True, exist_ok=True)
        options["scratch_dir"] = str(folder / library.name)
    elif shared and library.name == "TorchRL":
        options["shared_init"] = True
    kind = getattr(library.module, STORAGES[storage])
    return getattr(library.module, buffer)(
        storage=kind(capacity, **options),
        batch_size=batch_size,
        collate_fn=collate_fn,
        **({"shared": True} if shared else {}),
        **({"prefetch": prefetch} if prefetch else {}),
    )


def cpprb_buffer(library: Library, fields: Mapping[str, np.ndarray], capacity: int, folder: Path | None = None) -> Any:
    """An empty cpprb buffer for rows like those of ``fields``; in files under ``folder`` if one is given."""
    schema = {key: {"shape": value.shape[1:] or 1, "dtype": value.dtype} for key, value in fields.items()}
    if folder is None:
        return library.module.ReplayBuffer(capacity, schema)
    (folder / library.name).mkdir(parents=True, exist_ok=True)
    return library.module.ReplayBuffer(capacity, schema, mmap_prefix=str(folder / library.name / "rows"))
