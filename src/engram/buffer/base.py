"""What buffers and ensembles have alike, and a buffer for people: its text, its tree, its table and its numbers."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING, Generic, Self, TypeVar, cast

import torch

from engram._support import closing, tensordicts, words
from engram.around import finals_of
from engram.around.query import Query
from engram.buffer.wiring import Wiring, checked_generator
from engram.format.sizes import ShownField
from engram.inspect import gauges
from engram.inspect.plots import Scan
from engram.remote.served import ServedStorage
from engram.saved.inspection import Histogram, histogram
from engram.store.limits import limit_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.tree import Tree

    from engram.buffer import configuration, prefetching
    from engram.transforms import Compose

B = TypeVar("B")
T = TypeVar("T")


class Shows(Generic[B]):
    """Makes properties of a class ``B`` of buffers, each of which is what a function finds in the parts of one."""

    def __call__(self, get: Callable[[B], T], doc: str, put: Callable[..., None] | None = None) -> T:
        """``put``: sets it."""
        return cast("T", property(get, put, doc=doc))


_shows: Shows[BufferBase] = Shows()


def _of_sampler(name: str) -> float:
    """The property of a parameter of the sampler. ``AttributeError``: it has none."""

    def put(self: BufferBase, value: float) -> None:
        getattr(self._wiring.sampler, name)  # else a sampler without it would get an attribute that nothing reads
        setattr(self._wiring.sampler, name, value)

    return _shows(lambda self: cast("float", getattr(self._wiring.sampler, name)), f"As ``sampler.{name}``.", put)


class BufferBase(closing.Closes):
    """Base of buffers and of ensembles: their generator, and batches ahead."""

    _wiring: Wiring
    _settings: configuration.Settings
    _prefetching: prefetching.Prefetching | None

    transform: Compose = _shows(lambda self: self._wiring.transform, "Transforms of batches: a :class:`Compose`.")
    _transform = transform
    batch_size: int | None = _shows(lambda self: self._settings.batch_size, "Default batch size: an int, or None.")
    prefetch: int = _shows(lambda self: self._settings.prefetch, "Batches asked for ahead: an int.")
    shared: bool = _shows(lambda self: self._wiring.storage.shared, "Whether several processes may use all rows.")
    alpha, beta = _of_sampler("alpha"), _of_sampler("beta")
    is_alive: bool = _shows(lambda self: self._wiring.gate.samples, "Whether it samples: false after :meth:`shutdown`.")
    initialized: bool = _shows(lambda self: self._settings.unmade is None, "Whether all is made: see ``delayed_init``.")
    register_save_hook = _shows(lambda self: self._wiring.storage.register_save_hook, "As of the storage.")
    register_load_hook = _shows(lambda self: self._wiring.storage.register_load_hook, "As of the storage.")
    _storage = _shows(lambda self: self._wiring.storage, "As ``storage``.", lambda self, value: self.set_storage(value))
    _sampler = _shows(lambda self: self._wiring.sampler, "As ``sampler``.", lambda self, value: self.set_sampler(value))
    _writer = _shows(lambda self: self._wiring.writer, "As ``writer``.", lambda self, value: self.set_writer(value))

    def set_rng(self, generator: torch.Generator | None) -> None:
        """The generator of all later draws; None: torch's default one. Raises ``ValueError`` for one not on the CPU.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb.set_rng(torch.Generator().manual_seed(0))
        >>> first = rb.sample(return_info=True)[1]["index"]
        >>> rb.set_rng(torch.Generator().manual_seed(0))
        >>> torch.equal(first, rb.sample(return_info=True)[1]["index"])
        True
        """
        generator = checked_generator(generator)
        self._discard_prefetched("set_rng", keys=False)
        self._wiring.generator = generator

    def append_transform(self, transform: object, *, invert: bool = False) -> Self:
        """Add a transform at the end of the list: forward on what is read, inverse on what is written.

        A plain callable is for reading; with ``invert`` for writing. On reading, a transform must return something; on
        writing, None or no rows hold everything back. What it raises comes through, with a note which one it was; nothing is
        written then. The containers it is given are its own, and of what was read the tensors, too.

        Prefetched batches are dropped.

        Raises:
            RuntimeError: no transform.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb = rb.append_transform(lambda batch: {**batch, "obs": batch["obs"] + 1})
        >>> rb.sample()["obs"].mean()
        tensor(1.)
        """
        return self.insert_transform(len(self._wiring.transform), transform, invert=invert)

    def insert_transform(self, index: int, transform: object, *, invert: bool = False) -> Self:
        """As :meth:`append_transform`, before position ``index``. Raises ``ValueError`` for a position out of range.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb = rb.append_transform(lambda batch: {"obs": batch["obs"] * 2})
        >>> rb = rb.insert_transform(0, lambda batch: {"obs": batch["obs"] + 1})
        >>> rb.sample()["obs"].mean()
        tensor(2.)
        """
        self._discard_prefetched("insert_transform")
        self._wiring.transform.insert(index, transform, invert=invert)
        self._rewire()
        return self

    def _rewire(self) -> None:
        """After a change of components."""
        if self._prefetching is not None:
            self._prefetching.rewired()

    def synchronize(self) -> None:
        """Wait until threads have made the batches that they were given. What that raised, :meth:`sample` raises.

        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rb.synchronize()
        """
        if self._prefetching is not None:
            self._prefetching.wait()

    def _materialize(self) -> None:
        """What happens to rows now is not for batches that were asked for before."""
        if self._prefetching is not None:
            self._prefetching.materialize()

    def _discard_prefetched(self, call: str, *, keys: bool = True) -> None:
        if self._prefetching is not None:
            self._prefetching.discard(call, keys=keys)


class Iterates(BufferBase, Generic[B]):
    """A buffer whose batches come one after the other."""

    sample: Callable[..., B]

    def __iter__(self) -> Iterator[B]:
        """Batches, until the sampler ran out; for ever with replacement. Needs the constructor's ``batch_size``."""
        if self._settings.batch_size is None:
            raise RuntimeError("iteration: expected a batch size: pass ReplayBuffer(batch_size=…).")
        return self._batches()

    def _batches(self, *, begun: bool = False) -> Iterator[B]:
        """``begun``: go on behind a batch that was handed out, perhaps the last of its pass."""
        if not begun:
            self._wiring.source.ran_out = False
        while not begun or self._prefetching or not self._wiring.source.ran_out:
            begun = True
            yield self.sample()

    def next(self) -> B | None:
        """The next batch of a persistent iterator; None at its end, after which it begins again. Td batches: no device.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb.next()["obs"].shape
        torch.Size([4, 3])
        """
        settings = self._settings
        if settings.iterator is None:
            settings.iterator = self._batches(begun=True) if settings.resumes() else iter(self)
        batch = next(settings.iterator, None)
        if batch is None:
            settings.iterator = None
        elif tensordicts.is_tensor_collection(batch):
            batch = batch.clear_device_()
        return batch


class Shown:
    """A buffer as text, in a terminal with rich, and in a notebook; and what is found in it."""

    _wiring: Wiring
    _settings: configuration.Settings
    query = cast("Query", property(Query, doc=Query.__doc__))

    def __repr__(self) -> str:
        if self._settings.unmade is not None:
            return f"{self._settings.kind}(delayed_init=True)"
        return Display(self._wiring, self._settings).text()

    def __rich__(self) -> Tree | str:
        if self._settings.unmade is not None:
            return repr(self)
        return Display(self._wiring, self._settings).tree()

    def _repr_html_(self) -> str:
        if self._settings.unmade is not None:
            return f"<table><caption>{escape(repr(self))}</caption></table>"
        return Display(self._wiring, self._settings).html()


#: Writers that are worth no mention.
_USUAL_WRITERS = ("RoundRobinWriter()", "TensorDictRoundRobinWriter()")
#: What a text says last.
_DISPENSABLE = ("asked for", "transform", "writer", "fields", "lanes", "batch_size", "prefetch", "memory")
#: Characters of a text, at most.
_LONGEST = 120
#: Characters of the end of a path, which tells more than its beginning.
_PLACE = 20
#: Rows of a storage, at most, whose priorities are copied for a histogram in a text.
_LOOKED_AT = 1 << 24
#: Bars of a histogram in a line of text.
_BARS = " ▁▂▃▄▅▆▇█"
_LEFT = "style='text-align:left'"


class Display:
    """Describes a buffer as it is at this moment."""

    def __init__(self, wiring: Wiring, settings: configuration.Settings) -> None:
        self._wiring = wiring
        self._settings = settings

    def text(self) -> str:
        """For ``repr``, of at most 120 characters: what does not fit is said in short, or in the table alone."""
        facts = dict(self._facts())
        for name, said in self._shorter(facts):
            if len(self._joined(facts)) <= _LONGEST:
                break
            facts[name] = said
        while len(self._joined(facts)) > _LONGEST and len(facts) > 1:
            facts.pop(next((name for name in _DISPENSABLE if name in facts), [*facts][-1]))
        return self._joined(facts)

    def _shorter(self, facts: dict[str, str]) -> Iterator[tuple[str, str]]:
        """Facts in fewer characters, the least important ones first."""
        if "fields" in facts:
            yield "fields", str(len(self._wiring.storage.store.schema.fields))
        number, unit, place = [*facts.get("memory", "").split(" ", 2), "", ""][:3]
        if len(place) > _PLACE:
            yield "memory", f"{number} {unit} …{place[-_PLACE:]}"
        for name in ("writer", "transform", "sampler", "storage"):
            if "(" in facts.get(name, "") and not facts[name].endswith("()"):
                yield name, f"{facts[name].partition('(')[0]}(…)"

    def _joined(self, facts: dict[str, str]) -> str:
        return f"{self._settings.kind}({', '.join(f'{name}={value}' for name, value in facts.items())})"

    def tree(self) -> Tree:
        """For ``rich.print``: components below the buffer, and fields below the storage."""
        from rich.markup import escape as literal  # the caller is rich
        from rich.tree import Tree

        facts = dict(self._facts())
        size = facts.pop("size", "")
        tree = Tree(f"[bold]{literal(self._settings.kind)}[/bold]{f' {size} rows' if size else ''}")
        facts.pop("fields", None)
        memory = facts.pop("memory", None)
        storage = facts.pop("storage", type(self._wiring.storage).__name__)
        branch = tree.add(f"[bold]storage[/bold] {literal(storage)}{f', {literal(memory)}' if memory else ''}")
        for name, dtype, shape, row, _ in self._fields():
            branch.add(f"{literal(name)}: {dtype} {literal(shape)}, {row} a row")
        for name, value in facts.items():
            below = tree.add(f"[bold]{literal(name)}[/bold] {literal(value)}")
            if name == "sampler" and (found := self._priorities()) is not None:
                edges, counts = found["edges"], found["counts"]
                bars = "".join(_BARS[-(-number * (len(_BARS) - 1) // max(counts))] for number in counts)
                below.add(f"priorities {edges[0]:.3g} {bars} {edges[-1]:.3g}")
        return tree

    def html(self) -> str:
        """For notebooks: all facts, how full it is, how priorities are distributed, and the fields."""
        storage = self._wiring.storage
        facts = [(name, escape(value)) for name, value in self._facts() if name != "fields"]
        if not storage.closed and not storage.traits.is_remote:
            size, capacity = len(storage), storage.max_size
            if _is_bounded(capacity):
                facts.insert(0, ("filled", f"<progress value='{size}' max='{capacity}'></progress>"))
            if (found := self._priorities()) is not None:
                facts.append(("priorities", _bars(found)))
            if fields := [*self._fields()]:
                header = "".join(f"<th {_LEFT}>{name}</th>" for name in ("field", "dtype", "shape", "a row", "in all"))
                body = "".join(
                    "<tr>" + "".join(f"<td {_LEFT}>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in fields
                )
                facts.append(("fields", f"<table><tr>{header}</tr>{body}</table>"))
        rows = "".join(f"<tr><th {_LEFT}>{escape(name)}</th><td {_LEFT}>{cell}</td></tr>" for name, cell in facts)
        return f"<table><caption>{escape(self._settings.kind)}</caption>{rows}</table>"

    def _fields(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Name, dtype, shape, bytes of a row and of all rows of each field that is stored as a column."""
        storage = self._wiring.storage
        if not storage.closed and not storage.traits.is_remote and storage.memory is not None:
            schema = storage.memory.schema
            for it in (ShownField.of(field, storage.max_size, schema.lanes) for field in schema.fields):
                yield it.name, it.dtype, it.shape, it.row, words.format_size(it.nbytes)

    def _priorities(self) -> Histogram | None:
        """Of rows at even distances; None: the sampler has none, or there are no rows, or very many."""
        storage = self._wiring.storage
        if storage.closed or storage.traits.is_remote or storage.max_size > _LOOKED_AT or not len(storage):
            return None
        scan = Scan(self._wiring, "repr")
        if not scan.has_priorities:
            return None
        try:
            values = scan.priorities().values
        except RuntimeError:  # such as of a sampler that has seen no rows yet
            return None
        numbers = Counter(values[values > 0].tolist())
        return histogram(numbers) if numbers else None

    def stats(self, prefetched: int) -> dict[str, float]:
        """A flat dict of numbers. ``prefetched``: batches that are ahead."""
        storage = self._wiring.storage
        size, capacity = len(storage), storage.max_size
        stats: dict[str, float] = {
            "size": size,
            "write_count": 0 if self._wiring.of_writer.read_only else storage.write_count,
            "prefetch_queue_size": prefetched,
            "initialized": 1,
            "lanes": storage.lanes,
            "bytes": storage.nbytes,
        }
        if _is_bounded(capacity):
            stats |= {"capacity": capacity, "utilization": size / capacity}
        stats.update(storage.counters())
        if storage.memory is not None:
            stats.update(limit_stats(storage.memory))
        served = isinstance(storage, ServedStorage)
        stats.update(storage.gauges() if served else gauges(storage, self._wiring.source))
        if (finals := finals_of(self._wiring.sampler)) is not None:
            stats["final_observations_lost"] = finals.lost
        return stats

    def _facts(self) -> list[tuple[str, str]]:
        wiring, settings = self._wiring, self._settings
        storage = wiring.storage  # a text does not ask a server
        aside = storage.closed or storage.traits.is_remote
        facts = [("storage", repr(storage))] if aside else self._facts_of_storage()
        facts.append(("sampler", repr(wiring.sampler)))
        if repr(wiring.writer) not in _USUAL_WRITERS:
            facts.append(("writer", repr(wiring.writer)))
        if len(wiring.transform):
            facts.append(("transform", repr(wiring.transform)))
        if settings.batch_size is not None:
            facts.append(("batch_size", str(settings.batch_size)))
        if settings.prefetch:
            facts.append(("prefetch", str(settings.prefetch)))
        return facts

    def _facts_of_storage(self) -> list[tuple[str, str]]:
        storage = self._wiring.storage
        size, capacity = len(storage), storage.max_size
        of = f"/{capacity:,} ({words.format_share(size / capacity)})" if _is_bounded(capacity) else ""
        facts = [("size", f"{size:,}{of}")]
        store = storage.memory
        if store is None:
            facts.append(("storage", storage.described or type(storage).__name__))
        else:
            names = [field.name for field in store.schema.fields]
            shown = ", ".join(names[:8])
            facts.append(("memory", f"{words.format_size(storage.nbytes)} {store.place}"))
            facts.append(("fields", shown if len(names) <= 8 else f"{len(names)}: {shown}, …"))
        if storage.lanes > 1:
            facts.append(("lanes", str(storage.lanes)))
        if storage.requested_size != capacity:
            facts.append(("asked for", words.format_number(storage.requested_size)))
        return facts


def _bars(found: Histogram) -> str:
    """A histogram as HTML: a bar for each, which says its range and number when the pointer is on it."""
    edges, counts = found["edges"], found["counts"]
    bars = "".join(
        f"<span title='{edges[i]:.3g} to {edges[i + 1]:.3g}: {words.count(number, 'row')}' style='display:inline-block;width:1.4em;"
        f"margin-right:1px;background:#1f77b4;height:{max(3 * number / max(counts), 0.1 if number else 0):.2f}em'></span>"
        for i, number in enumerate(counts)
    )
    return f"{edges[0]:.3g} {bars} {edges[-1]:.3g}"


def _is_bounded(capacity: int) -> bool:
    return capacity < torch.iinfo(torch.int64).max
