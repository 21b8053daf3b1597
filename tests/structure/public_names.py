"""The names that programs use: of every public module path, with the parameters of all that can be called.

A name or a keyword may be added; none may vanish, and no parameter may become required.
"""

import enum
import importlib
import inspect
import json
import re
import sys
import typing
from pathlib import Path

from engram._support import absent

FILE = Path(__file__).with_name("public_names.json")
#: What programs import from.
MODULES = (
    "engram",
    "engram.buffer",
    "engram.collate",
    "engram.errors",
    "engram.expanders",
    "engram.format.tables",
    "engram.format.verify",
    "engram.loader",
    "engram.ranks",
    "engram.samplers",
    "engram.sizing",
    "engram.storages",
    "engram.trajectories",
    "engram.transforms",
    "engram.types",
    "engram.writers",
)
_KIND = inspect._ParameterKind
_POSITIONAL = (_KIND.POSITIONAL_ONLY, _KIND.POSITIONAL_OR_KEYWORD)


def found():
    """By module and name: parameters of a function; parameters and members of a class; None for anything else."""
    names = {}
    for module in MODULES:
        loaded = importlib.import_module(module)
        names[module] = {name: _described(getattr(loaded, name)) for name in sorted(_public(loaded))}
    return names


def _public(module):
    """Its ``__all__``, or all that it defines itself."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [
            *listed,
            *(name for names in absent._MOVED_NAMES.get(module.__name__, {}).values() for name in names.split()),
        ]
    home = absent.moved_to(module.__name__) or module.__name__
    return [name for name, value in vars(module).items() if name[0] != "_" and _home(value) == home]


def _described(value):
    if inspect.isclass(value):
        members = {name: _member(name, value) for name in sorted(dir(value)) if _is_ours(name, value)}
        return {"call": _parameters(value), "members": members}
    return {"call": _parameters(value)} if callable(value) else None


def _is_ours(name, cls):
    """Whether the member is one that programs may use and that this package defines."""
    if name.startswith("_") and not (name.startswith("__") and name.endswith("__")):
        return False
    home = next((base for base in cls.__mro__ if name in vars(base)), None)
    if home is None:  # of the metaclass, as an enum's __members__ is
        return False
    if not home.__module__.startswith("engram"):
        return False
    # The others are Python's own, or differ by its version.
    return name[0] != "_" or (
        inspect.isfunction(vars(home)[name]) and name not in {"__init__", "__new__", "__replace__"}
    )


def _member(name, cls):
    value = inspect.getattr_static(cls, name)
    if isinstance(value, staticmethod | classmethod):
        value = getattr(cls, name)
    return _parameters(value) if inspect.isroutine(value) and name[:2] != "__" else None


def _parameters(value):
    """As they stand in a ``def``, without annotations and defaults: ``(self, rows, *, lane=)``; None: they cannot be known."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return None
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    known = []
    for one in signature.parameters.values():
        if one.kind is one.VAR_KEYWORD and (keywords := _unpacked(one.annotation, value)):
            known += [_Parameter(name, one.KEYWORD_ONLY, optional=True) for name in keywords]
        else:
            known.append(_Parameter(one.name, one.kind, optional=one.default is not one.empty))
    return _as_text(known)


class _Parameter(typing.NamedTuple):
    name: str
    kind: inspect._ParameterKind
    optional: bool


def _as_text(parameters):
    star, words = False, []
    for at, one in enumerate(parameters):
        if one.kind is _KIND.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        star |= one.kind is _KIND.VAR_POSITIONAL
        stars = {_KIND.VAR_POSITIONAL: "*", _KIND.VAR_KEYWORD: "**"}.get(one.kind, "")
        words.append(f"{stars}{one.name}{'=' * one.optional}")
        following = parameters[at + 1].kind if at + 1 < len(parameters) else None
        if one.kind is _KIND.POSITIONAL_ONLY and following is not _KIND.POSITIONAL_ONLY:
            words.append("/")
    return f"({', '.join(words)})"


def _parsed(text):
    """The parameters that :func:`_as_text` wrote, by name and in order."""
    parameters, kind = [], _KIND.POSITIONAL_OR_KEYWORD
    for word in filter(None, text.strip("()").split(", ")):
        if word == "/":
            parameters = [one._replace(kind=_KIND.POSITIONAL_ONLY) for one in parameters]
        elif word == "*":
            kind = _KIND.KEYWORD_ONLY
        elif word.startswith("**"):
            parameters.append(_Parameter(word[2:], _KIND.VAR_KEYWORD, optional=False))
        elif word.startswith("*"):
            parameters.append(_Parameter(word[1:], _KIND.VAR_POSITIONAL, optional=False))
            kind = _KIND.KEYWORD_ONLY
        else:
            parameters.append(_Parameter(word.rstrip("="), kind, optional=word.endswith("=")))
    return {one.name: one for one in parameters}


def _unpacked(annotation, value):
    """Keywords of ``**more: Unpack[Table]``."""
    name = re.fullmatch(r"(?:\w+\.)*Unpack\[([\w.]+)\]", annotation) if isinstance(annotation, str) else None
    if name is None:
        tables = typing.get_args(annotation)
    else:
        last = name[1].rpartition(".")[2]
        ours = [module for key, module in sorted(sys.modules.items()) if key.partition(".")[0] == "engram"]
        places = [sys.modules.get(_home(value)), *ours]
        tables = [getattr(place, last) for place in places if hasattr(place, last)]
    return list(tables[0].__annotations__) if tables else []


def _home(value):
    return getattr(value, "__module__", None)


def vanished(before, now):
    """What a program may use before and not now, a line each."""
    for module, names in before.items():
        if module not in now:
            yield f"{module} is gone"
            continue
        for name, one in names.items():
            where = f"{module}.{name}"
            if name not in now[module]:
                yield f"{where} is gone"
                continue
            yield from _vanished_of(where, one, now[module][name])


def _vanished_of(where, before, now):
    if before is None:
        return
    if now is None:
        yield f"{where} cannot be called"
        return
    yield from _vanished_parameters(where, before["call"], now["call"])
    for name, parameters in before.get("members", {}).items():
        if name not in now.get("members", {}):
            yield f"{where}.{name} is gone"
        else:
            yield from _vanished_parameters(f"{where}.{name}", parameters, now["members"][name])


def _vanished_parameters(where, before, now):
    if before is None or now is None:
        return
    old, new = _parsed(before), _parsed(now)
    any_keyword = any(one.kind is _KIND.VAR_KEYWORD for one in new.values())
    any_position = any(one.kind is _KIND.VAR_POSITIONAL for one in new.values())
    positions = [name for name, one in new.items() if one.kind in _POSITIONAL]
    for at, (name, one) in enumerate(old.items()):
        if name not in new:
            if one.kind is _KIND.VAR_KEYWORD and new.keys() - old.keys():
                continue  # its keywords are named now
            if not any_keyword or (one.kind in _POSITIONAL and not any_position):
                yield f"{where}: {name} is gone"
            continue
        if one.optional and not new[name].optional:
            yield f"{where}: {name} is required now"
        if one.kind in _POSITIONAL and positions[at : at + 1] != [name] and not any_position:
            yield f"{where}: {name} is not parameter {at} now"
        if one.kind is not _KIND.POSITIONAL_ONLY and new[name].kind is _KIND.POSITIONAL_ONLY:
            yield f"{where}: {name} is no keyword now"
    for name, one in new.items():
        if name not in old and not one.optional and one.kind not in (_KIND.VAR_POSITIONAL, _KIND.VAR_KEYWORD):
            yield f"{where}: {name} is new and required"


def merged(before, now):
    """What is kept, and what is new. Names that vanished stay, as do members that are for the package itself."""
    merged = {}
    for module, names in before.items():
        of = dict(names)
        for name, one in now[module].items():
            old = of.setdefault(name, one)
            if old is not None and one is not None:
                members = {key: one["members"].get(key, value) for key, value in old.get("members", {}).items()}
                of[name] = {"call": one["call"], **({"members": members} if "members" in old else {})}
        merged[module] = dict(sorted(of.items()))
    return merged


def kept():
    return json.loads(FILE.read_text())


def write(names):
    """One line a member, so that changes can be read."""
    FILE.write_text(json.dumps(names, indent=1) + "\n")
