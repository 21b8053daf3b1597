"""Stores with fields whose rows have any number of items: their memory, files, copies and damage."""

import copy
import errno
import json
import os
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tensordict import TensorDict

from engram import CorruptStore
from engram._support import native
from engram.cli import main
from engram.format import files
from engram.format.schema import Field, Node, RaggedItems, Schema
from engram.format.sizes import resident_bytes
from engram.inspect.sizing import StoragePlan
from engram.saved.inspection import describe, verify
from engram.storages.announcing import creation_line
from engram.store.adding import add_field
from engram.store.device.store import DeviceStore
from engram.store.elsewhere import ForeignStore
from engram.store.lifetime import Process, erase, remove_store
from engram.store.opening import create_store, moved, open_readonly, open_store, reattach
from engram.store.store import Store
from tests.store.stores import DAMAGE, damage, snapshot
from tests.test_docs import BLOCK, ROOT

LANES, CAPACITY = 3, 12
FIELDS = (
    Field(("tokens",), "int32", (3,), RaggedItems("int32", 100, 400)),
    Field(("reward",), "float32", (2,)),
    Field(("log_prob",), "uint8", (0,), RaggedItems("float32", 100, 400, (2,), like=0)),
    Field(("next", "text"), "int32", (3,), RaggedItems("uint8", 50, 51, kind="utf-8")),
    Field(("next", "done"), "bool", ()),
)
#: Files of the store beside those that every store has, and their bytes.
FILES = {
    "reward.memmap": 8 * CAPACITY,
    "next/done.memmap": CAPACITY,
    ".engram/ragged/0.spans": 12 * CAPACITY,
    ".engram/ragged/0.values": 4 * LANES * 400,
    ".engram/ragged/2.values": 8 * LANES * 400,
    ".engram/ragged/3.spans": 12 * CAPACITY,
    ".engram/ragged/3.values": LANES * 51,
}
RAGGED = [*(name for name in FILES if "ragged" in name), ".engram/ragged/control"]


def schema(**changes):
    leaf = [Node("leaf", n) for n in range(5)]
    inner = Node("tensordict", children={"text": leaf[3], "done": leaf[4]})
    children = {"tokens": leaf[0], "reward": leaf[1], "log_prob": leaf[2], "next": inner}
    return Schema(CAPACITY, LANES, (), FIELDS, Node("tensordict", children=children), **changes)


def fill(store):
    """Let all columns and items hold bytes that tell which they are."""
    for n, tensor in [*enumerate(store.tensors), *store.items.items()]:
        chance = torch.Generator().manual_seed(n + tensor.shape[0])
        drawn = torch.randint(0, 2 if tensor.dtype is torch.bool else 100, tensor.shape, generator=chance)
        tensor.copy_(drawn.to(tensor.dtype))
    return contents(store)


def contents(store):
    return [bytes_of(tensor) for tensor in [*store.tensors, *store.items.values()]]


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def everything(folder):
    return {
        os.path.relpath(os.path.join(base, name), folder): os.stat(os.path.join(base, name))
        for base, _, names in os.walk(folder)
        for name in names
    }


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A store that was closed in order, and what it holds."""
    store = create_store(schema(), tmp_path_factory.mktemp("template") / "store")
    held = fill(store)
    store.close()
    return store.directory, held


@pytest.fixture
def folder(template, tmp_path):
    shutil.copytree(template[0], tmp_path / "store", copy_function=shutil.copy2)
    return tmp_path / "store"


# ---- memory ----------------------------------------------------------------------------------------------------------


def check_items(store):
    assert {n: (tuple(items.shape), items.dtype) for n, items in store.items.items()} == {
        0: ((1200,), torch.int32),
        2: ((1200, 2), torch.float32),
        3: ((153,), torch.uint8),
    }


def test_private_stores_have_rings_beside_their_rows():
    store = Store.private(schema())
    check_items(store)
    assert not any(map(any, contents(store)))
    assert [tuple(tensor.shape) for tensor in store.tensors] == [(12, 3), (12, 2), (12, 0), (12, 3), (12,)]
    payload = 8 + 1  # of the fixed fields
    assert store.nbytes == 12 * (payload + 2 * 12) + sum(n for name, n in FILES.items() if "values" in name)


def test_a_row_of_one_group_takes_32_bytes_beside_its_payload(tmp_path):
    one = Schema(1000, 1, (), FIELDS[:1], Node("dict", children={"tokens": Node("leaf", 0)}))
    create_store(one, tmp_path / "store").close()
    folder = tmp_path / "store" / ".engram"
    beside = (folder / "tickets").stat().st_size + (folder / "ragged" / "0.spans").stat().st_size
    assert beside == 32 * 1000


def test_rings_too_large_for_memory_are_refused_by_name():
    huge = Field(("a",), "int32", (3,), RaggedItems("int32", 5, 1 << 47))
    with pytest.raises(OSError, match=r"items of field a in RAM: expected 563 TB") as caught:
        Store.private(Schema(1, 1, (), (huge,), Node("dict", children={"a": Node("leaf", 0)})))
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.parametrize("way", ["copied", "pickled", "moved"])
def test_copies_hold_the_same_items(way, tmp_path):
    store = Store.private(schema())
    held = fill(store)
    if way == "moved":
        other = moved(store, tmp_path / "store", "", None)
    else:
        through = copy.deepcopy if way == "copied" else lambda it: pickle.loads(pickle.dumps(it))
        other = reattach(through(store.detached()))
    check_items(other)
    assert contents(other) == held
    for items in store.items.values():
        items.zero_()
    assert contents(other) == held  # its memory is its own
    other.close()


def test_a_store_without_ragged_fields_has_no_rings(tmp_path):
    fixed = Schema(12, 3, (), (FIELDS[1],), Node("dict", children={"reward": Node("leaf", 0)}))
    for store in (Store.private(fixed), create_store(fixed, tmp_path / "store")):
        assert not store.items
        assert store.rings.parts == []
        store.close()
    assert not (tmp_path / "store" / ".engram" / "ragged").exists()


def write(store, lane, lengths, first):
    """Append rows of such lengths, whose content follows from their number; the rows they went to."""
    n, numbers = len(lengths), torch.arange(first, first + len(lengths))
    columns = [torch.zeros(n, *tensor.shape[1:], dtype=tensor.dtype) for tensor in store.tensors]
    columns[1][:] = numbers[:, None].float()
    of_text = [length % 10 for length in lengths]
    sources, kept = [], []
    for counts, fields in ((lengths, (0, 2)), (of_text, (3,))):
        counted = torch.tensor(counts, dtype=torch.uint32)
        starts = torch.tensor([sum(counts[:i]) for i in range(n)])
        values = [torch.cat([content(store, f, first + i, counts[i]) for i in range(n)]) for f in fields]
        kept.append((counted, starts, values))
        sources.append((counted.data_ptr(), starts.data_ptr(), sum(counts), tuple([it.data_ptr() for it in values])))
    rows = torch.empty(n, dtype=torch.int64)
    addresses = tuple([column.data_ptr() for column in columns])
    store.core.append_ragged(lane, n, addresses, rows.data_ptr(), tuple(sources))
    return rows.tolist()


def content(store, field, number, length):
    items = store.items[field]
    found = (torch.arange(length * items[:1].numel()) * 7 + number) % 100
    return found.to(items.dtype).view(-1, *items.shape[1:])


def lengths_of(store):
    """The lengths of rows that are committed, by number, after their items were compared."""
    found = {}
    for row in torch.nonzero(store.tickets_of(torch.arange(CAPACITY)) >= 0)[:, 0].tolist():
        number, lane = int(store.tensors[1][row, 0]), row // (CAPACITY // LANES)
        for leader, fields in ((0, (0, 2)), (3, (3,))):
            raw = store.tensors[leader][row].numpy().tobytes()
            offset, length = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
            for field in fields:
                ring = store.schema.fields[leader].ragged.items
                begin = lane * ring + offset % ring
                assert torch.equal(store.items[field][begin : begin + length], content(store, field, number, length))
            found.setdefault(number, length)
    return found


def test_rows_are_written_to_rings_and_copied_with_them(tmp_path):
    store = Store.private(schema())
    write(store, 0, [100, 0, 7], 10)
    write(store, 2, [50, 60, 70, 80, 90, 100], 20)
    known = {10: 100, 11: 0, 12: 7, 22: 70, 23: 80, 24: 90, 25: 100}
    assert lengths_of(store) == known
    copies = [reattach(pickle.loads(pickle.dumps(store.detached()))), moved(store, tmp_path / "store", "", None)]
    for other in copies:
        assert lengths_of(other) == known
        assert [other.core.ragged_lane(lane) for lane in range(LANES)] == [
            store.core.ragged_lane(lane) for lane in range(LANES)
        ]
        write(other, 2, [99, 98], 30)
        write(other, 0, [1], 40)
        grown = {10: 100, 11: 0, 12: 7, 40: 1, 25: 100, 30: 99, 31: 98}  # 24 made way for items
        assert lengths_of(other) == grown
    assert lengths_of(store) == known
    copies[1].close()
    for open_it in (open_readonly, open_store):
        again = open_it(tmp_path / "store")
        assert lengths_of(again) == grown
        again.close()


def test_a_copy_that_is_made_while_rows_are_written_holds_whole_rows():
    store, done = Store.private(schema()), threading.Event()

    def keep_writing():
        first = 0
        while not done.is_set():
            write(store, first % LANES, [90, 80, 70][: 1 + first % 3], first)
            first += 3

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(keep_writing)
        try:
            for again in range(30):
                other = reattach(store.detached())
                lengths_of(other)
                write(other, again % LANES, [100, 99], 10**6)
                assert {10**6: 100, 10**6 + 1: 99}.items() <= lengths_of(other).items()
        finally:
            done.set()
        writer.result()
    lengths_of(store)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_files_are_there_with_their_space(template):
    found = everything(template[0])
    expected = {**FILES, ".engram/ragged/control": native.ragged_bytes(LANES, 2)}
    assert {name: found[name].st_size for name in expected} == expected
    known = {"store.json", "control", "tickets", "alive", "maker", "buffer.json"}
    assert found.keys() - expected.keys() == {*(f".engram/{name}" for name in known), "meta.json", "next/meta.json"}
    for name, nbytes in expected.items():
        assert found[name].st_blocks * 512 >= nbytes, name


def test_tensordict_reads_the_fixed_fields(template):
    folder, held = template
    td = TensorDict.load_memmap(folder)
    assert set(td.keys(True, True)) == {"reward", ("next", "done")}
    assert td.batch_size == (CAPACITY,)
    assert [bytes_of(td["reward"]), bytes_of(td["next", "done"])] == [held[1], held[4]]


def test_tensordict_reads_no_field_of_a_store_that_has_only_ragged_ones(tmp_path):
    only = Schema(7, 1, (), FIELDS[:1], Node("dict", children={"tokens": Node("leaf", 0)}))
    create_store(only, tmp_path / "store").close()
    assert TensorDict.load_memmap(tmp_path / "store").is_empty()


@pytest.mark.parametrize("open_it", [open_store, open_readonly])
def test_reopened_stores_hold_what_they_held(template, folder, open_it):
    store = open_it(folder)
    assert store.schema == schema()
    check_items(store)
    assert contents(store) == template[1]
    assert store.nbytes == sum(FILES.values())
    store.close()


def mappings_of(folder):
    """The rights of the mappings of files, by their names."""
    with open("/proc/self/maps") as lines:
        split = [line.split() for line in lines if f"{folder}/" in line]
    return {os.path.relpath(it[-1], folder): {other[1] for other in split if other[-1] == it[-1]} for it in split}


def test_reading_alone_maps_nothing_to_write(folder):
    before = snapshot(folder)
    store = open_readonly(folder)
    rights = mappings_of(folder)
    assert {name: rights[name] for name in RAGGED} == {name: {"r--s"} for name in RAGGED}
    store.close()
    assert snapshot(folder) == before


def test_a_reader_sees_what_is_written_later(folder):
    writer, reader = open_store(folder), open_readonly(folder)
    writer.items[2][1199] = 7.5
    assert reader.items[2][1199].tolist() == [7.5, 7.5]
    writer.close()
    reader.close()


def test_small_fields_lie_together_and_spans_do_not(tmp_path):
    store = create_store(schema(grouped=64), tmp_path / "store")
    held = fill(store)
    store.close()
    names = everything(tmp_path / "store")
    assert ".engram/grouped" in names
    assert {*RAGGED} <= names.keys()
    store = open_store(tmp_path / "store")
    assert contents(store) == held
    store.close()


def test_a_fixed_field_can_be_added(template, folder):
    store = open_store(folder)
    add_field(store, Field(("more",), "int16", ()), b"\7\0")
    assert contents(store)[:5] == template[1][:5]
    store.close()
    store = open_store(folder)
    assert store.tensors[5].tolist() == [7] * CAPACITY
    assert [*contents(store)[:5], *contents(store)[6:]] == template[1]
    store.close()
    assert verify(folder).good
    remove_store(folder)
    assert everything(folder) == {}


@pytest.mark.parametrize("way", ["remove", "erase", "temporary", "replace"])
def test_removed_stores_leave_nothing(folder, way):
    if way == "erase":
        erase(folder, schema())
    elif way == "remove":
        assert open_store(folder).remove()
    elif way == "temporary":
        shutil.rmtree(folder)
        create_store(schema(), folder, guest_of=Process.this()).close()
    else:
        fixed = Schema(12, 3, (), (FIELDS[1],), Node("dict", children={"reward": Node("leaf", 0)}))
        create_store(fixed, folder, replace=True).close()
        assert not [name for name in everything(folder) if "ragged" in name or "next" in name]
        return
    assert everything(folder) == {}


@pytest.mark.parametrize("at", range(9))
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, at):
    reserved = []

    def fallocate(fd, nbytes):
        reserved.append(nbytes)
        if len(reserved) > at:
            raise OSError(errno.ENOSPC, "full")
        return os.posix_fallocate(fd, 0, nbytes) is None

    monkeypatch.setattr(files, "fallocate", fallocate)
    with pytest.raises(OSError, match=r"reserving [0-9]+ bytes"):
        create_store(schema(), tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_what_a_process_left_that_died_in_the_middle_is_removed(tmp_path, monkeypatch):
    class Died(BaseException):
        pass

    def died(*_):
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(native, "format_control", died)  # behind the files of fields and rings
        patch.setattr(files.Creation, "__exit__", lambda *_: None)
        with pytest.raises(Died):
            create_store(schema(), tmp_path)
    left = [name for name in everything(tmp_path) if name.startswith(".engram-")]
    assert sum("/ragged/" in name for name in left) == len(RAGGED)
    create_store(schema(), tmp_path).close()
    assert not [name for name in everything(tmp_path) if name.startswith(".engram-")]


def documented():
    """What the document of the format defines to read ragged fields with."""
    text = (ROOT / "docs" / "store-format.md").read_text()
    names = {}
    for block in BLOCK.findall(text[text.index("\n## Ragged fields") :]):
        exec(block, names)
    return names


def test_the_document_says_how_to_read_them(folder):
    store = open_store(folder)
    fill(store)
    lengths = [5, 0, 100, 33, 1, 2, 3, 4, 100, 0, 0, 7]
    turns = [0, 1, 2, 10**9] * 3  # how often the ring had come round before
    begins = [0, 5, 300, 367, 0, 1, 3, 6, 300, 0, 0, 393]
    spans = store.tensors[0].numpy()
    for row, (length, turn, begin) in enumerate(zip(lengths, turns, begins, strict=True)):
        spans[row] = np.frombuffer((turn * 400 + begin).to_bytes(8, "little") + length.to_bytes(4, "little"), "<i4")
    store.tensors[3].zero_()
    store.tensors[3][4, 2] = 6  # row 4 is the first one of lane 1
    store.items[3][51:57] = torch.frombuffer(bytearray("héllo".encode()), dtype=torch.uint8)
    store.core.fill()
    expected = [
        [store.items[n][400 * (row // 4) + begins[row] :][: lengths[row]].tolist() for row in range(12)] for n in (0, 2)
    ]
    store.close()

    doc = documented()
    for key, wanted in zip([("tokens",), ("log_prob",)], expected, strict=True):
        values, starts, counts = doc["ragged_rows"](folder, key)
        assert [values[a : a + n].tolist() for a, n in zip(starts, counts, strict=True)] == wanted
    values, starts, counts = doc["ragged_rows"](folder, ("next", "text"))
    assert values[starts[4] : starts[4] + counts[4]].tobytes().decode() == "héllo"
    assert doc["live_rows"](folder).tolist() == list(range(12))
    arrow = doc["as_arrow"](folder, ("tokens",))
    arrow.validate(full=True)
    assert arrow.to_pylist() == expected[0]


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("part", RAGGED)
def test_damaged_files_are_named_and_left_as_they_are(folder, part, how):
    damage(folder / part, how)
    before = snapshot(folder)
    descriptors = len(os.listdir("/proc/self/fd"))
    for open_it in (open_store, open_readonly):
        with pytest.raises(CorruptStore, match=f"{folder / part}: "):
            open_it(folder)
    assert snapshot(folder) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert f"{folder / part}" in {str(problem.path) for problem in verify(folder).problems}


def test_a_control_block_of_something_else_is_named(folder):
    path = folder / ".engram" / "ragged" / "control"
    path.write_bytes(b"\xff" * 4096 + path.read_bytes()[4096:])
    before = snapshot(folder)
    for open_it in (open_store, open_readonly):
        with pytest.raises(CorruptStore, match=f"{path}: "):
            open_it(folder)
    assert snapshot(folder) == before


@pytest.mark.parametrize("how", ["missing", "a file", "an empty folder"])
def test_a_folder_of_rings_that_is_gone_is_noticed(folder, how):
    path = folder / ".engram" / "ragged"
    shutil.rmtree(path)
    if how == "a file":
        path.write_text("")
    elif how == "an empty folder":
        path.mkdir()
    with pytest.raises(CorruptStore, match=f"{path}"):
        open_store(folder)


def test_a_description_of_other_rings_is_noticed(folder):
    path = folder / ".engram" / "store.json"
    path.write_bytes(path.read_bytes().replace(b'"max_length":50,', b'"max_length":49,'))
    with pytest.raises(CorruptStore, match=f"{path}: expected the description this store was made with"):
        open_store(folder)


# ---- refused ---------------------------------------------------------------------------------------------------------


class Own:
    name = "Own"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda place: Store.around(schema(), []), "rows that exist already: expected fields whose rows all have one size"),
        (lambda place: create_store(schema(), place, adopted=[]), "rows that exist already: expected fields whose rows"),
        (lambda place: DeviceStore.on(schema(), torch.device("cuda")), "rows on cuda: expected fields .* log_prob.*Use"),
        (lambda place: ForeignStore(schema(), Own()), "Own: expected fields whose rows all have one size, got ragged ones: tokens"),
    ],
)  # fmt: skip
def test_places_that_hold_no_ragged_rows_refuse_them_by_name(make, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        make(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["RAM", "a folder"])
def test_a_ragged_field_is_not_added(folder, place):
    store = Store.private(schema()) if place == "RAM" else open_store(folder)
    before = everything(folder).keys()
    with pytest.raises(
        ValueError, match=r"field new: a ragged field cannot be added\. Name it when the store is created"
    ):
        add_field(store, Field(("new",), "int32", (3,), FIELDS[0].ragged), bytes(12))
    assert store.schema == schema()
    assert everything(folder).keys() == before
    store.close()


# ---- what is said of it ----------------------------------------------------------------------------------------------


def test_what_every_draw_touches_includes_the_spans(folder):
    assert resident_bytes(folder, CAPACITY) == 20 * CAPACITY + 2 * 12 * CAPACITY


def test_the_line_of_its_creation():
    assert creation_line(schema(), "RAM") == (
        "12 rows in RAM, 14.9 kB: tokens [≤ 100] int32 (4.94 kB), reward [2] float32 (96 B), "
        "log_prob [≤ 100, 2] float32 (9.6 kB), ('next', 'text') [≤ 50] utf-8 (297 B), ('next', 'done') [] bool (12 B)"
    )


def ran(*words):
    result = CliRunner().invoke(main, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_commands_show_them(folder):
    rows = [line.split(maxsplit=1) for line in ran("inspect", str(folder)).splitlines() if line.strip()]
    shown = {row[0]: row[1].split() for row in rows if len(row) == 2}
    assert shown["tokens"] == ["int32", "[≤", "100]", "≤", "412", "B"]
    assert shown["log_prob"] == ["float32", "[≤", "100,", "2]", "≤", "800", "B"]
    assert shown["next.text"] == ["utf-8", "[≤", "50]", "≤", "62", "B"]
    plan = json.loads(ran("plan", str(folder), "--capacity", str(CAPACITY), "--json"))
    assert plan["bytes"] == sum(FILES.values())
    assert "[≤ 100, 2]" in ran("plan", str(folder), "--capacity", str(CAPACITY))


def test_a_plan_says_their_rings():
    rows = str(StoragePlan(CAPACITY, FIELDS, 33, 1000, 0)).splitlines()
    assert rows[:2] == [
        "tokens: .engram/ragged or RAM, 1.74 kB, rows [≤ 100] int32",
        "reward: reward.memmap or RAM, 96 B, shape [12, 2] float32",
    ]
    assert rows[3] == "('next', 'text'): .engram/ragged or RAM, 195 B, rows [≤ 50] utf-8"


def test_its_description(folder):
    found = json.loads(json.dumps(describe(folder)))
    assert found["bytes"] == sum(FILES.values())
    assert [field.get("ragged") for field in found["fields"]] == [
        {"dtype": "int32", "max_length": 100, "items": 400},
        None,
        {"dtype": "float32", "max_length": 100, "items": 400, "shape": [2], "like": 0},
        {"dtype": "uint8", "max_length": 50, "items": 51, "kind": "utf-8"},
        None,
    ]
    assert verify(folder).good
