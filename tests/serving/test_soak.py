"""64 writers and 4 learners of two served stores, for minutes: memory stays flat, every row is there, the ratio stays in its band."""

import json
import time
from pathlib import Path

import pytest
import torch

from engram import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer, SamplesPerInsert
from tests import fresh, stress
from tests.serving.servers import start
from tests.waiting import until

SECONDS = stress.size(5, 600)
WRITERS, LANES, BATCH, MOST = 64, 8, 32, 5
#: Of which the first store has a limit: so many samples for each row, within so many of them.
RATIO, LEAST, TOLERANCE = 4, 256, 0.5

WRITE = """
import itertools, json, os, threading
import torch
from engram import ReplayBuffer

counts, errors = [0] * writers, []

def write(number):
    try:
        full = ("block", None)[number // 2 % 2]
        rb = ReplayBuffer.connect(addresses[number % 2], full=full)
        for step in itertools.count():
            if os.path.exists(stop):
                break
            n = (number + step) % most + 1
            ids = torch.arange(counts[number], counts[number] + n)
            rows = {"who": torch.full((n,), number), "step": ids, "data": ids.unsqueeze(1).expand(n, 256).contiguous()}
            rb.extend(rows, lane=number // 2 % lanes, timeout=120)
            if not counts[number]:
                print("begun", flush=True)
            counts[number] += n
        dropped = rb.stats().get("rows_dropped", 0)
        assert dropped == 0, dropped
        rb.close()
    except BaseException as error:
        errors.append(repr(error))

threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps({"counts": counts, "errors": errors}), flush=True)
"""
LEARN = """
import json, os, threading
import torch
from engram import RateLimited, ReplayBuffer

drawn, errors = [0] * 4, []

def learn(number):
    try:
        with ReplayBuffer.connect(addresses[number % 2], prefetch=2 * (number // 2)) as rb:
            while not os.path.exists(stop):
                try:
                    batch, info = rb.sample(return_info=True, timeout=0.5)
                except RateLimited:
                    continue
                assert (batch["data"] == batch["step"].unsqueeze(1)).all()
                rb.update_priority(info["index"], torch.rand(len(batch["step"])))
                if not drawn[number]:
                    print("begun", flush=True)
                drawn[number] += len(batch["step"])
    except BaseException as error:
        errors.append(repr(error))

threads = [threading.Thread(target=learn, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps({"drawn": drawn, "errors": errors}), flush=True)
"""


def own_mib(program):
    """Memory of a process that no file and no other process has."""
    said = Path(f"/proc/{program.pid}/status").read_text()
    assert "RssAnon:" in said, program.out + program.err  # it has ended
    return int(said.partition("RssAnon:")[2].split()[0]) / 1024


def check_band(rb):
    """As far as rows that are under way can take it: each process counts before it draws or writes."""
    level, centre = rb.stats()["limit_level"], RATIO * LEAST
    slack = TOLERANCE * centre + RATIO * MOST + 4 * 8 * BATCH
    assert centre - slack <= level <= centre + slack, level


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
def test_many_writers_and_learners_for_long(tmp_path):
    stores = []
    for name in ("limited", "free"):
        storage = LazyMemmapStorage(1 << 14, scratch_dir=tmp_path / name, lanes=LANES)
        rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(alpha=0.6, beta=0.4), batch_size=BATCH)
        first = {"who": torch.tensor([-1]), "step": torch.zeros(1).long(), "data": torch.zeros(1, 256).long()}
        rb.extend(first, lane=0)
        stores.append(rb)
    stores[0].limit(SamplesPerInsert(RATIO, min_size=LEAST, tolerance=TOLERANCE))
    servers = [start(tmp_path / name, f"unix:{tmp_path}/{name}.sock") for name in ("limited", "free")]
    addresses, ends = [server.address for server in servers], [tmp_path / "written", tmp_path / "learned"]
    learners = fresh.start(LEARN, addresses=addresses, stop=str(ends[1]))
    values = {"writers": WRITERS, "lanes": LANES, "most": MOST}
    writers = fresh.start(WRITE, addresses=addresses, stop=str(ends[0]), **values)
    programs = {"learners": learners, "writers": writers}
    programs |= {f"server {number}": server.program for number, server in enumerate(servers)}
    try:
        until(lambda: stores[0].stats()["limit_samples"] > 100 and stores[1].write_count > 1000, 200)
        until(lambda: (writers.out.count("begun"), learners.out.count("begun")) == (WRITERS, 4), 200)
        begin, sizes = time.monotonic(), []
        while time.monotonic() - begin < SECONDS:
            sizes.append({name: own_mib(program) for name, program in programs.items()})
            check_band(stores[0])
            time.sleep(SECONDS / 100)
        for end, program in zip(ends, (writers, learners), strict=True):
            end.touch()
            assert program.wait(200) == 0
    finally:
        for program in programs.values():
            program.kill()
    assert "not known to be written" not in writers.err
    written, learned = (json.loads(program.out.split("begun")[-1]) for program in (writers, learners))
    assert written["errors"] == learned["errors"] == []
    assert min(written["counts"]) > 0
    assert min(learned["drawn"]) > 0
    check_band(stores[0])
    for number, rb in enumerate(stores):
        check_rows(rb, written["counts"][number::2])
        rb.close()
    # At first pools and caches grow, and each of many threads takes some.
    settled, most = sizes[len(sizes) // 4], stress.size(400, 64)
    for name, last in sizes[-1].items():
        assert last - settled[name] < most, f"{name} grew from {settled[name]:.0f} to {last:.0f} MiB"


def check_rows(rb, counts):
    """Each writer's rows are there once and in order, in its lane, as far as the ring has kept them."""
    assert rb.write_count == 1 + sum(counts)
    who, step, data = rb["who"], rb["step"], rb["data"]
    assert torch.equal(data, step.unsqueeze(1).expand(-1, 256))
    for number in who.unique().tolist():
        if number >= 0:
            rows = step[who == number].sort().values
            assert rows.tolist() == list(range(counts[number // 2] - len(rows), counts[number // 2])), number
