import pytest

from engram import LazyMemmapStorage, LazyTensorStorage


@pytest.fixture(params=["RAM", "directory"])
def make(request, tmp_path):
    """``make(capacity, …)`` gives a new storage, in RAM and in a directory in turn."""
    made = []

    def build(capacity, **options):
        if request.param == "RAM":
            return LazyTensorStorage(capacity, **options)
        made.append(LazyMemmapStorage(capacity, scratch_dir=tmp_path / f"store-{len(made)}", **options))
        return made[-1]

    yield build
    for storage in made:
        storage.close()
