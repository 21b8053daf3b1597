"""The shortcuts into TensorDict against its public interface. Runs at both ends of the supported range of versions."""

import copy
import pickle

import pytest
import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from engram import LazyStackStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram._support import tensordicts


def entries():
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([[1], [2]])}


def public(source, batch_size, device):
    return TensorDict(source, batch_size=batch_size, device=device)


def made(how, device=None, *, nested=True):
    source = entries()
    if nested:
        source["next"] = how({"c": torch.zeros(2, 3, 1)}, torch.Size([2]), device)
    return how(source, torch.Size([2]), device)


def outcome(action, td):
    """What an action gives, in a form that can be compared: its result or its error, and what became of the object."""
    try:
        result = action(td)
    except Exception as error:  # noqa: BLE001 - errors are compared, too
        return type(error), str(error)
    return plain(result), plain(td)


def plain(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist(), str(value.device), value.is_shared()
    if tensordict.is_tensor_collection(value):
        return (
            type(value),
            tuple(value.batch_size),
            str(value.device),
            value.is_locked,
            value.names,
            value.requires_grad,
            [(key, plain(item)) for key, item in value.items()],
        )
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    return value


def fails(action):
    def act(td):
        try:
            action(td)
        except (RuntimeError, KeyError, ValueError) as error:
            return type(error)
        return None

    return act


ACTIONS = {
    "keys": lambda td: list(td.keys()),
    "all keys": lambda td: [str(key) for key in td.keys(include_nested=True, leaves_only=True)],
    "values": lambda td: list(td.values(include_nested=True, leaves_only=True)),
    "get": lambda td: (td.get("a"), td["next", "c"], td.get("nothing", None)),
    "missing": fails(lambda td: td["nothing"]),
    "in": lambda td: ("a" in td, ("next", "c") in td.keys(include_nested=True), "z" in td),
    "sizes": lambda td: (td.batch_dims, td.numel(), len(td), td.shape, td.size(0), td.ndim, td.dim()),
    "names": lambda td: td.names,
    "give names": lambda td: setattr(td, "names", ["time"]),
    "set": lambda td: td.set("d", torch.ones(2, 5)),
    "set nested": lambda td: td.set(("next", "d"), torch.ones(2, 5)),
    "set new nested": lambda td: td.set(("other", "d"), torch.ones(2, 5)),
    "set a dict": lambda td: td.set("other", {"d": torch.ones(2)}),
    "set another shape": fails(lambda td: td.set("d", torch.ones(3))),
    "set in place": lambda td: td.set_("a", torch.ones(2, 3)),
    "assign": lambda td: td.__setitem__("a", torch.ones(2, 4)),
    "assign rows": lambda td: td.__setitem__(0, td[1].clone()),
    "set at": lambda td: td.set_at_("a", torch.ones(3), 0),
    "delete": lambda td: td.del_("a"),
    "delete nested": lambda td: td.__delitem__(("next", "c")),
    "pop": lambda td: td.pop("a"),
    "rename": lambda td: td.rename_key_("a", "z"),
    "update": lambda td: td.update({"a": torch.ones(2, 3), "e": torch.ones(2)}),
    "select": lambda td: td.select("a", ("next", "c")),
    "exclude": lambda td: td.exclude("a", inplace=True),
    "clear": lambda td: td.clear(),
    "empty": lambda td: td.empty(),
    "is empty": lambda td: td.is_empty(),
    "clone": lambda td: td.clone(),
    "shallow clone": lambda td: td.clone(False),
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "stack": lambda td: torch.stack([td, td.clone()], 1),
    "lazy stack": lambda td: LazyStackedTensorDict.lazy_stack([td, td.clone()]).contiguous(),
    "cat": lambda td: torch.cat([td, td]),
    "to_dict": lambda td: td.to_dict(),
    "to_tensordict": lambda td: td.to_tensordict(),
    "index": lambda td: (td[0], td[:1], td[torch.tensor([1, 0])], td[..., None]),
    "unbind": lambda td: td.unbind(0),
    "split": lambda td: td.split(1),
    "reshape": lambda td: td.reshape(1, 2),
    "squeeze": lambda td: td.unsqueeze(0).squeeze(0),
    "expand": lambda td: td.expand(4, 2),
    "batch size": lambda td: setattr(td, "batch_size", []),
    "impossible batch size": fails(lambda td: setattr(td, "batch_size", [7])),
    "auto batch size": lambda td: td.auto_batch_size_(),
    "flatten keys": lambda td: td.flatten_keys("."),
    "apply": lambda td: td.apply(lambda x: x + 1),
    "apply in place": lambda td: td.apply_(lambda x: x.zero_()),
    "zero": lambda td: td.zero_(),
    "cast": lambda td: td.to(torch.float64),
    "to device": lambda td: td.to("cpu"),
    "clear device": lambda td: td.clear_device_(),
    "detach": lambda td: td.detach(),
    "lock": lambda td: (td.lock_(), td.get("next").is_locked),
    "write while locked": fails(lambda td: td.lock_().set("d", torch.ones(2))),
    "write in place while locked": lambda td: td.lock_().set_("a", torch.ones(2, 3)),
    "write below while locked": fails(lambda td: td.lock_().get("next").set("d", torch.ones(2))),
    "unlock": lambda td: (td.lock_().unlock_().set("d", torch.ones(2)), td.get("next").is_locked),
    "unlock below": fails(lambda td: td.lock_().get("next").unlock_()),
    "unlock for a while": lambda td: unlocked(td.lock_()),
    "share": lambda td: (td.share_memory_().is_shared(), td["a"].is_shared()),
    "equal": lambda td: bool((td == td.clone()).all()),
    "sum": lambda td: td.sum(),
    "repr": repr,
    "truth": fails(bool),
    "iterate": list,
}


def unlocked(td):
    with td.unlock_() as opened:
        opened.set("d", torch.ones(2))
    return td.is_locked


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_unchecked_is_as_public(action, device):
    assert outcome(action, made(tensordicts.wrap, device)) == outcome(action, made(public, device))


def test_unchecked_has_the_same_insides():
    ours, theirs = (vars(made(how)) for how in (tensordicts.wrap, public))
    assert {key: type(value) for key, value in ours.items()} == {key: type(value) for key, value in theirs.items()}


def test_unchecked_takes_the_tensors_as_they_are():
    source = entries()
    td = tensordicts.wrap(source, torch.Size([2]), None)
    assert all(td.get(key) is value for key, value in source.items())


def test_the_shortcuts_are_in_use_with_this_tensordict():
    assert tensordicts.transparent_type() is TensorDict


def test_children_are_the_entries():
    td = made(public)
    assert list(tensordicts.children(td)) == ["a", "b", "next"]
    assert tensordicts.children(td)["a"] is td.get("a")
    stack = LazyStackedTensorDict.lazy_stack([td, td.clone()])
    assert {key: tuple(value.shape) for key, value in tensordicts.children(stack).items()} == {
        "a": (2, 2, 3),
        "b": (2, 2, 1),
        "next": (2, 2),
    }
    td.set("text", NonTensorData("x", batch_size=[2]))
    assert list(tensordicts.children(td)) == ["a", "b", "next", "text"]


def test_put_adds_entries():
    td = made(tensordicts.wrap)
    index = torch.tensor([5, 6])
    tensordicts.put(td, {"index": index, "a": index})
    assert td.get("index") is index
    assert td.get("a") is index
    assert list(td.keys()) == ["a", "b", "next", "index"]


# ---- a tensordict that has changed inside ----------------------------------------------------------------------------


class Renamed(TensorDict):
    """A TensorDict with one more attribute."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__["_more"] = 1


class Sealed(TensorDict):
    """A TensorDict whose attributes cannot be set from outside."""

    def __setattr__(self, name, value):
        raise AttributeError(name)


@pytest.fixture(params=[Renamed, Sealed])
def fallback(request, monkeypatch):
    """What the module finds out beside such a TensorDict."""
    monkeypatch.setattr(tensordicts, "_transparent", None)
    with monkeypatch.context() as beside:
        beside.setattr(tensordicts, "tensordict_type", lambda: request.param)
        found = tensordicts.transparent_type.__wrapped__()
    monkeypatch.setattr(tensordicts, "transparent_type", lambda: found)
    return found


def test_the_public_way_is_taken_where_the_insides_changed(fallback):
    assert fallback is None
    td = tensordicts.wrap(entries(), torch.Size([2]), None)
    assert type(td) is TensorDict
    assert list(tensordicts.children(td)) == ["a", "b"]
    assert tensordicts.children(td)["a"] is td.get("a")
    tensordicts.put(td, {"index": torch.tensor([5, 6])})
    assert td["index"].tolist() == [5, 6]


@pytest.mark.usefixtures("fallback")
def test_buffers_work_the_public_way():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(made(public))
    rb.add(made(public)[0])
    batch = rb.sample(20)
    assert batch.batch_size == (20,)
    assert bool((batch["a"][:, 0] == torch.where(batch["index"] == 1, 3.0, 0.0)).all())
    assert batch["next", "c"].shape == (20, 3, 1)
    assert rb[1]["b"].tolist() == [2]


def test_batches_are_unlocked_and_independent():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(made(public))
    batch = rb.sample(4)
    batch["new"] = torch.zeros(4)
    batch.zero_()
    assert rb[1]["b"].tolist() == [2]
    assert list(rb.sample(4).keys()) == ["a", "b", "next"]


def test_detached_is_what_detach_makes():
    """Of every kind of TensorDict: nested, locked, with names, with objects, of a class, and lazily stacked."""
    from engram._support.tensordicts import detached

    nested, given = kinds()
    for td in given:
        made, theirs = detached(td), td.detach()
        assert type(made) is type(theirs)
        assert made.batch_size == theirs.batch_size
        assert made.device == theirs.device
        assert made.is_locked == theirs.is_locked
        assert made.names == theirs.names
        keys = set(made.keys(include_nested=True, leaves_only=True))
        assert keys == set(theirs.keys(include_nested=True, leaves_only=True))
        for key in keys:
            assert not getattr(made.get(key), "requires_grad", False)
    made = detached(nested)
    assert made["n", "c"].data_ptr() == nested["n", "c"].data_ptr()
    nested["n", "new"] = torch.zeros(2)
    assert "new" not in made["n"].keys()


@tensordict.tensorclass
class _Row:
    a: torch.Tensor


def kinds():
    """A nested TensorDict, and one of each kind."""
    leaf = torch.ones(2, requires_grad=True)
    nested = TensorDict(
        {"a": leaf * 2, "n": {"b": leaf, "c": torch.zeros(2, 3)}, "s": NonTensorData("x", batch_size=[2])}, [2]
    )
    named = TensorDict({"a": leaf * 2, "n": TensorDict({"b": leaf}, [2], names=["t"])}, [2], names=["t"])
    lazy = LazyStackedTensorDict(*[TensorDict({"a": leaf * n}, []) for n in (1, 2)])
    given = [
        nested,
        nested.clone().lock_(),
        nested.clone().lock_().unlock_(),
        named,
        lazy,
        TensorDict({"l": lazy, "d": nested}, [2]),
    ]
    given += [TensorDict({"a": leaf}, [2], device="cpu"), TensorDict({}, [3]), _Row(a=leaf, batch_size=[2])]
    return nested, given


def objects():
    """TensorDicts with objects of each kind."""
    from tensordict import NonTensorStack

    marked = NonTensorData("marked", batch_size=[2])
    marked._non_tensordict["_metadata"] = {"of": 1}
    values = ["a", b"b", 3, 0.5, None, True, [1, [2]], {"k": [1]}, object()]
    yield from (TensorDict({"x": NonTensorData(value, batch_size=[2])}, [2], device="cpu") for value in values)
    yield TensorDict({"x": NonTensorStack("a", "b"), "m": marked, "n": {"y": "z"}}, [2])
    yield TensorDict({"x": NonTensorData("named", batch_size=[2], names=["t"])}, [2], names=["t"])
    yield TensorDict({"x": "a"}, [2]).lock_()
    yield NonTensorData("alone", batch_size=[2])
    yield TensorDict({"x": NonTensorData(torch.zeros(2), batch_size=[2])}, [2])


def insides(td):
    """All that a TensorDict consists of, but what it found out of the machine; tensors by identity."""
    if isinstance(td, torch.Tensor):
        return id(td)
    if isinstance(td, dict):
        return [(key, insides(value)) for key, value in td.items() if key != "_has_mps_val"]
    if isinstance(td, list):
        return [insides(value) for value in td]
    return (type(td), sorted(insides(vars(td)))) if tensordict.is_tensor_collection(td) else td


def test_copies_are_what_copy_makes():
    given = [*kinds()[1], *objects()]
    for td, made in zip(given, tensordicts.copies(given), strict=True):
        theirs = td.copy()
        assert plain(made) == plain(theirs)
        assert insides(made) == insides(theirs)
        made.lock_()
        made.unlock_()
        assert type(made) is type(td)


def test_a_copy_is_changed_alone():
    for td in [TensorDict({"x": "a", "n": {"y": "b"}}), TensorDict({"x": ["a"]})]:
        (made,) = tensordicts.copies([td])
        before = insides(td)
        made.lock_()
        assert insides(td) == before
        made.unlock_()
        made["x"], made["n", "y"], made["z"] = "c", "d", torch.zeros(3)
        made.batch_size = []
        assert insides(td) == before


def test_a_lazy_stack_is_the_public_one():
    for batch in ([], [2], [2, 3]):
        tds = [TensorDict({"a": torch.zeros(*batch, n)}, batch) for n in (1, 4, 2)]
        for dim in range(len(batch) + 1):
            ours, theirs = tensordicts.lazy_stack(list(tds), dim), LazyStackedTensorDict(*tds, stack_dim=dim)
            assert insides(ours) == insides(theirs)
            assert ours.shape == theirs.shape
            assert [td is own for td, own in zip(tds, ours.tensordicts, strict=True)] == [True] * 3
    with pytest.raises(RuntimeError, match="devices differ"):
        tensordicts.lazy_stack([TensorDict(device="cpu"), TensorDict()], 0)


def test_the_shortcuts_of_batches_are_in_use_with_this_tensordict():
    assert tensordicts._stack_insides() is not None
    assert tensordicts._object_type() is NonTensorData


@pytest.mark.usefixtures("fallback")
def test_batches_of_lists_are_made_the_public_way(monkeypatch):
    monkeypatch.setattr(tensordicts, "_stack_insides", lambda: None)
    rb = ReplayBuffer(storage=LazyStackStorage(10), batch_size=6)
    rb.extend([TensorDict({"a": torch.zeros(n), "text": f"{n}"}) for n in (1, 2)])
    batch = rb.sample()
    assert type(batch) is LazyStackedTensorDict
    assert [len(row["a"]) for row in batch] == [int(text) for text in batch["text"]]
    batch[0]["new"] = torch.zeros(1)
    assert "new" not in rb[0].keys()
