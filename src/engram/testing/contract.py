"""What all contracts share: rows that say who they are, checks with a message, and ways to copy."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch
from tensordict import TensorDict

from engram._support import nested, tensordicts
from engram.buffer.replay_buffer import ReplayBuffer

T = TypeVar("T")


class Contract:
    """Base of the contracts.

    ``copies`` are functions that copy an object. Add a round trip through pickle, if components are sent to other processes::

        copies = [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
    """

    copies: ClassVar[Sequence[Callable[[object], object]]] = [copy.deepcopy]

    def run_all(self) -> None:
        """Run every test of the contract, for use without a test runner.

        Raises ``AssertionError`` at the first that fails, or what the component raised there. A note of the error names the test.
        """
        classes = type(self).__mro__
        for name in dict.fromkeys(name for cls in classes for name in vars(cls) if name.startswith("test_")):
            try:
                getattr(type(self)(), name)()
            except Exception as error:
                error.add_note(f"in {type(self).__name__}.{name}")
                raise

    def rows(self, first: int, n: int) -> object:
        """``n`` rows to write, each of which differs from all others."""
        return steps(first, n)

    def _copies(self, it: T) -> list[T]:
        return [how(it) for how in self.copies]  # type: ignore[misc]


class BufferContract(Contract):
    """Base of the contracts of components that have a part in what a buffer does next."""

    #: What :meth:`_go_on` returns, for messages.
    goes_on = "rows"

    def _buffer(self) -> ReplayBuffer:
        """An empty buffer with a new component."""
        raise NotImplementedError

    def _begun(self) -> ReplayBuffer | None:
        """A buffer in use; None: nothing can be done with one."""
        raise NotImplementedError

    def _go_on(self, rb: ReplayBuffer) -> object:
        """What a buffer does next."""
        raise NotImplementedError

    def test_a_state_goes_on_where_it_was_taken(self) -> None:
        rb = self._begun()
        if rb is None:
            return
        state = rb.state_dict()
        expected = self._go_on(rb)
        for way in ("the first time", "again, after the first one was used"):
            other = self._buffer()
            other.load_state_dict(state)
            check(
                same(self._go_on(other), expected),
                f"expected the {self.goes_on} after state_dict() from a buffer that loads the state {way}: it must be a copy, and have "
                "all that they depend on",
            )

    def test_a_dump_goes_on_where_it_was_saved(self) -> None:
        rb = self._begun()
        if rb is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            rb.dumps(f"{folder}/dump")
            expected = self._go_on(rb)
            other = self._buffer()
            other.loads(f"{folder}/dump")
            said = f"expected the {self.goes_on} after dumps() from a buffer that loads the folder"
            check(same(self._go_on(other), expected), said)

    def test_copies_go_on_by_themselves(self) -> None:
        rb = self._begun()
        if rb is None:
            return
        twins = self._copies(rb)
        expected = self._go_on(rb)
        rb.extend(self.rows(800, 8))
        self._go_on(rb)
        for twin in twins:
            said = f"expected the {self.goes_on} of the original from a copy, without the writes since"
            check(same(self._go_on(twin), expected), said)


def check(true: object, message: str) -> None:
    """Raise ``AssertionError`` unless it is true."""
    if not true:
        raise AssertionError(message)


def refuses(call: Callable[[], object]) -> bool:
    """Whether a call raises an exception."""
    try:
        call()
    except Exception:  # noqa: BLE001 - any refusal will do
        return True
    return False


def steps(first: int, n: int) -> TensorDict:
    """``n`` steps of episodes of eight: each says which step it is."""
    step = torch.arange(first, first + n)
    done = (step % 8 == 7).unsqueeze(1)
    after = {"observation": torch.stack([step + 1, -step - 1], 1).float(), "reward": step.unsqueeze(1).float()}
    after |= {"done": done, "terminated": done.clone()}
    before = {"step": step, "observation": torch.stack([step, -step], 1).float(), "episode": step // 8}
    return TensorDict({**before, "next": after}, batch_size=[n])


def same(one: object, other: object) -> bool:
    """Whether two values are equal, with all that they contain; NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    both, alike = (one, other), type(one) is type(other)
    if alike and nested.is_dataclass(one):
        return same(*map(nested.attributes, both))
    if all(isinstance(it, TensorDict) for it in both) or (alike and tensordicts.is_tensorclass(one)):
        return same(*(dict(it.items()) for it in both))  # type: ignore[attr-defined]
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return alike and one == other
