"""Processes of their own that begin without anything of this one, in the time of a fork.

They come from a server that has loaded torch and engram and done nothing else. What they are given is pickled, as for a process that is
spawned; those take seconds each, which a few tests take to show that they are no different.
"""

import multiprocessing
import sys
from multiprocessing import forkserver, resource_tracker

from tests import interpreter


class _Context(multiprocessing.context.ForkServerContext):
    def Process(self, *args, **options):  # noqa: N802 - of multiprocessing
        start()
        return super().Process(*args, **options)


def start():
    """Start the server, which has what :mod:`tests.interpreter` has imported, where none is running."""
    resource_tracker.ensure_running()
    multiprocessing.set_executable(interpreter.executable())
    try:
        forkserver.ensure_running()
    finally:
        multiprocessing.set_executable(sys.executable)


CONTEXT = _Context()
CONTEXT.set_forkserver_preload(["tests.ranks.jobs"])
