"""Descriptions of fields whose rows have any number of items."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.errors import CorruptStore, IncompatibleStore
from engram.format import layout
from engram.format.schema import (
    DTYPES,
    Field,
    Node,
    RaggedItems,
    Schema,
    decode,
    decode_store,
    differences,
    encode,
    encode_store,
    first_fingerprints,
    is_earlier,
)


def leader(key, **changes):
    return Field((key,), "int32", (3,), RaggedItems(**{"dtype": "int32", "max_length": 100, "items": 400, **changes}))


def follower(key, like, **changes):
    given = {"dtype": "float32", "max_length": 100, "items": 400, "like": like}
    return Field((key,), "uint8", (0,), RaggedItems(**{**given, **changes}))


FIELDS = (
    leader("tokens"),
    Field(("reward",), "float32", ()),
    follower("log_prob", 0),
    leader("text", dtype="uint8", max_length=5, items=6, kind="utf-8"),
    follower("state", 0, dtype="float16", shape=(2, 3)),
)


def make(fields=FIELDS, capacity=12, lanes=3, **changes):
    children = {field.key[0]: Node("leaf", n) for n, field in enumerate(fields)}
    return Schema(capacity, lanes, (), tuple(fields), Node("dict", children=children), **changes)


# ---- there and back --------------------------------------------------------------------------------------------------


@st.composite
def schemas_with_ragged_fields(draw):
    lanes, fields, leaders = draw(st.integers(1, 4)), [], []
    for n in range(draw(st.integers(1, 7))):
        kinds = ["fixed", "leader", "text"] + ["follower"] * bool(leaders)
        kind, key = (draw(st.sampled_from(kinds)) if n else "leader"), f"k{n}"
        of = {
            "dtype": draw(st.sampled_from(sorted(DTYPES))),
            "shape": draw(st.lists(st.integers(1, 9), max_size=3).map(tuple)),
        }
        sizes = {"max_length": draw(st.integers(1, (1 << 31) - 1)), "items": draw(st.integers(1, 1 << 40))}
        if kind == "fixed":
            fields.append(Field((key,), of["dtype"], of["shape"]))
        elif kind == "follower":
            like = draw(st.sampled_from(leaders))
            its = fields[like].ragged
            fields.append(follower(key, like, **of, max_length=its.max_length, items=its.items))
        else:
            if kind == "text":
                of = {"dtype": "uint8", "kind": draw(st.sampled_from(["utf-8", "bytes", "json"]))}
            leaders.append(n)
            fields.append(leader(key, **of, **sizes))
    return make(fields, lanes * draw(st.integers(1, 1 << 30)), lanes, grouped=draw(st.sampled_from([0, 64])))


@settings(max_examples=60)
@given(schemas_with_ragged_fields())
def test_decode_undoes_encode(schema):
    schema.validate()
    raw = encode_store(schema)
    assert decode_store(raw, "store.json") == schema
    assert encode_store(decode_store(raw, "store.json")) == raw
    assert first_fingerprints(schema, raw)[0] == first_fingerprints(decode_store(raw, "store.json"), raw)[0]
    saved = encode(schema)  # of rows that are saved, which does not say what lies together
    assert encode(decode(saved, "store.json")) == saved
    assert json.loads(raw)["version"] == json.loads(saved)["version"] == [2, 5]
    assert not is_earlier(raw)


@settings(max_examples=60)
@given(schemas_with_ragged_fields())
def test_sizes_are_those_of_rings_and_spans(schema):
    ragged = {n: field.ragged for n, field in enumerate(schema.fields) if field.ragged is not None}
    assert schema.values_bytes == {
        n: schema.lanes * it.items * math.prod(it.shape) * DTYPES[it.dtype] for n, it in ragged.items()
    }
    groups = {group.leader: (group.items, group.members) for group in schema.ragged_groups}
    assert groups == {
        n: (it.items, (n, *(m for m, other in ragged.items() if other.like == n)))
        for n, it in ragged.items()
        if it.like == -1
    }
    for n, field in enumerate(schema.fields):
        expected = 0 if n in ragged and n not in groups else 12 if n in ragged else field.row_bytes
        assert field.row_bytes == expected
    assert schema.nbytes == schema.capacity * schema.row_bytes + sum(schema.values_bytes.values())


def test_the_text_of_a_description():
    assert json.loads(encode_store(make(FIELDS[:4])))["fields"] == [
        {"key": ["tokens"], "dtype": "int32", "shape": [3], "ragged": {"dtype": "int32", "max_length": 100, "items": 400}},
        {"key": ["reward"], "dtype": "float32", "shape": []},
        {
            "key": ["log_prob"],
            "dtype": "uint8",
            "shape": [0],
            "ragged": {"dtype": "float32", "max_length": 100, "items": 400, "like": 0},
        },
        {
            "key": ["text"],
            "dtype": "int32",
            "shape": [3],
            "ragged": {"dtype": "uint8", "max_length": 5, "items": 6, "kind": "utf-8"},
        },
    ]  # fmt: skip


def test_a_description_without_ragged_fields_has_the_version_of_before():
    # A key of that name is no ragged field.
    schema = make((Field(("ragged",), "float32", ()), Field(('"ragged":{',), "float32", ())))
    assert json.loads(encode_store(schema))["version"] == [2, 4]
    assert json.loads(encode(schema))["version"] == [2, 0]


def test_added_fields_lie_behind_ragged_ones():
    schema = make().grown(Field(("more",), "int16", (2,)), b"\1\0\1\0")
    assert decode_store(encode_store(schema), "store.json") == schema
    assert schema.until(5) == make()
    with pytest.raises(ValueError, match=r"field more: a ragged field cannot be added"):
        make().grown(leader("more"), bytes(12))


# ---- refused ---------------------------------------------------------------------------------------------------------

GOOD = json.loads(encode_store(make()))


def with_field(number, **changes):
    fields = [*GOOD["fields"]]
    fields[number] = {**fields[number], **changes}
    return json.dumps({**GOOD, "fields": fields}).encode()


def with_items(number, **changes):
    return with_field(number, ragged={**GOOD["fields"][number]["ragged"], **changes})


def without(number, name):
    return with_field(number, ragged={k: v for k, v in GOOD["fields"][number]["ragged"].items() if k != name})


HOSTILE = {
    "version 2.0": json.dumps({**GOOD, "version": [2, 0]}).encode(),
    "version 2.2": json.dumps({**GOOD, "version": [2, 2]}).encode(),
    "version 2.3": json.dumps({**GOOD, "version": [2, 3]}).encode(),
    "version 2.4": json.dumps({**GOOD, "version": [2, 4]}).encode(),
    "version 2.4, and in one piece": encode_store(make()).replace(b"[2,5]", b"[2,4]"),
    "version 2.5 without ragged fields": encode_store(make(FIELDS[1:2])).replace(b"[2,4]", b"[2,5]"),
    "null": with_field(1, ragged=None),
    "a list": with_field(1, ragged=[]),
    "an empty object": with_field(1, ragged={}),
    "a field that is not": with_field(1, ragged={"dtype": "int32", "max_length": 100, "items": 400}),
    "unknown entry": with_items(0, ring=3),
    "no dtype": without(0, "dtype"),
    "no items": without(0, "items"),
    "no max_length": without(0, "max_length"),
    "what is so without it: shape": with_items(0, shape=[]),
    "what is so without it: like": with_items(0, like=-1),
    "what is so without it: kind": with_items(0, kind=""),
    "unknown dtype": with_items(0, dtype="utf-8"),
    "dtype that is a name in torch": with_items(0, dtype="load"),
    "unknown kind": with_items(3, kind="utf-16"),
    "kind null": with_items(3, kind=None),
    "text of int8": with_items(3, dtype="int8"),
    "text with a shape": with_items(3, shape=[2]),
    "text of int32": with_items(0, kind="json"),
    "items without bytes": with_items(0, shape=[2, 0]),
    "negative shape": with_items(0, shape=[-1]),
    "33 dimensions": with_items(0, shape=[1] * 33),
    "huge shape": with_items(0, shape=[1 << 60]),
    "shape that overflows": with_items(0, shape=[1 << 32, 1 << 32]),
    "shape beyond int64": with_items(0, shape=[1 << 64]),
    "bool in a shape": with_items(0, shape=[True]),
    "no items of a row": with_items(0, max_length=0),
    "negative length": with_items(0, max_length=-1),
    "length beyond 31 bits": with_items(0, max_length=1 << 31),
    "length beyond int64": with_items(0, max_length=1 << 80),
    "length as text": with_items(0, max_length="100"),
    "length as a fraction": with_items(0, max_length=1.5),
    "ring of nothing": with_items(0, items=0),
    "negative ring": with_items(0, items=-400),
    "ring beyond int64": with_items(0, items=1 << 80),
    "ring of 2^48 items": with_items(0, items=1 << 48),
    "rings whose bytes overflow": with_items(3, items=(1 << 48) - 1, shape=[1 << 14], kind="", dtype="int8"),
    "65 groups": encode_store(make([leader(str(n)) for n in range(65)])),
    "follower of itself": with_items(2, like=2),
    "follower before its leader": with_items(2, like=3),
    "follower of a follower": with_items(4, like=2),
    "follower of a fixed field": with_items(2, like=1),
    "follower of no field": with_items(2, like=9),
    "follower of field -2": with_items(2, like=-2),
    "follower with another ring": with_items(2, items=401),
    "follower with another length": with_items(2, max_length=99),
    "leader with the column of a follower": with_field(0, dtype="uint8", shape=[0]),
    "leader with a wider column": with_field(0, shape=[4]),
    "leader with an unsigned column": with_field(0, dtype="uint32"),
    "follower with the column of a leader": with_field(2, dtype="int32", shape=[3]),
    "follower with a column": with_field(2, shape=[1]),
    "with columns": json.dumps({**GOOD, "lanes": 1, "columns": [3]}).encode(),
    "added": json.dumps({**GOOD, "added": ["000000000000000000000000"]}).encode(),
    "entry twice": encode_store(make()).replace(b'"items":400', b'"items":400,"items":400', 1),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_hostile_descriptions_are_refused(raw):
    with pytest.raises(CorruptStore, match=r"^some/store\.json: "):
        decode_store(raw, "some/store.json")


def test_newer_versions_are_incompatible():
    with pytest.raises(IncompatibleStore, match=r"expected format 2\.6, got 2\.7\. A newer engram wrote it"):
        decode_store(json.dumps({**GOOD, "version": [2, 7]}).encode(), "store.json")


@pytest.mark.parametrize(
    ("field", "says"),
    [
        (leader("a", items=-1), "field a: a lane of -1 items"),
        (leader("a", max_length=1 << 31), r"field a: 2147483648 items of a row, at least 1 and below 2\^31 are possible"),
        (leader("a", dtype="text"), "field a: items of the unknown dtype text"),
        (leader("a", kind="utf-16"), "field a: items of kind 'utf-16'"),
        (leader("a", items=1 << 47, shape=(1 << 13,)), "field a: 3 lanes of 140737488355328 items are too many"),
        (follower("a", 0), "field a: like field 0, which is no leader before it"),
        (Field(("a",), "int32", (2,), leader("a").ragged), r"field a: its column is to be shape \[3\] int32"),
    ],
)  # fmt: skip
def test_validate_says_what_is_wrong(field, says):
    with pytest.raises(ValueError, match=says):
        make([field]).validate()


def places(tree, path=()):
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([path for path in places(GOOD) if "fields" in path]), values)
def test_random_values_in_any_place_raise_nothing_else(path, value):
    tree = json.loads(encode_store(make()))
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    try:
        schema = decode_store(json.dumps(tree).encode("utf-8", "surrogatepass"), "store.json")
    except (CorruptStore, IncompatibleStore):
        return
    schema.validate()
    assert decode_store(encode_store(schema), "store.json") == schema


# ---- what differs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "says"),
    [
        (leader("tokens", max_length=99), "got ragged shape [] int32, at most 99 a row and 400 a lane"),
        (leader("tokens", items=401), "got ragged shape [] int32, at most 100 a row and 401 a lane"),
        (leader("tokens", shape=(2,)), "got ragged shape [2] int32, at most 100 a row and 400 a lane"),
        (leader("tokens", dtype="uint8", kind="json"), "got ragged json, at most 100 a row and 400 a lane"),
        (Field(("tokens",), "int32", (3,)), "got shape [3] int32"),
    ],
)
def test_what_differs_is_said(field, says):
    one, other = make(FIELDS[:2]), make([field, FIELDS[1]])
    expected = "field tokens: expected ragged shape [] int32, at most 100 a row and 400 a lane, " + says
    assert expected in differences(one, other)
    assert differences(one, one) == ""


def test_what_differs_of_followers_is_said():
    alone = make([FIELDS[0], leader("log_prob", dtype="float32")])
    assert differences(make([FIELDS[0], follower("log_prob", 0)]), alone) == (
        "field log_prob: expected ragged shape [] float32, at most 100 a row and 400 a lane, like field 0, "
        "got ragged shape [] float32, at most 100 a row and 400 a lane"
    )


# ---- where the files are ---------------------------------------------------------------------------------------------


def test_files_lie_beside_those_of_fixed_fields(tmp_path):
    hidden = tmp_path / ".engram" / "ragged"
    found = {n: place for n, place in layout.row_files(tmp_path, make()).items() if place[1]}
    assert found == {0: (hidden / "0.spans", 12), 1: (tmp_path / "reward.memmap", 4), 3: (hidden / "3.spans", 12)}
    assert layout.values_files(tmp_path, make()) == {
        0: (hidden / "0.values", 3 * 400 * 4),
        2: (hidden / "2.values", 3 * 400 * 4),
        3: (hidden / "3.values", 3 * 6),
        4: (hidden / "4.values", 3 * 400 * 12),
    }
    assert layout.ragged_control(tmp_path) == hidden / "control"
    metas = layout.meta_files(tmp_path, make())
    assert {key for key in json.loads(metas[tmp_path / "meta.json"]) if key in [f.key[0] for f in FIELDS]} == {"reward"}


def test_spans_are_not_grouped(tmp_path):
    fields = (*FIELDS, Field(("done",), "bool", ()))
    schema = make(fields, grouped=64)
    group = layout.group_of(schema)
    assert list(group.offsets) == [1, 5]
    assert layout.row_files(tmp_path, schema)[0] == (tmp_path / ".engram" / "ragged" / "0.spans", 12)


def test_keys_of_ragged_fields_are_no_file_names():
    long = leader("k" * 255)
    assert layout.clash([long, Field(("a",), "bool", ())]) is None
    assert layout.clash([leader("a"), Field(("a.memmap", "b"), "bool", ())]) is None
