"""Next observations that are not stored: a batch takes them from the following rows, or from those of finished episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram.expanders.reading import Column

if TYPE_CHECKING:
    from torch import Tensor

    from engram.expanders.next_from_following import FinalObservations
    from engram.field_paths import FieldPath
    from engram.store import Store

#: What comes after a step where it is no step of its trajectory, as the native core numbers it: another trajectory, without an end flag.
_ANOTHER = 3


class Following:
    """Takes the next observations of a batch from the following rows, and those of last steps from ``finals``.

    A row whose next observation is nowhere is drawn again: the newest one of a lane, or one that was made an end after it was written.
    """

    def __init__(self, mark: int, fields: dict[FieldPath, int], finals: FinalObservations) -> None:
        """``mark``: the field in which a row names its final observation. ``fields``: the observations, by path."""
        self.names = [("next", *path) for path in fields]
        self._mark = mark
        self._fields = fields
        self._finals = finals

    def check(self, memory: Store) -> None:
        """Raise ``RuntimeError`` unless every process of the store can read the final observations."""
        if memory.directory is not None:
            self._finals.check_shared()

    def columns(self, others: list[Column]) -> list[Column]:
        """The next observations, stacked as the observations are, then what comes after the observed row, for :meth:`complete`."""
        ahead = others[self._mark].ahead
        following = [others[number]._replace(ahead=ahead, following=True) for number in self._fields.values()]
        return [*following, Column("after", ahead=ahead)]

    def finished(self, others: list[Column]) -> tuple[int, int]:
        """The field of :meth:`__init__`, and how many steps at the end of a trajectory have no next observation if that is negative."""
        return self._mark, others[self._mark].ahead + 1

    def complete(self, memory: Store, rows: Tensor, tensors: list[Tensor], moved: list[int]) -> tuple[list[int], bool]:
        """Put final observations where no row follows: ``(places to draw again, whether all of those wait for a next step)``.

        Args:
            memory: the store of the rows.
            rows: int64 ``[B]``.
            tensors: what was read: columns, then tickets. The column before the tickets is removed.
            moved: places whose rows have changed since they were drawn.

        Rows whose final observations were overwritten are drawn again, as those whose next step is not there yet.

        Raises ``RuntimeError``: a final observation is in another storage, or none was kept.
        """
        numbers, after = tensors.pop(), tensors.pop()
        tensors.append(numbers)
        if not bool(after.any()):  # all have a step after them
            return moved, False
        stands = torch.ones(len(rows), dtype=torch.bool, device="cpu")
        stands[moved] = False
        mark = tensors[self._mark]
        final = stands & (mark[:, 0] >= 0)
        at, alone = final.nonzero().flatten(), stands & ~final & (after != 0)
        unmarked = alone & (after == _ANOTHER)
        if len(at):
            columns, found = self._finals.read(mark[at])
            gone = at[~found]
            if len(gone):  # unless the row is, too
                lost = gone[memory.tickets_of(rows[gone]) == numbers[gone]]
                if len(lost) and not self._finals.pass_over(memory, self._mark):
                    raise RuntimeError(
                        f"sample: NextFromFollowing: the final observation of row {int(rows[lost[0]])} is not in "
                        f"{self._finals.storage!r}: that is not the one that was written to. Draw with the FinalObservations that the "
                        "rows were written through."
                    )
                stands[gone] = False
                stands[lost] = alone[lost] = True  # they wait for good
            for place, column in zip(range(-1 - len(self._fields), -1), columns, strict=False):
                tensor = tensors[place]
                values = column[found].to(tensor.dtype)  # rows may have been cast at the door
                if tensor.ndim > values.ndim:  # frames, [B, frames, *shape]: the newest one
                    tensor[at[found], -1] = values
                else:
                    tensor[at[found]] = values
        if bool(unmarked.any()):
            raise RuntimeError(
                f"sample: NextFromFollowing: row {int(rows[unmarked.nonzero()[0, 0]])}, or one that follows it, is the last of its "
                "trajectory, but was written without an end flag, so its final observation was not kept. Set one of the end keys of "
                "FinalObservations at the last step of every episode."
            )
        again = (~stands | alone).nonzero().flatten().tolist()
        return again, bool(alone.any()) and bool(stands.all())
