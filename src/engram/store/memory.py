"""The memory of a store: private pages, files of its folder, and files without a name that other processes have open."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import torch

from engram._support import native, words
from engram._support.mappings import bytes_of, map_piece, open_files
from engram._support.memory import available_memory
from engram.errors import CorruptStore
from engram.format import files, layout, strict
from engram.format.schema import DTYPES, MAX_BYTES, Field, RaggedItems, Schema
from engram.types import RowsTarget

#: DLPack's type code, bits, and the shape of a row.
DlpackSpec: TypeAlias = tuple[int, int, tuple[int, ...]]

#: MAP_NORESERVE, which Python 3.11 has no name for.
_NO_RESERVE = 0x4000

_Number = Annotated[int, msgspec.Meta(ge=0)]

#: The dtypes that can be stored, by name; some are missing in older versions of torch.
DTYPE_OF: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPE_OF.items()}

#: Device, inode and size of a file in memory, and where a field begins in it.
Segment: TypeAlias = tuple[_Number, _Number, _Number, _Number]


class _Adopted(msgspec.Struct):
    """What a store notes of rows that existed before it."""

    segments: list[Segment | None] | None


class Copied:
    """A tensor that exists for a copy only.

    On the CPU it is pickled by value: multiprocessing would send a file descriptor, which is closed, or belongs to another
    file, if the tensor is gone before the receiver uses it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> tuple[object, ...]:
        tensor = self.tensor
        if not tensor.is_cpu:
            return (tensor,)
        return tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.tensor, *how = state
        if how:
            dtype, shape = how
            self.tensor = torch.from_numpy(state[0]).view(dtype).view(shape)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(field: Field | RaggedItems) -> torch.dtype:
    """The torch dtype of a field, or of its items."""
    dtype: torch.dtype = getattr(torch, field.dtype)
    return dtype


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers that torch indexes and NumPy has: there are dtypes for which they lack one or the other."""
    return tensor if tensor.itemsize > 8 else tensor.view(_WORDS[tensor.itemsize])


def write_rows(target: RowsTarget, number: int, first: int, rows: torch.Tensor) -> None:
    """Write rows of a field from one on, past its mapping if the target says so."""
    if target.put is None:
        target[number][first : first + len(rows)] = rows
    else:
        target.put(number, first, rows.cpu().contiguous())


def refuse_ragged(schema: Schema, where: str, advice: str) -> None:
    """Raise ``ValueError`` for rows that have any number of items, in a place that cannot hold them."""
    if schema.ragged:
        names = ", ".join(schema.fields[number].name for number in schema.ragged)
        raise ValueError(f"{where}: expected fields whose rows all have one size, got ragged ones: {names}. {advice}.")


def dlpack_specs(fields: Sequence[Field | RaggedItems]) -> list[DlpackSpec]:
    """The dtypes and shapes of rows, as DLPack names them."""
    return [(*native.DLPACK[getattr(torch, f.dtype)], f.shape) for f in fields]


def as_rows(rows: torch.Tensor, call: str) -> torch.Tensor:
    """Rows (or lanes, or tickets) as the core reads them: int64, contiguous, on the CPU.

    Raises:
        TypeError: not a tensor of ints.
    """
    if rows.dtype is not torch.int64 or not rows.is_cpu:
        if rows.dtype.is_floating_point or rows.dtype.is_complex or rows.dtype is torch.bool:
            raise TypeError(f"{call}: expected int64 rows, got a tensor of {rows.dtype}.")
        rows = rows.to("cpu", torch.int64)
    return rows.contiguous()


class Block(NamedTuple):
    """Raw memory: the tensor keeps it alive."""

    tensor: torch.Tensor
    nbytes: int

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


@torch.inference_mode(mode=False)  # else views of it could not be written to outside of inference mode
def private_block(nbytes: int, what: str = "row numbers", *, sparse: bool = False) -> Block:
    """A zeroed private buffer, whose pages are taken when they are first touched. Raises ``OSError``: there is no space for it.

    ``sparse``: most of it is never touched, so it may be larger than the memory, and its pages are small.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NO_RESERVE if sparse else 0)
    try:
        memory = mmap.mmap(-1, max(nbytes, 1), flags=flags)
    except (OSError, OverflowError) as error:
        advice = "Use fewer rows, a smaller dtype, or LazyMemmapStorage, whose rows lie on disk"
        raise OSError(errno.ENOMEM, f"{what} in RAM: {words.no_space(nbytes, available_memory(), advice)}") from error
    if nbytes >= 4 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):  # random rows of a large field then miss the TLB less
        memory.madvise(mmap.MADV_NOHUGEPAGE if sparse else mmap.MADV_HUGEPAGE)
    return Block(torch.frombuffer(memory, dtype=torch.uint8), nbytes)


def new_control_memory(schema: Schema) -> tuple[Block, Block]:
    """Control block and tickets of a new store in private memory."""
    control = private_block(native.control_bytes(schema.lanes))
    native.format_control(control.address, control.nbytes, schema.capacity, schema.lanes, 0)
    return control, private_block(layout.tickets_bytes(schema.capacity))


@contextlib.contextmanager
def _mapping(path: Path) -> Iterator[None]:
    """Raises ``OSError`` for a system call that fails: torch raises ``RuntimeError`` with its number behind the message."""
    try:
        yield
    except RuntimeError as error:
        number = re.search(r"\((\d+)\)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, f"{os.strerror(code)} (mapping it)", str(path)) from error


def file_block(path: Path, nbytes: int) -> Block:
    """A file of that size, mapped."""
    files.check_size(path, nbytes)
    with _mapping(path), torch.device("cpu"):
        return Block(torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8), nbytes)


@torch.inference_mode(mode=False)
def read_block(path: Path, nbytes: int, *, private: bool = False) -> Block:
    """A file of that size, mapped without the right to write: a write to it is a SIGSEGV. Later writes of others are seen.

    ``private``: it may be written to, and what is written stays here.
    """
    files.check_size(path, nbytes)
    if not nbytes:
        return Block(torch.empty(0, dtype=torch.uint8, device="cpu"), 0)
    with files.open_regular(path, os.O_RDONLY) as fd:
        return Block(bytes_of(fd, nbytes, readonly=not private, private=private), nbytes)


def row_stride(tensor: torch.Tensor) -> int:
    """Bytes from row to row of the rows of a field."""
    if tensor.is_contiguous():
        return tensor[:1].nbytes
    return tensor.stride(0) * tensor.element_size()


def placed(fields: Sequence[torch.Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Where the native core finds fields, which the caller keeps alive: address, bytes of a row, and from row to row, of each."""
    return [field.data_ptr() for field in fields], [field[:1].nbytes for field in fields], [*map(row_stride, fields)]


@torch.inference_mode(mode=False)
def fields_in(
    directory: Path,
    schema: Schema,
    alone: Callable[[Path, Field, int], torch.Tensor],
    together: Callable[[Path, int], torch.Tensor],
) -> list[torch.Tensor]:
    """The fields of a store's folder, mapped.

    Args:
        directory: the folder.
        schema: what its rows are.
        alone: maps the file of a field: :func:`column_field` or its like.
        together: maps a file of that size, as bytes: the one with all small fields.
    """
    group, capacity = layout.group_of(schema), schema.capacity
    paths = layout.column_paths(directory, schema)
    if group is None:
        return [alone(path, field, capacity) for path, field in zip(paths, schema.fields, strict=True)]
    raw = together(directory / layout.FOLDER / layout.GROUPED, group.stride * capacity)
    return [
        _field_among(raw, field, capacity, group.stride, group.offsets[number])
        if number in group.offsets
        else alone(paths[number], field, capacity)
        for number, field in enumerate(schema.fields)
    ]


def _field_among(raw: torch.Tensor, field: Field, capacity: int, stride: int, offset: int) -> torch.Tensor:
    size = DTYPES[field.dtype]
    inner = [math.prod(field.shape[at + 1 :]) for at in range(len(field.shape))]
    shape, strides = (capacity, *field.shape), (stride // size, *inner)
    return torch.as_strided(raw.view(torch_dtype(field)), shape, strides, offset // size)


@torch.inference_mode(mode=False)
def read_field(path: Path, field: Field, capacity: int, *, private: bool = False) -> torch.Tensor:
    """The rows of a field in its file, mapped as :func:`read_block` does."""
    nbytes = field.row_bytes * capacity
    return _field_in(read_block(path, nbytes, private=private).tensor if nbytes else None, field, capacity)


def _field_in(memory: torch.Tensor | None, field: Field, capacity: int) -> torch.Tensor:
    """The rows of a field in memory of exactly their size; None: they have no bytes."""
    shape = (capacity, *field.shape)
    if memory is None:
        return torch.empty(shape, dtype=torch_dtype(field), device="cpu")
    return memory.view(torch_dtype(field)).view(shape)


@torch.inference_mode(mode=False)
def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory over a torch storage of its own. torch moves no memory that a file backs, so that stays as it is."""
    if not tensor.is_cpu or not tensor.numel() or tensor.is_shared():  # type: ignore[no-untyped-call]
        return tensor
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    return torch.from_numpy(raw.numpy()).view(tensor.dtype).view(tensor.shape)


@torch.inference_mode(mode=False)
def private_field(field: Field, capacity: int) -> torch.Tensor:
    """Zeroed rows of a field in private memory."""
    nbytes = field.row_bytes * capacity
    memory = private_block(nbytes, f"field {field.name}, {capacity} rows").tensor[:nbytes] if nbytes else None
    return _field_in(memory, field, capacity)


@torch.inference_mode(mode=False)
def column_field(path: Path, field: Field, capacity: int) -> torch.Tensor:
    """The rows of a field in its file."""
    nbytes = field.row_bytes * capacity
    return _field_in((file_block(path, nbytes).tensor if nbytes else None), field, capacity)


@torch.inference_mode(mode=False)
def file_views(directory: Path, schema: Schema) -> list[torch.Tensor]:
    """The fields of a store's folder mapped once more, for users: tensors of tensordict's, which is imported for that. They are
    pickled by the names of their files, and torch does not move them; small fields that lie together are plain ones.
    """
    from tensordict import MemoryMappedTensor

    def alone(path: Path, field: Field, capacity: int) -> torch.Tensor:
        shape = torch.Size((capacity, *field.shape))
        if not field.row_bytes:
            return _field_in(None, field, capacity)
        files.check_size(path, field.row_bytes * capacity)
        with _mapping(path), torch.device("cpu"):
            view: torch.Tensor = MemoryMappedTensor.from_filename(path, dtype=torch_dtype(field), shape=shape)
        return view

    return fields_in(directory, schema, alone, lambda path, n: torch.from_numpy(file_block(path, n).tensor.numpy()))


def segments_in(folder: Path) -> list[Segment | None] | None:
    """Where rows without files in a store's folder lie, one segment per field; None if they have files.

    Raises ``CorruptStore``.
    """
    path = folder / layout.ADOPTED
    if not path.exists():
        return None
    wanted = f"{path}: expected where the rows lie, got something else"
    with words.raise_as(CorruptStore, wanted, (msgspec.DecodeError, UnicodeDecodeError)):
        strict.describe(_Adopted)
        return msgspec.json.decode(files.read_small(path, MAX_BYTES), type=_Adopted).segments


@torch.inference_mode(mode=False)
def segment_fields(
    folder: Path,
    schema: Schema,
    segments: Sequence[Segment | None],
    control: Block,
    *,
    readonly: bool = False,
    private: bool = False,
) -> list[torch.Tensor]:
    """Fields in memory without a name, which exists as long as a process has it open: one of those that share the store.

    Accepts only memory of the file system that the folder is in. ``readonly`` and ``private``: as for :func:`read_block`.

    Raises:
        CorruptStore: no such process, or none that this process may look at.
    """
    raw = control.tensor[: files.FIXED_BYTES].numpy().tobytes()
    found = open_files(("self", *files.processes(raw)))
    device = os.stat(folder).st_dev
    tensors = []
    if len(segments) != schema.first_fields:
        raise CorruptStore(f"{folder / layout.ADOPTED}: expected {schema.first_fields} fields, got {len(segments)}.")
    for field, segment in zip(schema.fields, segments, strict=False):
        nbytes = field.row_bytes * schema.capacity
        if not nbytes:
            tensors.append(_field_in(None, field, schema.capacity))
            continue
        at, inode, size, offset = segment or (-1, -1, -1, -1)
        for path in found.get((at, inode), ()) if at == device and offset + nbytes <= size else ():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # if it has ended since
                memory = map_piece(path, at, inode, size, readonly=readonly, private=private)[offset : offset + nbytes]
                break
        else:
            raise CorruptStore(
                f"{folder}: field {field.name}: its rows are in memory without a name, and no process that shares the store and "
                "that this one may look at has it open. It is gone when the last of them ends."
            )
        tensors.append(_field_in(memory, field, schema.capacity))
    for number in range(len(segments), len(schema.fields)):  # added since
        column, field = layout.column_path(folder.parent, schema, number), schema.fields[number]
        alone = partial(read_field, private=private) if readonly or private else column_field
        tensors.append(alone(column, field, schema.capacity))
    return tensors
