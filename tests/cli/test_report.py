"""``engram plot`` and ``engram report``."""

import re
import shutil
from html.parser import HTMLParser

import pytest
import torch
from click.testing import CliRunner
from tensordict import TensorDict

from engram import (
    Checkpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplesPerInsert,
    TensorDictReplayBuffer,
)
from engram.cli import main
from engram.format import layout


def call(*arguments):
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


def filled(storage, field="obs", limit=True):
    rb = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(100, 0.6, 0.4))
    next_ = TensorDict({"reward": torch.ones(80, 1), "done": torch.arange(80)[:, None] % 8 == 7}, [80])
    rb.extend(TensorDict({field: torch.zeros(80, 3), "next": next_}, [80]))
    return rb.limit(SamplesPerInsert(4, min_size=10, tolerance=0.5)) if limit else rb


@pytest.fixture
def run(tmp_path):
    """A run: a store that is in use, and checkpoints."""
    folder = tmp_path / "run <1>"
    rb = filled(LazyMemmapStorage(100, scratch_dir=folder / "replay"), "<script>alert('a')</script>")
    Checkpointer(folder / "checkpoints", filled(LazyTensorStorage(100), limit=False)).save(3)
    (folder / "logs").mkdir()
    yield folder
    rb.close()


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.cells, self.images = set(), [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in ("img", "br", "meta"):
            self.open.append(tag)
        given = dict(attributes)
        assert not {"href", "onload"} & set(given)
        if tag == "img":
            self.images.append(given["alt"])
            assert given["src"].startswith("data:image/png;base64,")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.cells.append(data)


def test_a_page_about_a_run(run, tmp_path):
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    done = call("report", run, "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.open == []
    assert "script" not in page.tags
    assert "<script>alert('a')</script>" in page.cells
    assert "//" not in re.sub(r"base64,[A-Za-z0-9+/=]*", "", text)  # no address
    assert page.images == [
        "priority",
        "weights",
        "age",
        "returns",
        "map",
        *["priority", "weights", "age", "returns", "map", "ratio"],
    ]
    cells = " ".join(page.cells)
    for said in (
        "80 of 100 rows live (80 %)",
        "next.reward float32 [1] 4 B 400 B",
        "SamplesPerInsert(ratio=4.0",
        "complete",
    ):
        assert said in cells, said
    assert before == sorted(path.relative_to(run) for path in run.rglob("*"))


def test_a_page_about_one_checkpoint_and_a_damaged_store(run, tmp_path):
    (checkpoint,) = (run / "checkpoints").glob("ckpt-*")
    assert call("report", checkpoint, "--out", tmp_path / "page.html").exit_code == 0
    assert "80" in Page((tmp_path / "page.html").read_text()).cells
    store = shutil.copytree(run / "replay", tmp_path / "copy")
    (store / layout.FOLDER / layout.CONTROL).write_bytes(b"")
    assert call("report", store, "--out", tmp_path / "bad.html").exit_code == 0
    assert "class='bad'" in (tmp_path / "bad.html").read_text()


@pytest.mark.parametrize("arguments", [(), ("--what", "age", "--what", "map")])
def test_a_picture_of_a_store(arguments, run, tmp_path):
    done = call("plot", run / "replay", "--out", tmp_path / "a.png", *arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_picture_of_a_checkpoint_as_lines(run, tmp_path):
    done = call("plot", run / "checkpoints", "--out", tmp_path / "a.svg", "--what", "returns")
    assert done.exit_code == 0, done.output
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("what", "out", "code", "said"),
    [
        ("usage", "a.png", 1, "Error: plot.usage: expected draws to be counted, got PrioritizedSampler"),
        ("age", "a.mp3", 2, "a.mp3: expected a name that ends with .png or .svg or .pdf, got '.mp3'"),
        ("age", "none/a.png", 2, "a.png: expected a path in a folder that is there"),
        ("other", "a.png", 2, "'other' is not one of 'priority'"),
    ],
)
def test_what_cannot_be_drawn(what, out, code, said, run, tmp_path):
    done = call("plot", run / "replay", "--out", tmp_path / out, "--what", what)
    assert done.exit_code == code
    assert said in done.output
    assert not (tmp_path / out).exists()


@pytest.mark.parametrize("command", ["plot", "report"])
def test_a_folder_of_something_else(command, tmp_path):
    (tmp_path / "a").mkdir()
    done = call(command, tmp_path / "a", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "expected a checkpoint, a folder of checkpoints, a dump or a store, found none" in done.output
    assert not (tmp_path / "out").exists()


def test_the_folder_of_a_run_names_what_is_in_it(run, tmp_path):
    done = call("inspect", run)
    assert done.exit_code == 2
    assert f"found none. Name what is in it: {run / 'checkpoints'}, {run / 'replay'}.\n" in done.output
    (tmp_path / "empty").mkdir()
    assert "If there was one, the files that describe it are gone.\n" in call("verify", tmp_path).output


def test_a_page_has_the_name_of_one(run, tmp_path):
    done = call("report", run, "--out", tmp_path / "page.pdf")
    assert done.exit_code == 2
    assert "page.pdf: expected a name that ends with .html or .htm, got '.pdf'." in done.output
    assert not (tmp_path / "page.pdf").exists()


def test_a_picture_of_an_empty_store_and_of_one_checkpoint(run, tmp_path):
    with ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "store")) as rb:
        rb.extend(torch.arange(3))
        rb.empty()
        done = call("plot", tmp_path / "store", "--out", tmp_path / "a.png")
    assert (done.exit_code, done.stderr) == (1, "Error: plot.age: the buffer is empty. Add data before drawing it.\n")
    (checkpoint,) = (run / "checkpoints").glob("ckpt-*")
    done = call("plot", checkpoint, "--out", tmp_path / "a.png")
    assert done.exit_code == 1
    assert "expected a live store or a folder of checkpoints, got: checkpoint." in done.output


def test_a_page_has_no_lists_of_numbers_in_its_tables(run, tmp_path):
    out = tmp_path / "report.html"
    assert call("report", run / "replay", "--out", out).exit_code == 0
    page = Page(out.read_text())
    assert "PrioritizedSampler" in out.read_text()
    assert not any("edges" in cell for cell in page.cells)
