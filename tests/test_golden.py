"""Stores, dumps and series as they lay on a disk when their format was settled: they are read today, and written alike.

What fails here is a change of a format that others have data in. If it was meant: raise the version of what has changed, say so
in ``docs/store-format.md`` or ``docs/checkpoint-format.md``, and ``make golden``.
"""

import contextlib
import hashlib
import json
import platform
import re
import shutil
import struct
import sys

import pytest
import torch
import xxhash

from engram import IncompatibleCheckpoint, IncompatibleStore, ReplayBuffer, UncleanStore
from engram.format.files import _HEADER, _crc32c
from engram.saved import documents
from tests.golden import names
from tests.golden.archive import FOLDER, as_text, fixed, golden, unpack
from tests.golden.cases import DUMPS, FAMILIES, STORES
from tests.saved.checkpoint_folders import rewrite

CASES = [(family, name) for family, cases in FAMILIES.items() for name in cases]

pytestmark = [
    pytest.mark.filterwarnings("ignore:sample. batch_size", "ignore:.* has no priorities"),
    pytest.mark.skipif(
        (platform.machine(), sys.platform) != ("x86_64", "linux"), reason="stores are of the platform they were made on"
    ),
]


@pytest.fixture(scope="session")
def there(tmp_path_factory):
    """The golden folders, unpacked. Nobody writes to them."""
    folder = tmp_path_factory.mktemp("golden")
    for family in (*FAMILIES, "earlier"):
        unpack(golden(family)[0].read_bytes(), folder / family)
    return folder


@pytest.fixture
def copied(there, ram):
    """A golden folder that a test may write to."""

    def copy(family, name):
        made = ram / "golden"
        shutil.copytree(there / family / name, made, copy_function=shutil.copy2)
        return made

    return copy


@pytest.mark.parametrize(("family", "name"), CASES)
def test_holds_what_it_held(family, name, copied):
    """Rows, priorities, cursors, tickets, and what is drawn and written next."""
    found = as_text(FAMILIES[family][name].found(copied(family, name)))
    assert json.loads(found) == json.loads(golden(family)[1].read_text())[name]


@pytest.mark.parametrize("name", json.loads(golden("earlier")[1].read_text()))
def test_a_store_of_before_edits_kept_the_numbers_of_writes(name, copied):
    """Version 2.0: it is read as it is, and opened as one of today, whose rows were never edited."""
    folder = copied("earlier", name)
    before = fixed(folder)
    with contextlib.closing(ReplayBuffer.open(folder, readonly=True, unclean="accept")) as rb:
        state = rb.storage.store.state()
        assert state.writes.equal(state.numbers)
    assert fixed(folder) == before
    assert json.loads(as_text(STORES[name].found(folder))) == json.loads(golden("earlier")[1].read_text())[name]
    assert json.loads((folder / ".engram" / "store.json").read_text())["version"] == [2, 4]
    with contextlib.closing(ReplayBuffer.open(folder)) as rb:
        state = rb.storage.store.state()
        assert state.writes.equal(state.numbers)


def test_an_upgrade_that_was_interrupted_goes_on(copied):
    folder = copied("earlier", "tensor")
    tickets = folder / ".engram" / "tickets"
    tickets.write_bytes(tickets.read_bytes() + bytes(8 * 12))
    with contextlib.closing(ReplayBuffer.open(folder, readonly=True)) as rb:
        assert len(rb) == 12
    with contextlib.closing(ReplayBuffer.open(folder)) as rb:
        rb[3] = torch.tensor(9.0)
        assert float(rb[3]) == 9.0


@pytest.mark.parametrize(("family", "name"), CASES)
def test_is_written_as_it_was(family, name, there, ram):
    """Every file, byte for byte, but for times, process numbers and random names."""
    FAMILIES[family][name].write(ram / "made")
    before, now = fixed(there / family / name), fixed(ram / "made")
    assert sorted(now) == sorted(before)
    changed = {file: _difference(before[file], now[file]) for file in now if now[file] != before[file]}
    assert not changed


def _difference(before, now):
    if isinstance(before, str) or isinstance(now, str) or before[:2] != now[:2]:
        return before[:2], now[:2]
    if len(before[2]) != len(now[2]):
        return len(before[2]), len(now[2])
    at = next(i for i, (one, other) in enumerate(zip(before[2], now[2], strict=True)) if one != other)
    return at, before[2][at : at + 60], now[2][at : at + 60]


def _next_version(raw, by=1):
    """A JSON file of the next major version."""
    entries = json.loads(raw)
    entries["version"][0] += by
    return documents.encode({**entries, "sum": xxhash.xxh3_64_hexdigest(documents.encode({**entries, "sum": ""}))})


def _next_control(raw):
    """A control block of the next major version."""
    control = bytearray(raw)
    struct.pack_into("=I", control, 8, struct.unpack_from("=I", control, 8)[0] + 1)
    control[20:24] = bytes(4)
    struct.pack_into("=I", control, 20, _crc32c(bytes(control[: _HEADER.size])))
    return bytes(control)


def _next_index(raw):
    """An index of the next version, which is the last byte of its magic."""
    return raw[:7] + bytes([raw[7] + 1]) + raw[8:]


@pytest.mark.parametrize(
    ("name", "file", "change", "said"),
    [
        ("tensordict", ".engram/store.json", _next_version, "store.json"),
        ("tensordict", ".engram/control", _next_control, "control"),
        ("priorities", ".engram/indexes/critic/priorities", _next_index, "priorities"),
        ("tensor", ".engram/indexes/main/pass", _next_index, "epoch"),
    ],
)
def test_a_store_of_another_version_is_refused_by_name(name, file, change, said, copied):
    folder = copied("stores", name)
    (folder / file).write_bytes(change((folder / file).read_bytes()))
    before = fixed(folder)
    with pytest.raises(IncompatibleStore, match=rf"{re.escape(said)}.*format"):
        ReplayBuffer.open(folder)
    assert fixed(folder) == before


@pytest.mark.parametrize("file", ["manifest.json", "shard.json", "storage/.engram/part.json", "sampler/part.json"])
def test_a_dump_of_another_version_is_refused_by_name(file, copied):
    folder = copied("dumps", "priorities")
    known = 3 if file.endswith("part.json") else 1
    rewrite(folder / file, _next_version((folder / file).read_bytes(), known))
    _seal(folder)
    rb = DUMPS["priorities"].make()
    with pytest.raises(
        IncompatibleCheckpoint, match=rf"{re.escape(file)}: expected version 1\.[01].* got {known + 1}\.0"
    ):
        rb.loads(folder)
    assert not len(rb)


def _seal(dump):
    """Let the shard name its parts as they are, and the manifest the shard."""
    _name(dump / "shard.json", "parts", lambda part: next(dump.glob(f"{part['folder']}/**/part.json")))
    _name(dump / "manifest.json", "shards", lambda shard: dump / "shard.json")


def _name(path, entry, file_of):
    entries = json.loads(path.read_bytes())
    for named in entries[entry]:
        raw = file_of(named).read_bytes()
        named |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    if "sum" in entries:
        entries["sum"] = xxhash.xxh3_64_hexdigest(documents.encode({**entries, "sum": ""}))
    rewrite(path, documents.encode(entries))


def test_a_store_that_was_left_open_is_refused_after_another_boot(copied):
    with pytest.raises(UncleanStore, match="unclean"):
        ReplayBuffer.open(copied("stores", "left"))


def test_names_that_lie_in_files():
    assert names.found() == json.loads((FOLDER / "names.json").read_text())


def test_all_are_there_and_small():
    for family, cases in FAMILIES.items():
        assert list(json.loads(golden(family)[1].read_text())) == list(cases)
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 400_000
