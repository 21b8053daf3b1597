"""Buffers that fields are added to, and their other processes."""

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import torch

from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from tests.store.processes import Child, context

KINDS = ["ram", "shared", "disk", "grouped"]
CAPACITY = 8
CAPACITY = 8


@contextlib.contextmanager
def made(kind, capacity=CAPACITY, **options):
    with tempfile.TemporaryDirectory() as folder:
        if kind in ("ram", "shared"):
            storage = LazyTensorStorage(capacity)
        else:
            grouped = 64 if kind == "grouped" else 0
            storage = LazyMemmapStorage(capacity, scratch_dir=Path(folder) / "store", group_small_fields=grouped)
        rb = ReplayBuffer(storage=storage, shared=kind == "shared", **options)
        try:
            yield rb
        finally:
            rb.close()


def flat(data, path=()):
    if isinstance(data, dict):
        return {key: value for name, child in data.items() for key, value in flat(child, (*path, name)).items()}
    return {path: data}


def nested(entries):
    data = {}
    for path, value in entries.items():
        at = data
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = value
    return data


class Other:
    """A buffer in a process of its own, which does what it is told."""

    def __init__(self, rb, method="fork"):
        self.pipe, theirs = context(method).Pipe()
        self.child = Child(serve, rb, theirs, method=method)
        theirs.close()

    def __getattr__(self, name):
        return lambda *arguments, **options: self._asked(name, arguments, options)

    def _asked(self, name, arguments, options):
        self.pipe.send((name, arguments, options))
        assert self.pipe.poll(100), "the other process does not answer"
        error, result = self.pipe.recv()
        if error is not None:
            raise error
        return result

    def rows(self):
        return self._asked("rows", (), {})

    def end(self):
        self.pipe.send(None)
        self.child.join()


def numpy_of(data):
    return nested({key: torch.as_tensor(value).numpy().copy() for key, value in flat(data).items()})


def serve(rb, pipe):
    while (asked := pipe.recv()) is not None:
        name, arguments, options = asked
        try:
            if name == "rows":
                result = numpy_of(rb[:])
            elif name == "row":
                result = rb[arguments[0]].numpy()
            elif name == "sample":
                result = numpy_of(rb.sample(*arguments))
            else:
                result = getattr(rb, name)(*arguments, **options)
                result = result.numpy() if isinstance(result, torch.Tensor) else None
            pipe.send((None, result))
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            pipe.send((error, None))
    rb.close()


def tensors(data):
    return nested({key: torch.from_numpy(np.asarray(value)) for key, value in flat(data).items()})
