"""Folders as TorchRL dumps them."""

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from engram.torchrl.dumps import read

MAX32 = float(torch.finfo(torch.float32).max)


# ---- help ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def torchrl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchrl")
        import torchrl.data
        import torchrl.data.replay_buffers.checkpointers
    return torchrl.data


def quietly_read(path, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not read, and lost")
        return read(path, **options)


def columns_of(dump):
    columns = []
    for field in dump.fields:
        out = torch.empty(dump.length, *field.shape, dtype=getattr(torch, field.dtype))
        dump.read_rows(field.key, out)
        columns.append(out)
    return columns


def raw(tensor):
    tensor = tensor.contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def snapshot(folder):
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        status = path.lstat()
        found[str(path)] = (
            status.st_mode,
            status.st_size,
            status.st_mtime_ns,
            path.read_bytes() if path.is_file() and not path.is_symlink() else None,
        )
    return found


def oldest_first(dump, values):
    rows = [p % dump.capacity for p in range(dump.position - dump.length, dump.position)]
    return values[rows].tolist()


def put(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())


def leaf(tensor):
    return {"device": "cpu", "shape": list(tensor.shape), "dtype": str(tensor.dtype), "is_nested": False}


def make_tensordict(folder, entries, shape):
    """A memory-mapped TensorDict, as tensordict writes it."""
    meta = {}
    for key, value in entries.items():
        if isinstance(value, dict):
            meta[key] = {"type": "TensorDict"}
            make_tensordict(folder / key, value, shape)
        else:
            meta[key] = leaf(value)
            put(folder / f"{key}.memmap", raw(value))
    put(folder / "meta.json", {**meta, "shape": shape, "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"})


def make_dump(path, entries, length, *, writer=None, batch_size=4):
    """A dump by hand. ``entries``: tensors of full capacity."""
    first = next(iter(entries.values()))
    make_tensordict(path / "storage", entries, [len(first)])
    put(path / "storage" / "storage_metadata.json", {"metadata": {}, "is_pytree": False, "len": length})
    if writer is not None:
        put(path / "writer" / "metadata.json", writer)
    put(path / "buffer_metadata.json", {"batch_size": batch_size, "consume_after_n_samples": None})
    return path


def make_priorities(path, sums, mins=None, *, alpha=0.6, beta=0.4, eps=1e-8, largest=(1.0, 0.0), capacity=None, **more):
    mins = [s or MAX32 for s in sums] if mins is None else mins
    put(path / "sampler" / "sumtree.memmap", np.array(sums, dtype="<f8").tobytes())
    put(path / "sampler" / "mintree.memmap", np.array(mins, dtype="<f8").tobytes())
    state = {"_alpha": alpha, "_beta": beta, "_eps": eps, "_max_priority": largest}
    put(
        path / "sampler" / "sampler_metadata.json",
        {**state, "_max_capacity": float(len(sums) if capacity is None else capacity), "_schema_version": 1, **more},
    )
    return path


ENTRIES = {"obs": torch.arange(30.0).reshape(10, 3), "next": {"done": torch.arange(10) % 2 == 0}}


@pytest.fixture
def plain(tmp_path):
    """Six rows of ten."""
    return make_dump(tmp_path / "dump", ENTRIES, 6, writer={"cursor": 6, "write_count": 6})


@pytest.fixture
def full(plain):
    """Everything at once, with priorities, ranks and a generator."""
    make_priorities(plain, [0.5, 1.0, 0.0, 2.0, 1.5, 3.0, 0, 0, 0, 0], largest=(3.0, 5.0))
    writer = {"cursor": 6, "write_count": 6, "rank_key": ["next", "reward"], "dtype": "torch.float32", "shape": [6, 2]}
    put(plain / "writer" / "metadata.json", writer)
    ranks = torch.tensor([[0.5, 3], [1.5, 2], [2.5, 5], [3.5, 0], [4.5, 1], [5.5, 4]])
    put(plain / "writer" / "current_top_values.memmap", raw(ranks))
    make_tensordict(plain / "rng_state", {"rng_state": torch.Generator().manual_seed(3).get_state()}, [])
    return plain


# ---- damage --------------------------------------------------------------------------------------------------------------


def edit(name, **changes):
    """A change of a JSON file: values by name, None removes."""

    def change(path):
        tree = json.loads((path / name).read_text())
        for key, value in changes.items():
            tree.pop(key, None) if value is None else tree.update({key: value})
        put(path / name, tree)

    return change


def text(name, old, new):
    def change(path):
        before = (path / name).read_text()
        assert old in before
        (path / name).write_text(before.replace(old, new, 1))

    return change


META = "storage/meta.json"


def obs(**changes):
    return edit(META, obs={**leaf(ENTRIES["obs"]), **changes})


# ---- what is opened ------------------------------------------------------------------------------------------------------

_watching: list[list] = []


def _hook(event, args):
    if _watching and event in ("open", "mmap.__new__", "os.mkdir", "os.rename", "os.remove", "pickle.find_class"):
        _watching[-1].append((event, *args))


@contextlib.contextmanager
def watched():
    if not hasattr(sys, "_engram_watches_opens"):
        sys.addaudithook(_hook)
        sys._engram_watches_opens = True
    _watching.append([])
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


def faults(events):
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    for event, *args in events:
        if event == "mmap.__new__" and args[0] == -1:  # memory of no file, in which tickets lie
            continue
        if event != "open":
            yield event
        elif args[2] & writing:
            yield f"{args[0]} for writing"
        elif str(args[0]).endswith((".pkl", ".pickle", ".pt", ".t")):
            yield f"{args[0]}, a pickle"
