"""What clients and servers tell each other: addresses and tokens, commands, and errors. Commands are JSON of at most 4 KiB."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar
from uuid import UUID

import msgspec

from engram import errors
from engram._support import checks, version
from engram.format import strict
from engram.format.schema import MAX_BYTES

_MAX_TOKEN = 4096


class Address(NamedTuple):
    """The address of one server."""

    #: ``unix``, ``grpc`` (TCP) or ``grpc+tls``.
    scheme: str
    #: Of a Unix socket: its path.
    host: str
    port: int = 0
    #: The name that its certificate has, if that is not the host.
    certified: str = ""

    @property
    def uri(self) -> str:
        """As Arrow Flight takes it."""
        return f"grpc+unix://{self.host}" if self.scheme == "unix" else f"{self.scheme}://{self.place}"

    @property
    def place(self) -> str:
        """Host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nothing outside this machine reaches it."""
        if self.scheme == "unix" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False

    def __str__(self) -> str:
        return f"unix:{self.host}" if self.scheme == "unix" else f"{self.scheme}://{self.place}"


def address_of(text: object, call: str, *, scheme: str = "grpc") -> Address:
    """One address: ``unix:PATH``, ``HOST:PORT``, ``grpc://HOST:PORT`` or ``grpc+tls://HOST:PORT``.

    Raises ``TypeError``: no text. ``ValueError``: none of these.
    """
    text = checks.check_type(f"{call}: address", text, str, "a str")
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or len(os.fsencode(path)) > 100:
            raise ValueError(f"{call}: address: expected unix: and an absolute path, at most 100 bytes, got {text!r}.")
        return Address("unix", path)
    named, separator, place = text.partition("://")
    scheme, place = (named, place) if separator else (scheme, text)
    host, separator, port = place.rpartition(":")
    alone = f" A list of addresses stands alone: connect({text!r})." * text.startswith(("file:", "dns:"))
    known = scheme in ("grpc", "grpc+tls") and not alone
    if not (known and separator and host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(
            f"{call}: address: expected unix:/PATH, HOST:PORT, grpc://HOST:PORT or grpc+tls://HOST:PORT, got {text!r}.{alone}"
        )
    return Address(scheme, host.removeprefix("[").removesuffix("]"), int(port))


def addresses_of(text: object, call: str) -> list[Address]:
    """Those of several servers of one store: a list, or text with commas. The first one's scheme holds for those that name none.

    Raises: as :func:`address_of`.
    """
    texts = text.split(",") if isinstance(text, str) else text
    if not isinstance(texts, list | tuple) or not texts:
        got = type(text).__name__ if texts else "an empty list"
        raise TypeError(f"{call}: address: expected a str or a list of them, got {got}.")
    first = address_of(texts[0], call)
    scheme = "grpc" if first.scheme == "unix" else first.scheme
    return [first, *(address_of(one, call, scheme=scheme) for one in texts[1:])]


def token_in(path: str | os.PathLike[str] | None, call: str) -> bytes:
    """What a token file says; empty for None.

    Raises:
        TypeError: no path. ValueError: it is empty, too long or of more than one line. PermissionError: others may read it.
        OSError: it cannot be read.
    """
    if path is None:
        return b""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{call}: token: expected the path of a file, got {type(path).__name__}.")
    with Path(path).open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(
                f"{call}: token: expected a file that only its owner, you, may read, got mode {stat.S_IMODE(status.st_mode):04o} of "
                f"{os.fspath(path)!r}. Use chmod 600."
            )
        token = file.read(_MAX_TOKEN + 1).strip()
    if not token or len(token) > _MAX_TOKEN or not token.isascii() or len(token.split()) != 1:
        raise ValueError(
            f"{call}: token: expected one word of 1 to {_MAX_TOKEN} ASCII characters in {os.fspath(path)!r}."
        )
    return token


#: A client and a server must have the same number.
PROTOCOL = 1
#: What this engram can do, as :attr:`Served.level` counts it. Client and server speak the lower one.
LEVEL = 3
MAX_COMMAND = 4096
#: Batches in one message at most, and the bytes that more than one may have.
MAX_BATCHES = 8
COALESCED_BYTES = 256 << 10
#: Bytes of one message at most, and what each row counts beside its own: its number, its ticket, its weight and the like.
MAX_MESSAGE, BESIDE_ROW = 1 << 30, 32

#: What a server says last on a stream: it did nothing of what came since.
LEAVING = b"{}"
#: A header of calls: the store that they are for, as :class:`Served` names it. The server of another one refuses them.
MEANT_STORE = "engram-store"
#: What one says that has no stream of this name: it did nothing of what came.
NO_STREAM = "expected one of the streams"
#: What one says that has no stream left.
STREAMS_TAKEN = "all streams are taken"


Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
T = TypeVar("T")
Stream = Literal["learn", "write", "edit"]
#: What a write does that has no credits.
Full = Literal["block", "raise", "drop"]


def held_bytes(rows: int, row_bytes: int) -> int:
    """What rows of so many bytes take of a message."""
    return rows * (row_bytes + BESIDE_ROW)


def check_fits(what: str, rows: int, row_bytes: int, verb: str) -> None:
    """Raise ``ValueError``: so many rows are too much for one message. ``verb``: what to do with fewer.

    >>> from engram.remote.protocol import check_fits
    >>> check_fits("extend", 100, 8, "Write")
    """
    if rows * (row_bytes + BESIDE_ROW) > MAX_MESSAGE:
        raise ValueError(
            f"{what}: expected at most {MAX_MESSAGE} bytes at once over a connection, got {rows} rows of {row_bytes} bytes and "
            f"{BESIDE_ROW} beside them. {verb} fewer at once."
        )


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do", tag="sample"):
    """Command to draw a batch for each key. The answer is one message with all their rows."""

    #: Of each batch.
    rows: int
    #: 64 bits for each batch, from which its draw follows.
    keys: list[int]
    #: So many rows of each batch, which other stores draw the rest of: then its masses come back.
    parts: list[int] = []
    #: Of parts without replacement: those of this epoch alone. 0: of the one that goes on.
    epoch: int = 0
    #: And where none goes on, the next one begins if this was the last; 0: none was.
    ended: int = 0
    #: As many rows as have so many tokens, ``rows`` at most, 0: any number; 0: so many rows.
    max_tokens: Number = 0
    #: Path of the field whose items count; empty: of each row those of the longest one.
    tokens_of: list[str] = []
    #: Rows are padded, and the padding counts: what divides their length. 0: they are not.
    multiple: Number = 0


class Prioritize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="prioritize"):
    """Command to set new priorities: columns ``row``, ``priority`` and ``ticket``, which is -1 where any will do. Nothing comes back."""


class Append(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="append"):
    """Command to write the rows of this message: column ``row``, their numbers, comes back. Column ``:lane`` says where each goes, if
    there are several lanes.

    A client that gives itself a name, a random UUID, counts its requests, one for each lane that a message writes to, and may send a
    message again: its rows are written once. :class:`NotOnce` where that cannot be.
    """

    writer: UUID | None = None
    #: Of the message's first request, from 1 on. Those of further lanes follow, in the order of the lanes' numbers: eight at most.
    number: Number = 0
    #: For lanes beyond eight: the same of the next eight, which are requests of the next name (the UUID plus 1), and so on.
    more: list[Number] = []

    def names(self) -> list[tuple[UUID, int]]:
        """The names of the writers whose requests these are, and the number of the first one of each."""
        assert self.writer is not None  # else there are none
        first = self.writer.int
        return [(UUID(int=(first + k) % (1 << 128)), it) for k, it in enumerate((self.number, *self.more))]


class Move(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="move"):
    """Command to take rows of another store, which is drained, into one lane: columns ``row`` and ``ticket`` come back, -1 for rows that
    are gone since, and ``{"next": N}``, the number of the writer's next request. Behind the columns of rows to write comes ``:priority``.

    A request that came before is not written again, whatever rows come with it. If the server died in the midst of it, it is undone, and
    has no rows. So a request without rows asks what became of one, and sees to it that it is not written later. :class:`TakesNone`
    where rows would replace others, and may not; :class:`NotOnce` where the writer is forgotten.
    """

    writer: UUID
    #: Of the request; 0: only the next number is asked for.
    number: Number = 0
    evict: bool = False


class Tickets(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="tickets"):
    """Command to say what rows hold, column ``row``: column ``ticket`` comes back, -1 for rows that hold nothing or are being written."""


class Remove(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="remove"):
    """Command to remove rows that still have these tickets, columns ``row`` and ``ticket``: :class:`Removed` comes back.

    A client asks for the tickets first, and may send this again: what was written in between stays.
    """


class Describe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Command to describe what is served, answered by :class:`Served`. Raises where the protocols differ.

    A server of an older generation of that store raises, ends, and serves it no more.
    """

    protocol: int
    engram: str
    #: The store of which a copy took over so often, as the client has met it.
    store: str = ""
    generation: Number = 0


class Stats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to count: :class:`State` comes back."""


class Gauges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to estimate what ``stats()`` says beyond :class:`State`, by its names, and to say what all processes have counted.

    A server of an older engram refuses it, as it knows no such command.
    """


class Health(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command that any server answers: ``{"store": NAME}``, and ``copy_age_s`` where there was a copy ever.

    ``{}`` where there is no store yet, and of an older engram.
    """


class CanSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to say whether a batch of so many rows could be drawn now: ``true`` or ``false``."""

    rows: int


class Make(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to make the store, if there is none: ``{}``. The first one decides what rows are. It may be as long as a schema."""

    #: ``store.json``. Rows and lanes are the server's.
    schema: str


class CanRemove(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to check that rows can be removed: ``{}``. Raises where not. A server of an older engram does not know it, and refuses."""


class Empty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to forget all rows: ``{}``."""

    keep_write_count: bool


class EndTrajectory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to end the newest step of these lanes: the list of rows that became ends, -1 where nothing changed."""

    lanes: list[int]
    terminated: bool = False
    #: What fields mean that are not called as usual: each as its path and its role.
    roles: list[tuple[list[str], str]] = []


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to set the limits of several stores, of which this one is a part: ``{}``. It counts rows, and clients of all stores wait.

    Newer limits, which have a larger number, stay.
    """

    ratio: Annotated[float, msgspec.Meta(ge=0)]
    tolerance: Annotated[float, msgspec.Meta(ge=0)]
    min_size: Number
    in_flight: Number
    #: The number of these limits.
    fleet: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    #: For how many stores they are set.
    stores: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    #: Where this one's part of the level begins.
    level: float


class Version(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to say up to which policy version the consumer has come, behind this: a number. Raises where the sampler has none."""

    #: Raise it to this one, if it is smaller.
    at_least: Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)] | None = None


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to take no rows for a minute, and to move some to other stores: how many are left comes back."""

    #: Addresses of their servers; none: those of the last command.
    to: list[str] = []
    #: Rows of these stores may be replaced.
    evict: bool = False
    #: Whether the server ends, if no rows are left.
    ends: bool = False
    #: The names in the certificates of these servers; none: their hosts.
    names: list[str] = []


class Tick(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to make a checkpoint for a follower as soon as something changed: :class:`Ticked`. ``do_get`` gives its files."""

    #: The newest checkpoint that the follower has; empty: none.
    have: str
    #: Of the follower.
    address: str
    #: It takes over: the server finishes what is under way, and does nothing more until it hears otherwise.
    last: bool = False


#: Methods that change no row.
READS = ("index_keys", "rows_of", "rows_with", "unsealed", "show")


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Command to call a method of the buffer. Behind it come a line break and the arguments by name, a tree as of :func:`tree_bytes`.

    The answer is the length of a text, a line break and a tree. What is sent again has no second effect: see :class:`RowGone`.
    """

    name: Literal[
        "index_keys", "rows_of", "rows_with", "update_if_present",
        "open_row", "unsealed", "resume", "show", "append", "seal", "discard",
    ]  # fmt: skip
    #: Of the text of the arguments.
    length: Number
    #: Of a row that grows; ``times``: how often it was taken before, and for it.
    slot: Number = 0
    times: Number = 0
    #: A random name of the client that has the row: only its calls change it.
    holder: UUID | None = None


#: Actions by name.
ACTIONS: Mapping[str, type[msgspec.Struct]] = {
    "describe": Describe,
    "stats": Stats,
    "gauges": Gauges,
    "health": Health,
    "can_sample": CanSample,
    "can_remove": CanRemove,
    "make": Make,
    "empty": Empty,
    "end_trajectory": EndTrajectory,
    "limit": Limit,
    "version": Version,
    "call": Call,
    "drain": Drain,
    "tick": Tick,
}
#: What the messages of streams may be.
STREAMS: Mapping[Stream, object] = {"learn": Sample | Prioritize, "write": Append | Move, "edit": Tickets | Remove}


class Mass(msgspec.Struct, frozen=True, array_like=True):
    """The masses of a store at the moment when a part of a batch was drawn from it."""

    #: What draws over several stores choose it by: live rows, the sum of its priorities, trajectories, the rest of an epoch.
    total: float
    #: The smallest priority above zero, raised to alpha, which its weights are over.
    least: float
    #: Live rows.
    live: int
    #: Exponent of the weights.
    beta: float
    #: Key of the newest epoch; 0: there was none.
    epoch: int
    #: Whether something is left of it.
    goes_on: bool
    #: Weights are to be over the largest of the batch. Those of a part, and ``least``, are over the smallest priority of the part.
    over_batch: bool = False


class Served(msgspec.Struct, frozen=True):
    """A server's description of its store."""

    protocol: int
    engram: str
    #: Equal for all servers of one store.
    store: str
    #: ``store.json``; empty: there is no store yet, and the first write makes it.
    schema: str
    #: What the store notes of its buffer: class, sampler, writer, batch size …
    recipe: dict[str, object]
    sampler: str
    writer: str
    #: Names of :class:`Traits` that hold.
    traits_of_sampler: list[str]
    traits_of_writer: list[str]
    computed_keys: list[tuple[list[str], bool]]
    requested_size: int
    #: Rows that are drawn together, steps of a window or 1, and how many of a batch size they are.
    together: tuple[int, int] = (1, 1)
    #: After how many draws a row is used up; None: never.
    draws_of_a_row: int | None = None
    #: Why batches cannot have rows of other stores, too; empty: they can.
    alone: str = "its server is of an older engram"
    #: Of a store that is to be made.
    lanes: int = 1
    #: Whether it has limits of its own now; None: the server is of an older engram, whose answers do not tell them.
    limited: bool | None = None
    #: How it compresses columns, where a client asks for it.
    compressions: tuple[str | None, ...] = (None,)
    #: Which one this client is of those that are connected; 0: it is the only one.
    participant: int = 0
    #: Whether it takes no rows, as they are moved to other stores.
    drained: bool = False
    #: 1: it knows :class:`Call`, and batches by tokens. 2: :class:`Move`, too. 3: streams named by levels. 0: it is of an older engram.
    level: int = 0
    #: How often a copy of the store took over, and how many rows the last one lacked, at least.
    generation: int = 0
    lost: int = 0
    #: Address of the server that has a copy of the store, and may take over; empty: there is none.
    other: str = ""


class Ticked(msgspec.Struct, frozen=True):
    """The newest checkpoint for a follower."""

    name: str
    #: Rows that were ever written to the store, by now.
    writes: int


class State(msgspec.Struct, frozen=True):
    """Numbers of the store at this moment."""

    size: int
    write_count: int
    counters: dict[str, int | float]
    #: As :class:`Rules`.
    limit: tuple[float, float, int, int]
    limit_counts: dict[str, float]
    #: None: batches cannot have rows of other stores, or there is nothing to draw.
    mass: Mass | None = None
    #: Clients that write through this server.
    writers: int = 0
    #: The number of the limits of several stores that these are a part of, and how many stores; zeros: of this one alone. No stores: the
    #: counts began again here since.
    fleet: tuple[int, int] = (0, 0)
    #: How many fields rows have; 0: the server is of an older engram, which shows those that it began with.
    fields: int = 0
    #: As :class:`Served` has it.
    drained: bool = False


class Removed(msgspec.Struct, frozen=True):
    """The result of a removal."""

    #: How many had the tickets, and are void now.
    removed: int


class Sampled(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of a message of batches, beside its rows."""

    #: The shape of each batch's rows.
    sizes: list[list[int]]
    #: An epoch ended with the last of them.
    last: bool
    #: Of each batch, if they are parts.
    masses: list[Mass] = []
    #: As of :class:`Written`.
    limits: int = 0


class Written(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer says beside the numbers of rows that were written."""

    ok: int
    #: Number of the limits of several stores that hold now; 0: there are none; -1: the store has limits of its own.
    limits: int = 0
    #: The number of the checkpoint that has these rows, and that of the follower; zeros: there is no follower, or the write waited for it.
    position: int = 0
    copied: int = 0


def decoded(kind: object, raw: bytes, call: str) -> msgspec.Struct:
    """A command, checked. Raises ``ValueError``: too long, no JSON, or not what is expected."""
    most = 2 * MAX_BYTES if kind is Make else MAX_COMMAND
    if len(raw) > most:
        raise ValueError(f"{call}: expected a command of at most {most} bytes, got {len(raw)}.")
    try:
        command: msgspec.Struct = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{call}: {error}.") from error
    return command


# ---- errors ------------------------------------------------------------------------------------------------------------


class NotOnce(RuntimeError):
    """Raised where a message that may be sent again cannot be written exactly once. Nothing of it was written."""


class TakesNone(RuntimeError):
    """Raised for rows that a store does not take: it is drained, or has no room for those of one that is. Nothing was written."""


class RowGone(RuntimeError):
    """Raised where a row that is to grow was sealed or discarded.

    ``again``: the message was sent several times, so that an earlier one may have done it.
    """

    def __init__(self, message: str, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


class Refusal(msgspec.Struct, frozen=True):
    """An error on its way to the client."""

    error: str
    message: str


_OURS = (NotOnce, TakesNone, RowGone)
_OTHERS = (*_OURS, KeyError, IndexError, ValueError, TypeError, NotImplementedError, TimeoutError, OSError)


def refusal_of(error: Exception) -> Refusal:
    """An error that a client can raise again: its class, or the nearest one that both sides know."""
    known = [*(getattr(errors, name) for name in errors.__all__), *_OTHERS]
    kind = next((base for base in error.__class__.__mro__ if base in known), RuntimeError)
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return Refusal(kind.__name__, text[: MAX_COMMAND // 2])


def check_level(served: Served, where: str, call: str) -> None:
    """Raise ``RuntimeError``: the server is of an older engram, which knows no such call."""
    if served.level < 1:
        raise RuntimeError(
            f"{call}: expected a server that knows this call, got one of an older engram, {served.engram}, at {where}. Serve the store "
            f"with engram {version.__version__} or newer, or call it where the store is."
        )


def raised(refusal: Refusal, *, again: bool = False) -> Exception:
    """The error again. A class that is no exception of engram's or a builtin one is a ``RuntimeError``."""
    kind = getattr(errors, refusal.error, None) if refusal.error in errors.__all__ else None
    if kind is None:
        kind = next((one for one in _OTHERS if one.__name__ == refusal.error), RuntimeError)
    if kind is RowGone:
        return RowGone(refusal.message, again)
    return kind(refusal.message)


# Threads read their first messages at the same time.
for _kind in [it for it in vars().values() if isinstance(it, type) and issubclass(it, msgspec.Struct)]:
    strict.describe(_kind)
