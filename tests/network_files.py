"""A file system that behaves as NFS does with its usual mount options: one process for each mount of a folder.

It speaks the protocol of ``/dev/fuse`` itself, so that nothing must be installed; it takes Linux and the right to mount.

- Names that are there, names that are missing and listings are believed for some seconds, unless this mount changes the folder
  or is asked to look again (``statx`` with ``AT_STATX_FORCE_SYNC``).
- The size of a file is believed as long, until it is opened; small files that are open stay as they were.
- What is written reaches the other mounts when the file is synchronized or closed. Until then they see zeros.
- A file that the other mount has removed is stale (ESTALE). One that is removed here while it is open becomes ``.nfs…``.
- ``renameat2`` knows no flags, ``fallocate`` is missing, ``flock`` is local to the mount. Links, flags and clocks are options.
"""

import argparse
import contextlib
import ctypes
import errno
import os
import select
import signal
import stat
import struct
import subprocess
import sys
import time

import pytest

_BYTES = 1 << 20
_SMALL = 1 << 16
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
_DIRECT_IO = 1
_MODE, _SIZE, _ATIME, _MTIME, _NOW = 1, 8, 16, 32, 256
_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class Node:
    """A file or folder of the server, as this mount knows it."""

    def __init__(self, fd, found):
        self.fd, self.found, self.since = fd, found, time.monotonic()
        self.lookups = 0
        #: Of a folder: what names are (None: missing), the names of a listing, and since when this is believed.
        self.names, self.listing, self.seen = {}, None, 0.0
        #: Of a file: what was written and did not reach the server, handles that are open, and its name once it is removed.
        self.pending, self.handles, self.hidden = [], set(), None

    @property
    def is_folder(self):
        return stat.S_ISDIR(self.found.st_mode)

    def reach(self):
        """The path by which the server's file can be opened or linked."""
        return f"/proc/self/fd/{self.fd}"


class Handle:
    def __init__(self, node, flags):
        self.node, self.closed = node, False
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        self.fd = os.open(node.reach(), (os.O_RDWR if writes else os.O_RDONLY) | flags & os.O_TRUNC)
        size = os.fstat(self.fd).st_size
        self.kept = os.pread(self.fd, size, 0) if not writes and size <= _SMALL else None


class Mount:
    def __init__(self, fd, backing, options):
        self.fd, self.options = fd, options
        self.nodes, self.by_inode, self.handles = {}, {}, {}
        self.last = 0
        self.node_of(os.open(backing, os.O_PATH | os.O_DIRECTORY))

    # ---- what is known ---------------------------------------------------------------------------------------------------

    def node_of(self, fd):
        """The number of the node behind a new descriptor, which is kept or closed."""
        found = os.fstat(fd)
        number = self.by_inode.get(found.st_ino)
        if number is not None:
            os.close(fd)
            return number
        self.last += 1
        self.nodes[self.last] = Node(fd, found)
        self.by_inode[found.st_ino] = self.last
        return self.last

    def attributes(self, node):
        if time.monotonic() - node.since >= self.options.seconds:
            self.look_at(node)
        it = node.found
        size = max([it.st_size, *(offset + len(data) for offset, data in node.pending)])
        shift = int(self.options.clock)
        return _ATTR.pack(
            *(
                it.st_ino,
                size,
                (size + 511) // 512,
                *(int(at) + shift for at in (it.st_atime, it.st_mtime, it.st_ctime)),
            ),
            *(at % 10**9 for at in (it.st_atime_ns, it.st_mtime_ns, it.st_ctime_ns)),
            *(it.st_mode, it.st_nlink, it.st_uid, it.st_gid, 0, 4096, 0),
        )

    def look_at(self, node):
        node.found, node.since = os.fstat(node.fd), time.monotonic()
        if node.found.st_nlink == 0 and node.hidden is None:
            raise OSError(errno.ESTALE, "stale")

    def view(self, folder):
        """What is believed of a folder's names; nothing, if that is too old."""
        if time.monotonic() - folder.seen >= self.options.seconds:
            self.changed(folder)
        return folder

    @staticmethod
    def changed(folder):
        folder.names, folder.listing, folder.seen = {}, None, time.monotonic()

    def find(self, parent, name):
        names = self.view(parent).names
        if name in names and (names[name] is None or names[name] in self.nodes):
            number = names[name]
            if number is None:
                raise FileNotFoundError(errno.ENOENT, "believed to be missing")
            if os.fstat(self.nodes[number].fd).st_nlink:
                return number
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent.fd)
        except FileNotFoundError:
            names[name] = None
            raise
        names[name] = self.node_of(fd)
        return names[name]

    def entry(self, number):
        node = self.nodes[number]
        node.lookups += 1
        return _ENTRY.pack(number, 0, 0, 0, 0, 0) + self.attributes(node)  # the kernel itself believes nothing

    def fresh(self, number):
        """The entry of what this mount has just made."""
        self.look_at(self.nodes[number])
        return self.entry(number)

    def write_out(self, node):
        if node.pending:
            fd = os.open(node.reach(), os.O_WRONLY)
            for offset, data in node.pending:
                os.pwrite(fd, data, offset)
            os.close(fd)
            node.pending = []
            self.look_at(node)

    # ---- requests --------------------------------------------------------------------------------------------------------

    def serve(self):
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        while True:
            poll.poll()
            try:
                raw = os.read(self.fd, _BYTES + 65536)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return  # it was unmounted
            _, opcode, unique, number, *_ = _IN.unpack_from(raw)
            name = _OPCODES.get(opcode)
            if name in ("forget", "batch_forget"):
                getattr(self, name)(number, raw[_IN.size :])
                continue
            if name == "interrupt":
                continue
            code, answer = 0, b""
            try:
                if name is None:
                    raise OSError(errno.ENOSYS, "no such request")
                answer = getattr(self, name)(self.nodes.get(number), raw[_IN.size :]) or b""
            except OSError as error:
                code = error.errno or errno.EIO
            with contextlib.suppress(OSError):  # who asked was killed
                os.write(
                    self.fd, _OUT.pack(_OUT.size + len(answer) * (not code), -code, unique) + (b"" if code else answer)
                )

    def init(self, _, raw):
        _, minor, ahead, _ = struct.unpack_from("<4I", raw)
        flags = 1 << 3 | 1 << 5 | 1 << 22  # O_TRUNC when opening, large writes, many pages
        return struct.pack("<4I2H2I2H2I6I", 7, min(minor, 38), ahead, flags, 16, 12, _BYTES, 1, 256, 0, *[0] * 8)

    def forget(self, number, raw):
        self.drop(number, *struct.unpack_from("<Q", raw))

    def batch_forget(self, _, raw):
        for at in range(struct.unpack_from("<I", raw)[0]):
            self.drop(*struct.unpack_from("<QQ", raw, 8 + 16 * at))

    def drop(self, number, count):
        node = self.nodes.get(number)
        if node is None or number == 1:
            return
        node.lookups -= count
        if node.lookups <= 0 and not node.handles:
            os.close(node.fd)
            del self.nodes[number], self.by_inode[node.found.st_ino]

    def lookup(self, parent, raw):
        return self.entry(self.find(parent, os.fsdecode(raw[:-1])))

    def getattr(self, node, _):
        return struct.pack("<QII", 0, 0, 0) + self.attributes(node)

    def statx(self, node, _):
        """Only a call that wants all there is comes here: this one looks again."""
        self.look_at(node)
        self.changed(node)
        it = node.found
        size = max([it.st_size, *(offset + len(data) for offset, data in node.pending)])
        times = b"".join(
            struct.pack("<qIi", *divmod(ns, 10**9), 0) for ns in (it.st_atime_ns, 0, it.st_ctime_ns, it.st_mtime_ns)
        )
        found = struct.pack(
            "<IIQIIIHHQQQQ", 0x7FF, 4096, 0, it.st_nlink, it.st_uid, it.st_gid, it.st_mode, 0, it.st_ino, size, 0, 0
        )
        return bytes(32) + (found + times).ljust(256, b"\0")

    def setattr(self, node, raw):
        valid, _, _, size, _, atime, mtime, _, ns, mns, _, mode = struct.unpack_from("<IIQQQQQQIIII", raw)
        if valid & _SIZE:
            self.write_out(node)
            os.truncate(node.reach(), size)
        if valid & _MODE:
            os.chmod(node.reach(), mode & 0o7777)
        if valid & _NOW:
            os.utime(node.reach())
        elif valid & _MTIME:
            shift = int(self.options.clock)
            os.utime(node.reach(), ns=((atime - shift) * 10**9 + ns, (mtime - shift) * 10**9 + mns))
        self.look_at(node)
        return struct.pack("<QII", 0, 0, 0) + self.attributes(node)

    def mkdir(self, parent, raw):
        mode, umask = struct.unpack_from("<II", raw)
        name = os.fsdecode(raw[8:-1])
        self.changed(parent)
        os.mkdir(name, mode & ~umask, dir_fd=parent.fd)
        return self.fresh(self.find(parent, name))

    def mknod(self, parent, raw):
        mode, _, umask, _ = struct.unpack_from("<4I", raw)
        name = os.fsdecode(raw[16:-1])
        self.changed(parent)
        os.close(os.open(name, os.O_CREAT | os.O_EXCL, mode & ~umask, dir_fd=parent.fd))
        return self.fresh(self.find(parent, name))

    def unlink(self, parent, raw):
        name = os.fsdecode(raw[:-1])
        number = self.find(parent, name)
        self.changed(parent)
        node = self.nodes[number]
        if any(not handle.closed for handle in node.handles):
            node.hidden = parent, f".nfs{number:016x}"
            os.rename(name, node.hidden[1], src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
        else:
            os.unlink(name, dir_fd=parent.fd)

    def rmdir(self, parent, raw):
        self.changed(parent)
        os.rmdir(os.fsdecode(raw[:-1]), dir_fd=parent.fd)

    def rename(self, parent, raw, at=8):
        (other,) = struct.unpack_from("<Q", raw)
        old, new = map(os.fsdecode, raw[at:-1].split(b"\0"))
        self.changed(parent)
        self.changed(self.nodes[other])
        os.rename(old, new, src_dir_fd=parent.fd, dst_dir_fd=self.nodes[other].fd)

    def rename2(self, parent, raw):
        flags = struct.unpack_from("<QI", raw)[1]
        if flags == 1 and self.options.noreplace:
            new = os.fsdecode(raw[16:-1].split(b"\0")[1])
            with contextlib.suppress(FileNotFoundError):
                os.stat(new, dir_fd=self.nodes[struct.unpack_from("<Q", raw)[0]].fd, follow_symlinks=False)
                raise FileExistsError(errno.EEXIST, "taken")
        elif flags:
            raise OSError(errno.EINVAL, "no flags")
        self.rename(parent, raw, 16)

    def link(self, parent, raw):
        (old,) = struct.unpack_from("<Q", raw)
        self.changed(parent)
        if self.options.no_links:
            raise OSError(errno.EPERM, "no links")
        self.write_out(self.nodes[old])
        os.link(self.nodes[old].reach(), os.fsdecode(raw[8:-1]), dst_dir_fd=parent.fd, follow_symlinks=True)
        return self.fresh(old)

    def opened(self, node, flags):
        self.look_at(node)  # close-to-open: the server is asked
        handle = Handle(node, flags)
        node.handles.add(handle)
        self.handles[id(handle)] = handle
        return struct.pack("<QIi", id(handle), _DIRECT_IO, 0)

    def open(self, node, raw):
        self.write_out(node)
        return self.opened(node, struct.unpack_from("<I", raw)[0])

    def create(self, parent, raw):
        flags, mode, umask, _ = struct.unpack_from("<4I", raw)
        name = os.fsdecode(raw[16:-1])
        self.changed(parent)
        os.close(os.open(name, os.O_CREAT | flags & (os.O_EXCL | os.O_TRUNC), mode & ~umask, dir_fd=parent.fd))
        number = self.find(parent, name)
        return self.fresh(number) + self.opened(self.nodes[number], flags & ~os.O_TRUNC)

    def read(self, node, raw):
        number, offset, size = struct.unpack_from("<QQI", raw)
        handle = self.handles[number]
        handle.closed = False
        self.write_out(node)
        self.check(node)
        return os.pread(handle.fd, size, offset) if handle.kept is None else handle.kept[offset : offset + size]

    def check(self, node):
        if os.fstat(node.fd).st_nlink == 0 and node.hidden is None:
            raise OSError(errno.ESTALE, "stale")

    def write(self, node, raw):
        _, offset, size = struct.unpack_from("<QQI", raw)
        self.check(node)
        node.pending.append((offset, raw[40 : 40 + size]))
        return struct.pack("<II", size, 0)

    def flush(self, node, raw):
        self.handles[struct.unpack_from("<Q", raw)[0]].closed = True
        if node.pending:
            self.check(node)
            self.write_out(node)

    def fsync(self, node, raw):
        self.check(node)
        self.write_out(node)
        time.sleep(self.options.fsync)

    def release(self, node, raw):
        handle = self.handles.pop(struct.unpack_from("<Q", raw)[0])
        os.close(handle.fd)
        node.handles.discard(handle)
        if node.hidden and not node.handles:
            folder, name = node.hidden
            self.changed(folder)
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder.fd)

    def opendir(self, *_):
        listing = []
        self.handles[id(listing)] = listing
        return struct.pack("<QIi", id(listing), 0, 0)

    def readdir(self, node, raw):
        number, offset, size = struct.unpack_from("<QQI", raw)
        if offset == 0:
            node = self.view(node)
            if node.listing is None:
                fd = os.open(node.reach(), os.O_RDONLY | os.O_DIRECTORY)
                node.listing = [(one.name, one.inode(), one.is_dir(follow_symlinks=False)) for one in os.scandir(fd)]
                os.close(fd)
            self.handles[number][:] = node.listing
        out = b""
        for at, (name, inode, is_folder) in enumerate(self.handles[number][offset:], offset + 1):
            text = os.fsencode(name)
            one = struct.pack("<QQII", inode, at, len(text), 4 if is_folder else 8) + text
            one += b"\0" * (-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out

    def releasedir(self, _, raw):
        del self.handles[struct.unpack_from("<Q", raw)[0]]

    def fsyncdir(self, _, raw):
        time.sleep(self.options.fsync)

    def statfs(self, *_):
        it = os.statvfs(self.nodes[1].reach())
        return struct.pack(
            "<5Q4I", it.f_blocks, it.f_bfree, it.f_bavail, it.f_files, it.f_ffree, it.f_bsize, 255, 4096, 0
        ) + bytes(24)

    def unsupported(self, *_):
        raise OSError(errno.EOPNOTSUPP, "no")


_OPCODES = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 8: "mknod", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename",
    13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync", 25: "flush", 26: "init",
    27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir", 35: "create", 36: "interrupt", 42: "batch_forget",
    43: "unsupported", 45: "rename2", 52: "statx",
}  # fmt: skip


# ---- for tests -------------------------------------------------------------------------------------------------------------


class Server:
    """A folder, and mounts of it: ``with Server(tmp_path) as server: near, far = server.mount("near"), server.mount("far")``.

    Args:
        folder: where all of it lies.
        seconds: for which names, listings and sizes are believed.
        no_links, noreplace, fsync, clock: see the options of the program.
    """

    def __init__(self, folder, *, seconds=60.0, no_links=False, noreplace=False, fsync=0.0, clock=0):
        self.folder, self.files = folder, folder / "server"
        self.files.mkdir()
        self.options = [f"--seconds={seconds}", f"--fsync={fsync}", f"--clock={clock}"]
        self.options += ["--no-links"] * no_links + ["--noreplace"] * noreplace
        self.mounts = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in [*self.mounts]:
            self.unmount(name)

    def mount(self, name):
        if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 6):
            pytest.skip("this kernel does not say which calls look again")
        where = self.folder / name
        where.mkdir()
        program = [sys.executable, "-m", "tests.network_files", str(self.files), str(where), *self.options]
        process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        said = process.stdout.readline().strip()
        if said != "mounted":
            process.wait()
            pytest.skip(f"no file system can be mounted here: {said}")
        self.mounts[name] = process
        return where

    def unmount(self, name):
        process = self.mounts.pop(name)
        process.send_signal(signal.SIGCONT)
        _libc.umount2(os.fsencode(self.folder / name), _DETACH)
        process.kill()
        process.wait()
        process.stdout.close()

    def stall(self, name):
        """From now on that mount answers nothing."""
        self.mounts[name].send_signal(signal.SIGSTOP)

    def go_on(self, name):
        self.mounts[name].send_signal(signal.SIGCONT)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("backing")
    parser.add_argument("where")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--fsync", type=float, default=0.0, help="how long synchronizing takes")
    parser.add_argument("--clock", type=float, default=0.0, help="seconds that the clock of the server is ahead")
    parser.add_argument("--no-links", action="store_true", help="link() is refused")
    parser.add_argument("--noreplace", action="store_true", help="renameat2() knows RENAME_NOREPLACE")
    options = parser.parse_args()
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
        with_options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other".encode()
        if _libc.mount(b"imitation", os.fsencode(options.where), b"fuse", 0, with_options):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except (OSError, AttributeError) as error:
        print(error, flush=True)
        return
    print("mounted", flush=True)
    _libc.prctl(1, signal.SIGKILL)  # it ends with the tests
    Mount(fd, options.backing, options).serve()


if __name__ == "__main__":
    main()
