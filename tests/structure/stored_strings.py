"""The strings that files, states and messages between ranks hold, found by looking at those, whatever the code calls them.

Files of golden stores, dumps and series are compared byte for byte in ``tests/test_golden.py``; ``tests/golden/names.json`` has the
keys of states. Here is the rest: what is seen in a running job.
"""

import json
import re
import struct
import threading
from pathlib import Path

import torch
from tensordict import TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, Ranks, TensorDictReplayBuffer
from engram.checkpoint.checkpointer import Checkpointer
from tests.ranks.jobs import done, played
from tests.waiting import until

FILE = Path(__file__).with_name("stored_strings.json")
_HEADER = struct.Struct("=8sIIII9Q")
_SECTION = struct.Struct("=16sQQ")


def found(folder):
    """By kind, sorted."""
    messages, names = _job(folder / "series")
    return {
        "sections of the control file": _sections(folder / "store"),
        "messages of ranks": sorted(messages),
        "files of a series": sorted(names),
    }


def kept():
    return json.loads(FILE.read_text())


def write(strings):
    FILE.write_text(json.dumps(strings, indent=1) + "\n")


def _sections(folder):
    rb = _buffer(LazyMemmapStorage(8, scratch_dir=folder))
    rb.extend(_rows(0, 8))
    raw = (folder / ".engram" / "control").read_bytes()
    rb.close()
    magic, *_, count, _, _ = _HEADER.unpack_from(raw)
    assert magic == b"engram\0\1"
    sections = (_SECTION.unpack_from(raw, _HEADER.size + i * _SECTION.size)[0] for i in range(count))
    return [name.rstrip(b"\0").decode() for name in sections]


# ---- a job that saves, fails, and is restored on another number of ranks -----------------------------------------------


class _Board:
    def __init__(self, said):
        self.lock = threading.Lock()
        self.values, self.counters = {}, {}
        self.said = said

    def note(self, verb, key, value=b""):
        with self.lock:
            self.said.add(f"{verb} {_plain(key)}{_form(value)}")


class _Recorded(Ranks):
    """Threads that play ranks; what they say is noted."""

    def __init__(self, rank, world, board):
        super().__init__(rank, world)
        self._board = board

    def set(self, key, value):
        self._board.note("set", key, value)
        with self._board.lock:
            self._board.values[key] = value

    def get(self, key):
        with self._board.lock:
            return self._board.values.get(key)

    def claim(self, key, value):
        with self._board.lock:
            held = self._board.values.setdefault(key, value)
        self._board.note("claim", key, held)  # not what came too late
        return held

    def add(self, key, amount):
        self._board.note("add", key)
        with self._board.lock:
            self._board.counters[key] = self._board.counters.get(key, 0) + amount
            return self._board.counters[key]

    def forget(self, key):
        with self._board.lock:
            self._board.values.pop(key, None)
            self._board.counters.pop(key, None)


def _plain(text):
    """Without numbers and random names."""
    return re.sub(r"\d+", "#", re.sub(r"[0-9a-f]{16,}|(?<=-)[0-9a-f]{8}(?![0-9a-z])", "#", text))


def _form(value):
    """How a message is put together: its marker, or the keys of what it says."""
    text = value.decode("latin-1")
    if text[:1] in ("+", "-"):
        return f" {text[0]}"
    try:
        said = json.loads(text)
    except ValueError:
        return ""
    return f" {sorted(said)}" if isinstance(said, dict) else ""


def _play(n, act, said):
    board = _Board(said)
    done(played([_Recorded(rank, n, board) for rank in range(n)], lambda ranks, _: act(ranks)))


def _job(root):
    said = set()

    def save(ranks):
        rb = _buffer(LazyTensorStorage(32, lanes=2))
        rb.extend(_rows(100 * ranks.rank, 8), lane=0)
        ck = Checkpointer(root, rb, ranks=ranks, every_steps=10, timeout=100.0)
        ck.save(1)
        rb.extend(_rows(100 * ranks.rank + 8, 4), lane=0)
        ck.save(2, user={"epoch": 2})
        ck.request()
        ck.poll(3)
        with ck.guard():
            rb.extend(_rows(100 * ranks.rank + 12, 4), lane=1)
            until(lambda: "add #/watch/#/#" in said, 60.0)

    def load(ranks):
        rb = _buffer(LazyTensorStorage(32, lanes=2))
        Checkpointer(root, rb, ranks=ranks, timeout=100.0).restore()

    _play(2, save, said)
    _play(2, load, said)
    _play(3, load, said)
    return said, {_plain(str(path.relative_to(root))) for path in root.rglob("*") if path.is_file()}


def _buffer(storage):
    return TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(storage.max_size, 0.7, 0.5), batch_size=4)


def _rows(first, n):
    steps = torch.arange(first, first + n)
    return TensorDict({"obs": steps.float(), "episode": steps // 4, ("next", "done"): steps % 4 == 3}, [n])
