"""Figures of the package that may only fall; its code lines are in :mod:`tests.structure.budget`.

Lines are lines of code: docstrings, comments and blanks aside.
"""

import ast
import inspect
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import engram

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "engram"
NATIVE = ROOT / "native"
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "benchmarks/*.md")
#: Words that house style replaces.
_WORDS = re.compile(
    r"\b(anew|whoever|nobody|somebody|whom|dealt out|what is left of|let go of|mourn\w*|bury|buried|burial|mend(s|ed|ing)?|dear|crew)\b",
    re.IGNORECASE,
)
_GENERICS = {
    "Callable", "Collection", "Iterable", "Iterator", "Mapping", "MutableMapping", "Sequence", "dict", "frozenset", "list",
    "set", "tuple", "type",
}  # fmt: skip
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Source:
    """A parsed Python file, and the numbers of its lines of code."""

    def __init__(self, path):
        text = path.read_text()
        self.path = path
        self.name = path.relative_to(ROOT).as_posix()
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.lines = _code(text) - _docstrings(self.nodes)

    def size(self, node):
        return sum(node.lineno <= line <= node.end_lineno for line in self.lines)

    def of(self, *kinds):
        return (node for node in self.nodes if isinstance(node, kinds))


def _code(text):
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def _docstrings(nodes):
    lines = set()
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, *_DEFINITIONS)) and ast.get_docstring(node) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


@cache
def package():
    return [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]


@cache
def tests():
    return sorted((ROOT / "tests").rglob("*.py"))


@cache
def native():
    """Name, lines and place of every native function outside of tests."""
    paths = [path for folder in ("core", "bind") for path in sorted((NATIVE / folder).glob("*.[ch]*"))]
    return [
        (name, lines, path.relative_to(ROOT).as_posix())
        for path in paths
        for name, lines in functions_of(path.read_text())
    ]


_STATEMENTS = re.compile(r"^(if|for|while|switch|do|else|try|catch|return|namespace|struct|class|enum|union|extern)\b")
_FUNCTION = re.compile(r"\)[\w\s:&<>,()*\"\[\]{}.+-]*$")


def functions_of(text):
    """Name and lines, from the name to the last brace, of functions in C++ as clang-format leaves it."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.DOTALL)
    text = re.sub(
        r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'', lambda found: '"' + " " * (len(found[0]) - 2) + '"', text
    )
    begun, opened, inside = 0, [], None
    for at, char in enumerate(text):
        if char == "{":
            initializer = text[at - 1] not in " \n"
            head = text[begun:at].strip()
            if inside is None and not initializer and _FUNCTION.search(head) and not _STATEMENTS.match(head):
                name = re.search(r"([~\w:]+|operator\S+)\s*\(", head)
                inside = (len(opened), name[1] if name else head[:40], at - len(text[begun:at].lstrip()))
            opened.append(initializer)
            begun = begun if initializer else at + 1
        elif char == "}" and opened:
            initializer = opened.pop()
            if inside is not None and len(opened) == inside[0]:
                yield inside[1], sum(bool(line.strip()) for line in text[inside[2] : at + 1].split("\n"))
                inside = None
            begun = begun if initializer else at + 1
        elif char == ";" or (char == "\n" and text[begun:at].lstrip().startswith("#")):
            begun = at + 1


# ---- what is counted -------------------------------------------------------------------------------------------------------


def classes():
    return [(source.size(node), node, source) for source in package() for node in source.of(ast.ClassDef)]


def _methods(node):
    return [one for one in node.body if isinstance(one, _DEFINITIONS)]


def _facade():
    """The class of ``engram.ReplayBuffer``; adapters have classes of that name, too."""
    named = ((node, source) for _, node, source in classes() if node.name == "ReplayBuffer")
    return next((node, source) for node, source in named if "/buffer/" in source.name)


def _attributes(node):
    """Names that its methods assign to ``self``."""
    found = set()
    for method in _methods(node):
        for one in ast.walk(method):
            if (
                isinstance(one, ast.Attribute)
                and isinstance(one.ctx, ast.Store)
                and getattr(one.value, "id", "") == "self"
            ):
                found.add(one.attr)
    return found


def _constructor_widths():
    """Parameters of every ``__init__`` that does more than pass them on in one call."""
    for _, node, source in classes():
        for method in _methods(node):
            if method.name == "__init__":
                body = method.body[ast.get_docstring(method) is not None :]
                passes_on = len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Call)
                args = method.args
                width = len(args.posonlyargs + args.args + args.kwonlyargs) - 1
                if not passes_on:
                    yield width, node.name, source.name


def _annotations(source):
    for node in source.nodes:
        if isinstance(node, ast.AnnAssign) or (isinstance(node, ast.arg) and node.annotation is not None):
            yield node.annotation
        elif isinstance(node, _DEFINITIONS) and node.returns is not None:
            yield node.returns


def _anys(source, aliases):
    """``Any``, its aliases, and generics without parameters, in annotations. A class of the module's own is no generic."""
    generics = _GENERICS - {node.name for node in source.of(ast.ClassDef)}
    count = 0
    for annotation in _annotations(source):
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        count += _anys_in(annotation, aliases, generics)
    return count


def _anys_in(node, aliases, generics):
    if isinstance(node, ast.Subscript):
        inner = _anys_in(node.slice, aliases, generics)
        return inner + (0 if _last(node.value) in generics else _anys_in(node.value, aliases, generics))
    name = _last(node)
    if name is not None:
        return int(name == "Any" or name in aliases or name in generics)
    return sum(_anys_in(child, aliases, generics) for child in ast.iter_child_nodes(node))


def _last(node):
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _any_aliases():
    """Names that stand for ``Any``: ``Data = Any``, ``Batch: TypeAlias = Any``."""
    return {
        target.id
        for source in package()
        for node in source.of(ast.Assign, ast.AnnAssign)
        if isinstance(node.value, ast.Name) and node.value.id == "Any"
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }


def _calls(*names):
    return [(node, source) for source in package() for node in source.of(ast.Call) if _last(node.func) in names]


def _sniffs():
    """``hasattr`` and ``getattr`` with a constant name."""
    return [
        (node, source)
        for node, source in _calls("hasattr", "getattr")
        if isinstance(node.func, ast.Name) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
    ]


def _exact_types():
    """``type(x) is …``, ``type(x) in …`` and ``type(x) == …``."""
    for source in package():
        for node in source.of(ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Call) and _last(side.func) == "type" and len(side.args) == 1 for side in sides):
                yield node.lineno, source.name


def _deferred_calls():
    """Functions that return ``Callable[[], None]``."""
    for source in package():
        for node in source.of(*_DEFINITIONS):
            if node.returns is not None and re.fullmatch(r"Callable\[\[\], None\]", ast.unparse(node.returns)):
                yield node.name, source.name


def public_functions():
    """Docstrings of what users call, by name: public functions and classes, errors aside, and the public methods of the classes.

    A method that has none shows that of the class whose method it overrides: there in the reference, and in ``help``.
    """
    stub = (PACKAGE / "__init__.pyi").read_text()
    module_of = {name: module for module, name in re.findall(r"^from (\S+) import \w+ as (\w+)$", stub, re.MULTILINE)}
    names = set(module_of)
    for source in package():
        room = Path(source.name).parts[2].removesuffix(".py")
        for node in source.tree.body:
            if (
                not isinstance(node, (ast.ClassDef, *_DEFINITIONS))
                or node.name not in names
                or module_of[node.name].split(".")[1] != room  # a command, or a record, of the same name
                or "errors.py" in source.name
            ):
                continue
            yield node.name, ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef):
                for method in _methods(node):
                    if not method.name.startswith("_") and not _is_attribute(method):
                        yield f"{node.name}.{method.name}", ast.get_docstring(method) or _inherited(node, method)


def _inherited(node, method):
    return inspect.getdoc(getattr(getattr(engram, node.name), method.name)) or ""


def _is_attribute(method):
    """Properties, and the signatures of overloads."""
    said = [ast.unparse(decorator).rpartition(".")[2] for decorator in method.decorator_list]
    return any(one in ("property", "cached_property", "setter", "overload") for one in said)


def _listed(found):
    """How many, and which."""
    found = list(found)
    return len(found), ", ".join(found)


def documents():
    return sorted(path for pattern in DOCUMENTS for path in ROOT.glob(pattern))


def _long_lines():
    """Lines of documents wider than 100 columns, tables and code aside."""
    for path in documents():
        code = False
        for line in path.read_text().splitlines():
            code ^= line.lstrip().startswith("```")
            if len(line) > 100 and not code and not line.lstrip().startswith("|"):
                yield f"{path.name}: {line[:40]}"


def _replaced_words(paths):
    return sum(len(_WORDS.findall(path.read_text())) for path in paths)


def _words_of(path):
    return len(path.read_text().split())


def measured():
    """Every figure by its name, and where the largest is."""
    sources = package()
    facade, home = _facade()
    aliases = _any_aliases()
    function = max(
        (source.size(node), node.name, source.name) for source in sources for node in source.of(*_DEFINITIONS)
    )
    widest = max(_constructor_widths())
    module = max((len(source.lines), source.name) for source in sources)
    largest = max((size, node.name, source.name) for size, node, source in classes())
    native_function = max((lines, name, place) for name, lines, place in native())
    names = {method.name for method in _methods(facade)}
    test = max((len(path.read_text().splitlines()), path.relative_to(ROOT).as_posix()) for path in tests())
    return {
        "code lines of the largest module": (module[0], module[1]),
        "code lines of the largest class": (largest[0], f"{largest[1]}, {largest[2]}"),
        "code lines of the longest function": (function[0], f"{function[1]}, {function[2]}"),
        "modules above 500 code lines": (sum(len(source.lines) > 500 for source in sources), ""),
        "classes above 450 code lines": (sum(size > 450 for size, _, _ in classes()), ""),
        "parameters of the widest constructor": (widest[0], f"{widest[1]}, {widest[2]}"),
        "constructors wider than 12": (sum(width > 12 for width, _, _ in _constructor_widths()), ""),
        "methods of ReplayBuffer": (len(names), home.name),
        "public methods of ReplayBuffer": (sum(not name.startswith("_") for name in names), home.name),
        "attributes of ReplayBuffer": (len(_attributes(facade)), home.name),
        "Any in annotations": (sum(_anys(source, aliases) for source in sources), ""),
        "hasattr and getattr with a constant name": (len(_sniffs()), ""),
        "tests of exact types": (len(list(_exact_types())), ""),
        "functions that return Callable[[], None]": (len(list(_deferred_calls())), ""),
        "lines of the longest native function": (native_function[0], f"{native_function[1]}, {native_function[2]}"),
        "native functions above 80 lines": (sum(lines > 80 for _, lines, _ in native()), ""),
        "public functions without a docstring": _listed(name for name, said in public_functions() if not said),
        "public functions without an example": _listed(name for name, said in public_functions() if ">>> " not in said),
        "lines of documents above 100 columns": _listed(_long_lines()),
        "words of the README": (_words_of(ROOT / "README.md"), ""),
        "replaced words in code": (_replaced_words(source.path for source in sources), ""),
        "replaced words in native code": (
            _replaced_words(p for f in ("core", "bind") for p in (NATIVE / f).iterdir()),
            "",
        ),
        "replaced words in documents": (_replaced_words(documents()), ""),
        "lines of the largest test file": (test[0], test[1]),
        "test files above 600 lines": (sum(len(path.read_text().splitlines()) > 600 for path in tests()), ""),
    }
