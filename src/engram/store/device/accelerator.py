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

A registry says which memory of the host is registered in this process, so that accelerators read it.

Pages are registered once, however many users they have: two loaders of one store, or two blocks that share a page. Registered memory
stays mapped: the registry keeps its tensors until it has unregistered their pages, which it does after the work that reads them.

A fork that Python does not know of, such as one by native code, is not noticed. A CUDA graph that a program replays reads the addresses
of its capture, whatever happened since.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import functools
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from engram._support import devices, fork, mappings, memory
from engram._support.words import no_space
from engram.errors import ForkedHandle

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

    def on(self, stream: torch.Stream) -> contextlib.AbstractContextManager[object]:
        """A context in which work is queued on a stream."""
        return cast("contextlib.AbstractContextManager[object]", self._module.stream(stream))

    def active(self) -> contextlib.AbstractContextManager[object]:
        """A context in which the device is the current one, as kernels need that are launched without :meth:`launch`."""
        return cast("contextlib.AbstractContextManager[object]", self._module.device(self.device))

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
        free = devices.free_bytes(self.device)
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
        return devices.missing_for_kernels() or self._missing_on_device()

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


#: The driver's codes for calls that a capture does not allow.
_CAPTURE_CODES = range(900, 909)
_PAGE = mmap.PAGESIZE
#: How many pages the kernel is asked about at a time.
_PAGES_ASKED = 1 << 18


class NotRegistered(RuntimeError):
    """Memory cannot be registered, or cannot stay so. The text is the cause; rows can be read through the host instead."""


class _Span:
    """Pages that were registered by one call, or that another part of the program had registered."""

    def __init__(self, start: int, end: int, owner: Accelerator, *, readonly: bool) -> None:
        self.start, self.end = start, end
        self.owner, self.readonly = owner, readonly
        #: Whether the registry registered them, and so unregisters them.
        self.owned = False
        #: How many handles need them.
        self.users = 0
        #: The memory on these pages, by address and size. It stays mapped.
        self.tensors: dict[tuple[int, int], Tensor] = {}
        #: Whether a fork may move them (they are copied on write), and how many forks there had been when they were registered.
        self.private, self.forks = False, 0
        #: On which streams of which devices work was queued that reads them; None: in a graph, which may be replayed on any stream.
        self.uses: set[tuple[Accelerator, torch.Stream | None]] = set()
        #: Why they cannot be read any more.
        self.gone: Exception | None = None

    def register(self, forks: int) -> None:
        """Raises ``NotRegistered``."""
        self.forks = forks  # before: a fork that happens meanwhile counts
        try:
            self.owner.register(self.start, self.end - self.start, readonly=self.readonly)
            self.owned = True
        except DriverError as error:
            if error.code != ALREADY_REGISTERED:
                raise NotRegistered(str(error)) from error

    def renew(self, forks: int) -> None:
        """Register them again. Raises ``DriverError``, ``NotRegistered``."""
        self.finish()
        if self.owned:
            self.owned = False
            self.owner.unregister(self.start)
            self.register(forks)
        if not self.owned:
            raise NotRegistered("another part of this program registered it, and the fork may have moved it")

    def finish(self) -> None:
        """Wait for the work that reads them."""
        for accelerator, stream in self.uses:
            accelerator.finish(stream)
        self.uses.clear()

    def free(self) -> bool:
        """Unregister them after the work that reads them. False: a capture is under way, or the device failed; try again later."""
        looked = {*self.uses, (self.owner, None)}
        if self.owner.captures or any(accelerator.capturing(stream) for accelerator, stream in looked):
            return False
        try:
            self.finish()
            if self.owned:
                self.owner.unregister(self.start)
        except DriverError as error:
            return error.code not in _CAPTURE_CODES  # else they are not registered any more
        except RuntimeError:
            return False
        return True


class Registered:
    """Memory that an accelerator reads, until it is closed or collected. Made by :meth:`Registry.register`."""

    def __init__(
        self, registry: Registry, accelerator: Accelerator, extents: Sequence[tuple[int, int]], spans: Sequence[_Span]
    ) -> None:
        self._registry, self._accelerator = registry, accelerator
        #: Hold it from :meth:`use` until the work is queued: other threads register nothing again meanwhile.
        self.turn = registry.turn
        self._extents, self._spans = extents, spans
        self._streams = set[object]()
        self._forks = min([span.forks for span in spans if span.private], default=registry.forks)
        #: Where the device sees the first byte of each tensor; 0 for one without bytes.
        self.addresses: tuple[int, ...] = ()
        self._finalizer = weakref.finalize(self, registry.end, spans)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._finalizer.alive

    def use(self, stream: torch.Stream | None = None) -> bool:
        """Call this before each time that work is queued which reads the memory. The memory stays registered until that has ended.

        Args:
            stream: where the work is queued; None: on the stream in use.

        Returns:
            Whether :attr:`addresses` are others than before: a fork may have moved private memory, which was registered again.

        Raises:
            RuntimeError: it was closed; or a fork happened, and a graph is being captured.
            ForkedHandle: this is a forked child. NotRegistered: the memory could not be registered again.
        """
        if self.closed:
            raise RuntimeError("use: expected registered memory, got some that was closed. Register it again.")
        moved, forks = False, self._registry.forks
        if self._forks != forks:
            self._streams.clear()
            self._registry.renew(self._spans, self._accelerator)
            self._forks, moved = forks, self.locate()
        on = None if self._accelerator.capturing(stream) else stream or self._accelerator.current()
        if on not in self._streams:
            self._streams.add(on)
            for span in self._spans:
                span.uses.add((self._accelerator, on))
        self._registry.settle()
        return moved

    def close(self) -> None:
        """Give it up. The pages are unregistered after the work that reads them, unless others need them. Repeatable."""
        self._finalizer()

    def locate(self) -> bool:
        """Look up the :attr:`addresses`. Whether they are others than before.

        Raises ``NotRegistered``: the device does not see each tensor in one piece.
        """
        look, before = self._accelerator.device_address, self.addresses
        try:
            found = [(look(start), look(start + size - 1)) if size else (0, -1) for start, size in self._extents]
        except DriverError as error:
            raise NotRegistered(f"{self._accelerator.device} does not see all of it: {error}") from error
        if any(last - first != size - 1 for (first, last), (_, size) in zip(found, self._extents, strict=True)):
            raise NotRegistered(f"{self._accelerator.device} does not see it in one piece")
        self.addresses = tuple(first for first, _ in found)
        return self.addresses != before


class Registry:
    """The registered memory of a process. One object stands for a process: :data:`REGISTRY`.

    Args:
        available: says how many bytes of memory are available.
    """

    def __init__(self, available: Callable[[], int] = memory.available_memory) -> None:
        self._available = available
        self._lock, self.turn = fork.lock(), fork.rlock()
        #: By address; no two overlap.
        self._spans: list[_Span] = []
        #: What handles needed that have ended. A finalizer may run anywhere, and waits for no lock.
        self._ended: collections.deque[Sequence[_Span]] = collections.deque()
        self._pid = os.getpid()
        #: How often this process has forked.
        self.forks = 0
        #: How many registrations that no handle needs wait for the end of a capture.
        self.waiting = 0
        fork.registered(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that are registered."""
        return sum(span.end - span.start for span in self._spans)

    def register(self, accelerator: Accelerator, tensors: Sequence[Tensor], *, readonly: bool = False) -> Registered:
        """Let a device read tensors on the host: all of them, or none.

        Args:
            accelerator: the device.
            tensors: on the CPU, dense or strided. They stay in memory until their pages are unregistered.
            readonly: they are mapped without the right to write.

        Raises:
            NotRegistered: there is too little memory, because registering pins all pages; the driver refuses; or a tensor is not on the
                CPU.
        """
        elsewhere = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
        if elsewhere is not None:
            raise NotRegistered(f"expected rows in memory of the host, got some on {elsewhere}")
        extents = [_extent(tensor) for tensor in tensors]
        try:
            with self._lock:
                self._add(_pages(extents), accelerator, readonly=readonly)
                needed: dict[_Span, None] = {}  # in order
                for tensor, piece, extent in zip(tensors, mappings.shared_pieces(tensors), extents, strict=True):
                    for span in self._over(extent[0], sum(extent)):
                        needed[span] = None
                        span.tensors[extent] = tensor
                        span.private |= piece is None
                for span in needed:
                    span.users += 1
                made = Registered(self, accelerator, extents, list(needed))
            try:
                made.locate()
            except BaseException:
                made.close()
                raise
        finally:
            self.settle()
        return made

    def _add(self, ranges: Iterable[tuple[int, int]], accelerator: Accelerator, *, readonly: bool) -> None:
        """Register what is not registered yet of some pages. Raises ``NotRegistered``."""
        new = [_Span(*gap, accelerator, readonly=readonly) for pages in ranges for gap in self._gaps(*pages)]
        needed, free = sum(_absent(span.start, span.end) for span in new), self._available()
        if needed > free:
            raise NotRegistered(f"it pins all rows: {no_space(needed, free, 'Use fewer rows or a smaller dtype')}")
        self.waiting += len(new)  # if one is refused, those before it have no user and are unregistered
        for span in new:
            span.register(self.forks)
            bisect.insort(self._spans, span, key=lambda span: span.start)

    def _over(self, start: int, end: int) -> list[_Span]:
        """Registered pages that overlap with an extent, which is not empty."""
        first = bisect.bisect_right(self._spans, start, key=lambda span: span.end)
        return self._spans[first : bisect.bisect_left(self._spans, end, key=lambda span: span.start)]

    def _gaps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What of some pages is not registered yet."""
        for span in self._over(start, end):
            if start < span.start:
                yield start, span.start
            start = span.end
        if start < end:
            yield start, end

    def renew(self, spans: Iterable[_Span], accelerator: Accelerator) -> None:
        """Register private pages again, which a fork may have moved.

        Raises:
            ForkedHandle, NotRegistered, RuntimeError: as :meth:`Registered.use`.
        """
        with self.turn, self._lock:
            for span in spans:
                if span.gone is None and span.private and span.forks != self.forks:
                    accelerator.check_not_capturing("use", "the process has forked: memory must be registered again")
                    try:
                        span.renew(self.forks)
                    except (DriverError, NotRegistered) as error:
                        self._spans.remove(span)
                        span.gone = NotRegistered(f"after a fork: {error}")
                if span.gone is not None:
                    raise span.gone

    def end(self, spans: Sequence[_Span]) -> None:
        """A handle no longer needs these."""
        self._ended.append(spans)
        self.settle()

    def settle(self) -> None:
        """Unregister what no handle needs, unless a capture is under way. Called by itself with every use, registration and close."""
        tried = False
        while (self._ended or (self.waiting and not tried)) and self._lock.acquire(blocking=False):
            tried = True
            try:
                while self._ended:
                    for span in self._ended.popleft():
                        span.users -= 1
                if os.getpid() == self._pid:  # else a forked child, whose hook has not run
                    unused = [span for span in self._spans if not span.users]
                    self.waiting = len(unused)
                    for span in unused:
                        if span.free():
                            self._spans.remove(span)
                            self.waiting -= 1
            finally:
                self._lock.release()

    # ---- forks -------------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Private memory may move when one of the two processes writes to it: it is registered again before it is used next."""
        self.forks += 1

    def after_fork(self) -> None:
        """In a child: nothing is registered, and the parent's registrations are none of its."""
        for span in self._spans:
            span.gone = ForkedHandle(
                "use: expected a handle of this process, got one to registered memory of its parent, which no device reads for a forked "
                "child. Start the process by spawn, or make the loader in it."
            )
        self._spans, self.waiting, self._pid = [], 0, os.getpid()
        self._ended.clear()


#: The registry of this process.
REGISTRY = Registry()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor, with the gaps between its rows."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (steps + 1) * tensor.element_size() if tensor.numel() else 0


def _pages(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages of memory; those of blocks that share a page as one range."""
    found: list[tuple[int, int]] = []
    for address, nbytes in sorted(extents):
        start, end = address // _PAGE * _PAGE, -(-(address + nbytes) // _PAGE) * _PAGE
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif nbytes:
            found.append((start, end))
    return found


def _absent(start: int, end: int) -> int:
    """Bytes of the pages that are not in memory yet: those take some when they are pinned."""
    library, absent = ctypes.CDLL(None), 0
    for at in range(start, end, _PAGES_ASKED * _PAGE):
        nbytes = min(end - at, _PAGES_ASKED * _PAGE)
        present = np.zeros(nbytes // _PAGE, np.uint8)
        library.mincore(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), ctypes.c_void_p(present.ctypes.data))
        absent += nbytes - int(np.count_nonzero(present & 1)) * _PAGE
    return absent
