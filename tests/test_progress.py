"""A bar, where there is somebody to see it."""

import pytest

from engram import _progress


def lefts(*numbers):
    yield from numbers


def test_what_is_short_shows_nothing(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    pieces = lefts(2, 1, 0)
    _progress.watch(pieces, "counting")
    assert not list(pieces)
    monkeypatch.setattr(_progress, "_SILENT_S", 0)
    _progress.watch(lefts(0), "counting")
    _progress.watch(lefts(), "counting")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("terminal", [True, False])
def test_what_takes_longer_shows_a_bar_on_a_terminal(capsys, monkeypatch, terminal):
    monkeypatch.setattr(_progress, "_SILENT_S", 0)
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
    pieces = lefts(4, 5, 1, 0)  # others may add to the work
    _progress.watch(pieces, "counting")
    assert not list(pieces)
    out, err = capsys.readouterr()
    assert not out
    assert ("engram: counting" in err) is terminal
    assert bool(err) is terminal
