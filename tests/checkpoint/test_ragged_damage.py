"""Files with rows of any length that say what no store does, or that others are to read."""

import hashlib
import struct

import pytest
import torch
import xxhash
from click.testing import CliRunner

from engram import (
    Checkpointer,
    FlatStorageCheckpointer,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    Ragged,
    ReplayBuffer,
)
from engram.cli import main
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.saved import description, documents
from engram.saved.inspection import verify
from engram.saved.part_reader import PartReader
from engram.saved.part_writer import PartWriter
from engram.saved.snapshot import RowsWriter
from tests.checkpoint.ragged_buffers import LONG, contents, fill, long_rows, make
from tests.saved.checkpoint_folders import rewrite
from tests.storages import ragged_rows as said


def sealed(folder, change, version=None):
    """Let ``change`` alter files, by name, and let the part say their sums, of blocks of 256 KiB."""
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
    entry = documents.msgspec.structs.replace(
        document.sums, bytes=len(packed), sha256=hashlib.sha256(packed).hexdigest()
    )
    more = {"sums": entry, "version": version or document.version}
    rewrite(folder / ".engram" / "part.json", documents.msgspec.structs.replace(document, **more).encode())


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


def copied(part, folder):
    documents.os.makedirs(folder)
    for path in sorted(part.rglob("*")):
        to = folder / path.relative_to(part)
        to.mkdir(exist_ok=True) if path.is_dir() else to.write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def long_dumped(tmp_path_factory):
    """Parts of version 3 and of version 2, in which a piece has sums of blocks of 256 KiB."""
    folder = tmp_path_factory.mktemp("long")
    long(400).storage.dumps(folder / "3")
    sealed(copied(folder / "3", folder / "2"), lambda _: None, version=(2, 0))
    return folder


def long(n):
    rb = ReplayBuffer(storage=LazyTensorStorage(400, ragged=LONG, ragged_bytes=4e6))
    rb.extend(long_rows(0, n))
    return rb


@pytest.mark.parametrize(("version", "block"), [(3, 1 << 20), (2, 1 << 18)])
def test_pieces_have_few_sums_and_those_of_version_2_a_sum_per_256_kib(version, block, long_dumped, ram):
    folder, expected = copied(long_dumped / str(version), ram / "d"), long(400)
    with PartReader.open(folder) as part:
        (piece,) = part.listing.pieces
        raw = bytearray((folder / piece.name).read_bytes())
        assert 3 << 20 < len(raw) <= 4 << 20
        sums = [xxhash.xxh3_64_intdigest(raw[at : at + block]) for at in range(0, len(raw), block)]
        assert part.listing.sums_of(piece.name).tolist() == sums
        assert part.listing.document.version == (version, 0)
        assert [*part.problems("full")] == []
    rb = long(3)
    rb.storage.loads(folder)
    for key in ("number", "tokens", "log_prob"):
        assert all(map(torch.equal, rb[:][key].unbind(), expected[:][key].unbind()))
    raw[(2 << 20) + (3 << 18)] ^= 1
    rewrite(folder / piece.name, bytes(raw))
    at = ((2 << 20) + (3 << 18)) // block * block
    with PartReader.open(folder) as part:
        (problem,) = part.problems("full")
    assert (problem.path, problem.offset) == (folder / piece.name, at)
    with pytest.raises(CorruptCheckpoint, match=rf"{piece.name} at byte {at}: expected the checksum"):
        rb.storage.loads(folder)


def test_a_part_links_no_piece_whose_sums_are_of_other_blocks(long_dumped):
    for version in (2, 3):
        part = PartWriter(long_dumped / "new" / str(version), "storage", "LazyTensorStorage")
        with PartReader.open(long_dumped / str(version)) as parent:
            (piece,) = parent.listing.pieces
            assert part.link(piece.name, parent, piece.name) == (version == 3)
            assert part.link(".engram/lanes.bin", parent, ".engram/lanes.bin")


@pytest.mark.parametrize("what", BAD_FILES)
def test_parts_that_say_what_no_store_does(what, dumped, ram):
    folder = copied(dumped, ram / "storage")
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
        IncompatibleCheckpoint, match=r"expected version 1\.1 or another 1\.x of engram\.part, got 3\.0"
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


# ---- rows whose items are not in their place ---------------------------------------------------------------------------------


#: Of heads nothing follows from the rows.
NOT_SEEN = ("heads that are smaller",)


@pytest.mark.parametrize("level", ["read", "full"])
@pytest.mark.parametrize("what", [name for name in BAD_FILES if name not in NOT_SEEN])
def test_what_cannot_be_loaded_is_not_good(what, level, dumped, ram):
    folder = copied(dumped, ram / "storage")
    assert verify(folder, level).good
    sealed(folder, BAD_FILES[what])
    assert verify(folder, level).problems


@pytest.mark.parametrize("layout", ["rings", "slots"])
@pytest.mark.parametrize("to", ["those of another row", "a part of another row's", "none", "behind the end"])
def test_a_place_that_is_written_by_hand(layout, to, ram):
    """Of one live row of a dump, all of whose sums are right."""
    more = {"ragged_layout": "slots"} if layout == "slots" else {"ragged_bytes": 1 << 16}
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ragged={"a": Ragged(torch.int32, max_length=9)}, **more))
    rb.extend({"number": torch.arange(6), "a": [torch.full((n,), n, dtype=torch.int32) for n in (3, 0, 4, 5, 2, 6)]})
    rb.remove([4])
    rb.storage.dumps(ram / "part")
    assert verify(ram / "part").good
    with PartReader.open(ram / "part") as part:
        (leader,) = (n for n, field in enumerate(part.schema) if field.ragged)
        (piece,) = part.listing.pieces
    name = f".engram/{leader:03}.spans"
    spans = [list(it) for it in struct.iter_unpack("<qi", (ram / "part" / name).read_bytes())]
    starts = [first for first, length in spans if length]
    spans[5][0] = {
        "those of another row": starts[0],
        "a part of another row's": starts[2] + 1,
        "none": piece.end + 100,
        "behind the end": piece.end - 5,
    }[to]
    changed = b"".join(struct.pack("<qi", *it) for it in spans)
    sealed(ram / "part", lambda raw: raw.__setitem__(name, bytearray(changed)))
    assert verify(ram / "part", "meta").good
    (problem,) = verify(ram / "part").problems
    assert problem.path == ram / "part"
    found = starts[2] if to == "a part of another row's" else spans[5][0]
    assert f"got some of field {leader} at {found}" in problem.what
    other = ReplayBuffer(storage=LazyTensorStorage(8, ragged={"a": Ragged(torch.int32, max_length=9)}, **more))
    with pytest.raises(CorruptCheckpoint):
        other.storage.loads(ram / "part")


def test_a_row_that_is_gone_may_have_had_any_place(ram):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(4, ragged={"a": Ragged(torch.int32, max_length=9)}, ragged_bytes=1 << 12)
    )
    rb.extend({"a": [torch.ones(2, dtype=torch.int32)] * 3})
    rb.remove([1])
    rb.storage.dumps(ram / "part")
    with PartReader.open(ram / "part") as part:
        (leader,) = (n for n, field in enumerate(part.schema) if field.ragged)
    sealed(ram / "part", _words(f".engram/{leader:03}.spans", 12, 10**6))
    assert verify(ram / "part").good


def test_a_tick_whose_linked_segments_say_an_older_place(ram, monkeypatch):
    """As ticks were saved once: items were written again elsewhere, and the segment of their rows was linked."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20_000, ragged={"a": Ragged(torch.int32, max_length=8)}, ragged_layout="slots")
    )
    checkpointer = Checkpointer(ram, rb)
    rb.extend({"a": [*torch.arange(40_000, dtype=torch.int32).view(-1, 2)]})
    checkpointer.save(1)
    monkeypatch.setattr(RowsWriter, "is_displaced", lambda *_: False)
    rb.extend({"a": [*torch.arange(50_000, 80_000, dtype=torch.int32).view(-1, 2)]})
    checkpointer.save(2)
    report = verify(ram)
    assert [problem.path.parts[-1] for problem in report.problems] == ["storage"]
    assert "in a file that is listed" in report.problems[0].what
    assert verify(ram, "meta").good
    found = CliRunner().invoke(main, ["verify", str(ram)])
    assert (found.exit_code, "in a file that is listed" in " ".join(found.output.split())) == (1, True)
