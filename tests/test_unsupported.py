"""Arguments that are not supported: they are named, with what will carry them."""

import pytest

from engram import ListStorage, ReplayBuffer, TensorDictReplayBuffer
from engram._support.unsupported import Later, reject_unsupported

NOT_YET = {"checkpointer": Later("a choice of layouts"), "shared": Later("shared buffers", (True, "all"))}


@pytest.mark.parametrize(
    "arguments",
    [{}, {"checkpointer": None}, {"checkpointer": False, "shared": None}, {"shared": True}, {"shared": "all"}],
)
def test_values_that_mean_off_are_accepted(arguments):
    reject_unsupported("ReplayBuffer", arguments, NOT_YET)


@pytest.mark.parametrize("value", [True, 1, 0, "", [], "spawn"])
def test_what_is_not_there_yet_is_named_with_what_will_carry_it(value):
    with pytest.raises(TypeError, match="'shared' is not supported yet"):
        reject_unsupported("ReplayBuffer", {"shared": 1}, NOT_YET)  # not True
    with pytest.raises(
        TypeError,
        match=r"^ReplayBuffer: the argument 'checkpointer' is not supported yet; it will come with a choice of layouts\.$",
    ):
        reject_unsupported("ReplayBuffer", {"shared": None, "checkpointer": value}, NOT_YET)


@pytest.mark.parametrize("value", [None, False, 3])
def test_unknown_arguments_are_refused_whatever_they_are(value):
    with pytest.raises(TypeError, match=r"^ReplayBuffer: unexpected argument 'sise'\.$"):
        reject_unsupported("ReplayBuffer", {"sise": value}, NOT_YET)


@pytest.mark.parametrize(
    ("name", "meant"), [("sise", " Did you mean size?"), ("batchSize", " Did you mean batch_size?"), ("colour", "")]
)
def test_an_argument_that_is_close_is_asked_about(name, meant):
    with pytest.raises(TypeError, match=rf"^f: unexpected argument '{name}'\.{meant.replace('?', '[?]')}$"):
        reject_unsupported("f", {name: 1}, NOT_YET, ("size", "batch_size"))


@pytest.mark.parametrize("name", ["capacity", "buffer_size", "max_size"])
def test_a_capacity_is_that_of_a_storage(name):
    for cls in (ReplayBuffer, TensorDictReplayBuffer):
        with pytest.raises(TypeError, match=rf"unexpected argument '{name}'\. Write storage=LazyTensorStorage\(n\)"):
            cls(**{name: 10})
    with pytest.raises(TypeError, match=r"'max_sise'\. Did you mean max_size\?"):
        ListStorage(max_sise=10)
