"""Groups of prompts that are texts of any length: they are those of the same prompts by number, while rows come and go."""

import random

import pytest
import torch

from engram import LazyMemmapStorage, LazyTensorStorage, PromptGroupSampler, Ragged, ReplayBuffer
from engram.errors import NoSampleable

FIELDS = {"prompt": Ragged("utf-8", max_length=60), "tokens": Ragged(torch.int32, max_length=10)}


def prompt(n):
    return "why? " * (n % 5) + f"{n}é"


def rows(numbers):
    return {
        "prompt": [prompt(n) for n in numbers],
        "number": torch.tensor(numbers),
        "tokens": [torch.full((n % 11,), n, dtype=torch.int32) for n in numbers],
        "reward": torch.full((len(numbers),), float("nan")),
    }


def made(folder=None, **options):
    storage = (
        LazyTensorStorage(24, ragged=FIELDS, ragged_bytes=500)
        if folder is None
        else LazyMemmapStorage(24, scratch_dir=folder, ragged=FIELDS, ragged_bytes=500)
    )
    sampler = PromptGroupSampler(samples_per_group=3, group_key="prompt", **options)
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=3)


def complete(rb):
    """The numbers that three rows have at least, as the rows say."""
    if not len(rb):
        return set()
    numbers = rb["number"].tolist()
    return {n for n in numbers if numbers.count(n) >= 3}


@pytest.mark.parametrize("place", ["RAM", "directory"])
def test_groups_are_those_that_the_rows_say(place, tmp_path):
    drawn, evicted = 0, 0
    for seed in range(8):
        chance, rb = random.Random(seed), made(None if place == "RAM" else tmp_path / str(seed))
        for _ in range(40):
            numbers = [chance.randrange(7) for _ in range(chance.randrange(1, 5))]
            rb.extend(rows(numbers))
            if chance.random() < 0.2:
                rb.remove(chance.randrange(len(rb)))
            known = complete(rb)
            assert rb.sampler.groups == len(set(rb["number"].tolist()))
            assert rb.can_sample() == bool(known)
            if not known:
                with pytest.raises(NoSampleable):
                    rb.sample()
                continue
            batch, info = rb.sample(return_info=True)
            (number,) = set(batch["number"].tolist())
            assert number in known
            assert set(batch["prompt"]) == {prompt(number)}
            assert len(set(info["index"].tolist())) == 3
            drawn += 1
        evicted += rb.stats()["evicted_rows"]
        rb.close()
    assert drawn > 50
    assert evicted > 20


def test_groups_are_used_up_once(tmp_path):
    rb = made(tmp_path, ready=("reward",), max_uses=1)
    index = rb.extend(rows([1, 1, 1, 2, 2, 2]))
    assert not rb.can_sample()
    rb.set_at_("reward", torch.ones(3), index[3:])
    assert rb.sample()["number"].tolist() == [2, 2, 2]
    rb.set_at_("reward", torch.ones(3), index[:3])
    assert rb.sample()["number"].tolist() == [1, 1, 1]
    assert not rb.can_sample()


@pytest.mark.parametrize(("key", "said"), [("tokens", "got ragged shape"), ("reward", r"got float32 \[\]")])
def test_other_fields_say_no_groups(key, said):
    rb = made()
    rb.extend(rows([1, 2]))
    other = ReplayBuffer(
        storage=rb.storage, sampler=PromptGroupSampler(samples_per_group=1, group_key=key), batch_size=1
    )
    with pytest.raises(TypeError, match=f"sample: '{key}': expected one integer per row, or a text of at most.*{said}"):
        other.sample()


@pytest.mark.parametrize(
    ("key", "said"), [("long", r"max_length=1025\)"), ("tokens", r"torch\.int32"), ("data", "'json'")]
)
def test_declared_fields_that_say_no_groups_are_refused_when_a_buffer_takes_the_sampler(key, said):
    fields = {
        "long": Ragged("utf-8", max_length=1025),
        "short": Ragged("utf-8", max_length=1024),
        "tokens": Ragged(torch.int32, max_length=8),
        "data": Ragged("json", max_length=8),
        "unknown": Ragged("bytes"),
    }

    def over(key):
        storage = LazyTensorStorage(8, ragged=fields)
        return ReplayBuffer(
            storage=storage, sampler=PromptGroupSampler(samples_per_group=1, group_key=key), batch_size=1
        )

    with pytest.raises(
        TypeError, match=f"group_key: '{key}': expected one integer per row, or a text of at most 1024.*{said}"
    ):
        over(key)
    for other in ("short", "unknown", "number"):  # what the last two are, the first row says
        rb = over(other)
        row = {"long": "", "short": "a", "tokens": [1], "data": 1, "unknown": b"", "number": 7}
        rb.add(row)
        assert int(rb.sample()["number"][0]) == 7
