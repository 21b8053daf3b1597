"""A device that is not there, whose streams do nothing until they are told to."""

import threading

import torch

from engram.store.device.accelerator import Accelerator, HostMemory


def lies_in(tensor, memory):
    """Whether a tensor's values lie in the memory that another one has, as a view of it or not."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    begin, size = memory.data_ptr(), memory.untyped_storage().nbytes()
    return begin <= tensor.data_ptr() < begin + size


class Event:
    def __init__(self, name, log):
        self.name, self.log, self.come = name, log, False

    def query(self):
        return self.come

    def synchronize(self):
        self.log.append(("host waits for", self.name))
        self.come = True


class Noting(Accelerator):
    """A device whose tensors are in ordinary memory, and a log of what was queued where."""

    def __init__(self, device=None):
        self.device = torch.device("cpu")
        self.memory = HostMemory()
        self.memory.empty = lambda shape, dtype: self._pinned(torch.empty(tuple(shape), dtype=dtype))
        self.memory.is_pinned = lambda tensor: any(lies_in(tensor, one) for one in [*self.pinned, *self.mine])
        self.up, self.down = "up", "down"
        self.log, self.mine, self.pinned, self.events = [], [], [], []
        self.where = threading.local()

    def _pinned(self, tensor):
        self.pinned.append(tensor)
        return tensor

    def holds(self, tensor):
        return any(tensor is one or lies_in(tensor, one) for one in self.mine)

    def current(self):
        return getattr(self.where, "stream", threading.current_thread().name)

    def on(self, stream):
        streams = self

        class On:
            def __enter__(self):
                self.before = streams.current()
                streams.where.stream = stream

            def __exit__(self, *_):
                streams.where.stream = self.before

        return On()

    def mark(self, stream):
        event = Event(f"{stream} {len(self.events)}", self.log)
        self.events.append(event)
        self.log.append(("mark", stream, event.name))
        return event

    def wait(self, stream, event):
        self.log.append(("wait", stream, event.name))

    def keep(self, tensor, stream):
        assert self.holds(tensor)
        self.log.append(("keep", stream))

    def send(self, tensor):
        assert self.memory.is_pinned(tensor), "the copy would not be asynchronous"
        self.log.append(("send", self.current()))
        self.mine.append(tensor.clone())
        return self.mine[-1]

    def receive(self, tensor):
        self.log.append(("receive", self.current()))
        return self.memory.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def on_device(self, tensor):
        self.mine.append(tensor)
        return tensor
