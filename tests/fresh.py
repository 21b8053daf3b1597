"""Programs in processes of their own, cheaply.

Importing torch takes seconds. One helper has it, without a thread, and forks for every program; what the
program then sees is as good as a new interpreter, down to an ordinary exit. Its output goes to files, its exit is reported.

>>> run("print(1 + x)", x=2)  # doctest: +SKIP
'3'
"""

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

_LIMIT_S = 60.0


class Program:
    """A program that was started. ``out`` and ``err`` are what it has printed so far."""

    def __init__(self, helper, pid, name):
        self.pid = pid
        self._helper = helper
        self._name = name
        self._status = None

    @property
    def out(self):
        return Path(f"{self._name}.out").read_text()

    @property
    def err(self):
        return Path(f"{self._name}.err").read_text()

    def poll(self):
        """Its exit status, minus the number of the signal that ended it, or None while it runs."""
        if self._status is None:
            self._status = self._helper.ask(poll=self.pid)["status"]
        return self._status

    def wait(self, limit_s=_LIMIT_S):
        self._until(lambda: self.poll() is not None, limit_s, "a program")
        return self.poll()

    def until(self, text, limit_s=_LIMIT_S):
        """Wait until it has printed ``text``."""

        def printed():
            ended = self.poll() is not None  # before it is looked at what it printed
            if text in self.out:
                return True
            assert not ended, f"the program ended ({self.poll()}):\n{self.out}\n{self.err}"
            return False

        self._until(printed, limit_s, f"{text!r} from a program")
        return self

    def _until(self, condition, limit_s, what):
        from tests import waiting  # not in the helper itself

        try:
            waiting.until(condition, limit_s, what)
        except waiting.TooSlow as error:
            self.kill()
            error.add_note(f"It printed:\n{self.out}\n{self.err}")
            raise

    def kill(self):
        """SIGKILL, and wait until it is gone."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()


def start(code, **values):
    """Start a program; ``values`` (anything JSON has) are its global names."""
    return _helper().start(code, values)


def run(code, **values):
    """Run a program that must succeed: what it printed, without the last newline."""
    return _output(start(code, **values), _LIMIT_S)


def run_counted(code, **values):
    """As :func:`run`, where all memory, Python's too, comes from libc, which keeps nothing of what is given back: what it says is in
    use is so, to the byte.
    """
    helper = _helper(PYTHONMALLOC="malloc", GLIBC_TUNABLES="glibc.malloc.tcache_count=0")
    return _output(helper.start(code, values), _LIMIT_S)


def run_long(code, limit_s, **values):
    """As :func:`run`, for as long as this."""
    return _output(start(code, **values), limit_s)


def _output(program, limit_s):
    status = program.wait(limit_s)
    assert status == 0, f"the program ended with status {status}:\n{program.out}\n{program.err}"
    return program.out.rstrip("\n")


class _Helper:
    def __init__(self, **more):
        from tests import interpreter  # not in the helper itself

        self._folder = tempfile.TemporaryDirectory(prefix="engram-tests-")
        self._lock = threading.Lock()
        self._asked = 0
        one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
        environment = {**os.environ, **one, **more}
        self._process = subprocess.Popen(
            [sys.executable if more else interpreter.executable(), __file__, self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def ask(self, **request):
        with self._lock:
            self._asked += 1
            self._process.stdin.write(json.dumps({**request, "number": self._asked}) + "\n")
            self._process.stdin.flush()
            while True:
                reply = json.loads(self._process.stdout.readline())
                if reply.pop("number") == self._asked:  # else of a request whose wait was interrupted
                    return reply

    def start(self, code, values):
        reply = self.ask(code=textwrap.dedent(code), values=values)
        return Program(self, reply["pid"], reply["name"])

    def close(self):
        self._process.kill()  # its input does not end where a forked process still has it
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._folder.cleanup()


@functools.cache  # one for the whole test session
def _helper(**environment):
    helper = _Helper(**environment)
    atexit.register(helper.close)
    return helper


# ---- the helper's side -----------------------------------------------------------------------------------------------


def _serve(folder):
    """Answer requests until the tests are done. Returns ``(code, values)`` in a child."""
    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            reply = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            # Not by process number: the machine gives it out again before the tests are done.
            name = os.path.join(folder, str(request["number"]))
            for stream in ("out", "err"):
                Path(f"{name}.{stream}").touch(mode=0o666, exist_ok=False)
            pid = os.fork()
            if pid == 0:
                replies.close()
                _redirect(name)
                return request["code"], request["values"]
            reply = {"pid": pid, "name": name}
        replies.write(json.dumps({**reply, "number": request["number"]}) + "\n")
        replies.flush()
    return None


def _redirect(name):
    for stream, kind in ((1, "out"), (2, "err")):
        fd = os.open(f"{name}.{kind}", os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, stream)
        os.close(fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout.reconfigure(line_buffering=True)


def _main(folder):
    import types

    import engram.buffer
    import engram.buffer.tensordict  # noqa: F401

    sys.path.append(str(Path(__file__).parents[1]))  # a program may import from `tests`
    gc.freeze()
    job = _serve(folder)
    if job is not None:
        code, values = job
        sys.modules["engram._support.fork"]._lineage.__init__()  # the first process of its program
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        main.__dict__.update(values)
        exec(compile(code, "<program>", "exec"), main.__dict__)


if __name__ == "__main__":
    _main(sys.argv[1])
