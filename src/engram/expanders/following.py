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


class Following:
    """Takes the next observations of a batch from the following rows, and those of last steps from ``finals``."""

    def __init__(self, mark: int, fields: dict[FieldPath, int], finals: FinalObservations) -> None:
        """``mark``: the field in which a row names its final observation. ``fields``: the observations, by path."""
        self.names = [("next", *path) for path in fields]
        self._mark = mark
        self._fields = fields
        self._finals = finals

    def check(self, memory: Store) -> None:
        """Raise ``RuntimeError`` unless every process of the store can read the final observations."""
        if memory.directory is not None and not self._finals.storage.shared:
            raise RuntimeError(
                "sample: NextFromFollowing: the buffer is one that processes share, but the storage of final observations is "
                "not. Use a LazyMemmapStorage for it, or storage.share()."
            )

    def columns(self, others: list[Column]) -> list[Column]:
        """The next observations, then what :meth:`complete` looks at: steps up to the observed row and up to the next one, and
        whether the trajectory is over with the observed row.
        """
        ahead = others[self._mark].ahead
        following = [Column("row", number, ahead + 1) for number in self._fields.values()]
        return [*following, Column("steps", ahead=ahead), Column("steps", ahead=ahead + 1), Column("over", ahead=ahead)]

    def complete(self, memory: Store, rows: Tensor, tensors: list[Tensor], moved: list[int]) -> tuple[list[int], bool]:
        """Put final observations where no row follows: ``(places to draw again, whether all of those wait for a next step)``.

        Args:
            memory: the store of the rows.
            rows: int64 ``[B]``.
            tensors: what was read: columns, then tickets. The last three columns are removed.
            moved: places whose rows have changed since they were drawn.

        Raises ``RuntimeError``: a final observation is not there, or none was kept.
        """
        numbers, over, further, steps = (tensors.pop() for _ in range(4))
        tensors.append(numbers)
        stands = torch.ones(len(rows), dtype=torch.bool, device="cpu")
        stands[moved] = False
        mark = tensors[self._mark]
        final = stands & (mark[:, 0] >= 0)
        at = final.nonzero().flatten()
        if len(at):
            columns, found = self._finals.read(mark[at])
            gone = at[~found]
            if len(gone):  # unless the row is, too
                lost = gone[memory.tickets_of(rows[gone]) == numbers[gone]]
                if len(lost):
                    raise RuntimeError(
                        f"sample: NextFromFollowing: the final observation of row {int(rows[lost[0]])} is not in "
                        f"{self._finals.storage!r}: that holds fewer than the episodes of the buffer, or is not the one that was written "
                        "to. Give FinalObservations a storage of at least as many rows as there are episodes."
                    )
                stands[gone] = False
            for place, column in zip(range(-1 - len(self._fields), -1), columns, strict=False):
                tensors[place][at[found]] = column[found]
        alone = stands & ~final & (steps == further).flatten()
        ended = alone & over.flatten()
        if bool(ended.any()):
            raise RuntimeError(
                f"sample: NextFromFollowing: row {int(rows[ended.nonzero()[0, 0]])}, or one that follows it, is the last of its "
                "trajectory, but was written without an end flag, so its final observation was not kept. Set one of the end keys of "
                "FinalObservations at the last step of every episode."
            )
        again = (~stands | alone).nonzero().flatten().tolist()
        return again, bool(alone.any()) and bool(stands.all())
