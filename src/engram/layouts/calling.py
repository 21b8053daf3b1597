"""How hooks are called: what they must take, and what they must return."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from engram._tensordict import tensordict_type
from engram.state import raised_by_the_user

if TYPE_CHECKING:
    from pathlib import Path

    from tensordict import TensorDict

    from engram.layouts.hooked import LoadHook, SaveHook

#: What hooks are called with besides the data: the keyword of a save hook, and of a load hook.
_KEYWORD = {"save": ("path", "folder"), "load": ("out", "None")}


def check_hook(hook: SaveHook | LoadHook, kind: str, who: str) -> None:
    """Raise ``TypeError`` unless a hook can be called as it will be.

    Args:
        hook: which. The call itself tells of a function of C that has no signature.
        kind: ``save`` or ``load``.
        who: what the message begins with.
    """
    keyword, value = _KEYWORD[kind]
    expected = f"{who}: register_{kind}_hook: expected a function that can be called as hook(data, {keyword}={value}), got {hook!r:.80}"
    if not callable(hook):
        raise TypeError(f"{expected}. Register a function.")
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return
    try:
        signature.bind(None, **{keyword: None})
    except TypeError as error:
        raise TypeError(
            f"{expected}, which takes {signature}: {error}. Define it as (data, {keyword}=None)."
        ) from error


def saved_by(hook: SaveHook, data: TensorDict, path: Path, who: str) -> TensorDict:
    """What a save hook makes of rows. Raises what it raises, with a note that names it; ``TypeError``: no TensorDict."""
    with raised_by_the_user(f"Raised by the save hook {hook!r:.80} of {who}."):
        return _checked(hook(data, path=path), f"{who}: dumps", hook)


def loaded_by(hook: LoadHook, data: TensorDict, where: str) -> TensorDict:
    """What a load hook makes of what was saved. Raises as :func:`saved_by`."""
    with raised_by_the_user(f"Raised by the load hook {hook!r:.80}."):
        return _checked(hook(data, out=None), f"{where}: load", hook)


def _checked(data: TensorDict, call: str, hook: SaveHook | LoadHook) -> TensorDict:
    if not isinstance(data, tensordict_type()):
        raise TypeError(
            f"{call}: expected a TensorDict from {hook!r:.80}, got {type(data).__name__}. Return one from it, also where the hook changes "
            "the data in place."
        )
    return data
