"""Processes that are killed at random instants under load, beside an account of what was acknowledged.

Writers note in a mapped file of their own, row by row, what they are about to write and what came back acknowledged. It
belongs to the kernel as the store does, so it outlives them; whoever looks at a store that is at rest can say of every row
what it may hold.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from tests import stress

KILLS = stress.size(36, 5_000, 20_000)
#: Sequence numbers are unique: those of a writer's process begin at its birth times this.
BIRTH = 1_000_000
#: The words of a row repeat after so many.
PERIOD = 32
DTYPES = [torch.int64, torch.float32, torch.int16, torch.uint8]


class Options:
    """What is drawn anew for every store."""

    def __init__(self, chance):
        self.lanes = chance.choice([1, 1, 2, 3])
        self.writers = chance.choice([self.lanes, self.lanes, self.lanes + 1])
        self.samplers = chance.choice([1, 2])
        words = chance.choice([0, 30, 1000, 40_000, 200_000])  # rows of 24 bytes to 3 MB
        self.fields = [(f"f{i}", chance.choice(DTYPES), words) for i in range(chance.choice([1, 2]))]
        row_bytes = 24 + sum(dtype.itemsize * words for _, dtype, words in self.fields)
        self.length = min(chance.choice([1, 3, 8, 33, 100, 700]), max(3, 30_000_000 // row_bytes // self.lanes))
        most = max(1, chance.choice([1, 20_000, 4_000_000, 4_000_000]) // row_bytes)
        self.batch = min(most, chance.choice([self.length, 2 * self.length]))
        self.where = chance.choice(["disk", "ram", "share"])
        self.alpha = chance.choice([0.0, 0.6, 1.0])
        self.per_chunk = max(1, (256 << 10) // row_bytes)
        self.grouped = chance.choice([0, 64, 1 << 24])

    @property
    def capacity(self):
        return self.lanes * self.length

    def sampler(self):
        return PrioritizedSampler(self.capacity, self.alpha, 0.4)

    def ready(self, n):
        """Rows for later, of numbers from 0 on: a writer that has them at hand is mostly killed while it writes."""
        return {name: self._words(torch.arange(n), dtype, words) for name, dtype, words in self.fields}

    def rows(self, writer, first, n, ready=None):
        """Rows whose every word follows from who wrote them and their number."""
        ready = self.ready(PERIOD + n) if ready is None else ready
        sequence = torch.arange(first, first + n)
        at = first % PERIOD
        columns = {name: column[at : at + n] for name, column in ready.items()}
        return TensorDict(
            {"writer": torch.full_like(sequence, writer), "sequence": sequence, "twice": 2 * sequence, **columns}, [n]
        )

    @staticmethod
    def _words(sequence, dtype, words):
        return ((sequence[:, None] % PERIOD) * 37 + torch.arange(words)).to(dtype)

    def torn(self, rows):
        """Of which of these the words do not belong together."""
        bad = rows["twice"] != 2 * rows["sequence"]
        for name, dtype, words in self.fields:
            bad |= (rows[name] != self._words(rows["sequence"], dtype, words)).any(1)
        return bad.nonzero().flatten().tolist()


class Account:
    """Of every writer, by row: the number that was acknowledged last, and one that is being written; -1 for none."""

    def __init__(self, path, writers, capacity):
        words = np.memmap(path, np.int64, "w+", shape=(2, writers, capacity))
        words[:] = -1
        self.acknowledged, self.begun = words


def write(rb, options, account, writer, birth):
    lane = writer % options.lanes
    alone = options.writers <= options.lanes
    sequence = birth * BIRTH
    step = 0
    ready = options.ready(PERIOD + options.batch)
    while True:
        n = 1 + step * 7 % options.batch
        step += 1
        numbers = np.arange(sequence, sequence + n)
        if alone:  # then the batch goes where the lane's cursor is
            seam = rb.storage.extent().seam[lane] - lane * options.length
            rows = (seam + np.arange(n)) % options.length + lane * options.length
        else:
            rows = np.arange(options.length) + lane * options.length
            numbers = np.full(options.length, sequence)
        account.begun[writer, rows] = numbers
        written = rb.extend(options.rows(writer, sequence, n, ready), lane=lane).numpy()
        account.acknowledged[writer, written] = np.arange(sequence, sequence + n)
        account.begun[writer, rows] = -1
        sequence += n


def learn(rb, options):
    while True:
        with contextlib.suppress(NoSampleable):
            batch = rb.sample(32)
            assert not options.torn(batch)
            batch["td_error"] = torch.rand(len(batch))
            rb.update_tensordict_priority(batch)


class Child:
    """A forked process. That it ends by itself is a failure."""

    def __init__(self, target, *arguments):
        self.report = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when it is dead
        self.pid = os.fork()
        if self.pid == 0:
            try:
                torch.set_num_threads(1)
                target(*arguments)
            except BaseException:  # noqa: BLE001 - reported
                traceback.print_exc(file=self.report)
                self.report.flush()
            finally:
                os._exit(1)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.report.seek(0)
        said = self.report.read()
        self.report.close()
        assert status == -signal.SIGKILL, said or status


class Store:
    """A store with its processes, from its making to its end."""

    def __init__(self, options, folder, counts):
        self.options, self.counts, self.folder = options, counts, folder
        self.account = Account(folder / "account", options.writers, options.capacity)
        self.births = 0
        self.died = {}  # row -> [(writer, number)] of writes that a death cut short
        self.deaths = [0] * options.lanes
        self.place = folder / "store" if options.where == "disk" else Path(tempfile.mkdtemp(dir=stress.RAM)) / "store"
        self.rb = None
        if options.where == "share":
            self.rb = TensorDictReplayBuffer(
                storage=LazyTensorStorage(options.capacity, lanes=options.lanes), sampler=options.sampler()
            ).share()
            self.rb.extend(options.rows(0, 0, 1), lane=0)
            self.rb.empty()
        else:
            made = TensorDictReplayBuffer(
                storage=LazyMemmapStorage(
                    options.capacity, scratch_dir=self.place, lanes=options.lanes, group_small_fields=options.grouped
                ),
                sampler=options.sampler(),
            )
            made.extend(options.rows(0, 0, 1), lane=0)
            made.empty()
            made.close()
        self.children = {}
        for writer in range(options.writers):
            self.start(("writer", writer))
        for sampler in range(options.samplers):
            self.start(("sampler", sampler))

    def start(self, key):
        kind, number = key
        self.births += 1
        arguments = (self.account, number, self.births) if kind == "writer" else ()
        self.children[key] = Child(self._run, write if kind == "writer" else learn, arguments)

    def _run(self, target, arguments):
        rb = self.rb if self.rb is not None else ReplayBuffer.open(self.place)
        target(rb, self.options, *arguments)

    def kill(self, key):
        self.children.pop(key).kill()
        self.counts["kills"] += 1
        kind, writer = key
        if kind == "writer":
            begun = self.account.begun[writer]
            rows = np.flatnonzero(begun >= 0)
            self.deaths[writer % self.options.lanes] += len(rows) > 0
            self.counts["writes cut short"] += len(rows) > 0
            for row in rows:
                self.died.setdefault(int(row), []).append((writer, int(begun[row])))
            begun[:] = -1

    def end(self):
        """All are killed. Somebody opens the store, sometimes dying of it himself, and compares it with the account."""
        for child in self.children.values():  # at once: nobody is left who could put anything in order
            os.kill(child.pid, signal.SIGKILL)
        for key in list(self.children):
            self.kill(key)
        rb = self.rb
        if rb is None:
            for _ in range(self.counts["stores"] % 3):
                opener = Child(self._open_for_ever)
                time.sleep(self.chance_of_recovery())
                opener.kill()
                self.counts["kills"] += 1
                self.counts["kills of openers"] += 1
            rb = ReplayBuffer.open(self.place)
            repair = rb.storage.store.repair
            if repair is None:
                assert (self.account.acknowledged < 0).all(), "written to since it was closed, and that was not noticed"
            else:
                self.counts["repaired writes"] += repair.claims
                self.counts["rows set aside"] += repair.voided
        else:
            rb.storage.store.core.reclaim()
        assert rb.storage.store.core.in_flight == 0
        live = self.check(rb)
        stress.check_priorities(rb.sampler.priorities(), live)
        for lane in range(self.options.lanes):  # a round of every lane heals it
            rb.extend(self.options.rows(99, 0, self.options.length), lane=lane)
        assert len(rb) == self.options.capacity
        assert rb.stats()["void_rows"] == 0
        assert len(stress.check_priorities(rb.sampler.priorities(), range(self.options.capacity)).nonzero()) == len(rb)
        home = rb.storage.store.directory
        rb.close()
        assert home.exists() == (self.rb is None)
        if self.options.where != "disk":
            shutil.rmtree(self.place.parent)
        self.counts["stores"] += 1

    def _open_for_ever(self):
        rb = ReplayBuffer.open(self.place)
        while rb is not None:  # nor does it close it
            signal.pause()

    def chance_of_recovery(self):
        return (self.births * 7 % 12) / 2000

    def check(self, rb):
        """Every row holds what was acknowledged there last, or what a dead writer was putting there, whole; or, where such a
        one was at work, nothing. Returns the live rows.
        """
        options, account = self.options, self.account
        live = [row for row in range(options.capacity) if row in rb.storage]
        assert len(rb) == len(live)
        held = {}
        for begin in range(0, len(live), 64):
            some = live[begin : begin + 64]
            rows = rb[some]
            assert not options.torn(rows), (options.__dict__, some)
            held |= dict(zip(some, zip(rows["writer"].tolist(), rows["sequence"].tolist(), strict=True), strict=True))
        newest = account.acknowledged.max(0)
        if options.writers > options.lanes:  # several on a lane: which came last, nobody knows but the store
            for row in range(options.capacity):
                if row in held:
                    writer, number = held[row]
                    assert number >= account.acknowledged[writer, row], (row, held[row])
                elif newest[row] >= 0:
                    assert self.deaths[row // options.length], f"row {row} is gone and nobody died"
            for lane in range(options.lanes):
                rows = range(lane * options.length, (lane + 1) * options.length)
                missing = sum(newest[row] >= 0 and row not in held for row in rows)
                assert missing <= self.deaths[lane] * min(options.per_chunk, options.batch)
            return live
        void = {}
        for row in range(options.capacity):
            late = [number for _, number in self.died.get(row, []) if number > newest[row]]
            if row in held:
                assert held[row][1] == newest[row] or held[row][1] in late, (row, held[row], newest[row], late)
            elif newest[row] >= 0:
                self.counts["void rows"] += 1
                assert late, f"row {row} is gone: {newest[row]} was acknowledged there"
                void.setdefault(late[-1] // BIRTH, []).append(row)
            self.counts["rows compared"] += 1
        for rows in void.values():  # one death voids one chunk
            assert len(rows) <= options.per_chunk
        # Of a batch that was cut short the rows that are there are its first ones, as far as no later write hides them.
        batches = {}
        for row, cut in self.died.items():
            for _, number in cut:
                batches.setdefault(number // BIRTH, []).append((number, row))
        for batch in batches.values():
            known = [
                row in held and held[row][1] == number
                for number, row in sorted(batch)
                if newest[row] < number and number == max(other for _, other in self.died[row])
            ]
            assert known == sorted(known, reverse=True), (options.__dict__, sorted(batch), held)
        return live


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
def test_kills_under_load(tmp_path):
    chance = stress.chance("kills")
    counts = dict.fromkeys(
        (
            "kills",
            "kills of openers",
            "stores",
            "writes cut short",
            "repaired writes",
            "rows set aside",
            "void rows",
            "rows compared",
        ),
        0,
    )
    began = time.monotonic()
    while counts["kills"] < KILLS:
        folder = tmp_path / f"store{counts['stores']}"
        folder.mkdir()
        store = Store(Options(chance), folder, counts)
        for _ in range(chance.choice([4, 8, 16])):
            time.sleep(chance.choice([0.01, 0.1, 0.1]) * chance.random())
            key = chance.choice(list(store.children))
            store.kill(key)
            store.start(key)
        time.sleep(chance.random() * 0.02)
        store.end()
        shutil.rmtree(folder)
    print(f"{counts} in {time.monotonic() - began:.1f} s", file=sys.stderr)
