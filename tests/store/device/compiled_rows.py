"""As compiled.py, of the kernels for rows on a device: all that they load is the device's own."""

import json
import sys

from engram.store.device import row_kernels
from tests.store.device.compiled import found

BLOCKS = ((256, 1, 16), (2048, 4, 2), (16384, 8, 1))
#: Kinds of reads: how rows are chosen, whether in a graph, and what is said beside them.
KINDS = ((0, False, 0), (1, False, 0), (1, True, 0), (2, False, 0), (2, True, 1), (2, True, 2))


def variants():
    for chunk, warps, rows in BLOCKS:
        for kind, captured, beside in KINDS if chunk == 256 else KINDS[:1]:
            given = {"BLOCK": 1, "CHUNK": chunk, "KIND": kind, "BESIDE": beside, "CAPTURED": captured}
            yield row_kernels.read, warps, given
        yield row_kernels.place, max(warps, 4), {"BLOCK": rows, "CHUNK": chunk, "CAPTURED": chunk > 256}
    for tree in (False, True):
        yield row_kernels.record, 8, {"BLOCK": 1024, "NODES": 64, "TREE": tree, "CAPTURED": tree, "LAST": True}
    for phase, warps in ((-1, 16), (0, 16), (1, 16), (2, 4)):
        yield row_kernels.update, warps, {"BLOCK": 1024, "NODES": 64, "EXPECTED": phase < 1, "PHASE": phase}


if __name__ == "__main__":
    print(json.dumps([found(*variant, int(capability)) for capability in sys.argv[1:] for variant in variants()]))
