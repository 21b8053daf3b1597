"""Numbers and sizes for people have one form: ``28.2 MB``, ``123,456 rows``, ``1 row``, ``86.8 %``."""

import ast
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import engram
from engram import (
    Checkpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram._support.words import count, format_share, format_size
from engram.cli import main

SOURCES = Path(engram.__file__).parent
#: What no text for people has: a size of more than three figures, or in powers of 2; a share without its space.
STRAY = {
    "a size": re.compile(r"\b\d{4,} ?(B|bytes|kB|MB|GB|TB)\b|\b\d+\.\d{3,} (B|kB|MB|GB|TB)\b|\b[KMGT]iB\b"),
    "a share": re.compile(r"\d%"),
    "thousands": re.compile(r"(?<![\w./,\[-])\d{4,} (rows?|fields?|steps?|episodes?|lanes?|trajector)\b"),
    "one of many": re.compile(r"(?<![\w.,])1 (rows|fields|steps|episodes|lanes|ranks|trajectories)\b"),
}


def strays(text):
    return [(kind, found.group()) for kind, form in STRAY.items() for found in form.finditer(text)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("871.106 MB", "a size"),
        ("28228 bytes", "a size"),
        ("2.5 GiB", "a size"),
        ("(1.0%)", "a share"),
        ("123456 rows in RAM", "thousands"),
        ("(size=0/5, 1 fields, cpu)", "one of many"),
    ],
)
def test_what_is_stray(text, kind):
    assert [of for of, _ in strays(text)] == [kind]


def test_the_form():
    assert [format_size(n) for n in (0, 999, 1000, 999_499, 999_500, 28_228_000_000)] == [
        "0 B", "999 B", "1 kB", "999 kB", "1 MB", "28.2 GB",
    ]  # fmt: skip
    assert [format_share(share) for share in (0, 0.00012, 0.0125, np.float64(1) / 3, 1)] == [
        "0 %", "0.012 %", "1.25 %", "33.3 %", "100 %",
    ]  # fmt: skip
    assert [count(n, "row") for n in (0, 1, 123_456)] == ["0 rows", "1 row", "123,456 rows"]


def test_no_source_has_a_form_of_its_own():
    """Of shares and sizes; widths of HTML are none."""
    stray = []
    for path in sorted({*SOURCES.rglob("*.py")} - {SOURCES / "_support" / "words.py"}):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr):
                continue
            for part, after in zip(node.values, [*node.values[1:], None], strict=True):
                if not isinstance(part, ast.FormattedValue):
                    continue
                form = "" if part.format_spec is None else ast.unparse(part.format_spec)
                behind = after.value if isinstance(after, ast.Constant) else ""
                if ("%" in form and "</div>" not in behind and "'></div>" not in behind) or re.match(
                    r" ?([kMGT]i?B|%)(?!\w)", behind
                ):
                    stray.append(f"{path.relative_to(SOURCES)}:{node.lineno}: {ast.unparse(part)}{behind[:10]}")
    assert sorted(stray) == []


def test_no_output_has_a_form_of_its_own(tmp_path, caplog):
    pytest.importorskip("matplotlib")
    caplog.set_level(logging.INFO, "engram")
    said = {}
    for n, fields in ((1, 1), (12_345, 3)):
        names = [f"f{i}" for i in range(fields)]
        rows = {name: torch.rand(n, 40, dtype=torch.float64) for name in names}
        rows["done"] = torch.arange(n)[:, None] % 1234 == 0
        place = tmp_path / str(n)
        for kind, storage in (
            ("ram", LazyTensorStorage(n)),
            ("directory", LazyMemmapStorage(n, scratch_dir=place / "store")),
            ("list", ListStorage(n)),
            ("one field", LazyTensorStorage(n)),
        ):
            sampler = PrioritizedSampler(n, 0.6, 0.4) if kind == "directory" else None
            rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=20_000)
            data = {"obs": rows["f0"]} if kind == "one field" else rows
            rb.extend([1] * n if kind == "list" else data)
            said[f"repr {kind} {n}"] = f"{rb!r} {rb.storage!r} {rb._repr_html_()}"
            if kind != "list":
                rb.count_usage()
                said[f"health {kind} {n}"] = f"{rb.health()}"
                rb.sample()
            if kind == "directory":
                plots = rb.plot
                titles = [plots.age(), plots.priority(), plots.map(), plots.usage()]
                said[f"figures {n}"] = " ".join(f"{it.get_title()} {it.get_xlabel()}" for it in titles)
                checkpointer = Checkpointer(place / "saved", rb)
                said[f"save {n}"] = str(checkpointer.save(1))
                said[f"restore {n}"] = str(checkpointer.restore())
                rb.dumps(place / "dump")
            rb.close()
        said[f"plan {n}"] = str(engram.plan({name: torch.zeros(40).double() for name in names}, n, memory=30_000))
        for words in (
            ("inspect", "store"),
            ("inspect", "store", "--all"),
            ("inspect", "saved"),
            ("inspect", "dump"),
            ("stats", "store"),
            ("plan", "store", "--capacity", "1000000", "--memory", "10MB"),
            *([("doctor", "store")] * (n > 1)),
        ):
            at = [str(place / word) if word in ("store", "saved", "dump") else word for word in words]
            said[f"{' '.join(words)} {n}"] = CliRunner().invoke(main, at).output
        if n == 1:
            continue
        out = place / "page.html"
        CliRunner().invoke(main, ["report", str(place), "--out", str(out)])
        said[f"report {n}"] = re.sub(r"(?s)data:image[^']*|<style>.*</style>|style='[^']*'", "", out.read_text())
    said["log"] = "\n".join(caplog.messages)
    assert all(text.strip() for text in said.values())
    bare = {
        name: re.sub(r"style=['\"][^'\"]*['\"]", "", text.replace(str(tmp_path), "")) for name, text in said.items()
    }
    assert {name: found for name, text in bare.items() if (found := strays(text))} == {}


def test_an_ensemble_says_it_in_the_same_form():
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(12_345)) for _ in range(2)]
    assert strays(repr(engram.ReplayBufferEnsemble(*members, batch_size=4))) == []
