"""A shim under ``format/disk.py``: counts its system calls, lets the n-th fail or end the process, and notes them for replays."""

import contextlib
import errno
import os
import random
import threading
from pathlib import Path

from engram.format import files
from engram.saved import disk

CHANGING = {
    "mkdir", "ftruncate", "pwrite", "copy_file_range", "fchmod", "fdatasync", "fsync", "link", "unlink", "rename", "replace", "rmdir",
}  # fmt: skip


class Shim:
    """Stands in for the module ``os`` in ``disk``. ``before`` is called with number and name of each call that changes something."""

    def __init__(self, before):
        self.before, self.calls, self.log, self.paths = before, 0, [], {}

    def __getattr__(self, name):
        real = getattr(os, name)
        if name in ("open", "dup"):
            return lambda *arguments, **options: self._open(real, name, *arguments, **options)
        if name not in CHANGING:
            return real
        return lambda *arguments, **options: self._call(name, real, *arguments, **options)

    def _call(self, name, real, *arguments, **options):
        self.calls += 1
        self.before(self.calls, name)
        result = real(*arguments, **options)
        self._note(name, arguments, options, result)
        return result

    def _open(self, real, name, path, *arguments, **options):
        creates = name == "open" and arguments[0] & os.O_CREAT
        fd = self._call("create", real, path, *arguments, **options) if creates else real(path, *arguments, **options)
        self.paths[fd] = self.paths.get(path) if name == "dup" else self._path(path, options.get("dir_fd"))
        return fd

    def _path(self, path, folder=None):
        return str(path) if folder is None else f"{self.paths[folder]}/{path}"

    def _note(self, name, arguments, options, result):
        if name in ("create", "mkdir", "unlink", "rmdir"):
            self.log.append((name, str(arguments[0])))
        elif name in ("rename", "replace", "exchange"):
            self.log.append((name, str(arguments[0]), str(arguments[1])))
        elif name == "link":
            self.log.append((name, self._path(arguments[0], options.get("src_dir_fd")), str(arguments[1])))
        elif name == "pwrite":
            self.log.append((name, self.paths[arguments[0]], bytes(arguments[1][:result]), arguments[2]))
        elif name == "fallocate":
            self.log.append(("ftruncate", self.paths[arguments[0]], arguments[1]))
        elif name == "ftruncate":
            self.log.append((name, self.paths[arguments[0]], arguments[1]))
        elif name in ("fsync", "fdatasync"):
            self.log.append(("sync", self.paths[arguments[0]]))

    @contextlib.contextmanager
    def installed(self):
        fallocate, exchange, threads, descriptor = files.fallocate, disk.exchange, disk.THREADS, files.Descriptor
        files.Descriptor = self._descriptors()
        disk.os, disk.THREADS = self, 1  # in an order that can be counted
        files.fallocate = lambda *arguments: self._call("fallocate", fallocate, *arguments)
        disk.exchange = lambda *arguments: self._call("exchange", exchange, *arguments)
        try:
            yield self
        finally:
            disk.os, files.fallocate, disk.exchange, disk.THREADS = os, fallocate, exchange, threads
            files.Descriptor = descriptor

    def _descriptors(self):
        class Noted(files.Descriptor):
            @classmethod
            def open(cls, path, flags, mode=0o600, *, dir_fd=None):
                return cls(self.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd))

            @classmethod
            def copy_of(cls, fd):
                return cls(self.dup(fd))

        return Noted


def settled(folder):
    """What is in a folder, sorted, when everything is over that nobody waits for."""
    for thread in threading.enumerate():
        if thread.name == disk.BACKGROUND:
            thread.join(60)
    return sorted(os.listdir(folder))


def counted(act):
    """How many calls an operation makes, and what they are."""
    with Shim(lambda number, name: None).installed() as shim:
        act()
    return shim


def killed_at(number, act):
    """Run in a child that ends before that call as SIGKILL would end it. Whether it came so far."""
    pid = os.fork()
    if pid == 0:
        try:
            with Shim(lambda n, name: os._exit(9) if n == number else None).installed():
                act()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 9), status
    return status == 9


def failing_at(number, code, act):
    """Let one call fail. What the operation raised."""

    def fail(n, name):
        if n == number:
            raise OSError(code, os.strerror(code))

    with Shim(fail).installed():
        try:
            act()
        except OSError as error:
            return error
        return None


ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


# ---- what a disk holds after its power went --------------------------------------------------------------------------


class File:
    def __init__(self, raw=b"", durable=b""):
        self.now, self.durable = bytearray(raw), durable


class Folder:
    def __init__(self):
        self.now, self.durable = {}, {}


class Disk:
    """Replays a log on a model in which only what was synced is certain to be there after a crash."""

    def __init__(self, root, before):
        """``before``: a copy of ``root`` as it was when the log began; all of that is on disk."""
        self.root = str(root)
        self.tree = self._load(Path(before))

    def _load(self, path):
        if path.is_file():
            return File(path.read_bytes(), path.read_bytes())
        folder = Folder()
        for entry in path.iterdir():
            folder.now[entry.name] = folder.durable[entry.name] = self._load(entry)
        return folder

    def _find(self, path):
        node = self.tree
        for name in Path(path).relative_to(self.root).parts:
            node = node.now[name]
        return node

    def _place(self, path):
        return self._find(Path(path).parent), Path(path).name

    def apply(self, call, path, *more):
        folder, name = self._place(path) if path != self.root else (None, None)
        if call == "create":
            folder.now[name] = File()
        elif call == "mkdir":
            folder.now[name] = Folder()
        elif call in ("unlink", "rmdir"):
            del folder.now[name]
        elif call == "link":
            other, new = self._place(more[0])
            other.now[new] = folder.now[name]
        elif call in ("rename", "replace"):
            other, new = self._place(more[0])
            other.now[new] = folder.now.pop(name)
        elif call == "exchange":
            other, new = self._place(more[0])
            other.now[new], folder.now[name] = folder.now[name], other.now[new]
        elif call == "ftruncate":
            file = folder.now[name]
            file.now = file.now[: more[0]].ljust(more[0], b"\0")
        elif call == "pwrite":
            raw, offset = more
            file = folder.now[name].now
            file.extend(bytes(max(0, offset + len(raw) - len(file))))
            file[offset : offset + len(raw)] = raw
        elif call == "sync":
            node = self._find(path)
            node.durable = dict(node.now) if isinstance(node, Folder) else bytes(node.now)

    def crash(self, target, how, seed=0):
        """Write to ``target`` what may be there after a crash now. ``how``: lost, zeroed or random."""
        self._write(self.tree, Path(target), how, random.Random(seed))

    def _write(self, node, path, how, coin):
        old = how == "lost" or (how == "random" and coin.random() < 0.5)
        if isinstance(node, Folder):
            path.mkdir()
            for name, inner in (node.durable if old else node.now).items():
                self._write(inner, path / name, how, coin)
        elif how == "random" and not old:
            path.write_bytes(
                coin.choice([bytes(node.now), bytes(len(node.now)), b""]) if node.durable != node.now else node.now
            )
        else:
            path.write_bytes(node.durable)
