"""Ragged rows that are refused, and edits of those that are there."""

import copy
import pickle

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from engram import (
    LazyTensorStorage,
    Lifo,
    Ragged,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    WindowSpec,
)
from tests.storages import ragged_rows
from tests.storages.ragged_rows import nested, plain
from tests.storages.ragged_rows import text_of as TEXT  # noqa: N812 - of constants
from tests.storages.rows import reopened

# ---- what is refused -------------------------------------------------------------------------------------------------------


def unchanged(rb):
    """All that a refused call leaves as it is."""
    store = rb.storage.store
    return store.core.next_ticket, plain({k: v for k, v in rb[:].items() if k != "number"}), rb[:]["number"].tolist()


REFUSED = {
    "too long": (
        {"tokens": [torch.ones(13, dtype=torch.int32)] * 2},
        RuntimeError,
        "'tokens': .*max_length=12 items, got 13",
    ),
    "a text too long": ({"text": ["a", "b" * 41]}, RuntimeError, "'text': .*max_length=40 bytes, got 41 in row 1"),
    "lengths that differ": (
        {"log_prob": [torch.ones(1), torch.ones(2)]},
        RuntimeError,
        "'log_prob': expected the lengths of field 'tokens', which it shares: 0 items in row 0, got 1",
    ),
    "dtype": ({"tokens": [torch.ones(0), torch.ones(7)]}, RuntimeError, "expected int32 items, got float32"),
    "offsets": ({"tokens": (torch.ones(7, dtype=torch.int32), [1, 3, 7])}, ValueError, "begin at 0, got 1"),
    "two lists": ({"tokens": ([5, 6], [0, 2])}, TypeError, r"'tokens': .*tuple of two lists, .*\"values\""),
    "two rows": ({"tokens": ([5, 6], [7])}, TypeError, r"'tokens': .*tuple of two lists, .*\[row, row\]"),
    "rows": ({"text": ["a"]}, RuntimeError, "expected the same number of rows in every leaf, but .*'text' has 1"),
    "no text": ({"text": [b"a", "b"]}, TypeError, "'text': expected strings, got bytes"),
    "left out": ({"tokens": None}, KeyError, r"missing \['tokens'\]"),
}


@pytest.mark.parametrize(("change", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_writes_change_nothing(make, change, error, message):
    rb = ReplayBuffer(storage=make(6, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY))
    rb.extend(ragged_rows.rows(0, 2))
    before = unchanged(rb)
    data = {key: value for key, value in {**ragged_rows.rows(0, 2), **change}.items() if value is not None}
    with pytest.raises(error, match=message):
        rb.extend(data)
    assert unchanged(rb) == before
    storage = make(6, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY)
    with pytest.raises(error):
        ReplayBuffer(storage=storage).extend(data)
    assert not storage.initialized


def test_what_cannot_be_done_yet_is_refused_by_name(make):
    rb = ReplayBuffer(storage=make(6, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY))
    rb.extend(ragged_rows.rows(0, 3))
    before = unchanged(rb)
    with pytest.raises(RuntimeError, match="ragged"):
        rb.writer.write_at([1], ragged_rows.rows(0, 1))
    assert unchanged(rb) == before


# ---- edits ---------------------------------------------------------------------------------------------------------------


def test_rows_are_replaced_by_rows_of_the_same_length(make):
    rb = ReplayBuffer(storage=make(6, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY))
    rb.extend(ragged_rows.rows(0, 6))
    edited = ragged_rows.row(4)
    rb[4] = {**edited, "tokens": -edited["tokens"], "text": edited["text"][::-1], "number": 99}
    rb["log_prob"] = [torch.full((ragged_rows.length_of(number),), 0.5) for number in range(6)]
    rb.set_at_("text", ["ROW 2" + TEXT(2)[5:]], [2])
    for again in (False, True):
        rb = reopened(rb) if again else rb
        found = plain(rb[:])
        assert found["number"] == [0, 1, 2, 3, 99, 5]
        assert found["tokens"][4] == [-4] * ragged_rows.length_of(4)
        assert found["text"] == [TEXT(0), TEXT(1), "ROW 2" + TEXT(2)[5:], TEXT(3), TEXT(4)[::-1], TEXT(5)]
        assert found["log_prob"] == [[0.5] * ragged_rows.length_of(number) for number in range(6)]
        assert [found["tokens"][number] for number in (0, 1, 2, 3, 5)] == [
            [number] * ragged_rows.length_of(number) for number in (0, 1, 2, 3, 5)
        ]


def test_fields_come_later_to_the_rows_that_were_drawn(make):
    storage = make(6, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY)
    rb = ReplayBuffer(storage=storage, writer=RoundRobinWriter(track_generations=True))
    rb.extend({**ragged_rows.rows(0, 6), "log_prob": None, "reward": torch.zeros(6)})
    rows = torch.tensor([4, 2, 0])
    generation = rb.storage.tickets_of(rows)
    rb.add({**ragged_rows.row(6), "reward": 0.0})  # over row 0
    late = [torch.full((ragged_rows.length_of(number),), -float(number)) for number in (4, 2, 0)]
    for _ in range(2):  # the same handles go on
        patch = {"log_prob": late, "reward": torch.tensor([4.0, 2.0, 0.0])}
        result = rb.update_if_present(index=rows, generation=generation, patch=patch)
        assert result.updated.tolist() == [True, True, False]
        assert result.generation.tolist() == [*generation[:2].tolist(), -1]
    found = plain(rb[:])
    assert found["reward"] == [0.0, 0.0, 2.0, 0.0, 4.0, 0.0]
    given = {2: -2.0, 4: -4.0}
    assert found["log_prob"][1:] == [[given.get(n, 0.0)] * ragged_rows.length_of(n) for n in range(1, 6)]
    assert found["log_prob"][0] == [-6.0] * ragged_rows.length_of(6)
    assert found["number"] == [6, 1, 2, 3, 4, 5]


def test_edits_of_another_length_change_nothing(make):
    storage = make(6, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY)
    rb = ReplayBuffer(storage=storage, writer=RoundRobinWriter(track_generations=True))
    rb.extend(ragged_rows.rows(0, 3))
    before, rows = unchanged(rb), torch.tensor([0, 2])
    one = torch.ones(1, dtype=torch.int32)
    right = torch.ones(ragged_rows.length_of(2), dtype=torch.int32)
    same = [torch.ones(0, dtype=torch.int32), right]
    generation = rb.storage.tickets_of(rows)
    for error, message, call in (
        (
            ValueError,
            "edit: field tokens: expected 0 items, as row 0 has, got 7",
            lambda: rb.__setitem__(0, ragged_rows.row(1)),
        ),
        (ValueError, "field tokens: expected 0 items, as row 0 has, got 1", lambda: rb.set_at_("tokens", [one], [0])),
        (RuntimeError, "'tokens': expected 3 rows, got 2", lambda: rb.__setitem__("tokens", [one, one])),
        (RuntimeError, "'tokens': .*got float32", lambda: rb.set_at_("tokens", [one.float()], [0])),
        (
            ValueError,
            "field text: expected 6 items, as row 0 has, got 1",
            lambda: rb.update_if_present(
                index=rows, generation=generation, patch={"tokens": same, "text": ["a", "b"], "number": rows + 7}
            ),
        ),
        (
            ValueError,
            "'log_prob': expected the lengths of field 'tokens'",
            lambda: rb.update_if_present(
                index=rows, generation=generation, patch={"tokens": same, "log_prob": [torch.ones(1), right.float()]}
            ),
        ),
    ):
        with pytest.raises(error, match=message):
            call()
        assert unchanged(rb) == before


def test_fixed_fields_are_edited_and_added_as_ever(make):
    rb = ReplayBuffer(storage=make(6, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY))
    rb.extend({**ragged_rows.rows(0, 3), "reward": torch.zeros(3)})
    rb["reward"] = torch.tensor([1.0, 2.0, 3.0])
    rb.add_field("extra", torch.tensor(5), fill=5)
    assert rb[:]["reward"].tolist() == [1.0, 2.0, 3.0]
    assert rb[:]["extra"].tolist() == [5, 5, 5]
    assert ragged_rows.check(rb[:]) == [0, 1, 2]
    rb.add({**ragged_rows.row(3), "reward": 0.0})
    for again in (False, True):
        rb = reopened(rb) if again else rb
        assert set(ragged_rows.check(rb.sample(100))) == {0, 1, 2, 3}


# ---- arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ndim": 2, "ragged": {"a": Ragged("utf-8")}}, ValueError, r"ragged: expected none with ndim=2, got \['a'\]"),
        ({"ragged": {"a": "utf-8"}}, TypeError, "ragged: 'a': expected a Ragged"),
        ({"ragged_bytes": 0}, ValueError, "ragged_bytes: expected a number in"),
        ({"ragged": ragged_rows.fields(), "ragged_bytes": 100}, ValueError, "ragged_bytes: expected at least 136 "),
        ({"ragged_bytes": "1"}, TypeError, "ragged_bytes: expected a number"),
        ({"layout": "flat"}, ValueError, "layout: kind: expected one of"),
    ],
)
def test_impossible_arguments(make, options, error, message):
    with pytest.raises(error, match=f"Lazy.*Storage: {message}"):
        make(10, **options)


def test_what_the_first_write_refuses(make):
    fields = ragged_rows.fields()
    for options, data, error, message in [
        (
            {"ragged": {"tokens": Ragged(torch.int32)}, "ragged_bytes": 100},
            {"tokens": [torch.ones(3, dtype=torch.int32)]},
            ValueError,
            "ragged_bytes: expected at least 256 ",
        ),
        (
            {"ragged": {"a": Ragged("utf-8")}},
            {"b": torch.zeros(2)},
            KeyError,
            "ragged: expected a value of 'a' in the first row, got fields",
        ),
        (
            {"ragged": fields, "dtypes": {"tokens": torch.int8}},
            ragged_rows.rows(0, 2),
            ValueError,
            "dtypes: expected fields whose rows have one size, got tokens",
        ),
    ]:
        storage = make(10, **options)
        with pytest.raises(error, match=message):
            ReplayBuffer(storage=storage).extend(data)
        assert not storage.initialized


def test_writers_that_place_rows_are_refused():
    fields = ragged_rows.fields()
    with pytest.raises(ValueError, match="RemovingWriter: expected a storage whose rows have one size"):
        ReplayBuffer(storage=LazyTensorStorage(6, ragged=fields), remover=Lifo())
    with pytest.raises(ValueError, match="TensorDictMaxValueWriter: expected a storage whose rows have one size"):
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(6, ragged=fields), writer=TensorDictMaxValueWriter(rank_key="n")
        )
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), writer=TensorDictMaxValueWriter(rank_key="n"))
    with pytest.raises(RuntimeError, match=r"ragged fields \(x\): expected rows that are appended to a lane"):
        rb.extend(TensorDict({"x": NonTensorStack("a", "b"), "n": torch.arange(2.0)}, [2]))
    assert len(rb) == 0


def test_existing_data_has_no_ragged_fields():
    with pytest.raises(TypeError, match="expected a dense tensor"):
        TensorStorage({"a": nested([1], [2, 3])})


def test_windows_with_a_dimension_of_their_own_are_refused_by_name(make):
    storage = make(20, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY)
    rb = ReplayBuffer(storage=storage, batch_size=4)
    rb.extend({**ragged_rows.rows(0, 20), "episode": torch.arange(20) // 10})
    windows = SliceSampler(window=WindowSpec(2), traj_key="episode", flat=False)
    message = r"expected one batch dimension of rows with ragged fields.*got \[4, 2\]. Draw flat windows"
    with pytest.raises(RuntimeError, match=message):
        ReplayBuffer(storage=storage, sampler=windows, batch_size=4).sample()


def test_nested_tensors_need_one_row_dimension():
    rb = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    with pytest.raises(RuntimeError, match="field 'a': expected rows of one size where ndim > 1, got a nested tensor"):
        rb.extend({"a": nested([1], [2, 3])})
    assert not rb.storage.initialized


def test_copies_and_readers_have_the_same_rows(make):
    rb = ReplayBuffer(storage=make(20, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY))
    rb.extend(ragged_rows.rows(0, 8))
    assert ragged_rows.check(pickle.loads(pickle.dumps(rb))[:]) == list(range(8))
    assert ragged_rows.check(copy.deepcopy(rb)[:]) == list(range(8))
    folder = getattr(rb.storage, "scratch_dir", None)
    if folder is not None:
        reader = ReplayBuffer.open(folder, readonly=True)
        assert ragged_rows.check(reader[:]) == list(range(8))
        rb.extend(ragged_rows.rows(8, 4))
        assert set(ragged_rows.check(reader.sample(200))) == set(range(12))
        reader.close()


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_extend_that_would_overwrite_its_own_items_is_refused(make, lanes):
    fields = {"a": Ragged(torch.uint8, max_length=10), "b": Ragged(torch.int16, max_length=4)}
    storage = make(40 * lanes, ragged=fields, lanes=lanes, ragged_bytes=lanes * (40 + 2 * 12))
    rb = ReplayBuffer(storage=storage)
    rooms = dict(zip("ab", [group.items for group in rb_groups(rb, fields)], strict=True))

    def rows(n, a, b):
        return {"a": [torch.ones(a, dtype=torch.uint8)] * n, "b": [torch.ones(b, dtype=torch.int16)] * n}

    lane, n = {} if lanes == 1 else {"lane": torch.tensor([1] * 15)}, len(rb)
    for a, b in ((rooms["a"] // 15 + 1, 0), (0, rooms["b"] // 15 + 1)):
        before = rb.storage.store.core.next_ticket
        with pytest.raises(ValueError, match="extend: expected at most .* ragged items in one call, .*ragged_bytes"):
            rb.extend(rows(15, a, b), **lane)
        assert (rb.storage.store.core.next_ticket, len(rb)) == (before, n)
    index = rb.extend(rows(15, rooms["a"] // 15, rooms["b"] // 15), **lane)
    assert [len(row) for row in rb[index]["a"].unbind()] == [rooms["a"] // 15] * 15


def rb_groups(rb, fields):
    """The rings of a buffer after its first row, which has no items."""
    rb.add({key: torch.ones(0, dtype=getattr(torch, it.dtype)) for key, it in fields.items()}, lane=0)
    return rb.storage.store.schema.ragged_groups
