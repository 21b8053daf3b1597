"""From what a user hands over to columns, and back: nested TensorDicts, tensorclasses, dicts, tuples, one tensor.

The first row fixes the structure. Later data is checked against it leaf by leaf before anything is written, so a write
either fits completely or changes nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass as is_dataclass_type
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engram._support import field_paths, native, nested, tensordicts
from engram.format.layout import SINGLE
from engram.format.schema import DTYPES, Field, Kind, Node, Schema, key_differences, name_of, validate_key
from engram.storages import _types
from engram.storages.ragged import ItemField
from engram.store.memory import DTYPE_NAMES, DTYPE_OF, dlpack_specs

#: How many rows there are in a leaf at a path that is no tensor. None: it is one, or something else.
RowsAt: TypeAlias = Callable[[object, tuple[str, ...]], int | None]

#: What makes a row of this kind of one of another.
_REMEDIES = {"tensordict": " Write TensorDict(data, [n]); [] of one row.", "dict": " Write data.to_dict()."}
_ONE_ROW = "For one row use add(); a TensorDict of n rows has batch_size=[n]"
_NO_DATA = "expected a tensor with data, got one on the meta device."
_FLOATS = tuple(dtype for dtype in DTYPE_NAMES if dtype.is_floating_point or dtype.is_complex)


class Structure:
    """How a row is put together from fields, with the checks that data must pass."""

    #: Whether columns must be on the CPU; a store on an accelerator takes them from anywhere.
    on_host = True
    #: What it was before a field was added; None: it has those of the first row.
    _before: Structure | None = None
    #: What messages compare data with.
    whose = ""
    #: The fields whose rows have different lengths, by number.
    ragged: Mapping[int, ItemField] = {}

    def __init__(
        self,
        fields: Sequence[Field],
        root: Node,
        types: Mapping[str, type[object]] | None = None,
        dtypes: _types.Dtypes = _types.NO_DTYPES,
        added: _types.Added = _types.NOTHING_ADDED,
        names: Mapping[tuple[str, ...], tuple[str | None, ...]] | None = None,
    ) -> None:
        self.fields = tuple(fields)
        #: Names of the dims of a row's TensorDicts, by path; those without any are not there. No store records them.
        self.names = names or {}
        #: The last fields, which data may leave out, as they were added since the first row.
        self.added = added
        #: The fields whose dtype the user has said: values of others are cast to it.
        self.casts = [i for i, field in enumerate(self.fields) if field.key in dtypes] if dtypes else []
        self.dtypes = dtypes
        self.root = root
        #: Whether a row is a plain TensorDict.
        self.is_tensordict = root.kind == "tensordict"
        self.is_leaf = root.kind == "leaf"
        self._types = dict(types or {})
        self._specs = tuple((DTYPE_OF[f.dtype], torch.Size(f.shape), DTYPE_OF[f.dtype] in _FLOATS) for f in self.fields)
        self._layout = native.Layout(dlpack_specs(self.fields))
        #: Whether it is TensorDicts and dicts in each other, their leaves in the order of the fields.
        self._plain = root.kind in _PLAIN and _leaves_of_plain(root) == list(range(len(self.fields)))
        #: Names of the fields in order, if a row is one flat TensorDict or dict: the common cases have a short path.
        flat = self._plain and not root.integers and all(child.kind == "leaf" for child in root.children.values())
        self._flat = tuple(root.children) if flat else None
        self._flat_type = tensordicts.tensordict_type() if self.is_tensordict else dict
        self._complete()

    #: Of the ragged fields that share lengths: the items of a row, and number and kind of each.
    _groups: Sequence[tuple[int, Sequence[tuple[int, str]]]] = ()

    def _complete(self) -> None:
        """Note what a structure with ragged fields knows besides."""

    @property
    def is_described(self) -> bool:
        """Whether a schema says all of it: it has no types of the user's own."""
        return not _types.of_users(self._types)

    @cached_property
    def intake(self) -> native.Intake | None:
        """What the core takes data of this structure apart with; None: it has parts that only Python knows."""
        tree = self._tree(self.root)
        specs = dlpack_specs([field.ragged or field for field in self.fields])
        return None if tree is None else native.Intake(specs, tree, self.casts, self._groups)

    def _tree(self, node: Node) -> object:
        """A structure as the core takes it; None if it holds a tensorclass."""
        if node.kind == "leaf":
            return node.field
        trees = [self._tree(child) for child in node.children.values()]
        kind = _BUILTIN.get(node.kind) or self._types.get(node.type)
        if node.kind == "tensordict":
            kind = tensordicts.transparent_type()
        if node.kind == "tensorclass" or kind is None or None in trees:
            return None
        return ("object" if is_dataclass_type(kind) else node.kind, kind, list(node.keys), trees)

    def __getstate__(self) -> dict[str, object]:
        state = {key: value for key, value in self.__dict__.items() if key not in ("_layout", "intake")}
        return {**state, "_types": _types.of_users(self._types)}

    def __deepcopy__(self, _: object) -> Structure:
        """With the same classes: pickles know those of other processes only by their names."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), _types=dict(self._types))
        return twin

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        _types.find_types(self.root, self._types)
        self._layout = native.Layout(dlpack_specs(self.fields))

    # ---- from the first data -----------------------------------------------------------------------------------------

    @classmethod
    def of(cls, data: object, *, batched: bool, call: str, dtypes: _types.Dtypes = _types.NO_DTYPES) -> Structure:
        """The structure of a first row, or of a first batch of rows. ``dtypes``: of some fields, in place of the data's.

        Raises:
            TypeError: a leaf that is no tensor or array, or a dtype that cannot be stored; names the field.
            KeyError: ``dtypes`` of a field that is not there. ValueError: a key that cannot be stored.
        """
        builder = _Builder(batched=batched, call=call)
        root = builder.node(data, ())
        if not builder.fields:
            raise TypeError(
                f"{call}: expected at least one tensor, got {nested.describe(data)}. Add one, or use a ListStorage."
            )
        if dtypes:
            builder.give(dtypes)
        return cls(builder.fields, root, builder.types, dtypes, names=builder.names)

    @classmethod
    def from_schema(cls, schema: Schema, dtypes: _types.Dtypes = _types.NO_DTYPES) -> Structure:
        """The structure of a stored schema. ``dtypes``: those of fields to which values of others are cast.

        Raises:
            TypeError: as :func:`find_types`.
            IncompatibleStore: other ``dtypes`` than it has.
        """
        types: dict[str, type[object]] = {}
        _types.find_types(schema.structure, types)
        if dtypes:
            _types.check_stored(schema.fields, dtypes)
        return cls(schema.fields, schema.structure, types, dtypes, _types.Added.of(schema))

    def grown(self, schema: Schema) -> Structure:
        """The structure of rows with more fields."""
        grown = type(self)(
            schema.fields, schema.structure, self._types, self.dtypes, _types.Added.of(schema), self.names
        )
        grown.on_host, grown._before, grown.whose = self.on_host, self, self.whose
        return grown

    # ---- data to columns ---------------------------------------------------------------------------------------------

    def flatten(self, data: object, n: int | None, call: str, ignored: Iterable[str] = ()) -> list[Tensor]:
        """Columns of a row (``n`` None) or of ``n`` rows: contiguous, on the CPU or where they were.

        Args:
            data: must have this structure.
            n: rows, or None for one row without batch dimension.
            call: name of the public call, for messages.
            ignored: entries of the root that may be there without being stored.

        Returns:
            One tensor per field, ``[n, *shape]`` or ``[*shape]``; the user's own memory where it was contiguous already.

        Raises:
            KeyError: a field is missing or unknown.
            RuntimeError: a shape or dtype differs from the first row's.
            TypeError: a leaf is no tensor or array, or data is of another kind than the first row.
        """
        if self._flat is not None and self.on_host and type(data) is self._flat_type:
            source = tensordicts.children(data, whole=True) if self.is_tensordict else data
            if len(source) == len(self._flat):
                try:
                    columns = [source[name] for name in self._flat]
                except KeyError:
                    pass
                else:
                    if self._layout.fits(columns, -1 if n is None else n):
                        return columns
        elif self._plain and self.on_host:
            columns = []
            if _collect(self.root, data, columns) and self._layout.fits(columns, -1 if n is None else n):
                return columns
        found: dict[int, Tensor] = {}
        self._walk(self.root, data, () if n is None else (n,), found, call, (), frozenset(ignored))
        return [found[i] for i in range(len(found))]

    def column(self, i: int, value: object, batch: tuple[int, ...], *, call: str, loose: bool = False) -> Tensor:
        """Values ``[*batch, *shape]`` for one field as rows ``[n, *shape]``; for a single row ``[*shape]`` will do.

        ``loose``: rows may be in other dimensions, in the same order, and dimensions of size 1 be missing or elsewhere.
        """
        shape, value = self._specs[i][1], _types.as_tensor(value, self.fields[i].key, call, self._specs[i][0])
        expected = torch.Size((*batch, *shape))
        given, own = ([size for size in dims if size != 1] for dims in (value.shape, shape))
        fits = given[len(given) - len(own) :] == own if loose else value.shape == shape
        if fits and value.numel() == expected.numel():
            value = value.reshape(expected)
        return self._leaf(i, value, expected, call).reshape(math.prod(batch), *shape)

    def columns(
        self, entries: Mapping[tuple[str, ...], object], batch: tuple[int, ...], *, call: str, loose: bool = False
    ) -> tuple[list[int], list[Tensor]]:
        """Numbers of the fields under some paths, and their values as rows. Raises as :meth:`flatten`."""
        which, columns = [], []
        for key, value in entries.items():
            check_tensor(value, key, call)
            which.append(self.field_of(key, call))
            columns.append(self.column(which[-1], value, batch, call=call, loose=loose))
        return which, columns

    def items_in(self, number: int, value: object, call: str) -> Tensor:
        """The items ``[length, *shape]`` of one row of a ragged field. Raises as :meth:`flatten`. Only of fields that are ragged."""
        raise NotImplementedError

    def number(self, value: object, path: tuple[str, ...]) -> Tensor:
        """A number, or a list of some, as a tensor: of the dtype of the field under this path, if there is one that can hold it."""
        for i, field in enumerate(self.fields):
            if field.key == (path or (SINGLE,)):
                return self._value(i, value, "add")
        return _types.as_tensor(value, path, "add")

    def _value(self, i: int, given: object, call: str) -> Tensor:
        """What is given for a field; numbers as its dtype, if that can hold them."""
        dtype = self._specs[i][0]
        value = _types.as_tensor(given, self.fields[i].key, call, dtype)
        same_kind = (value.dtype is torch.bool) == (dtype is torch.bool)
        if value.dtype is dtype or not (same_kind and isinstance(given, np.generic | list)):
            return value
        return value if (number := _types.cast(value, dtype)) is None else number

    def _leaf(self, i: int, value: object, expected: torch.Size, call: str) -> Tensor:
        dtype, _, is_float = self._specs[i]
        given, value = value, self._value(i, value, call)
        if value.dtype is not dtype and value.shape == expected and i in self.casts:
            value = self._cast(i, value, call)
        if value.dtype is not dtype or value.shape != expected:
            raise RuntimeError(self._mismatch(i, value, expected, call, given))
        if value.is_meta:
            raise TypeError(f"{call}: {_types.at(self.fields[i].key)}: {_NO_DATA}")
        if not value.is_cpu and self.on_host:
            value = value.cpu()
        if value._is_zerotensor():  # made by autograd: it has no memory
            value = value.clone()
        if is_float and (value.is_neg() or value.is_conj()):
            value = value.resolve_conj().resolve_neg()
        return value.contiguous()

    def _cast(self, i: int, value: Tensor, call: str) -> Tensor:
        """Values of another dtype as the one that the user has said."""
        made = _types.cast(value, self._specs[i][0])
        if made is None:
            field, was = self.fields[i], str(value.dtype).removeprefix("torch.")
            raise RuntimeError(
                f"{call}: field {field.name}: expected values that {field.dtype} holds, as dtypes= says, got others of {was}: no more "
                "than precision is given up. Convert them, or give the field another dtype."
            )
        return made

    def _mismatch(self, i: int, value: Tensor, expected: torch.Size, call: str, given: object) -> str:
        field = self.fields[i]
        message = (
            f"{call}: field {field.name}: expected shape {list(expected)} {field.dtype} as in the first row, "
            f"got {list(value.shape)} {str(value.dtype).removeprefix('torch.')}.{self.whose}"
        )
        row, (dtype, _, is_float) = torch.Size(field.shape), self._specs[i]
        if value.dtype is not dtype and value.dtype.is_floating_point and not is_float:
            return message + " Write a float from the first row on, 0.0 and not 0, or convert it."
        if value.dtype is not dtype:
            converted = f".to(torch.{field.dtype})" if isinstance(given, Tensor) else f"np.asarray(…, {field.dtype!r})"
            return message + f" Convert it with {converted}."
        if call == "add" and value.shape[1:] == row:
            return message + f" It looks like a batch of {value.shape[0]} rows: did you mean extend()?"
        if call == "extend" and value.shape == row:
            return message + " It looks like one row: did you mean add()?"
        if value.numel() == expected.numel():
            return message + f" Use .reshape({list(expected)})."
        if call == "extend" and value.dim() > 1 and value.shape[2:] == row:
            n, m = value.shape[:2]
            return message + f" If these are {n} x {m} rows, flatten them: TensorDicts by .reshape(-1)."
        at = len(expected) - len(row)  # where the shape of a row begins
        if (
            row
            and value.dim() == len(expected)
            and (value.shape[:at], value.shape[at + 1 :]) == (expected[:at], row[1:])
        ):
            declared = f"ragged={{{field_paths.public(field.key)!r}: Ragged(torch.{field.dtype}, max_length=…)}}"
            return message + f" If lengths differ from row to row, make the storage with {declared}."
        return message

    #: What to do in place of leaving fields out.
    _instead = "rb.add_field(key, example) adds one to all rows"

    def _walk(
        self,
        node: Node,
        value: object,
        batch: tuple[int, ...],
        found: dict[int, Tensor],
        call: str,
        path: tuple[str, ...],
        ignored: frozenset[str],
    ) -> None:
        if node.kind == "leaf":
            expected = torch.Size((*batch, *self._specs[node.field][1]))
            found[node.field] = self._leaf(node.field, value, expected, call)
            return
        given, source = _opened(value, of_numbers=node.kind == "list")
        if given != node.kind or (node.type and not _types.takes_rows_of(type(value), node, self._types, vars(self))):
            check_tensor(value, path, call)
            kind = f"{node.kind} {node.type.partition(':')[2]}".rstrip().replace("tensordict", "TensorDict")
            has_keys = isinstance(value, dict) or tensordicts.is_tensor_collection(value)
            remedy = _REMEDIES.get(node.kind, "") if has_keys else ""
            got = f"{nested.describe(value)}.{remedy}"
            raise TypeError(f"{call}: {_types.at(path)}: expected a {kind} as in the first row, got {got}{self.whose}")
        named = _types.by_name(source.items(), path, call) if node.integers else source
        children = self._expected(node, named)
        keys: Iterable[object] = map(node.key_of, children) if node.integers else children
        differs = key_differences(keys, (key for key in source if key in node.children or key not in ignored))
        if differs:
            for key, child in source.items():
                check_tensor(child, (*path, str(key)), call)
            raise KeyError(
                f"{call}: {_types.at(path)}: expected the fields of the first row, got others: {differs}. Write the same fields in every "
                f"row; {self._instead}.{self.whose}"
            )
        for key, child in children.items():
            self._walk(child, named[key], batch, found, call, (*path, key), frozenset())
        if len(children) < len(node.children):
            for number in self.added.missing(node.children, children):
                found[number] = self._fill(number, batch)

    def _expected(self, node: Node, given: Mapping[str, object]) -> Mapping[str, Node]:
        """Children of a node that data must have, and those that it has."""
        return self.added.without(node.children, given) if self.added.fills else node.children

    def _fill(self, number: int, batch: tuple[int, ...]) -> Tensor:
        """Rows of a field that was left out."""
        return self.added.fills[number].expand((*batch, *self._specs[number][1])).contiguous()

    def stacked(self, rows: Sequence[Sequence[Tensor]]) -> object:
        """A batch of rows, whose columns are given."""
        columns = [torch.stack(column) for column in zip(*rows, strict=True)]
        return self.unflatten(columns, torch.Size((len(rows),)))

    # ---- columns to data ---------------------------------------------------------------------------------------------

    def unflatten(
        self,
        columns: Sequence[Tensor],
        batch: tuple[int, ...] | None,
        device: torch.device | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> object:
        """Data of this structure around columns ``[*batch, *shape]``. No copy.

        ``batch``: None, if the shapes are those of the fields. ``extra`` joins the root's entries.
        """
        if self._before is not None and len(columns) < len(self.fields):  # they were read before a field was added
            return self._before.unflatten(columns, batch, device, extra)
        if self.is_leaf:
            return columns[0]
        if self._flat is not None:
            source: dict[str, Tensor] = dict(zip(self._flat, columns))  # noqa: B905 - strict costs, and both are the schema's
            if extra:
                source.update(extra)
            if not self.is_tensordict:
                return source
            size = torch.Size((*(self._batch_of(columns) if batch is None else batch), *self.root.batch))
            made: object = tensordicts.wrap(source, size, device)
        else:
            batch = self._batch_of(columns) if batch is None else batch
            made = self._build(self.root, columns, batch, device, extra)
        for path, names in self.names.items():
            found: Any = nested.find_field(made, path)
            found.names = [*[None] * len(self._batch_of(columns)), *names]  # dims before those of rows have none
        return made

    def _batch_of(self, columns: Sequence[Tensor]) -> torch.Size:
        return columns[0].shape[: columns[0].ndim - len(self._specs[0][1])]

    def _build(
        self,
        node: Node,
        columns: Sequence[Tensor],
        batch: tuple[int, ...],
        device: torch.device | None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> object:
        # a node with ints among its keys is a dict, which takes them all
        entries: Iterable[tuple[str, Node]] = node.entries if node.integers else node.children.items()  # type: ignore[assignment]
        source = {
            key: columns[child.field] if child.kind == "leaf" else self._build(child, columns, batch, device)
            for key, child in entries
        }
        if extra:
            source.update(extra)
        match node.kind:
            case "dict":
                return source
            case "tuple":
                return tuple(source.values())
            case "list":
                return list(source.values())
            case "namedtuple":
                cls = self._types[node.type]
                return (
                    nested.with_fields(object.__new__(cls), source) if is_dataclass_type(cls) else cls(*source.values())
                )
        td = tensordicts.wrap(source, torch.Size((*batch, *node.batch)), device)
        if node.kind == "tensorclass":
            return self._types[node.type].from_tensordict(td)  # type: ignore[attr-defined]
        return td

    def field_of(self, key: str | tuple[str, ...], call: str = "") -> int:
        """Number of the field under a key. Raises ``KeyError``."""
        path = (key,) if isinstance(key, str) else tuple(key)
        for i, field in enumerate(self.fields):
            if field.key == path:
                return i
        raise KeyError(
            f"{call and f'{call}: '}expected a stored field, one of {[field_paths.public(f.key) for f in self.fields]}, got "
            f"{field_paths.public(path)!r}."
        )


class _Builder:
    """Walks the first data and notes what it sees."""

    def __init__(self, *, batched: bool, call: str) -> None:
        self.batched = batched
        self.call = call
        self.fields: list[Field] = []
        self.types: dict[str, type[object]] = {}
        self.names: dict[tuple[str, ...], tuple[str | None, ...]] = {}

    def node(self, value: object, path: tuple[str, ...]) -> Node:
        if _types.is_leaf(value):
            return self._leaf(value, path)
        kind, source = _contained(value, path, self.call)
        batch: tuple[int, ...] = ()
        if tensordicts.is_tensor_collection(value):
            batch = tuple(value.batch_size[1:] if self.batched else value.batch_size)
            if batch and any(names := tuple(value.names[self.batched :])):
                self.names[path] = names
        children = {}
        for key, child in _types.by_name(source.items(), path, self.call).items():
            validate_key((*path, key))
            children[key] = self.node(child, (*path, key))
        name = ""
        if kind in ("tensorclass", "namedtuple"):
            name = f"{type(value).__module__}:{type(value).__qualname__}"
            self.types[name] = type(value)
        integers = tuple(name for name, key in zip(children, source, strict=True) if name != key)
        return Node(kind=kind, children=children, type=name, batch=batch, integers=integers)

    def _leaf(self, value: object, path: tuple[str, ...]) -> Node:
        value = _types.as_tensor(value, key := path or (SINGLE,), self.call)
        if value.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{self.call}: {_types.at(path)}: dtype {value.dtype} cannot be stored. Possible: {', '.join(DTYPES)}."
            )
        if value.is_meta:
            raise TypeError(f"{self.call}: {_types.at(path)}: {_NO_DATA}")
        if value.layout is not torch.strided or value.is_nested:
            raise TypeError(f"{self.call}: {_types.at(path)}: expected a dense tensor, got a {value.layout} one.")
        shape = tuple(value.shape[1:] if self.batched else value.shape)
        self.fields.append(Field(key=key, dtype=DTYPE_NAMES[value.dtype], shape=shape))
        return Node(kind="leaf", field=len(self.fields) - 1)

    def give(self, dtypes: _types.Dtypes) -> None:
        """Replace what was seen by what the user has said."""
        known = [field.key for field in self.fields]
        for key, dtype in dtypes.items():
            if key not in known:
                raise KeyError(
                    f"{self.call}: dtypes: expected fields of the first row, of {[f.name for f in self.fields]}, got {name_of(key)!r}."
                )
            i = known.index(key)
            self.fields[i] = Field(key, dtype, self.fields[i].shape)


# ---- the short path of nested data -------------------------------------------------------------------------------------

_PLAIN = ("tensordict", "dict")
_BUILTIN: dict[str, type[object]] = {"dict": dict, "tuple": tuple, "list": list}


def _leaves_of_plain(node: Node) -> list[int]:
    """Numbers of the fields below a node, as met; -1 for whatever is not a TensorDict, dict or leaf."""
    if node.kind == "leaf":
        return [node.field]
    if node.kind not in _PLAIN:
        return [-1]
    return [field for child in node.children.values() for field in _leaves_of_plain(child)]


def _collect(node: Node, data: Any, leaves: list[Any]) -> bool:
    """Append the leaves of data that consists of just these TensorDicts and dicts; False if it may be otherwise."""
    if type(data) is not (tensordicts.tensordict_type() if node.kind == "tensordict" else dict):
        return False
    entries: Mapping[str, object] = tensordicts.children(data, whole=True) if node.kind == "tensordict" else data
    if len(entries) != len(node.children):
        return False
    if node.integers:
        entries = _types.taken_by_key(node, data)
    for name, child in node.children.items():
        value = entries.get(name)
        if child.kind == "leaf":
            leaves.append(value)
        elif not _collect(child, value, leaves):
            return False
    return True


# ---- kinds of containers -----------------------------------------------------------------------------------------------


def _opened(value: object, *, of_numbers: bool = False) -> tuple[Kind | None, Mapping[str, object]]:
    """Kind and entries of a container; None for other values, such as a list of numbers, unless ``of_numbers``."""
    if tensordicts.is_non_tensor(value):  # strings and other objects: tensorclasses, and stacks of them
        return None, {}
    if tensordicts.is_tensorclass(value):
        entries = dict(value.items())  # what is not given is not there
        return "tensorclass", {key: entries.get(key) for key in type(value).__dataclass_fields__}
    if tensordicts.is_tensor_collection(value):
        return "tensordict", tensordicts.children(value, whole=True)
    if isinstance(value, dict):
        return "dict", value
    # One kind: classes with named fields.
    if (isinstance(value, tuple) and hasattr(value, "_asdict")) or nested.is_dataclass(value):
        return "namedtuple", nested.attributes(value)
    if isinstance(value, tuple | list) and (of_numbers or not _types.is_leaf(value)):
        kind: Kind = "tuple" if isinstance(value, tuple) else "list"
        return kind, {str(i): child for i, child in enumerate(value)}
    return None, {}


def _contained(value: object, path: tuple[str, ...], call: str) -> tuple[Kind, Mapping[str, object]]:
    """Kind and entries of a container. Raises ``TypeError`` for other values, and for lists of strings, numbers or other objects."""
    kind, entries = _opened(value)
    listed = kind in ("list", "tuple") and entries
    if kind is None or (listed and not any(_types.is_leaf(item) or _opened(item)[0] for item in entries.values())):
        raise _types.no_tensor(value, path, call)
    return kind, entries


def check_tensor(value: object, key: tuple[str, ...], call: str) -> None:
    """Raise ``TypeError`` where a TensorDict holds strings or other objects, in the entry or below it."""
    if tensordicts.is_non_tensor(value):
        raise _types.no_tensor(value, key, call)
    if tensordicts.is_tensor_collection(value):
        for name, child in tensordicts.children(value, whole=True).items():
            check_tensor(child, (*key, name), call)


def device_of(data: object) -> torch.device:
    """Where the first tensor of data is."""
    first = nested.first_leaf(data)
    if tensordicts.is_tensor_collection(first):
        first = next(iter(first.values(include_nested=True, leaves_only=True)))
    return first.device if isinstance(first, Tensor) else torch.device("cpu")


def stacked(
    items: Sequence[object],
    call: str,
    made: Callable[[object], Structure],
    known: Structure | None,
    ignored: Iterable[str],
) -> object:
    """A list of rows as a batch, leaf by leaf.

    ``made``: the structure of one row. ``known``: of rows that are stored already, if there are any.
    """
    if not items:
        raise nested.NoRows(f"{call}: expected at least one row, got an empty list.")
    if known is not None:
        with contextlib.suppress(KeyError):  # of other fields: those of the first one tell them apart
            return _stacked(known, items, call, ignored)
    return _stacked(made(items[0]), items, call, ())


def _stacked(structure: Structure, items: Sequence[object], call: str, ignored: Iterable[str]) -> object:
    try:
        rows = [structure.flatten(item, None, call, ignored) for item in items]
    except RuntimeError as error:
        raise RuntimeError(f"{error} For rows of several shapes there is ListStorage.") from None
    return structure.stacked(rows)


def leading_size(data: object, call: str, least: int = 1, ragged: RowsAt | None = None) -> int:
    """Rows of a batch: the size that all leaves have first, and the number of rows in ``ragged`` ones.

    Raises:
        TypeError: data without a batch dimension.
        RuntimeError: leaves of different leading sizes. NoRows: less than ``least`` rows.
    """
    sizes: dict[int, tuple[str, ...]] = {}
    if tensordicts.is_tensor_collection(data) and data.batch_size:  # the common case
        sizes[int(data.batch_size[0])] = ()
    else:
        _note_sizes(data, (), sizes, call, ragged)
    if len(sizes) > 1:
        listed = ", ".join(f"{_types.at(path)} has {size}" for size, path in sizes.items())
        raise RuntimeError(f"{call}: expected the same number of rows in every leaf, but {listed}.")
    if not sizes and data not in ([], ()):
        raise TypeError(f"{call}: expected at least one tensor, got {nested.describe(data)}.")
    n = next(iter(sizes), 0)
    if n < least:
        raise nested.NoRows(f"{call}: expected at least one row, got an empty batch.")
    return n


def _note_sizes(
    data: object, path: tuple[str, ...], sizes: dict[int, tuple[str, ...]], call: str, ragged: RowsAt | None
) -> None:
    """The leading sizes of all leaves, and where each was met first."""
    n = None if ragged is None else ragged(data, path)
    if n is not None:
        sizes.setdefault(n, path)
    if n is not None or (data is None and ragged is not None):  # None: items that come later
        return
    if tensordicts.is_tensor_collection(data) and not tensordicts.is_non_tensor(data):
        shape = data.batch_size
    elif _types.is_leaf(data):
        shape = _types.as_tensor(data, path, call).shape
    else:
        for key, child in _contained(data, path, call)[1].items():
            _note_sizes(child, (*path, str(key)), sizes, call, ragged)
        return
    if not shape:
        collection = tensordicts.is_tensor_collection(data)
        got = f"{nested.describe(data)}: one row. {_ONE_ROW}" if collection else "a scalar without dimensions"
        raise TypeError(f"{call}: {_types.at(path)}: expected a batch of rows, got {got}. Did you mean add()?")
    sizes.setdefault(int(shape[0]), path)
