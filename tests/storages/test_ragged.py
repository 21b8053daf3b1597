"""Ragged rows on their way in and out, against lists of rows; and what their declarations say."""

import gc
import json
import pickle
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from engram import CorruptStore, Ragged
from engram.storages._ragged_intake import count_rows, row_in, rows_in, same_lengths
from engram.storages._ragged_structure import Batches, single, texts_of
from engram.storages.ragged import Group, ItemField, RaggedLayout, checked_ragged, likely_length, ring_items
from engram.store.ragged_rows import Items, sharing

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
quick = settings(max_examples=20, deadline=None)
rows_of_ints = st.lists(st.lists(st.integers(-5, 5), max_size=6), min_size=1, max_size=7)
TOKENS = ItemField.of(("tokens",), Ragged(torch.int32, max_length=8))
BOXES = ItemField.of(("boxes",), Ragged(torch.float32, max_length=8, shape=(2,)))
TEXT = ItemField.of(("text",), Ragged("utf-8", max_length=64))
RAW = ItemField.of(("raw",), Ragged("bytes", max_length=64))
JSON = ItemField.of(("meta",), Ragged("json", max_length=64))


def tensors(rows, dtype=torch.int32):
    return [torch.tensor(row, dtype=dtype) for row in rows]


def offsets(rows):
    return torch.tensor([0, *np.cumsum([len(row) for row in rows])])


def values(rows, dtype=torch.int32):
    return torch.tensor([one for row in rows for one in row], dtype=dtype)


def listed(items):
    """The rows, item by item: by no function of the library."""
    found = []
    for start, length in zip(items.starts.tolist(), items.lengths.tolist(), strict=True):
        found.append([items.values[start + i].tolist() for i in range(length)])
    return found


def jagged(rows):
    return torch.nested.nested_tensor_from_jagged(values(rows), offsets(rows))


FORMS = {
    "jagged": jagged,
    "strided nested": lambda rows: torch.nested.nested_tensor(tensors(rows)),
    "values and offsets": lambda rows: (values(rows), offsets(rows)),
    "arrays": lambda rows: (values(rows).numpy(), offsets(rows).numpy().astype(np.uint32)),
    "a list of offsets": lambda rows: (values(rows), offsets(rows).tolist()),
    "a dict": lambda rows: {"values": values(rows), "offsets": offsets(rows)},
    "a dict of lengths": lambda rows: {"values": values(rows), "lengths": offsets(rows).diff()},
    "a TensorDict": lambda rows: TensorDict({"values": values(rows), "cu_seqlens": offsets(rows)}, []),
    "a list of tensors": tensors,
    "a list of arrays": lambda rows: [row.numpy() for row in tensors(rows)],
    "a list of lists": lambda rows: rows,
    "an array of objects": lambda rows: np.array([*tensors(rows), None], dtype=object)[:-1],
    "on another device's graph": lambda rows: [row.float().requires_grad_() for row in tensors(rows)],
}


# ---- in ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@given(rows=rows_of_ints)
@quick
def test_every_form_of_rows_comes_to_the_same(form, rows):
    field = TOKENS if form != "on another device's graph" else TOKENS._replace(dtype=torch.float32)
    given_ = FORMS[form](rows)
    assert count_rows(given_) == len(rows)
    items = rows_in(field, given_, "extend")
    assert listed(items) == rows
    assert (items.starts.dtype, items.lengths.dtype) == (torch.int64, torch.int32)
    assert (items.values.is_contiguous(), items.values.requires_grad) == (True, False)


@given(rows=rows_of_ints, gap=st.integers(0, 3))
@quick
def test_nested_tensors_with_holes(rows, gap):
    spread = [one for row in rows for one in (*row, *[99] * gap)]
    starts = torch.tensor([0, *np.cumsum([len(row) + gap for row in rows])])
    lengths = torch.tensor([len(row) for row in rows])
    nested = torch.nested.nested_tensor_from_jagged(torch.tensor(spread, dtype=torch.int32), starts, lengths=lengths)
    items = rows_in(TOKENS, nested, "extend")
    assert listed(items) == rows
    assert items.in_order == (gap == 0)
    assert listed(items.packed()) == rows
    assert len(items.packed().values) == sum(map(len, rows))


def test_no_item_is_copied_of_nested_tensors_and_values_with_offsets():
    flat = values([[1, 2], [3]])
    for given_ in (
        (flat, offsets([[1, 2], [3]])),
        torch.nested.nested_tensor_from_jagged(flat, torch.tensor([0, 2, 3])),
    ):
        assert rows_in(TOKENS, given_, "extend").values.data_ptr() == flat.data_ptr()


def test_rows_of_one_length_and_items_with_a_shape():
    even = torch.arange(12.0).reshape(2, 3, 2)
    assert listed(rows_in(BOXES, even, "extend")) == even.tolist()
    assert listed(rows_in(BOXES, [even[0], even[1, :1], []], "extend")) == [even[0].tolist(), even[1, :1].tolist(), []]
    assert listed(rows_in(TOKENS, np.ones((2, 3), np.int32), "extend")) == [[1] * 3] * 2
    packed = Batches(RaggedLayout("packed"), within=False)(BOXES, rows_in(BOXES, even, "extend"), 0)
    assert listed(rows_in(BOXES, packed, "extend")) == even.tolist()  # what came out goes in


@pytest.mark.parametrize("one", [torch.tensor([1, 2], dtype=torch.int32), np.array([1, 2], np.int32), [1, 2]])
def test_one_row(one):
    items = row_in(TOKENS, one, "add")
    assert listed(items) == [[1, 2]]
    assert single(TOKENS, items).tolist() == [1, 2]
    assert listed(row_in(TOKENS, [], "add")) == [[]]


texts = st.lists(st.text(max_size=12), min_size=1, max_size=6)


@given(texts)
@quick
def test_texts(rows):
    for form in (rows, tuple(rows), NonTensorStack(*rows), np.array([*rows, None], dtype=object)[:-1]):
        items = rows_in(TEXT, form, "extend")
        assert texts_of(TEXT, items) == rows
        assert listed(items) == [[*row.encode()] for row in rows]
    raw = [row.encode() for row in rows]
    assert texts_of(RAW, rows_in(RAW, raw, "extend")) == raw
    as_values = (torch.frombuffer(bytearray(b"".join(raw)) + b"!", dtype=torch.uint8)[:-1], offsets(raw))
    assert texts_of(TEXT, rows_in(TEXT, as_values, "extend")) == rows
    assert single(TEXT, row_in(TEXT, rows[0], "add")) == rows[0]
    assert single(TEXT, row_in(TEXT, NonTensorData(rows[0]), "add")) == rows[0]
    assert single(RAW, row_in(RAW, raw[0], "add")) == raw[0]


def test_what_a_tensordict_makes_of_lists_of_strings():
    td = TensorDict({}, [2])
    td["text"], td["one"] = ["a", "bc"], "d"
    assert texts_of(TEXT, rows_in(TEXT, td.get("text"), "extend")) == ["a", "bc"]
    assert texts_of(TEXT, rows_in(TEXT, td.get("one"), "extend")) == ["d", "d"]
    assert texts_of(TEXT, rows_in(TEXT, NonTensorData(["a", "bc"], batch_size=[2]), "extend")) == ["a", "bc"]
    assert texts_of(TEXT, rows_in(TEXT, np.array(["a", "bc"]), "extend")) == ["a", "bc"]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=4,
)


@given(st.lists(plain, min_size=1, max_size=4))
@quick
def test_json(rows):
    field = JSON._replace(max_length=1 << 20)
    items = rows_in(field, rows, "extend")
    assert texts_of(field, items) == rows
    for row, raw in zip(rows, listed(items), strict=True):
        assert bytes(raw).decode() == json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert single(field, row_in(field, rows[0], "add")) == rows[0]


# ---- bad input -----------------------------------------------------------------------------------------------------------

ONE = torch.ones(1, dtype=torch.int32)
THREE = torch.ones(3, dtype=torch.int32)

BAD = [
    (TOKENS, [torch.ones(9, dtype=torch.int32)], RuntimeError, r"at most max_length=8 items, got 9 in row 0\. Cut it"),
    (
        TOKENS,
        [ONE, torch.ones(2)],
        RuntimeError,
        r"expected int32 items, got float32 items in row 1\. Convert.*torch\.int32",
    ),
    (TOKENS, (torch.ones(2), [0, 2]), RuntimeError, "expected int32 items, got float32 items. Convert"),
    (
        TOKENS,
        [ONE, torch.ones(1, 2, dtype=torch.int32)],
        RuntimeError,
        r"shape \[2\] in row 1\. Of a row, the first dim",
    ),
    (TOKENS, torch.ones(3, dtype=torch.int32), RuntimeError, r"a tensor \[3\]. It looks like one row"),
    (TOKENS, [[[1], [1, 2]], [[1]]], TypeError, "ragged"),
    (TOKENS, (THREE, [1, 3]), ValueError, "offsets: expected offsets that begin at 0, got 1 first. Subtract"),
    (TOKENS, (THREE, [0, 2, 1]), ValueError, "offsets that rise, got 2 and then 1, at row 1"),
    (TOKENS, (THREE, [0, 2]), ValueError, r"end with the 3 values, got an end at 2\. Cut the values"),
    (TOKENS, {"values": THREE, "lengths": [1, 1]}, ValueError, "got an end at 2. Cut"),
    (TOKENS, (THREE, [0, 2, 4]), ValueError, "rows that end with the 3 values, got an end at 4"),
    (TOKENS, (THREE, []), ValueError, r"one dimension, \[n \+ 1\]"),
    (TOKENS, {"values": THREE, "lengths": [2, -1]}, ValueError, "lengths: expected lengths of at least 0, got -1"),
    (TOKENS, {"values": THREE, "offsets": torch.ones(2)}, TypeError, "offsets: expected ints, got a tensor"),
    (
        TOKENS,
        "text",
        TypeError,
        "expected a jagged nested tensor, .* of int32 items, got str 'text'. It looks like one",
    ),
    (TOKENS, 7, TypeError, "got int 7"),
    (TEXT, "text", TypeError, "expected a list of strings, got str 'text'. It looks like one row"),
    (TEXT, ["a", b"b"], TypeError, "expected strings, got bytes b'b' in row 1: it is no str"),
    (TEXT, ["a", "\ud800"], ValueError, "expected strings, got str .* in row 1: .*surrogates"),
    (TEXT, ["é" * 33], RuntimeError, "at most max_length=64 bytes, got 66 in row 0"),
    (
        TEXT,
        (torch.tensor([0xC3, 0xA9], dtype=torch.uint8), [0, 1, 2]),
        ValueError,
        "text in UTF-8, got other bytes in row 0",
    ),
    (RAW, ["a"], TypeError, "expected bytes, got str 'a' in row 0"),
    (JSON, [1, {1, 2}], TypeError, "expected values that json.dumps takes, got set .* in row 1"),
    (JSON, [float("nan")], ValueError, "Out of range float"),
    (JSON, {"a": 1}, TypeError, "expected a list of values that json.dumps takes"),
]


@pytest.mark.parametrize(("field", "value", "kind", "message"), BAD)
def test_bad_rows(field, value, kind, message):
    with pytest.raises(
        kind, match=f"extend: field '{field.key[0]}': .*{message}" if kind is not TypeError else message
    ):
        rows_in(field, value, "extend")


def test_nested_tensors_that_are_ragged_elsewhere():
    nested = torch.nested.nested_tensor_from_jagged(torch.zeros(4, 2), torch.tensor([0, 1, 4])).transpose(1, 2)
    with pytest.raises(RuntimeError, match="differ in their first dimension.*Transpose it"):
        rows_in(BOXES, nested, "extend")
    with pytest.raises(
        RuntimeError, match="expected one row of int32 items, got a nested tensor of 2 rows. Did you mean extend"
    ):
        row_in(TOKENS, jagged([[1], [2, 3]]), "add")


def test_lengths_that_fields_share():
    leader, follower = rows_in(TOKENS, [[1, 2], [3]], "extend"), rows_in(BOXES, torch.zeros(2, 2, 2), "extend")
    same_lengths(TOKENS, leader.lengths, BOXES, rows_in(BOXES, [[[0.0, 0.0]] * 2, [[0.0, 0.0]]], "extend"), "extend")
    with pytest.raises(
        RuntimeError, match="'boxes'.*the lengths of field 'tokens', which it shares: 1 items in row 1, got 2"
    ):
        same_lengths(TOKENS, leader.lengths, BOXES, follower, "extend")
    with pytest.raises(RuntimeError, match="expected 2 rows, as field 'tokens' has, got 1"):
        same_lengths(TOKENS, leader.lengths, BOXES, follower[[0]], "extend")


@pytest.mark.parametrize(("field", "raw"), [(TEXT, b"\xff"), (JSON, b"{")])
def test_what_was_changed_on_disk_is_named(field, raw):
    good = b"1"
    items = Items.of_lengths(
        torch.frombuffer(bytearray(good + raw), dtype=torch.uint8), torch.ones(2, dtype=torch.int32)
    )
    items.numbers = torch.tensor([40, 41])
    with pytest.raises(CorruptStore, match=f"field '{field.key[0]}': row 41: expected"):
        texts_of(field, items)


# ---- rows that are chosen and replaced -------------------------------------------------------------------------------------


@given(rows=rows_of_ints, data=st.data())
@quick
def test_rows_are_chosen_joined_and_replaced_without_moving_items(rows, data):
    items = rows_in(TOKENS, rows, "extend")
    which = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    assert listed(items[which]) == [rows[i] for i in which]
    assert listed(items[which].packed()) == [rows[i] for i in which]
    assert [row.tolist() for row in items[which].rows()] == [rows[i] for i in which]
    assert listed(Items.joined([items, items[which]])) == rows + [rows[i] for i in which]

    places = sorted(set(which))
    fresh = data.draw(st.lists(st.lists(st.integers(-5, 5), max_size=8), min_size=len(places), max_size=len(places)))
    follower = Items(items.values.float(), items.starts, items.lengths)
    items[torch.tensor(places)] = rows_in(TOKENS, fresh, "extend")
    wanted = [fresh[places.index(i)] if i in places else row for i, row in enumerate(rows)]
    assert listed(items) == wanted
    assert listed(follower) == rows  # the other member of the group is as it was
    assert [items.total, listed(items.packed())] == [sum(map(len, wanted)), wanted]


def test_members_of_a_group_get_the_same_places():
    rows = [[1, 2], [], [3]]
    ordered = rows_in(TOKENS, rows, "extend")
    spread = Items(torch.tensor([7, 3, 1, 2], dtype=torch.int32), torch.tensor([2, 0, 1]), ordered.lengths)
    left_out = Items(None, ordered.starts, ordered.lengths)
    first, second, third = sharing([ordered, spread, left_out])
    assert first.starts.tolist() == second.starts.tolist() == third.starts.tolist()
    assert listed(first) == listed(second) == rows
    assert third.values is None
    assert listed(Items.joined([left_out, ordered])) == [[0, 0], [], [0], *rows]


# ---- out -----------------------------------------------------------------------------------------------------------------


@given(rows=rows_of_ints, side=st.sampled_from(["right", "left"]), multiple=st.integers(1, 4), order=st.randoms())
@quick
def test_layouts(rows, side, multiple, order):
    which = list(range(len(rows)))
    order.shuffle(which)
    items, rows = rows_in(TOKENS, rows, "extend")[which], [rows[i] for i in which]

    padded = Batches(RaggedLayout("padded", side, multiple), within=False)(TOKENS, items, 0)
    longest = max(map(len, rows))
    length = next(n for n in range(longest, longest + multiple) if n % multiple == 0)
    assert padded.values.shape == padded.mask.shape == (len(rows), length)
    for row, value, mask in zip(rows, padded.values.tolist(), padded.mask.tolist(), strict=True):
        pad = [0] * (length - len(row))
        assert value == (row + pad if side == "right" else pad + row)
        assert [one for one, kept in zip(value, mask, strict=True) if kept] == row

    packed = Batches(RaggedLayout("packed"), within=False)(TOKENS, items, 0)
    assert (packed.values.tolist(), packed.max_seqlen) == ([one for row in rows for one in row], longest)
    assert (packed.cu_seqlens.dtype, packed.cu_seqlens.tolist()) == (torch.int32, offsets(rows).tolist())

    nested = Batches(RaggedLayout("jagged"), within=False)(TOKENS, items, 0)
    assert [row.tolist() for row in nested.unbind()] == rows
    assert [row.tolist() for row in Batches(RaggedLayout("list"), within=False)(TOKENS, items, 0)] == rows


def test_jagged_and_packed_rows_share_the_memory_that_they_were_read_into_and_their_offsets():
    tokens = rows_in(TOKENS, [[1, 2], [3]], "extend")
    follower = Items(tokens.values.float(), tokens.starts, tokens.lengths)
    together = Batches(RaggedLayout("jagged"), within=False)
    one, other = together(TOKENS, tokens, 0), together(TOKENS._replace(dtype=torch.float32), follower, 0)
    assert one.values().data_ptr() == tokens.values.data_ptr()
    assert (one * other).values().tolist() == [1.0, 4.0, 9.0]  # of one shape
    packed = Batches(RaggedLayout("packed"), within=False)(TOKENS, tokens, 0)
    assert packed.values.data_ptr() == tokens.values.data_ptr()


@given(rows=rows_of_ints)
@quick
def test_jagged_rows_are_what_torch_makes_of_values_and_offsets(rows):
    items = rows_in(TOKENS, rows, "extend")
    made, wanted = Batches(RaggedLayout("jagged"), within=False)(TOKENS, items, 0), jagged(rows)
    assert (type(made), made.dtype, made.layout, made.device) == (
        type(wanted),
        wanted.dtype,
        wanted.layout,
        wanted.device,
    )
    assert (made.dim(), made.requires_grad, made.lengths()) == (wanted.dim(), False, None)
    assert made.offsets().tolist() == wanted.offsets().tolist()
    assert made.values().tolist() == wanted.values().tolist()
    if longest := max(map(len, rows)):
        padded = made.to_padded_tensor(-9)
        assert padded.shape == (len(rows), longest)
        assert padded.tolist() == [row + [-9] * (longest - len(row)) for row in rows]
    assert [row.tolist() for row in (made * 2 + made).unbind()] == [[3 * one for one in row] for row in rows]
    assert [row.tolist() for row in pickle.loads(pickle.dumps(made)).unbind()] == rows


def test_gradients_of_jagged_rows():
    items = rows_in(TOKENS._replace(dtype=torch.float32), tensors([[1, 2], [], [3]], torch.float32), "extend")
    leaf = Batches(RaggedLayout("jagged"), within=False)(TOKENS, items, 0).requires_grad_()
    weight = torch.tensor(2.0, requires_grad=True)
    (leaf * leaf * weight).values().sum().backward()
    assert leaf.grad.values().tolist() == [4.0, 8.0, 12.0]
    assert weight.grad.item() == 14.0


def test_a_batch_is_gone_with_its_last_name():
    for kind in ("jagged", "packed", "padded", "list"):
        items = rows_in(TOKENS, [[1, 2], [3]], "extend")
        parts = [weakref.ref(items.values), weakref.ref(items.offsets)]
        gc.collect()
        gc.disable()
        try:
            batches = Batches(RaggedLayout(kind), within=False)
            made = batches(TOKENS, items, 0)
            del batches, items, made
            assert [part() for part in parts] == [None, None], kind
        finally:
            gc.enable()


def test_layouts_within_tensordicts():
    tokens, text = rows_in(TOKENS, [[1, 2], [3]], "extend"), rows_in(TEXT, ["ab", ""], "extend")
    packed = Batches(RaggedLayout("packed"), within=True)(TOKENS, tokens, 0)
    assert (packed.batch_size, packed["cu_seqlens"].tolist(), packed["max_seqlen"]) == (torch.Size([]), [0, 2, 3], 2)
    padded = Batches(RaggedLayout("padded"), within=True)(TOKENS, tokens, 0)
    assert (padded.batch_size, padded["mask"].tolist()) == (torch.Size([2]), [[True, True], [True, False]])
    for layout in ("jagged", "packed", "padded", "list"):
        stack = Batches(RaggedLayout(layout), within=True)(TEXT, text, 0)
        assert isinstance(stack, NonTensorStack)
        assert (stack.tolist(), stack.batch_size) == (["ab", ""], torch.Size([2]))
    rows = Batches(RaggedLayout("list"), within=True)(TOKENS, tokens, 0)
    assert [row.tolist() for row in rows.tolist()] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("packed", RaggedLayout("packed")),
        ({"kind": "padded", "side": "left", "multiple": 8}, RaggedLayout("padded", "left", 8)),
        (RaggedLayout("list")._asdict(), RaggedLayout("list")),
    ],
)
def test_what_a_layout_is_said_by(given_, expected):
    assert RaggedLayout.checked(given_, "example") == expected


@pytest.mark.parametrize(
    ("given_", "kind", "message"),
    [
        ("flat", ValueError, "layout: kind: expected one of .*got 'flat'"),
        (7, TypeError, "layout: expected one of .*got 7"),
        ({"kind": "padded", "width": 3}, TypeError, "layout: expected one of"),
        ({"side": "left"}, TypeError, "layout: expected one of"),
        ({"kind": "padded", "side": "top"}, ValueError, "layout: side: expected one of .'right', 'left'., got 'top'"),
        ({"kind": "padded", "multiple": 0}, ValueError, "layout: multiple: expected at least 1"),
        (
            {"kind": "packed", "multiple": 8},
            ValueError,
            "layout: side and multiple: expected with kind=\"padded\", got 'packed'",
        ),
    ],
)
def test_bad_layouts(given_, kind, message):
    with pytest.raises(kind, match=f"example: {message}"):
        RaggedLayout.checked(given_, "example")


# ---- declarations ----------------------------------------------------------------------------------------------------------


def test_what_is_declared():
    assert repr(Ragged(torch.int32, max_length=9, shape=(2,))) == "Ragged(torch.int32, max_length=9, shape=(2,))"
    assert repr(Ragged(np.float32, like=("a", "b"))) == "Ragged(torch.float32, like=('a', 'b'))"
    assert repr(Ragged("json")) == "Ragged('json')"
    one, same, other = Ragged("int8", max_length=3), Ragged(torch.int8, max_length=3), Ragged("int8", max_length=4)
    assert (one == same, hash(one) == hash(same), one == other) == (True, True, False)
    assert pickle.loads(pickle.dumps(one)) == one
    assert Ragged(torch.float64, shape=(2, 3)).item_bytes == 48


@pytest.mark.parametrize(
    ("arguments", "more", "kind", "message"),
    [
        (("utf8",), {}, TypeError, "Ragged: expected a dtype, one of bool.*or 'utf-8', 'bytes', 'json', got 'utf8'"),
        ((None,), {}, TypeError, "got None"),
        ((torch.int32,), {"max_length": 0}, ValueError, "max_length: expected at least 1 items, got 0"),
        ((torch.int32,), {"max_length": 1 << 31}, ValueError, "max_length: expected at most"),
        ((torch.int32,), {"max_length": 2.0}, TypeError, "max_length: expected an int, got float. Write 2"),
        ((torch.int32,), {"max_length": 3, "like": "a"}, ValueError, "max_length: expected none beside like='a'"),
        ((torch.int32,), {"like": 1.5}, TypeError, "like: expected a string"),
        ((torch.int32,), {"shape": 3}, TypeError, "shape: expected a tuple of ints"),
        ((torch.int32,), {"shape": (0,)}, ValueError, "shape: expected at least 1"),
        ((torch.int32,), {"shape": (1,) * 31}, ValueError, "shape: expected at most 30 dimensions, got 31"),
        (("utf-8",), {"like": "a"}, ValueError, "like: expected none of 'utf-8', whose rows are texts, got like='a'"),
        (("json",), {"shape": (2,)}, ValueError, r"shape: expected none of 'json'.*got shape=\(2,\)"),
    ],
)
def test_bad_declarations(arguments, more, kind, message):
    with pytest.raises(kind, match=message):
        Ragged(*arguments, **more)


def test_declarations_together():
    fields = {("a", "b"): Ragged("int8"), "c": Ragged("int8", like=("a", "b"))}
    assert checked_ragged(fields, "example") == {("a", "b"): Ragged("int8"), ("c",): Ragged("int8", like=("a", "b"))}
    for given_, kind, message in [
        ([1], TypeError, "example: ragged: expected a dict such as"),
        ({"a": torch.int32}, TypeError, "'a': expected a Ragged, got torch.int32. Write Ragged"),
        ({"a": Ragged("int8", like="b")}, ValueError, r"'a': like: expected a declared field .* one of \[\], got 'b'"),
        ({**fields, "d": Ragged("int8", like="c")}, ValueError, r"'d': like: .*one of \[\('a', 'b'\)\], got 'c'"),
    ]:
        with pytest.raises(kind, match=message):
            checked_ragged(given_, "example")


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 64)), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(1, 1 << 22),
)
@quick
def test_rings_have_room_for_a_row_and_no_more_bytes_than_asked_for(sizes, lanes, nbytes):
    groups = [Group(*size) for size in sizes]
    needed = lanes * sum(length * item for length, item in sizes)
    if nbytes < needed:
        with pytest.raises(ValueError, match=f"ragged_bytes: expected at least {needed:,} bytes .*got {nbytes:,}"):
            ring_items(groups, nbytes, 100, lanes, "example")
        return
    rings = ring_items(groups, nbytes, 100, lanes, "example")
    assert all(ring >= length for ring, (length, _) in zip(rings, sizes, strict=True))
    used = sum(lanes * ring * item for ring, (_, item) in zip(rings, sizes, strict=True))
    assert nbytes - lanes * sum(item for _, item in sizes) < used <= nbytes
    for ring, (length, _) in zip(rings, sizes, strict=True):  # in proportion
        assert abs(ring / length - nbytes / needed) <= 1 / length


def test_sizes_that_nobody_asked_for():
    assert ring_items([Group(100, 4), Group(8, 1)], None, 1_000, 2, "example") == [12_500, 1_000]
    assert ring_items([Group(100, 4)], None, 4, 2, "example") == [200]
    assert [likely_length(n) for n in (0, 16, 17, 100, 1 << 30)] == [64, 64, 128, 512, (1 << 31) - 1]
