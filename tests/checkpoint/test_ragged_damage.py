"""Files with rows of any length that say what no store does, or that others are to read."""

import hashlib
import struct

import pytest
from click.testing import CliRunner

from engram import FlatStorageCheckpointer, NestedStorageCheckpointer
from engram.cli import main
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.saved import description, documents
from engram.saved.inspection import verify
from engram.saved.part_reader import PartReader
from tests.checkpoint.ragged_buffers import contents, fill, make
from tests.saved.checkpoint_folders import rewrite
from tests.storages import ragged_rows as said


def sealed(folder, change):
    """Let ``change`` alter files, by name, and let the part say their sums."""
    with PartReader.open(folder) as part:
        names = list(part.listing.files)
        listing = part.listing
    raw = {name: bytearray((folder / name).read_bytes()) for name in names}
    change(raw)
    sums = []
    for name in names:
        summing = description.Summing()
        summing.update(raw[name])
        sums += summing.done()
        if bytes(raw[name]) != (folder / name).read_bytes():
            rewrite(folder / name, bytes(raw[name]))
    packed = struct.pack(f"<{len(sums)}Q", *sums)
    rewrite(folder / ".engram" / "sums.bin", packed)
    document = listing.document
    entry = documents.msgspec.structs.replace(document.sums, sha256=hashlib.sha256(packed).hexdigest())
    rewrite(folder / ".engram" / "part.json", documents.msgspec.structs.replace(document, sums=entry).encode())


def _words(name, at, value, kind="<q"):
    def change(raw):
        struct.pack_into(kind, raw[name], at, value)

    return change


SPANS, ITEMS = ".engram/001.spans", ".engram/items.bin"
BAD_FILES = {
    "a length that is negative": _words(SPANS, 8, -1, "<i"),
    "a length that is too long": _words(SPANS, 8, 1000, "<i"),
    "an offset that falls": _words(SPANS, 12 * 9, 0),
    "an offset before all": _words(SPANS, 12, -5),
    "an offset behind the head": _words(SPANS, 12 * 9, 10**9),
    "a piece of a lane that is not there": _words(ITEMS, 0, 7, "<I"),
    "a piece of a field that leads none": _words(ITEMS, 4, 0, "<I"),
    "a piece elsewhere": _words(ITEMS, 8, 3),
    "a piece of no items": _words(ITEMS, 16, 0),
    "a piece of more items": _words(ITEMS, 16, 10**6),
    "a piece of other bytes": _words(ITEMS, 24, 17),
    "flags": _words(ITEMS, 40, 6, "<I"),
    "heads that are smaller": lambda raw: raw.__setitem__(".engram/000.bin", bytearray(len(raw[".engram/000.bin"]))),
}


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    rb = fill(make(ring=said.ROOMY), 0, 30)
    folder = tmp_path_factory.mktemp("ragged") / "storage"
    rb.storage.dumps(folder)
    return folder


@pytest.mark.parametrize("what", BAD_FILES)
def test_parts_that_say_what_no_store_does(what, dumped, ram):
    folder = ram / "storage"
    documents.os.makedirs(folder)
    for path in sorted(dumped.rglob("*")):
        to = folder / path.relative_to(dumped)
        to.mkdir(exist_ok=True) if path.is_dir() else to.write_bytes(path.read_bytes())
    rb = fill(make(ring=said.ROOMY), 700, 10)
    before = contents(rb)
    sealed(folder, lambda raw: None)
    make(ring=said.ROOMY).storage.loads(folder)
    sealed(folder, BAD_FILES[what])
    with pytest.raises(CorruptCheckpoint):
        rb.storage.loads(folder)
    assert contents(rb) == before


def test_damaged_items_are_named(dumped, ram):
    rb = fill(make(), 0, 30)
    rb.dumps(ram / "d")
    name = next((ram / "d").glob("storage/.engram/items/0-1-*.bin"))
    raw = bytearray(name.read_bytes())
    raw[5] ^= 1
    rewrite(name, bytes(raw))
    assert [problem.path for problem in verify(ram / "d").problems] == [name]
    before = contents(rb)
    with pytest.raises(CorruptCheckpoint, match=name.name):
        rb.loads(ram / "d")
    assert contents(rb) == before
    name.unlink()
    with pytest.raises(CorruptCheckpoint, match=name.name):
        make().loads(ram / "d")


def test_inspect_shows_what_rows_hold(ram):
    fill(make(), 0, 5).dumps(ram / "d")
    result = CliRunner().invoke(main, ["inspect", str(ram / "d")])
    assert not result.exit_code, result.output
    lines = {line.split()[0]: line.split()[1:] for line in result.output.splitlines() if line}
    assert lines["tokens"][:2] == ["int32", "[≤"]
    assert lines["text"][0] == "utf-8"


def test_older_readers_refuse_such_parts_by_version(dumped, monkeypatch):
    monkeypatch.setattr(description.Part, "VERSIONS", ((1, 1),))
    with pytest.raises(
        IncompatibleCheckpoint, match=r"expected version 1\.1 or another 1\.x of engram\.part, got 2\.0"
    ):
        make().storage.loads(dumped)


def test_layouts_of_other_libraries_refuse_them_by_name(ram):
    rb = fill(make(), 0, 5)
    rb.storage.register_save_hook(lambda data, path=None: data)
    with pytest.raises(
        ValueError, match="dumps: expected fields whose rows all have one size, got ragged ones: tokens"
    ):
        rb.dumps(ram / "d")
    assert not (ram / "d").exists()
    for layout in (FlatStorageCheckpointer(), NestedStorageCheckpointer()):
        with pytest.raises(ValueError, match="ragged ones: tokens"):
            layout.dumps(rb.storage, ram / "d")
    assert not (ram / "d").exists()
