import pytest


@pytest.fixture
def pair(tmp_path):
    """A store that is served, and its copy. Its programs end with the test."""
    from tests.serving.pairs import Pair

    made = Pair(tmp_path)
    yield made
    for one in made.running:
        one.kill()
