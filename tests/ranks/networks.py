"""Computers of their own for the ranks of a job: network namespaces with an address each, on one bridge, and cables to pull.

All of it belongs to a process that ends with the test, and goes when it does. It takes Linux, ``ip``, and the right to make
namespaces.
"""

import ctypes
import os
import shutil
import signal
import subprocess

import pytest

_NEWNS, _NEWNET = 0x0002_0000, 0x4000_0000
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_IP, _ENTER = shutil.which("ip", path=_PATH), shutil.which("nsenter", path=_PATH)


def unshare(flags):
    """Leave the namespaces of this process for new ones. Raises ``OSError``: that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def own_network():
    unshare(_NEWNET)


def own_mounts():
    """Mounts made from now on are this process's, and of those that enter its namespace."""
    unshare(_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def enter_mounts(pid):
    """See what that process has mounted."""
    fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _NEWNS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)


class Switch:
    """A bridge with a cable for each rank: ``address(rank)`` once ``connect(rank, pid)`` was called."""

    def __init__(self):
        self._pid = None

    def __enter__(self):
        if _IP is None or _ENTER is None:
            pytest.skip("no 'ip' (iproute2) or no 'nsenter' (util-linux)")
        ready, say = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(ready)
                own_network()
                os.write(say, b"+")
                signal.pause()
            finally:
                os._exit(1)
        os.close(say)
        there = os.read(ready, 1)
        os.close(ready)
        try:
            if not there:
                pytest.skip("network namespaces are not allowed here")
            self._ip("link add name switch type bridge")
            self._ip("link set switch up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _ip(self, command, pid=None):
        inside = [_ENTER, "-t", str(pid or self._pid), "-n", "--"]
        done = subprocess.run([*inside, _IP, *command.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"ip {command}: {done.stderr.strip()}")

    @staticmethod
    def address(rank):
        return f"10.77.0.{rank + 1}"

    def connect(self, rank, pid):
        """Give a process that has called :func:`own_network` an address, on the device ``cable``."""
        self._ip(f"link add name port{rank} type veth peer name cable netns {pid}")
        self._ip(f"link set port{rank} master switch up")
        self._ip("link set lo up", pid)
        self._ip(f"addr add {self.address(rank)}/24 dev cable", pid)
        self._ip("link set cable up", pid)

    def pull(self, rank):
        self._ip(f"link set port{rank} down")

    def plug(self, rank):
        self._ip(f"link set port{rank} up")
