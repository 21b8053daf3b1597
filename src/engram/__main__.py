"""``python -m engram``: the command line."""

from engram.cli import main

main(prog_name="engram")
