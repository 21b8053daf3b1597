"""Damage of every file of what a buffer has saved: loads refuse it and name it, the buffer and the files stay as they were. B19–B21."""

import collections
import copy
import os
import shutil

import pytest
import torch

from engram import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ObservationNorm,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.checkpoint.checkpointer import Checkpointer
from engram.saved import part_reader
from engram.saved.part_writer import PartWriter
from tests import stress
from tests.buffer.states import L
from tests.saved.checkpoint_folders import rewrite, tree
from tests.saved.test_damage import empty, flip, folder, lengthen, link, pipe, remove, shorten
from tests.saved.test_damage import restore as mend
from tests.twins import bits, contents, rows

pytestmark = pytest.mark.filterwarnings("ignore:restore. .* is loaded, and not")

DAMAGES = [remove, shorten, lengthen, empty, flip, link, pipe, folder]
KINDS = ["dump", "series", "list"]


def make(kind, n=0, first=0, storage=None):
    made = ListStorage(L) if kind == "list" else LazyTensorStorage(L)
    rb = TensorDictReplayBuffer(
        storage=made if storage is None else storage,
        sampler=PrioritizedSampler(L, 0.7, 0.5),
        transform=ObservationNorm(1.0, 2.0, ["score"]),
        batch_size=4,
        prefetch=1,
        generator=torch.Generator().manual_seed(first),
    )
    if n:
        rb.extend(rows(n, first))
        rb.update_priority(torch.arange(n), torch.rand(n))
        rb.sample()
        rb.sample()
    return rb


def save(kind, path, n=L + 3, first=0):
    rb = make(kind)
    rb.extend(rows(n, first))
    rb.update_priority(torch.arange(3), torch.rand(3))
    rb.sample()
    rb.sample()
    if kind == "series":
        Checkpointer(path, rb).save(1)
    else:
        rb.dumps(path)
    rb.close()


def load(kind, path, rb):
    if kind == "series":
        Checkpointer(path, rb).restore(resume="exact")
    else:
        rb.loads(path)


def files_of(path):
    """All that a load needs."""
    unread = ("LATEST", "attempt.json")
    return [
        file.relative_to(path)
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in unread and not file.name.startswith("EPOCH-")
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}
    for kind in KINDS:
        made[kind] = tmp_path_factory.mktemp(kind) / "saved"
        save(kind, made[kind])
    return made


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_whole_ones_load(saved, kind):
    for rb in (make(kind), make(kind, 5, 100)):
        load(kind, saved[kind], rb)
        assert len(rb) == L
        rb.close()
    assert len(files_of(saved[kind])) > 15


@pytest.mark.parametrize(
    ("kind", "damage"),
    [("dump", damage) for damage in DAMAGES]
    + [(kind, damage) for kind in ("series", "list") for damage in (remove, shorten, flip)],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_every_damage_of_every_file(saved, kind, damage, ram):
    path = ram / "saved"
    shutil.copytree(saved[kind], path)
    bare, used = make(kind), make(kind, 5, 100)
    before = bits(used.state_dict())
    tried = 0
    for name in files_of(saved[kind]):
        if (path / name).stat().st_size == 0 and damage in (shorten, empty, flip):
            continue
        if kind == "series" and damage is remove and name.name == "manifest.json":
            continue  # all voted for it: whoever restores decides so again
        damage(path / name)
        as_it_was = tree(path)
        for rb in (used, bare):
            try:
                load(kind, path, rb)
            except CorruptCheckpoint as error:
                said = str(error)
            else:
                raise AssertionError(f"{name} was not missed")
            assert name.name in said, (name, said)
        assert tree(path) == as_it_was, "nothing is created, grown or touched"
        assert bits(used.state_dict()) == before, name
        assert len(bare) == 0
        mend(path / name, saved[kind] / name)
        tried += 1
    assert tried > 10
    for rb in (used, bare):
        load(kind, path, rb)
        assert len(rb) == L
        assert rb.extend(rows(2)).tolist() == [3, 4]
        rb.close()


def test_files_swapped_with_those_of_another(saved, kind, ram):
    """As large, and whole by themselves: but not what the digests name."""
    other = ram / "other"
    save(kind, other, first=1000)
    path = ram / "saved"
    shutil.copytree(saved[kind], path)
    theirs = {name.parts[-3:] if kind == "series" else name.parts: other / name for name in files_of(other)}
    rb, swapped = make(kind, 5, 100), 0
    before = bits(rb.state_dict())
    for name in files_of(path):
        if name.name == "manifest.json" and kind != "series":
            continue  # it names all else: the next one that is looked at is the one that is wrong
        key = name.parts[-3:] if kind == "series" else name.parts
        candidates = [file for part, file in theirs.items() if part == key] or list(other.rglob(name.name))[:1]
        raw = candidates[0].read_bytes()
        if raw == (path / name).read_bytes():
            continue
        rewrite(path / name, raw)
        with pytest.raises(CorruptCheckpoint):
            load(kind, path, rb)
        assert bits(rb.state_dict()) == before
        mend(path / name, saved[kind] / name)
        swapped += 1
    assert swapped > 5
    rb.close()


@pytest.mark.parametrize("place", ["memmap", "shared"])
def test_other_memories_keep_what_they_hold(saved, place, ram):
    path = ram / "saved"
    shutil.copytree(saved["dump"], path)
    flip(path / "storage" / "obs.memmap")
    scratch = LazyMemmapStorage(L, scratch_dir=ram / "store") if place == "memmap" else None
    rb = make("dump", 5, 100, scratch)
    if place == "shared":
        rb.share()
    before = bits(rb.state_dict())
    with pytest.raises(CorruptCheckpoint, match=r"obs\.memmap at byte 0"):
        rb.loads(path)
    assert bits(rb.state_dict()) == before
    rb.empty()
    with pytest.raises(CorruptCheckpoint, match=r"obs\.memmap at byte 0"):
        rb.loads(path)
    assert len(rb) == 0
    assert rb.extend(rows(2)).tolist() == [0, 1]
    rb.close()
    if place == "memmap":
        again = ReplayBuffer.open(ram / "store")
        assert len(again) == 2
        again.close()


def test_components_alone(saved, ram):
    for part in ("storage", "sampler"):
        for name in files_of(saved["dump"] / part):
            for damage in (remove, shorten, flip):
                path = ram / "part"
                shutil.rmtree(path, ignore_errors=True)
                shutil.copytree(saved["dump"] / part, path)
                if (path / name).stat().st_size == 0 and damage is not remove:
                    continue
                damage(path / name)
                rb = make("dump", 5, 100)
                before = bits(rb.state_dict())
                with pytest.raises(CorruptCheckpoint, match=name.name):
                    getattr(rb, part).loads(path)
                assert bits(rb.state_dict()) == before
                rb.close()


@pytest.mark.parametrize("used", [False, True])
def test_a_disk_that_fails_amid_a_load(saved, used, ram, monkeypatch):
    """Before anything changed: as it was. Amid the rows: empty, and good for use."""
    path = saved["dump"]
    read, calls = part_reader.disk.read, []

    def counting(*arguments):
        calls.append(1)
        return read(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(part_reader.disk, "read", counting)
        rb = make("dump", 5 if used else 0, 100)
        rb.loads(path)
        rb.close()
    for number in range(0, len(calls), stress.size(3, 1)):
        rb = make("dump", 5 if used else 0, 100)
        before = contents(rb)
        left = [number]

        def failing(*arguments, left=left):
            left[0] -= 1
            if left[0] == -1:
                raise OSError(5, "Input/output error")
            return read(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(part_reader.disk, "read", failing)
            with pytest.raises((OSError, CorruptCheckpoint)):
                rb.loads(path)
        assert contents(rb) == before or len(rb) == 0
        rb.loads(path)
        assert len(rb) == L
        rb.close()
    assert len(calls) > 10


def test_a_copy_that_was_interrupted(saved, ram):
    """Any number of its files are there, in the order in which ``cp`` takes them."""
    names = files_of(saved["dump"])
    for count in range(0, len(names), 2):
        path = ram / str(count)
        for name in names[:count]:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(saved["dump"] / name, path / name)
        path.mkdir(exist_ok=True)
        rb = make("dump")
        with pytest.raises(CorruptCheckpoint):
            rb.loads(path)
        assert len(rb) == 0
        rb.close()
    assert os.listdir(ram)


def test_without_the_second_read_a_buffer_would_lose_what_it_holds(saved, ram, monkeypatch):
    """Negative control: it is the look at every block before that keeps the rows."""
    from engram.storages import tensor

    path = ram / "saved"
    shutil.copytree(saved["dump"], path)
    flip(path / "storage" / "obs.memmap")
    monkeypatch.setattr(tensor, "check_blocks", lambda reader: None)
    rb = make("dump", 5, 100)
    with pytest.raises(CorruptCheckpoint):
        rb.loads(path)
    assert len(rb) == 0
    rb.close()


# ---- states whose sums are right -------------------------------------------------------------------------------------

DELETE = object()
FORGERIES = [DELETE, None, True, -1, 1 << 62, 0.5, "x", [], {"a": 1}, {"$array": 0}, {"$array": 1}]


def places(tree, at=()):
    yield at
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield from places(value, (*at, key))


def forged(tree, place, what):
    tree = node = copy.deepcopy(tree)
    for key in place[:-1]:
        node = node[key]
    if what is DELETE:
        del node[place[-1]]
    else:
        node[place[-1]] = what
    return tree


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["dump", "list"])
def test_forged_states_load_or_are_refused_by_name(kind, ram, monkeypatch):
    """Each value of every part's state becomes another, under sums that are right: a load goes through, or names what is wrong."""
    real, seen, change = PartWriter.finish, {}, {}

    def finish(self, state, **rest):
        seen[self.folder.name] = copy.deepcopy(dict(state))
        if self.folder.name in change:
            state = forged(dict(state), *change[self.folder.name])
        return real(self, state, **rest)

    monkeypatch.setattr(PartWriter, "finish", finish)
    source = make(kind, L)
    source.dumps(ram / "whole")
    cases = [
        (part, place, what) for part, tree in seen.items() for place in places(tree) if place for what in FORGERIES
    ]
    chance = stress.chance("forged", kind)
    outcomes = collections.Counter()
    for part, place, what in chance.sample(cases, min(len(cases), stress.size(60, 1_000_000))):
        change.clear()
        change[part] = (place, what)
        path = ram / "forged"
        shutil.rmtree(path, ignore_errors=True)
        try:
            source.dumps(path)
        except (TypeError, ValueError):  # what no writer can write
            continue
        rb = make(kind, 5, 100)
        before = contents(rb)
        try:
            rb.loads(path)
        except (CorruptCheckpoint, IncompatibleCheckpoint) as error:
            outcomes[type(error).__name__] += 1
            assert contents(rb) == before, (part, place, what)
        else:
            outcomes["loaded"] += 1
        rb.close()
    assert outcomes["CorruptCheckpoint"] > outcomes["loaded"]
