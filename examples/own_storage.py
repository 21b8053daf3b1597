"""A storage of one's own: rows lie in an SQLite database, and are there when the program starts again.

Four methods are a storage, and a class with them is all that a buffer needs. Samplers, priorities and windows of consecutive steps work
as with rows in memory. The second part makes a new buffer of the database, as another program would, and goes on in it.
"""

import sqlite3
import tempfile
from pathlib import Path

import torch

from engram import Extent, PrioritizedSampler, ReplayBuffer, SliceSampler, Traits

ROWS, EPISODE = 1_000, 50
FIELDS = {"x": (torch.float32, (2,)), "y": (torch.float32, ()), "done": (torch.bool, ())}


class SqliteStorage:
    """A ring of rows in a table. A write is one transaction, so a kill leaves all of it or none."""

    traits = Traits(in_order=True, empties=True)

    def __init__(self, path, capacity):
        self.capacity = capacity
        self.db = sqlite3.connect(path, check_same_thread=False)  # a buffer's calls never overlap
        with self.db:
            self.db.execute("CREATE TABLE IF NOT EXISTS rows (row INTEGER PRIMARY KEY, x, y, done)")
            self.db.execute("CREATE TABLE IF NOT EXISTS ring (id INTEGER PRIMARY KEY, seam INTEGER)")
            self.db.execute("INSERT OR IGNORE INTO ring VALUES (0, 0)")

    def _number(self, query):
        return self.db.execute(query).fetchone()[0]

    def extent(self):
        filled = self._number("SELECT COUNT(*) FROM rows")
        return Extent(self.capacity, (filled,), (self._number("SELECT seam FROM ring"),))

    def place(self, n):
        return (self._number("SELECT seam FROM ring") + torch.arange(n)) % self.capacity

    def write(self, rows, data, *, append):
        values = [[value.numpy().tobytes() for value in data[name]] for name in FIELDS]
        with self.db:
            self.db.executemany("REPLACE INTO rows VALUES (?, ?, ?, ?)", zip(rows.tolist(), *values, strict=True))
            if append:
                self.db.execute("UPDATE ring SET seam = ?", ((int(rows[-1]) + 1) % self.capacity,))

    def read(self, rows):
        query = "SELECT x, y, done FROM rows WHERE row = ?"
        found = zip(*(self.db.execute(query, (row,)).fetchone() for row in rows.tolist()), strict=True)
        return {
            name: torch.frombuffer(bytearray(b"".join(values)), dtype=dtype).reshape(len(rows), *shape)
            for (name, (dtype, shape)), values in zip(FIELDS.items(), found, strict=True)
        }

    def empty(self):
        with self.db:
            self.db.execute("DELETE FROM rows")
            self.db.execute("UPDATE ring SET seam = 0")


def train(model, rb, updates):
    """Fit the model to rows that are drawn by their errors."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(updates):
        batch, info = rb.sample(return_info=True)
        error = model(batch["x"]).squeeze(1) - batch["y"]
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
        rb.update_priority(info["index"], error.detach().abs() + 1e-3)
    return float(error.detach().square().mean())


def main():
    torch.manual_seed(0)
    path = Path(tempfile.mkdtemp()) / "replay.sqlite"
    model = torch.nn.Linear(2, 1)

    rb = ReplayBuffer(
        storage=SqliteStorage(path, ROWS), sampler=PrioritizedSampler(ROWS, alpha=0.6, beta=0.4), batch_size=32
    )
    for first in range(0, 600, 100):
        step = torch.arange(first, first + 100)
        x = torch.stack([(step * 0.37).sin(), (step * 0.71).cos()], 1)
        rb.extend({"x": x, "y": 3 * x[:, 0] - 2 * x[:, 1] + 1, "done": step % EPISODE == EPISODE - 1})
    print(f"{len(rb)} rows; error after 100 updates: {train(model, rb, 100):.4f}")
    before = rb[:]
    rb.storage.own.db.close()

    rb = ReplayBuffer(
        storage=SqliteStorage(path, ROWS), sampler=PrioritizedSampler(ROWS, alpha=0.6, beta=0.4), batch_size=32
    )
    same = all(torch.equal(before[name], value) for name, value in rb[:].items())
    print(f"opened again: {len(rb)} rows, as they were: {same}")
    print(f"error after 200 more updates: {train(model, rb, 200):.4f}")

    windows = ReplayBuffer(storage=rb.storage, sampler=SliceSampler(slice_len=5), batch_size=20)
    inside = not windows.sample()["done"].view(4, 5)[:, :-1].any()
    print(f"windows of 5 steps, each inside an episode: {inside}")


if __name__ == "__main__":
    main()
