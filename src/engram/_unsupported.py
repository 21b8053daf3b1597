"""Arguments of TorchRL that engram does not have yet: rejected by name, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def reject_unsupported(call: str, arguments: Mapping[str, object], not_yet: Mapping[str, str]) -> None:
    """Raise ``TypeError`` for arguments that are left over.

    ``not_yet`` names the known ones, with what will carry them. Their "off" values None and False are accepted.
    """
    for name, value in arguments.items():
        if name not in not_yet:
            raise TypeError(f"{call}: unexpected argument {name!r}.")
        if value is not None and value is not False:
            raise TypeError(f"{call}: the argument {name!r} is not supported yet; it will come with {not_yet[name]}.")
