"""A draw of a filter that ends amid its tries gives back what it had taken."""

import pytest
import torch

from engram import FilteredSampler, LazyTensorStorage, PromptGroupSampler, Ragged, RandomSampler, ReplayBuffer


class _Stops(RandomSampler):
    """Raises at its n-th draw."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def draw(self, extent, batch_size, key):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().draw(extent, 2, key)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_interrupt_uses_nothing_up(n):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20), sampler=FilteredSampler(_Stops(n), max_uses=1, ready=("r",)), batch_size=9
    )
    rb.extend({"r": torch.ones(20), "id": torch.arange(20)})
    with pytest.raises(KeyboardInterrupt):
        rb.sampler.draw(rb.storage.extent(), 9, 5)
    assert len(rb) == 20
    seen = []
    while rb.can_sample():
        seen += rb.sample()["id"].tolist()
    assert sorted(seen) == list(range(20))


@pytest.mark.parametrize(
    ("sampler", "argument"),
    [
        (PromptGroupSampler(samples_per_group=1, strategy="reward", reward_key="tokens", group_key="id"), "reward_key"),
        (PromptGroupSampler(samples_per_group=1, ready=("tokens",), group_key="id"), "ready"),
        (FilteredSampler(RandomSampler(), ready=("tokens",)), "ready"),
        (FilteredSampler(RandomSampler(), max_staleness=1, policy_version="tokens"), "policy_version"),
    ],
)
def test_rows_of_any_length_follow_no_rule(sampler, argument):
    fields = {"tokens": Ragged(torch.float32, max_length=5)}
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ragged=fields, ragged_bytes=1e4), sampler=sampler, batch_size=1)
    rb.extend({"id": torch.arange(2), "tokens": [torch.ones(1), torch.ones(2)]})
    with pytest.raises(TypeError, match=f"{argument}: 'tokens': expected one value per row.*got ragged shape"):
        rb.sample()
