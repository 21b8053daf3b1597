"""What engram finds on a machine and on its disks, and what is to be done about it. Imports no torch."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from engram._support.memory import available_memory, lines_of, missing_share
from engram._support.version import __version__
from engram._support.words import format_size
from engram.format import files, layout, sizes
from engram.saved.inspection import describe, read_store

Status = Literal["ok", "note", "BAD"]

#: Kinds of mounts whose files lie on another machine.
_NETWORK = re.compile(
    r"nfs|cifs|smb|ceph|lustre|gpfs|beegfs|gluster|afs|9p|pvfs|ocfs2|gfs2|s3|gcs|sshfs|wekafs|vboxsf|drvfs"
)
#: What an optional dependency is for.
_EXTRAS = {
    "gym": ("gymnasium", "recording of environments"),
    "plot": ("matplotlib", "figures, reports"),
    "serve": ("pyarrow", "serving a store to other machines"),
    "sb3": ("stable-baselines3", "replay of Stable-Baselines3"),
    "tianshou": ("tianshou", "replay of tianshou"),
    "rllib": ("ray", "replay of RLlib"),
    "transfer-queue": ("transferqueue", "values of TransferQueue"),
    "metrics": ("prometheus-client", "metrics for Prometheus"),
    "ray": ("ray", "buffers on Ray"),
    "robot": ("av", "videos of robots"),
    "hdf5": ("h5py", "dumps and data sets in HDF5 files"),
    "minari": ("minari", "data sets of Minari"),
    "datasets": ("pyarrow", "data sets in Parquet files"),
    "lance": ("pylance", "data sets of Lance"),
    **({} if sys.version_info >= (3, 14) else {"zstd": ("backports.zstd", "compressed rows")}),
}
_LEAST_TORCH = (2, 11)
_LEAST_SHARED = 1 << 30
_LEAST_FILES = 1024
SHARED = Path("/dev/shm")  # noqa: S108 - where rows that processes share are
_NVIDIA = Path("/dev/nvidiactl")
_RDMA = Path("/sys/class/infiniband")
_HUGE = "/sys/kernel/mm/transparent_hugepage/enabled"


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    #: What was found.
    value: str
    #: ``BAD``: engram cannot work like this. ``note``: something is slower, smaller or missing.
    status: Status = "ok"
    #: What to do.
    advice: str = ""


def noted(name: str, value: str, advice: str = "") -> Finding:
    """A finding that is a note where there is advice."""
    return Finding(name, value, "note" if advice else "ok", advice)


def findings(directory: Path | None = None, *, load: bool = False) -> list[Finding]:
    """What was found, in the order to show it.

    Args:
        directory: also say on which file system that folder lies.
        load: import torch, too, and say how it works; otherwise it is looked at as a package.
    """
    found = [
        Finding("engram", __version__),
        Finding("Python", f"{platform.python_version()} ({platform.machine()}, {platform.system()})"),
        Finding("GIL", "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off"),
        _loaded_torch() if load else _torch(),
        _package("tensordict"),
        _loaded_core() if load else _core(),
        Finding("cores", _cores()),
        Finding("memory", f"{format_size(available_memory())} available to this process"),
        _shared_memory(SHARED),
        _huge_pages(Path(_HUGE)),
        _memory_locks(*resource.getrlimit(resource.RLIMIT_MEMLOCK)),
        _open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        Finding("temporary folder", f"{tempfile.gettempdir()}, {_free(tempfile.gettempdir())}"),
        *(_loaded_gpu() if load else [_gpu()]),
    ]
    if directory is not None:
        found.append(file_system(directory, lines_of("/proc/self/mountinfo")))
    return found + [_extra(name, *of) for name, of in _EXTRAS.items()]


def file_system(directory: Path, mounts: Iterable[str]) -> Finding:
    """On what a folder lies. ``mounts``: lines as those of ``/proc/self/mountinfo``."""
    kind, where, longest = "unknown", "", -1
    real = directory.resolve()
    for line in mounts:
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4]))
        if real.is_relative_to(point) and len(point.parts) >= longest:
            kind, where, longest = after.split()[0], str(point), len(point.parts)
    value = f"{kind} at {where}, {_free(str(directory))}"
    advice = ""
    if _NETWORK.search(kind):
        value += ": on another machine"
        advice = "Checkpoints and dumps may lie here. A live store may not: put it on a local disk or in /dev/shm."
    elif kind in ("overlay", "aufs"):
        advice = "A container's own layer ends with it: mount a volume for what is to stay."
    elif kind in ("tmpfs", "ramfs"):
        advice = "This is memory: a store here survives processes, but no restart."
    return noted("file system", value, advice)


def _torch() -> Finding:
    """As it is installed: loading it takes longer than all else."""
    if find_spec("torch") is None:
        return Finding("torch", "not installed", "BAD", "Install it: pip install torch")
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Finding("torch", "of an unknown version", "note", "Install it as a package: pip install torch")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _LEAST_TORCH:
        return Finding("torch", found, "BAD", "engram needs torch 2.11 or newer: pip install --upgrade torch")
    return Finding("torch", found)


def _loaded_torch() -> Finding:
    """As it works."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", f"does not import: {error}", "BAD", "Install it: pip install torch")
    devices = f", {torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else ", CPU only"
    return Finding("torch", f"{torch.__version__}{devices}")


def _gpu(
    unused: str = "seen, not tried", advice: str = "engram doctor --load says what it can do, and how fast."
) -> Finding:
    """As the system sees it: torch takes seconds to load."""
    return noted("GPU", unused, advice) if _NVIDIA.exists() else noted("GPU", "no CUDA device")


def _loaded_gpu() -> list[Finding]:
    """As it works with engram."""
    try:
        import torch

        if torch.cuda.is_available():
            from engram.cli.gpu import gpu_findings
            from engram.store.device.accelerator import Accelerator

            device = torch.device("cuda", torch.cuda.current_device())
            return [*gpu_findings(Accelerator(device), torch.cuda.get_device_name(device))]
    except (ImportError, OSError, RuntimeError) as error:
        return [Finding("GPU", f"fails: {error}", "note", "The lines on torch and on the native core may say why.")]
    return [_gpu("seen, and torch cannot use it", "Install a torch for CUDA that this driver is new enough for.")]


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "not installed", "BAD", f"Install it: pip install {name}")


def _core() -> Finding:
    try:
        from engram import _core as core
    except ImportError as error:
        advice = (
            "Install engram again, with a wheel of this Python: pip install --force-reinstall --no-deps engram-replay"
        )
        return Finding("native core", f"does not load: {error}", "BAD", advice)
    return Finding("native core", f"loaded, {core.num_threads()} threads")


def _loaded_core() -> Finding:
    """As it works with torch."""
    try:
        from engram._support.native import HAS_EXCHANGE
    except (ImportError, OSError) as error:
        return Finding("native core", f"does not load: {error}", "BAD", "The line on torch, or the next one, says why.")
    found = _core()
    if HAS_EXCHANGE:
        return found._replace(value=f"{found.value}, sees tensors natively")
    advice = "A newer torch lets writes of small rows take less time."
    return found._replace(value=f"{found.value}, without DLPack exchange: slower writes", status="note", advice=advice)


def _cores() -> str:
    every, ours = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    return f"{every}" if ours == every else f"{ours} of {every}"


def _shared_memory(place: Path) -> Finding:
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return noted(
            "shared memory", f"{place} is not there", "share() writes to the folder for temporary files instead."
        )
    value, advice = f"{_of(usage.free, usage.total)} in {place}", ""
    if not os.access(place, os.W_OK | os.X_OK):
        value, advice = f"{value}, no permission to write", "share() uses the temporary folder instead."
    elif usage.free < _LEAST_SHARED:
        advice = "share() fails when it is full. In a container: docker run --shm-size=8g; else: mount -o remount,size=8G /dev/shm"
    return noted("shared memory", value, advice)


def _huge_pages(setting: Path) -> Finding:
    said = next(iter(lines_of(setting)), "unknown").strip()
    advice = f"Large buffers in memory are sampled faster with them: echo madvise > {setting}"
    return noted("huge pages", said, advice if "[never]" in said else "")


def _memory_locks(soft: int, hard: int, cards: Path = _RDMA) -> Finding:
    """Engram locks no memory. Drivers of some network cards do, if there are such ``cards``."""
    value, advice = "unlimited" if soft == resource.RLIM_INFINITY else f"{format_size(soft)} of {_limit(hard)}", ""
    if soft != resource.RLIM_INFINITY and soft < 64 << 20 and cards.is_dir() and any(cards.iterdir()):
        advice = "Drivers of network cards that read memory directly (RDMA) lock what they read: ulimit -l unlimited"
    return noted("memory locks", value, advice)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else format_size(value)


def _open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return noted("open files", "unlimited")
    if soft >= _LEAST_FILES:
        return noted("open files", f"{soft}")
    return noted("open files", f"{soft} of {hard}", f"A store takes one for each field: ulimit -n {_LEAST_FILES}")


def _extra(name: str, package: str, use: str) -> Finding:
    try:
        return noted(f"extra {name}", f"{package} {version(package)}")
    except PackageNotFoundError:
        return noted(f"extra {name}", f"{package} is not installed", f'For {use}: pip install "engram-replay[{name}]"')


def _free(path: str) -> str:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return "not there"
    return _of(usage.free, usage.total)


def _of(free: int, total: int) -> str:
    return f"{format_size(free)} free of {format_size(total)}"


# ---- the speed of a disk --------------------------------------------------------------------------------------------------

_PAGE = 4096
#: Rows of a batch; bytes of a row, and of the file, that are tried where there is no store.
_BATCH, _ROW, _TRIAL = 256, 28_224, 256 << 20
#: Reads that are under way at a time.
_THREADS = 32


def disk_speed(directory: Path, seconds: float = 2.0) -> list[Finding]:
    """What the disk of a store, or of a folder for one, gives, measured for that long.

    Reads random rows, of which the kernel keeps none in memory. A folder without rows gets a file of 256 MB, which is removed.

    Raises:
        OSError: no folder, no permission, no space, or a file system whose files cannot be read past memory.
    """
    schema = read_store(directory)[0] if layout.is_store(directory) else None
    lanes = describe(directory)["lanes"] if schema is not None else {}
    nbytes = 0 if schema is None else schema.nbytes
    needed = 0 if schema is None else sizes.resident_bytes(directory, schema.capacity)
    with contextlib.ExitStack() as stack:
        if schema is not None and (most := lanes["most_rows"]):
            starts = range(0, schema.capacity, schema.capacity // schema.lanes)
            fields = [_opened(stack, path, size) for path, size in layout.row_files(directory, schema).values() if size]
            said = f"{format_size(schema.row_bytes)} each, {format_size(nbytes)} in all"
        else:
            trial = stack.enter_context(tempfile.NamedTemporaryFile(dir=directory))
            for _ in range(_TRIAL >> 20):
                trial.write(os.urandom(1 << 20))
            os.fsync(trial.fileno())
            fields, starts, most = [_opened(stack, Path(trial.name), _ROW)], range(1), _TRIAL // _ROW
            said = f"none yet, {format_size(_ROW)} were tried"
        batches, read = _measured(fields, starts, most, seconds)
    speed = f"{format_size(round(read))}/s, {batches:.1f} batches of {_BATCH} rows per second"
    found = [Finding("rows", said), Finding("disk", speed)]
    memory = available_memory()
    if nbytes:
        missing = missing_share(nbytes, memory, needed)
        expected = f"expect {batches / missing:.1f} batches of {_BATCH} rows per second" if missing else "all rows fit"
        value = f"{format_size(memory)} beside what is in use; tickets and priorities need {format_size(needed)}: {expected}"
        fits = memory >= needed
        advice = "" if fits else "Each draw waits for the disk: give the process more memory, or the store fewer rows."
        found.append(Finding("memory of rows", value, "ok" if fits else "BAD", advice))
    return found


def _opened(stack: contextlib.ExitStack, path: Path, row_bytes: int) -> tuple[int, int]:
    return stack.enter_context(files.Descriptor.open(path, os.O_RDONLY | os.O_DIRECT)), row_bytes


def _measured(fields: Sequence[tuple[int, int]], starts: range, rows: int, seconds: float) -> tuple[float, float]:
    """Batches and bytes per second, of that many rows from each start on. ``fields``: files, and bytes of a row in them."""
    began = time.perf_counter()
    longest = max(size for _, size in fields) + 2 * _PAGE

    def read(seed: int) -> tuple[int, int]:
        draws, done, nbytes = random.Random(seed), 0, 0  # noqa: S311 - which rows are read is no secret
        with mmap.mmap(-1, longest) as memory, memoryview(memory) as view:
            while done == 0 or time.perf_counter() - began < seconds:
                row = draws.choice(starts) + draws.randrange(rows)
                for fd, size in fields:
                    first = row * size // _PAGE * _PAGE
                    with view[: -(-(row + 1) * size // _PAGE) * _PAGE - first] as page:
                        nbytes += os.preadv(fd, [page], first)
                done += 1
        return done, nbytes

    with ThreadPoolExecutor(_THREADS) as pool:
        done, nbytes = map(sum, zip(*pool.map(read, range(_THREADS)), strict=True))
    elapsed = time.perf_counter() - began
    return done / _BATCH / elapsed, nbytes / elapsed
