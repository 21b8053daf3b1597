"""Buffers around each kind of storage."""

import pytest

from engram import LazyMemmapStorage, LazyTensorStorage, ListStorage

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]


@pytest.fixture(params=STORAGES)
def storage(request):
    return request.param


def rows(rb):
    """All live rows of a buffer of scalars."""
    return [int(row) for row in rb[:]] if len(rb) else []
