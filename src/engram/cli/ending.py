"""How a command ends: its exit code, and one sentence if it could not do what it was asked to.

======  ==================================================================================================================
code    meaning
======  ==================================================================================================================
0       done, and everything is good
1       damage, a difference or bad news was found; or the command cannot do this with what is there
2       the arguments are wrong: no such path, nothing of engram's at it, no permission, an unknown option
130     Ctrl-C, as shells say of a program that SIGINT ended
141     the reader of the output has gone, as shells say of a program that SIGPIPE ended
======  ==================================================================================================================
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from engram.errors import EngramError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

REFUSED, MISUSED, INTERRUPTED, UNREAD = 1, 2, 130, 141
#: Most characters of a sentence that another library wrote.
_LONGEST = 400

#: What is installed to have a module, by its first name.
_EXTRAS = {"matplotlib": "plot", "pyarrow": "serve", "prometheus_client": "metrics", "gymnasium": "gym", "ray": "ray"}


class Refusal(click.ClickException):
    """A command cannot do what it was asked to. With ``--json``, also tells so as JSON.

    Args:
        message: one sentence: what was expected, what was found, where, and what to do.
    """

    exit_code = REFUSED

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
        context = click.get_current_context(silent=True)
        self._given: Mapping[str, object] = {} if context is None else context.params

    def show(self, file: IO[str] | None = None) -> None:
        super().show(file)
        if self._given.get("as_json"):
            print_json({"problems": [problem(self.message, next(self._paths(), None))]})

    def _paths(self) -> Iterator[str]:
        """What the command was given to look at."""
        return (str(value) for value in self._given.values() if isinstance(value, Path))


class Misuse(Refusal):
    """An argument is wrong."""

    exit_code = MISUSED


class Command(click.Command):
    """A command that ends as this module says."""

    def invoke(self, ctx: click.Context) -> object:
        with _told_apart():
            try:
                return super().invoke(ctx)
            finally:
                _flush()


class Commands(click.Group):
    """The group of all commands."""

    command_class = Command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        with _told_apart():  # where --help is answered
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    if isinstance(stream, io.TextIOWrapper):
                        stream.reconfigure(errors="backslashreplace")  # of a terminal that has not all characters
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> object:
        with _told_apart():
            return super().invoke(ctx)


@contextlib.contextmanager
def refusing(extra: str | None = None, *, oserror: type[Refusal] = Misuse) -> Iterator[None]:
    """Ends the command if something below raises, with what that says.

    Args:
        extra: what to install if a module is missing. Default: what brings that module.
        oserror: what an ``OSError`` becomes: by default a path was wrong.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # of the output: the command did nothing wrong
    except ModuleNotFoundError as error:
        command = click.get_current_context().info_name
        module = (error.name or "").partition(".")[0]
        brings = extra or _EXTRAS.get(module)
        install = f'pip install "engram-replay[{brings}]"' if brings else f"pip install {module}"
        raise Refusal(f"engram {command} needs {module}: {install}") from error
    except EngramError as error:
        raise Refusal(str(error)) from error
    except OSError as error:
        raise oserror(said_error(error)) from error
    except MemoryError as error:
        raise Refusal(str(error) or "there is not enough memory.") from error
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        raise Refusal(str(error.args[0]) if error.args else type(error).__name__) from error


def said_error(error: OSError) -> str:
    """An error of the system as a sentence that begins with the path."""
    if error.strerror and error.filename is not None:
        other = "" if error.filename2 is None else f" to {os.fspath(error.filename2)}"
        return f"{_text(error.filename)}{other}: {error.strerror[:1].lower()}{error.strerror[1:]}."
    text = str(error)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def problem(what: str, file: str | None = None, offset: int | None = None) -> dict[str, str | int | None]:
    """One entry of ``problems``, which has the same form in the JSON of all commands."""
    return {"file": file, "offset": offset, "what": what}


def print_json(found: object) -> None:
    """Print one JSON object over several lines."""
    click.echo(json.dumps(found, indent=2, ensure_ascii=False))


def print_json_line(found: object) -> None:
    """Print one JSON object on one line, at once: more come later."""
    click.echo(json.dumps(found, ensure_ascii=False))


def table(rows: Sequence[Sequence[object]], *, right: Sequence[int] = (), between: str = "  ") -> Iterator[str]:
    """Lines of columns, each as wide as its widest cell. ``right``: numbers of the columns that stand to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        texts = (
            f"{text:{'>' if n in right else '<'}{width}}"
            for n, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield between.join(texts).rstrip()


def _text(name: object) -> str:
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else str(name)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    """Ctrl-C, and output that cannot be written, have exit codes of their own."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("Interrupted.", err=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # what is left in the buffer has no reader: not even at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(UNREAD)
    except OSError as error:
        click.echo(f"Error: standard output: {said_error(error)}", err=True)
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(REFUSED)
