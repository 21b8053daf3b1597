"""A buffer as an accelerator reads it, which draws and copies rows by itself."""

from __future__ import annotations

from typing import cast

import torch

from engram.buffer import configuration, read_path
from engram.buffer.wiring import Wiring
from engram.samplers import PrioritizedSampler, SamplerWithoutReplacement, check_drawable
from engram.storages import TensorStorage
from engram.store import blocks, lifetime, row_indexes
from engram.store.device.chain import Batch, Kind
from engram.store.priorities import PriorityIndex
from engram.store.store import Store


class OnDevice:
    """A buffer as a ``DeviceReadable``: what an accelerator needs of it, and why a batch needs the host."""

    def __init__(self, wiring: Wiring, settings: configuration.Settings, reading: read_path.ReadPath) -> None:
        self._wiring, self._settings, self._reading = wiring, settings, reading
        self._key = blocks.Key()

    def device_readable(self) -> OnDevice:
        """This: it is what ``DeviceReplay`` needs of a buffer."""
        return self

    @property
    def store(self) -> Store | None:
        """The rows; None: nothing was ever written."""
        return cast("Store | None", self._wiring.storage.memory)

    @property
    def on_disk(self) -> bool:
        """Whether rows are in files on a disk, which no device reads."""
        store = self.store
        if store is None or store.directory is None:
            return False
        return store.has_files and not store.directory.is_relative_to(lifetime.shared_memory())

    @property
    def kind(self) -> Kind:
        """How rows are drawn."""
        of = self._wiring.of_sampler
        return "uniform" if self._wiring.draws_uniformly else "permuted" if of.draws_once else "prioritized"

    @property
    def priorities(self) -> PriorityIndex | None:
        """What rows are drawn by; None: not by priority."""
        source = self._wiring.bound_sampler()
        if not isinstance(source, PrioritizedSampler) or self.store is None:
            return None
        index = source.priorities()
        return index if isinstance(index, PriorityIndex) else None

    @property
    def refusal(self) -> str | None:
        """What of a batch needs the host; None: nothing does."""
        wiring, settings = self._wiring, self._settings
        storage, of, store = wiring.storage, wiring.of_sampler, self.store
        needs = {
            "rows on a server": storage.traits.is_remote,
            "rows in a list": not storage.traits.has_fields,
            "rows on an accelerator": store is not None and not store.is_native,
            "rows of several lengths": store is not None and bool(store.items),
            "a store that is only read": store is not None and store.readonly,
            "a transform": wiring.transform.reads,
            "collate_fn": wiring.collate_fn is not None,
            "sample_unit": wiring.unit is not None,
            "computed fields": bool(wiring.source.computed_keys),
            "hooks of a component of yours": storage.gets,
            f"output={settings.output!r}": settings.output != "torch",
            "prefetch": bool(settings.prefetch),
            "limits": bool(wiring.limits) if store is None else store.core.limited,
            "counts of samples": store is not None
            and (store.core.hears_samples or row_indexes.UsageIndex.in_use(store) is not None),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            type(wiring.sampler).__name__: not (wiring.draws_uniformly or self._draws_natively(of.reads_natively)),
        }
        return next((what for what, is_so in needs.items() if is_so), None)

    def _draws_natively(self, reads_natively: bool) -> bool:
        source = self._wiring.source
        if isinstance(source, PrioritizedSampler):
            plain = source.dtype is torch.float32 and source.normalize == "store"
            return reads_natively and plain and not self._wiring.of_sampler.draws_windows
        return reads_natively and isinstance(source, SamplerWithoutReplacement)

    def state(self) -> object:
        """Equal to that of before as long as an accelerator may read on as before."""
        wiring, store = self._wiring, self.store
        if store is None:
            return None
        core = store.core
        core.find_fields()
        parts = (store, wiring.source, wiring.transform.reads, wiring.storage.gets, wiring.numbers)
        counted = (len(store.schema.fields), core.limited, core.hears_samples, core.asked_usage)
        return (*parts, *counted, torch.are_deterministic_algorithms_enabled())

    @property
    def has_columns(self) -> bool:
        """Whether rows are named by several numbers, as with ``ndim > 1``."""
        return bool(self._wiring.storage.ndim > 1)

    @property
    def ran_out(self) -> bool:
        """Whether the sampler's last batch was the last of its pass."""
        return bool(self._wiring.source.ran_out)

    def begin(self) -> None:
        """An iteration begins."""
        self._wiring.source.ran_out = False

    def next_seed(self) -> int:
        """64 random bits of the buffer's generator."""
        self._reading.draw_key(self._key)
        return self._key.value

    def next_draw(self, n: int, *, keyed: bool) -> tuple[int, torch.Tensor | None]:
        """The key of the next batch, 0 if it is not ``keyed``; and its rows, if the host chooses them. Raises what ``rb.sample`` raises."""
        wiring, reading, store = self._wiring, self._reading, self.store
        assert store is not None  # it is read only then
        wiring.gate.check_open("sample")
        if not reading.looked:
            reading.say_repeated(n)
        key = self.next_seed() if keyed else 0
        if not wiring.of_sampler.draws_once:
            check_drawable(store.core.size())
            store.core.count_all_sampled(n)
            return key, None
        rows = wiring.bound_sampler().draw(wiring.storage.extent(), n, key).rows
        store.core.count_all_sampled(len(rows))
        return key, rows

    def finish(self, batch: Batch, n: int, device: torch.device, *, return_info: bool) -> object:
        """The first ``n`` rows of a batch in the form of ``rb.sample``."""
        reading, wiring = self._reading, self._wiring
        if n < batch.rows.shape[0]:
            batch = type(batch)(
                batch.block,
                tuple(column[:n] for column in batch.fields),
                *(None if part is None else part[:n] for part in batch[2:]),  # type: ignore[arg-type]
            )
        info: dict[object, object] = {} if batch.weights is None else {"priority_weight": batch.weights}
        if wiring.numbers or batch.weights is not None:
            info["index_generation"] = batch.tickets
        structure = cast("TensorStorage", wiring.storage).structure
        assert structure is not None  # rows were written
        data = structure.unflatten(batch.fields, (n,), device)
        if reading.shows_rows:
            data = reading.attached(data, batch.rows, info)
        return (data, reading.info(batch.rows, info)) if return_info else data
