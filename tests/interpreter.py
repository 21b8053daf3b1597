"""An executable to run Python programs with, as ``sys.executable`` is, in the time of a fork.

A program is a fork of a process that has imported torch, engram and, where it is installed, torchrl, and done nothing else. It has the
environment, folder, descriptors and arguments that the executable was started with, and ``sys.executable`` is this executable again.
Signals to the executable reach the program, which is killed if the executable is. The executable ends as the program does. Only their
process IDs differ.

All workers of a test run share the process that is forked.
"""

import atexit
import contextlib
import fcntl
import functools
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path

_LENGTH = 8
_IMPORTED = ("engram.buffer.tensordict", "engram.checkpoint.checkpointer", "torch.distributed", "torch.multiprocessing")
_NAME = "ENGRAM_TESTS_INTERPRETER"


@functools.cache  # one for the whole test session
def executable():
    """Its path."""
    if _NAME in os.environ:
        return os.environ[_NAME]
    folder = Path(tempfile.mkdtemp(prefix="engram-tests-"))
    path, place = folder / "python", str(folder / "socket")
    path.write_text(f"#!{sys.executable} -ISE\n__name__ = 'ask'\n{Path(__file__).read_text()}\n\nask({place!r})\n")
    path.chmod(0o755)
    alike = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen(100)
        command = [sys.executable, __file__, str(path), str(listener.fileno()), str(os.getpid())]
        server = subprocess.Popen(command, env=alike, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)

    atexit.register(_end, os.getpid(), server, folder)
    return str(path)


def _end(tests, server, folder):
    if os.getpid() == tests:  # not a process forked from that
        server.kill()
        server.wait()
        shutil.rmtree(folder)


def share():
    """Let processes that this one starts have the same executable."""
    os.environ[_NAME] = executable()


# ---- the executable itself, which imports little -------------------------------------------------------------------------


def ask(place):
    numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if _open(number)]
    asked = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "numbers": numbers}
    asked = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        socket.send_fds(server, [len(asked).to_bytes(_LENGTH, "big")], numbers)
        server.sendall(asked)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        for number in numbers:  # what ends with the program
            os.close(number)
        said = server.recv(2)
    status = int.from_bytes(said, "big", signed=True) if said else 1
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _open(number):
    with contextlib.suppress(OSError):
        return os.fstat(number)


# ---- the process that is forked ------------------------------------------------------------------------------------------


def _serve(path, number, tests):
    """Start programs until that process has ended. Returns in each program."""
    with socket.socket(fileno=number) as listener:
        listener.settimeout(10)
        while os.getppid() == tests:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            with contextlib.suppress(TimeoutError):
                client, _ = listener.accept()
                if os.fork() == 0:
                    break
                client.close()
        else:
            os._exit(1)
    with client:
        head, given, *_ = socket.recv_fds(client, _LENGTH, 200)
        asked = b""
        while len(asked) < int.from_bytes(head, "big"):
            asked += client.recv(1 << 16)
        pid = os.fork()
        if pid:
            _relay(client, pid, given)
    _become(path, given, **json.loads(asked))


def _relay(client, pid, given):
    """Hand over signals to the program and its status to the executable; kill it if that is gone."""
    for fd in (0, 1, 2, *given):
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


def _become(path, given, arguments, environment, folder, numbers):
    """Run the program as ``__main__``; it ends with the process."""
    free = max(*given, *numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in given]
    for fd in given:
        os.close(fd)
    for number, fd in zip(numbers, moved, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["engram._support.fork"]._lineage.__init__()  # the first process of its program
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable = path
    while arguments[0] in ("-B", "-S", "-u"):
        del arguments[0]
    first = "" if arguments[0] in ("-c", "-m") else str(Path(arguments[0]).parent)
    sys.path[0:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        code = arguments[1]
    else:
        sys.argv[:] = arguments
        code = compile(Path(arguments[0]).read_bytes(), arguments[0], "exec")
        main.__file__ = arguments[0]
    exec(code, main.__dict__)


def _main(path, number, tests):
    import gc
    import importlib.util

    torchrl = ("torchrl.collectors",) if importlib.util.find_spec("torchrl") else ()  # absent where a wheel is tested
    sys.modules["triton"] = (
        None  # torch imports it where it is installed; in a fork, what it leaves is reported at the end
    )
    for name in (*_IMPORTED, *torchrl):
        importlib.import_module(name)
    del sys.modules["triton"]
    gc.freeze()
    _serve(path, int(number), int(tests))


if __name__ == "__main__":
    _main(*sys.argv[1:])
