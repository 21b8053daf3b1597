"""What is done again and again keeps nothing: no memory, no object, no descriptor, no mapping, no thread.

Resident memory says little after a few rounds: the allocator keeps pages, and CPython's cache of attributes takes in new names for
some hundred rounds. So one test counts what is in use, to the byte, in a process whose allocator keeps nothing, and one measures
resident memory over 10,000 rounds in one that is as usual. Both are for nights: caches of other libraries grow now and then by some
bytes, and on a busy machine that once looked like more.
"""

import itertools
import json
import statistics
import textwrap

import pytest

from tests import fresh, stress

pytestmark = [pytest.mark.stress, pytest.mark.skipif(stress.SIZE == "small", reason="measures memory: for nights")]

ROUNDS = """
import ctypes, gc, json, logging, os, sys, tempfile, threading, types, warnings
from pathlib import Path

import torch
from tensordict import TensorDict

from engram import *

torch.set_num_threads(1)
torch.manual_seed(0)
logging.getLogger("engram").setLevel(logging.ERROR)
folder = Path(folder)
libc = ctypes.CDLL(None)

class Allocated(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc.mallinfo2.restype = Allocated

def in_use():
    allocated = libc.mallinfo2()
    return allocated.uordblks + allocated.hblkhd

def counts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        sys._clear_type_cache()  # it keeps up to 4096 names of attributes that C code asked for
    gc.collect()
    gc.collect()  # what finalizers have let go
    with open("/proc/self/maps") as maps:
        mappings = sum(1 for _ in maps)
    return dict(bytes=in_use(), objects=len(gc.get_objects()), descriptors=len(os.listdir("/proc/self/fd")),
                mappings=mappings, threads=threading.active_count(), files=sum(1 for _ in folder.rglob("*")))

def resident():
    gc.collect()
    libc.malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def prioritized(storage=None, **others):
    storage = LazyTensorStorage(10) if storage is None else storage
    return ReplayBuffer(storage=storage, sampler=PrioritizedSampler(10, 0.5, 0.5), batch_size=3, **others)

def episodes():
    return TensorDict({"x": torch.arange(8.0), "done": torch.tensor([False, False, False, True] * 2)}, [8])

rows = torch.arange(7.0)
"""

MEASURED = """
for _ in range(warm_up):
    op()
for _ in range(points):
    print(json.dumps(measure()))  # a list of them would grow
    for _ in range(rounds):
        op()
print(json.dumps(measure()))
"""

#: Programs that define ``op``, one round.
OPERATIONS = {
    "open_and_close": """
        prioritized(LazyMemmapStorage(10, scratch_dir=folder / "store")).extend(rows)
        def op():
            rb = ReplayBuffer.open(folder / "store")
            rb.sample(3)
            rb.close()
        """,
    "open_and_drop": """
        prioritized(LazyMemmapStorage(10, scratch_dir=folder / "store")).extend(rows)
        def op():
            ReplayBuffer.open(folder / "store").sample(3)
        """,
    "make_and_drop": """
        def op():
            rb = prioritized()
            rb.extend(rows)
            rb.sample()
        """,
    "share_and_close": """
        def op():
            rb = prioritized()
            rb.extend(rows)
            rb.share()
            rb.sample()
            rb.close()
        """,
    "share_and_drop": """
        def op():
            rb = prioritized()
            rb.extend(rows)
            rb.share()
            rb.sample()
        """,
    "dumps_and_loads": """
        a, b = prioritized(), prioritized()
        a.extend(rows)
        def op():
            a.dumps(folder / "dump")
            b.loads(folder / "dump")
        """,
    "dumps_of_many_names": """
        import shutil
        a, steps = prioritized(), iter(range(10**9))
        a.extend(rows)
        def op():
            path = folder / f"dump-{next(steps)}"
            a.dumps(path)
            shutil.rmtree(path)
        """,
    "save": """
        rb, steps = prioritized(), iter(range(10**9))
        rb.extend(rows)
        series = Checkpointer(folder / "series", rb, keep=2)
        def op():
            rb.extend(rows[:2])
            series.save(step=next(steps))
        """,
    "save_in_the_background": """
        rb, steps = prioritized(), iter(range(10**9))
        rb.extend(rows)
        series = Checkpointer(folder / "series", rb, keep=2)
        def op():
            rb.extend(rows[:2])
            series.save(step=next(steps), wait=False).wait()
            for thread in threading.enumerate():
                if thread.name == "engram-save":
                    thread.join()
        """,
    "restore": """
        rb = prioritized()
        rb.extend(rows)
        series = Checkpointer(folder / "series", rb)
        series.save(step=1)
        def op():
            series.restore()
        """,
    "prefetch": """
        def op():
            rb = prioritized(prefetch=2)
            rb.extend(rows)
            rb.sample()
            rb.sample()
            rb.close()
            for thread in threading.enumerate():
                if thread.name.startswith("engram-prefetch"):
                    thread.join()
        """,
    "slices": """
        def op():
            sampler = SliceSampler(slice_len=2, end_key="done")
            rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)
            rb.extend(episodes())
            rb.sample()
            rb.close()
        """,
    "prioritized_slices": """
        def op():
            sampler = PrioritizedSliceSampler(20, 0.5, 0.5, slice_len=2, end_key="done")
            rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)
            rb.extend(episodes())
            rb.sample()
            rb.close()
        """,
    "fork": """
        rb = prioritized()
        rb.extend(rows)
        rb.share()
        def op():
            child = os.fork()
            if child == 0:
                rb.sample()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        """,
    "hand_over": """
        import pickle
        from multiprocessing import context
        def op():
            rb = prioritized()
            rb.extend(rows)
            rb.share()
            context.set_spawning_popen(types.SimpleNamespace())  # as when a process is started
            try:
                handed = pickle.dumps(rb)
            finally:
                context.set_spawning_popen(None)
            pickle.loads(handed).sample()
        """,
}


def measured(run, op, measure, folder, **numbers):
    code = ROUNDS + textwrap.dedent(op) + f"measure = {measure}\n" + MEASURED
    return [json.loads(line) for line in run(code, folder=str(folder), **numbers).splitlines()]


def grown(op, folder):
    """By how much each count grew in four of five times six rounds, or in all."""
    points = measured(fresh.run_counted, op, "counts", folder, warm_up=10, points=5, rounds=6)
    return {
        name: sorted(after[name] - before[name] for before, after in itertools.pairwise(points))[1] / 6
        for name in points[0]
    }


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_round_keeps_nothing(ram, name):
    found = grown(OPERATIONS[name], ram)
    allowed = {what: 20 if what == "bytes" else 0 for what in found}
    assert not {what: found[what] for what in found if found[what] > allowed[what]}


@pytest.mark.parametrize(
    ("keeps", "op"),
    [
        ("bytes", "libc.malloc.restype = ctypes.c_void_p\ndef op(): libc.malloc(40)"),
        ("objects", "kept = []\ndef op(): kept.append([])"),
        ("descriptors", "def op(): os.dup(0)"),
        (
            "mappings",
            "import mmap\nkept = []\ndef op(): kept.append((mmap.mmap(-1, 4096), mmap.mmap(-1, 4096, prot=mmap.PROT_READ)))",
        ),
        ("threads", "def op(): threading.Thread(target=threading.Event().wait, daemon=True).start()"),
        ("files", "def op(): tempfile.mkstemp(dir=folder)"),
    ],
)
def test_what_a_round_keeps_is_found(ram, keeps, op):
    assert grown(op + "\n", ram)[keeps] >= 1


@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.parametrize("name", OPERATIONS)
def test_resident_memory_does_not_grow(ram, name):
    every = 100
    numbers = {"warm_up": 1000, "points": 10_000 // every, "rounds": every}

    def run(code, **values):
        return fresh.run_long(code, stress.LIMIT_S, **values)

    there = measured(run, OPERATIONS[name], "resident", ram, **numbers)
    assert slope(there, every) <= 20, f"bytes of resident memory: {there}"


def slope(there, every):
    """Bytes a round: the median over five parts, as what is kept grows in all of them, and a table that grows once in one."""
    n = len(there) // 5
    parts = [there[k * n : (k + 1) * n + 1] for k in range(5)]
    return statistics.median(statistics.linear_regression(range(0, every * len(p), every), p)[0] for p in parts)


def test_a_step_is_no_slope_and_a_leak_is_one():
    assert slope([0] * 30 + [300_000] * 71, 100) == 0
    assert slope([2_100 * i for i in range(101)], 100) == pytest.approx(21)
