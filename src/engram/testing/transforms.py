"""The contract of transforms."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from tensordict import TensorDict

from engram.buffer.tensordict import TensorDictReplayBuffer
from engram.storages import LazyTensorStorage
from engram.testing.contract import Contract, check, same, steps


class _Transform(Protocol):
    def forward(self, data: TensorDict) -> TensorDict: ...
    def inv(self, data: TensorDict) -> TensorDict: ...


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object]) -> None: ...


class TransformContract(Contract):
    """What a buffer expects of a transform. Derive from it and override :meth:`make`."""

    inverts = False
    """``forward(inv(data))`` is ``data`` again."""

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
        check(
            same(transform.forward(stored.clone()), transform.forward(stored.clone())),
            "expected forward() to compute the same each time: only writes may change a transform",
        )

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
            check(
                same(twin.forward(stored.clone()), expected),
                "expected a copy to compute what the original did when it was made",
            )

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
            check(
                same(other.forward(stored.clone()), expected),
                f"expected a transform that loads the state {way} to compute the same: both methods must copy",
            )
            other.inv(self.rows(1600, 8))

    def test_a_buffer_with_it_writes_and_samples(self) -> None:
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(32), transform=self.make(), batch_size=8)
        rb.extend(self.rows(0, 40))
        check(len(rb.sample()) == 8, "expected a batch of 8")
        check(len(rb) == 32, f"expected 32 rows, got {len(rb)}")
