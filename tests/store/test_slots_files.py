"""Slots in the folder of a store: the description, what reads it, and processes that place rows and are killed."""

import msgspec
import pytest
from click.testing import CliRunner

from engram import LazyMemmapStorage, ReplayBuffer
from engram.cli import main
from engram.errors import CorruptStore, IncompatibleStore
from engram.format import schema as schemas
from tests import fresh
from tests.storages import ragged_rows as said
from tests.store.test_ragged_files import documented

ROWS = 12


def made(folder, **more):
    storage = LazyMemmapStorage(ROWS, scratch_dir=folder, ragged=said.fields(), ragged_layout="slots", **more)
    return ReplayBuffer(storage=storage, batch_size=4)


@pytest.fixture
def folder(tmp_path):
    rb = made(tmp_path / "d", lanes=2)
    for lane in (0, 1):
        rb.extend(said.rows(10 * lane, 8), lane=lane)  # the lanes wrap
    rb.close()
    return tmp_path / "d"


def test_the_description_says_the_layout_in_a_version_of_its_own(folder):
    raw = (folder / ".engram" / "store.json").read_bytes()
    described = msgspec.json.decode(raw)
    assert described["version"] == [2, 6]
    assert {field["ragged"]["items"] for field in described["fields"] if "ragged" in field} == {0}
    schema = schemas.decode_store(raw, "here")
    assert schemas.encode_store(schema) == raw
    assert [(it.items, it.slot) for it in schema.ragged_groups] == [(6 * said.LONGEST, said.LONGEST), (240, 40)]
    with pytest.raises(CorruptStore, match="version"):
        schemas.decode_store(raw.replace(b"[2,6]", b"[2,5]"), "here")
    with pytest.raises(IncompatibleStore, match="expected format 2.6, got 2.7"):
        schemas.decode_store(raw.replace(b"[2,6]", b"[2,7]"), "here")
    with pytest.raises(CorruptStore, match="in a ring, beside fields in slots"):
        schemas.decode_store(raw.replace(b'"items":0', b'"items":72', 1), "here")
    with pytest.raises(CorruptStore, match="a lane of -1 items"):
        schemas.decode_store(raw.replace(b'"items":0', b'"items":-1'), "here")


def test_the_document_says_how_to_read_them(folder):
    doc = documented()
    values, starts, counts = doc["ragged_rows"](folder, ("tokens",))
    numbers = [6, 7, 2, 3, 4, 5, 16, 17, 12, 13, 14, 15]
    expected = [[number] * said.length_of(number) for number in numbers]
    assert [values[a : a + n].tolist() for a, n in zip(starts, counts, strict=True)] == expected
    assert doc["live_rows"](folder).tolist() == list(range(ROWS))
    assert doc["as_arrow"](folder, ("tokens",)).to_pylist() == expected
    values, starts, counts = doc["ragged_rows"](folder, ("text",))
    assert [values[a : a + n].tobytes().decode() for a, n in zip(starts, counts, strict=True)] == [
        said.text_of(number) for number in numbers
    ]


def test_commands_show_them(folder):
    result = CliRunner().invoke(main, ["inspect", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    lanes = msgspec.json.decode(result.output)["items"]["lanes"]
    for lane, numbers in ((0, range(2, 8)), (1, range(12, 18))):
        used = sum(8 * said.length_of(n) + len(said.text_of(n).encode()) for n in numbers)
        assert lanes[lane] == {"lane": lane, "bytes_used": used, "bytes_free": 6 * (8 * said.LONGEST + 40) - used}
    assert CliRunner().invoke(main, ["inspect", str(folder)]).exit_code == 0


PLACES = """
import torch
from engram import ReplayBuffer
from engram.types import WritePlan
from tests.storages import ragged_rows as said

rb = ReplayBuffer.open(folder)
generator = torch.Generator().manual_seed(first)
for number in range(first, first + 100_000, 2):
    columns, _ = rb.storage.prepare(said.rows(number, 2), "test", batched=True)
    at = number - first
    rows = torch.tensor([at, at + 1]) if at < 12 else torch.randint(12, (2,), generator=generator)
    rb.storage.write(WritePlan(rows=rows), columns, 2)
    if at == 10:  # every row has been written
        print("begun", flush=True)
"""


def test_rows_that_killed_processes_placed_are_whole(tmp_path):
    """Writers of rows anywhere beside a reader; each is killed at any moment, and another one goes on."""
    rb = made(tmp_path / "d")
    rb.extend(said.rows(0, ROWS))
    for turn in range(1, 4):
        writers = [
            fresh.start(PLACES, folder=str(tmp_path / "d"), first=turn * 1_000_000 + which * 200_000)
            for which in (0, 1)
        ]
        for writer in writers:
            writer.until("begun")
        for _ in range(50):
            said.check(rb.sample())
        for writer in writers:
            writer.kill()
            writer.wait()
        left = said.check(rb[:])
        assert len(left) >= ROWS - 2 * 2  # what a process had in its hands may be gone
        assert min(left) >= turn * 1_000_000
    rb.extend(said.rows(9_000_000, ROWS))
    assert said.check(rb[:]) == list(range(9_000_000, 9_000_000 + ROWS))
    rb.close()
    assert said.check(ReplayBuffer.open(tmp_path / "d")[:]) == list(range(9_000_000, 9_000_000 + ROWS))
