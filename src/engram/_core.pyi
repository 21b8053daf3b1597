"""Types of the extension. What is not listed here is ``Any``."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

#: DLPack's type code, bits, and the shape of a row.
_Spec: TypeAlias = tuple[int, int, tuple[int, ...]]
#: Of trajectories: key of the order, ticket number of the next write, visited ones, and all of them.
_Epoch: TypeAlias = tuple[int, int, int, int]

class Layout:
    def __init__(self, specs: Sequence[_Spec]) -> None: ...
    def fits(self, values: object, n: int) -> bool: ...
    def allocate(self, n: int) -> list[Tensor]: ...

class Shape:
    def __init__(
        self, length: int, strict: bool = True, by_anchor: bool = False, left: int = 0, right: int = 0
    ) -> None: ...

class Marks:
    def __init__(self, ends: bool, never: bool, done: int, begun: int, begun_is_column: bool, real: bool) -> None: ...

class Trajectories:
    def __init__(
        self,
        control: int,
        control_bytes: int,
        tickets: int,
        tickets_bytes: int,
        by_id: bool,
        which: Sequence[int],
        step_types: Sequence[int],
        fields: Sequence[int],
        row_bytes: Sequence[int],
        width: int,
        window: int,
        memory: int,
        memory_bytes: int,
        owner: object,
    ) -> None: ...
    @staticmethod
    def bytes(lanes: int, lane_length: int, width: int) -> int: ...
    def catch_up(self, steps: int) -> int: ...
    def forget(self) -> None: ...
    def count(self, window: int) -> None: ...
    def after_fork(self) -> None: ...
    def sample(
        self,
        store: Any,
        layout: Layout,
        key_at: int,
        n: int,
        shape: Shape,
        padded: bool,
        numbered: bool,
        marks: Marks,
    ) -> list[Tensor]: ...
    def sample_epoch(
        self,
        store: Any,
        layout: Layout,
        key_at: int,
        n: int,
        shape: Shape,
        padded: bool,
        numbered: bool,
        marks: Marks,
        state: _Epoch,
        shuffle: bool,
        drop_last: bool,
    ) -> tuple[_Epoch, list[Tensor]]: ...
    def sample_anchored(
        self,
        store: Any,
        layout: Layout,
        key_at: int,
        n: int,
        shape: Shape,
        padded: bool,
        numbered: bool,
        marks: Marks,
        priorities: Any,
        single_precision: bool,
    ) -> list[Tensor]: ...
    def anchors(self, length: int) -> int: ...
    def census(self) -> tuple[int, int]: ...
    def runs(self) -> NDArray[np.int64]: ...
    def row(self, track: int, place: int) -> int: ...

class Expansion:
    def __init__(self, ends: Sequence[int], step_types: Sequence[int]) -> None: ...
    def row(self, field: int, spec: _Spec, ahead: int) -> None: ...
    def frames(self, field: int, spec: _Spec, ahead: int, frames: int, first: int, filling: bytes) -> None: ...
    def sum(self, field: int, spec: _Spec, ahead: int, gamma: float) -> None: ...
    def steps(self, ahead: int) -> None: ...
    def discount(self, ahead: int, gamma: float) -> None: ...
    def over(self, ahead: int) -> None: ...
    def read(
        self, store: Any, table: Trajectories, rows: int, n: int, expected: int
    ) -> tuple[list[Tensor], list[int]]: ...

class Ranking:
    def __init__(self, rows: int) -> None: ...
    @property
    def rows(self) -> int: ...
    def set(self, rows: NDArray[np.int64], ranks: NDArray[np.float64]) -> None: ...
    def place(
        self, ranks: NDArray[np.float64], free: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
    def keep(self) -> None: ...

def __getattr__(name: str) -> Any: ...
