"""As compiled.py, of the kernels for rows on a device: all that they load is the device's own."""

import json
import sys

from engram.store.device import row_kernels
from tests.store.device.compiled import found

BLOCKS = ((256, 1, 16), (2048, 4, 2), (16384, 8, 1))
#: Kinds of reads: whether by priority, in a graph, and with weights.
KINDS = ((False, False, True), (False, True, True), (True, False, True), (True, True, True), (True, True, False))


def variants():
    for chunk, warps, rows in BLOCKS:
        for tree, captured, weighed in KINDS if chunk == 256 else KINDS[:1]:
            given = {"BLOCK": 1, "CHUNK": chunk, "TREE": tree, "WEIGHED": weighed, "CAPTURED": captured}
            yield from ((row_kernels.read, warps, {**given, "FOLLOWED": followed}) for followed in {False, captured})
        for edits in {False, chunk == 256}:
            given = {"BLOCK": rows, "CHUNK": chunk, "CAPTURED": chunk > 256, "EDITS": edits, "LAST": True}
            yield row_kernels.place, max(warps, 4), given
    yield row_kernels.claim, 8, {"BLOCK": 1024}
    for tree in (False, True):
        yield row_kernels.record, 8, {"BLOCK": 1024, "NODES": 64, "TREE": tree, "CAPTURED": tree, "LAST": True}
    for expected in (False, True):
        yield row_kernels.update, 16, {"BLOCK": 1024, "NODES": 64, "EXPECTED": expected}


if __name__ == "__main__":
    print(json.dumps([found(*variant, int(capability)) for capability in sys.argv[1:] for variant in variants()]))
