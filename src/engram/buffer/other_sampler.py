"""A checkpoint that a buffer with another sampler has saved: what of its state counts for the sampler here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from engram._support.state import real, saved
from engram.buffer.wiring import Wiring
from engram.errors import IncompatibleCheckpoint
from engram.saved import parts
from engram.store import priorities

#: Parts that may be of another class. Which one a sampler goes with is often the buffer's to say.
_OTHERS = ("sampler", "buffer", "writer")
#: Writers whose state says nothing, and that place rows alike.
_RINGS = ("RoundRobinWriter", "TensorDictRoundRobinWriter")
#: The writer of buffers that only read, whatever wrote.
_READS = "FollowingWriter"
#: Where a state has no ``convert``.
INSTEAD = " A buffer with another sampler takes the rows by dumps and loads(convert=True)."
_ADVICE = " With convert=True its rows are taken, and drawn by the sampler here."


def checked_states(
    found: Mapping[str, parts.SavedPart], shard: Path, kinds: Mapping[str, str], *, convert: bool
) -> dict[str, dict[str, object]]:
    """As :func:`parts.checked_states`; ``convert``: the sampler may be another one, with the buffer and the ring that go with it."""
    others = {name: found[name].type for name in _OTHERS if name in found}
    if kinds["writer"] != _READS and {others.get("writer"), kinds["writer"]} - set(_RINGS):
        others.pop("writer", None)
    if convert:
        return parts.checked_states(found, shard, {**kinds, **others})
    try:
        return parts.checked_states(found, shard, kinds)
    except IncompatibleCheckpoint as error:
        if any(part.type != {**kinds, **others}.get(name, part.type) for name, part in found.items()):
            raise
        raise IncompatibleCheckpoint(f"{error}{_ADVICE}") from error


def check_priorities(theirs: Mapping[str, object], kinds: Mapping[str, str], wiring: Wiring, where: str) -> None:
    """Raise ``IncompatibleCheckpoint`` for a state with priorities of a sampler without, or the other way round: ``anchors``."""
    here = wiring.of_sampler.prioritized
    if wiring.source is wiring.sampler and ("leaves" in theirs) != here:
        ours, got = ("with", "without") if here else ("without", "with")
        raise IncompatibleCheckpoint(
            f"{where}: expected the state of a {kinds['sampler']} {ours} priorities, as here, got one {got}.{_ADVICE}"
        )


class Conversion(NamedTuple):
    """The part of another sampler's state that a sampler takes over."""

    #: Of all parts, for the buffer here.
    states: dict[str, dict[str, object]]
    #: False: its state says nothing of these rows: each gets the default priority, if there are any, and epochs begin.
    loads_sampler: bool = True
    #: As :attr:`~engram.types.BufferLoad.converted`.
    converted: str = ""


def _with_parameters_of(own: dict[str, object], theirs: dict[str, object], where: str) -> dict[str, object]:
    """Priorities that were saved, as they are with the ``alpha`` and ``eps`` here."""
    return priorities.with_parameters(theirs, real(own, "alpha", where), real(own, "eps", where))


def converted(
    states: dict[str, dict[str, object]],
    found: Mapping[str, parts.SavedPart],
    kinds: Mapping[str, str],
    wiring: Wiring,
    batch_size: int | None,
    where: str,
) -> Conversion:
    """What is loaded in place of the states of parts, whose sampler may be another one. A ``batch_size`` that is there stays.

    Raises:
        IncompatibleCheckpoint: a sampler of the user's own, which alone knows what it needs.
    """
    own, theirs = saved(wiring.bound_sampler(), "_sampler"), states["sampler"]
    if found["writer"].type != kinds["writer"]:
        states = {**states, "writer": saved(wiring.writer, "_writer")}
    same_class, users = found["sampler"].type == kinds["sampler"], wiring.source is not wiring.sampler
    if same_class and (users or own.keys() ^ theirs.keys() <= parts.WHILE_IT_GOES_ON):
        if "leaves" in own and not users:
            states = {**states, "sampler": _with_parameters_of(own, theirs, where)}
        return Conversion(states)
    if users:
        raise IncompatibleCheckpoint(
            f"{where}: expected the state of a {kinds['sampler']}, as here, got that of a {found['sampler'].type}. Samplers of your own "
            "cannot be converted to: load the rows into a buffer with one of engram's, then set_sampler."
        )
    ours = parts.reset_epoch(own, 0)
    what = "its epoch begins" if "visited" in own else "none was drawn yet" if "counts" in own else ""
    if "leaves" in own and "leaves" in theirs:
        ours = {**_with_parameters_of(own, theirs, where), "beta": own["beta"]}
        what = "their priorities were taken"
    elif "leaves" in own:
        what = "rows without priorities have the default one"
    elif "leaves" in theirs:
        what = "priorities that were saved are not used"
    states = {
        **states,
        "sampler": ours,
        "prefetch": dict(parts.EMPTY["prefetch"]),
        "buffer": {**states["buffer"], "iterating": False, "batch_size": batch_size or states["buffer"]["batch_size"]},
    }
    theirs_is, ours_is = found["sampler"].type, kinds["sampler"]
    said = f"rows of a buffer with a {theirs_is} are drawn by a {ours_is} from now on" + (what and f"; {what}")
    takes = "leaves" not in own or "leaves" in theirs
    return Conversion(states, loads_sampler=takes, converted=said)
