"""Rows that say by what key they are found, and processes that write them."""

import torch

from engram import LazyTensorStorage, ReplayBuffer, RoundRobinWriter

ROWS = 20
LENGTH = 12
KINDS = 90


def text(n):
    """A key as a text; they differ in length."""
    return f"row-{n}" if n % 3 else f"é{n}"


def names(numbers):
    """Such keys, as a field has them."""
    return torch.tensor([list(text(n).encode().ljust(LENGTH, b"\0")) for n in numbers], dtype=torch.uint8).reshape(
        len(numbers), LENGTH
    )


def rows(numbers):
    """Rows of these keys, as ints and as texts."""
    numbers = torch.as_tensor(numbers)
    return {
        "uid": numbers,
        "name": names(numbers.tolist()),
        "check": numbers * 3 + 1,
        "reward": torch.zeros(len(numbers)),
    }


def made(storage=None, field="name", **options):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS) if storage is None else storage,
        writer=RoundRobinWriter(track_generations=True),
        **options,
    )
    rb.index_keys(field)
    return rb


def opened(folder, **options):
    return ReplayBuffer.open(folder, writer=RoundRobinWriter(track_generations=True), **options)


def check(rb, numbers, key=text):
    """The index says of these keys what the rows say: of each the row of the largest generation."""
    every = torch.arange(rb.storage.max_size)
    generations = rb.writer.generations_of(every).tolist()
    live = [row for row in every.tolist() if generations[row] > 0]
    known = {}
    for row, uid in zip(live, rb[live]["uid"].tolist() if live else [], strict=True):
        known[uid] = max(known.get(uid, (-1, -1)), (generations[row], row))
    found = rb.rows_of([key(n) for n in numbers])
    assert list(zip(found.generations.tolist(), found.rows.tolist(), strict=True)) == [
        known.get(n, (-1, -1)) for n in numbers
    ]


def write(folder, writer, batches, n):
    """Keys that no other process has. What is acknowledged is found, or was overwritten since."""
    rb = opened(folder)
    for batch in range(batches):
        first = (writer * batches + batch) * n
        rb.extend(rows(range(first, first + n)))
        found = rb.rows_of([text(first + i) for i in range(n)])
        there = (found.rows >= 0).nonzero().flatten().tolist()
        late = {"reward": torch.full((n,), 1.0 + writer)}
        rb.update_if_present(index=found.rows, generation=found.generations, patch=late)
        if batch % 5 == 4 and there:
            rb.remove(keys=text(first + there[0]))
            assert rb.rows_of(text(first + there[0])).rows.tolist() == [-1]
    rb.close()


def write_for_ever(folder, writer, n, ready):
    """Until it is killed: writes, edits of keys and of other fields, removals."""
    rb, batch = opened(folder), 0
    while True:
        numbers = [(writer * 31 + batch * n + i) % KINDS for i in range(n)]
        rb.extend(rows(numbers))
        found = rb.rows_of(list(map(text, numbers)))
        rb.update_if_present(index=found.rows, generation=found.generations, patch={"reward": torch.ones(n)})
        other = {"uid": torch.tensor([7, 8]), "name": names([7, 8]), "check": torch.tensor([22, 25])}
        rb.update_if_present(index=found.rows[:2], generation=found.generations[:2], patch=other)
        rb.remove(keys=text(numbers[-1]))
        batch += 1
        if batch == 3:
            ready.set()
