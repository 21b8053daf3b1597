import json
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.errors import CorruptCheckpoint
from engram.format.schema import DTYPES
from engram.saved import description
from engram.saved.description import segment_layout
from engram.saved.part_reader import PartReader, is_part
from engram.saved.part_writer import PartWriter
from tests.saved import checkpoint_folders as made


def test_there_and_back(tmp_path):
    info = made.write_flat(tmp_path / "storage")
    with PartReader.open(tmp_path / "storage", info.sha256) as part:
        assert (part.part, part.type, part.name) == ("storage", "TensorStorage", "")
        assert part.state == {"kind": "flat"}
        assert part.geometry == made.GEOMETRY
        assert part.schema == made.SCHEMA
        assert part.schema_sum == made.SCHEMA_SUM
        assert part.segment_rows is None
        assert part.lanes() == made.LANES
        assert list(part.trajectories()) == made.TRAJECTORIES
        assert part.records == {"lanes": 2, "tickets": made.ROWS, "trajectories": 3}
        assert part.read_all(description.field_name(part.schema[0])) == made.noise(80, 0) + bytes(28)
        assert part.read_all(".engram/tickets.bin") == made.noise(8 * made.ROWS)
        assert part.read_all("meta.json") == made.META
        part.verify()
    assert info.folder == tmp_path / "storage"
    assert info.bytes == (tmp_path / "storage/.engram/part.json").stat().st_size
    assert info.linked == 0
    assert info.written == sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())


def test_segments_and_links(tmp_path):
    made.write_segments(tmp_path / "one")
    with PartReader.open(tmp_path / "one") as parent:
        info = made.write_segments(tmp_path / "two", seed=50, parent=parent)
        sizes = [segment_layout(made.SCHEMA, it.rows)[1] for it in made.SEGMENTS]
        assert info.linked == sum(sizes[:3])
        with PartReader.open(tmp_path / "two") as part:
            part.verify()
            assert [it.flags for it in part.listing.segments] == [1, 1, 1, 0]
            assert [it[:4] for it in part.listing.segments] == [it[:4] for it in made.SEGMENTS]
            assert [it.tickets_sum for it in part.listing.segments] == [11, 12, 13, 14]
            for it, size in zip(part.listing.segments, sizes, strict=True):
                name = it.name
                assert it.nbytes == size == part.files[name]
                same = os.path.samefile(tmp_path / "one" / name, tmp_path / "two" / name)
                assert same == (it.lane == 0)
                assert (part.read_all(name) == parent.read_all(name)) == same


def test_arrays_of_the_state(tmp_path):
    made.write_index(tmp_path / "sampler")
    with PartReader.open(tmp_path / "sampler") as part:
        assert part.state["leaves"] == {"$array": 0}
        leaves = bytearray(32)
        part.read(0, 0, leaves)
        assert [float(leaf).hex() for leaf in memoryview(leaves).cast("d")] == [x.hex() for x in (0.0, 0.5, 2.0, -0.0)]
        assert part.arrays[1].shape == (2, 0)
        assert part.arrays[1].bytes == 0
        assert part.read_all(1) == b""
        assert part.read_all(2) == b"abcde"


def test_files_are_read_only_and_folders_private(tmp_path):
    before = os.umask(0)
    try:
        made.write_flat(tmp_path / "deep" / "storage")
    finally:
        os.umask(before)
    for path in (tmp_path / "deep").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o400), path
    assert stat.S_IMODE((tmp_path / "deep").stat().st_mode) == 0o700


def test_what_is_skipped_in_a_sparse_file_takes_no_space(tmp_path):
    part = PartWriter(tmp_path / "a", "sampler", "S")
    with part.file("000.bin", 64 << 20, sparse=True) as file:
        file.skip(64 << 20)
    assert (tmp_path / "a/000.bin").stat().st_blocks * 512 < 1 << 20
    assert (tmp_path / "a/000.bin").stat().st_size == 64 << 20


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=4), st.integers()), max_size=6
    ),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 63) - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.text(st.characters(exclude_categories=["Cs"])).filter(lambda key: not key.startswith("$")),
                inner,
                max_size=3,
            )
        ),
        max_leaves=10,
    ),
)
def test_any_state_and_arrays(tmp_path_factory, arrays, state):
    folder = tmp_path_factory.mktemp("part") / "p"
    writer = PartWriter(folder, "writer", "W", "näme")
    datas = []
    for dtype, shape, seed in arrays:
        nbytes = DTYPES[dtype]
        for d in shape:
            nbytes *= d
        datas.append(made.noise(nbytes, seed))
        assert writer.array(dtype, shape, datas[-1]) == len(datas) - 1
    info = writer.finish({"state": state})
    with PartReader.open(folder, info.sha256) as part:
        part.verify()
        assert json.dumps(part.state, sort_keys=True) == json.dumps({"state": state}, sort_keys=True)  # bits, not ==
        assert part.name == "näme"
        for i, (dtype, shape, _) in enumerate(arrays):
            assert (part.arrays[i].dtype, list(part.arrays[i].shape)) == (dtype, shape)
            assert part.read_all(i) == datas[i]


@settings(max_examples=40)
@given(st.data())
def test_reads_anywhere(tmp_path_factory, data):
    size = data.draw(st.integers(1, 3 * description.BLOCK + 1000))
    folder = tmp_path_factory.mktemp("part") / "p"
    raw = made.noise(size)
    writer = PartWriter(folder, "writer", "W")
    with writer.file("000.bin", size) as file:
        writer._arrays.append(("uint8", (size,)))
        at = 0
        while at < size:  # pieces of any size, by any way
            n = min(size - at, data.draw(st.integers(1, description.BLOCK * 2)))
            file.write(raw[at : at + n])
            at += n
    writer.finish({})
    with PartReader.open(folder) as part:
        for _ in range(5):
            begin = data.draw(st.integers(0, size))
            into = bytearray(data.draw(st.integers(0, size - begin)))
            part.read(0, begin, into)
            assert into == raw[begin : begin + len(into)]


def test_a_read_checks_the_blocks_it_touches_and_no_others(tmp_path):
    writer = PartWriter(tmp_path / "p", "writer", "W")
    raw = made.noise(3 * description.BLOCK)
    writer.array("uint8", (len(raw),), raw)
    writer.finish({})
    path = tmp_path / "p/000.bin"
    flip(path, description.BLOCK + 5)
    with PartReader.open(tmp_path / "p") as part:
        into = bytearray(10)
        part.read(0, description.BLOCK - 10, into)
        part.read(0, 2 * description.BLOCK, into)
        with pytest.raises(CorruptCheckpoint, match=rf"000\.bin at byte {description.BLOCK}: expected the checksum"):
            part.read(0, description.BLOCK, into)
        with pytest.raises(CorruptCheckpoint, match=rf"at byte {description.BLOCK}"):
            part.read_all(0)
        assert len(list(part.damage())) == 1
        with pytest.raises(CorruptCheckpoint, match=rf"at byte {description.BLOCK}"):
            part.verify()


def test_another_reader_of_the_same_part_reads_on_when_the_first_is_closed(tmp_path):
    made.write_index(tmp_path / "sampler")
    with PartReader.open(tmp_path / "sampler") as first:
        second = first.again()
    with second:
        assert second.listing.sha256 == first.listing.sha256
        assert second.read_all(2) == b"abcde"
    with pytest.raises(OSError, match="Bad file descriptor"):
        second.again()


def flip(path, at, bit=0):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.chmod(0o600)
    path.write_bytes(raw)
    path.chmod(0o400)


def writer(tmp_path, part="writer"):
    return PartWriter(tmp_path / "p", part, "W")


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda file: file.write(b"12345"), r"at most 4 more bytes, got 5\. Nothing was written"),
        (lambda file: file.skip(5), "at most 4 more bytes, got 5"),
        (lambda file: file.skip(-1), "got -1"),
        (lambda file: (file.write(b"123"), file.close()), "expected 4 bytes, got 3"),
        (lambda file: (file.write(b"1234"), file.close(), file.write(b"1")), "the file is closed"),
    ],
)
def test_more_or_less_than_a_file_was_to_hold(tmp_path, act, says):
    part = writer(tmp_path)
    file = part.file("000.bin", 4)
    with pytest.raises(ValueError, match=says):
        act(file)
    file._abandon()


def test_a_part_with_a_file_that_failed_cannot_be_finished(tmp_path, monkeypatch):
    part = writer(tmp_path)
    file = part.file("000.bin", 4)
    with pytest.raises(ValueError, match="expected a complete file"):
        part.finish({})
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
    with pytest.raises(OSError, match="broken"):
        file.write(b"1234")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="an earlier write to it failed"):
        file.write(b"1234")
    file.close()
    with pytest.raises(ValueError, match="expected a complete file"):
        part.finish({})
    with pytest.raises(FileExistsError, match="not begun before"):
        part.file("000.bin", 4)
    assert not is_part(tmp_path / "p")


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    made.write_index(tmp_path / "p")
    monkeypatch.undo()
    with PartReader.open(tmp_path / "p") as part:
        part.verify()


def test_a_file_system_that_takes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="took no bytes"):
        made.write_index(tmp_path / "p")


@pytest.mark.parametrize(
    ("state", "kind", "says"),
    [
        ({"a": {"$array": 1}}, ValueError, r"state\.a: expected .*one of 1 arrays"),
        ({"a": {"$array": True}}, ValueError, r"state\.a"),
        ({"a": [{"$array": 0, "b": 1}]}, ValueError, r"state\.a\[0\]"),
        ({"$type": "x"}, ValueError, "begin with"),
        ({"a": object()}, TypeError, r"\$\.state\.a: expected None"),
        ({"a": float("inf")}, ValueError, "finite"),
    ],
)
def test_states_that_cannot_be_kept(tmp_path, state, kind, says):
    part = writer(tmp_path)
    part.array("uint8", (2,), b"ab")
    with pytest.raises(kind, match=says):
        part.finish(state)
    assert not is_part(tmp_path / "p")


def test_what_no_part_can_hold(tmp_path):
    part = writer(tmp_path)
    with pytest.raises(TypeError, match="expected one of the dtypes bool, .* got 'object'"):
        part.array("object", (1,), b"a")
    with pytest.raises(ValueError, match=r"expected 3 bytes of uint8, got the shape \[2\]"):
        part.array("uint8", (2,), b"abc")
    with pytest.raises(ValueError, match=r"part: expected 1 to 128 letters.* got '\.\./x'"):
        PartWriter(tmp_path / "q", "../x", "W")
    with part.file("stranger.bin", 1) as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"differs: \['stranger\.bin'\]"):
        part.finish({})


@pytest.mark.parametrize("shared", [True, False])
def test_copies_from_other_files(tmp_path, monkeypatch, shared):
    raw = made.noise(3 * description.BLOCK + 100)
    (tmp_path / "source").write_bytes(b"head" + raw)
    if not shared:
        monkeypatch.setattr(os, "copy_file_range", lambda *_: (_ for _ in ()).throw(OSError(18, "EXDEV")))
    fd = os.open(tmp_path / "source", os.O_RDONLY)
    part = writer(tmp_path)
    part._arrays.append(("uint8", (len(raw) + 1,)))
    with part.file("000.bin", len(raw) + 1) as file:
        file.write(b"x")
        file.copy_from(fd, 4, len(raw))
    part.finish({})
    with PartReader.open(tmp_path / "p") as reader:
        assert reader.read_all(0) == b"x" + raw
    other = PartWriter(tmp_path / "q", "writer", "W").file("000.bin", 10)
    with pytest.raises(EOFError, match="the file ends after"):
        other.copy_from(fd, len(raw), 10)
    os.close(fd)


def test_a_storage_without_rows(tmp_path):
    """Of a list, or one that was never written: arrays only, where storages keep them."""
    part = PartWriter(tmp_path / "storage", "storage", "ListStorage")
    number = part.array("int64", (1,), bytes(8))
    part.finish({"offsets": {"$array": number}})
    with PartReader.open(tmp_path / "storage") as reader:
        reader.verify()
        assert reader.schema is None
        assert list(reader.files) == [".engram/000.bin"]
