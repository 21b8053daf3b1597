"""``engram drain``: has a server move its rows to other stores, and shows how far that is."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import click

from engram._support.words import count
from engram.buffer.connecting import access_to
from engram.remote import protocol
from engram.remote.connection import Connection
from engram.remote.fleet.storage import ask_servers

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from engram.buffer.connecting import Reaching

#: For how long new priorities of moved rows are sent on, once the last row has left; and between two looks for others.
FORWARD_S, _INTERVAL_S = 60.0, 0.5


def drain(address: str, to: str, *, evict: bool, **how: Unpack[Reaching]) -> None:
    """Returns when the rows are elsewhere, and the server ends. Raises as ``ReplayBuffer.connect``, and why rows stay."""
    server, others = Connection(access_to(address, "drain", 0.0, **how)), access_to(to, "drain", 0.0, **how)
    own = [at for at, answer in ask_servers(others, "skip").items() if answer.store == server.served.store]
    command, since = protocol.Drain([str(at) for at in others.addresses if at not in own], evict), time.monotonic()
    while (left := server.ask("drain", command, int)) or time.monotonic() < since + FORWARD_S:
        if left:
            click.echo(f"{count(left, 'row')} left")
            since = time.monotonic()
        else:
            time.sleep(_INTERVAL_S)
    if others.members is not None:
        others.members.remove(own)
    with contextlib.suppress(ConnectionError):  # it may end before its answer is here
        server.ask("drain", protocol.Drain(), int)
    click.echo(f"{address} has left")
