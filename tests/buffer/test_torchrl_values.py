"""Values of TorchRL's arguments that ask for what engram does anyway, and small things that its users rely on."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from engram import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerEnsemble,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)


@pytest.mark.parametrize(
    "same",
    [
        {"service_backend": "direct", "transport": "auto"},
        {"transport": "direct"},
        {"dim_extend": 0},
        {"dim_extend": None, "compilable": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_buffers_take_what_changes_nothing(cls, same):
    with cls(storage=LazyTensorStorage(4), **same) as rb:
        rb.extend(TensorDict({"a": torch.arange(3)}, [3]))
        assert rb[:]["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("delayed", [None, True])
def test_dim_extend_is_that_of_the_storage(delayed):
    def make(value):
        rb = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), dim_extend=value, delayed_init=delayed)
        return rb.extend(torch.arange(6).reshape(2, 3))  # [columns, time]

    assert make(1).shape == (6, 2)
    assert make(0).shape == (6, 2)
    for wrong in (2, -1, "1"):
        with pytest.raises(
            TypeError, match=r"dim_extend: expected None or one of the 2 dimensions that index rows .* got"
        ):
            make(wrong)


@pytest.mark.parametrize(
    "same", [{"sync": True}, {"sync": False}, {"sampler_device": "cpu"}, {"sampler_device": None}], ids=str
)
@pytest.mark.parametrize("cls", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_prioritized_buffers_take_what_changes_nothing(cls, same):
    with cls(alpha=0.6, beta=0.4, storage=LazyTensorStorage(4), batch_size=2, **same) as rb:
        rb.extend(TensorDict({"a": torch.arange(3)}, [3]))
        assert len(rb.sample()["a"]) == 2
    with pytest.raises(RuntimeError, match="sampler_device: no such device, 'cuda:77'"):
        cls(alpha=0.6, beta=0.4, storage=LazyTensorStorage(4), sampler_device="cuda:77")


@pytest.mark.parametrize("cls", [LazyTensorStorage, LazyMemmapStorage])
def test_storages_take_what_changes_nothing(cls):
    with ReplayBuffer(storage=cls(4, shared_init=True)) as rb:
        rb.extend(torch.arange(3))
        assert rb[:].tolist() == [0, 1, 2]
    LazyTensorStorage(4, cleanup_memmap=True)


@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
def test_rows_are_set_by_a_slice(make):
    with ReplayBuffer(storage=make(6)) as rb:
        rb.extend(torch.arange(4))
        rb.storage.set(slice(1, 3), torch.tensor([7, 8]))
        assert [int(row) for row in rb[:]] == [0, 7, 8, 3]
        rb.storage.set(slice(-2, None), torch.tensor([5, 6]))  # of all its rows
        assert [int(rb[i]) for i in (4, 5)] == [5, 6]
        with pytest.raises(RuntimeError):
            rb.storage.set(slice(0, 3), torch.tensor([1, 2]))
    unbounded = ListStorage()
    unbounded.set(slice(0, 3), ["a", "b", "c"])
    unbounded.set(slice(1, None), ["d", "e"])
    assert unbounded.get(slice(None)) == ["a", "d", "e"]


def test_the_device_of_a_storage_is_set(monkeypatch, tmp_path):
    storage = LazyTensorStorage(4, device="auto")
    storage.device = "cpu"
    assert storage.device == torch.device("cpu")
    ReplayBuffer(storage=storage).extend(torch.arange(3))
    storage.device = torch.device("cpu")  # where it is
    on_disk, listed, untold = LazyMemmapStorage(4, scratch_dir=tmp_path / "x"), ListStorage(4), LazyTensorStorage(4)
    on_disk.device = "cpu"
    with pytest.raises(RuntimeError, match="LazyTensorStorage: device: no such device, 'cuda:99'"):
        storage.device = "cuda:99"
    for module in ("tensor", "list"):  # as if there were one more
        monkeypatch.setattr(f"engram.storages.{module}.existing_device", lambda device, where: torch.device(device))
    for full in (storage, on_disk):
        with pytest.raises(RuntimeError, match=r"Storage: device: expected cpu, where its rows are, got meta"):
            full.device = "meta"
        assert full.device == torch.device("cpu")
    untold.device = listed.device = "meta"
    assert untold.device == listed.device == torch.device("meta")
    listed.device = None
    assert listed.device is None
    listed.device = "meta"
    with ReplayBuffer(storage=listed) as rb:
        rb.add(torch.zeros(2))
        rb.add({"a": [torch.zeros(2), "text"], "b": TensorDict({"c": torch.zeros(2)}, [])})
        assert rb[0].is_meta
        assert rb[1]["a"][0].is_meta
        assert rb[1]["b"]["c"].is_meta
        assert rb[1]["a"][1] == "text"


def test_cleanup_says_whether_it_removed(tmp_path):
    for arguments in ({}, {"scratch_dir": tmp_path / "x"}, {"scratch_dir": tmp_path / "y", "auto_cleanup": True}):
        storage = LazyMemmapStorage(4, **arguments)
        assert storage.cleanup() is False  # nothing is there yet
        storage = LazyMemmapStorage(4, **arguments)
        rb = ReplayBuffer(storage=storage)
        rb.extend(torch.arange(3))
        assert storage.cleanup() is True
        assert storage.cleanup() is False


def test_a_slice_sampler_shows_by_what_it_tells_trajectories():
    assert SliceSampler(slice_len=2, traj_key="run").traj_key == "run"
    assert SliceSampler(slice_len=2, traj_key=("a", "b")).traj_key == ("a", "b")
    sampler = SliceSampler(slice_len=2)
    assert sampler.traj_key is None
    with TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4) as rb:
        rb.extend(TensorDict({"episode": torch.arange(8) // 4, "run": torch.arange(8) // 2}, [8]))
        rb.sample()
        assert sampler.traj_key == "episode"
        assert sampler.config()["traj_key"] is None  # as it was made
        sampler = SliceSampler(slice_len=2, index="runs")
        sampler.traj_key = "run"
        rb.set_sampler(sampler)
        assert all(first // 2 == second // 2 for first, second in rb.sample()["index"].reshape(-1, 2).tolist())
        assert sampler.traj_key == "run"
    with TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2), batch_size=4) as rb:
        rb.extend(TensorDict({"next": {"done": torch.ones(8, 1, dtype=torch.bool).logical_not()}}, [8]))
        rb.sample()
        assert rb.sampler.traj_key is None  # by end flags


def test_a_default_list_has_room_for_what_the_sampler_draws_from():
    with ReplayBuffer(sampler=PrioritizedSampler(77, 0.6, 0.4)) as rb:
        assert rb.storage.max_size == 77
    with ReplayBuffer(sampler=PrioritizedSampler(alpha=0.6, beta=0.4)) as rb:
        assert rb.storage.max_size == 1000
    assert PrioritizedSliceSampler(77, 0.6, 0.4, slice_len=2).max_size == 77


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("sampler", [None, lambda: PrioritizedSampler(alpha=0.6, beta=0.4)])
def test_messages_begin_as_programs_of_torchrl_expect(storage, sampler):
    with (
        ReplayBuffer(storage=storage(4), sampler=sampler) as rb,
        pytest.raises(NoSampleable, match="^Cannot sample from an empty storage"),
    ):
        rb.sample(2)
    with (
        ReplayBuffer(storage=storage(4), writer=TensorDictMaxValueWriter(rank_key="a")) as rb,
        pytest.raises(RuntimeError, match="^TensorDictMaxValueWriter expects data to be a tensor collection"),
    ):
        rb.extend(torch.arange(3))


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_lazy_stacks_that_differ_in_their_fields_are_refused(cls, again, nested):
    """They show the fields that all have, so the others would be lost."""

    def row(**fields):
        fields = {key: torch.tensor(value) for key, value in fields.items()}
        return TensorDict({"n": fields} if nested else fields, [])

    with cls(storage=LazyTensorStorage(6)) as rb:
        if again:
            rb.extend(lazy_stack([row(c=1), row(c=2)]))
        with pytest.raises(
            KeyError, match=r"expected a lazy stack of TensorDicts with the same fields, got \['b'\] in number 1"
        ):
            rb.extend(lazy_stack([row(c=1), row(c=2, b=3)]))
        assert len(rb) == 2 * again


def test_private_names_that_recipes_set():
    """TorchRL's decision transformer replaces the rows of its buffer by `rb._storage = …`."""
    with TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2) as rb:
        rb.extend(TensorDict({"a": torch.arange(3)}, [3]))
        storage, sampler = LazyTensorStorage(8), SliceSampler(slice_len=1, traj_key="a")
        rb._storage, rb._sampler = storage, sampler
        assert rb.storage is storage
        assert rb.sampler is sampler
        assert len(rb) == 0
        rb.extend(TensorDict({"a": torch.arange(5)}, [5]))
        assert rb.sample()["a"].shape == (2,)
        with pytest.raises(TypeError, match="expected a Storage"):
            rb._storage = 3


def test_extend_takes_rows_under_torchrls_name():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    assert rb.extend(tensordicts=TensorDict({"a": torch.arange(3)}, [3])).tolist() == [0, 1, 2]
    assert rb.extend(data=TensorDict({"a": torch.arange(3)}, [3])).tolist() == [3, 0, 1]
    both = TensorDict({"a": torch.arange(1)}, [1])
    with pytest.raises(TypeError, match="expected one of tensordicts and data"):
        rb.extend(both, data=both)
    assert rb.write_count == 6


@pytest.mark.parametrize("cls", [RoundRobinWriter, TensorDictRoundRobinWriter, ImmutableDatasetWriter])
@pytest.mark.parametrize("compilable", [False, True])
def test_writers_take_compilable_as_their_first_argument(cls, compilable):
    assert cls(compilable).state_dict() == cls(compilable=compilable).state_dict() == cls().state_dict()
    with pytest.raises(TypeError, match=f"{cls.__name__}: compilable: expected True or False.*got 'yes'"):
        cls("yes")


@pytest.mark.parametrize("cls", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
@pytest.mark.parametrize("sync", [True, False])
def test_the_sampler_with_the_priorities_has_torchrls_name(cls, sync):
    rb = cls(alpha=0.5, beta=0.5, sync=sync, storage=LazyTensorStorage(4))
    assert rb.prioritized_sampler is rb.sampler


def test_one_block_of_memory_changes_no_row():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4, consolidated=True), batch_size=2)
    rb.extend(TensorDict({"a": torch.arange(3), "b": torch.ones(3)}, [3]))
    assert rb[:]["a"].tolist() == [0, 1, 2]


def test_lists_are_flat():
    storage = ListStorage(4)
    assert storage.flatten() is storage


def test_samplers_of_ensembles_hear_of_rows_as_others_do():
    sampler = SamplerEnsemble(RandomSampler(), RandomSampler())
    sampler.add(0)
    sampler.extend([0, 1])
    assert sampler.default_priority == RandomSampler().default_priority == 1
