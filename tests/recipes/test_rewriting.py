"""Only the buffer classes change; every other byte stays."""

import ast

import pytest

from tests.recipes import running
from tests.recipes.rewriting import rewritten

NAMES = ["LazyTensorStorage", "ReplayBuffer", "SamplerWithoutReplacement", "SliceSampler", "TensorDictReplayBuffer"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from torchrl.data import ReplayBuffer\n", "from engram import ReplayBuffer\n"),
        (
            "from torchrl.data import (  # both\n    LazyTensorStorage,  # rows\n    ReplayBuffer as R,\n)\n",
            "from engram import (  # both\n    LazyTensorStorage,  # rows\n    ReplayBuffer as R,\n)\n",
        ),
        ("from torchrl.data.replay_buffers.samplers import SliceSampler\n", "from engram import SliceSampler\n"),
        (
            "from torchrl.data.replay_buffers import LazyTensorStorage, SliceSampler\n",
            "from engram import LazyTensorStorage, SliceSampler\n",
        ),
        (
            "from torchrl.data import Composite, ReplayBuffer\n",
            "from engram import ReplayBuffer; from torchrl.data import Composite \n",
        ),
        (
            "from torchrl.data import (\n    Composite,\n    ReplayBuffer,  # last\n)\n",
            "from engram import ReplayBuffer; from torchrl.data import (\n    Composite\n    ,  # last\n)\n",
        ),
        (
            "from torchrl.data import (\n    ReplayBuffer,  # first\n    Composite,\n    SliceSampler as S,\n    Bounded\n)\n",
            (
                "from engram import ReplayBuffer, SliceSampler as S; from torchrl.data import (\n"
                "      # first\n    Composite,\n    \n    Bounded\n)\n"
            ),
        ),
        (
            "if True:\n    import torchrl.data as d\n    rb = d.ReplayBuffer(d.Composite)\n",
            "if True:\n    import engram; import torchrl.data as d\n    rb = engram.ReplayBuffer(d.Composite)\n",
        ),
        (
            "import torchrl\nx = 'é', torchrl.data.replay_buffers.samplers.SliceSampler(torchrl.data.Composite)\n",
            "import engram; import torchrl\nx = 'é', engram.SliceSampler(torchrl.data.Composite)\n",
        ),
        (
            "import os, torchrl.data.replay_buffers as rb\nrb.storages.LazyTensorStorage(rb.storages.Own)\n",
            "import engram; import os, torchrl.data.replay_buffers as rb\nengram.LazyTensorStorage(rb.storages.Own)\n",
        ),
        (
            "from torchrl import data\nx = data.ReplayBuffer\n",
            "import engram; from torchrl import data\nx = engram.ReplayBuffer\n",
        ),
        (
            "from torchrl.data import replay_buffers as r\nx = r.ReplayBuffer\n",
            "import engram; from torchrl.data import replay_buffers as r\nx = engram.ReplayBuffer\n",
        ),
    ],
)
def test_each_form_of_import(before, after):
    found = rewritten(before, NAMES).text
    assert found == after
    ast.parse(found)


@pytest.mark.parametrize(
    "same",
    [
        "from torchrl.data import Composite\n",
        "from torchrl.envs import ReplayBuffer\n",
        "from torchrl.data.datasets.d4rl import ReplayBuffer\n",
        "from .data import ReplayBuffer\n",
        '"""from torchrl.data import ReplayBuffer"""\n# torchrl.data.ReplayBuffer\n',
        "class torchrl:\n    pass\ntorchrl.data.ReplayBuffer\n",
        "from torchrl.data import MultiStep \\\n    as M\n",
    ],
)
def test_what_is_no_import_of_a_buffer_class_stays(same):
    found = rewritten(same, NAMES)
    assert (found.text, found.replaced) == (same, set())


def test_all_names_at_once():
    found = rewritten("from torchrl.data import *\n", NAMES)
    assert found.text == f"from torchrl.data import *; from engram import {', '.join(NAMES)}\n"


def test_names_that_engram_lacks_are_told():
    found = rewritten("from torchrl.data.replay_buffers import ReplayBuffer, Unheard\n", NAMES)
    assert (found.replaced, found.kept) == ({"ReplayBuffer"}, {"Unheard"})
    found = rewritten("import torchrl.data.replay_buffers as r\nr.writers.Unheard\n", NAMES)
    assert found.kept == {"Unheard"}


def test_lines_keep_their_numbers_and_others_their_bytes():
    """Over every recipe that is at hand: only lines with an import or with a replaced name differ."""
    pytest.importorskip("torchrl")
    folder, every = running.at_hand(), running.names()
    if folder is None:
        pytest.skip("TorchRL's recipes are not at hand")
    changed = 0
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        found = rewritten(text, every)
        ast.parse(found.text)
        imports = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports.update(range(node.lineno, node.end_lineno + 1))
        before, after = text.splitlines(), found.text.splitlines()
        assert len(before) == len(after), file
        for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
            if old != new:
                changed += 1
                assert number in imports or any(name in old for name in found.replaced), (file, old)
    assert changed > 50
    assert {"ReplayBuffer", "LazyTensorStorage", "SamplerWithoutReplacement"} <= set(every)
