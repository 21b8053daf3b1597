"""An accelerator that is not there, for tests on the CPU: it behaves as CUDA documents, and fails in every way that CUDA documents.

Its tensors are CPU tensors that it knows by their storages. Work runs at once, or when a test releases the stream that it is queued
on, so that a missing wait or an early reuse shows up as wrong values. The device sees memory of the host elsewhere than the host does.
What no device could do is a :class:`Fault`: it is raised, and kept in ``faults``.
"""

import collections
import contextlib
import ctypes
import threading

import torch

from engram._support import fork
from engram._support.mappings import shared_pieces
from engram.device import direct, loader
from engram.store.device.accelerator import ALREADY_REGISTERED, Accelerator, DriverError, HostMemory
from tests.device import interpreted

#: By storage: the storage, which is kept so that no other gets its number, and the device that it is on, or "pinned".
_PLACES = {}
#: How far from its address on the host a device sees memory.
SHIFT = 1 << 45
NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    712: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    713: "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
    900: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
}


class Fault(AssertionError):
    """What would be an illegal access, or undefined, on a device."""


def place(tensor):
    """Where a tensor is: the name of an imitated device, "pinned", or None."""
    found = _PLACES.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
    return found and found[1]


def _put(tensor, where):
    storage = tensor.untyped_storage()
    _PLACES[storage._cdata] = (storage, where)
    return tensor


def _garbage(shape, dtype):
    """A new tensor that does not hold what a test expects by chance."""
    made = torch.empty(tuple(shape), dtype=dtype)
    made.untyped_storage().fill_(0 if dtype is torch.bool else 0xA5)
    return made


class Pinned(HostMemory):
    """Memory that counts as pinned. ``most``: bytes of the largest tensor so far."""

    most = 0

    def empty(self, shape, dtype):
        made = _put(_garbage(shape, dtype), "pinned")
        self.most = max(self.most, made.nbytes)
        return made

    def is_pinned(self, tensor):
        return place(tensor) is not None


class Event:
    """``reached``: the device has come to it. ``come``: the host can see so, at once unless the device is ``late``."""

    def __init__(self, device, name):
        self.device, self.name = device, name
        self.reached = self.come = False
        self.graph = None

    def query(self):
        self.device.forbid_in_capture("cudaEventQuery")
        return self.come

    def synchronize(self):
        self.device.log.append(("host waits for", self.name))
        self.device.forbid_in_capture("cudaEventSynchronize")
        self.device.counts["sync"] += 1
        self.device.run_until(lambda: self.reached)
        self.come = True


class Stream:
    def __init__(self, name):
        self.name = name
        self.work = collections.deque()
        self.graph = None

    def __repr__(self):
        return self.name


class Graph:
    """What was captured."""

    def __init__(self, device):
        self.device, self.work, self.broken = device, [], None

    def replay(self):
        self.device.counts["replay"] += 1
        for item in self.work:
            self.device.queue(item)


class Region:
    """Memory of the host that is registered. ``stale``: what the device sees of it since a fork, until it is registered again."""

    def __init__(self, start, nbytes, shift, *, readonly=False, foreign=False):
        self.start, self.end = start, start + nbytes
        self.shift, self.readonly, self.foreign = shift, readonly, foreign
        self.stale = None


class Imitation(Accelerator):
    """
    Args:
        name: of the device.
        held: names of the streams whose work waits for :meth:`release`; True: of all.
        late: the host does not see that events are over until a test sets their ``come``, or waits for them.
    """

    def __init__(self, name="cuda:0", *, held=(), late=False):
        self.device = torch.device("cpu")
        self.name, self.held, self.late = name, held, late
        self.memory = Pinned()
        self.log, self.events, self.faults, self.counts = [], [], [], collections.Counter()
        self.captures = []
        self.regions = []
        #: Returns the code with which the registration of an address and a size is refused; None or 0: it is not.
        self.refuses = lambda address, nbytes: None
        #: Why a capture is refused, and why the device cannot read the host.
        self.capture_refused = self.reason = None
        self.free, self.total = 8 << 30, 16 << 30
        #: Added to the address of a region that is registered; ``apart``: to each one more.
        self.shift, self.apart = SHIFT, 0
        self.is_child = False
        self._lock = threading.RLock()
        self._here = threading.local()
        self._streams = {}
        self.up, self.down = self._named("up"), self._named("down")
        fork.registered(self)

    # ---- streams and events ----------------------------------------------------------------------------------------------

    def _named(self, name):
        with self._lock:
            return self._streams.setdefault(name, Stream(name))

    def stream(self):
        return self._named(f"stream {len(self._streams)}")

    def current(self):
        return getattr(self._here, "stream", None) or self._named(threading.current_thread().name)

    @contextlib.contextmanager
    def on(self, stream):
        before, self._here.stream = getattr(self._here, "stream", None), stream
        try:
            yield
        finally:
            self._here.stream = before

    def active(self):
        return contextlib.nullcontext()

    def mark(self, stream):
        with self._lock:
            event = Event(self, f"{stream} {len(self.events)}")
            event.graph = stream.graph
            self.events.append(event)
            self.counts["event"] += 1
            self.log.append(("mark", stream.name, event.name))

            def reach():
                event.reached = True
                event.come = not self.late

            self.queue(reach, stream)
        return event

    def wait(self, stream, event):
        with self._lock:
            if stream.graph is not event.graph:  # as CUDA refuses
                self.fault(
                    "a captured stream waits for work outside of its capture, or another stream for captured work"
                )
            self.log.append(("wait", stream.name, event.name))
            self.queue(event, stream)

    def after(self, before):
        stream = self.current()
        if before is not None and stream != before:
            self.wait(stream, self.mark(before))
        return stream

    def finish(self, stream=None):
        self.forbid_in_capture("cudaEventSynchronize" if stream else "cudaDeviceSynchronize")
        self.counts["sync"] += 1
        streams = list(self._streams.values()) if stream is None else [stream]
        self.run_until(lambda: not any(one.work for one in streams))

    def queue(self, item, stream=None):
        """A piece of work, or an event to wait for."""
        stream = stream or self.current()
        with self._lock:
            if stream.graph is not None:
                stream.graph.work.append(item)
                return
            stream.work.append(item)
            self._advance()

    def release(self, *names):
        """Run what is queued on held streams, all without a name. They stay held."""
        with self._lock:
            self._advance(names or tuple(self._streams))

    def _holds_back(self, stream):
        return self.held is True or stream.name in self.held

    def _advance(self, released=()):
        """Run all streams that are not held, until each is empty or waits for an event."""
        moved = True
        while moved:
            moved = False
            for stream in list(self._streams.values()):
                if self._holds_back(stream) and stream.name not in released:
                    continue
                while stream.work:
                    item = stream.work[0]
                    if isinstance(item, Event):
                        if not item.reached:
                            break
                        item = None
                    stream.work.popleft()
                    moved = True
                    if item is not None:
                        item()

    def run_until(self, over):
        """What the host waits for happens, held or not."""
        with self._lock:
            if not over():
                self._advance(tuple(self._streams))
            if not over():
                self.fault("the host waits for what never happens")

    def fault(self, what):
        self.faults.append(what)
        raise Fault(what)

    def launch(self, kernel, *arguments, **constants):
        self.counts["launch"] += 1
        for at, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor) and place(argument) not in (self.name, "pinned"):
                where = place(argument) or "cpu tensor?"
                raise ValueError(f"Pointer argument (at {at}) cannot be accessed from Triton on {self.name} ({where})")
        self.queue(lambda: kernel(*arguments, **constants))

    # ---- memory ----------------------------------------------------------------------------------------------------------

    def on_device(self, tensor):
        """From here on a tensor is on the device."""
        return _put(tensor, self.name)

    def holds(self, tensor):
        return place(tensor) == self.name

    def keep(self, tensor, stream):
        if not self.holds(tensor):
            self.fault(f"record_stream: the tensor is not on {self.name} but on {place(tensor)}")
        self.log.append(("keep", stream.name))

    def _copy(self, what, made, source):
        stream = self.current()
        self.log.append((what, stream.name))
        self.counts[what] += 1
        self.queue(lambda: made.copy_(source), stream)
        return made

    def send(self, tensor):
        if place(tensor) != "pinned":
            self.fault(f"a copy to {self.name} of memory that is not pinned ({place(tensor)}) is not asynchronous")
        return self._copy("send", self.on_device(_garbage(tensor.shape, tensor.dtype)), tensor)

    def bring(self, tensor):
        return tensor if self.holds(tensor) else self.send(self.memory.empty(tensor.shape, tensor.dtype).copy_(tensor))

    def receive(self, tensor):
        if not self.holds(tensor):
            self.fault(f"a copy from {self.name} of a tensor that is on {place(tensor)}")
        return self._copy("receive", self.memory.empty(tensor.shape, tensor.dtype), tensor)

    def room(self):
        return self.free, self.total

    # ---- captures --------------------------------------------------------------------------------------------------------

    def capturing(self, stream=None):
        return (stream or self.current()).graph is not None

    def beside_captures(self):
        return contextlib.nullcontext()

    def forbid_in_capture(self, call):
        """Inside a capture of this thread, a call that waits breaks it."""
        graph = self.current().graph
        if graph is not None:
            graph.broken = f"{call}: operation not permitted when stream is capturing"
            raise RuntimeError(graph.broken)

    def capture(self, work):
        if self.capture_refused is not None:
            raise RuntimeError(self.capture_refused)
        graph, stream = Graph(self), self.stream()
        stream.graph = graph
        self.captures.append(graph)
        try:
            with self.on(stream):
                work()
        finally:
            self.captures.remove(graph)
            stream.graph = None
        if graph.broken is not None:
            raise RuntimeError(f"operation failed due to a previous error during capture ({graph.broken})")
        self.counts["capture"] += 1
        return graph

    # ---- memory of the host that the device reads ------------------------------------------------------------------------

    def obstacle(self):
        return self.reason

    def register(self, address, nbytes, *, readonly=False):
        self._enter("cuMemHostRegister_v2")
        code = self.refuses(address, nbytes)
        if not code and not _is_mapped(address, nbytes):
            code = 1
        if not code and any(region.start < address + nbytes and address < region.end for region in self.regions):
            code = ALREADY_REGISTERED
        if code:
            raise DriverError("cuMemHostRegister_v2", code, NAMES[code])
        self.counts["register"] += 1
        shift = self.shift + self.apart * self.counts["register"]
        self.regions.append(Region(address, nbytes, shift, readonly=readonly))

    def register_foreign(self, address, nbytes):
        """As if another library did."""
        self.regions.append(Region(address, nbytes, self.shift, foreign=True))

    def unregister(self, address):
        self._enter("cuMemHostUnregister")
        for region in self.regions:
            if region.start == address:
                if region.foreign:
                    self.fault("memory that another library registered is unregistered")
                if not _is_mapped(region.start, region.end - region.start):
                    self.fault("memory is unmapped before it is unregistered")
                self.counts["unregister"] += 1
                self.regions.remove(region)
                return
        raise DriverError("cuMemHostUnregister", 713, NAMES[713])

    def device_address(self, address):
        self._enter("cuMemHostGetDevicePointer_v2")
        for region in (*self.regions, *self._pinned()):
            if region.start <= address < region.end:
                return address + region.shift
        raise DriverError("cuMemHostGetDevicePointer_v2", 1, NAMES[1])

    def _pinned(self):
        """Pinned memory is the device's, too."""
        storages = [storage for storage, where in list(_PLACES.values()) if where == "pinned"]
        return [Region(storage.data_ptr(), storage.nbytes(), self.shift) for storage in storages]

    def memory_at(self, address, nbytes):
        """uint8 ``[nbytes]``: what a kernel finds where the device sees memory of the host. Call it in the kernel."""
        pieces, at = [], address
        while at < address + nbytes:  # through pages that were registered apart
            known = (*self.regions, *self._pinned())
            region = next((one for one in known if one.start + one.shift <= at < one.end + one.shift), None)
            if region is None:
                self.fault(f"illegal address: the device reads {nbytes} bytes that are not registered")
            size, host = min(address + nbytes, region.end + region.shift) - at, at - region.shift
            if not _is_mapped(host, size):
                self.fault(f"the device reads {size} bytes that are not mapped any more")
            stale = region.stale
            pieces.append(_bytes_at(host, size) if stale is None else stale[host - region.start :][:size])
            at += size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _enter(self, call):
        code = 3 if self.is_child else 900 if self.captures else 0
        if code:
            self.counts["refused in a child" if self.is_child else "refused in a capture"] += 1
            raise DriverError(call, code, NAMES[code])

    # ---- forks -----------------------------------------------------------------------------------------------------------

    def before_fork(self):
        """From here on the device sees private memory as it was: the host's pages are copied when they are written to."""
        for region in self.regions:
            memory = _bytes_at(region.start, region.end - region.start)
            if region.stale is None and shared_pieces([memory])[0] is None:
                region.stale = memory.clone()

    def after_fork(self):
        self.is_child = True


class Interpreter(Imitation):
    """Runs kernels in Triton's interpreter, which finds memory of the host where the host does.

    Args:
        strict: tensors are on the device only if they were sent there, and else wherever they are asked for.
    """

    def __init__(self, *, strict=False):
        super().__init__()
        self.shift, self.strict = 0, strict

    @classmethod
    def installed(cls, monkeypatch, **kwargs):
        """The device of each DeviceLoader and DeviceReplay that is made from now on."""
        made = cls(**kwargs)
        for module in (loader, direct):
            monkeypatch.setattr(module, "Accelerator", lambda device: made)
            monkeypatch.setattr(module, "existing_device", lambda device, name: torch.device("cuda", 0))
        return made

    def holds(self, tensor):
        return not self.strict or super().holds(tensor)

    def launch(self, kernel, *arguments, **constants):
        self.counts["launch"] += 1
        interpreted.patch_once()
        self.queue(lambda: kernel(*arguments, **constants))


def _bytes_at(address, nbytes):
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def _is_mapped(address, nbytes):
    page = 4096
    start, end = address // page * page, -(-(address + nbytes) // page) * page
    present = (ctypes.c_ubyte * ((end - start) // page))()
    library = ctypes.CDLL(None)
    return library.mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), present) == 0
