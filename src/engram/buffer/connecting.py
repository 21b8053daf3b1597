"""A buffer over a connection to a server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from engram._support.unsupported import meant
from engram.buffer.configuration import READING_ARGUMENTS
from engram.buffer.on_ray import attached_by_name
from engram.buffer.recipe import kind_of, noted_settings, noted_unit
from engram.remote.fleet import check_missing

if TYPE_CHECKING:
    from engram.buffer.configuration import ConnectArguments
    from engram.buffer.services import Facade
    from engram.remote.fleet.members import Missing
    from engram.remote.protocol import Full
    from engram.remote.served import ServedStorage

    Path = str | os.PathLike[str] | None

#: Addresses that are names in a Ray cluster begin with it.
_ON_RAY = "ray:"


class _Way(NamedTuple):
    """The arguments of ``ReplayBuffer.connect`` that say how servers are reached."""

    token: Path = None
    tls_root: Path = None
    patience: float = 60.0
    full: Full | None = None
    missing: Missing = "skip"
    stratum: int | None = None

    def check_on_ray(self) -> None:
        """Raise ``TypeError``, ``ValueError``: what shards on Ray do not take."""
        taken = ("patience", "missing", "stratum")
        given = sorted(name for name, value in self._asdict().items() if name not in taken and value is not None)
        if given:
            raise TypeError(
                f"connect: a name in a Ray cluster takes {', '.join((*taken, *READING_ARGUMENTS))}, as Ray says how its servers are "
                f"reached; got {given}."
            )
        check_missing(self.missing)


def connect_buffer(asked: type[Facade], address: object, arguments: ConnectArguments) -> Facade:
    """The buffer that a served store notes, over a connection.

    Args:
        asked: the class whose ``connect`` was called.
        address: of the servers.
        arguments: its keywords.

    Raises: as ``ReplayBuffer.connect``.
    """
    way = _Way(**{name: value for name, value in cast("dict[str, Any]", arguments).items() if name in _Way._fields})
    reading = {name: value for name, value in arguments.items() if name not in _Way._fields}
    for name in reading:
        if name not in READING_ARGUMENTS:
            raise TypeError(
                f"connect: {name}: a connection takes {', '.join((*_Way._fields, *READING_ARGUMENTS))}. The storage, the sampler and "
                f"the writer are those of the server.{meant(name, (*_Way._fields, *READING_ARGUMENTS))}"
            )
    if way.full not in (None, "block", "raise", "drop"):
        raise ValueError(f"connect: full: expected None, 'block', 'raise' or 'drop', got {way.full!r:.40}.")
    try:
        if isinstance(address, str) and address.startswith(_ON_RAY):
            way.check_on_ray()
            name, patience = address.removeprefix(_ON_RAY), float(way.patience)
            return attached_by_name(asked, name, patience, way.missing, way.stratum, reading)
        from engram.remote.connection import Access
        from engram.remote.fleet.finding import storage_at
        from engram.remote.protocol import addresses_of
        from engram.remote.served import RemoteSampler, RemoteWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'connect: needs {error.name}: pip install "engram-replay[{"ray" if error.name == "ray" else "serve"}]".',
            name=error.name,
        ) from error
    paths = [None if path is None else os.fspath(path) for path in (way.token, way.tls_root)]
    access = Access(tuple(addresses_of(address, "connect")), paths[0], paths[1], float(way.patience), way.full)
    storage: ServedStorage = storage_at(access, way.missing, way.stratum)
    try:
        served, noted = storage.served, storage.served.recipe
        kind = kind_of(noted, "connect")
        sampler = RemoteSampler(served)
        if asked._prioritized and not sampler.traits.prioritized:  # noqa: SLF001 - of the facade
            raise TypeError(
                f"connect: expected a store that a buffer with priorities wrote to, got one of a {kind.__name__} with {sampler!r}. "
                "Use ReplayBuffer.connect."
            )
        settings = {**noted_settings(noted), **{name: value for name, value in reading.items() if value is not None}}
        rb: Facade = kind(
            storage=storage,
            sampler=sampler,
            writer=RemoteWriter(served),
            sample_unit=noted_unit(noted),
            **settings,
            **kind.open_arguments(noted),
        )
        return rb
    except BaseException:
        storage.close()
        raise
