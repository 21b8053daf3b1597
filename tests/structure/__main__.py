"""``python -m tests.structure``: figures beside their maxima, rooms beside their budget. ``--tighten`` lowers maxima to what was found."""

import argparse
import logging
import tempfile
from pathlib import Path

from tests.structure import budget, maxima, public_names, stored_strings


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__)
    parser.add_argument("--tighten", action="store_true", help="lower maxima to what is measured now; none is raised")
    parser.add_argument("--add-names", action="store_true", help="freeze public names and keywords that were added")
    parser.add_argument(
        "--strings", action="store_true", help="freeze stored and sent strings, after a change of a format"
    )
    chosen = parser.parse_args()
    logging.getLogger("engram").setLevel(logging.ERROR)
    if chosen.add_names:
        public_names.write(public_names.merged(public_names.kept(), public_names.found()))
    if chosen.strings:
        with tempfile.TemporaryDirectory() as folder:
            stored_strings.write(stored_strings.found(Path(folder)))
    measured, limits = maxima.found(), maxima.kept()
    for kind, of in measured.items():
        for name, (value, where) in of.items():
            maximum = limits.get(kind, {}).get(name, value)
            mark = "above" if value > maximum else "below" if value < maximum else ""
            print(f"{value:>7}{maximum:>8} {mark:6} {name}{where and f'   ({where})'}")
    rooms = budget.rooms()
    for room, lines in {**rooms, "all rooms": sum(rooms.values())}.items():
        limit = budget.ROOMS.get(room, sum(budget.ALLOWED.values()))
        print(
            f"{lines:>7}{limit:>8} {'above' if lines > limit else 'below' if lines < limit else '':6} code lines of {room}"
        )
    if chosen.tighten:
        maxima.write(maxima.tightened(limits, measured))


if __name__ == "__main__":
    main()
