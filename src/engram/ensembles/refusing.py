"""What an ensemble does not have, as it has no rows of its own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def naming(member: int, after: str = "") -> Iterator[None]:
    """Errors of a member say its number, and what has come of the call."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Raised by member {member} of the ensemble.{after and ' ' + after}")
        raise


def asks_a_member(call: str, kind: type[Exception] = RuntimeError) -> Callable[..., NoReturn]:
    """A method of a buffer, or of a storage, that an ensemble does not have."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise kind(
            f"{call}: an ensemble has no rows of its own. Ask a member, ensemble[i], or its storage, ensemble.storage[i]."
        )

    refuse.__doc__ = f"Raises ``{kind.__name__}``: it is asked of a member."
    return refuse
