"""Arguments of TorchRL that engram does not have yet: refused by name, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["refuse"]


def refuse(call: str, arguments: Mapping[str, Any], later: Mapping[str, str]) -> None:
    """Raise ``TypeError`` for arguments left over.

    Those in ``later`` are named with what will carry them; their "off" values None and False are accepted.
    """
    for name, value in arguments.items():
        if name not in later:
            raise TypeError(f"{call}: unexpected argument {name!r}.")
        if value is not None and value is not False:
            raise TypeError(f"{call}: the argument {name!r} is not supported yet; it will come with {later[name]}.")
