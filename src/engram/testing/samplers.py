"""The contract of samplers."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Protocol, runtime_checkable

import torch
from tensordict import TensorDict

from engram.buffer.replay_buffer import ReplayBuffer
from engram.buffer.tensordict import TensorDictReplayBuffer
from engram.samplers import declared
from engram.storages import LazyTensorStorage, TensorStorage
from engram.testing.contract import BufferContract, Contract, check, refuses, same, steps
from engram.types import Declared, Sampler, Writer

_CAPACITY = 32
#: Steps begin here, so that a row that holds nothing, which is zero, is none of them.
_FIRST = 104


class SamplerContract(BufferContract):
    """What a buffer expects of a sampler. Derive from it and override :meth:`make`."""

    goes_on = "draws"
    batch_size = 8
    #: Draws come to an end, and the last batch may be smaller.
    ends_epochs = False

    def make(self, capacity: int) -> Sampler:
        """A new sampler for a storage of that many rows."""
        raise NotImplementedError

    def rows(self, first: int, n: int) -> TensorDict:
        """``n`` rows to write. Each must say in ``"step"`` which one it is: ``first``, ``first + 1``, …"""
        return steps(first, n)

    def _buffer(self) -> TensorDictReplayBuffer:
        storage, generator = LazyTensorStorage(_CAPACITY), torch.Generator().manual_seed(7)
        return TensorDictReplayBuffer(
            storage=storage, sampler=self.make(_CAPACITY), batch_size=self.batch_size, generator=generator
        )

    def _filled(self, n: int = 40) -> TensorDictReplayBuffer:
        rb = self._buffer()
        rb.extend(self.rows(_FIRST, n))
        return rb

    def _begun(self) -> TensorDictReplayBuffer:
        rb = self._filled()
        self._go_on(rb)
        return rb

    def _draw(self, rb: ReplayBuffer) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a batch, and the steps that were read there."""
        data, info = rb.sample(return_info=True)
        index = info["index"]
        rows = index[0] if isinstance(index, tuple) else index
        return rows.reshape(-1), data["step"].reshape(-1)

    def _go_on(self, rb: ReplayBuffer) -> list[list[int]]:
        return [self._draw(rb)[0].tolist() for _ in range(6)]

    def _check_draws(self, rb: TensorDictReplayBuffer, first: int, end: int) -> None:
        """Draws are of the steps ``[first, end)``, and of as many as were asked for."""
        for _ in range(8):
            rows, read = self._draw(rb)
            full = 0 < len(rows) <= self.batch_size if self.ends_epochs else len(rows) == self.batch_size
            check(full, f"expected a draw of {self.batch_size} rows, got {len(rows)}: {rows.tolist()}")
            dead = [step for step in read.tolist() if not first <= step < end]
            check(not dead, f"expected draws of the live steps {first} … {end - 1}, got {dead} too")
            check(same(rb["step"][rows], read), "expected info['index'] to name the rows that were read")
        self._check_draw(rb)

    def _check_draw(self, rb: TensorDictReplayBuffer) -> None:
        """The sampler's own draw: a buffer draws again in place of rows that are not there."""
        sampler, extent = rb.sampler, rb.storage.extent()
        if isinstance(sampler, Declared) and (sampler.traits.draws_uniformly or sampler.traits.reads_natively):
            return
        source = declared(sampler)  # which hands it the fields that it reads
        source.bind(rb.storage)
        rows = source.draw(extent, self.batch_size, 12345).rows
        dead = rows[~extent.contains(rows)].tolist()
        said = f"expected draw() to choose live rows, of lanes that are filled up to {extent.filled}, got {dead} too"
        check(not dead, said)

    # ---- what every sampler must do ------------------------------------------------------------------------------------

    def test_follows_the_protocol(self) -> None:
        sampler = self.make(_CAPACITY)
        missing = [name for name in ("draw", "observe", "update_priority") if not hasattr(sampler, name)]
        check(isinstance(sampler, Sampler), f"expected the methods of engram.types.Sampler, missing {missing}")

    def test_draws_live_rows(self) -> None:
        self._check_draws(self._filled(16), _FIRST, _FIRST + 16)
        self._check_draws(self._filled(_CAPACITY), _FIRST, _FIRST + _CAPACITY)

    def test_draws_no_overwritten_rows(self) -> None:
        rb = self._filled(_CAPACITY)
        rb.extend(self.rows(_FIRST + _CAPACITY, 16))
        self._check_draws(rb, _FIRST + 16, _FIRST + _CAPACITY + 16)

    def test_draws_nothing_that_was_there_before_empty(self) -> None:
        rb = self._filled(_CAPACITY)
        rb.sample()
        rb.empty()
        rb.extend(self.rows(800, 16))
        self._check_draws(rb, 800, 816)

    def test_an_empty_buffer_is_refused_and_can_be_filled(self) -> None:
        rb = self._buffer()
        check(refuses(rb.sample), "expected an error for a draw from an empty buffer")
        rb.extend(self.rows(_FIRST, 16))
        self._check_draws(rb, _FIRST, _FIRST + 16)

    def test_draws_follow_from_the_generator_alone(self) -> None:
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            random.seed(seed)
            rb = self._filled()
            before = torch.get_rng_state(), random.getstate()
            found.append(self._go_on(rb))
            alone = torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
            said = "expected draws to leave the random numbers of torch and of Python alone: derive them from the key"
            check(alone, said)
        said = "expected the same draws from the same generator: derive random numbers from the key"
        check(found[0] == found[1], said)

    def test_written_data_stays_as_it_is(self) -> None:
        rb, data = self._buffer(), self.rows(_FIRST, 16)
        before = data.clone()
        rb.extend(data)
        check(same(before, data), "expected observe() to leave the data alone")

    def test_takes_or_ignores_priorities_of_drawn_rows(self) -> None:
        rb = self._filled()
        rows, _ = self._draw(rb)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there are none
            rb.update_priority(rows, torch.ones(len(rows)))
        self._check_draws(rb, _FIRST + 8, _FIRST + 40)

    def test_a_state_is_a_copy(self) -> None:
        rb, other = self._filled(), self._filled()
        state = rb.sampler.state_dict()
        before = copy.deepcopy(state)
        self._go_on(rb)
        check(same(before, state), "expected state_dict() to copy: draws have changed a state")
        other.sampler.load_state_dict(state)
        self._go_on(other)
        check(same(before, state), "expected load_state_dict() to copy: draws have changed the state that was loaded")


class _Transform(Protocol):
    def forward(self, data: TensorDict) -> TensorDict: ...
    def inv(self, data: TensorDict) -> TensorDict: ...


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object]) -> None: ...


class TransformContract(Contract):
    """What a buffer expects of a transform. Derive from it and override :meth:`make`."""

    #: ``forward(inv(data))`` is ``data`` again.
    inverts = False

    def make(self) -> _Transform:
        """A new transform."""
        raise NotImplementedError

    def rows(self, first: int, n: int) -> TensorDict:
        """``n`` rows as a user writes them."""
        return steps(first, n)

    # ---- what every transform must do ----------------------------------------------------------------------------------

    def test_data_that_is_given_stays_as_it_is(self) -> None:
        transform = self.make()
        written = self.rows(0, 8)
        before = written.clone()
        stored = transform.inv(written)
        check(same(before, written), "expected inv() to leave the data that it is given alone")
        before = stored.clone()
        transform.forward(stored)
        check(same(before, stored), "expected forward() to leave the data that it is given alone")

    def test_rows_stay_rows(self) -> None:
        transform = self.make()
        stored = transform.inv(self.rows(0, 8))
        check(len(stored) == 8, f"expected as many rows from inv(), 8, got {len(stored)}")
        read = transform.forward(stored)
        check(len(read) == 8, f"expected as many rows from forward(), 8, got {len(read)}")

    def test_reading_changes_nothing(self) -> None:
        transform = self.make()
        stored = transform.inv(self.rows(0, 8))
        said = "expected forward() to compute the same each time: only writes may change a transform"
        check(same(transform.forward(stored.clone()), transform.forward(stored.clone())), said)

    def test_forward_undoes_inv(self) -> None:
        if not self.inverts:
            return
        transform, data = self.make(), self.rows(0, 8)
        read = transform.forward(transform.inv(data.clone()))
        for key in data.keys(include_nested=True, leaves_only=True):
            close = torch.allclose(read[key].double(), data[key].double(), rtol=1e-4, atol=1e-4)
            check(close, f"expected {key!r} as it was after inv() and forward()")

    def test_copies_compute_the_same_and_go_on_by_themselves(self) -> None:
        transform = self.make()
        stored = transform.inv(self.rows(0, 8))
        expected = transform.forward(stored.clone())
        twins = self._copies(transform)
        transform.inv(self.rows(800, 8))
        for twin in twins:
            said = "expected a copy to compute what the original did when it was made"
            check(same(twin.forward(stored.clone()), expected), said)

    def test_a_state_is_all_there_is(self) -> None:
        transform = self.make()
        stored = transform.inv(self.rows(0, 8))
        if not isinstance(transform, _Stateful):
            return
        state = transform.state_dict()
        expected = transform.forward(stored.clone())
        transform.inv(self.rows(800, 8))
        for way in ("the first time", "again, after other writes"):
            other = self.make()
            if isinstance(other, _Stateful):
                other.load_state_dict(state)
            said = f"expected a transform that loads the state {way} to compute the same: both methods must copy"
            check(same(other.forward(stored.clone()), expected), said)
            other.inv(self.rows(1600, 8))

    def test_a_buffer_with_it_writes_and_samples(self) -> None:
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(32), transform=self.make(), batch_size=8)
        rb.extend(self.rows(0, 40))
        check(len(rb.sample()) == 8, "expected a batch of 8")
        check(len(rb) == 32, f"expected 32 rows, got {len(rb)}")


class WriterContract(BufferContract):
    """What a buffer expects of a writer. Derive from it and override :meth:`make`."""

    #: The writer refuses every write.
    read_only = False

    def make(self, capacity: int) -> Writer:
        """A new writer for a storage of that many rows."""
        raise NotImplementedError

    def rows(self, first: int, n: int) -> TensorDict:
        """``n`` rows to write. Each must say in ``"step"`` which one it is: ``first``, ``first + 1``, …"""
        return steps(first, n)

    def _buffer(self, *, full: bool = False) -> TensorDictReplayBuffer:
        storage = TensorStorage(self.rows(0, _CAPACITY)) if full else LazyTensorStorage(_CAPACITY)
        return TensorDictReplayBuffer(storage=storage, writer=self.make(_CAPACITY), batch_size=8)

    def _begun(self) -> TensorDictReplayBuffer | None:
        if self.read_only:
            return None
        rb = self._buffer()
        self._write(rb, 0, 12)
        return rb

    def _write(self, rb: ReplayBuffer, first: int, n: int) -> list[int]:
        """The rows that were written, -1 for a rejected one. Checks that they hold what was written."""
        data = self.rows(first, n)
        before = data.clone()
        rows = torch.as_tensor(rb.extend(data)).reshape(-1)
        check(same(before, data), "expected place() to leave the data alone")
        check(len(rows) == n, f"expected the row of each of {n} steps, -1 for a rejected one, got {rows.tolist()}")
        check(((rows >= -1) & (rows < _CAPACITY)).all(), f"expected rows in [0, {_CAPACITY}), got {rows.tolist()}")
        last = {row: step for step, row in enumerate(rows.tolist()) if row >= 0}
        for row, step in last.items():
            check(int(rb["step"][row]) == first + step, f"expected step {first + step} in row {row}")
        return [int(row) for row in rows]

    def _go_on(self, rb: ReplayBuffer) -> list[list[int]]:
        return [self._write(rb, first, 5) for first in (1000, 1005, 1010)]

    # ---- what every writer must do -------------------------------------------------------------------------------------

    def test_follows_the_protocol(self) -> None:
        check(isinstance(self.make(_CAPACITY), Writer), "expected the method of engram.types.Writer: place")

    def test_rows_hold_what_was_written(self) -> None:
        if self.read_only:
            return
        rb = self._buffer()
        for first in range(0, 3 * _CAPACITY, 8):
            self._write(rb, first, 8)
            check(0 < len(rb) <= _CAPACITY, f"expected at most {_CAPACITY} rows, got {len(rb)}")

    def test_a_refused_write_changes_nothing(self) -> None:
        rb = self._buffer(full=True)
        before = rb[:].clone()
        if self.read_only:
            check(refuses(lambda: rb.extend(self.rows(40, 4))), "expected an error for a write")
            check(refuses(lambda: rb.add(self.rows(40, 1)[0])), "expected an error for a write")
        wrong = self.rows(40, 4)
        wrong["step"] = wrong["step"].float()
        check(refuses(lambda: rb.extend(wrong)), "expected an error for a field of another dtype")
        check(same(before, rb[:].clone()), "expected rows as they were after a write that was refused")

    def test_a_place_that_is_not_used_has_no_effect(self) -> None:
        if self.read_only:
            return
        rb, twin = self._buffer(), self._buffer()
        for one in (rb, twin):
            self._write(one, 0, 8)
        rb.writer.place(rb.storage.extent(), 4, 0, self.rows(8, 4))
        said = "expected place() to have no side effects: the write may not take place"
        check(self._go_on(rb) == self._go_on(twin), said)

    def test_starts_again_after_empty(self) -> None:
        if self.read_only:
            return
        rb, new = self._buffer(), self._buffer()
        self._write(rb, 0, 40)
        rb.empty()
        check(len(rb) == 0, f"expected no rows after empty(), got {len(rb)}")
        check(self._go_on(rb) == self._go_on(new), "expected rows as from a new writer after empty()")
