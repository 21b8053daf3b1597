"""Damaged stores."""

import json
import mmap
import os
import shutil
import struct

import pytest

from engram import CorruptStore, IncompatibleStore, ReplayBuffer
from engram.format import schema as schemas
from engram.format.schema import Node
from engram.store.opening import open_store
from tests import stress
from tests.fresh import run, start
from tests.store.stores import CLEAN_AT, DAMAGE, PARTS, buffer, damage, rows, snapshot
from tests.waiting import Limit

HEADER_BYTES = 96 + 6 * 32  # with the directory of sections


@pytest.mark.parametrize(
    ("part", "how"), [(part, how) for part in PARTS for how in (DAMAGE[2:] if part == ".engram/alive" else DAMAGE)]
)
def test_damaged_files_are_named_and_left_as_they_are(folder, part, how):
    damage(folder / part, how)
    before = snapshot(folder)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(CorruptStore, match=f"{folder / part}: "):
            ReplayBuffer.open(folder)
    assert snapshot(folder) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("part", ["next", ".engram"])
@pytest.mark.parametrize("how", ["a file", "an empty folder", "missing"])
def test_damaged_folders_are_noticed(folder, part, how):
    shutil.rmtree(folder / part)
    if how == "a file":
        (folder / part).write_text("")
    elif how == "an empty folder":
        (folder / part).mkdir()
    before = snapshot(folder)
    gone = (part, how) == (".engram", "missing")  # then there is no store
    with pytest.raises(FileNotFoundError if gone else CorruptStore, match=f"{folder}"):
        ReplayBuffer.open(folder)
    assert snapshot(folder) == before


def test_every_changed_byte_of_the_description_is_noticed(folder):
    path = folder / ".engram" / "store.json"
    good = path.read_bytes()
    for at in range(len(good)):
        for change in (1, 0x80):
            path.write_bytes(good[:at] + bytes([good[at] ^ change]) + good[at + 1 :])
            with pytest.raises((CorruptStore, IncompatibleStore), match=str(folder)):
                open_store(folder)
    path.write_bytes(good)
    open_store(folder).close()


def test_descriptions_of_another_store_are_noticed(folder, tmp_path):
    other = buffer(tmp_path / "other", capacity=10, n=0)
    other.extend(rows(0, 3).exclude("next"))
    other.close()
    path = folder / ".engram" / "store.json"
    schema = schemas.decode_store(path.read_bytes(), "")
    for raw in (
        (tmp_path / "other" / ".engram" / "store.json").read_bytes(),  # fewer fields: every file it names is there
        json.dumps(json.loads(path.read_bytes())).encode(),  # the same with other spaces
        schemas.encode_store(type(schema)(10, 1, (), schema.fields[::-1], node_turned(schema.structure))),
    ):
        path.write_bytes(raw)
        with pytest.raises(CorruptStore, match=r"store\.json: expected the description this store was made with"):
            open_store(folder)


def node_turned(node):
    """The same structure with the two fields swapped."""
    if node.kind == "leaf":
        return Node("leaf", field=1 - node.field)
    return Node(
        node.kind,
        children={key: node_turned(child) for key, child in node.children.items()},
        type=node.type,
        batch=node.batch,
    )


def test_every_changed_byte_of_the_header_is_noticed(folder):
    path = folder / ".engram" / "control"
    good = path.read_bytes()
    for at in range(HEADER_BYTES):
        for change in (1, 0x80) if at < 96 else (1 << at % 8,):
            path.write_bytes(good[:at] + bytes([good[at] ^ change]) + good[at + 1 :])
            with pytest.raises((CorruptStore, IncompatibleStore), match="control"):
                open_store(folder)
    path.write_bytes(good)
    open_store(folder).close()


def crc32c(raw):
    crc = 0xFFFFFFFF
    for byte in raw:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def rewrite_header(folder, **changes):
    """Change words of the header as a program of another kind would have written them, checksum included."""
    path = folder / ".engram" / "control"
    raw = bytearray(path.read_bytes())
    places = {"major": (8, "I"), "minor": (12, "I"), "order": (16, "I"), "abi": (24, "Q"), "sum": (88, "Q")}
    for name, value in changes.items():
        at, kind = places[name]
        struct.pack_into(kind, raw, at, value)
    struct.pack_into("I", raw, 20, 0)
    struct.pack_into("I", raw, 20, crc32c(raw[:HEADER_BYTES]))
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"major": 3}, "format 3, this engram reads format 2"),
        ({"major": 1}, "format 1, this engram reads format 2"),
        ({"abi": 1}, "another platform"),
        ({"order": 0x04030201}, "the other byte order"),
    ],
)
def test_control_blocks_of_another_kind_are_incompatible(folder, changes, says):
    rewrite_header(folder, **changes)
    before = snapshot(folder)
    with pytest.raises(IncompatibleStore, match=says):
        ReplayBuffer.open(folder)
    assert snapshot(folder) == before


def test_control_blocks_of_a_newer_minor_format_are_fine(folder):
    rewrite_header(folder, minor=7)
    rb = ReplayBuffer.open(folder)
    assert len(rb) == 7
    rb.close()


@pytest.mark.parametrize(
    ("version", "advice"),
    [([1, 0], "An older engram wrote it: read it with that one"), ([2, 7], "upgrade to read it"), ([3, 0], "upgrade")],
)
def test_descriptions_of_another_format_are_incompatible(folder, version, advice):
    path = folder / ".engram" / "store.json"
    raw = json.dumps({**json.loads(path.read_bytes()), "version": version, "more": {}}).encode()
    path.write_bytes(raw)
    rewrite_header(folder, sum=schemas.fingerprint(raw))
    before = snapshot(folder)
    says = rf"store\.json: expected format 2\.6, got {version[0]}\.{version[1]}\. .*{advice}"
    with pytest.raises(IncompatibleStore, match=says):
        ReplayBuffer.open(folder)
    assert snapshot(folder) == before


HOSTILE = {
    "rows beyond the files": {"capacity": 1 << 40},
    "more rows than memory": {"capacity": 1 << 57},
    "another geometry": {"lanes": 2},
    "huge field": {"fields": [{"key": ["a"], "dtype": "int64", "shape": [1 << 50]}]},
    "file outside": {"fields": [{"key": ["..", "..", "etc", "passwd"], "dtype": "int64", "shape": []}]},
    "a field without bytes and with a huge size": {"fields": [{"key": ["a"], "dtype": "int64", "shape": [0, 1 << 52]}]},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_hostile_descriptions_with_a_good_sum_map_nothing(folder, changes):
    """Whoever writes store.json can write its sum into control, too."""
    path = folder / ".engram" / "store.json"
    tree = {**json.loads(path.read_bytes()), **changes}
    if "fields" in changes:
        structure = {"kind": "leaf", "field": 0}
        for part in reversed(changes["fields"][0]["key"]):
            structure = {"kind": "dict", "children": {part: structure}}
        tree["structure"] = structure
    raw = json.dumps(tree).encode()
    path.write_bytes(raw)
    rewrite_header(folder, sum=schemas.fingerprint(raw))
    before = snapshot(folder.parent)
    if changes.get("fields", [{}])[0].get("shape") == [0, 1 << 52]:
        open_store(folder).close()  # strange, but it can be had
        return
    limit = Limit(20)
    with pytest.raises(CorruptStore):
        open_store(folder)
    limit.check("going on")
    assert snapshot(folder.parent) == before


@pytest.mark.parametrize(
    "raw",
    [
        b" " * (2 << 20),
        b'{"a":' * 100_000,
        b"[" * (1 << 20),
        b'{"version":[2,0],"capacity":NaN}',
        b'{"a":1,"a":2}',
        b"\xff\xfe",
    ],
    ids=["2 MiB", "100,000 deep", "1 MiB of lists", "NaN", "a key twice", "not UTF-8"],
)
def test_descriptions_that_are_no_descriptions(folder, raw):
    (folder / ".engram" / "store.json").write_bytes(raw)
    before = snapshot(folder)
    limit = Limit(50)
    with pytest.raises(CorruptStore, match=r"store\.json: "):
        open_store(folder)
    limit.check("going on")
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    "type_name",
    ["os:stat_result", "os:path", "posix:system", ":", "no_such_module:C", "collections:OrderedDict", "a b:c.d"],
)
def test_classes_are_looked_up_never_imported(folder, type_name):
    path = folder / ".engram" / "store.json"
    tree = json.loads(path.read_bytes())
    tree["structure"]["children"]["next"] |= {"kind": "tensorclass", "type": type_name}
    raw = json.dumps(tree).encode()
    path.write_bytes(raw)
    rewrite_header(folder, sum=schemas.fingerprint(raw))
    before = {name: content[4] for name, content in snapshot(folder).items()}
    with pytest.raises(TypeError, match=r"which this program has not defined\. Import it first"):
        ReplayBuffer.open(folder)
    assert {name: content[4] for name, content in snapshot(folder).items()} == before


def test_stray_bytes_in_the_words_never_crash(folder, tmp_path):
    """Any byte behind the header may be anything: a typed error or rows, never an index outside, never a hang."""
    out = run(
        """
        import random, shutil
        from pathlib import Path
        import torch
        from engram import *
        from engram.store.store import Store
        good = Path(folder)
        control, tickets = (good / ".engram" / name for name in ("control", "tickets"))
        words = {path: path.read_bytes() for path in (control, tickets)}
        chance = random.Random(3)
        for turn in range(150):
            path = control if turn % 3 else tickets
            raw = bytearray(words[path])
            for _ in range(chance.choice([1, 1, 8])):
                if path == tickets:
                    at = chance.randrange(len(raw))
                else:  # lock page, counters, participants, lanes
                    start, size = chance.choice([(4096, 72), (8192, 160), (12288, 256), (len(raw) - 64, 24)])
                    at = start + chance.randrange(size)
                raw[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
            path.write_bytes(raw)
            try:
                rb = ReplayBuffer.open(good, unclean="accept")
            except (CorruptStore, UncleanStore):
                pass
            else:
                for use in (lambda: rb[:], lambda: rb.sample(20), lambda: rb[3], lambda: len(rb), rb.stats,
                            lambda: rb.storage.extent()):
                    try:
                        use()
                    except (EngramError, IndexError):
                        pass
                rb.close()
            for path, raw in words.items():
                path.write_bytes(raw)
        print("done")
        """,
        folder=str(folder),
    )
    assert out.split("\n")[-1] == "done"


def put_word(path, at, value, kind="Q"):
    raw = bytearray(path.read_bytes())
    struct.pack_into(kind, raw, at, value)
    path.write_bytes(raw)


PAUSE_AT, COUNTERS_AT, LANES_AT = CLEAN_AT + 8, 8192, 45056


@pytest.mark.parametrize("word", [1, 2, 256, 257, 1 << 32, 1 | 1 << 32, (1 << 64) - 1])
def test_a_closed_store_is_paused_by_nobody(folder, word):
    """Whatever the word says: writes go on, and no row is lost."""
    put_word(folder / ".engram" / "control", PAUSE_AT, word)
    rb = ReplayBuffer.open(folder)
    rb.extend(rows(7, 1))
    assert rb[:]["a"].tolist() == list(range(8))
    rb.close()


@pytest.mark.parametrize("word", [3, 257, 1 << 32, (1 << 64) - 1])
def test_a_pause_of_an_entry_that_nobody_has_ends(folder, word):
    """Entry 2 is free, others there are not: nobody would ever end it."""
    rb = ReplayBuffer.open(folder)
    with open(folder / ".engram" / "control", "r+b") as file, mmap.mmap(file.fileno(), 0) as live:
        struct.pack_into("Q", live, PAUSE_AT, word)
        rb.extend(rows(7, 1))
    assert rb[:]["a"].tolist() == list(range(8))
    rb.close()


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (COUNTERS_AT + 72, 8, "void rows"),
        (COUNTERS_AT + 72, 1 << 63, "void rows"),
        (COUNTERS_AT, 0, "ticket counter"),
        (COUNTERS_AT, 1 << 60, "ticket counter"),
        (LANES_AT, 1 << 60, "positions"),
        (LANES_AT + 8, 7, "multiples of their length"),
        (LANES_AT + 16, (1 << 64) - 1, "positions"),
    ],
)
def test_a_closed_store_that_says_of_itself_what_none_does_is_refused(folder, at, value, says):
    put_word(folder / ".engram" / "control", at, value)
    before = snapshot(folder)
    with pytest.raises(CorruptStore, match=rf"{folder}/\.engram/control: .*{says}"):
        ReplayBuffer.open(folder)
    assert snapshot(folder) == before


LIVE_DAMAGE = """
    import mmap, random, shutil, struct, tempfile
    from pathlib import Path
    import torch
    from tensordict import TensorDict
    from engram import *
    from engram._support import native as _native
    _native._core.set_wait_limit(0.005)
    chance = random.Random(seed)
    engram, nan, inf = Path(".engram"), float("nan"), float("inf")
    # Kind: file, first byte, bytes (0: to the end). Of a lock only what lies before it and behind.
    where = {
        "locks": ("control", 4096, 72), "counters": ("control", 8192, 160), "participants": ("control", 12288, 256),
        "lanes": ("control", 45056, 0), "tickets": ("tickets", 0, 0), "priorities": ("indexes/main/priorities", 0, 256),
        "tree": ("indexes/main/priorities", 4096, 0), "pass": ("indexes/epochs/pass", 0, 128),
    }
    name, start, size = where[kind]

    def open_all(folder):
        rb = ReplayBuffer.open(folder, sampler=PrioritizedSampler(24, 0.7, 0.5))
        made = dict(storage=rb.storage, batch_size=6)
        return rb, [rb, ReplayBuffer(**made, sampler=SliceSampler(slice_len=3, traj_key="episode")),
                    ReplayBuffer(**made, sampler=SamplerWithoutReplacement(index="epochs"))]

    def data(n):
        number = torch.arange(n)
        return TensorDict({"a": number, "episode": number // 4}, batch_size=[n])

    first = Path(tempfile.mkdtemp(dir=place)) / "good"
    rb = ReplayBuffer(storage=LazyMemmapStorage(24, scratch_dir=first, lanes=2), sampler=PrioritizedSampler(24, 0.7, 0.5))
    rb.extend(data(17), lane=0)
    rb.extend(data(5), lane=1)
    rb.update_priority(torch.arange(5), torch.rand(5))
    epochs = ReplayBuffer(storage=rb.storage, batch_size=6, sampler=SamplerWithoutReplacement(index="epochs"))
    epochs.sample()
    rb.close()

    def bad(was):
        pick = chance.randrange(8)
        if pick == 0: return struct.pack("=d", chance.choice([nan, inf, -inf, -1.0, 1e308]))
        value = struct.unpack("=Q", was)[0]
        value = [chance.randrange(4), value ^ 1 << chance.randrange(64), value + chance.randrange(1, 60),
                 value - chance.randrange(1, 60), (1 << 64) - 1 >> chance.randrange(64), 1 << chance.randrange(64),
                 chance.getrandbits(64)][pick - 1]
        return struct.pack("=Q", value % (1 << 64))

    known = {}
    for case in range(cases):
        folder = first.parent / f"{case}"
        shutil.copytree(first, folder)
        rb, all_three = open_all(folder)
        for one in all_three:
            one.sample(6)
        with open(folder / ".engram" / name, "r+b") as file:
            live = mmap.mmap(file.fileno(), 0)
        at = start + chance.randrange((size or len(live) - start) // 8) * 8
        live[at : at + 8] = bad(live[at : at + 8])
        uses = [
            lambda: rb[:], lambda: rb[3], lambda: len(rb), lambda: rb.write_count, rb.stats, rb.storage.extent,
            lambda: rb.extend(data(3), lane=0), lambda: rb.add(data(1)[0], lane=1),
            lambda: rb.update_priority(torch.arange(3), torch.rand(3)),
            *[lambda one=one: one.sample(6) for one in all_three], *[lambda one=one: one.state_dict() for one in all_three],
            lambda: rb.dumps(folder / "dump"), rb.empty,
        ]
        for use in chance.sample(uses, 10):
            try:
                use()
            except (EngramError, IndexError) as error:
                known[type(error).__name__] = known.get(type(error).__name__, 0) + 1
        try:
            rb.close()
        except EngramError:
            pass
        live.close()
        shutil.rmtree(folder)
    print(known)
    print("done")
"""


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.parametrize(
    "kind", ["locks", "counters", "participants", "lanes", "tickets", "priorities", "tree", "pass"]
)
def test_stray_words_in_a_live_store_never_crash(ram, kind):
    """A word of a store that is open becomes another: a typed error or rows. (A program that crashed would not end in order.)"""
    cases = stress.size(25, 2_000)
    program = start(LIVE_DAMAGE, place=str(ram), kind=kind, cases=cases, seed=stress.SEED)
    assert program.wait(stress.LIMIT_S) == 0, program.err
    assert program.out.endswith("done\n")
