"""Where tests of a GPU run: on one, or in small on the CPU, where Triton's interpreter and imitations stand in for it.

A test that asks for ``place`` runs on the CPU in every run, and on a GPU where it is marked ``gpu``: what would fail there for lack of
care fails here.
"""

import collections
import time

import pytest
import torch

from benchmarks.gpu import Gpu
from tests.device.imitation import Interpreter
from tests.store.device.mirrored import There, imitate

PLACES = [pytest.param("imitated"), pytest.param("cuda", marks=pytest.mark.gpu)]


class Event:
    """A moment."""

    def __init__(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)

    def synchronize(self):
        pass


class OnCpu(Gpu):
    """Kernels run in Triton's interpreter; a graph makes the calls again, which were made thrice as before a capture."""

    is_imitated = True

    def __init__(self, device):
        self.device, self.name, self.imitated = torch.device("cpu"), "an imitation", device
        self.asked = collections.Counter()

    def finish(self):
        self.asked["finish"] += 1

    def pinned(self, tensor):
        return tensor.clone()

    def storage(self, capacity, **kwargs):
        return There(capacity, **kwargs)

    def captured(self, call):
        for _ in range(3):
            call()
        self.asked["captured"] += 1
        return call

    def recorded(self, call):
        """As :meth:`captured`, of draws alone: the device does again what was queued, and the call is not made again."""
        for _ in range(3):
            call()
        return self.imitated.capture(call).replay

    def adam(self, parameters):
        return torch.optim.Adam(parameters)

    def event(self):
        return Event()

    def sleep(self, cycles):
        assert cycles > 0

    def waits(self, call, calls):
        for _ in range(calls):
            call()
        return 0


class OnGpu(Gpu):
    """A CUDA device."""

    is_imitated = False
    recorded = Gpu.captured


def on_cpu(monkeypatch):
    """An imitated device, which is that of loaders, replays and mirrors from now on."""
    imitate(monkeypatch)
    return OnCpu(Interpreter.installed(monkeypatch))


def there(request, monkeypatch):
    """The place that a parameter names, for a fixture ``place``."""
    if request.param == "cuda":
        return OnGpu()
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here, and not in the interpreter")
    return on_cpu(monkeypatch)
