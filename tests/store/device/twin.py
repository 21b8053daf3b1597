"""The chain of kernels in operations of torch: an oracle for it, which shares no code with the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram.store.device.chain import FANOUT, Layout, columns_of, signed

if TYPE_CHECKING:
    from torch import Tensor

    from engram.store.device.chain import Batch, Kind
    from engram.store.indexes import Index
    from engram.store.store import Store

#: How often a place is drawn, and how often again where its row moved.
ATTEMPTS = 32
_LOW = 0xFFFFFFFF
_COMMITTED = 2


def shifted(bits: Tensor, by: int) -> Tensor:
    """64 bits, shifted to the right, zeros coming in."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def mix(z: Tensor) -> Tensor:
    """``mix`` of ``native/core/random.h``."""
    z = (z ^ shifted(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ shifted(z, 31)


def random_bits(key: Tensor, i: Tensor, attempt: Tensor) -> Tensor:
    """64 random bits, number ``i`` of the draw of a key, as ``native/core/random.h`` makes them. All are int64."""
    gamma = signed(0x9E3779B97F4A7C15)
    return mix(mix(mix(key + gamma) + attempt * signed(0xD1342543DE82EF95)) + (i + 1) * gamma)


def high_product(bits: Tensor, n: Tensor) -> Tensor:
    """The high half of the 128 bits of a product, both without signs."""
    low, high, n_low, n_high = bits & _LOW, shifted(bits, 32), n & _LOW, n >> 32
    middle = high * n_low + shifted(low * n_low, 32)
    return high * n_high + shifted(middle, 32) + shifted(low * n_high + (middle & _LOW), 32)


def view_at(memory: Tensor, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous piece of a block of bytes that begins at an address. A view."""
    begin = address - memory.data_ptr()
    return memory[begin : begin + dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape)


def rows_as_bytes(tensor: Tensor, stride: int, row_bytes: int) -> Tensor:
    """uint8 ``[C, row bytes]``: the rows of a field. A view."""
    raw, offset = tensor.new_empty(0, dtype=torch.uint8), tensor.storage_offset() * tensor.element_size()
    return raw.set_(tensor.untyped_storage(), offset, (len(tensor), row_bytes), (stride, 1))


class Twin:
    """As :class:`Chain`, for a store whose memory torch can address: same arguments, same batches.

    It waits for the device, and cannot be captured.
    """

    def __init__(
        self, store: Store, batch_size: int, device: torch.device | str, *, kind: Kind = "uniform", priorities: Index | None = None
    ) -> None:  # fmt: skip
        self.columns = at = columns_of(store, priorities=priorities)
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.kind = kind
        self.layout = Layout(at.fields, batch_size, weighted=kind == "prioritized")
        self.redraws = 0
        """Rows read again."""
        control, tickets = store.control_memory
        self._tickets = view_at(tickets, at.tickets, (at.capacity,), torch.int64)
        self._writes = view_at(tickets, at.writes, (at.capacity,), torch.int64)
        self._lanes = view_at(control, at.lanes_at, (at.lanes, 8), torch.int64)
        self._fields = [
            (offset, field.row_bytes, rows_as_bytes(tensor, field.stride, field.row_bytes))
            for offset, tensor, field in zip(self.layout.fields, store.tensors, at.fields, strict=True)
            if field.row_bytes
        ]
        self._levels: list[Tensor] = []
        if priorities is not None and at.tree is not None:
            memory, tree = priorities.block.tensor, at.tree
            places = [
                (address, (-(-size // FANOUT), FANOUT)) for address, size in zip(tree.sums, tree.sizes, strict=True)
            ]
            self._levels = [view_at(memory, *place, torch.float64) for place in places]
            self._least, self._beta = (view_at(memory, word, (), torch.float64) for word in (tree.least, tree.beta))

    def run(self, key: int = 0, out: Tensor | None = None, *, ranks: Tensor | None = None) -> Batch:
        """One batch: as :meth:`Chain.run`."""
        batch = self.layout.views(self.layout.empty(self.device) if out is None else out)
        self._key = torch.tensor(signed(key), device="cpu")
        self._ranks = None if ranks is None else ranks.to("cpu")
        places = torch.arange(self.batch_size, device="cpu")
        attempts = torch.zeros_like(places)
        rows, words, weights = self._draw(places, attempts)
        for _ in range(1, ATTEMPTS):
            again = (words == 0).nonzero().flatten()
            attempts[again] += 1
            rows[again], words[again], weights[again] = self._draw(again, attempts[again])
        self.redraws += int(attempts.sum())
        self.gather(batch, places, rows)
        self.repair(batch, rows, words, attempts, weights)
        return batch

    def gather(self, batch: Batch, places: Tensor, rows: Tensor | None) -> None:
        """Copy rows into places; None: zeros."""
        for offset, row_bytes, column in self._fields:
            to = batch.block[offset : offset + row_bytes * self.batch_size].view(self.batch_size, row_bytes)
            to[places.to(self.device)] = 0 if rows is None else column[rows].to(self.device)

    def repair(self, batch: Batch, rows: Tensor, words: Tensor, attempts: Tensor, weights: Tensor) -> None:
        """Look at the tickets again, and read other rows where a row was not whole throughout. Then say which they are."""
        drawn, writes, n = rows.clone(), self._writes_of(rows, words), self.batch_size
        bad = ((words == 0) | (self._tickets[rows] != words)).nonzero().flatten()
        for tries in range(ATTEMPTS + n if len(bad) else 0):
            if tries < ATTEMPTS:
                attempts[bad] += 1
                rows[bad], words[bad], weights[bad] = self._draw(bad, attempts[bad])
            else:
                rows[bad] = drawn[(bad + (tries - ATTEMPTS)) % n]
                words[bad], weights[bad] = self._committed(rows[bad]), self._weighed(rows[bad])[1]
            found = bad[words[bad] != 0]
            writes[found] = self._writes_of(rows[found], words[found])
            self.gather(batch, found, rows[found])
            self.redraws += len(found)
            bad = bad[(words[bad] == 0) | (self._tickets[rows[bad]] != words[bad])]
        self.gather(batch, bad, None)
        rows[bad], writes[bad], weights[bad] = -1, -1, 0.0
        batch.rows.copy_(rows), batch.tickets.copy_(writes), batch.valid.copy_(rows >= 0)
        if batch.weights is not None:
            batch.weights.copy_(weights)

    def _draw(self, places: Tensor, attempts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One attempt for places: rows, ticket words or 0 where there is none to be read, and weights."""
        bits = random_bits(self._key, places, attempts)
        if self.kind == "prioritized":
            rows = self._descend(shifted(bits, 11).double() * 2.0**-53)
            inside = rows >= 0
        else:
            ends = (self._lanes[:, [0, 2]].amax(1) - self._lanes[:, 1]).clamp(0, self.columns.lane_length).cumsum(0)
            ranks = high_product(bits, ends[-1]) if self._ranks is None else self._ranks[places]
            inside = (ranks >= 0) & (ranks < ends[-1])
            if self._ranks is not None:
                ranks = (ranks + attempts) % ends[-1].clamp(min=1)
            ranks = torch.where(inside, ranks, 0)
            lanes = torch.searchsorted(ends, ranks, right=True).clamp(max=self.columns.lanes - 1)
            rows = lanes * self.columns.lane_length + ranks - torch.where(lanes > 0, ends[lanes - 1], 0)
        rows = rows.clamp(0, self.columns.capacity - 1)
        words, (leaves, weights) = self._committed(rows), self._weighed(rows)
        return rows, torch.where(inside & (leaves > 0), words, 0), weights

    def _committed(self, rows: Tensor) -> Tensor:
        words = self._tickets[rows]
        return torch.where(words & 3 == _COMMITTED, words, 0)

    def _writes_of(self, rows: Tensor, words: Tensor) -> Tensor:
        return torch.where(words < 0, self._writes[rows], words >> 2)

    def _descend(self, u: Tensor) -> Tensor:
        """As ``SumTree::find``, with its order of sums."""
        left, nodes = u * self._levels[-1][0, 0], torch.zeros(len(u), dtype=torch.int64, device="cpu")
        for level in reversed(self._levels[:-1]):
            x = level[nodes]
            x0, x1, x2, x3, x4, x5, x6, x7 = x.unbind(1)
            two, six = x0 + x1, x4 + x5
            four = two + (x2 + x3)
            upto = [torch.zeros_like(x0), x0, two, two + x2, four, four + x4, four + six, four + (six + x6)]
            over = four + (six + (x6 + x7)) <= left
            prefixes = torch.stack(upto, 1)
            children = (prefixes[:, 1:] <= left[:, None]).sum(1)
            last = torch.where(x > 0, torch.arange(FANOUT, device="cpu"), 0).amax(1)
            children = torch.where(over, last, children)
            left = torch.where(over, 0.0, (left - prefixes.gather(1, children[:, None])[:, 0]).clamp(min=0.0))
            nodes = nodes * FANOUT + children
        return nodes

    def _weighed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Leaves and weights of rows: as in kernels.py."""
        if self.kind != "prioritized":
            ones = torch.ones(len(rows), dtype=torch.float64, device="cpu")
            return ones, ones
        leaves = self._levels[0].view(-1)[rows]
        ratio = torch.where((leaves > 0) & (self._least > 0), leaves / self._least, 1.0)
        return leaves, torch.exp(-self._beta * ratio.clamp(min=1.0).log())
