import json
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.errors import CorruptCheckpoint
from engram.format import sums
from engram.format.parts import PartReader, PartWriter, segment_layout
from engram.format.schema import DTYPES
from tests.format import checkpoint_folders as made


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
        assert part.read_all(part.field_file(0)) == made.noise(80, 0) + bytes(28)
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
            assert [it.flags for it in part.segments()] == [1, 1, 1, 0]
            assert [it[:4] for it in part.segments()] == [it[:4] for it in made.SEGMENTS]
            assert [it.tickets_sum for it in part.segments()] == [11, 12, 13, 14]
            for it, size in zip(part.segments(), sizes, strict=True):
                name = part.segment_file(it)
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
        assert part.array(1).shape == (2, 0)
        assert part.array(1).nbytes == 0
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
            assert (part.array(i).dtype, list(part.array(i).shape)) == (dtype, shape)
            assert part.read_all(i) == datas[i]


@settings(max_examples=40)
@given(st.data())
def test_reads_anywhere(tmp_path_factory, data):
    size = data.draw(st.integers(1, 3 * sums.BLOCK + 1000))
    folder = tmp_path_factory.mktemp("part") / "p"
    raw = made.noise(size)
    writer = PartWriter(folder, "writer", "W")
    with writer.file("000.bin", size) as file:
        writer._arrays.append(("uint8", (size,)))
        at = 0
        while at < size:  # pieces of any size, by any way
            n = min(size - at, data.draw(st.integers(1, sums.BLOCK * 2)))
            file.write(raw[at : at + n])
            at += n
    writer.finish({})
    with PartReader.open(folder) as part:
        for _ in range(5):
            begin = data.draw(st.integers(0, size))
            into = bytearray(data.draw(st.integers(0, size - begin)))
            part.read(0, begin, into, verify=data.draw(st.booleans()))
            assert into == raw[begin : begin + len(into)]


def test_a_read_checks_the_blocks_it_touches_and_no_others(tmp_path):
    writer = PartWriter(tmp_path / "p", "writer", "W")
    raw = made.noise(3 * sums.BLOCK)
    writer.array("uint8", (len(raw),), raw)
    writer.finish({})
    path = tmp_path / "p/000.bin"
    flip(path, sums.BLOCK + 5)
    with PartReader.open(tmp_path / "p") as part:
        into = bytearray(10)
        part.read(0, sums.BLOCK - 10, into)
        part.read(0, 2 * sums.BLOCK, into)
        with pytest.raises(CorruptCheckpoint, match=rf"000\.bin at byte {sums.BLOCK}: expected the checksum"):
            part.read(0, sums.BLOCK, into)
        with pytest.raises(CorruptCheckpoint, match=rf"at byte {sums.BLOCK}"):
            part.read_all(0)
        part.read(0, sums.BLOCK, into, verify=False)
        assert len(list(part.damage())) == 1
        with pytest.raises(CorruptCheckpoint, match=rf"at byte {sums.BLOCK}"):
            part.verify()


def flip(path, at, bit=0):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.chmod(0o600)
    path.write_bytes(raw)
    path.chmod(0o400)
