"""CUDA graphs as torch has them, imitated on the CPU: what was recorded is done again on the same memory at each replay."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engram.store.device.row_operations import RowKernels

CAPTURING = "engram.store.device.accelerator.Accelerator.capturing"


LAUNCH = "engram.store.device.row_operations.RowKernels._launch"


class _Recorder(TorchDispatchMode):
    def __init__(self, steps):
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, result))
        return result


class Graph:
    """Records the operations of a call, which changes nothing then.

    Args:
        monkeypatch: of pytest.
        state: tensors that the call changes.
        call: what is captured; :attr:`result` is what it returns, which each replay fills anew.
    """

    def __init__(self, monkeypatch, state, call):
        self._steps = []
        before = [tensor.clone() for tensor in state]
        with monkeypatch.context() as patched:
            patched.setattr(CAPTURING, lambda *_: True)
            patched.setattr(LAUNCH, self._launched(RowKernels._launch))
            with _Recorder(self._steps):
                self.result = call()
        for tensor, was in zip(state, before, strict=True):
            tensor.copy_(was)

    def _launched(self, launch):
        """What launches a kernel, and notes it."""

        def launched(kernels, *arguments, **constants):
            with _disable_current_modes():  # kernels run in the interpreter, whose operations are none of the graph's
                launch(kernels, *arguments, **constants)
            self._steps.append((launch, (kernels, *arguments), constants, None))

        return launched

    def replay(self):
        for _ in self.replaying():
            pass

    def replaying(self):
        """A replay, which goes on as it is iterated: before each operation."""
        for func, args, kwargs, result in self._steps:
            yield func, args
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # else it is a view, or was changed in place
                    old.copy_(new)


def _tensors(result):
    parts = result if isinstance(result, list | tuple) else [result]
    return [x for x in parts if isinstance(x, torch.Tensor)]


def state_of(storage, sampler=None):
    """All that calls on a storage on a device change there."""
    rows = storage.store.rows
    state = [*rows.whole, rows.numbers, rows.edited, rows.cursor, rows.begun, rows.tally, rows.last]
    if isinstance(rows.work, RowKernels):
        state.append(rows.work._state)
    for tree in rows.trees:
        state += [*tree.tree.sums, *tree.tree.lows, tree.highest_there]
    return state
