"""Experience replay that survives.

The public names are those of ``__init__.pyi``, which editors and type checkers read. A name is imported when it is first used, so
that ``engram --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from engram._support.absent import MovedModules, hint_on

_STUB = Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
_MODULE_OF = {name: module for module, name in re.findall(r"^from (\S+) import \w+ as (\w+)$", _STUB, re.MULTILINE)}

sys.meta_path.append(MovedModules())

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - a list


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'engram' has no attribute {name!r}{hint_on(name)}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
