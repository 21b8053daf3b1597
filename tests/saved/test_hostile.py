"""Files that nobody's engram wrote: refused at once, without memory, and nothing else is touched. T10a, B20."""

import base64
import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tracemalloc

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format import strict
from engram.saved import documents
from engram.saved.checkpoints import Checkpoint
from engram.saved.inspection import verify
from engram.saved.part_reader import PartReader
from tests.saved import checkpoint_folders as made

BIG = (1 << 63) - 1


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flat") / "storage"
    made.write_flat(folder)
    return folder


@pytest.fixture(scope="module")
def segments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segments") / "storage"
    made.write_segments(folder)
    return folder


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "sampler"
    made.write_index(folder)
    return folder


def at(tree, path):
    for key in path[:-1]:
        tree = tree[key]
    return tree, path[-1]


def put(*path, value):
    def change(tree):
        inner, key = at(tree, path)
        inner[key] = value

    return change


def drop(*path):
    def change(tree):
        inner, key = at(tree, path)
        del inner[key]

    return change


NUMBERS = [-1, BIG, -BIG - 1, 1 << 62, 1e300, 1.5, True, None, "1", [], {}]
WORDS = ["", 5, None, "../../etc/passwd", "a" * 300, "\x00", [], "/"]
FLAT_NUMBERS = [
    ("geometry", "capacity"), ("geometry", "lanes"), ("geometry", "lane_length"),
    ("schema", 0, "id"), ("schema", 0, "shape", 0), ("sums", "bytes"),
    ("storage", 0, "bytes"), ("storage", 0, "sums_at"), ("storage", 0, "field"),
    ("tables", "lanes", "records"), ("tables", "lanes", "bytes"), ("tables", "tickets", "records"),
    ("tables", "tickets", "sums_at"), ("tables", "trajectories", "bytes"),
]  # fmt: skip
FLAT_WORDS = [
    ("part",), ("byteorder",), ("schema_sum",), ("sums", "sha256"), ("format",), ("schema", 0, "dtype"), ("schema", 0, "role"),
]  # fmt: skip
ENTRIES = [
    "arrays", "byteorder", "format", "geometry", "name", "part", "schema", "schema_sum", "state", "storage", "sums", "tables",
    "type", "version",
]  # fmt: skip
MANY = [{"id": i, "key": [str(i)], "dtype": "bool", "shape": [], "role": "data"} for i in range(4097)]
INDEX_NUMBERS = [
    ("arrays", 0, "bytes"),
    ("arrays", 0, "sums_at"),
    ("arrays", 0, "shape", 0),
    ("state", "leaves", "$array"),
]
SEGMENT_NUMBERS = [
    ("segment", "rows"),
    ("segment", "align"),
    ("tables", "segments", "records"),
    ("tables", "segments", "bytes"),
]

CASES = {
    **{f"flat {path}={value!r}": ("flat", put(*path, value=value)) for path in FLAT_NUMBERS for value in NUMBERS},
    **{f"index {path}={value!r}": ("index", put(*path, value=value)) for path in INDEX_NUMBERS for value in NUMBERS},
    **{f"segments {path}={value!r}": ("segments", put(*path, value=value)) for path in SEGMENT_NUMBERS for value in NUMBERS},
    **{
        f"flat {path}={value!r}": ("flat", put(*path, value=value))
        for path in FLAT_WORDS
        for value in WORDS
    },
    **{
        f"flat without {name}": ("flat", drop(name))
        for name in ENTRIES
    },
    **{f"flat without {path}": ("flat", drop(*path)) for path in FLAT_NUMBERS if path[-1] not in (0, 1)},
    "an unknown entry": ("flat", put("extra", value=1)),
    "an unknown entry inside": ("flat", put("geometry", "extra", value=1)),
    "an unknown table": ("flat", put("tables", "evil", value={"records": 0, "bytes": 0, "sums_at": 0})),
    "an unknown role": ("flat", put("schema", 0, "role", value="reward")),
    "a key with a parent": ("flat", put("schema", 0, "key", value=["..", "reward"])),
    "an absolute key": ("flat", put("schema", 0, "key", value=["/etc/passwd"])),
    "our own name as a key": ("flat", put("schema", 0, "key", value=[".engram", "tickets"])),
    "an empty key": ("flat", put("schema", 0, "key", value=[])),
    "a deep key": ("flat", put("schema", 0, "key", value=["a"] * 17)),
    "a long key": ("flat", put("schema", 0, "key", value=["a" * 256])),
    "the same key twice": ("flat", put("schema", 0, "key", value=["observation"])),
    "a file that is a folder": ("flat", put("schema", 0, "key", value=["observation.memmap", "x"])),
    "many dimensions": ("flat", put("schema", 0, "shape", value=[1] * 33)),
    "an overflowing product": ("flat", put("schema", 0, "shape", value=[1 << 31] * 5)),
    "an overflowing product with a zero": ("flat", put("schema", 0, "shape", value=[0] + [1 << 31] * 5)),
    "many fields": ("flat", put("schema", value=MANY)),
    "no fields": ("flat", put("schema", value=[])),
    "columns of none": ("flat", put("geometry", "columns", value=[0])),
    "columns and lanes": ("flat", put("geometry", "columns", value=[2])),
    "a level that is none": ("flat", put("storage", 3, "meta", value=["elsewhere"])),
    "a level above": ("flat", put("storage", 3, "meta", value=[".."])),
    "a level twice": ("flat", put("storage", 4, "meta", value=[])),
    "a level that is a field": ("flat", put("storage", 3, "field", value=1)),
    "a huge level": ("flat", put("storage", 3, "bytes", value=1 << 40)),
    "overlapping sums": ("flat", put("storage", 1, "sums_at", value=0)),
    "segments and files": ("flat", put("segment", value={"rows": 8, "align": 4096})),
    "an array of another dtype": ("index", put("arrays", 0, "dtype", value="os.system")),
    "a longer array": ("index", put("arrays", 0, "shape", value=[5])),
    "an array that overflows": ("index", put("arrays", 0, "shape", value=[1 << 61, 8])),
    "an array with a huge zero": ("index", put("arrays", 1, "shape", value=[0, BIG])),
    "an array of many dimensions": ("index", put("arrays", 1, "shape", value=[0] * 33)),
    "a reserved key": ("index", put("state", "$type", value="os.system")),
    "a key beside an array": ("index", put("state", "leaves", "more", value=1)),
    "rows in a sampler": ("index", put("geometry", value={"capacity": 1, "lanes": 1, "lane_length": 1, "columns": []})),
    "a sampler that says it is a storage": ("index", put("part", value="storage")),
    "a storage that says it is a sampler": ("flat", put("part", value="sampler")),
    "a storage in place of a list": ("flat", put("schema", value={})),
    "a newer major version": ("flat", put("version", value=[2, 0])),
    "an older major version": ("flat", put("version", value=[0, 9])),
    "a huge version": ("flat", put("version", value=[BIG, BIG])),
    "three numbers of version": ("flat", put("version", value=[1, 0, 0])),
}  # fmt: skip

#: As text, since json itself would not write them.
TEXTS = {
    "nothing": b"",
    "spaces": b" " * 1000,
    "not JSON": b"\x80\x04\x95",
    "a pickle": base64.b64decode(b"gASVFAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOU"),
    "a number": b"1",
    "null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
    "two objects": b"{}{}",
    "duplicate keys": b'{"format":"engram.part","format":"engram.part"}',
    "duplicate keys inside": b'{"format":"engram.part","state":{"a":1,"a":2}}',
    "duplicate keys by escapes": b'{"format":"engram.part","state":{"a":1,"\\u0061":2}}',
    "NaN": b'{"format":"engram.part","state":{"a":NaN}}',
    "Infinity": b'{"format":"engram.part","state":{"a":-Infinity}}',
    "a float that overflows": b'{"format":"engram.part","state":{"a":1e999}}',
    "an int that overflows": b'{"format":"engram.part","state":{"a":9223372036854775808}}',
    "a negative int that overflows": b'{"format":"engram.part","state":{"a":-9223372036854775809}}',
    "10^5 digits": b'{"format":"engram.part","state":{"a":' + b"9" * 100_000 + b"}}",
    "10^5 digits behind a point": b'{"format":"engram.part","state":{"a":1.' + b"9" * 100_000 + b"e9}}",
    "depth 17": b'{"format":"engram.part","state":' + b"[" * 16 + b"]" * 16 + b"}",
    "depth 10^5": b"[" * 100_000 + b"]" * 100_000,
    "depth 10^5, of objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "only openings": b"[" * (1 << 20),
    "only quotes": b'"' * (1 << 20),
    "escaped quotes": b'"' + b'\\"' * 500_000,
    "a long string": b'{"format":"' + b"a" * ((1 << 20) - 20) + b'"}',
    "a megabyte of pairs": b"[" + b"[]," * 349_000 + b"[]]",
    "too long": b" " * (1 << 20) + b"{}",
    "overlong UTF-8": b'{"format":"engram.part","state":{"a":"\xc0\xaf"}}',
    "half a character": b'{"format":"engram.part","state":{"a":"\\ud800"}}',
    "UTF-16": '{"format":"engram.part"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"format":"engram.part"}',
    "a control character": b'{"format":"engram.part","state":{"a":"\n"}}',
    "NUL": b'{"format":"engram.part"}\x00',
    "a comment": b'{"format":"engram.part"} // x',
    "a trailing comma": b'{"format":"engram.part",}',
    "another format": b'{"format":"engram.shard","version":[1,0]}',
    "a version that is a string": b'{"format":"engram.part","version":"1.0"}',
    "a version that is bools": b'{"format":"engram.part","version":[true,false]}',
    "hexadecimal": b'{"format":"engram.part","state":{"a":0x10}}',
    "a leading zero": b'{"format":"engram.part","state":{"a":010}}',
}


def copied(source, tmp_path):
    target = tmp_path / source.name
    shutil.copytree(source, target)
    return target


def description(folder):
    return next(path for path in (folder / "part.json", folder / ".engram/part.json") if path.exists())


def check_refused_at_once(act):
    begin = time.process_time()
    with pytest.raises((CorruptCheckpoint, IncompatibleCheckpoint)) as caught:
        act()
    assert time.process_time() - begin < 30  # and on a quiet machine 1
    tracemalloc.start()
    try:
        with pytest.raises((CorruptCheckpoint, IncompatibleCheckpoint)):
            act()
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 2000
    return caught.value


def test_there_are_enough_cases():
    assert len(CASES) + len(TEXTS) >= 200


@pytest.mark.parametrize("name", CASES)
def test_descriptions_that_do_not_fit(name, tmp_path, request):
    kind, change = CASES[name]
    folder = copied(request.getfixturevalue(kind), tmp_path)
    path = description(folder)
    tree = json.loads(path.read_bytes())
    before = copy.deepcopy(tree)
    change(tree)
    if json.dumps(tree) == json.dumps(before):
        pytest.skip("that is what it was")
    made.rewrite(path, sealed(tree))
    files = made.tree(tmp_path)
    error = check_refused_at_once(lambda: PartReader.open(folder))
    assert str(folder) in str(error)
    assert "checksum" not in str(error)
    assert made.tree(tmp_path) == files


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_no_description(name, tmp_path, flat):
    folder = copied(flat, tmp_path)
    made.rewrite(description(folder), TEXTS[name])
    error = check_refused_at_once(lambda: PartReader.open(folder))
    assert "part.json" in str(error)
    (tmp_path / "manifest.json").write_bytes(TEXTS[name])
    check_refused_at_once(lambda: Checkpoint(tmp_path))


def test_the_good_ones_are_taken(flat, segments, index):
    for folder in (flat, segments, index):
        with PartReader.open(folder) as part:
            part.verify()
        path = description(folder)
        assert sealed(json.loads(path.read_bytes())) == path.read_bytes()


@pytest.mark.parametrize("said", [None, "", "0" * 16, 7])
def test_a_description_without_its_sum(tmp_path, index, said):
    """Of a part that was saved alone nothing else names it."""
    folder = copied(index, tmp_path)
    path = description(folder)
    tree = {**json.loads(path.read_bytes()), "sum": said}
    if said is None:
        del tree["sum"]
    made.rewrite(path, json.dumps(tree).encode())
    assert "part.json" in str(check_refused_at_once(lambda: PartReader.open(folder)))


def test_every_byte_of_a_description_counts(tmp_path, index):
    folder = copied(index, tmp_path)
    path = description(folder)
    raw = path.read_bytes()
    for at in range(len(raw)):
        made.rewrite(path, raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises((CorruptCheckpoint, IncompatibleCheckpoint), match=r"part\.json"):
            PartReader.open(folder)


def test_a_text_that_grows_when_it_is_written_anew(tmp_path, index):
    """The sum is of our own text, which may be longer than what is read at all."""
    folder = copied(index, tmp_path)
    tree = json.loads(description(folder).read_bytes())
    raw = json.dumps({**tree, "state": {"a": []}}).encode()
    numbers = b",".join([b"1e99"] * ((strict.MAX_BYTES - len(raw)) // 5))
    made.rewrite(description(folder), raw.replace(b"[]}", b"[" + numbers + b"]}"))
    assert "bytes of JSON" in str(check_refused_at_once(lambda: PartReader.open(folder)))


SEGMENT = {"lane": 0, "k": 4, "first": 8, "rows": 16, "bytes": 24, "sums_at": 40, "flags": 48, "zeros": 52}


@pytest.mark.parametrize("field", SEGMENT)
@pytest.mark.parametrize("value", [b"\xff" * 4, b"\x07\0\0\0"])
def test_segments_that_do_not_fit(segments, tmp_path, field, value):
    """With sums that are right: somebody wrote it on purpose."""
    folder = copied(segments, tmp_path)
    path = folder / ".engram/segments.bin"
    raw = bytearray(path.read_bytes())
    raw[64 + SEGMENT[field] : 64 + SEGMENT[field] + 4] = value
    forge(folder, "segments", bytes(raw))
    error = check_refused_at_once(lambda: PartReader.open(folder))
    assert "segment" in str(error) or "sums" in str(error)


@pytest.mark.parametrize("offset", [0, 8, 16, 24])
def test_lanes_that_no_store_has(flat, tmp_path, offset):
    folder = copied(flat, tmp_path)
    raw = bytearray((folder / ".engram/lanes.bin").read_bytes())
    raw[offset : offset + 8] = b"\0" * 7 + b"\x80"
    forge(folder, "lanes", bytes(raw))
    with PartReader.open(folder) as part:
        error = check_refused_at_once(part.lanes)
        assert "lanes.bin" in str(error)


@pytest.mark.parametrize("offset", [0, 8, 16, 24, 32, 40, 80])
def test_trajectories_that_no_store_has(flat, tmp_path, offset):
    folder = copied(flat, tmp_path)
    raw = bytearray((folder / ".engram/trajectories.bin").read_bytes())
    raw[offset : offset + 8] = b"\0" * 7 + b"\x80"
    forge(folder, "trajectories", bytes(raw))
    with PartReader.open(folder) as part:
        error = check_refused_at_once(lambda: list(part.trajectories()))
        assert "trajectories.bin" in str(error)


def forge(folder, table, raw):
    """Replace a table, and make all sums right."""
    made.rewrite(folder / f".engram/{table}.bin", raw)
    path = folder / ".engram/part.json"
    tree = json.loads(path.read_bytes())
    sums = bytearray((folder / ".engram/sums.bin").read_bytes())
    at = tree["tables"][table]["sums_at"] * 8
    sums[at : at + 8] = xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")
    made.rewrite(folder / ".engram/sums.bin", sums)
    tree["sums"]["sha256"] = hashlib.sha256(sums).hexdigest()
    made.rewrite(path, sealed(tree))


@pytest.mark.parametrize("name", ["../storage", "/etc", "storage/../storage", "a/b", "x" * 40, "", ".", "sampler/0000"])
def test_names_of_parts_that_lead_elsewhere(tmp_path, name):
    made.write_dump(tmp_path / "dump")
    shard = json.loads((tmp_path / "dump/shard.json").read_bytes())
    shard["parts"][0]["folder"] = name
    raw = json.dumps(shard).encode()
    made.rewrite(tmp_path / "dump/shard.json", raw)
    reseal(tmp_path / "dump", shards=[{"rank": 0, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}])
    with Checkpoint(tmp_path / "dump") as checkpoint:
        assert "expected parts called like" in str(check_refused_at_once(lambda: checkpoint.shard(0)))


@pytest.mark.parametrize(
    "changes",
    [
        {"world": 0}, {"world": 2}, {"world": BIG}, {"world": -1}, {"shards": []}, {"steps_by_rank": []}, {"status": "maybe"},
        {"status": "aborted"}, {"shards": [{"rank": 1, "bytes": 1, "sha256": ""}]}, {"shards": [{"rank": 0, "bytes": BIG, "sha256": ""}]},
        {"shards": [{"rank": 0, "bytes": -1, "sha256": ""}]}, {"schema_sum": "0"}, {"version": [2, 0]}, {"evil": 1},
    ],
    ids=str,
)  # fmt: skip
def test_manifests_that_do_not_fit(tmp_path, changes):
    made.write_dump(tmp_path / "dump")
    reseal(tmp_path / "dump", **changes)

    def load():
        with Checkpoint(tmp_path / "dump") as checkpoint:
            checkpoint.shard(0)

    check_refused_at_once(load)
    assert not verify(tmp_path / "dump").good


def reseal(path, **changes):
    """Change the manifest, and make its own sum right."""
    made.rewrite(path / "manifest.json", sealed({**json.loads((path / "manifest.json").read_bytes()), **changes}))


def sealed(tree):
    """The text of a document whose sum of itself is right, if there is such a text."""
    try:
        return documents.encode({**tree, "sum": xxhash.xxh3_64_hexdigest(documents.encode({**tree, "sum": ""}))})
    except (TypeError, ValueError):
        return json.dumps(tree).encode()


def test_a_newer_minor_version_may_say_more(tmp_path):
    made.write_dump(tmp_path / "dump")
    reseal(tmp_path / "dump", version=[1, 1], more={"a": 1})
    with Checkpoint(tmp_path / "dump") as checkpoint:
        assert checkpoint.manifest.version == (1, 1)
        assert not list(checkpoint.problems("full"))


def test_folders_that_are_links(tmp_path):
    """What is in a checkpoint is read through no link; the checkpoint itself may be reached through one."""
    made.write_dump(tmp_path / "dump")
    (tmp_path / "way").symlink_to("dump")
    with Checkpoint(tmp_path / "way") as checkpoint:
        assert not list(checkpoint.problems("full"))
    for name in ("storage", "storage/.engram", "storage/next", "indexes", "indexes/000"):
        moved = tmp_path / "moved"
        (tmp_path / "dump" / name).rename(moved)
        (tmp_path / "dump" / name).symlink_to(moved)
        assert not verify(tmp_path / "dump", "read").good, name
        (tmp_path / "dump" / name).unlink()
        moved.rename(tmp_path / "dump" / name)
    assert verify(tmp_path / "dump").good


def test_a_gigabyte_of_json_is_not_read(tmp_path, flat):
    folder = copied(flat, tmp_path)
    os.chmod(description(folder), 0o600)
    os.truncate(description(folder), 1 << 30)
    assert "at most 1048576 bytes" in str(check_refused_at_once(lambda: PartReader.open(folder)))


def test_reading_runs_nothing_and_opens_nothing_for_writing(tmp_path):
    """An audit hook in a fresh process sees every open, import, exec and subprocess of a full verification."""
    made.write_dump(tmp_path / "dump")
    (tmp_path / "root").mkdir()
    made.save(tmp_path / "root", 10, 1)
    (tmp_path / "dump/evil.pkl").write_bytes(TEXTS["a pickle"])
    program = """
import sys, os
from pathlib import Path
from engram.saved import inspection
list(map(inspection.describe, [Path(sys.argv[1]), Path(sys.argv[2])]))  # whatever is imported late is imported now
seen = []
def hook(event, arguments):
    if event in ("exec", "compile", "import", "subprocess.Popen", "os.system", "socket.connect", "pickle.find_class", "marshal.loads",
                 "os.rename", "os.remove", "os.mkdir", "os.link", "os.truncate", "os.chmod", "os.rmdir", "os.symlink"):
        seen.append((event, str(arguments)[:200]))
    if event == "open" and (arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) or "evil" in str(arguments[0])):
        seen.append((event, str(arguments)[:200]))
sys.addaudithook(hook)
report = inspection.verify(Path(sys.argv[1]))
good = inspection.verify(Path(sys.argv[2]))
inspection.describe(Path(sys.argv[1]))
assert not seen, seen
open(sys.argv[1] + "/control", "w").close()
assert len(seen) == 1
assert [str(p.path)[-8:] for p in report.problems] == ["evil.pkl"], report
assert good.good
print("looked")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "dump"), str(tmp_path / "root")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "looked\n", done.stderr


@settings(max_examples=100)
@given(st.data())
def test_any_bytes_in_place_of_any_description(flat, tmp_path_factory, data):
    """Typed errors, or a part that reads as it did."""
    folder = copied(flat, tmp_path_factory.mktemp("any"))
    path = description(folder)
    raw = bytearray(path.read_bytes())
    begin = data.draw(st.integers(0, len(raw) - 1))
    raw[begin : begin + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    made.rewrite(path, raw)
    try:
        with PartReader.open(folder) as part:
            part.verify()
    except (CorruptCheckpoint, IncompatibleCheckpoint):
        pass
    shutil.rmtree(folder)


def test_memory_is_not_taken_for_what_a_file_claims(tmp_path, flat):
    """The sums are said to be a terabyte, and so they are: a sparse file."""
    folder = copied(flat, tmp_path)
    tree = json.loads(description(folder).read_bytes())
    tree["sums"]["bytes"] = 1 << 40
    made.rewrite(description(folder), json.dumps(tree).encode())
    os.chmod(folder / ".engram/sums.bin", 0o600)
    os.truncate(folder / ".engram/sums.bin", 1 << 40)
    check_refused_at_once(lambda: PartReader.open(folder))
