"""An executable to run Python programs with, as ``sys.executable`` is, in the time of a fork.

A program is a fork of a process that has imported torch and engram, as in :mod:`tests.fresh`, with the environment, folder, streams and
arguments that the executable was started with. In it ``sys.executable`` is this executable again. Signals to the executable reach the
program, which is killed where the executable is. The executable ends as the program does. Only their process IDs differ.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

_LENGTH = 8


@functools.cache  # one for the whole test session
def executable():
    """Its path."""
    from tests import fresh

    folder = Path(tempfile.mkdtemp(prefix="engram-tests-"))
    atexit.register(shutil.rmtree, folder)
    path, place = folder / "python", str(folder / "socket")
    path.write_text(f"#!{sys.executable} -ISE\n{Path(__file__).read_text()}\n\nask({place!r})\n")
    path.chmod(0o755)
    fresh.start("import interpreter; interpreter.serve(path, place)", path=str(path), place=place).until("listens")
    return str(path)


def ask(place):
    """The executable itself, which imports little and has no other packages."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        asked = json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}).encode()
        socket.send_fds(server, [len(asked).to_bytes(_LENGTH, "big")], [0, 1, 2])
        server.sendall(asked)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        said = server.recv(2)
    status = int.from_bytes(said, "big", signed=True) if said else 1
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(path, place):
    """Start a program whenever the executable at ``path`` asks for one, until the process that started this one ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        print("listens", flush=True)
        while True:
            client, _ = listener.accept()
            if os.fork() == 0:
                break
            client.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    with client:
        head, streams, *_ = socket.recv_fds(client, _LENGTH, 3)
        asked = b""
        while len(asked) < int.from_bytes(head, "big"):
            asked += client.recv(1 << 16)
        pid = os.fork()
        if pid:
            _relay(client, pid, streams)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    _become(path, **json.loads(asked))


def _relay(client, pid, streams):
    """Hand over signals to the program and its status to the executable; kill it if that is gone."""
    for fd in (0, 1, 2, *streams):  # whoever reads them waits for the program alone
        os.close(fd)
    ended = os.pidfd_open(pid)
    while ended not in (ready := select.select([client, ended], [], [])[0]):
        if client in ready:
            with contextlib.suppress(ConnectionResetError):
                os.kill(pid, (client.recv(1) or bytes([signal.SIGKILL]))[0])
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(status.to_bytes(2, "big", signed=True))
    os._exit(0)


def _become(path, arguments, environment, folder):
    """Run the program as ``__main__``; it ends with the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable = path
    imports = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if arguments[0] == "-u":
        del arguments[0]
    if arguments[0] == "-m":
        sys.path[0:1] = ["", *imports]
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0:1] = [str(Path(arguments[0]).parent), *imports]
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")
