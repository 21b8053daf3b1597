"""The same calls of TorchRL's ensemble and of ours, over the same rows: shapes, keys, values and kinds of errors."""

import pytest
import torch
from tensordict import TensorDict

import engram
from tests.members.buffers import rows

rl = pytest.importorskip("torchrl.data")
LIBRARIES = {"torchrl": rl, "engram": engram}


def made(library, sizes=(10, 20, 15), sampler="RandomSampler", tracks=False, **arguments):
    some = []
    for number, n in enumerate(sizes):
        kinds = {
            "RandomSampler": library.RandomSampler,
            "SamplerWithoutReplacement": library.SamplerWithoutReplacement,
            "PrioritizedSampler": lambda: library.PrioritizedSampler(100, 1.0, 1.0),
            "SliceSampler": lambda: library.SliceSampler(slice_len=2, end_key=("next", "done")),
        }
        writer = library.TensorDictRoundRobinWriter(track_generations=tracks)
        rb = library.TensorDictReplayBuffer(
            storage=library.LazyTensorStorage(100), sampler=kinds[sampler](), writer=writer
        )
        if n:
            rb.extend(rows(number, n, to=torch.full((n,), number)))
        some.append(rb)
    return library.ReplayBufferEnsemble(*some, **arguments)


def shape_of(data, prefix=()):
    """Keys, shapes and dtypes."""
    return {
        key if isinstance(key, tuple) else (key,): (tuple(value.shape), value.dtype)
        for key, value in data.items(True, True)
    }


@pytest.mark.parametrize("arguments", [{}, {"sample_from_all": True}, {"p": [1, 2, 3]}, {"num_buffer_sampled": 6}])
@pytest.mark.parametrize("sampler", ["RandomSampler", "SamplerWithoutReplacement"])
def test_batches_have_the_same_form(arguments, sampler):
    theirs, ours = (
        made(library, sampler=sampler, **arguments).sample(12, return_info=True) for library in LIBRARIES.values()
    )
    for their, own in zip(theirs, ours, strict=True):
        assert own.shape == their.shape
        assert shape_of(own) == shape_of(their)


def test_slices_have_the_same_values_and_one_dimension_less():
    theirs, ours = (
        made(library, sampler="SliceSampler", sample_from_all=True).sample(12) for library in LIBRARIES.values()
    )
    # TorchRL's has a dimension of its own for coordinates in the storage, which it then gives to every field.
    assert theirs.shape == (*ours.shape, 1)
    assert {key for key, _ in shape_of(ours).items()} == {key for key, _ in shape_of(theirs).items()}


@pytest.mark.parametrize("index", [(0, 3), (slice(None), 3), (slice(1, None), 3), ([0, 1], 3), (1, [2, 4])])
def test_rows_by_number_are_the_same(index):
    theirs, ours = (made(library)[index] for library in LIBRARIES.values())
    assert ours.shape == theirs.shape
    assert torch.equal(ours["a"], theirs["a"])


@pytest.mark.parametrize("index", [[0, 2], slice(1, None), torch.tensor([2, 0])])
def test_ensembles_of_some_are_the_same(index):
    for arguments in ({}, {"p": [1, 2, 3]}, {"num_buffer_sampled": 4}, {"sample_from_all": True}):
        theirs, ours = (made(library, **arguments)[index] for library in LIBRARIES.values())
        assert len(ours) == len(theirs) == 2
        assert [rb[:]["a"].tolist() for rb in (ours[0], ours[1])] == [
            rb[:]["a"].tolist() for rb in (theirs[0], theirs[1])
        ]
        if "p" in arguments:
            assert torch.allclose(ours.sampler.p.float(), theirs._sampler.p.float())


def test_all_members_are_the_ensemble_itself():
    for library in LIBRARIES.values():
        rb = made(library)
        assert rb[:] is rb
        assert len(rb) == 3


@pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 2)])
@pytest.mark.parametrize("tracks", [False, True])
def test_rows_are_divided_the_same_way(shape, tracks):
    found = []
    for library in LIBRARIES.values():
        rb = made(library, (0, 0, 0), tracks=tracks, routing_key="to")
        for first in (0, 7):
            numbers = torch.arange(first, first + 6).reshape(shape)
            written = rb.extend(TensorDict({"a": numbers, "to": numbers % 3}, shape))
        rows = [rb[i][:]["a"].tolist() for i in range(3)]
        found.append(
            (rows, written["buffer_ids"].tolist(), written["index"].tolist(), "index_generation" in written.keys())
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(("dim", "shape"), [(0, (3, 4)), (1, (4, 3)), (-1, (2, 2, 3))])
def test_dimensions_are_divided_the_same_way(dim, shape):
    found = []
    for library in LIBRARIES.values():
        rb = made(library, (0, 0, 0), routing_dim=dim)
        written = rb.extend(TensorDict({"a": torch.arange(torch.Size(shape).numel()).reshape(shape)}, shape))
        found.append(
            ([rb[i][:]["a"].tolist() for i in range(3)], written["buffer_ids"].tolist(), written["index"].tolist())
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda rb: rb.sample(7),
        lambda rb: rb.sample(),
        lambda rb: rb[torch.zeros(2, 2)],
        lambda rb: rb[torch.tensor([0.5])],
        lambda rb: rb[5],
        lambda rb: rb.extend(rows(0, 3)),
        lambda rb: rb.extend(rows(0, 3), update_priority=True),
        lambda rb: rb.writer.extend(),
        lambda rb: rb.storage.extend(rows(0, 3)),
        lambda rb: type(rb)(rb[0], p=[1.0], sample_from_all=True),
        lambda rb: type(rb)(rb[0], storages=rb.storage),
        lambda rb: type(rb)(rb[0], p="other"),
        lambda rb: type(rb)(rb[0], routing_key="to", routing_dim=0),
        lambda rb: type(rb)(rb[0], routing_dim="to"),
        lambda rb: type(rb)(rb[0], routing_key="to").extend({"a": 3}),
        lambda rb: type(rb)(rb[0], routing_key="to").extend(rows(0, 2, to=torch.tensor([0, 1]))),
        lambda rb: type(rb)(rb[0], routing_key="to").extend(rows(0, 2, to=torch.zeros(2))),
        lambda rb: type(rb)(rb[0], routing_dim=0).extend(rows(0, 2)),
        lambda rb: type(rb)(rb[0], routing_dim=0).add(rows(0, 1)[0]),
        lambda rb: type(rb)(rb[0], routing_key="to").add(rows(0, 1)),
        lambda rb: rb.end_streams(),
        lambda rb: rb.end_streams(end_key="a", truncated_key="a"),
        lambda rb: rb.update_if_present(index=torch.zeros(1), generation=torch.zeros(1), patch={}),
        lambda rb: type(rb.storage)(*rb.storage._storages, transforms=[None]),
    ],
)
def test_mistakes_raise_the_same_classes(call):
    raised = []
    for library in LIBRARIES.values():
        with pytest.raises(Exception) as error:  # noqa: PT011 - TorchRL's
            call(made(library))
        raised.append(type(error.value))
    assert issubclass(raised[1], raised[0]), raised


def test_updates_change_the_same_rows():
    found = []
    for library in LIBRARIES.values():
        rb = made(library, tracks=True, routing_key="to")
        written = rb.extend(rows(0, 6, first=50, to=torch.arange(6) % 3))
        patch = {"x": 100 + torch.arange(6.0).unsqueeze(-1)}
        fresh = rb.update_if_present(index=written, generation=written["index_generation"], patch=patch)
        patch["x"] += 100
        stale = rb.update_if_present(index=written, generation=torch.zeros(6, dtype=torch.int64) - 5, patch=patch)
        found.append(
            (fresh.updated.tolist(), stale.updated.tolist(), [rb[i][:]["x"].flatten().tolist() for i in range(3)])
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("last", [0, 4])
def test_streams_end_the_same_way(last):
    found = []
    for library in LIBRARIES.values():
        rb = made(library, (last + 1, 8, 0), "SliceSampler", tracks=True)
        rb.end_streams()
        found.append([rb[i][:]["next", "done"].flatten().tolist() for i in range(2)])
    assert found[0] == found[1]


def test_counts_are_the_same():
    theirs, ours = (made(library).stats() for library in LIBRARIES.values())
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.filterwarnings("ignore:.*not read, and lost")  # what TorchRL pickles
def test_a_dump_of_torchrl_is_read(tmp_path):
    theirs = rl.ReplayBufferEnsemble(
        *[rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(8), batch_size=4) for _ in range(2)], batch_size=4
    )
    for number in range(2):
        theirs[number].extend(TensorDict({"a": torch.arange(4) + number}, [4]))
    theirs.dumps(tmp_path / "dump")
    storages = [engram.TensorDictReplayBuffer(storage=engram.LazyTensorStorage(8), batch_size=4) for _ in range(2)]
    ours = engram.ReplayBufferEnsemble(*storages, batch_size=4)
    ours.loads(tmp_path / "dump")
    for number, each in enumerate(storages):
        assert each[:]["a"].tolist() == [number + it for it in range(4)]
    for number, each in enumerate(storages):  # and one by one
        theirs[number].dumps(tmp_path / str(number))
        each.loads(tmp_path / str(number))
        assert each[:]["a"].tolist() == [number + it for it in range(4)]
