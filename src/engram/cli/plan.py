"""``engram plan``: how much a buffer will take, from a sample, a description or a store. Imports no torch."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from engram._support.memory import available_memory, missing_share
from engram._support.words import count, format_share, format_size, raise_as
from engram.cli.show import Misuse, Refusal, echo, field_of, plain, table, told
from engram.format import files, layout, schema
from engram.format.sizes import DevicePlan, ShownField, priority_bytes
from engram.saved.inspection import Entries, describe, described_field

_SPEC = re.compile(r"(?P<dtype>[a-z]+[0-9]*)(?:\[(?P<shape>[0-9, ]*)\])?")
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[kMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


class Plan(msgspec.Struct):
    """The memory and disk space that a buffer takes."""

    capacity: int
    fields: list[Entries]
    row_bytes: int
    #: Of all rows.
    bytes: int
    #: Beside the rows: tickets, and the control block of a store with one lane.
    overhead: int
    #: Beside those, if a sampler draws by priority.
    priorities: int
    #: Memory that this process may have.
    available: int
    #: Where temporary files lie.
    disk_free: int
    #: As it was given, else what is available.
    memory: int
    #: The share of rows that does not fit into that memory.
    from_disk: float
    advice: list[str]
    problems: list[dict[str, str | int | None]] = []
    #: On a device that was given, and on the host for it.
    device: DevicePlan | None = None


def planned(
    sample: Path | None, given: Sequence[str], capacity: int, *, batch: bool, memory: str | None, device: str | None = None,
    batch_size: int = 256,
) -> Plan:  # fmt: skip
    """The plan of a buffer.

    Raises:
        Misuse: there are no fields, or the sample, a field or the size cannot be read.
        ValueError: such rows cannot be stored. OSError: as reading the sample.
    """
    found = {} if sample is None else {it.key: it for it in _read(sample, batch=batch)}
    for text in given:
        name, equals, spec = text.partition("=")
        if not equals or not name:
            raise Misuse(f"--field {text!r}: expected NAME=DTYPE[SHAPE], such as obs=uint8[4,84,84].")
        key = tuple(name.split("."))
        found[key] = _field(key, spec, f"--field {text!r}")
    if not found:
        raise Misuse("plan: expected a SAMPLE or --field NAME=DTYPE[SHAPE], got neither.")
    fields = [*found.values()]
    if clash := [key for key in found if any(key == other[: len(key)] for other in found if other != key)]:
        raise Misuse(f"plan: {'.'.join(clash[0])} is both a field and the beginning of another one's name.")
    schema.validate_fields(fields, capacity)
    row_bytes = sum(it.row_bytes for it in fields)
    each = [described_field(it) | {"bytes": ShownField.of(it, capacity).nbytes} for it in fields]
    nbytes = sum(it["bytes"] for it in each)
    overhead = layout.tickets_bytes(capacity) + files.control_bytes(1)
    priorities = priority_bytes(capacity, True)
    available = available_memory()
    have = available if memory is None else _size(memory)
    missing = missing_share(max(1, nbytes), have, overhead + priorities)
    there = None
    if device is not None:
        from engram._support.devices import foreseen

        try:
            there = DevicePlan.of(*foreseen(device), capacity, [it.row_bytes for it in fields], overhead, batch_size)
        except (RuntimeError, ValueError) as error:
            raise Misuse(f"--{str(error).removeprefix('plan: ')}") from error
    return Plan(
        capacity=capacity,
        fields=each,
        row_bytes=row_bytes,
        bytes=nbytes,
        overhead=overhead,
        priorities=priorities,
        available=available,
        disk_free=shutil.disk_usage(tempfile.gettempdir()).free,
        memory=have,
        from_disk=missing,
        advice=[*_advice(fields, nbytes, have, missing), *(there.problems if there else ())],
        device=there,
    )


def show_plan(plan: Plan) -> None:
    """Print it as a table."""
    shown = [(".".join(it["key"]), ShownField.of(field_of(it), plan.capacity)) for it in plan.fields]
    rows = [(plain(name), it.dtype, it.shape, it.row, format_size(it.nbytes)) for name, it in shown]
    columns = ("field", "dtype", "shape", "a row", count(plan.capacity, "row"))
    echo([*table([columns, *rows], right=[3, 4], headed=True), ""])
    origin = "given" if plan.memory != plan.available else "available to a process here"
    facts = [
        ("rows", format_size(plan.bytes), f"{format_size(plan.row_bytes)} a row"),
        ("beside them", format_size(plan.overhead), "tickets"),
        ("priorities", format_size(plan.priorities), "if a sampler draws by them"),
        ("memory", format_size(plan.memory), origin),
        ("disk", format_size(plan.disk_free), f"free in {tempfile.gettempdir()}"),
    ]
    if plan.device is not None:
        facts += [("", "", ""), *plan.device.facts()]
    echo([*table(facts, right=[1]), *plan.advice])


def _advice(fields: Sequence[schema.Field], nbytes: int, memory: int, missing: float) -> Iterator[str]:
    if missing:
        share = f"{format_share(missing)} of the rows do not fit into memory"
        yield f"{share}: LazyMemmapStorage keeps them on disk, and 'engram doctor DIR' says how many batches per second that makes."
    elif nbytes > memory / 2:
        yield "The rows take more than half of the memory: LazyMemmapStorage lets the kernel drop what is not in use."
    wide = [".".join(it.key) for it in fields if it.dtype == "float64"]
    if wide:
        saved = sum(it.row_bytes for it in fields if it.dtype == "float64") // 2
        yield f"float64: {', '.join(wide)}. dtypes={{…: torch.float32}} of the storage saves {format_size(saved)} a row."
    images = [".".join(it.key) for it in fields if it.dtype.startswith("float") and len(it.shape) >= 3]
    if images:
        yield f"images as floats: {', '.join(images)}. uint8 takes a quarter of float32; DTypeCastTransform makes floats of a batch."
    doubles = [it for it in fields if it.key[0] == "next" and any(it.key[1:] == other.key for other in fields)]
    if doubles:
        saved = sum(it.row_bytes for it in doubles)
        yield f"stored twice: {', '.join('.'.join(it.key) for it in doubles)}. NextFromFollowing saves up to {format_size(saved)} a row."


def fields_of_row(like: Path | None, described: Path | None) -> list[schema.Field]:
    """The fields of a sample, as :func:`planned` takes it, or of a description: JSON as there, or a ``store.json``.

    Raises ``Misuse``: neither can be read; fields are ragged.
    """
    if described is not None:
        found = [*_of_json(described)]
    else:
        found = [] if like is None else [*_read(like, batch=False)]
    for field in found:
        if field.ragged is not None:
            raise Misuse(
                f"{described or like}: {'.'.join(field.key)} is ragged. Make the store with LazyMemmapStorage(ragged=…), then serve it."
            )
    return found


# ---- samples ---------------------------------------------------------------------------------------------------------


def _read(sample: Path, *, batch: bool) -> Iterable[schema.Field]:
    if sample.is_dir():
        return _of_ours(sample)
    if not sample.exists():
        raise Misuse(f"{sample}: expected an .npz, .npy or .json file, or a folder of engram's, found nothing.")
    if sample.suffix == ".json":
        return _of_json(sample)
    if sample.suffix in (".npz", ".npy"):
        return _of_arrays(sample, batch=batch)
    raise Misuse(f"{sample}: expected an .npz, .npy or .json file, or a folder of engram's, got another.")


def _of_ours(path: Path) -> Iterator[schema.Field]:
    from engram.saved.series import Series

    found = describe(path)
    if found["kind"] == "series" and (newest := Series(path).latest()[0]) is not None:
        found = describe(newest)
    for problem in told(found, "problems"):
        raise Refusal(str(problem))
    if found["kind"] == "store":
        fields = found.get("fields")
    else:
        parts = (part for shard in found.get("shards", ()) for part in shard.get("parts", {}).values())
        fields = next((part["fields"] for part in parts if "fields" in part), None)
    if not fields:
        raise Misuse(f"{path}: expected a store, a dump or a checkpoint with rows, got a {found['kind']} without.")
    lanes = found.get("lanes", {}).get("count", 1)
    for field in map(field_of, fields):
        if (items := field.ragged) is not None:  # the plan is of one lane
            field = msgspec.structs.replace(field, ragged=msgspec.structs.replace(items, items=items.items * lanes))
        yield field


def _of_json(path: Path) -> Iterator[schema.Field]:
    with raise_as(Misuse, f"{path}: expected JSON, got something else", (ValueError, RecursionError)):
        described = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(described, dict):
        raise Misuse(f'{path}: expected an object such as {{"obs": "uint8[4,84,84]"}}, got another value.')
    if described.get("format") == schema.FORMAT:
        yield from schema.decode_store(path.read_bytes(), str(path)).fields
    else:
        yield from _nested(described, (), str(path))


def _nested(described: Mapping[str, object], above: tuple[str, ...], where: str) -> Iterator[schema.Field]:
    for name, it in described.items():
        key = (*above, name)
        if isinstance(it, str):
            yield _field(key, it, f"{where}: {'.'.join(key)}")
        elif isinstance(it, dict) and isinstance(it.get("dtype"), str):
            shape = it.get("shape", [])
            if not isinstance(shape, list) or not all(str(size).isdigit() for size in shape):
                raise Misuse(f"{where}: {'.'.join(key)}: expected a shape such as [4, 84, 84], got {shape!r:.80}.")
            yield _field(key, f"{it['dtype']}[{','.join(map(str, shape))}]", f"{where}: {'.'.join(key)}")
        elif isinstance(it, dict):
            yield from _nested(it, key, where)
        else:
            raise Misuse(f"{where}: {'.'.join(key)}: expected a dtype such as 'float32[3]', got {it!r:.80}.")


def _of_arrays(path: Path, *, batch: bool) -> Iterator[schema.Field]:
    import numpy as np

    with raise_as(Misuse, f"{path}: expected arrays of numbers, got something else", (ValueError, EOFError)):
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            arrays = {layout.SINGLE: loaded}
        else:
            with loaded:
                arrays = dict(loaded)
    for name, array in arrays.items():
        if batch and not array.ndim:
            raise Misuse(f"{path}: {name}: --batch expects a first dimension of rows, got a scalar.")
        shape = array.shape[1:] if batch else array.shape
        key = tuple(name.replace("/", ".").split("."))
        yield _field(key, f"{array.dtype.name}[{','.join(map(str, shape))}]", f"{path}: {name}")


def _field(key: tuple[str, ...], spec: str, where: str) -> schema.Field:
    match = _SPEC.fullmatch(spec.strip())
    if match is None or match["dtype"] not in schema.DTYPES:
        raise Misuse(
            f"{where}: expected a dtype of {', '.join(schema.DTYPES)}, and a shape such as [4,84,84], got {spec!r:.80}."
        )
    sizes = [size.strip() for size in (match["shape"] or "").split(",")]
    if any(not size for size in sizes) and sizes != [""]:
        raise Misuse(f"{where}: expected a shape such as [4,84,84], got {spec!r:.80}.")
    return schema.Field(key, match["dtype"], tuple(int(size) for size in sizes if size))


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match["number"]):
        raise Misuse(f"--memory {text!r}: expected a size such as 16GB or 500MB.")
    return round(float(match["number"]) * _UNITS[match["unit"].lower()])
