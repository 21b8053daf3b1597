"""Compiles every kernel in every variant that a chain launches, and prints what is in it. Not in the interpreter: a program of its own."""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engram.store.device import kernels

POINTERS = {"priorities": "*fp32"}


def chosen(kind, lanes, slots, counted, resident):
    return {"KIND": kind, "LANES": lanes, "SLOTS": slots, "COUNTED": counted, "RESIDENT": resident}


def variants():
    yield kernels.extents, 4, {"BLOCK": 1024}
    for kind, resident in ((0, False), (1, False), (2, False), (0, True), (1, True)):
        yield kernels.draw, 1, {"BLOCK": 1, **chosen(kind, -1, 4, True, resident)}
        yield kernels.repair, 4, {"CHUNK": 2048, **chosen(kind, 7, 0, False, resident)}
    yield kernels.draw, 1, {"BLOCK": 1, **chosen(0, 0, 0, False, False)}
    for chunk, warps in ((256, 1), (2048, 4), (16384, 8)):
        yield kernels.gather, warps, {"CHUNK": chunk, "SLOTS": 4, "RESIDENT": chunk == 2048}
    yield kernels.repair, 8, {"CHUNK": 16384, **chosen(0, -1, 0, False, False)}
    yield kernels.update, 4, {"SLOTS": 4, "BLOCK": 1024}
    yield kernels.publish, 1, {"SLOTS": 4}


def compiled(kernel, warps, constants, capability):
    types = {
        p.name: "constexpr" if p.is_constexpr else p.annotation_type or POINTERS.get(p.name, "*i64")
        for p in kernel.params
    }
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(
        ASTSource(kernel, types, constants), target=GPUTarget("cuda", capability, 32), options=options
    )


def from_device(ttir):
    """Whether all atomics that are not loads have the address of an argument, which is memory of the device."""
    definitions = {}  # a name may have another one in each region: the one before it counts
    for line in ttir.splitlines():
        if (defined := re.search(r"(%\w+) = tt\.addptr (%\w+)", line)) is not None:
            definitions[defined[1]] = definitions.get(defined[2], defined[2])
        elif (other := re.search(r"(%\w+) = ", line)) is not None:
            definitions.pop(other[1], None)
        atomic = re.search(r"tt\.atomic_(?:rmw \w+,|cas) (\w+), (\w+), (%\w+)", line)
        if (
            atomic is not None
            and atomic.groups()[:2] != ("acquire", "sys")
            and definitions.get(atomic[3], atomic[3]) not in ("%state", "%resident")
        ):
            return False
    return True


def found(kernel, warps, constants, capability):
    built = compiled(kernel, warps, constants, capability)
    lines = [line.strip() for line in built.asm["ptx"].splitlines()]

    def count(pattern):
        return sum(re.search(pattern, line) is not None and not line.startswith((".", "//")) for line in lines)

    ttir = built.asm["ttir"]
    return {
        "kernel": kernel.__name__,
        "constants": constants,
        "capability": capability,
        "plain loads": count(r"\bld\.global\b(?!\.sys\.acquire)") + count(r"\bld\.global\.nc\b"),
        "volatile loads": count(r"\bld\.volatile\.global\b"),
        "acquiring loads": count(r"\bld\.global\.sys\.acquire\b"),
        "atomics": count(r"\b(atom|red)\.\w*\.?global\b"),
        "fused": count(r"\bfma\.rn\.f64\b"),
        "unrounded": count(r"\b(mul|add|sub)\.f64\b"),
        "atomics of tickets": len(re.findall(r"tt\.atomic_rmw add, acquire, sys", ttir)),
        "other atomics": len(re.findall(r"tt\.atomic_(rmw|cas) (?!add, acquire, sys)", ttir)),
        "of the device": from_device(ttir),
    }


if __name__ == "__main__":
    print(json.dumps([found(*variant, int(capability)) for capability in sys.argv[1:] for variant in variants()]))
