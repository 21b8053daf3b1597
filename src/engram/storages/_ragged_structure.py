"""How a row is put together that has ragged fields."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import torch

from engram._support import native, tensordicts, words
from engram.errors import CorruptStore
from engram.format.layout import SINGLE
from engram.format.schema import NO_SPAN, SPAN, Field, Node, RaggedItems, Schema, name_of, renumbered
from engram.storages._ragged_intake import comes_later, count_rows, found_in, row_in, rows_in, same_lengths
from engram.storages._structure import Structure, _Builder
from engram.storages._types import NO_DTYPES, Dtypes, as_tensor
from engram.storages.ragged import MAX_ITEMS_OF_ROW, NO_RAGGED, Group, ItemField, Ragged, likely_length
from engram.store.ragged_rows import Items

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from engram.storages.ragged import Path, RaggedLayout, RaggedOptions


class Packed(NamedTuple):
    """Rows one after the other, as attention kernels take them."""

    #: ``[total, *shape]``.
    values: torch.Tensor
    #: int32 ``[n + 1]``: where each row begins, and the end of the last one.
    cu_seqlens: torch.Tensor
    #: Items of the longest row; 0 of none.
    max_seqlen: int


class Padded(NamedTuple):
    """Rows of one length, with zeros where they were shorter."""

    #: ``[n, length, *shape]``.
    values: torch.Tensor
    #: bool ``[n, length]``: which items are of a row.
    mask: torch.Tensor


class Batches:
    """Lays the fields of one batch out. Fields that share lengths get offsets, masks and lengths that are the same tensors.

    Args:
        layout: how.
        within: whether the batch is a TensorDict: it holds TensorDicts in place of named tuples, and stacks of texts.
    """

    def __init__(self, layout: RaggedLayout, *, within: bool) -> None:
        self._layout, self._within, self._form = layout, within, getattr(Batches, f"_{layout.kind}")
        #: By the number of the leader: offsets of rows one after the other, int64 and int32, and the longest; and of padded rows the mask.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._masks: dict[int, torch.Tensor] = {}

    def __call__(self, field: ItemField, items: Items, leader: int) -> object:
        """The rows of a field. ``leader``: the number of the field whose lengths it has."""
        if field.kind:
            texts = texts_of(field, items)
            return tensordicts.stack_of_objects(texts) if self._within else texts
        items = items if items.offsets is not None else items.packed()
        if leader not in self._known:
            assert items.offsets is not None  # packed ones have some
            ends = items.offsets.to(torch.int32) if items.ends is None else items.ends
            longest = (int(items.lengths.max()) if len(items) else 0) if items.longest is None else items.longest
            self._known[leader] = items.offsets, ends, longest
        return self._form(self, items, leader, *self._known[leader])

    def _jagged(self, items: Items, _: int, offsets: torch.Tensor, __: torch.Tensor, longest: int) -> object:
        from torch.nested._internal.nested_tensor import NestedTensor  # as torch.load finds it, with these keywords

        # A third of the time of nested_tensor_from_jagged, which makes a view of the values, for their gradients: these have none. Of one
        # shape where the offsets are the same. The longest: without it torch pads to the items of all rows.
        return NestedTensor(items.given, offsets, _metadata_cache={"max_seqlen": items.given.new_empty((longest, 0))})

    def _packed(self, items: Items, _: int, __: torch.Tensor, ends: torch.Tensor, longest: int) -> object:
        if (values := items.given).shape[0] >= 1 << 31:
            raise RuntimeError(f"sample: packed: expected fewer than 2**31 items of a field, got {len(values):,}.")
        packed = Packed(values, ends, longest)
        if not self._within:
            return packed
        said = {**packed._asdict(), "max_seqlen": tensordicts.one_object(longest)}
        return tensordicts.wrap(said, torch.Size(()), None)

    def _padded(self, items: Items, leader: int, _: torch.Tensor, __: torch.Tensor, longest: int) -> object:
        """Rows of one length: that of the longest, rounded up."""
        multiple, left, mask = self._layout.multiple, self._layout.side == "left", self._masks.get(leader)
        length = -(-longest // multiple) * multiple
        made = native.pad([items.given], items.lengths, length, left, mask is None) if length else None
        if made is None:  # no items, or torch does not let the core look at tensors
            lengths, places = items.lengths.unsqueeze(1), torch.arange(length, dtype=torch.int32, device="cpu")
            mask = places >= length - lengths if left else places < lengths
            made = [items.given.new_zeros((len(items), length, *items.given.shape[1:]))]
            made[0][mask] = items.given
        padded = Padded(made[0], self._masks.setdefault(leader, made[-1] if mask is None else mask))
        return tensordicts.wrap(padded._asdict(), torch.Size((len(items),)), None) if self._within else padded

    def _list(self, items: Items, *_: object) -> object:
        return tensordicts.stack_of_objects(items.rows()) if self._within else items.rows()


def single(field: ItemField, items: Items) -> object:
    """The only row: a tensor ``[length, *shape]``, or a text."""
    return texts_of(field, items)[0] if field.kind else items.rows()[0]


def texts_of(field: ItemField, items: Items) -> list[object]:
    """Rows of a text. Raises ``CorruptStore``: one is none; names field and row."""
    there = items.packed()
    raw, ends = there.given.numpy().tobytes(), there.starts + there.lengths
    rows = [raw[begin:end] for begin, end in zip(there.starts.tolist(), ends.tolist(), strict=True)]
    if field.kind == "bytes":
        return [*rows]
    decode, what = (json.loads, "JSON") if field.kind == "json" else (bytes.decode, "text in UTF-8")
    texts: list[object] = []
    try:
        texts.extend(map(decode, rows))
    except ValueError as error:
        place = len(texts)
        number = place if there.numbers is None else int(there.numbers[place])
        raise CorruptStore(
            f"{field.where}: row {number}: expected {what}, got other bytes: {error}. Its file was changed."
        ) from error
    return texts


class RaggedStructure(Structure):
    """As :class:`Structure`, of rows with ragged fields: in place of their columns are :class:`~engram.store.ragged_rows.Items`."""

    #: What the storage was asked for.
    options = NO_RAGGED
    _instead = f"{Structure._instead}, and None stands for items with like= that come later"

    def _complete(self) -> None:
        stored = {n: field.ragged for n, field in enumerate(self.fields) if field.ragged is not None}
        #: The items of each ragged field, by its number, and the field whose lengths it has: perhaps itself.
        self.ragged = {n: ItemField.of(self.fields[n].key, it) for n, it in stored.items()}
        self.leaders = {n: n if it.is_leader else it.like for n, it in stored.items()}
        groups = {
            leader: [(n, self.ragged[n].kind) for n, of in self.leaders.items() if of == leader]
            for leader in self.leaders.values()
        }
        self._groups = [(self.ragged[leader].max_length, members) for leader, members in groups.items()]

    def grown(self, schema: Schema) -> Structure:
        grown = super().grown(schema)
        vars(grown)["options"] = self.options
        return grown

    def rows_at(self, value: object, path: Path) -> int | None:
        """How many rows there are in a leaf; None: it is of no ragged field."""
        key = path or (SINGLE,)
        return count_rows(value) if any(field.key == key for field in self.ragged.values()) else None

    # ---- data to columns ---------------------------------------------------------------------------------------------

    def flatten(self, data: object, n: int | None, call: str, ignored: Iterable[str] = ()) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        self._walk(self.root, data, () if n is None else (n,), found, call, (), frozenset(ignored))
        for number, leader in self.leaders.items():  # leaders come first
            field, of_leader = self.ragged[number], cast("Items", found[leader])
            items = cast("Items | None", found[number])
            if items is None:
                found[number] = cast("torch.Tensor", Items(None, of_leader.starts, of_leader.lengths))
            elif number != leader:
                same_lengths(self.ragged[leader], of_leader.lengths, field, items, call)
            elif len(items) != (n or 1):
                raise RuntimeError(f"{call}: {field.where}: expected {words.count(n or 1, 'row')}, got {len(items)}.")
        return [found[i] for i in range(len(found))]

    def _walk(
        self,
        node: Node,
        value: object,
        batch: tuple[int, ...],
        found: dict[int, torch.Tensor],
        call: str,
        path: Path,
        ignored: frozenset[str],
    ) -> None:
        field = self.ragged.get(node.field)
        if field is None:
            super()._walk(node, value, batch, found, call, path, ignored)
        elif self.leaders[node.field] != node.field and comes_later(value):
            found[node.field] = cast("torch.Tensor", None)
        else:
            found[node.field] = cast("torch.Tensor", (rows_in if batch else row_in)(field, value, call))

    def columns(
        self, entries: Mapping[Path, object], batch: tuple[int, ...], *, call: str, loose: bool = False
    ) -> tuple[list[int], list[torch.Tensor]]:
        ragged, others, n = {}, {}, math.prod(batch)
        for key, value in entries.items():
            number = self.field_of(key, call)
            if number not in self.ragged:
                others[key] = value
                continue
            field = self.ragged[number]
            ragged[number] = items = rows_in(field, value, call) if batch else row_in(field, value, call)
            if len(items) != n:
                raise RuntimeError(f"{call}: {field.where}: expected {words.count(n, 'row')}, got {len(items)}.")
        for number, items in ragged.items():
            if (leader := self.leaders[number]) in ragged:
                same_lengths(self.ragged[leader], ragged[leader].lengths, self.ragged[number], items, call)
        which, columns = super().columns(others, batch, call=call, loose=loose)
        return [*which, *ragged], [*columns, *cast("dict[int, torch.Tensor]", ragged).values()]

    def items_in(self, number: int, value: object, call: str) -> torch.Tensor:
        return row_in(self.ragged[number], value, call).packed().given

    def number(self, value: object, path: Path) -> torch.Tensor:
        if any(field.key == (path or (SINGLE,)) for field in self.ragged.values()):
            return as_tensor(value, path, "add")
        return super().number(value, path)

    def stacked(self, rows: Sequence[Sequence[torch.Tensor]]) -> object:
        columns: list[torch.Tensor] = []
        for number, column in enumerate(zip(*rows, strict=True)):
            several = cast("Sequence[Items]", column)
            if number not in self.ragged:
                columns.append(torch.stack(column))
            elif self.options.unlimited and several[0].values is not None:  # what the fields are is found in the batch
                columns.append(cast("torch.Tensor", [single(self.ragged[number], items) for items in several]))
            else:
                columns.append(cast("torch.Tensor", Items.joined(several)))
        return super().unflatten(columns, torch.Size((len(rows),)))

    # ---- columns to data ---------------------------------------------------------------------------------------------

    def unflatten(
        self,
        columns: Sequence[torch.Tensor],
        batch: tuple[int, ...] | None,
        device: torch.device | None = None,
        extra: Mapping[str, torch.Tensor] | None = None,
        layout: RaggedLayout | None = None,
    ) -> object:
        """As every structure's. ``layout``: of the ragged fields; None: as the storage says."""
        layout = layout or self.options.layout
        if batch is None:
            leader = next(iter(self.leaders.values()))
            batch = columns[leader].lengths.shape  # type: ignore[attr-defined] # Items
        if len(batch) > 1:
            raise RuntimeError(
                f"sample: expected one batch dimension of rows with ragged fields, {[field.key for field in self.ragged.values()]}, got "
                f"{list(batch)}. Draw flat windows: SliceSampler(flat=True)."
            )
        within, laid_out = self.root.kind in ("tensordict", "tensorclass"), list(columns)
        batches = Batches(layout, within=within)
        for number, field in self.ragged.items():
            if number < len(laid_out):
                items: Items = columns[number]  # type: ignore[assignment]
                laid = batches(field, items, self.leaders[number]) if batch else self._alone(field, items, within)
                laid_out[number] = laid  # type: ignore[call-overload]
        if within and batch and layout.kind == "packed":
            batch = ()
        return super().unflatten(laid_out, batch, device, extra)

    def _alone(self, field: ItemField, items: Items, within: bool) -> object:
        value = single(field, items)
        return tensordicts.one_object(value) if within and field.kind else value


def rows_at(known: Structure | None, options: RaggedOptions, value: object, path: Path) -> int | None:
    """How many rows there are in a leaf of a field that is ragged, or that a first write says to be. None: it is another leaf."""
    if known is not None:
        return known.rows_at(value, path) if isinstance(known, RaggedStructure) else None
    declared = (path or (SINGLE,)) in options.fields
    found = declared or (options.finds and found_in(value, batched=True) is not None)
    return count_rows(value) if found else None


def is_uneven(data: object, known: Structure | None, options: RaggedOptions) -> bool:
    """Whether data is a lazy stack that may hold rows of different lengths, so that it is read row by row."""
    if not tensordicts.is_lazy_stack(data) or not (known.ragged if known is not None else options.finds):
        return False
    if known is not None:
        return True
    try:
        return not tensordicts.children(cast("tensordicts.TensorDict", data))
    except RuntimeError:  # it cannot stack them
        return True


# ---- how it is found out -------------------------------------------------------------------------------------------------


def structure_of(
    data: object, *, batched: bool, call: str, dtypes: Dtypes = NO_DTYPES, ragged: RaggedOptions = NO_RAGGED
) -> Structure:
    """The structure of a first row, or of a first batch of rows, some of whose fields may be ragged.

    Raises:
        KeyError: declared fields that are not there. ValueError: too few ``ragged_bytes``. As :meth:`Structure.of`.
    """
    if not ragged.finds:
        return Structure.of(data, batched=batched, call=call, dtypes=dtypes)
    builder = RaggedBuilder(ragged, batched=batched, call=call)
    root = builder.node(data, ())
    builder.complete()
    if not builder.fields:
        return Structure.of(data, batched=batched, call=call, dtypes=dtypes)  # which says so
    if dtypes:
        builder.give(dtypes)
    if not builder.found:
        return Structure(builder.fields, root, builder.types, dtypes, names=builder.names)
    fields, root = builder.ordered(root)
    structure = RaggedStructure(fields, root, builder.types, dtypes, names=builder.names)
    structure.options = ragged
    return structure


def structure_in(schema: Schema, dtypes: Dtypes = NO_DTYPES, ragged: RaggedOptions = NO_RAGGED) -> Structure:
    """The structure of a stored schema. Raises as :meth:`Structure.from_schema`."""
    structure = (RaggedStructure if schema.ragged else Structure).from_schema(schema, dtypes)
    if isinstance(structure, RaggedStructure):
        structure.options = ragged
    return structure


class _Found(NamedTuple):
    """A ragged field of the first write."""

    declared: Ragged
    #: The items of its longest row.
    longest: int
    #: Which offsets its rows were handed over with; 0: none.
    offsets: int


class RaggedBuilder(_Builder):
    """Walks the first data, and notes which fields are ragged."""

    def __init__(self, options: RaggedOptions, *, batched: bool, call: str) -> None:
        super().__init__(batched=batched, call=call)
        self.options = options
        #: By the number of the field, whose description is made in the end.
        self.found: dict[int, _Found] = {}

    def node(self, value: object, path: Path) -> Node:
        key = path or (SINGLE,)
        declared = self.options.fields.get(key) or found_in(value, batched=self.batched)
        if declared is None:
            return super().node(value, path)
        if (isinstance(value, Items) and value.values is None) or (declared.like is not None and comes_later(value)):
            return self._note(key, _Found(declared, 0, 0))
        field = ItemField.of(key, declared)
        items = rows_in(field, value, self.call) if self.batched else row_in(field, value, self.call)
        nested_in = isinstance(value, torch.Tensor) and value.layout is torch.jagged
        offsets = id(value.offsets()) if nested_in else 0  # type: ignore[attr-defined] # nested tensors have some
        return self._note(key, _Found(declared, int(items.lengths.max()) if len(items) else 0, offsets))

    def _note(self, key: Path, found: _Found) -> Node:
        self.found[len(self.fields)] = found
        self.fields.append(Field(key, *SPAN))
        return Node(kind="leaf", field=len(self.fields) - 1)

    def give(self, dtypes: Dtypes) -> None:
        for number in self.found:
            if self.fields[number].key in dtypes:
                raise ValueError(
                    f"{self.call}: dtypes: expected fields whose rows have one size, got {self.fields[number].name}, which is ragged. Say "
                    "its dtype with ragged=."
                )
        super().give(dtypes)

    def complete(self) -> None:
        """Raise ``KeyError``: a declared field is missing."""
        got = [field.key for field in self.fields]
        for key, declared in self.options.fields.items():
            if key not in got:
                later = ", or None where it comes later" if declared.like is not None else ""
                expected = f"expected a value of {name_of(key)!r} in the first row{later}"
                raise KeyError(f"{self.call}: ragged: {expected}, got fields {[*map(name_of, got)]}.")

    # ---- fields ------------------------------------------------------------------------------------------------------

    def ordered(self, root: Node) -> tuple[list[Field], Node]:
        """All fields, those that lead before those that have their lengths, and the structure with their numbers.

        Raises ``ValueError``: the bytes that the storage was given are too few.
        """
        leaders = self._leaders()
        order = sorted(range(len(self.fields)), key=lambda n: n in leaders and leaders[n] != n)
        places = {number: place for place, number in enumerate(order)}
        items = self._items(leaders)
        fields = self.fields.copy()
        for number, it in items.items():
            like = places[leaders[number]] if leaders[number] != number else -1
            column, ragged = SPAN if like < 0 else NO_SPAN, msgspec.structs.replace(it, like=like)
            fields[number] = Field(fields[number].key, *column, ragged=ragged)
        return [fields[number] for number in order], renumbered(root, places)

    def _leaders(self) -> dict[int, int]:
        """The field whose lengths each has, which may be itself: as declared, or handed over with the same offsets."""
        numbers = {field.key: number for number, field in enumerate(self.fields)}
        leaders: dict[int, int] = {}
        of_offsets: dict[int, int] = {}
        for number, (declared, _, offsets) in self.found.items():
            own = self.fields[number].key in self.options.fields or not offsets
            if declared.like is not None:
                leaders[number] = numbers[declared.like]
            else:
                leaders[number] = number if own else of_offsets.setdefault(offsets, number)
        return leaders

    def _items(self, leaders: Mapping[int, int]) -> dict[int, RaggedItems]:
        """What the items of each ragged field are, without their leaders."""
        most, bytes_of = {}, dict.fromkeys(leaders.values(), 0)
        for number, leader in leaders.items():
            bytes_of[leader] += self.found[number].declared.item_bytes
            declared, longest, _ = self.found[leader]
            likely = MAX_ITEMS_OF_ROW if self.options.unlimited else likely_length(longest)
            most[leader] = declared.max_length or likely
        groups = [Group(most[leader], nbytes) for leader, nbytes in bytes_of.items()]
        rings = dict(zip(bytes_of, self.options.rings(groups), strict=True))
        return {
            number: RaggedItems(it.dtype, most[leader], rings[leader], it.shape, kind=it.kind)
            for number, leader in leaders.items()
            for it in (self.found[number].declared,)
        }
