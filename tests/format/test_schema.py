import itertools
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engram.errors import CorruptStore, IncompatibleStore
from engram.format.schema import (
    DTYPES,
    Field,
    Node,
    PartField,
    Schema,
    decode,
    differences,
    encode,
    field_differences,
    fingerprint,
    key_differences,
)

LEAF = Node("leaf", field=0)


def make(**changes):
    given = {
        "capacity": 12,
        "lanes": 3,
        "columns": (),
        "fields": (Field(("a",), "float32", (2,)), Field(("next", "b"), "bool", ())),
        "structure": Node(
            "dict", children={"a": LEAF, "next": Node("tensordict", children={"b": Node("leaf", field=1)})}
        ),
    }
    return Schema(**{**given, **changes})


def edited(**changes):
    """JSON of a good schema with some of its top-level entries replaced."""
    return json.dumps({**json.loads(encode(make())), **changes}).encode()


# ---- there and back --------------------------------------------------------------------------------------------------

keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(lambda key: key != ".engram")
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def structures(draw, fields, path=(), depth=0):
    """A node, whose leaves are appended to ``fields``."""
    kinds = ["leaf"] * 2 + (["tensordict", "tensorclass", "dict", "tuple", "list", "namedtuple"] if depth < 3 else [])
    kind = draw(st.sampled_from(kinds)) if path else draw(st.sampled_from(kinds[2:]))
    if kind == "leaf":
        fields.append(Field(path, draw(st.sampled_from(sorted(DTYPES))), draw(shapes)))
        return Node("leaf", field=len(fields) - 1)
    if kind in ("tuple", "list"):
        names = [str(i) for i in range(draw(st.integers(1, 3)))]
    else:
        names = draw(st.lists(keys, min_size=1, max_size=3, unique=True))
    children = {name: draw(structures(fields, (*path, name), depth + 1)) for name in names}
    return Node(kind, children=children, type="m:C" if kind in ("tensorclass", "namedtuple") else "")


@st.composite
def all_schemas(draw):
    fields = []
    structure = draw(structures(fields))
    columns = draw(st.lists(st.integers(1, 4), max_size=2).map(tuple))
    lanes = 1 if columns else draw(st.integers(1, 5))
    width = lanes
    for c in columns:
        width *= c
    return Schema(width * draw(st.integers(1, 1 << 40)), lanes, columns, tuple(fields), structure)


@given(all_schemas())
def test_decode_undoes_encode(schema):
    raw = encode(schema)
    assert decode(raw, "store.json") == schema
    assert encode(decode(raw, "store.json")) == raw


@settings(max_examples=40)
@given(all_schemas(), all_schemas())
def test_fingerprints_tell_schemas_apart(one, other):
    assert (fingerprint(encode(one)) == fingerprint(encode(other))) == (one == other)


def test_fingerprint_is_xxh3_of_the_bytes():
    assert fingerprint(b"") == 0x2D06800538D394C2  # the published test vector
    assert 0 <= fingerprint(b"x") < 1 << 64


def test_order_of_entries_survives():
    for order in itertools.permutations(["z", "a", "m"]):
        fields = tuple(Field((key,), "bool", ()) for key in order)
        node = Node("dict", children={key: Node("leaf", field=i) for i, key in enumerate(order)})
        schema = decode(encode(make(fields=fields, structure=node)), "store.json")
        assert list(schema.structure.children) == list(order)


def test_names_and_sizes():
    assert Field(("a",), "bool", ()).name == "a"
    assert Field(("next", "b"), "bool", ()).name == "('next', 'b')"
    assert Field(("a",), "complex128", (2, 3)).row_bytes == 96
    assert Field(("a",), "int64", (2, 0)).row_bytes == 0
    assert make().row_bytes == 9


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_has_torchs_size(dtype):
    import torch

    assert getattr(torch, dtype).itemsize == DTYPES[dtype]


# ---- refused: damaged and hostile ------------------------------------------------------------------------------------


def nested(depth):
    """A structure that is ``depth`` containers deep, as text: json itself may not be able to write it."""
    opened = '{"kind":"dict","children":{"a":' * depth
    structure = opened + '{"kind":"leaf","field":0}' + "}}" * depth
    raw = edited(structure=0, fields=[{"key": ["a"], "dtype": "bool", "shape": []}])
    return raw.replace(b'"structure": 0', b'"structure": ' + structure.encode())


GOOD = json.loads(encode(make()))
FIELD = GOOD["fields"][0]
LEAVES = {"kind": "leaf", "field": 0}


def with_field(**changes):
    return edited(fields=[{**FIELD, **changes}, GOOD["fields"][1]])


HOSTILE = {
    "empty": b"",
    "not JSON": b"\x80\x04\x95",
    "cut": encode(make())[:-1],
    "more behind it": encode(make()) + b"{}",
    "not an object": b"[1, 0]",
    "a number": b"7",
    "null": b"null",
    "not UTF-8": encode(make()).replace(b"float32", b"float\xff2"),
    "UTF-16": encode(make()).decode().encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + encode(make()),
    "key twice": encode(make())[:-1] + b',"capacity":12}',
    "key twice, deep": encode(make()).replace(b'"dtype":"bool"', b'"dtype":"bool","dtype":"bool"'),
    "NaN": edited(capacity=float("nan")),
    "infinity": edited(lanes=float("inf")),
    "minus infinity": edited(lanes=float("-inf")),
    "float for int": edited(capacity=12.5),
    "bool for int": edited(lanes=True),
    "bool in a shape": with_field(shape=[True]),
    "bool for a field number": edited(structure={"kind": "leaf", "field": False}, fields=[FIELD]),
    "string for int": edited(capacity="12"),
    "null for int": edited(capacity=None),
    "capacity 0": edited(capacity=0),
    "negative capacity": edited(capacity=-12),
    "capacity no multiple of lanes": edited(capacity=13),
    "lanes 0": edited(lanes=0),
    "negative lanes": edited(lanes=-3),
    "more lanes than the limit": edited(capacity=1 << 21, lanes=1 << 21),
    "lanes beside columns": edited(columns=[4]),
    "column 0": edited(lanes=1, columns=[0]),
    "negative columns": edited(lanes=1, columns=[-2, -6]),
    "capacity no multiple of columns": edited(lanes=1, columns=[5]),
    "capacity beyond int64": edited(capacity=3 * 10**30),
    "capacity and lanes beyond int64": edited(capacity=10**30, lanes=10**30),
    "ticket bytes beyond int64": edited(capacity=3 << 60),
    "number of 100,000 digits": encode(make()).replace(b'"capacity":12', b'"capacity":' + b"1" * 100_000),
    "negative shape": with_field(shape=[-1]),
    "huge shape": with_field(shape=[1 << 62]),
    "shape that overflows": with_field(shape=[1 << 32, 1 << 32]),
    "shape that overflows beside a zero": with_field(shape=[0, 1 << 61, 1 << 61]),
    "shape beyond int64": with_field(shape=[0, 1 << 64]),
    "33 dimensions": with_field(shape=[1] * 33),
    "unknown dtype": with_field(dtype="float8_e8m0fnu"),
    "dtype that is a name in torch": with_field(dtype="load"),
    "no dtype": edited(fields=[{"key": ["a"], "shape": []}, GOOD["fields"][1]]),
    "no key parts": with_field(key=[]),
    "key of 17 parts": with_field(key=["a"] * 17),
    "key part too long": with_field(key=["é" * 128]),
    "key .engram": with_field(key=["next", ".engram"]),
    "key that is no Unicode": with_field(key=["\ud800"]),
    "key that only surrogateescape writes": with_field(key=["\udc80"]),
    "key string": with_field(key="a"),
    "field twice": edited(fields=[FIELD, FIELD]),
    "unknown entry": edited(more=1),
    "unknown entry of a field": with_field(path="/etc/passwd"),
    "missing entry": json.dumps({k: v for k, v in GOOD.items() if k != "structure"}).encode(),
    "tensorclass without a class": edited(structure={**GOOD["structure"], "kind": "tensorclass"}),
    "dict with a class": edited(structure={**GOOD["structure"], "type": "os:stat_result"}),
    "batch of a dict": edited(structure={**GOOD["structure"], "batch": [2]}),
    "another format": edited(format="safetensors"),
    "version of one number": edited(version=[1]),
    "version string": edited(version="1.0"),
    "version bool": edited(version=[True, False]),
    "version with a negative minor": edited(version=[1, -1]),
    "no version": json.dumps({k: v for k, v in GOOD.items() if k != "version"}).encode(),
    "unknown kind": edited(structure={"kind": "set"}),
    "field that does not exist": edited(structure={**LEAVES, "field": 2}),
    "negative field": edited(structure={**LEAVES, "field": -1}),
    "field named twice": edited(structure={"kind": "tuple", "children": {"0": LEAVES, "1": LEAVES}}),
    "field not named": edited(structure=LEAVES),
    "leaf with children": edited(
        structure={"kind": "leaf", "field": 0, "children": {"next": {"kind": "leaf", "field": 1}}}
    ),
    "sequence out of order": edited(
        structure={"kind": "tuple", "children": {"1": LEAVES, "0": {**LEAVES, "field": 1}}}
    ),
    "leaf elsewhere than its key says": edited(
        structure={"kind": "dict", "children": {"b": LEAVES, "next": GOOD["structure"]["children"]["next"]}}
    ),
    "batch that the leaves do not have": edited(
        structure={
            **GOOD["structure"],
            "children": {**GOOD["structure"]["children"], "a": LEAVES},
            "kind": "tensordict",
        }
        | {"batch": [3]}
    ),
    "negative batch": edited(structure={**GOOD["structure"], "kind": "tensordict", "batch": [-2]}),
    "no fields": edited(fields=[], structure={"kind": "dict"}),
    "more than 1 MiB": encode(make()) + b" " * (1 << 20),
    **{f"{depth} deep": nested(depth) for depth in (17, 40, 150, 300, 400, 499, 1_000, 10_000)},
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_hostile_descriptions_are_refused(raw):
    with pytest.raises(CorruptStore, match=r"^some/store\.json: "):
        decode(raw, "some/store.json")


def test_sixteen_levels_and_255_bytes_are_possible():
    path = (*"a" * 15, "é" * 127)
    structure = LEAF
    for name in reversed(path):
        structure = Node("dict", children={name: structure})
    schema = make(fields=(Field(path, "bool", (1,) * 32),), structure=structure)
    assert decode(encode(schema), "store.json") == schema


@pytest.mark.parametrize("version", [[2, 1], [1, 0], [1, 9], [0, 9], [1 << 40, 0]])
def test_other_versions_are_incompatible_whatever_else_they_hold(version):
    with pytest.raises(
        IncompatibleStore, match=rf"store\.json: expected format 2\.0, got {version[0]}\.{version[1]}\. "
    ):
        decode(edited(version=version, surprise={"new": [1.5, None]}), "store.json")


RAW = encode(make())


@given(st.data())
def test_random_changes_of_a_description_raise_nothing_else(data):
    raw = bytearray(RAW)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        match data.draw(st.sampled_from(["byte", "insert", "delete", "repeat"])):
            case "byte":
                raw[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "insert":
                raw[at:at] = data.draw(
                    st.sampled_from([b"-", b"0", b"99", b"1e9", b"null", b"[", b"}", b'"', b"\\u0000"])
                )
            case "delete":
                del raw[at : at + data.draw(st.integers(1, 9))]
            case _:
                end = min(len(raw), at + data.draw(st.integers(1, 30)))
                raw[at:at] = raw[at:end]
    check_only_typed_errors(bytes(raw))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def places(tree, path=()):
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


@given(st.sampled_from(list(places(GOOD))[1:]), values)
@example(("fields", 0, "shape"), [0, 1 << 62])
@example(("structure", "children", "a"), {"kind": "leaf", "field": 0, "batch": [7]})
def test_random_values_in_any_place_raise_nothing_else(path, value):
    tree = json.loads(RAW)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    check_only_typed_errors(json.dumps(tree).encode("utf-8", "surrogatepass"))


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(raw):
    check_only_typed_errors(raw)


def check_only_typed_errors(raw):
    try:
        schema = decode(raw, "store.json")
    except (CorruptStore, IncompatibleStore):
        return
    schema.validate()
    assert decode(encode(schema), "store.json") == schema


# ---- refused: what a program may not make ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"capacity": 13}, "capacity 13 is not a positive multiple of 3 lanes"),
        ({"lanes": 0}, "capacity 12 is not a positive multiple of 0 lanes"),
        ({"lanes": 1, "columns": (5,)}, "capacity 12 is not a multiple of the columns"),
        ({"fields": (Field(("a",), "float8_e8m0fnu", ()),)}, "field a: unknown dtype float8_e8m0fnu"),
        ({"fields": (Field(("a", ".engram"), "bool", ()),)}, r"'\.engram' is reserved.* Rename the key"),
        ({"fields": (Field(("a", "b" * 256), "bool", ()),)}, "a key of 256 bytes, at most 255 are possible"),
        ({"fields": (Field(("a\udc80",), "bool", ()),)}, "not valid Unicode"),
        ({"fields": (Field(("a",) * 17, "bool", ()),)}, "nested 17 deep, at most 16 levels"),
        ({"fields": (Field(("a",), "bool", (-1,)),)}, r"field a: impossible shape \[-1\]"),
        ({"fields": (Field(("a",), "int8", (1 << 59,)),)}, "field a: 12 rows of 576460752303423488 bytes are too many"),
        (
            {"fields": tuple(Field((str(i),), "bool", ()) for i in range(4097)), "structure": LEAF},
            "4097 fields, at least 1 and at most 4096 are possible",
        ),
    ],
)
def test_validate_says_what_is_wrong(changes, says):
    with pytest.raises(ValueError, match=says):
        make(**changes).validate()


def test_schemas_are_frozen():
    with pytest.raises(AttributeError):
        make().capacity = 3
    assert make() == make()
    assert hash(Field(("a",), "bool", ())) == hash(Field(("a",), "bool", ()))


# ---- what differs ----------------------------------------------------------------------------------------------------

NAMES = [f"f{i}" for i in range(8)]
some_fields = st.dictionaries(
    st.sampled_from(NAMES),
    st.tuples(st.sampled_from(["float32", "int64"]), st.sampled_from([(), (3,), (4,)])),
    min_size=1,
)


def of_fields(told, capacity, lanes, kind):
    fields = tuple(Field((name,), *said) for name, said in told.items())
    children = {name: Node("leaf", field=i) for i, name in enumerate(told)}
    return make(capacity=capacity, lanes=lanes, fields=fields, structure=Node(kind, children=children))


@given(
    some_fields, some_fields, st.data(), st.lists(st.sampled_from([12, 24]), min_size=2, max_size=2),
    st.lists(st.sampled_from(["dict", "tensordict"]), min_size=2, max_size=2),
)  # fmt: skip
def test_what_differs_is_named_and_nothing_else(ours, theirs, data, capacities, kinds):
    if data.draw(st.booleans()):  # about the same fields, perhaps in another order
        changed = {name: theirs.get(name, said) for name, said in ours.items()}
        theirs = {name: changed[name] for name in data.draw(st.permutations(list(ours)))}
    one, other = (
        of_fields(told, capacity, 3, kind)
        for told, capacity, kind in zip((ours, theirs), capacities, kinds, strict=True)
    )
    text = differences(one, other)
    assert (text == "") == (encode(one) == encode(other))
    assert len(text) < 500

    wrong = {
        "missing": [name for name in ours if name not in theirs],
        "unknown": [name for name in theirs if name not in ours],
        "field": [name for name in ours if theirs.get(name, ours[name]) != ours[name]],
    }
    parts = text.split("; ")
    for what, names in wrong.items():
        shown = re.findall(r"f\d", " ".join(part.partition(":")[0] for part in parts if part.startswith(f"{what} ")))
        assert shown == names[:3], what
        left = len(names) - len(shown)
        if what != "field":
            assert (f"{what} [{', '.join(map(repr, shown))}]" + f" and {left} more" * (left > 0) in parts) == bool(
                names
            )
        elif left:
            assert f"{left} more fields" in parts
    for name in wrong["field"][:3]:
        (dtype, shape), (dtype_there, shape_there) = ours[name], theirs[name]
        assert (
            f"field {name}: expected shape {list(shape)} {dtype}, got shape {list(shape_there)} {dtype_there}" in parts
        )
    assert ("capacity: expected" in text) == (capacities[0] != capacities[1])
    if not any(wrong.values()):
        if list(ours) != list(theirs):
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            assert f"fields in another order: expected {[*ours][at]} where {[*theirs][at]} is" in parts
        elif kinds[0] != kinds[1] and capacities[0] == capacities[1]:
            assert text == f"data: kind: expected {kinds[0]}, got {kinds[1]}"


@given(all_schemas(), all_schemas())
@settings(max_examples=50)
def test_a_schema_differs_from_all_but_itself(one, other):
    assert differences(one, one) == ""
    assert differences(one, decode(encode(one), "here")) == ""
    assert (differences(one, other) == "") == (encode(one) == encode(other))


LEAVES = {"a": LEAF, "b": Node("leaf", field=1)}
STRUCTURES = {
    "another batch": (Node("tensordict", children=LEAVES, batch=(2,)), "data: batch: expected [], got [2]"),
    "another class": (Node("tensorclass", children=LEAVES, type="m:C"), "data: kind: expected tensordict, got tensorclass"),
    "entries in another order": (
        Node("tensordict", children=dict(reversed(LEAVES.items()))),
        "data: entries in another order: expected a where b is",
    ),
    "an empty entry": (Node("tensordict", children={**LEAVES, "c": Node("dict")}), "data: unknown ['c']"),
}  # fmt: skip


@pytest.mark.parametrize("case", STRUCTURES)
def test_structures_of_the_same_fields(case):
    structure, says = STRUCTURES[case]
    fields = (Field(("a",), "float32", (2,)), Field(("b",), "float32", (2,)))
    one = make(fields=fields, structure=Node("tensordict", children=LEAVES))
    assert differences(one, make(fields=fields, structure=structure)) == says


def test_long_keys_and_many_fields_make_no_long_text():
    fields = [Field((letter * 255,) * 16, "float32", (1,) * 32) for letter in "abcdefgh"]
    others = [Field(field.key, "int64", field.shape) for field in fields]
    strangers = [Field(("z", *field.key[1:]), "int64", field.shape) for field in fields]
    for got in (others, strangers, others[:4] + strangers[:4]):
        assert 0 < len("; ".join(field_differences(fields, got))) < 2000
    assert field_differences([PartField(0, ("a",), "int64", (), "env_id")], [PartField(0, ("a",), "int64", ())]) == [
        "field a: expected shape [] int64 as env_id, got shape [] int64"
    ]
    assert key_differences(["a", "b"], ["b", "c"]) == "missing ['a'], unknown ['c']"
    assert key_differences(["a", "b"], ["b", "a"]) == ""
