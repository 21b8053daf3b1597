"""Parts: one folder per component, with its state, arrays and rows, and the sums of all of them.

::

    <part>/part.json       what there is: state, dtypes, shapes, sizes            <storage>/.engram/part.json  the same
    <part>/sums.bin        u64 per 256 KiB block of each file below, in order     <storage>/.engram/sums.bin
    <part>/000.bin, …      the arrays that the state names                        <storage>/.engram/000.bin, …
                                                                                  <storage>/.engram/lanes.bin, …
                                                                                  <storage>/<key>.memmap, meta.json
                                                                                  or <storage>/seg/<lane>-<k>.bin

Names are computed from what ``part.json`` says, never read from it. Files are read, never mapped; sizes are compared before
anything is allocated; nothing here is ever written twice.
"""

from __future__ import annotations

from engram.format.description import ALIGN, NO_SCHEMA, ArrayInfo, Geometry, schema_sum, segment_layout
from engram.format.part_reader import PartReader, is_part
from engram.format.part_writer import FileWriter, PartInfo, PartWriter, SegmentRows
from engram.format.schema import PartField

__all__ = [
    "ALIGN",
    "NO_SCHEMA",
    "ArrayInfo",
    "FileWriter",
    "Geometry",
    "PartField",
    "PartInfo",
    "PartReader",
    "PartWriter",
    "SegmentRows",
    "is_part",
    "schema_sum",
    "segment_layout",
]
