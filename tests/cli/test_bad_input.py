"""What commands answer to bad input: one sentence, the right exit code, and nothing changed. One table for all of them."""

import contextlib
import fcntl
import importlib
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest
import torch
from click.testing import CliRunner

from engram import Checkpointer, LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from engram import cli as commands
from engram.cli import main

#: How each command is called with a path, and whether it has ``--json``.
COMMANDS = {
    "inspect": (["inspect", "PATH"], True),
    "verify": (["verify", "PATH"], True),
    "plot": (["plot", "PATH", "--out", "OUT.png"], False),
    "report": (["report", "PATH", "--out", "OUT.html"], False),
    "reshard": (["reshard", "PATH", "OUT", "--ranks", "1", "--lanes", "1"], True),
    "plan": (["plan", "PATH", "--capacity", "5"], True),
    "serve": (["serve", "PATH", "--insecure"], False),
    "stats": (["stats", "PATH"], True),
    "top": (["top", "PATH", "--count", "1", "--every", "0.1"], True),
    "doctor": (["doctor", "PATH"], True),
}
#: Commands to which a folder of others is no mistake: a store may be made there.
TAKES_ANY = ("doctor",)
LIMIT_S = 120


def called(name, path, out, *more, env=None):
    words = [word.replace("PATH", str(path)).replace("OUT", str(out)) for word in COMMANDS[name][0]]
    return CliRunner().invoke(main, [*words, *more], env=env or {"COLUMNS": "1000"})


def snapshot(folder):
    """Every file below, and its bytes."""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def filled(folder):
    rb = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=folder), sampler=PrioritizedSampler(40, 0.6, 0.4))
    rb.extend({"a": torch.arange(30.0), "done": torch.arange(30) % 10 == 9})
    return rb


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store that no process has open."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    filled(folder).close()
    return folder


def refused(result, code, *said):
    """One sentence on stderr, nothing else, and that exit code."""
    assert isinstance(result.exception, SystemExit), result.exception
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert len(line) < 500
    for word in said:
        assert word in line
    assert result.exit_code == code, line
    return line


# ---- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_no_such_folder_and_a_file(name, tmp_path):
    (tmp_path / "file").write_bytes(b"a line of text\n")
    before = snapshot(tmp_path)
    for place in ("nothing", "file"):
        result = called(name, tmp_path / place, tmp_path / "out")
        refused(result, 2, str(tmp_path / place), "expected a")
        assert result.stdout == ""
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_is_not_ours(name, tmp_path):
    folder = tmp_path / "theirs"
    (folder / "below").mkdir(parents=True)
    (folder / "data.csv").write_text("1,2\n")
    before = snapshot(tmp_path)
    if name not in TAKES_ANY:
        refused(called(name, folder, tmp_path / "out"), 2, str(folder), "expected", "found none")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", [name for name, (_, has_json) in COMMANDS.items() if has_json])
def test_problems_have_one_form_in_json(name, tmp_path):
    result = called(name, tmp_path / "nothing", tmp_path / "out", "--json")
    assert result.exit_code == 2
    (entry,) = json.loads(result.stdout)["problems"]
    assert entry["what"] in result.stderr
    assert entry == {"file": str(tmp_path / "nothing"), "offset": None, "what": entry["what"]} or name == "top"
    assert entry.keys() == {"file", "offset", "what"}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_permission(name, store, tmp_path, monkeypatch):
    """As for a user who may not list the folder; root may everything, so the system's answer is imitated."""
    listed = os.listdir

    def denied(path="."):
        if os.fspath(path) == str(store):
            raise PermissionError(13, "Permission denied", str(store))
        return listed(path)

    monkeypatch.setattr(os, "listdir", denied)
    before = snapshot(store)
    if name not in TAKES_ANY:
        line = refused(called(name, store, tmp_path / "out"), 2)
        assert line == f"Error: {store}: permission denied."
    assert snapshot(store) == before


@pytest.mark.parametrize("name", ["plot", "report"])
def test_a_file_that_cannot_be_written(name, store, tmp_path):
    refused(called(name, store, tmp_path / "none" / "out"), 2, str(tmp_path / "none"), "expected a path in a folder")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_damaged_store(name, tmp_path):
    filled(tmp_path / "store").close()
    control = tmp_path / "store" / ".engram" / "control"
    control.write_bytes(control.read_bytes()[:100])
    before = snapshot(tmp_path)
    result = called(name, tmp_path / "store", tmp_path / "out")
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    if name == "report":  # the page says it
        assert result.exit_code == 0
        assert "control" in (tmp_path / "out.html").read_text()
        return
    if name == "reshard":  # a store is none, damaged or not
        refused(result, 2, "checkpoint")
    elif name in ("inspect", "verify"):
        assert (result.exit_code, str(control) in result.stdout, result.stderr) == (1, True, "")
    else:
        refused(result, 1, str(control))
    assert snapshot(tmp_path) == before


# ---- terminals and pipes ---------------------------------------------------------------------------------------------


def started(words, **how):
    return subprocess.run([sys.executable, "-m", "engram", *map(str, words)], timeout=LIMIT_S, check=False, **how)


@pytest.mark.parametrize(
    "words", [["inspect"], ["inspect", "--all"], ["verify"], ["top", "--count", "1", "--every", "0.1"]]
)
def test_a_terminal_of_40_columns(words, store):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "engram", words[0], str(store), *words[1:]]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # the terminal's other side is closed
        pass
    os.close(ours)
    _, complained = child.communicate(timeout=LIMIT_S)
    assert (child.returncode, complained) == (0, b"")
    lines = shown.decode().splitlines()
    assert lines
    if words == ["inspect"]:
        bars = [line for line in lines if "█" in line]
        assert bars
        assert max(map(len, bars)) <= 40
    if words[0] == "top":
        assert max(len(line.removeprefix("\x1b[H\x1b[J")) for line in lines) <= 40


@pytest.mark.parametrize("columns", ["40", "200"])
@pytest.mark.parametrize("name", ["inspect", "verify", "plan"])
def test_no_terminal(name, columns, store, tmp_path):
    result = called(name, store, tmp_path / "out", env={"COLUMNS": columns})
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["inspect", "--help"],
        ["inspect", "STORE"],
        ["inspect", "STORE", "--json"],
        ["verify", "STORE"],
        ["plan", "STORE", "--capacity", "5"],
        ["stats", "STORE"],
        ["top", "STORE", "--count", "1", "--every", "0.1"],
    ],
)
def test_a_closed_pipe(words, store):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = started([word.replace("STORE", str(store)) for word in words], stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_output_that_has_no_place(store):
    with open("/dev/full", "wb") as full:
        done = started(["inspect", store], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"Error: standard output: [Errno 28] No space left on device\n"


def test_a_terminal_without_the_characters(store):
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = started(["inspect", store], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u2588" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c(name, store, tmp_path, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_folder", interrupted)
    if name == "plan":
        planning = importlib.import_module("engram.cli.plan")  # the module, which is called as the command is
        monkeypatch.setattr(planning, "planned", lambda *given, **more: interrupted(None))
    before = snapshot(store)
    result = called(name, store, tmp_path / "out")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Interrupted.\n")
    assert snapshot(store) == before


def interrupted(child):
    """What a program complains of that is interrupted. Python loses a signal that comes while an object is finalized: it is sent again."""
    try:
        for _ in range(LIMIT_S // 5):
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.communicate(timeout=5)[1]
        raise AssertionError("the program ignores interrupts")
    finally:
        child.kill()


def test_ctrl_c_while_it_looks(tmp_path):
    rb = filled(tmp_path / "store")
    # a program in the background may have been started without this signal
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from engram.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "top", str(tmp_path / "store"), "--every", "1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        first = json.loads(child.stdout.readline())
        complained = interrupted(child)
    assert (first["size"], first["problems"]) == (30, [])
    assert {"seconds", "inserts_per_s", "write_count"} <= first.keys()
    assert (child.returncode, complained) == (130, b"Interrupted.\n")
    rb.close()


def test_help_of_every_command_says_its_exit_codes():
    for name, command in main.commands.items():
        text = CliRunner().invoke(main, [name, "--help"]).output
        assert "Exit code" in text
        for parameter in command.params:
            assert parameter.param_type_name == "argument" or parameter.help, (name, parameter.name)


@pytest.mark.parametrize("module", ["matplotlib", "pyarrow"])
def test_what_is_not_installed(module, store, tmp_path):
    name, extra = {"matplotlib": ("report", "plot"), "pyarrow": ("health", "serve")}[module]
    words = {"report": [store, "--out", tmp_path / "a.html"], "health": ["unix:/tmp/nobody"]}[name]
    program = f"import sys; sys.modules[{module!r}] = None; from engram.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, name, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f'Error: engram {name} needs {module}: pip install "engram-replay[{extra}]"\n'


def test_a_checkpoint_in_place_of_a_store(tmp_path):
    rb = filled(tmp_path / "store")
    Checkpointer(tmp_path / "saved", rb).save(1)
    rb.close()
    for name in ("serve", "top"):
        refused(called(name, tmp_path / "saved", tmp_path / "out"), 1, "expected a store")
