"""What makes the host wait for a device, forbidden.

Torch's ``meta`` device has no data: whatever reads it raises. So calls on a storage there show that none waits; the guard
also names the operations that wait on a real one, though they need no data of it.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations whose result's shape or value the host must know.
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "masked_select",
    "is_nonzero",
    "equal",
    "bincount",
    "repeat_interleave.Tensor",
)


class Waited(AssertionError):
    """Something waited for the device."""


class _Guard(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [*args, *(kwargs or {}).values()]
        tensors = [x for one in given for x in (one if isinstance(one, list | tuple) else [one])]
        there = [x for x in tensors if isinstance(x, torch.Tensor) and x.device.type != "cpu"]
        name = func.name().removeprefix("aten::")
        if there:
            self.operations += 1
            if name.split(".")[0] in WAITING or name in WAITING:
                raise Waited(f"{name} waits for the device")
            if any(
                isinstance(x, torch.Tensor) and x.dtype is torch.bool and x.device.type != "cpu"
                for x in _indices(name, args)
            ):
                raise Waited(f"{name} by a mask waits for the device")
            if name.startswith(("_to_copy", "copy_")) and "cpu" in _target(name, args, kwargs or {}):
                raise Waited(f"{name} to the host waits for the device")
        return func(*args, **(kwargs or {}))


def _indices(name, args):
    return args[1] if name.startswith(("index.", "index_put", "_index_put")) and len(args) > 1 else ()


def _target(name, args, kwargs):
    return str(args[0].device if name.startswith("copy_") else kwargs.get("device", ""))


@contextlib.contextmanager
def no_synchronisation():
    """Raises :class:`Waited`, or what torch raises, where the host waits for a device. Yields what counts operations there."""
    guard = _Guard()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        with guard:
            yield guard
    finally:
        if cuda:
            torch.cuda.set_sync_debug_mode("default")
