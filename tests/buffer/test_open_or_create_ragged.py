"""``open_or_create`` of a store with ragged fields, and whether it can be drawn from without a batch size."""

import pytest
import torch

from engram import (
    IncompatibleStore,
    LazyTensorStorage,
    PromptGroupSampler,
    Ragged,
    ReplayBuffer,
    TensorDictReplayBuffer,
)

FIELDS = {"tokens": Ragged(torch.int32, max_length=20), "log_prob": Ragged(torch.float32, like="tokens")}


def opened(folder, *, size=30, kind=ReplayBuffer, **given):
    return kind.open_or_create(
        folder, size, batch_size=2, **{"ragged": FIELDS, "ragged_bytes": 8_000, "open_rows": 2, **given}
    )


def rows(*lengths):
    tokens = [torch.full((length,), length, dtype=torch.int32) for length in lengths]
    return {"tokens": tokens, "log_prob": [it.float() for it in tokens]}


def contents(rb):
    return [row.tolist() for row in rb[:]["tokens"]]


def test_a_script_that_is_started_again_goes_on(tmp_path):
    for run in range(3):
        with opened(tmp_path / "store", layout="list") as rb:
            assert len(rb) == run
            rb.extend(rows(run))
            assert rb.storage.layout["kind"] == "list"
            assert contents(rb) == [[n] * n for n in range(run + 1)]
            row = rb.open_row()
            row.append(tokens=[run])
            row.discard()
            ring = rb.storage.store.schema.ragged[0]
            assert (ring.max_length, ring.items) == (20, 1000)


def test_arguments_that_need_not_be_the_same(tmp_path):
    with opened(tmp_path / "store") as rb:
        rb.extend(rows(3))
    with ReplayBuffer.open_or_create(tmp_path / "store", 30) as rb:  # as it is
        assert rb[:]["tokens"].layout is torch.jagged
        assert rb.storage.store.schema.ragged[0].items == 1000
    with opened(tmp_path / "store", layout="list", open_rows=0, ragged={"tokens": Ragged(torch.int32)}) as rb:
        assert contents(rb) == [[3] * 3]


REFUSED = {
    "max_length": ({"ragged": {**FIELDS, "tokens": Ragged(torch.int32, max_length=21)}}, "max_length|20"),
    "dtype": (
        {"ragged": {**FIELDS, "tokens": Ragged(torch.int64, max_length=20)}},
        "tokens: expected Ragged.torch.int64",
    ),
    "shape": (
        {"ragged": {**FIELDS, "log_prob": Ragged(torch.float32, like="tokens", shape=(2,))}},
        "log_prob: expected",
    ),
    "fields": ({"ragged": {**FIELDS, "text": Ragged("utf-8")}}, r"expected the ragged fields \['text'\], got"),
    "bytes": ({"ragged_bytes": 16_000}, "items|1000|2000"),
    "size": ({"size": 31}, "another size"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_store_of_other_fields_is_refused(tmp_path, given, message):
    with opened(tmp_path / "store", layout="list") as rb:
        rb.extend(rows(3, 1))
    with pytest.raises(IncompatibleStore, match=message):
        opened(tmp_path / "store", **given)
    with opened(tmp_path / "store", layout="list") as rb:
        assert contents(rb) == [[3] * 3, [1]]


def test_wrong_declarations_leave_no_folder(tmp_path):
    for given, error in (({"ragged": 3}, TypeError), ({"layout": "flat"}, TypeError), ({"ndim": 2}, ValueError)):
        with pytest.raises((error, ValueError)):
            opened(tmp_path / "store", **given)
        assert not (tmp_path / "store").exists()


def test_rows_of_dicts_are_refused_for_tensordicts(tmp_path):
    with opened(tmp_path / "store") as rb:
        rb.extend(rows(3))
    with pytest.raises(IncompatibleStore, match="expected rows that are TensorDicts"):
        opened(tmp_path / "store", kind=TensorDictReplayBuffer)


def test_whether_tokens_can_be_drawn_needs_no_batch_size():
    rb = ReplayBuffer(storage=LazyTensorStorage(10, ragged=FIELDS))
    assert not rb.can_sample()
    rb.extend(rows(3))
    assert rb.can_sample()
    assert rb.sample(max_tokens=5, layout="packed")["tokens"].cu_seqlens.tolist()[1] == 3
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10, ragged=FIELDS), sampler=PromptGroupSampler(group_key="q", samples_per_group=2)
    )
    for there in (False, True):
        rb.extend({**rows(2), "q": torch.tensor([7])})
        assert rb.can_sample() is there  # a group of two
    with pytest.raises(RuntimeError, match="expected a batch size"):
        ReplayBuffer(storage=LazyTensorStorage(10)).can_sample()
