"""Speed and memory of engram, compared with its rivals; ``python -m benchmarks`` runs everything.

One ``bench_*.py`` per claim. ``timing`` is the only code that reads a clock, ``claims`` holds the floors,
``rivals`` names the versions, ``data`` makes the rows and checks batches, ``workers`` starts processes that work
concurrently, ``report`` prints and saves.
"""
