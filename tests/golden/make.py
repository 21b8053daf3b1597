"""Make the golden files anew that are not as they would be made now: ``make golden``, after a change that was meant.

What would be the same but for times, process numbers and random names stays as it is, so a change shows where it is.
"""

import json
import logging
import shutil
import tempfile
from pathlib import Path

from tests.golden import names
from tests.golden.archive import FOLDER, as_text, fixed, golden, pack, unpack
from tests.golden.cases import FAMILIES


def make(family, cases, work):
    """Write what has changed of a family."""
    archive, texts = golden(family)
    kept = unpack(archive.read_bytes(), work / "kept") if archive.exists() else work / "kept"
    there = {path.name for path in kept.iterdir()} if kept.exists() else set()
    changed = sorted(there - set(cases))
    for name, case in cases.items():
        made = work / "made" / name
        made.parent.mkdir(exist_ok=True)
        case.write(made)
        if name not in there or fixed(kept / name) != fixed(made):
            changed.append(name)
        else:
            shutil.rmtree(made)
            (kept / name).rename(made)
    if changed:
        archive.write_bytes(pack(work / "made"))
        print(f"==> {archive.name}: {', '.join(changed)}; {archive.stat().st_size} bytes")
    put(texts, as_text({name: case.expected() for name, case in cases.items()}))


def put(path, text):
    """Write a file that is not as it should be, and say so."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        print(f"==> {path.name}: {len(text)} bytes")


def main():
    logging.getLogger("engram").setLevel(logging.WARNING)
    for family, cases in FAMILIES.items():
        with tempfile.TemporaryDirectory() as work:
            make(family, cases, Path(work))
    put(FOLDER / "names.json", json.dumps(names.found(), indent=1) + "\n")


if __name__ == "__main__":
    main()
