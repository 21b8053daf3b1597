import json
import os

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram.format import layout
from engram.format.schema import DTYPES, Field, Node, Schema

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda key: key != ".engram")


def schema_of(td):
    """The schema of a TensorDict of ``[C, …]`` tensors."""
    fields = []

    def node(value, path):
        if isinstance(value, torch.Tensor):
            fields.append(Field(path, str(value.dtype).removeprefix("torch."), tuple(value.shape[1:])))
            return Node("leaf", field=len(fields) - 1)
        return Node("tensordict", children={key: node(child, (*path, key)) for key, child in value.items()})

    root = node(td, ())
    return Schema(td.batch_size[0], 1, (), tuple(fields), root)


def everything(folder):
    return {os.path.relpath(os.path.join(base, name), folder) for base, _, some in os.walk(folder) for name in some}


def check_same_as_tensordict(td, folder):
    td.memmap(folder)
    schema = schema_of(td)
    metas = layout.meta_files(folder, schema)
    paths = {layout.field_path(folder, field.key) for field in schema.fields if field.row_bytes}
    assert {os.path.relpath(path, folder) for path in (*metas, *paths)} == everything(folder)
    for path, raw in metas.items():
        ours, theirs = json.loads(raw), json.loads(path.read_text())
        newer = {key for key in theirs if key.startswith("_")} - ours.keys()  # tensordict 0.15 says more
        assert ours == {key: value for key, value in theirs.items() if key not in newer}


def test_layout_is_tensordicts(tmp_path):
    td = TensorDict(
        {
            "plain": torch.zeros(3, 2),
            "a/b": torch.zeros(3),
            "é ü %": torch.zeros(3, 0),
            "next": {"reward": torch.zeros(3, 1, dtype=torch.float64), "deep er": {"x": torch.zeros(3)}},
            ".": torch.zeros(3),
            "..": {"..": torch.zeros(3)},
            "": torch.zeros(3),
            "%": torch.zeros(3),
            'a<b>:"|?*\\\n\x7f\0': torch.zeros(3),
            **{f"of {name}": torch.zeros(3, dtype=getattr(torch, name)) for name in DTYPES if name != "complex32"},
        },
        batch_size=[3],
    )
    check_same_as_tensordict(td, tmp_path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(names, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3, unique=True))
@example([("..",), (".", "%2E"), ("%2E",)])
def test_any_names_lie_where_tensordict_puts_them(tmp_path_factory, paths):
    td = TensorDict({}, batch_size=[2])
    for path in paths:
        if not any(path[: len(p)] == p or p[: len(path)] == path for p in paths if p != path):
            td.set(path, torch.zeros(2))
    if any(len(os.fsencode(layout.encode_key(part))) > 200 for path in paths for part in path) or td.is_empty():
        return
    if layout.clash(schema_of(td).fields):
        return
    check_same_as_tensordict(td, tmp_path_factory.mktemp("layout"))


@given(names, names)
def test_different_keys_have_different_names(one, other):
    assert (layout.encode_key(one) == layout.encode_key(other)) == (one == other)


@given(names)
def test_no_key_leaves_its_folder(key):
    name = layout.encode_key(key)
    assert name not in ("", ".", "..")
    assert "/" not in name
    assert "\0" not in name


@pytest.mark.parametrize("length", [248, 249])
def test_names_that_are_too_long_for_a_file_are_refused(tmp_path, length):
    key = ("next", "n" * (length - 1) + "x")
    if length == 248:  # .memmap makes it 255
        assert layout.field_path(tmp_path, key).name == key[1] + ".memmap"
        return
    with pytest.raises(ValueError, match=r"'next', 'nn.*a file name of 256 bytes, at most 255.*Shorten the key, or"):
        layout.field_path(tmp_path, key)


def test_percent_encoding_counts_for_the_length(tmp_path):
    with pytest.raises(ValueError, match="a file name of 277 bytes"):
        layout.field_path(tmp_path, ("/" * 90,))
    with pytest.raises(ValueError, match="a file name of 300 bytes"):
        layout.field_path(tmp_path, ("/" * 100, "a"))


@pytest.mark.parametrize(
    "keys",
    [
        [("meta.json", "a")],
        [("next", "meta.json", "a")],
        [("a",), ("a.memmap", "b")],
        [("n", "a.memmap", "b", "c"), ("n", "a")],
    ],
)
def test_names_that_would_be_file_and_folder_at_once_are_found(keys):
    assert layout.clash([Field(key, "bool", ()) for key in keys]) is not None


def test_other_names_do_not_clash():
    keys = [("meta.json",), ("a",), ("b.memmap",), ("n", "a"), ("a.memmap.memmap", "b"), ("n", "b", "c")]
    assert layout.clash([Field(key, "bool", ()) for key in keys]) is None


def test_is_store(tmp_path):
    assert not layout.is_store(tmp_path)
    (tmp_path / ".engram").mkdir()
    assert not layout.is_store(tmp_path)
    (tmp_path / ".engram" / "store.json").write_text("")
    assert layout.is_store(tmp_path)
