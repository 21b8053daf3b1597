"""Types of rows and fields: classes that a stored structure names, keys of dicts, the dtypes that a user says, and fields that data may
leave out. Keys are strings and ints; paths and messages call an int by its digits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from engram._support import field_paths, nested, tensordicts
from engram._support.nested import can_be_attribute, class_of, fields_of
from engram._support.words import warn
from engram.errors import IncompatibleStore
from engram.format.layout import SINGLE
from engram.format.schema import DTYPES, INTEGER, Field, Node, Schema, name_of
from engram.store.memory import DTYPE_NAMES, DTYPE_OF

#: Names of dtypes, by the fields' paths.
Dtypes: TypeAlias = Mapping[tuple[str, ...], str]
NO_DTYPES: Dtypes = {}


def overflows(given: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether a value has become infinite, or the largest or smallest float of 8 bits, of which some kinds have no infinity."""
    if given.is_floating_point() and given.itemsize == 1:
        given = given.float()  # those do not know isinf
    if made.itemsize > 1 or not made.is_floating_point():
        return bool((made.isinf() & ~given.isinf()).any())
    limits, given = torch.finfo(made.dtype), given.double()
    return bool((((given > limits.max) | (given < limits.min)) & (given != made.double())).any())


def cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Values as another dtype; None if more than precision would be lost: an int that does not fit, a fraction, an imaginary part, or a
    float that :func:`overflows`.
    """
    if dtype.is_floating_point or dtype.is_complex:
        if value.dtype.is_complex and not dtype.is_complex:
            return None
        made = value.to(dtype)
        return None if overflows(value, made) else made
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return None
    given = value.numpy(force=True)
    whole = given.astype(DTYPE_NAMES[dtype])
    same = (whole.astype(given.dtype) == given).all() and ((whole < 0) == (given < 0)).all()
    return torch.from_numpy(whole).to(value.device) if same else None


def dtype_name(given: object) -> str:
    """The name of a dtype of torch or NumPy; empty: it is none that can be stored."""
    try:
        name = DTYPE_NAMES[given] if isinstance(given, torch.dtype) else str(given)
        # NumPy does not know all of ours, and takes None for float64.
        name = name if name in DTYPES or given is None else np.dtype(given).name  # type: ignore[call-overload] # that is the question
    except (KeyError, TypeError):
        return ""
    return name if name in DTYPES else ""


def checked_dtypes(dtypes: object, where: str) -> Dtypes:
    """The dtypes of fields by their paths.

    Raises:
        TypeError: no mapping, a key that is no name or tuple of names, or a value that is no dtype.
    """
    if not isinstance(dtypes, Mapping):
        raise TypeError(f'{where}: dtypes: expected a dict such as {{"reward": torch.float32}}, got {dtypes!r:.80}.')
    checked = {}
    for key, dtype in dtypes.items():
        name = dtype_name(dtype)
        if not name:
            nested = f" Name nested fields by tuples, ({key!r}, …)." if isinstance(dtype, Mapping) else ""
            raise TypeError(
                f"{where}: dtypes: {key!r}: expected a dtype, one of {', '.join(DTYPES)}, got {dtype!r:.80}.{nested}"
            )
        checked[field_paths.checked_path(key, f"{where}: dtypes")] = name
    return checked


def check_stored(fields: Sequence[Field], dtypes: Dtypes) -> None:
    """Raise ``IncompatibleStore`` unless fields have these dtypes."""
    stored = {field.key: field.dtype for field in fields}
    for key, dtype in dtypes.items():
        if key not in stored:
            raise IncompatibleStore(
                f"dtypes: expected stored fields, {[field.name for field in fields]}, got field {name_of(key)}."
            )
        if stored[key] != dtype:
            raise IncompatibleStore(
                f"dtypes: expected {dtype} for the field {name_of(key)}, as was given, but it is stored as {stored[key]}."
            )


class Added(NamedTuple):
    """Fields that were added."""

    #: What they are filled with, as ``Schema.added`` has it.
    digits: tuple[str, ...]
    #: The same by number, ``[*shape]``.
    fills: dict[int, torch.Tensor]

    @classmethod
    def of(cls, schema: Schema) -> Added:
        """Those of a schema."""
        if not schema.added:
            return NOTHING_ADDED
        numbers = range(schema.first_fields, len(schema.fields))
        return cls(schema.added, {n: _row(schema.fields[n], schema.fill(n) or b"") for n in numbers})

    def without(self, children: Mapping[str, Node], given: Collection[str]) -> dict[str, Node]:
        """Children of a node that data must have, and those that it has."""
        return {name: child for name, child in children.items() if name in given or not self._may_lack(child)}

    def _may_lack(self, node: Node) -> bool:
        if node.kind == "leaf":
            return node.field in self.fills
        return bool(node.children) and all(map(self._may_lack, node.children.values()))

    def missing(self, children: Mapping[str, Node], given: Collection[str]) -> Iterator[int]:
        """Numbers of the fields below children that are not given."""
        for name, child in children.items():
            if name not in given:
                yield from _leaves(child)


def _leaves(node: Node) -> Iterator[int]:
    if node.kind == "leaf":
        yield node.field
    for child in node.children.values():
        yield from _leaves(child)


def _row(field: Field, raw: bytes) -> torch.Tensor:
    if not raw:
        return torch.empty(field.shape, dtype=DTYPE_OF[field.dtype], device="cpu")
    words = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return words.view(DTYPE_OF[field.dtype]).view(field.shape)


NOTHING_ADDED = Added((), {})


_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
#: Of these the value alone tells a key: ``1 == True == 1.0``.
_PLAIN = frozenset((str, int))


def by_name(entries: Iterable[tuple[object, object]], path: tuple[str, ...], call: str) -> dict[str, object]:
    """Entries of a container by the names that they have in paths.

    Raises:
        TypeError: a key that is neither a string nor an int of 64 bits, or two keys of one name, such as ``0`` and ``"0"``.
    """
    named: dict[str, object] = {}
    for key, value in entries:
        if not isinstance(key, str):
            _check_int(key, path, call)
        name = key if isinstance(key, str) else str(key)
        if name in named:
            raise TypeError(
                f"{call}: {at(path)}: expected either {name!r} or {name} as a key, got both: their fields would have one name. "
                "Rename one of them."
            )
        named[name] = value
    return named


def _check_int(key: object, path: tuple[str, ...], call: str) -> None:
    """Raise ``TypeError`` for a key that is no int, or more than one: a bool, a member of an enum, an int beyond 64 bits."""
    is_int = isinstance(key, int) and repr(key).removeprefix("-").isdecimal()
    if not is_int:
        got = f"{key!r:.60}, a {type(key).__name__}"
    elif not _INT64_MIN <= key <= _INT64_MAX or not INTEGER.fullmatch(str(key)):  # type: ignore[operator]
        got = f"one of {int(key).bit_length()} bits"  # type: ignore[call-overload]
    else:
        return
    raise TypeError(f"{call}: {at(path)}: expected keys that are strings or ints of 64 bits, got {got}. Rename it.")


def taken_by_key(node: Node, entries: dict[str | int, object]) -> dict[str, object]:
    """Entries of a dict, by name, under the keys of a node; None where there is none. Empty: a key is no plain string or int."""
    if not _PLAIN.issuperset(map(type, entries)):
        return {}
    return {name: entries.get(key) for name, key in zip(node.children, node.keys, strict=True)}


def at(path: tuple[str, ...]) -> str:
    """Where in the data, for a message."""
    if not path or path == (SINGLE,):
        return "data"
    return f"field {path[0]!r}" if len(path) == 1 else f"field {path}"


def find_types(node: Node, types: dict[str, type[object]]) -> None:
    """Add the classes that a structure names to ``types``. A named tuple of the same fields stands for a dataclass or named tuple that this
    program has not defined.

    Raises:
        TypeError: a tensorclass that it has not defined, or a class that has other fields now.
    """
    if node.type and node.type not in types:
        types[node.type] = _find_type(node)
    for child in node.children.values():
        find_types(child, types)


def _find_type(node: Node) -> type[object]:
    """A class that the program has defined already. A name found in a file never makes us import anything."""
    module_name, _, qualname = node.type.partition(":")
    found = _found(node.type)
    fits = isinstance(found, type) and (
        tensordicts.is_tensorclass_type(found)
        if node.kind == "tensorclass"
        else is_dataclass(found) or (issubclass(found, tuple) and hasattr(found, "_fields"))
    )
    if not fits and node.kind == "namedtuple" and all(map(can_be_attribute, node.children)):
        return _stand_in(node.type, tuple(node.children))
    if not fits:
        raise TypeError(
            f"open: the rows are of the {node.kind} {qualname!r}, which this program has not defined. "
            f"Import it first (it was defined in module {module_name!r})."
        )
    if node.kind == "namedtuple" and fields_of(found) != tuple(node.children):
        raise TypeError(
            f"open: the rows are of the namedtuple {qualname!r} with the fields {list(node.children)}, but in this program it has "
            f"{list(fields_of(found))}. Define it as it was; rows whose fields are numbers come from before engram kept the names: write "
            "them again."
        )
    cls: type[object] = found
    return cls


def _found(name: str) -> Any:
    """What lies under a name now; None: nothing."""
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    return found


@functools.cache
def _stand_in(name: str, fields: tuple[str, ...]) -> type[object]:
    module_name, _, qualname = name.partition(":")
    warn(
        f"open: the rows are of the class {qualname!r} of module {module_name!r}, which this program has not defined: here they are named "
        f"tuples with its fields, {', '.join(fields)}. Define or import it before to have it."
    )
    return class_of(fields)


def stands_in(cls: type[object]) -> bool:
    """Whether a class stands for one that the program has not defined."""
    return cls.__module__ == class_of.__module__


def of_users(types: Mapping[str, type[object]]) -> dict[str, type[object]]:
    """Those of the classes that the user has defined, and that other processes find under their names."""
    return {name: cls for name, cls in types.items() if not stands_in(cls) and is_named(cls, name)}


def is_named(cls: type[object], name: str) -> bool:
    """Whether a class is what a structure calls by that name. Those that functions make are not, nor are those that were made again."""
    return _found(name) is cls


def takes_rows_of(
    cls: type[object], node: Node, types: dict[str, type[object]], kept: MutableMapping[str, object]
) -> bool:
    """Whether data may be of a class. Where the first row's is not found under its name, the fields count: the caller compares them.

    The user's own class takes the place of one that stands in for it: batches are of it from then on, and the ``intake`` is made again.
    """
    known = types[node.type]
    if cls is known or node.kind != "namedtuple" or is_named(known, node.type):
        return cls is known
    if stands_in(known) and fields_of(cls) == tuple(node.children):
        types[node.type] = cls
        kept.pop("intake", None)
    return True


def is_leaf(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray | np.generic) or nested.is_numbers(value)


def _are_of_numpy(numbers: object) -> bool:
    """Of a number or a list of some: whether all of them are NumPy's, and have a dtype."""
    return all(map(_are_of_numpy, numbers)) if isinstance(numbers, list) else isinstance(numbers, np.generic)


#: dtypes of Python's numbers, by the kind that NumPy makes of them.
_NUMBERS = {"b": torch.bool, "i": torch.int64, "f": torch.float32}


def as_tensor(value: object, key: tuple[str, ...], call: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor, or one over the memory of an array where torch can use that.

    Numbers of Python's become ``dtype`` if it can hold them: an int also a float, a float no int. Lists of NumPy's keep theirs.
    """
    if isinstance(value, torch.Tensor):
        return value
    if not is_leaf(value):
        raise no_tensor(value, key, call)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(f"{call}: {at(key)}: expected lists of one length, got ragged. Use a ListStorage.") from error
    if array.dtype.kind in _NUMBERS and nested.is_numbers(value) and not _are_of_numpy(value):
        numbers = torch.as_tensor(array, device="cpu")
        wanted = dtype or _NUMBERS[array.dtype.kind]
        holds = torch.can_cast(numbers.dtype, wanted) and (wanted is torch.bool) == (numbers.dtype is torch.bool)
        cast = numbers.to(wanted if holds else _NUMBERS[array.dtype.kind])
        if wanted.is_floating_point:
            return numbers if dtype is not None and overflows(numbers, cast) else cast
        wraps = wanted is torch.uint64 and bool((numbers < 0).any())  # and back, when it is compared
        return cast if not wraps and torch.equal(cast.to(numbers.dtype), numbers) else numbers
    # Another name of uint64, which torch does not know: Python's ints from 2**63 on are these.
    if array.dtype.char == "Q":
        array = array.view(np.uint64)
    if not (array.flags.carray and array.dtype.isnative) or min(array.strides, default=0) < 0:
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
    try:
        with torch.device("cpu"):
            return torch.from_numpy(array)
    except TypeError as error:
        raise TypeError(
            f"{call}: {at(key)}: an array of {array.dtype} cannot be stored. Use a ListStorage for strings and other objects."
        ) from error


def no_tensor(value: object, key: tuple[str, ...], call: str) -> TypeError:
    advice = "Use torch.as_tensor(…), or a ListStorage for strings and other objects."
    known = isinstance(value, np.ndarray | np.generic) or tensordicts.is_tensor_collection(value)
    if "shape" in dir(value) and not known:  # such as a data set of h5py
        advice = f"Read it first: {key[-1] if key else 'data'}[:], an array."
    return TypeError(f"{call}: {at(key)}: expected a tensor or an array, got {nested.describe(value)}. {advice}")
