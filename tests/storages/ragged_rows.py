"""Rows that say themselves what they are to hold."""

import torch

from engram import Ragged

LONGEST = 12
#: Enough for all rows of a small storage.
ROOMY = 1 << 16


def length_of(number):
    """The tokens of a row, by its number: from 0 to :data:`LONGEST`, in no order."""
    return (number * 7 + number // 5) % (LONGEST + 1)


def fields(longest=LONGEST):
    return {
        "tokens": Ragged(torch.int32, max_length=longest),
        "log_prob": Ragged(torch.float32, like="tokens"),
        "text": Ragged("utf-8", max_length=40),
    }


def text_of(number):
    return f"row {number} " + "é" * (number % 11)


def rows(first, n):
    """Rows ``[first, first + n)``, as a dict of columns."""
    numbers = range(first, first + n)
    tokens = [torch.full((length_of(number),), number, dtype=torch.int32) for number in numbers]
    return {
        "number": torch.arange(first, first + n),
        "tokens": tokens,
        "log_prob": [-it.float() for it in tokens],
        "text": [text_of(number) for number in numbers],
    }


def row(number):
    return {name: column[0] for name, column in rows(number, 1).items()}


def check(batch):
    """That each row of a batch holds what its number says. The numbers."""
    numbers = batch["number"].tolist()
    texts = batch["text"] if isinstance(batch["text"], list) else list(batch["text"])
    for number, tokens, log_prob, text in zip(
        numbers, batch["tokens"].unbind(), batch["log_prob"].unbind(), texts, strict=True
    ):
        assert tokens.tolist() == [number] * length_of(number), number
        assert log_prob.tolist() == [-float(number)] * length_of(number), number
        assert text == text_of(number), number
    return numbers


def plain(batch):
    """A batch as lists of rows."""
    return {
        key: [row.tolist() for row in value.unbind()] if isinstance(value, torch.Tensor) else list(value)
        for key, value in batch.items()
    }


def nested(*rows, dtype=torch.int64):
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)
