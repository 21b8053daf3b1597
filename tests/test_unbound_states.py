"""The states of components that no buffer has used: they are there, and load into others of their kind."""

import pytest
import torch

from engram import (
    CompressedListStorage,
    ConsumingSampler,
    FilteredSampler,
    ImmutableDatasetWriter,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    WriterEnsemble,
)

STORAGES = [
    lambda: ListStorage(10),
    lambda: LazyStackStorage(10),
    lambda: CompressedListStorage(10),
    lambda: LazyTensorStorage(10),
    lambda: LazyTensorStorage(10, ndim=2),
    lambda: LazyMemmapStorage(10),
    lambda: StorageEnsemble(ListStorage(10), LazyTensorStorage(10)),
    lambda: ReplayBuffer(10).storage,
]
SAMPLERS = [
    RandomSampler,
    SamplerWithoutReplacement,
    lambda: PrioritizedSampler(10, alpha=0.6, beta=0.4),
    lambda: PrioritizedSampler(alpha=0.6, beta=0.4),
    lambda: SliceSampler(num_slices=2),
    lambda: SliceSamplerWithoutReplacement(num_slices=2),
    lambda: PrioritizedSliceSampler(10, alpha=0.6, beta=0.4, num_slices=2),
    lambda: ConsumingSampler(2),
    lambda: FilteredSampler(PrioritizedSampler(alpha=0.6, beta=0.4), max_uses=2, max_staleness=1),
    StalenessAwareSampler,
    lambda: PromptGroupSampler(num_groups=2),
    lambda: NStep(PrioritizedSampler(alpha=0.6, beta=0.4), n=2, gamma=0.9),
    lambda: SamplerEnsemble(RandomSampler(), PrioritizedSampler(alpha=0.6, beta=0.4), p=[0.5, 0.5]),
]
WRITERS = [
    RoundRobinWriter,
    lambda: RoundRobinWriter(track_generations=True),
    TensorDictRoundRobinWriter,
    lambda: TensorDictMaxValueWriter(rank_key="reward"),
    ImmutableDatasetWriter,
    lambda: WriterEnsemble(TensorDictRoundRobinWriter(), TensorDictRoundRobinWriter()),
]


@pytest.mark.parametrize("make", [*STORAGES, *SAMPLERS, *WRITERS])
def test_a_state_loads_before_a_buffer_uses_it(make, tmp_path):
    one, other = make(), make()
    state = one.state_dict()
    other.load_state_dict(state)
    assert other.state_dict().keys() == state.keys()
    one.dumps(tmp_path / "part")
    other.loads(tmp_path / "part")


def test_priorities_of_rows_need_rows():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(alpha=0.6, beta=0.4))
    rb.extend(torch.arange(3))
    state = rb.sampler.state_dict()
    for capacity in (10, None):
        with pytest.raises(RuntimeError, match="a storage with rows before their priorities are loaded"):
            PrioritizedSampler(capacity, alpha=0.6, beta=0.4).load_state_dict(state)


def test_a_state_of_no_priorities_says_when_it_loads():
    state = PrioritizedSampler(10, alpha=0.6, beta=0.4).state_dict()
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, alpha=0.6, beta=0.4))
    rb.sampler.load_state_dict(state)
    rb.extend(torch.arange(3))
    with pytest.raises(IncompatibleCheckpoint, match="had no storage with rows. Load it before rows are written, or"):
        rb.sampler.load_state_dict(state)
