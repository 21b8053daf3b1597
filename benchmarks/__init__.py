"""Speed and memory of engram beside its rivals; ``python -m benchmarks`` runs everything.

One ``bench_*.py`` per claim. ``timing`` is the only code that reads a clock, ``claims`` holds the floors,
``rivals`` names the versions, ``data`` makes the rows and checks what came back, ``crews`` starts the
processes that work at the same time, ``report`` prints and saves.
"""
