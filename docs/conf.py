"""How Sphinx builds the pages of this folder: ``make docs``."""

import inspect
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms import SphinxTransform

import engram

ROOT = Path(__file__).resolve().parents[1]
INVENTORIES = ROOT / "build" / "inventories"
CLASS_PAGES = ROOT / "docs" / "reference" / "classes"

project = "engram"
version = release = engram.__version__
project_copyright = "the authors of engram"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx"]
exclude_patterns = ["grafana"]
myst_heading_anchors = 4
python_use_unqualified_type_names = True
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = True  # the base classes of components have no entries of their own
toc_object_entries_show_parents = "hide"
autoclass_content = "class"
napoleon_use_rtype = False
maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"engram {release}"
html_static_path = ["_static"]
html_css_files = ["engram.css"]
html_copy_source = False
html_show_sphinx = False

# ---- links to other libraries, where their lists of names can be had ---------------------------------------------------

LIBRARIES = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "tensordict": "https://docs.pytorch.org/tensordict/stable/",
    "gymnasium": "https://gymnasium.farama.org/",
}


def inventory_of(name: str) -> tuple[str, str] | None:
    """The library's list of names, as a file that was fetched now or earlier; None without a network."""
    path = INVENTORIES / f"{name}.inv"
    if not path.exists():
        try:
            with urllib.request.urlopen(f"{LIBRARIES[name]}objects.inv", timeout=5) as reply:  # noqa: S310 - of LIBRARIES
                body = reply.read()
        except OSError:
            return None
        if not body.startswith(b"# Sphinx inventory"):
            return None
        INVENTORIES.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return LIBRARIES[name], str(path)


def find_inventories(app, config) -> None:
    with ThreadPoolExecutor() as pool:
        found = zip(LIBRARIES, pool.map(inventory_of, LIBRARIES), strict=True)
        config.intersphinx_mapping = {name: inventory for name, inventory in found if inventory}


# ---- links out of this folder ------------------------------------------------------------------------------------------

#: Pages of the site in place of files beside this folder. Of those that are left, a link downloads the file.
PAGE_OF = {
    "../README.md": "index.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../SECURITY.md": "security.md",
    "../CHANGELOG.md": "changelog.md",
    "../examples/": "programs.md",
    "../benchmarks/results/": "performance.md",
}


def pages_inside(text: str, folder: str) -> str:
    """The text with links to pages of the site, from a page in a folder of docs/ ("" or "recipes/")."""
    up = "../" * folder.count("/")

    def inside(found: re.Match[str]) -> str:
        target, anchor = found[1].removeprefix(up), found[2] or ""
        if program := re.fullmatch(r"\.\./examples/(\w+)\.py", target):
            return f"]({up}programs.md#{program[1]}py)"
        return f"]({up}{PAGE_OF[target]}{anchor})" if target in PAGE_OF else found[0]

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", inside, text)


# ---- the reference -----------------------------------------------------------------------------------------------------

#: In the stub, where each public name is from.
STUB = (ROOT / "src/engram/__init__.pyi").read_text()
MODULE_OF = {name: module for module, name in re.findall(r"^from (\S+) import \w+ as (\w+)$", STUB, re.MULTILINE)}


def entry(name: str) -> str:
    """What documents a public name, in reStructuredText."""
    value = getattr(engram, name)
    if inspect.isclass(value):
        bases = "   :show-inheritance:\n" if issubclass(value, BaseException) else ""
        return f".. autoclass:: engram.{name}\n   :members:\n{bases}"
    return f".. auto{'function' if callable(value) else 'data'}:: engram.{name}\n"


def has_a_page(name: str) -> bool:
    """Whether a name is that of a public class, which has a page of its own. Errors are short: they stand on one page."""
    value = getattr(engram, name, None)
    return inspect.isclass(value) and not issubclass(value, BaseException)


def summary(value: object) -> str:
    """The first sentence of a docstring."""
    return first_sentence(inspect.getdoc(value) or "")[0].rstrip(":.") + "."


def first_sentence(text: str) -> tuple[str, str]:
    """The first sentence of a text's first paragraph, and the rest of the paragraph. A sentence does not end inside a literal."""
    paragraph = text.split("\n\n", maxsplit=1)[0].replace("\n", " ")
    for end in re.finditer(r"[.:](?:\s|$)", paragraph):
        if paragraph.count("``", 0, end.end()) % 2 == 0:
            return paragraph[: end.end()].rstrip(), paragraph[end.end() :]
    return paragraph, ""


def example_of(text: str) -> tuple[str, str]:
    """A docstring's first example, and the docstring without it."""
    found = re.search(r"(?:^>>> .*\n?)(?:^.+\n?)*", text, re.MULTILINE)
    return (found[0].rstrip("\n"), text[: found.start()] + text[found.end() :]) if found else ("", text)


def members(value: type) -> list[str]:
    """Public methods and properties that the class defines, as they stand in its source."""
    shown = (staticmethod, classmethod, property)
    return [
        name
        for name, member in vars(value).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, shown))
        and not left_out(None, "class", name, member, False, None)
    ]


def class_page(name: str) -> str:
    """The page of a class: what it is, an example, a table of its methods, then everything that its docstrings say."""
    value = getattr(engram, name)
    example, _ = example_of(inspect.getdoc(value) or "")
    parts = [f"{name}\n{'=' * len(name)}\n", ".. currentmodule:: engram\n", f"{summary(value)}\n"]
    if example:
        parts.append(f"{example}\n")
    table = [(member, summary(getattr(value, member))) for member in members(value)]
    if table:
        lines = [f"   * - :py:obj:`{member} <engram.{name}.{member}>`\n     - {said}" for member, said in table]
        parts.append(".. list-table::\n   :widths: auto\n\n" + "\n".join(lines) + "\n")
    bases = [base.__name__ for base in value.__mro__[1:] if base.__name__ in MODULE_OF and has_a_page(base.__name__)]
    if bases:
        links = ", ".join(f":py:class:`~engram.{base}`" for base in bases)
        parts.append(f"It has the methods of {links}, too.\n")
    return "\n".join([*parts, entry(name)])


def write_class_pages(*_: object) -> None:
    """A page for each class, beside the pages of ``docs/reference``. Those that have not changed keep their time."""
    CLASS_PAGES.mkdir(exist_ok=True)
    pages = {f"{name}.rst": class_page(name) for name in MODULE_OF if has_a_page(name)}
    for path in CLASS_PAGES.iterdir():
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = CLASS_PAGES / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def entries(modules: str) -> str:
    """Entries of the public names that come from some modules, in their order; of ``*``, those that no page asks for.

    Base classes stand before the classes that are made of them.
    """
    asked = modules.split()
    if asked == ["*"]:
        pages = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
        lists = re.findall(r"^<!-- names of (.+) -->$", pages, re.MULTILINE)
        elsewhere = [one for found in lists for one in found.split()]
        names = [name for name, module in MODULE_OF.items() if place(module, elsewhere) is None]
    else:
        found = [(place(module, asked), depth(name), name) for name, module in MODULE_OF.items()]
        names = [name for at, _, name in sorted(one for one in found if one[0] is not None)]
    return shown(names) if names else ""


def shown(names: list[str]) -> str:
    """A table of the classes, whose pages it links; the other names with all that is said of them."""
    classes = [name for name in names if has_a_page(name)]
    others = "\n".join(entry(name) for name in names if name not in classes)
    rows = "".join(f"   * - :py:class:`engram.{name}`\n     - {summary(getattr(engram, name))}\n" for name in classes)
    pages = "".join(f"   classes/{name}\n" for name in classes)
    table = f".. list-table::\n   :widths: auto\n\n{rows}\n.. toctree::\n   :hidden:\n\n{pages}\n" if classes else ""
    return f"```{{eval-rst}}\n.. currentmodule:: engram\n\n{table}{others}\n```"


def place(module: str, modules: list[str]) -> int | None:
    """Which of these modules of ours it is or is in, the first one that fits; None: in none."""
    fitting = (at for at, one in enumerate(modules) if f"{module}.".startswith(f"engram.{one}."))
    return next(fitting, None)


def depth(name: str) -> int:
    """How many public classes a class is made of."""
    bases = getattr(getattr(engram, name), "__mro__", ())
    return sum(base.__name__ in MODULE_OF for base in bases)


def describe(app, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Lists of errors that say when they are raised become lists; the plain ones are napoleon's."""
    if what == "class" and has_a_page(name.removeprefix("engram.")):
        lines[:] = below_the_example(lines)
    described, listed = [], False
    for line in lines:
        line = re.sub(r"\bdocs/([\w-]+)\.md\b", r":doc:`/\1`", line)
        heading = re.fullmatch(r"Raises(?: (\(.+\)):|(: .+ and(?: when drawing)?))", line)
        if heading:
            described += [f"**Raises** {heading[1]}:" if heading[1] else f"**Raises**{heading[2]}", ""]
            listed = True
        elif listed and (item := re.fullmatch(r"    (\S.*)", line)):
            described.append(f"- {item[1]}")
        elif listed and line.startswith("     "):
            described.append(f"  {line.strip()}")
        else:
            listed = listed and not line
            described.append(line)
    if what == "attribute" and lines and re.match(r"\S+ \S+ .*:", lines[0]):
        described.insert(0, "")  # a sentence before the colon, where napoleon expects a type
    lines[:] = described


def below_the_example(lines: list[str]) -> list[str]:
    """What the page of a class has not shown above its table: all but its first sentence and its first example."""
    _, text = example_of("\n".join(lines))
    _, further = first_sentence(text)
    _, _, others = text.partition("\n\n")
    return f"{further}\n\n{others}".splitlines()


def left_out(app, what: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """What buffers ask components for, and what tensordict gives a tensorclass."""
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    of_tensordict = str(getattr(function, "__module__", "")).startswith("tensordict")
    return True if name in ("noted", "traits") or of_tensordict else None


# ---- how pages are read ------------------------------------------------------------------------------------------------


def page_at_the_root(name: str) -> str:
    """A page that lies beside this folder, as if it lay in it."""
    text = (ROOT / name).read_text()
    return re.sub(r"\]\((?!#|\w+:)(docs/)?", lambda found: "](" if found[1] else "](../", text)


def read(app, docname: str, source: list[str]) -> None:
    folder = docname.rpartition("/")[0]
    text = re.sub(r"^<!-- page (.+) -->$", lambda found: page_at_the_root(found[1]), source[0], flags=re.MULTILINE)
    text = pages_inside(text, f"{folder}/" if folder else "")
    if docname == "index":
        listed = set(re.findall(r"^[\w-]+$", text, re.MULTILINE))
        others = sorted({path.stem for path in (ROOT / "docs").glob("*.md")} - listed - {"index"})
        text = text.replace("\n% other pages\n", "\n" + "".join(f"{name}\n" for name in others))
    source[0] = re.sub(r"^<!-- names of (.+) -->$", lambda found: entries(found[1]), text, flags=re.MULTILINE)


class SideBySide(SphinxTransform):
    """Of the pages about moving: code of another library and ours that follows it stand beside each other."""

    default_priority = 500

    def apply(self) -> None:
        if not self.env.current_document.docname.startswith("moving/"):
            return
        for theirs in list(self.document.findall(nodes.literal_block)):
            ours = theirs.next_node(descend=False, siblings=True)
            if isinstance(ours, nodes.literal_block) and "theirs" not in theirs.parent.get("classes", []):
                pair = nodes.container(classes=["sides", "theirs"])
                theirs.replace_self(pair)
                ours.parent.remove(ours)
                pair += [theirs, ours]


class Names(SphinxTransform):
    """Names of ours, where a page writes them as code, lead to the reference."""

    default_priority = 400
    known = re.compile(r"(?:engram\.)?(\w+)((?:\.\w+)?)(?:\(.*\))?")

    def apply(self) -> None:
        docname = self.env.current_document.docname
        for literal in list(self.document.findall(nodes.literal)):
            found = self.known.fullmatch(literal.astext())
            owner = found and ("ReplayBuffer" if found[1] == "rb" and found[2] else found[1])
            if owner not in MODULE_OF or isinstance(literal.parent, (nodes.title, nodes.reference, pending_xref)):
                continue
            target = f"engram.{owner}{found[2]}"
            link = pending_xref("", refdomain="py", reftype="obj", reftarget=target, refdoc=docname, refexplicit=True)
            literal.replace_self(link)
            link += literal


def setup(app) -> None:
    app.connect("config-inited", find_inventories, priority=100)  # before intersphinx
    app.connect("config-inited", write_class_pages)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", describe, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", left_out)
    app.add_transform(SideBySide)
    app.add_transform(Names)
