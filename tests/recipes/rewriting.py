"""Programs of TorchRL with engram's buffer classes: only the names of those classes change, by their places in the text.

Every other byte stays, and so does the number of each line.
"""

import ast
import re
from dataclasses import dataclass, field

DATA = "torchrl.data"
BUFFERS = f"{DATA}.replay_buffers"
#: What an import of the module may be followed by in a chain of attributes.
_MODULES = re.compile(rf"{re.escape(BUFFERS)}(\.[a-z_]+)?")


@dataclass
class Rewritten:
    """A program, the classes of engram that it uses now, and the names of TorchRL's replay modules that it keeps."""

    text: str
    replaced: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)


def rewritten(text, names):
    """The program with every class of ``names`` taken from engram, however it is imported.

    >>> print(rewritten("from torchrl.data import Composite, ReplayBuffer as R", ["ReplayBuffer"]).text)
    from engram import ReplayBuffer as R; from torchrl.data import Composite
    """
    work = _Rewriting(text.encode(), frozenset(names))
    return work.run()


def _of_buffers(module):
    return module == DATA or _MODULES.fullmatch(module) is not None


class _Rewriting:
    def __init__(self, text, names):
        self.text = text
        self.names = names
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.edits = []
        self.modules = {}  # what a name of the program stands for
        self.done = Rewritten("")

    def run(self):
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.import_from(node)
            elif isinstance(node, ast.Import):
                self.import_modules(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                self.attribute(node)
        text = self.text
        for first, last, new in sorted(self.edits, reverse=True):
            text = text[:first] + new.encode() + text[last:]
        self.done.text = text.decode()
        return self.done

    def at(self, line, column):
        return self.starts[line - 1] + column

    def span(self, node):
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def before(self, node, statement):
        first = self.span(node)[0]
        self.edits.append((first, first, f"{statement}; "))

    def import_from(self, node):
        for alias in node.names:
            self.modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        if not _of_buffers(node.module):
            if any(_of_buffers(f"{node.module}.{alias.name}") for alias in node.names):
                self.before(node, "import engram")
            return
        if any(_of_buffers(f"{node.module}.{alias.name}") for alias in node.names):
            self.before(node, "import engram")
        if node.names[0].name == "*":
            end = self.span(node)[1]
            self.edits.append((end, end, f"; from engram import {', '.join(sorted(self.names))}"))
            self.done.replaced.add("*")
            return
        ours = [alias for alias in node.names if alias.name in self.names]
        self.done.replaced.update(alias.name for alias in ours)
        if node.module != DATA:
            self.done.kept.update(alias.name for alias in node.names if alias.name not in self.names)
        if len(ours) == len(node.names):
            first = self.span(node)[0]
            module = re.compile(rb"from\s+([\w.]+)").match(self.text, first)
            self.edits.append((module.start(1), module.end(1), "engram"))
        elif ours:
            shown = ", ".join(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in ours)
            self.before(node, f"from engram import {shown}")
            self.without(node, ours)

    def without(self, node, ours):
        """Remove the names, each with the comma after it, or with the one before it where none follows."""
        last_kept = max(i for i, alias in enumerate(node.names) if alias not in ours)
        for i, alias in enumerate(node.names):
            if alias not in ours:
                continue
            first, last = self.span(alias)
            if i < last_kept:
                comma = re.compile(rb"(?:\s|\\\n|#[^\n]*\n)*?,").match(self.text, last)
                self.cut(first, last)
                self.edits.append((comma.end() - 1, comma.end(), ""))
            else:
                self.cut(first, last)
                between = self.text[self.span(node.names[i - 1])[1] : first]
                comma = self.span(node.names[i - 1])[1] + between.index(b",")
                self.edits.append((comma, comma + 1, ""))

    def cut(self, first, last):
        self.edits.append((first, last, ""))

    def import_modules(self, node):
        for alias in node.names:
            if alias.name.split(".")[0] != "torchrl":
                continue
            self.modules[alias.asname or "torchrl"] = alias.name if alias.asname else "torchrl"
        if any(alias.name.split(".")[0] == "torchrl" for alias in node.names):
            self.before(node, "import engram")

    def attribute(self, node):
        chain, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            chain.append(inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name) or inner.id not in self.modules:
            return
        module, _, name = ".".join([self.modules[inner.id], *reversed(chain)]).rpartition(".")
        if not _of_buffers(module):
            return
        if name in self.names:
            self.done.replaced.add(name)
            first, last = self.span(node)
            self.edits.append((first, last, f"engram.{name}"))
        elif module != DATA and not _of_buffers(f"{module}.{name}"):
            self.done.kept.add(name)
