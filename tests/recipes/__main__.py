"""``python -m tests.recipes [FOLDER]``: TorchRL's recipes with engram's buffers, and a table of what came of each.

FOLDER is ``sota-implementations`` of a checkout of TorchRL; left out, the one that torchrl's wheel installs.
"""

import argparse
import sys
from pathlib import Path

from tests.recipes import running
from tests.recipes.settings import RECIPES


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.recipes", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="TorchRL's sota-implementations")
    parser.add_argument("--only", nargs="+", choices=sorted(RECIPES), default=list(RECIPES), metavar="RECIPE")
    chosen = parser.parse_args()
    folder = chosen.folder or running.at_hand()
    if folder is None or not folder.is_dir():
        print("Skipped: TorchRL's recipes are not at hand. Install torchrl, or name a folder of them.")
        return 0
    print(f"TorchRL's recipes of {running.source_of(folder)}, with engram's buffers:\n", flush=True)
    results = []
    for name in chosen.only:
        results.append(running.run(folder, name))
        print(f"{name}: {results[-1].outcome} {results[-1].why}", file=sys.stderr, flush=True)
    print(running.table(results))
    return int(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
