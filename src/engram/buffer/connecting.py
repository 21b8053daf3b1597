"""A buffer over a connection to a server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engram.buffer.compat import READING_ARGUMENTS
from engram.buffer.on_ray import attached_by_name
from engram.buffer.recipe import kind_of, noted_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.fleet.members import Missing
    from engram.remote.served import ServedStorage
    from engram.remote.streaming import Full

    Path = str | os.PathLike[str] | None

#: Addresses that are names in a Ray cluster begin with it.
_ON_RAY = "ray:"


def connect_buffer(
    asked: type[ReplayBuffer],
    address: object,
    token: Path,
    tls_root: Path,
    patience: float,
    full: Full | None,
    missing: Missing,
    stratum: int | None,
    arguments: Mapping[str, object],
) -> ReplayBuffer:
    """The buffer that a served store notes, over a connection.

    Args:
        asked: the class whose ``connect`` was called.
        address: of the servers.
        token, tls_root: paths, or None.
        patience: seconds.
        full: what a write does that has no credits; None: writes wait.
        missing, stratum: of several stores, as for ``ReplayBuffer.connect``.
        arguments: of the constructor.

    Raises: as ``ReplayBuffer.connect``.
    """
    for name in arguments:
        if name not in READING_ARGUMENTS:
            raise TypeError(
                f"connect: {name}: a connection takes {', '.join(READING_ARGUMENTS)}. The storage, the sampler and the writer are "
                "those of the server."
            )
    if full not in (None, "block", "raise", "drop"):
        raise ValueError(f"connect: full: expected None, 'block', 'raise' or 'drop', got {full!r:.40}.")
    try:
        if isinstance(address, str) and address.startswith(_ON_RAY):
            return attached_by_name(address.removeprefix(_ON_RAY), float(patience), dict(arguments))
        from engram.fleet.finding import storage_at
        from engram.remote.addresses import addresses_of
        from engram.remote.components import RemoteSampler, RemoteWriter
        from engram.remote.connection import Access
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'connect: needs {error.name}: pip install "engram-replay[{"ray" if error.name == "ray" else "serve"}]".',
            name=error.name,
        ) from error
    paths = [None if path is None else os.fspath(path) for path in (token, tls_root)]
    access = Access(tuple(addresses_of(address, "connect")), paths[0], paths[1], float(patience), full)
    storage: ServedStorage = storage_at(access, missing, stratum)
    try:
        served, noted = storage.served, storage.served.recipe
        kind = kind_of(noted, "connect")
        sampler = RemoteSampler(served)
        if asked._prioritized and not sampler.traits.prioritized:  # noqa: SLF001 - of the facade
            raise TypeError(
                f"connect: expected a store that a buffer with priorities wrote to, got one of a {kind.__name__} with {sampler!r}. "
                "Use ReplayBuffer.connect."
            )
        settings = {**noted_settings(noted), **{name: value for name, value in arguments.items() if value is not None}}
        rb: ReplayBuffer = kind(
            storage=storage,
            sampler=sampler,
            writer=RemoteWriter(served),
            **settings,
            **kind.open_arguments(noted),
        )
        return rb
    except BaseException:
        storage.close()
        raise
