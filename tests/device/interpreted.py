"""Triton's interpreter, in a third of its time."""

import functools


@functools.cache  # once for the whole test session
def patch_once():
    """Let the interpreter replace the operations of Triton's language once a kernel.

    It does so when a kernel begins, and again before each function that the kernel calls, where all is replaced already. Where these
    functions are of another module, it does so once for each module.
    """
    from triton.runtime import interpreter

    replace, modules = interpreter._patch_lang, set()

    def replace_once(function):
        module = function.__globals__["__name__"]
        if module in modules:
            return None  # what is replaced is put back when the kernel ends
        scope = replace(function)
        if not modules:
            scope.restore = _then(scope.restore, modules.clear)
        modules.add(module)
        return scope

    interpreter._patch_lang = replace_once


def _then(first, second):
    def both():
        first()
        second()

    return both
