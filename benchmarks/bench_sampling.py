"""Claim: drawing 128 rows is many times faster than with TorchRL, for all kinds of rows and storages.

Measured: one ``sample`` of 128 out of 100,000 rows of ``{a: [3, 4] float32, b: [3, 4] float32, c: bool}``, as a
bare tensor (``a`` alone), a dict and a TensorDict, each in a list, in RAM and memory-mapped. engram and TorchRL run
the same class with the same storage, batch size and ``collate_fn``. Only engram stacks a list of dicts by itself,
so a further row gives both the same function. cpprb supports only dicts of NumPy arrays. One thread, warm rows:
written just before and read by the check.

Then cases that the figure omits: a buffer that is half full, ``TensorDictReplayBuffer``, and engram compared with
itself (memory-mapped with RAM, dict with TensorDict).
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import data, rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

GATHER = Effort(calls=100, blocks=100)
STACK = Effort(calls=20, blocks=50)
"""Lists stack 128 items per sample, which takes up to some milliseconds: 1,000 samples instead of 10,000."""

LABELS = {"tensor": "tensor", "dict": "dict", "tensordict": "TensorDict"}
ARRAYS_ONLY = "cpprb: a dict of NumPy arrays, whatever the row says: it has no other rows. `c` is [128, 1]."


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """The figure's nine cells, then the further rows; ``share`` scales the number of blocks."""
    fields = data.fields()
    sources = {"tensor": fields["a"], "dict": fields, "tensordict": data.tensordict(fields)}
    for kind in LABELS:
        for storage in rivals.STORAGES:
            yield _cell(libraries, kind, storage, sources[kind], fields, share)
    yield _same_collate(libraries, fields, share)
    half = {key: value[: data.ROWS // 2] for key, value in fields.items()}
    for storage in ("tensor", "memmap"):
        yield _half_full(libraries, storage, half, share)
    for storage in ("tensor", "memmap"):
        yield _tensordict_buffer(libraries, storage, sources["tensordict"], share)
    if libraries["engram"].module is not None:
        yield _memmap_to_tensor(libraries["engram"], sources["tensordict"], share)
        for storage in ("tensor", "memmap"):
            yield _dict_to_tensordict(libraries["engram"], storage, fields, sources["tensordict"], share)


def _cell(libraries: rivals.Libraries, kind: str, storage: str, source: Any, fields: data.Fields, share: float) -> Row:
    """One cell of the figure, all libraries that can do it."""
    key, what = f"sample/{kind}/{storage}", f"sample 128 · {LABELS[kind]} · {rivals.SHORT[storage]}"
    notes = {}
    if storage == "list":
        source = _items(source)
        collate: Any = None
        notes["cpprb"] = "cpprb: no list storage."
        if kind == "dict":
            collate = {"TorchRL": data.stack_dicts}
            notes["TorchRL"] = (
                "A list of dicts: TorchRL needs a collate_fn (torch.stack per key), engram stacks by itself."
            )
    else:
        collate = data.identity
        notes["cpprb"] = ARRAYS_ONLY if kind != "tensor" else "cpprb: no bare tensors, every row is a dict."
    with tempfile.TemporaryDirectory() as name:
        sides = _torch_like_sides(libraries, storage, source, Path(name), collate)
        if kind != "tensor" and storage != "list":
            folder = Path(name) if storage == "memmap" else None
            sides += _cpprb_sides(libraries["cpprb"], fields, folder)
        timing = alternate(sides, (STACK if storage == "list" else GATHER).scaled(share))
    return timed(key, what, timing, times=("TorchRL", "cpprb"), notes=notes)


def _same_collate(libraries: rivals.Libraries, fields: data.Fields, share: float) -> Row:
    """Mostly the time of the user's own function, which is the same on both sides."""
    with tempfile.TemporaryDirectory() as name:
        sides = _torch_like_sides(libraries, "list", _items(fields), Path(name), data.stack_dicts)
        timing = alternate(sides, STACK.scaled(share))
    notes = {"cpprb": "cpprb: no list storage."}
    return timed(
        "sample/dict/list-own-collate",
        "sample 128 · dict · list, own collate_fn",
        timing,
        times=("TorchRL",),
        notes=notes,
    )


def _half_full(libraries: rivals.Libraries, storage: str, half: data.Fields, share: float) -> Row:
    """While a buffer fills, TorchRL slices the live part out of its storage for every sample."""
    with tempfile.TemporaryDirectory() as name:
        source = data.tensordict(half)
        sides = _torch_like_sides(libraries, storage, source, Path(name), data.identity, live=data.ROWS // 2)
        folder = Path(name) if storage == "memmap" else None
        sides += _cpprb_sides(libraries["cpprb"], half, folder)
        timing = alternate(sides, GATHER.scaled(share))
    what = f"sample 128 · TensorDict · {rivals.SHORT[storage]}, half full"
    notes = {"cpprb": ARRAYS_ONLY}
    return timed(f"sample/half-full/{storage}", what, timing, times=("TorchRL", "cpprb"), notes=notes)


def _tensordict_buffer(libraries: rivals.Libraries, storage: str, source: Any, share: float) -> Row:
    """The class most TensorDict users take: it adds the key ``index`` to what it returns."""
    with tempfile.TemporaryDirectory() as name:
        sides = _torch_like_sides(
            libraries, storage, source, Path(name), data.identity, buffer="TensorDictReplayBuffer"
        )
        timing = alternate(sides, GATHER.scaled(share))
    what = f"sample 128 · TensorDictReplayBuffer · {rivals.SHORT[storage]}"
    notes = {"cpprb": "cpprb: no counterpart of TensorDictReplayBuffer."}
    return timed(f"sample/tensordict-buffer/{storage}", what, timing, times=("TorchRL",), notes=notes)


def _memmap_to_tensor(engram: rivals.Library, source: Any, share: float) -> Row:
    """Once the pages are warm, a file should cost what RAM costs."""
    with tempfile.TemporaryDirectory() as name:
        sides = [
            Side("engram", _sampler(engram, "memmap", source, Path(name), data.identity)),
            Side("LazyTensor", _sampler(engram, "tensor", source, Path(name), data.identity)),
        ]
        timing = alternate(sides, GATHER.scaled(share))
    what = "sample 128 · TensorDict · LazyMemmap, of LazyTensor"
    return timed("sample/memmap-to-tensor", what, timing, share=("LazyTensor",))


def _dict_to_tensordict(engram: rivals.Library, storage: str, fields: data.Fields, source: Any, share: float) -> Row:
    """A dict is the lighter container, so it must not be the slower one."""
    with tempfile.TemporaryDirectory() as name:
        sides = [
            Side("engram", _sampler(engram, storage, fields, Path(name, "dict"), data.identity)),
            Side("TensorDict", _sampler(engram, storage, source, Path(name, "tensordict"), data.identity)),
        ]
        timing = alternate(sides, GATHER.scaled(share))
    what = f"sample 128 · dict · {rivals.SHORT[storage]}, of TensorDict"
    return timed(f"sample/dict-to-tensordict/{storage}", what, timing, share=("TensorDict",))


def _items(source: Any) -> list[Any]:
    """The rows one by one, as a list storage keeps them."""
    if isinstance(source, dict):
        columns = (column.unbind(0) for column in source.values())
        return [dict(zip(source, row, strict=True)) for row in zip(*columns, strict=True)]
    return list(source.unbind(0))


def _torch_like_sides(
    libraries: rivals.Libraries,
    storage: str,
    source: Any,
    folder: Path,
    collate: Any,
    *,
    live: int = data.ROWS,
    buffer: str = "ReplayBuffer",
) -> list[Side]:
    """engram and TorchRL, as far as they are there, holding the same rows (in lists: the same objects).

    ``collate``: one ``collate_fn`` for both, or a dict of them by library.
    """
    present = [libraries[name] for name in rivals.TORCH_LIKE if libraries[name].module is not None]
    by_name = collate if isinstance(collate, dict) else dict.fromkeys(rivals.TORCH_LIKE, collate)
    return [
        Side(
            library.name,
            _sampler(library, storage, source, folder, by_name.get(library.name), live=live, buffer=buffer),
        )
        for library in present
    ]


def _sampler(
    library: rivals.Library,
    storage: str,
    source: Any,
    folder: Path,
    collate: Any,
    *,
    live: int = data.ROWS,
    buffer: str = "ReplayBuffer",
) -> Callable[[], object]:
    """``sample`` of a buffer of 100,000 rows that holds ``source``."""
    replay = rivals.torch_like(
        library, storage, data.ROWS, folder, batch_size=data.BATCH, collate_fn=collate, buffer=buffer
    )
    replay.extend(source)
    return data.checked(replay.sample, live)


def _cpprb_sides(cpprb: rivals.Library, fields: data.Fields, folder: Path | None) -> list[Side]:
    """cpprb with the same rows as NumPy arrays, or nothing where it is not installed."""
    if cpprb.module is None:
        return []
    arrays = data.arrays(fields)
    replay = rivals.cpprb_buffer(cpprb, arrays, data.ROWS, folder)
    replay.add(**arrays)
    return [Side("cpprb", data.checked(partial(replay.sample, data.BATCH), len(arrays["c"])))]
