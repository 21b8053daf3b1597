"""The accelerator's calls of CUDA: of a driver that registers nothing, and of torch where there is a GPU."""

import contextlib
import ctypes
import gc
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from engram import DeviceLoader, LazyTensorStorage, ReplayBuffer
from engram.store.device import accelerator
from engram.store.device.accelerator import ALREADY_REGISTERED, Accelerator, DriverError, Registry
from tests import fresh

#: Addresses and sizes that need all 64 bits.
ADDRESS, NBYTES = 0x7FFF_FEDC_B000, 200 << 30


class Bare(Accelerator):
    """A CUDA device by name, without the streams that need one."""

    def __init__(self, number=3):
        self.device = torch.device("cuda", number)
        self._module = self

    def get_device_capability(self, device):
        return self.capability

    capability = (9, 0)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    source = os.path.join(os.path.dirname(__file__), "libcuda.c")
    made = tmp_path_factory.mktemp("libcuda") / "libcuda.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(made), source], check=True)
    found = ctypes.CDLL(str(made))
    found.address_now.restype = found.nbytes_now.restype = ctypes.c_size_t
    return found


@pytest.fixture
def driver(library, monkeypatch):
    library.fail(b"", 0)
    library.attributes(1)
    monkeypatch.setattr(accelerator, "_driver", lambda: library)
    yield library
    assert library.depth_now() == 0, "contexts that were entered are left"
    assert library.mode_now() == 1, "the thread's capture mode is the one of before"


# ---- memory ------------------------------------------------------------------------------------------------------------------


def test_torch_for_rocm_has_no_driver_of_cuda(monkeypatch):
    """Its devices are called cuda, too, and mirrors and doctor wait for them."""
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with Bare().beside_captures():
        pass


def test_registering_passes_whole_numbers_and_flags(driver):
    device = Bare()
    device.register(ADDRESS, NBYTES)
    assert (driver.address_now(), driver.nbytes_now(), driver.flags_now()) == (ADDRESS, NBYTES, 1 | 2)
    assert driver.was_inside()
    assert driver.device_now() == 43, "the driver's number of cuda:3"
    assert device.device_address(ADDRESS + 5) == ADDRESS + 5 + 0x1000_0000_0000
    device.unregister(ADDRESS)
    assert driver.address_now() == 0


def test_a_mapping_without_the_right_to_write_is_registered_as_such(driver):
    Bare().register(ADDRESS, 4096, readonly=True)
    assert driver.flags_now() == 1 | 2 | 8
    driver.attributes(0)
    Bare().register(ADDRESS, 4096, readonly=True)
    assert driver.flags_now() == 1 | 2, "where the device has no such flag"


@pytest.mark.parametrize("code", [1, 2, ALREADY_REGISTERED, 801])
def test_refusals_name_the_call_the_code_and_the_cause(driver, code):
    driver.fail(b"cuMemHostRegister_v2", code)
    with pytest.raises(DriverError, match=rf"cuMemHostRegister_v2: .*got {code} \(CUDA_ERROR_.*\): ") as raised:
        Bare().register(ADDRESS, 4096)
    assert raised.value.code == code
    assert raised.value.call == "cuMemHostRegister_v2"


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"])
def test_a_driver_that_fails_leaves_nothing_entered(driver, call):
    device = Bare()
    driver.fail(call.encode(), 999)
    for attempt in (
        lambda: device.register(ADDRESS, 1),
        lambda: device.unregister(1),
        lambda: device.device_address(1),
    ):
        with pytest.raises(DriverError, match=rf"{call}: .*999 \(a code without a name\)\.$"):
            attempt()
    driver.fail(b"", 0)
    device.register(ADDRESS, 1)


def test_a_mode_that_cannot_be_changed_leaves_no_context(driver):
    driver.fail(b"cuThreadExchangeStreamCaptureMode", 900)
    with pytest.raises(DriverError, match="cuThreadExchangeStreamCaptureMode"):
        Bare().register(ADDRESS, 1)


# ---- whether the device reads the host -----------------------------------------------------------------------------------------


@pytest.fixture
def able(driver, monkeypatch, tmp_path):
    """A machine on which nothing stands in the way."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "release", lambda: "6.1.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: name == "gcc")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "there"))
    return driver


def test_nothing_in_the_way(able):
    assert Bare().obstacle() is None


def windows(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(platform, "system", lambda: "Windows")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda patch: patch.setattr(torch.version, "hip", "6.2"), "ROCm"),
        (windows, "Windows"),
        (lambda patch: patch.setattr(platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2"), "WSL"),
        (lambda patch: patch.setattr(importlib.util, "find_spec", lambda name: None), "Triton"),
        (lambda patch: patch.setattr(shutil, "which", lambda name: None), "C compiler"),
        (lambda patch: patch.setattr(os, "access", lambda path, mode: False), "write to its cache"),
        (lambda patch: patch.setattr(Bare, "capability", (6, 1)), "capability 6.1"),
    ],
)
def test_what_is_in_the_way_is_named(able, monkeypatch, change, said):
    change(monkeypatch)
    assert said in Bare().obstacle()


def test_arm_needs_the_hosts_page_tables(able, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert Bare().obstacle() is None
    able.attributes(0)
    assert "page tables" in Bare().obstacle()


def test_a_driver_that_cannot_be_used(able, monkeypatch):
    able.fail(b"cuInit", 3)
    assert "cuInit" in Bare().obstacle()

    def no_driver():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(accelerator, "_driver", no_driver)
    assert "libcuda.so.1" in Bare().obstacle()


def test_another_accelerator():
    made = object.__new__(Accelerator)
    made.device = torch.device("xpu", 0)
    assert "xpu:0 is no CUDA device" in made.obstacle()
    assert not made.capturing()


# ---- without one ---------------------------------------------------------------------------------------------------------------


def test_importing_loads_neither_triton_nor_the_driver():
    out = fresh.run(
        """
        import os, sys
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import engram, engram.device.loader, engram.store.device.accelerator, engram.store.device.accelerator
        from engram import DeviceLoader
        from pathlib import Path
        print("triton" in sys.modules, "libcuda" in Path("/proc/self/maps").read_text())
        """
    )
    assert out.strip() == "False False"


def test_a_device_that_does_not_exist():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    with pytest.raises(RuntimeError, match="no such device, 'cuda:99'"):
        DeviceLoader(rb, "cuda:99")


# ---- with a GPU ----------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
class TestCuda:
    @pytest.fixture
    def device(self):
        return Accelerator(torch.device("cuda", torch.cuda.current_device()))

    def test_the_device_reads_registered_memory(self, device):
        host = torch.arange(1 << 20)
        with contextlib.closing(Registry().register(device, [host])) as registered:
            assert host.is_pinned()
            copy = torch.empty_like(host, device="cuda")
            registered.use()
            copy.copy_(host, non_blocking=True)
        assert not host.is_pinned()
        assert torch.equal(copy.cpu(), host)

    def test_a_thread_that_has_not_used_cuda(self, device):
        host, found = torch.arange(1 << 20), []
        thread = threading.Thread(target=lambda: found.append(Registry().register(device, [host])))
        thread.start()
        thread.join()
        (registered,) = found
        assert registered.addresses == (device.device_address(host.data_ptr()),)
        registered.close()

    def test_a_refusal_leaves_torch_as_it_was(self, device, tmp_path):
        (tmp_path / "file").write_bytes(bytes(1 << 20))
        on_disk = torch.from_file(str(tmp_path / "file"), shared=True, size=1 << 20, dtype=torch.uint8)
        with contextlib.suppress(DriverError):  # it depends on the kernel and the file system
            device.register(on_disk.data_ptr(), 1 << 20)
            device.unregister(on_disk.data_ptr())
        with pytest.raises(DriverError):
            device.register(4096, 4096)
        assert int(torch.ones(4, device="cuda").sum()) == 4
        torch.cuda.synchronize()

    def test_registered_twice(self, device):
        host = torch.arange(1 << 20)
        device.register(host.data_ptr(), host.nbytes)
        with pytest.raises(DriverError) as raised:
            device.register(host.data_ptr(), host.nbytes)
        assert raised.value.code == ALREADY_REGISTERED
        device.unregister(host.data_ptr())

    def test_private_memory_after_a_fork(self, device):
        host, registry = torch.zeros(1 << 20), Registry()
        with contextlib.closing(registry.register(device, [host])) as registered:
            registered.use()
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            host += 1  # while the child may still share the pages
            os.waitpid(pid, 0)
            registered.use()
            assert int(host.to(device.device, non_blocking=True).sum()) == 1 << 20

    def test_another_device(self, device):
        if torch.cuda.device_count() < 2:
            pytest.skip("one device")
        host, registry = torch.arange(1 << 20), Registry()
        handles = [registry.register(Accelerator(torch.device("cuda", number)), [host]) for number in (0, 1)]
        for number, handle in enumerate(handles):
            handle.use()
            assert torch.equal(host.to(f"cuda:{number}", non_blocking=True).cpu(), host)
            handle.close()

    def test_a_graph_while_another_thread_registers(self, device):
        hosts = [torch.arange(1 << 16) for _ in range(20)]
        value, go = torch.zeros(4, device="cuda").add_(1), threading.Event()

        def register():
            go.wait()
            for host in hosts:
                Registry().register(device, [host]).close()

        thread = threading.Thread(target=register)
        thread.start()

        def work():
            go.set()
            for _ in range(200):
                value.add_(1)
            gc.collect()

        graph = device.capture(work)
        thread.join()
        before = float(value[0])
        graph.replay()
        assert float(value[0]) - before == 200

    def test_a_capture_that_synchronizes(self, device):
        value, stream = torch.zeros(4, device="cuda"), device.current()
        with pytest.raises(RuntimeError):
            device.capture(lambda: value.add_(1).sum().item())
        assert device.current() == stream
        assert not device.captures
        assert not device.capturing()
        assert int(torch.ones(4, device="cuda").sum()) == 4

    def test_what_stands_in_the_way_is_nothing_or_named(self, device):
        assert device.obstacle() is None or isinstance(device.obstacle(), str)
        free, total = device.room()
        assert 0 < free <= total
