"""The accelerator: everything that engram asks of CUDA, or of another accelerator that torch knows, goes through one class.

Importing this module loads neither libcuda nor Triton. The driver is loaded with the first call that needs it.

Unproven: no test of this project has run these calls on a GPU yet, because the prototypes do not use them.

- of the driver: ``cuInit``, ``cuDeviceGet``, ``cuDeviceGetAttribute`` (100, 113), ``cuDevicePrimaryCtxRetain``, ``cuCtxPushCurrent_v2``,
  ``cuCtxPopCurrent_v2``, ``cuThreadExchangeStreamCaptureMode``, ``cuMemHostRegister_v2`` (the prototypes call torch's
  ``cudaHostRegister`` with flags 0), ``cuMemHostUnregister``, ``cuMemHostGetDevicePointer_v2``, ``cuGetErrorName``
- of torch: ``cuda.graph(stream=…, capture_error_mode="thread_local")``, ``cuda.is_current_stream_capturing``, ``cuda.mem_get_info``,
  ``cuda.memory_reserved``, ``cuda.memory_allocated``, ``cuda.get_device_capability``, ``cuda.device(…)``, ``Event.query``
- of Triton: ``atomic_cas`` and ``atomic_xchg`` of words of 64 bits, with which kernels keep resident rows, and all kernels of
  ``row_kernels.py``. What the interpreter cannot show of them: a barrier between phases that orders writes to the device's memory for one
  program (``tl.debug_barrier``), ``tl.atomic_max`` of int64, cumulative sums of float64 in several warps, and loads of kernels before a
  capture, by launches for no rows; and that the last of several programs, by a counter, sees what the others have stored
- of batches that are read ahead (``direct.py``): replays of a graph on a stream of its own, and ``record_stream`` of its blocks
- of a mirror (``mirror.py``): ``cuda.Stream`` and ``Event.synchronize`` in a thread of its own, in the relaxed capture mode, while the
  learner's thread captures with torch's ``capture_error_mode="global"``; ``index_select(…, out=…)`` into views of one block of bytes

Streams, events, ``record_stream`` and pinned memory have been used on one, by ``DeviceLoader``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import sys
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from engram._support.devices import free_bytes, missing_for_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

__all__ = ["ALREADY_REGISTERED", "Accelerator", "DriverError", "HostMemory"]

#: The driver's code for memory that this process has registered already, or that CUDA has allocated.
ALREADY_REGISTERED = 712
#: Flags of a registration: for every context, with an address on the device; and for memory mapped without the right to write.
_PORTABLE, _DEVICEMAP, _READ_ONLY = 1, 2, 8
#: Attributes of a device: it reads through the host's page tables; it can register memory that is mapped without the right to write.
_USES_HOST_PAGE_TABLES, _REGISTERS_READ_ONLY = 100, 113
#: The capture mode in which a thread may call what would otherwise break a capture that another thread has under way.
_RELAXED = 2
#: Why the driver refuses to register memory.
_REFUSALS = {
    1: "it cannot pin these pages, such as those of a file on a disk",
    2: "it has no memory left to pin or map them",
    ALREADY_REGISTERED: "another part of this program has registered them, or some of them",
    801: "this platform cannot register such memory, such as that of a file on a disk",
}


class DriverError(RuntimeError):
    """A call of the CUDA driver, a function, failed with a ``code`` that CUDA calls ``name``."""

    def __init__(self, call: str, code: int, name: str) -> None:
        why = f": {_REFUSALS[code]}" if code in _REFUSALS and call.startswith("cuMemHost") else ""
        super().__init__(f"{call}: expected success of the CUDA driver, got {code} ({name}){why}.")
        self.call, self.code = call, code


class HostMemory:
    """The source of pinned tensors."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized pinned tensor."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a CPU tensor is in pinned memory."""
        return tensor.is_pinned()


@functools.cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver. Raises ``OSError``: there is none."""
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Call the driver. Raises ``DriverError``. torch does not learn of a failure, so its next kernel does not raise it."""
    code: int = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise DriverError(name, code, (text.value or b"a code without a name").decode())


class Accelerator:
    """An accelerator: streams and events, copies from and to the host, captures, and registered memory of the host.

    Streams, events and copies work on every accelerator of torch's; the rest is CUDA's. The device, an existing one with its index, is the
    current one during each call, whatever the thread's current device is.
    """

    #: Captures that are under way in any thread, by :meth:`capture`.
    captures: ClassVar[list[object]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = HostMemory()

    @functools.cached_property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    # ---- streams and events ------------------------------------------------------------------------------------------

    def stream(self) -> torch.Stream:
        """A new stream."""
        return cast("torch.Stream", self._module.Stream(self.device))

    #: The streams of copies to the device, and from it, made when they are first needed.
    up, down = functools.cached_property(stream), functools.cached_property(stream)

    def current(self) -> torch.Stream:
        """The calling thread's stream."""
        return cast("torch.Stream", self._module.current_stream(self.device))

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """A context in which work is queued on a stream."""
        return cast("AbstractContextManager[object]", self._module.stream(stream))

    def active(self) -> AbstractContextManager[object]:
        """A context in which the device is the current one, as kernels need that are launched without :meth:`launch`."""
        return cast("AbstractContextManager[object]", self._module.device(self.device))

    def mark(self, stream: torch.Stream) -> torch.Event:
        """An event after all work that is queued on a stream."""
        return stream.record_event()

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make work that is queued on a stream from now on wait for an event. The host does not wait."""
        stream.wait_event(event)

    def after(self, before: torch.Stream | None) -> torch.Stream | None:
        """The stream in use, whose work from now on comes after what is queued on an earlier one. None: it is no CUDA device."""
        if self.device.type != "cuda":
            return None
        stream = self.current()
        if before is not None and stream != before:
            self.wait(stream, self.mark(before))
        return stream

    def finish(self, stream: torch.Stream | None = None) -> None:
        """Wait on the host until the work that is queued on a stream has ended; None: on every stream of the device."""
        with self.beside_captures():
            if stream is None:
                self._module.synchronize(self.device)
            else:
                self.mark(stream).synchronize()

    def launch(self, kernel: Callable[..., object], *arguments: object, **constants: object) -> None:
        """Queue a kernel on the stream in use. ``kernel``: called with the rest, such as a Triton kernel with its grid."""
        with self.active():
            kernel(*arguments, **constants)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device == self.device

    def keep(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Do not reuse a tensor's memory before the work that is now queued on a stream has ended."""
        tensor.record_stream(stream)

    def send(self, tensor: Tensor) -> Tensor:
        """A copy on the device, queued on the stream in use."""
        return tensor.to(self.device, non_blocking=True)

    def bring(self, tensor: Tensor) -> Tensor:
        """As :meth:`send`, of any tensor: one of the host goes through pinned memory, so that the host need not wait."""
        return self.send(tensor.pin_memory() if tensor.is_cpu and self.device.type == "cuda" else tensor)

    def receive(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory, queued on the stream in use."""
        return self.memory.empty(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)

    def room(self) -> tuple[int, int]:
        """Bytes of a device's memory: those that new tensors may have, and all; of others than CUDA's no limit is known."""
        free = free_bytes(self.device)
        return (sys.maxsize, sys.maxsize) if free is None else (free, int(self._module.mem_get_info(self.device)[1]))

    # ---- captures ----------------------------------------------------------------------------------------------------

    def capturing(self, stream: torch.Stream | None = None) -> bool:
        """Whether a graph is being captured on a stream; None: on the calling thread's."""
        if self.device.type != "cuda":
            return False
        with self.active() if stream is None else self.on(stream):
            return bool(self._module.is_current_stream_capturing())

    def check_not_capturing(self, call: str, why: str) -> None:
        """Raises ``RuntimeError`` if a graph is being captured on the thread's stream: ``call`` needs the host, for the reason ``why``."""
        if self.capturing():
            raise RuntimeError(
                f"{call}: expected a call outside of a CUDA graph, got one while a graph is captured on {self.device}: {why}. "
                "Call it before the capture, or between replays."
            )

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The kernels that ``work()`` queues, as a graph to ``replay()``. Other threads may use the device meanwhile.

        Kernels must be compiled and loaded before. Memory that ``work`` allocates on the device lives as long as the graph. Raises
        ``RuntimeError``: ``work`` synchronizes, or raises; the stream in use is the one of before.
        """
        with self.active(), self.on(self.current()):  # torch does not go back to that stream if a capture fails
            graph = torch.cuda.CUDAGraph()
            stream = self._module.Stream(self.device)  # torch's own one is on the device of the process's first capture
            self.captures.append(graph)
            try:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    work()
            finally:
                self.captures.remove(graph)
        return graph

    # ---- memory of the host that the device reads --------------------------------------------------------------------

    def obstacle(self) -> str | None:
        """Why the device cannot read memory of the host by kernels; None: it can, unless the driver refuses to register certain memory."""
        if self.device.type != "cuda":
            return f"{self.device} is no CUDA device"
        return missing_for_kernels() or self._missing_on_device()

    def register(self, address: int, nbytes: int, *, readonly: bool = False) -> None:
        """Pin memory of the host, and map it for all devices. ``readonly``: it is mapped without the right to write.

        Raises ``DriverError``: 1, 2 or 801: refused; 712: registered already, in part or as a whole.
        """
        with self.beside_captures():
            flags = _PORTABLE | _DEVICEMAP
            if readonly and self._attribute(_REGISTERS_READ_ONLY):
                flags |= _READ_ONLY
            _call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags)

    def unregister(self, address: int) -> None:
        """Undo :meth:`register` of that address. No work that reads it may be queued. Raises ``DriverError``."""
        with self.beside_captures():
            _call("cuMemHostUnregister", ctypes.c_void_p(address))

    def device_address(self, address: int) -> int:
        """Where the device sees registered or pinned memory of the host. Raises ``DriverError``: it does not."""
        found = ctypes.c_uint64()
        with self.beside_captures():
            _call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), ctypes.c_void_p(address), 0)
        return found.value

    def _missing_on_device(self) -> str | None:
        major, minor = self._module.get_device_capability(self.device)
        if major < 7:  # its loads cannot be ordered with stores of the CPU
            return f"{self.device} has compute capability {major}.{minor}, below 7.0"
        try:
            if platform.machine() == "aarch64" and not self._attribute(_USES_HOST_PAGE_TABLES):
                return f"{self.device} does not read through the page tables of this ARM machine"
            with self.beside_captures():
                return None
        except (DriverError, OSError) as error:
            return f"the CUDA driver cannot be used ({error})"

    @functools.cached_property
    def _driven(self) -> tuple[int, ctypes.c_void_p]:
        """What the driver calls the device, and its context that torch uses, which lives as long as the process."""
        number, context = ctypes.c_int(), ctypes.c_void_p()
        _call("cuInit", 0)
        _call("cuDeviceGet", ctypes.byref(number), self.device.index)
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        return number.value, context

    def _attribute(self, number: int) -> int:
        found = ctypes.c_int()
        _call("cuDeviceGetAttribute", ctypes.byref(found), number, self._driven[0])
        return found.value

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Inside, the driver knows which device this thread means, and captures of other threads stay whole, whatever they forbid."""
        if self.device.type != "cuda" or torch.version.hip is not None:  # whose devices torch calls the same
            yield
            return
        mode = ctypes.c_int(_RELAXED)
        with contextlib.ExitStack() as undone:
            _call("cuCtxPushCurrent_v2", self._driven[1])
            undone.callback(_call, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
            _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))  # which puts the one of before there
            undone.callback(_call, "cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            yield
