import ctypes
import errno
import os
import socket
import stat

import pytest

from engram.errors import CorruptStore
from engram.format import files
from engram.saved import disk

ZERO = b"\0"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def wide_umask():
    before = os.umask(0)
    yield
    os.umask(before)


# ---- reserving space -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 3_000_001])
@pytest.mark.parametrize("supported", [True, False])
def test_reserved_files_are_zero_and_take_their_space(tmp_path, monkeypatch, nbytes, supported):
    if not supported:
        monkeypatch.setattr(files, "fallocate", lambda *_: False)
    path = tmp_path / "a"
    files.reserve(path, nbytes)
    assert path.read_bytes() == ZERO * nbytes
    assert path.stat().st_blocks * 512 >= nbytes


def test_files_are_for_their_owner_whatever_the_umask(tmp_path, wide_umask):
    files.reserve(tmp_path / "a", 3)
    files.write_atomically(tmp_path / "b", b"x")
    with files.Creation() as made:
        made.folder(tmp_path / "c" / "d")
        made.file(tmp_path / "c" / "e", 3)
        made.text(tmp_path / "c" / "f", b"x")
    assert [mode(tmp_path / name) for name in ("a", "b", "c/e", "c/f")] == [0o600] * 4
    assert [mode(tmp_path / name) for name in ("c", "c/d")] == [0o700] * 2


def test_reserve_refuses_what_exists(tmp_path):
    (tmp_path / "a").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("a", "link"):
        with pytest.raises(FileExistsError):
            files.reserve(tmp_path / name, 10)
    assert (tmp_path / "a").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a", "link"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_failed_reservation_leaves_nothing_and_says_how_much_it_wanted(tmp_path, monkeypatch, code):
    def fail(fd, nbytes):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "fallocate", fail)
    with pytest.raises(OSError, match=r"\(reserving 123 bytes\).*/a'") as caught:
        files.reserve(tmp_path / "a", 123)
    assert caught.value.errno == code
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_reservation_leaves_nothing(tmp_path, monkeypatch, error):
    def fail(fd, nbytes):
        raise error

    monkeypatch.setattr(files, "fallocate", fail)
    with pytest.raises(error):
        files.reserve(tmp_path / "a", 123)
    assert os.listdir(tmp_path) == []


def test_no_descriptor_leaks(tmp_path, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    files.reserve(tmp_path / "a", 10)
    files.read_small(tmp_path / "a", 10)
    with pytest.raises(CorruptStore):
        files.read_small(tmp_path, 10)
    with pytest.raises(FileExistsError):
        files.reserve(tmp_path / "a", 10)
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    monkeypatch.setattr(files, "fallocate", lambda *_: False)
    with pytest.raises(OSError, match="reserving 10 bytes"):
        files.reserve(tmp_path / "b", 10)
    assert len(os.listdir("/proc/self/fd")) == before


class Libc:
    """Stands for the C library: ``fallocate`` fails with each of these codes, then succeeds."""

    def __init__(self, *codes):
        self.calls = 0

        def fallocate(fd, how, offset, length):
            self.calls += 1
            if self.calls > len(codes):
                return 0
            ctypes.set_errno(codes[self.calls - 1])
            return -1

        self.fallocate = fallocate


def testfallocate_is_tried_again_when_a_signal_came(monkeypatch):
    libc = Libc(errno.EINTR, errno.EINTR)
    monkeypatch.setattr(files, "_libc", libc)
    assert files.fallocate(0, 10)
    assert libc.calls == 3


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def testfallocate_says_where_it_is_missing(monkeypatch, code):
    monkeypatch.setattr(files, "_libc", Libc(code))
    assert not files.fallocate(0, 10)


def testfallocate_is_not_emulated(monkeypatch):
    monkeypatch.setattr(files, "_libc", object())
    assert not files.fallocate(0, 10)


def testfallocate_raises_everything_else(monkeypatch):
    monkeypatch.setattr(files, "_libc", Libc(errno.EINTR, errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as caught:
        files.fallocate(0, 10)
    assert caught.value.errno == errno.ENOSPC


# ---- checking --------------------------------------------------------------------------------------------------------


def not_regular(path, kind):
    """Put something that is no regular file in place of ``path``."""
    if path.exists():
        path.rename(path.with_name("elsewhere"))
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
        case "link":
            path.symlink_to("elsewhere")
        case "broken link":
            path.symlink_to("nowhere")


KINDS = ["folder", "fifo", "socket", "link", "broken link"]


def test_sizes_must_be_exact(tmp_path):
    path = tmp_path / "a"
    for missing in (path, path / "b"):
        with pytest.raises(CorruptStore, match=rf"{missing}: expected a file of 3 bytes, found none"):
            files.check_size(missing, 3)
        path.write_bytes(b"abc")
    files.check_size(path, 3)
    for wrong in (2, 4):
        with pytest.raises(CorruptStore, match=rf"/a: expected {wrong} bytes, got 3\. .* nothing was changed"):
            files.check_size(path, wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(tmp_path, kind):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert files.read_small(path, 3) == b"abc"
    not_regular(path, kind)
    for check in (files.check_size, files.read_small):
        with pytest.raises(CorruptStore, match=r"/a: expected a regular file, got something else"):
            check(path, 3)


def test_small_files_must_be_small(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(CorruptStore, match=r"/a: expected a file, found none"):
        files.read_small(path, 3)
    path.write_bytes(b"abcd")
    with pytest.raises(CorruptStore, match=r"/a: expected at most 3 bytes, got more"):
        files.read_small(path, 3)


# ---- replacing -------------------------------------------------------------------------------------------------------


def test_write_atomically_replaces(tmp_path):
    path = tmp_path / "a"
    for raw in (b"old", b"newer"):
        files.write_atomically(path, raw)
        assert path.read_bytes() == raw
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_replacement_keeps_the_old_bytes(tmp_path, monkeypatch, step):
    path = tmp_path / "a"
    files.write_atomically(path, b"old")
    before = path.stat()
    monkeypatch.setattr(os, step, lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        files.write_atomically(path, b"new")
    assert path.stat() == before  # before it is read: that is a time too
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


# ---- creating several ------------------------------------------------------------------------------------------------


def test_a_creation_that_fails_removes_what_it_made_and_nothing_else(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")

    def make():
        with files.Creation() as made:
            made.folder(tmp_path / "there" / "new" / "deep")
            made.folder(tmp_path / "there" / "new" / "deep")
            made.file(tmp_path / "there" / "new" / "deep" / "a", 10)
            made.text(tmp_path / "there" / "b", b"x")
            made.folder(tmp_path / "there" / "hidden")
            made.file(tmp_path / "there" / "hidden" / "c", 10)
            made.publish(tmp_path / "there" / "hidden", tmp_path / "there" / "shown")
            made.text(tmp_path / "there" / "mine", b"x")

    with pytest.raises(FileExistsError):
        make()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["there", "there/mine"]
    assert (tmp_path / "there" / "mine").read_text() == "mine"


def test_a_creation_that_succeeds_keeps_all(tmp_path):
    with files.Creation() as made:
        made.folder(tmp_path / "a")
        made.file(tmp_path / "a" / "b", 10)
        made.text(tmp_path / "a" / "c", b"x")
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "c"]


def test_a_text_that_fails_halfway_is_removed(tmp_path, monkeypatch):
    def make():
        with files.Creation() as made:
            made.text(tmp_path / "a", b"x" * 10)

    monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        make()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("raw", [b"{}", b"x" * 100, b"y" * 101, b"z" * 5000])
def test_overwriting_keeps_the_space_that_is_there(tmp_path, monkeypatch, raw):
    path = tmp_path / "a"
    files.overwrite(path, b"first".ljust(100))
    inode = path.stat().st_ino
    if len(raw) <= 100:
        monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    files.overwrite(path, raw)
    assert path.read_bytes() == raw.ljust(100)
    assert (path.stat().st_ino == inode) == (len(raw) <= 100)
    assert os.listdir(tmp_path) == ["a"]


def test_overwriting_does_not_follow_links(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    with pytest.raises(OSError, match="link"):
        files.overwrite(tmp_path / "link", b"x")
    assert (tmp_path / "mine").read_text() == "mine"


def test_libraries_are_not_opened_again_and_again(tmp_path, monkeypatch):
    """The C library is opened once, not with every file."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: pytest.fail("opened again"))
    files.reserve(tmp_path / "a", 10)
    disk.create(tmp_path / "b", 10).close()
    disk.exchange(tmp_path / "a", tmp_path / "b")
