"""Buffers in a terminal with rich, and in a notebook."""

import io
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)


def printed(rb, width=80):
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, highlight=False).print(rb)
    return text.getvalue()


class Cells(HTMLParser):
    """The cells of all tables, and the heights of bars."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.bars, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "span":
            self.bars.append(dict(attributes)["title"])
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def filled(**how):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(100, 1.0, 0.4, 0.0), **how)
    data = {"obs[0]": torch.zeros(40, 3), "next": {"reward": torch.zeros(40, 1)}}
    index = rb.extend(TensorDict(data, [40]))
    rb.update_priority(index, torch.arange(1.0, 41.0))
    return rb


def test_a_tree_has_components_and_fields():
    lines = printed(filled(batch_size=8, prefetch=2)).splitlines()
    assert lines[0] == "TensorDictReplayBuffer 40/100 (40 %) rows"
    text = "\n".join(lines)
    for said in (
        "storage LazyTensorStorage, ",
        "obs[0]: float32 [3], 12 B a row",
        "('next', 'reward'): float32 [1], 4 B a row",
        "sampler PrioritizedSampler(",
        "priorities 1 ████████ 40",
        "batch_size 8",
        "prefetch 2",
    ):
        assert said in text
    assert max(map(len, printed(filled(), 40).splitlines())) <= 40


def test_a_table_has_fields_and_priorities():
    cells = Cells(filled()._repr_html_())
    assert not cells.open
    assert ["field", "dtype", "shape", "a row", "in all"] in cells.rows
    assert ["obs[0]", "float32", "[3]", "12 B", "1.2 kB"] in cells.rows
    assert ["('next', 'reward')", "float32", "[1]", "4 B", "400 B"] in cells.rows
    assert sum(int(bar.split()[3]) for bar in cells.bars) == 40
    assert cells.bars[0].startswith("1 to ")


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: ReplayBuffer(storage=LazyTensorStorage(5)),
        lambda folder: ReplayBuffer(storage=ListStorage()),
        lambda folder: PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=ListStorage(5)),
        lambda folder: ReplayBuffer(
            storage=LazyMemmapStorage(5, scratch_dir=folder), sampler=PrioritizedSampler(5, 0.6, 0.4)
        ),
        lambda folder: ReplayBuffer(storage=LazyTensorStorage(5), delayed_init=True),
    ],
)
def test_empty_and_other_buffers(make, tmp_path):
    rb = make(tmp_path / "store")
    assert printed(rb).startswith(type(rb).__name__)
    assert "priorities" not in printed(rb)
    assert not Cells(rb._repr_html_()).bars
    if "delayed" not in repr(rb):
        rb.extend([1, 2] if isinstance(rb.storage, ListStorage) else torch.arange(2))
        assert "2/5" in printed(rb) or "2" in printed(rb)
    rb.close()
    assert printed(rb).startswith(("closed", type(rb).__name__))


def test_a_list_with_priorities():
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=0.4, eps=0.0, storage=ListStorage(50))
    rb.extend(["a", "b", "c"])
    rb.update_priority([0, 1, 2], [1.0, 2.0, 2.0])
    assert [int(bar.split()[3]) for bar in Cells(rb._repr_html_()).bars] == [1, 0, 0, 0, 0, 0, 0, 2]


def test_nobody_imports_rich_for_that():
    program = """if True:
        import sys, torch
        from engram import LazyTensorStorage, ReplayBuffer
        rb = ReplayBuffer(storage=LazyTensorStorage(5))
        rb.extend(torch.zeros(3))
        repr(rb), rb._repr_html_()
        print("rich" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
