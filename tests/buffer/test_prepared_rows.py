"""Rows with items that the core takes as they are handed over: they hold what the long way through Python makes them hold.

That way is taken by a twin, whose structure has no intake: the same rows go to both, good and bad ones, and both must hold the same bytes
afterwards, or have raised the same error. What good rows hold is also compared with what was handed over.
"""

import gc
import random
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, Ragged, ReplayBuffer, TensorDictReplayBuffer

MOST = 6
RAGGED = {
    "tokens": Ragged(torch.int32, max_length=MOST),
    "log_prob": Ragged(torch.float32, like="tokens"),
    ("next", "boxes"): Ragged(torch.float64, max_length=3, shape=(2,)),
    "text": Ragged("utf-8", max_length=9),
    "raw": Ragged("bytes", max_length=9),
}
DTYPES = {"tokens": torch.int32, "log_prob": torch.float32, "boxes": torch.float64}
SHAPES = {"boxes": (2,)}


def good_row(n, boxes=1, text="hé", raw=b"\0x"):
    """A row whose every value goes the short way."""
    return {
        "tokens": torch.arange(n, dtype=torch.int32),
        "log_prob": torch.arange(n) / 4,
        "prompt": torch.tensor([1, 2]),
        "reward": 0.5,
        "next": {"boxes": torch.ones(boxes, 2, dtype=torch.float64), "done": False},
        "text": text,
        "raw": raw,
    }


def made(storage=LazyTensorStorage, **options):
    rb = ReplayBuffer(storage=storage(80, ragged=RAGGED, ragged_bytes=1e5, open_rows=3, **options), batch_size=2)
    rb.add(good_row(1))
    return rb


def by_python(rb):
    """The buffer, which takes the long way from now on."""
    vars(rb.storage.structure)["intake"] = None
    return rb


def raw_of(leaf):
    """Dtype, shape and bytes."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return leaf


def content(rb):
    """All rows, to the bit."""
    return [
        {key: raw_of(leaf) for key, leaf in [*row.items(), *row["next"].items()] if key != "next"}
        for row in map(rb.__getitem__, range(len(rb)))
    ]


def outcome(call):
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - that both raise the same is what is tested
        return type(error), str(error)


def numbers(draw, name, length):
    """Items of a field, in many forms; some that it refuses."""
    shape, dtype = (length, *SHAPES.get(name, ())), DTYPES[name]
    values = (torch.arange(int(np.prod(shape))) % 5).reshape(shape).to(dtype)
    other = torch.int64 if dtype is not torch.int64 else torch.int32
    forms = {
        "tensor": values,
        "array": values.numpy(),
        "list": values.tolist(),
        "strided": torch.stack([values, values], -1)[..., 0],
        "strided array": np.repeat(values.numpy(), 2, 0)[::2],
        "backwards": values.numpy()[::-1],
        "big endian": values.numpy().astype(values.numpy().dtype.newbyteorder(">")),
        "parameter": torch.nn.Parameter(values.clone()) if dtype.is_floating_point else values,
        "with gradient": (values * 1.0).requires_grad_() if dtype.is_floating_point else values,
        "other dtype": values.to(other),
        "other array": values.numpy().astype(np.int16),
        "transposed": values.reshape(1, -1),
        "number": 3,
        "scalar": torch.tensor(3, dtype=dtype),
        "tuple": tuple(values.tolist()),
        "bools": [True] * length,
        "large": [2**62 + 2**38 + 1] * length,
        "infinite": [1e300] * length,
        "none": None,
        "nones": [None] * length,
        "text": "x" * length,
        "nested": torch.nested.nested_tensor([values], layout=torch.jagged) if length else values,
        "meta": values.to("meta"),
    }
    return forms[draw.choice(sorted(forms))]


TEXTS = ["", "hé", "x" * 9, "x" * 10, "\ud800", b"no", 3, None, ["a"], np.str_("np")]
RAWS = [b"", b"\0\xff", b"x" * 9, b"x" * 10, bytearray(b"ab"), memoryview(b"cd"), "no", None]
PROMPTS = [
    torch.tensor([3, 4]),
    np.array([5, 6]),
    [7, 8],
    np.arange(4)[::2],
    torch.tensor([1.0, 2.0]),
    torch.tensor([1]),
    [1, 2.5],
    2,
    None,
]
LARGE = 2**60 + 2**36 + 1  # which float32 rounds in another way if it was rounded to float64 before
REWARDS = [1, 0.25, np.float64(3), np.int8(4), torch.tensor(2.0), True, 1e300, LARGE, "no", [1.0]]
WHICH = ("tokens", "log_prob", "boxes", "text", "raw", "prompt", "reward", "missing", "extra")


def row_of(draw):
    """A row with at most two values that are bad or unusual."""
    n, boxes = draw.randrange(4), draw.randrange(4)
    row = good_row(n, boxes)
    for which in draw.sample(WHICH, draw.randrange(3)):
        match which:
            case "boxes":
                row["next"]["boxes"] = numbers(draw, which, draw.randrange(5))
            case "tokens" | "log_prob":
                row[which] = numbers(draw, which, draw.choice((n, n, draw.randrange(MOST + 2))))
            case "missing":
                row.pop(draw.choice(("tokens", "text", "prompt", "reward")), None)
            case "extra":
                row["extra"] = torch.tensor(1)
            case _:
                row[which] = draw.choice({"text": TEXTS, "raw": RAWS, "prompt": PROMPTS, "reward": REWARDS}[which])
    return row


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_those_of_the_long_way(seed):
    draw = random.Random(seed)
    short, long = made(), by_python(made())
    for _ in range(60):
        row = row_of(draw)
        assert outcome(lambda row=row: short.add(row)) == outcome(lambda row=row: long.add(row)), row
    assert content(short) == content(long)


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_grow_are_those_of_the_long_way(seed):
    draw = random.Random(seed)
    short, long = made(), by_python(made())
    for _ in range(40):
        row, cut, by_name = row_of(draw), draw.randrange(4), draw.random() < 0.5
        assert grown(short, row, cut, by_name) == grown(long, row, cut, by_name), row
        for rb in (short, long):
            (left,) = rb.unsealed() or (None,)
            if left is not None:
                left.discard()
    assert content(short) == content(long)


def grown(rb, row, cut, by_name):
    """What happens to a row that is opened with some fields, appended to twice and sealed with the others."""
    items = {key: row[key] for key in ("tokens", "log_prob", "text", "raw") if key in row}
    boxes, done = row["next"]["boxes"], row["next"]["done"]
    growing = outcome(lambda: rb.open_row({key: row[key] for key in ("prompt", "extra") if key in row}))
    if isinstance(growing, tuple):
        return growing
    steps = []
    for part, of_boxes in (
        ({k: first(v, cut) for k, v in items.items()}, boxes),
        ({k: rest(v, cut) for k, v in items.items()}, None),
    ):
        nested = {} if of_boxes is None else {"next": {"boxes": of_boxes}}
        steps.append(
            outcome(lambda p=part, n=nested: growing.append(n or None, **p) if by_name else growing.append(p | n))
        )
        steps.append(growing.lengths)
    late = {"reward": row["reward"]} if "reward" in row else {}
    sealed = {("next", "done"): done} if by_name else {"next": {"done": done}}
    return steps, outcome(lambda: growing.seal(sealed, **late) if by_name else growing.seal(sealed | late))


def first(value, cut):
    plain = isinstance(value, (list, tuple, np.ndarray)) or (isinstance(value, torch.Tensor) and not value.is_nested)
    return value[:cut] if plain and len(getattr(value, "shape", (1,))) else value


def rest(value, cut):
    return value[cut:] if first(value, cut) is not value else value


def test_what_good_rows_hold():
    rb, row = made(), good_row(3, boxes=2, text="ab", raw=b"\xff")
    at = rb.add(row)
    growing = rb.open_row(prompt=row["prompt"])
    growing.append(tokens=row["tokens"][:1], log_prob=row["log_prob"][:1], text="a")
    growing.append({"tokens": row["tokens"][1:], "log_prob": row["log_prob"][1:], "text": "b", "raw": row["raw"]})
    grown_at = growing.seal({"next": row["next"]}, reward=row["reward"])
    for number in (at, grown_at):
        found = rb[number]
        assert torch.equal(found["next"]["boxes"], row["next"]["boxes"])
        assert all(torch.equal(found[key], row[key]) for key in ("tokens", "log_prob", "prompt"))
        assert (found["text"], found["raw"], float(found["reward"]), bool(found["next"]["done"])) == (
            "ab",
            b"\xff",
            0.5,
            False,
        )


def test_items_that_come_later_are_zeros():
    rb = made()
    row = rb.add(good_row(2) | {"log_prob": None})
    assert rb[row]["log_prob"].tolist() == [0, 0]


def test_the_short_way_is_taken(monkeypatch):
    """Of rows as people write them, in dicts and in TensorDicts: else the others test nothing."""
    rb = made()
    monkeypatch.setattr(rb.storage, "prepare", None)
    rb.add(good_row(2))
    monkeypatch.setattr(type(rb.storage.structure), "column", None)
    monkeypatch.setattr(type(rb.storage.structure), "items_in", None)
    growing = rb.open_row(prompt=[1, 2])
    growing.append(tokens=[1], log_prob=[0.5])
    assert rb[growing.seal({"next": {"done": True}, "reward": 1})]["tokens"].tolist() == [1]

    fields = {"tokens": RAGGED["tokens"], "log_prob": RAGGED["log_prob"]}
    tensordicts = TensorDictReplayBuffer(storage=LazyTensorStorage(10, ragged=fields), batch_size=2)
    row = TensorDict(
        {"tokens": torch.ones(2, dtype=torch.int32), "log_prob": torch.zeros(2), "reward": torch.tensor(1.0)}
    )
    tensordicts.add(row)
    monkeypatch.setattr(tensordicts.storage, "prepare", None)
    assert tensordicts.add(row) == 1


def test_a_caller_keeps_nothing_and_owes_nothing(tmp_path):
    """Neither good rows nor refused ones keep references, and later changes of the caller's memory change no row."""
    rb = made(LazyMemmapStorage, scratch_dir=str(tmp_path / "store"))
    row = good_row(3, text="aé" * 2, raw=b"raw" * 2)
    bad = row | {"log_prob": torch.zeros(2)}
    held = [row, bad, *row.values(), *row["next"].values()]
    before = [sys.getrefcount(it) for it in held]

    def write():
        for _ in range(50):
            rb.add(row)
            growing = rb.open_row(prompt=row["prompt"])
            growing.append(tokens=row["tokens"], log_prob=row["log_prob"], text=row["text"])
            growing.seal({"next": row["next"], "reward": row["reward"]})

    write()
    gc.collect()
    blocks = sys.getallocatedblocks()
    write()
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 50  # fewer than one for each row
    for _ in range(50):
        with pytest.raises(RuntimeError, match="lengths"):
            rb.add(bad)
    assert [sys.getrefcount(it) for it in held] == before
    at = rb.add(row)
    row["tokens"].fill_(-1)
    assert rb[at]["tokens"].tolist() == [0, 1, 2]


def test_a_refused_row_changes_nothing():
    rb = made()
    rb.add(good_row(3))
    known = content(rb)
    for bad, error in (
        (
            {"tokens": torch.zeros(MOST + 1, dtype=torch.int32), "log_prob": torch.zeros(MOST + 1)},
            "at most max_length=6",
        ),
        ({"log_prob": torch.zeros(2)}, "2"),
        ({"tokens": torch.zeros(3)}, "expected int32 items, got float32"),
        ({"text": "x" * 10}, "at most max_length=9"),
        ({"text": b"x"}, "expected strings"),
        ({"next": {"boxes": torch.zeros(1, 3, dtype=torch.float64), "done": False}}, "of shape"),
    ):
        with pytest.raises((RuntimeError, TypeError), match=error):
            rb.add(good_row(3) | bad)
    growing = rb.open_row()
    growing.append(tokens=[1] * 4)
    with pytest.raises(RuntimeError, match="got 4 and 3 more"):
        growing.append(tokens=[1] * 3)
    assert growing.lengths["tokens"] == 4
    assert content(rb) == known
