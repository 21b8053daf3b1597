"""What lies in files and what ranks tell each other keeps its names, whatever the code calls it."""

from tests.structure import stored_strings


def test_stored_and_sent_strings_stay(tmp_path):
    """A change is one of a format or of the exchange between ranks: ``python -m tests.structure --strings``, if it was meant."""
    assert stored_strings.found(tmp_path) == stored_strings.kept()
