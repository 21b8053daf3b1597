"""Code lines of the package by room, and what the rooms may have. A commit may move lines between rooms; only an issue lifts the sum."""

from tests.structure import figures

#: What the sum may be: what there was when the budget was made, and what an issue allowed since.
ALLOWED = {"before any issue": 46_630, "34, GPU": 1_700, "36, RAGGED": 2_200, "37, DOORS": 2_400, "38, FLEET": 600}

#: What each room may have: a folder of ``src/engram``. The modules that lie beside the folders are one room together.
ROOMS = {
    "_support": 1_642,
    "adapters": 1_584,
    "around": 3_763,
    "buffer": 6_320,
    "checkpoint": 1_881,
    "cli": 1_732,
    "datasets": 1_263,
    "device": 957,
    "env": 1_145,
    "format": 1_041,
    "inspect": 1_037,
    "members": 1_652,
    "modules beside the rooms": 284,
    "remote": 3_634,
    "reshard": 980,
    "samplers": 1_933,
    "saved": 5_020,
    "serving": 2_425,
    "storages": 4_830,
    "store": 6_593,
    "testing": 560,
    "torchrl": 1_891,
    "transforms": 729,
    "writers": 629,
}


def rooms():
    """Code lines of each room that there is."""
    found = {}
    for source in figures.package():
        inside = source.path.relative_to(figures.PACKAGE)
        room = inside.parts[0] if len(inside.parts) > 1 else "modules beside the rooms"
        found[room] = found.get(room, 0) + len(source.lines)
    return dict(sorted(found.items()))


def above(found, rooms, allowed):
    """What breaks the budget, a sentence each."""
    for room, lines in found.items():
        if room not in rooms:
            yield f"{room}: it has {lines} code lines and no place in the budget"
        elif lines > rooms[room]:
            yield (
                f"{room}: expected at most {rooms[room]} code lines, got {lines}: merge what repeats, take lines from another room, or "
                f"raise its figure here: all rooms together may have {sum(allowed.values())}, and have {sum(found.values())}"
            )
    if sum(rooms.values()) > sum(allowed.values()):
        yield f"the rooms may have {sum(rooms.values())} code lines together, and issues allow {sum(allowed.values())}"
    yield from (f"{room}: it is in the budget and not in the package" for room in rooms if room not in found)
