"""A replay inside the checkpoints of another library: the name of its own checkpoint goes in, and no row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram._checks import check_count
from engram._words import warn
from engram.checkpoint.options import checked_step
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format import pins

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engram.checkpoint.checkpointer import Checkpointer
    from engram.checkpoint.job import Job
    from engram.checkpoint.options import RestoreArguments
    from engram.checkpoint.reports import RestoreReport
    from engram.checkpoint.save import SaveHandle

#: The entry of the state.
_ENTRY = "checkpoint"


class StatefulReplay:
    """What :meth:`Checkpointer.stateful` returns: ``state_dict`` and ``load_state_dict`` of a replay, as DCP, accelerate and Fabric
    call them. All ranks call each method together.

    Args:
        checkpointer: saves and restores.
        job: of the checkpointer.
        step: returns the step of the training.
        keep: how many checkpoints that were named stay.
        restore: what :meth:`Checkpointer.restore` is told besides the name.

    >>> import tempfile, torch
    >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
    >>> folder = tempfile.TemporaryDirectory()
    >>> replay = Checkpointer(folder.name, rb).stateful(lambda: 7)
    >>> state = replay.state_dict()
    >>> rb.empty()
    >>> replay.load_state_dict(state)
    >>> len(rb), replay.report.step
    (10, 7)
    >>> folder.cleanup()
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        job: Job,
        step: Callable[[], int],
        keep: int,
        restore: RestoreArguments,
    ) -> None:
        if not callable(step):
            raise TypeError(
                f"stateful: step: expected a function that returns the step, got {type(step).__name__}. Pass lambda: step."
            )
        self._checkpointer, self._job, self._step = checkpointer, job, step
        self._keep = check_count("stateful: keep", keep, most=pins.MOST)
        self._restore = restore
        self._handle: SaveHandle | None = None
        self._saved_step = -1
        self.report: RestoreReport | None = None
        """What :meth:`load_state_dict` loaded last; None: nothing."""

    def __repr__(self) -> str:
        handle = "" if self._handle is None else f", step {self._saved_step}: {self._handle!r}"
        return f"{type(self).__name__}({str(self._job.root)!r}, keep={self._keep}{handle})"

    def begin(self) -> SaveHandle:
        """Take the snapshot of this step now, and write it in the background. :meth:`state_dict` then waits for the rest of it only.

        Raises: as :meth:`Checkpointer.save`.

        >>> import tempfile, torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> folder = tempfile.TemporaryDirectory()
        >>> replay = Checkpointer(folder.name, rb).stateful(lambda: 7)
        >>> handle = replay.begin()  # the model's own state may be copied meanwhile
        >>> replay.state_dict() == {"checkpoint": handle.wait().name}
        True
        >>> folder.cleanup()
        """
        step = checked_step("stateful", self._step())
        self._pin(step)
        self._handle, self._saved_step = self._checkpointer.save(step, wait=False), step
        return self._handle

    def state_dict(self) -> dict[str, str]:
        """``{"checkpoint": name}``, once the replay of this step is saved: a save that :meth:`begin` began, or one that begins now.

        A second call at the same step returns the same name. If no rank holds a row, nothing is saved, and the name is empty: DCP
        asks a new buffer for its state before it loads one.

        Raises: as :meth:`Checkpointer.save`. The next call tries again.

        >>> import tempfile, torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> folder = tempfile.TemporaryDirectory()
        >>> replay = Checkpointer(folder.name, rb).stateful(lambda: 7)
        >>> replay.state_dict() == replay.state_dict()  # one checkpoint a step
        True
        >>> folder.cleanup()
        """
        step = checked_step("stateful", self._step())
        if self._handle is None or self._saved_step != step:
            if not self._any_rank_has_rows():
                return {_ENTRY: ""}
            self.begin()
        handle = self._handle
        assert handle is not None  # begun here or before
        try:
            return {_ENTRY: handle.wait().name}
        except BaseException:
            if handle.done:
                self._handle = None
            raise

    def load_state_dict(self, state_dict: Mapping[str, str]) -> None:
        """Restore the checkpoint that a state names; of an empty name, forget all rows.

        Raises:
            ValueError: another library's state. FileNotFoundError: that checkpoint was removed; the buffer is as it was. Others: as
                :meth:`Checkpointer.restore`.

        >>> import tempfile, torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> folder = tempfile.TemporaryDirectory()
        >>> replay = Checkpointer(folder.name, rb).stateful(lambda: 7)
        >>> replay.load_state_dict({"checkpoint": ""})  # of a buffer that held no rows
        >>> len(rb)
        0
        >>> folder.cleanup()
        """
        name = state_dict.get(_ENTRY)
        if not isinstance(name, str) or set(state_dict) != {_ENTRY}:
            raise ValueError(
                f"load_state_dict: expected {{'{_ENTRY}': name}}, as stateful() saves it, got the entries {sorted(state_dict)}."
            )
        self._handle, self.report = None, None
        if name:
            try:
                self.report = self._checkpointer.restore(name=name, **self._restore)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"load_state_dict: {self._job.root}: the checkpoint {name} of this state is gone. Load a state whose checkpoint is "
                    "there, as Checkpointer.list() says, and give stateful(keep=) as many as states are kept; load_state_dict("
                    f"{{'{_ENTRY}': ''}}) begins with an empty buffer."
                ) from error
        else:
            self._job.buffer.empty()

    def _any_rank_has_rows(self) -> bool:
        job = self._job
        return job.ranks.max(int(len(job.buffer.storage) > 0), job.options.timeout) > 0

    def _pin(self, step: int) -> None:
        """Before the save, so that no later one removes it."""
        if self._job.ranks.rank:
            return
        try:
            pins.pin(self._job.root, step, self._keep)
        except (OSError, CorruptCheckpoint, IncompatibleCheckpoint) as error:
            warn(
                f"stateful: the checkpoint of step {step} stays no longer than others: {str(error).removesuffix('.')}. If "
                f"{pins.NAME} is damaged, remove it, and load no state that was saved before."
            )
