"""Servers of one store that are of different engrams: a client sees which one answers, and speaks what that one knows."""

import contextlib

import pytest
import torch

from engram import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from engram.remote import protocol
from tests import fresh
from tests.serving.servers import SERVER, Served

#: The part of an older engram that clients see: it has other levels, says nothing of limits, and knows no streams by level.
OLDER = """
import msgspec
from engram.remote import protocol
protocol.LEVEL = level
from engram.serving import service
served_by = service.served_by
service.served_by = lambda *given: msgspec.structs.replace(served_by(*given), engram="0.1.0")
describe = service.Service._describe
service.Service._describe = lambda *given: msgspec.structs.replace(describe(*given), limited=None)
service.Service.limits_number = lambda self: 0
"""


@contextlib.contextmanager
def serving(folder, level=protocol.LEVEL, number=1):
    """A server of the engram that there is, or of one with a lower level and another protocol."""
    older = OLDER + f"protocol.PROTOCOL = {number}\n" if (level, number) != (protocol.LEVEL, 1) else ""
    given = dict.fromkeys(("token", "cert", "key")) | {"insecure": True, "level": level}
    program = fresh.start(older + SERVER, folder=str(folder), listen=f"unix:{folder}.sock", **given)
    try:
        yield Served(program).address
    finally:
        program.kill()


@pytest.fixture
def folder(tmp_path):
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "a")
    with ReplayBuffer(storage=storage, sampler=PrioritizedSampler(alpha=0.6, beta=0.4), batch_size=4) as rb:
        rb.extend({"a": torch.arange(10)})
    return tmp_path / "a"


#: What begins a stream.
FIRST = {
    "sample": lambda rb: rb.sample(),
    "extend": lambda rb: rb.extend({"a": torch.tensor([10])}),
    "add": lambda rb: rb.add({"a": torch.tensor(10)}),
    "remove": lambda rb: rb.remove([0]),
    "update_priority": lambda rb: (rb.update_priority(torch.tensor([0]), torch.tensor([9.0])), rb.sample()),
}


@pytest.mark.parametrize("full", [None, "block"], ids=["", "streamed"])
@pytest.mark.parametrize("levels", [(3, 2), (2, 3)], ids=["older", "newer"])
def test_a_stream_begins_by_what_the_server_knows_that_is_there_now(folder, levels, full):
    before, after = levels
    with contextlib.ExitStack() as stack:
        with serving(folder, before) as address:
            each = {name: stack.enter_context(ReplayBuffer.connect(address, full=full)) for name in FIRST}
            assert {it.storage.served.level for it in each.values()} == {before}
        with serving(folder, after):
            for name, remote in each.items():
                FIRST[name](remote)
                len(remote)  # what is under way arrives
                seen = remote.storage.served
                assert seen.level <= after, "it is taken for an engram that can do more"
                assert (seen.limited is None) == (seen.level < 3), "what the older one does not say is taken for none"
    with ReplayBuffer.open(folder) as rb:
        assert rb[:]["a"].tolist() == [*range(1, 10), 10, 10]


def test_a_message_that_is_not_to_come_twice_comes_once(folder):
    with contextlib.ExitStack() as stack:
        with serving(folder) as address:
            remote = stack.enter_context(ReplayBuffer.connect(address))
        stack.enter_context(serving(folder, 2))
        remote.storage._once = False
        remote.extend({"a": torch.tensor([10])})
    with ReplayBuffer.open(folder) as rb:
        assert rb[:]["a"].tolist() == [*range(11)]


def test_two_servers_of_one_store(folder):
    (folder.parent / "b").symlink_to(folder)
    with serving(folder) as one, serving(folder.parent / "b", 2) as other, ReplayBuffer.connect([one, other]) as remote:
        levels = set()
        for _ in range(4):
            remote.sample()
            levels.add(remote.storage.served.level)
            remote.storage.connection.again(remote.storage.connection._client)
            for stream in (remote.storage._learning, remote.storage._writing):
                stream.renew()
            remote.extend({"a": torch.tensor([7])})
        assert levels == {2, 3}


def test_another_protocol_is_refused_when_a_server_is_found(folder):
    with contextlib.ExitStack() as stack:
        with serving(folder) as address:
            remote = stack.enter_context(ReplayBuffer.connect(address, patience=5))
        stack.enter_context(serving(folder, 2, number=0))
        with pytest.raises(Exception, match=r"expected protocol 0, .* got 1, of engram"):
            remote.sample()
