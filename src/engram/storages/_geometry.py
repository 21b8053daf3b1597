"""What storages of tensors are asked for: how many rows they have, how they are divided, what fields become, and which schemas fit that."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import msgspec
from torch import Tensor

from engram._support.checks import check_count, check_number
from engram._support.field_paths import public
from engram._support.unsupported import Later, TracingArguments, carriers, reject_unsupported, take_compilable
from engram.errors import CorruptStore, IncompatibleCheckpoint, IncompatibleStore
from engram.format import layout
from engram.format import schema as schemas
from engram.format.schema import Schema
from engram.format.sizes import resized, rings_of, with_rings
from engram.storages import _ragged_structure, _structure, _types
from engram.storages import ragged as ragged_fields
from engram.store.store import Store
from engram.types import Declared

#: What takes rows of another size. A layout, a storage saved alone and a state dict have no such way.
_OTHER_SIZES = (
    " A buffer of another size takes what rb.dumps saved without a layout or hooks, with rb.loads(path, convert=True)."
)


class LaterArguments(TracingArguments, total=False):
    """As those, of tensor storages."""

    #: What it would change is how the memory of the fields lies, which no result shows.
    consolidated: Annotated[object, Later("", (True,), "True or False, which change nothing here")]
    #: Processes that share a buffer agree on who makes its store, and the last one removes it.
    shared_init: Annotated[object, Later("rb.share()", (True,))]
    cleanup_memmap: Annotated[object, Later("rb.share()", (True,))]


class LazyArguments(LaterArguments, ragged_fields.RaggedArguments, total=False):
    """As those, of storages that begin with the first write."""


NOT_YET = carriers(LaterArguments)

#: As which devices those of the first row are asked for. None may be shared before, which takes the CPU.
OF_DATA = ("auto", "None")


def take_later(storage: Declared, arguments: LaterArguments) -> None:
    """Take TorchRL's keywords of tensor storages. Raises ``TypeError``: others, or other values."""
    reject_unsupported(type(storage).__name__, arguments, NOT_YET, type(storage))
    take_compilable(storage, arguments)


class Geometry(NamedTuple):
    """What a storage was asked for."""

    max_size: int
    lanes: int = 1
    ndim: int = 1
    #: Of fields, by their paths: values of others are cast to them.
    dtypes: _types.Dtypes = _types.NO_DTYPES
    #: Bytes of a row up to which fields share a file, where there are files; 0: none do.
    grouped: int = 0
    #: Fields whose rows have different lengths.
    ragged: ragged_fields.RaggedOptions = ragged_fields.NO_RAGGED

    @classmethod
    def checked(cls, where: str, max_size: int, lanes: int = 1, ndim: int = 1, dtypes: object = None) -> Geometry:
        """Raises ``TypeError``, ``ValueError``: one of them is no size, or they do not go together; or no dtypes."""
        sizes: list[int] = []
        given: tuple[tuple[str, object], ...] = (("max_size", max_size), ("ndim", ndim), ("lanes", lanes))
        for argument, value in given:
            plain = isinstance(value, int) and not isinstance(value, bool) and value > 0
            sizes.append(value if plain else check_count(f"{where}: {argument}", value))  # type: ignore[arg-type] # an int
        max_size, ndim, lanes = sizes
        if lanes > max_size:
            raise ValueError(f"{where}: lanes: expected at most max_size={max_size}, got {lanes}.")
        if lanes > 1 and ndim > 1:
            raise ValueError(f"{where}: lanes: expected 1 with ndim={ndim}, whose columns go together; got {lanes}.")
        return cls(max_size, lanes, ndim, _types.NO_DTYPES if dtypes is None else _types.checked_dtypes(dtypes, where))

    def grouping(self, group_small_fields: object, where: str) -> Geometry:
        """The same, with the option of that name. Raises ``TypeError``, ``ValueError``."""
        return self._replace(grouped=check_count(f"{where}: group_small_fields", group_small_fields, "bytes", least=0))

    def with_ragged(self, arguments: ragged_fields.RaggedArguments, where: str, elsewhere: str = "") -> Geometry:
        """The same, with the keywords for ragged fields, which are taken out of the arguments.

        ``elsewhere``: where the rows are, if they cannot have any there.

        Raises ``TypeError``, ``ValueError``: they are no declarations, size or layout; or there are some, and it can have none.
        """
        elsewhere = f"ndim={self.ndim}" if self.ndim > 1 else elsewhere
        options = ragged_fields.RaggedOptions({}, not elsewhere, None, self.max_size, self.lanes, where)
        if ragged_fields.RaggedArguments.__annotations__.keys() & arguments.keys():
            fields = ragged_fields.checked_ragged(arguments.pop("ragged", None) or {}, where)
            size = arguments.pop("ragged_bytes", None)
            most = ragged_fields.MAX_BYTES
            nbytes = None if size is None else int(check_number(f"{where}: ragged_bytes", size, least=1, most=most))
            slots = arguments.pop("open_rows", 0)
            slots = check_count(f"{where}: open_rows", slots, "row", least=0, most=ragged_fields.MAX_OPEN_ROWS)
            in_slots = ragged_fields.checked_slots(arguments.pop("ragged_layout", None), nbytes, where)
            if elsewhere and (fields or nbytes is not None or slots or in_slots):
                got = [*map(public, fields)]
                instead = "ndim= out, and use lanes=" if self.ndim > 1 else "device= out, and use a DeviceLoader"
                raise ValueError(f"{where}: ragged: expected none with {elsewhere}, got {got}. Leave {instead}.")
            layout = ragged_fields.RaggedLayout.checked(arguments.pop("layout", "jagged"), where)
            options = options._replace(fields=fields, nbytes=nbytes, layout=layout, open_rows=slots, slots=in_slots)
            options.check_room()
        return self._replace(ragged=options)

    def in_files(self, schema: Schema) -> Schema:
        """A schema for a store in a folder."""
        together = msgspec.structs.replace(schema, grouped=self.grouped)
        return together if layout.group_of(together) else schema

    @property
    def capacity(self) -> int:
        """Rows of whole lanes."""
        return self.max_size // self.lanes * self.lanes

    def schema(self, structure: _structure.Structure, columns: tuple[int, ...]) -> Schema:
        """The schema of a store for rows of that structure."""
        width = math.prod(columns)
        whole = self.max_size // self.lanes * self.lanes  # capacity, without a call
        capacity = -(-whole // width) * width  # rounded up to whole slots
        schema = Schema(capacity, self.lanes, columns, structure.fields, structure.root, added=structure.added.digits)
        schema.validate()
        return schema

    def same(self, text: str, here: Schema | None, where: str) -> Schema:
        """The schema of a saved state, which must be the one of the store, or of one that would be made for it.

        Raises:
            ValueError: it is none. IncompatibleCheckpoint: another one.
        """
        schema = self._decoded(text, here, where)
        expected = here or self.schema(_ragged_structure.structure_in(schema), schema.columns)
        if here is not None and (here.added or schema.added) and _as_far_as_both(here, schema):
            expected = schema  # one of the two has fields that were added since
        differs = schemas.differences(expected, schema)
        if not differs and len(schema.columns) != self.ndim - 1:
            differs = f"ndim: expected {self.ndim}, got {1 + len(schema.columns)}"
        if differs:
            same_rows = (schema.fields, schema.structure) == (expected.fields, expected.structure)
            in_lanes = self.ndim == 1 and not schema.columns
            advice = _OTHER_SIZES if same_rows and in_lanes else ""
            raise IncompatibleCheckpoint(f"{where}: expected that of this storage, got another: {differs}.{advice}")
        return schema

    def with_own_rings(self, schema: Schema, here: Schema | None, where: str) -> Schema:
        """A saved schema, with the rings that ragged fields have here, or would have. Raises ``IncompatibleCheckpoint``: other fields."""
        if here is not None:
            return with_rings(schema, rings_of(here))
        longest, stored = {}, {schema.fields[number].key for number in schema.ragged}
        if missing := self.ragged.fields.keys() - stored:
            raise IncompatibleCheckpoint(
                f"{where}: expected the ragged fields {[*map(public, missing)]}, got {[*map(public, stored)]}."
            )
        for number, it in schema.ragged.items():
            declared, saved = self.ragged.fields.get(schema.fields[number].key), (it.dtype, it.shape, it.kind)
            if declared is not None and (declared.dtype, declared.shape, declared.kind) != saved:
                raise IncompatibleCheckpoint(
                    f"{where}: {schema.fields[number].name}: expected {declared}, as this storage was asked for, got "
                    f"{schemas.items_of(it)}."
                )
            longest[number] = (declared and declared.max_length) or it.max_length
        if self.ragged.nbytes is None and self.ragged.slots in (None, schema.in_slots):
            rings = rings_of(resized(schema, self.capacity, self.lanes)).items()
            return with_rings(schema, {at: (n and max(n, longest[at]), longest[at]) for at, (n, _) in rings})
        groups = schema.ragged_groups
        widths = [sum(schema.ragged[number].item_bytes for number in group.members) for group in groups]
        sizes = [ragged_fields.Group(longest[it.leader], nbytes) for it, nbytes in zip(groups, widths, strict=True)]
        given = zip(groups, self.ragged.rings(sizes), strict=True)
        return with_rings(schema, {group.leader: (items, longest[group.leader]) for group, items in given})

    def converted(self, text: str | None, here: Schema | None, where: str) -> Schema:
        """The schema of a store for the rows of a saved state of another size.

        Raises:
            ValueError: it is none. IncompatibleCheckpoint: there are no rows, or other fields than in the store.
        """
        if text is None:
            raise IncompatibleCheckpoint(
                f"{where}: nothing was ever written to what was saved: there is nothing to convert."
            )
        schema = self._decoded(text, here, where)
        made = self.schema(_ragged_structure.structure_in(schema), schema.columns)
        if here is None or _as_far_as_both(here, made):
            return made
        raise IncompatibleCheckpoint(
            f"{where}: expected the fields of this storage, got others: {schemas.differences(here, made)}."
        )

    def _decoded(self, text: str, here: Schema | None, where: str) -> Schema:
        try:
            schema = schemas.decode(text.encode(), where)
            if self.dtypes:
                _types.check_stored(schema.fields, self.dtypes)
        except IncompatibleStore as error:
            raise IncompatibleCheckpoint(str(error)) from error
        except (CorruptStore, UnicodeEncodeError) as error:
            raise ValueError(str(error)) from error
        return self.with_own_rings(schema, here, where) if schema.ragged else schema


def _as_far_as_both(here: Schema, saved: Schema) -> bool:
    """Whether two schemas are the same, but for fields that one of them has got since."""
    both = min(len(here.fields), len(saved.fields))
    if max(here.first_fields, saved.first_fields) > both:
        return False
    return schemas.encode(here.until(both)) == schemas.encode(saved.until(both))


def positions_of(rows: Tensor, live: Tensor, store: Store | None, columns: int) -> Tensor:
    """How many steps their lanes had before these rows, int64 ``[n]``; -1: a row is not ``live``."""
    if store is None:
        return rows.where(live, -1)
    places = rows.where(live, 0) % store.lane_length
    written, filled = store.lane_states()[rows.where(live, 0) // store.lane_length, :2].unbind(1)
    back = (written - 1 - places) % store.lane_length  # rows that a storage was made around count as written
    positions: Tensor = (written.maximum(filled) - 1 - back) // columns
    return positions.where(live, -1)
