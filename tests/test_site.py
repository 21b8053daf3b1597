"""The site: its links, its lists, its quickstart, and code of other libraries."""

import importlib.util
import inspect
import re
import subprocess
import warnings

import pytest

import engram
from tests import interpreter
from tests.test_docs import BLOCK, ON_RAY, PAGES, ROOT, run_text

#: Code of another library, which the word behind "python" imports.
THEIRS = re.compile(r"^```python (\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MOVING = sorted((ROOT / "docs/moving").glob("*.md"))


@pytest.mark.parametrize("page", MOVING, ids=lambda page: page.stem)
def test_code_of_another_library(page, tmp_path, monkeypatch):
    """It is Python, and runs where the library is installed. What the library warns of is its own affair."""
    libraries, programs = zip(*((found[1], found[0]) for found in THEIRS.finditer(page.read_text())), strict=True)
    (library,) = set(libraries)
    assert len(programs) == len(libraries)
    text = THEIRS.sub(lambda found: f"```python\n{found[2]}```", "\n".join(programs))
    compile("\n".join(block[1] for block in BLOCK.finditer(text)), str(page), "exec")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_text(text, page)


def test_the_quickstart_survives_its_kill(tmp_path):
    """Its script is killed with SIGKILL in the middle and started again by the same command."""
    (tmp_path / "train.py").write_text(BLOCK.search((ROOT / "docs/quickstart.md").read_text())[1])
    command = [interpreter.executable(), "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as script:
        lines = iter(script.stdout.readline, "")
        assert next(lines) == "starts at step 0: 0 rows are there\n"
        assert "step 1000\n" in lines
        script.kill()
        for _ in lines:  # to their end, which comes with that of the program
            pass
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    begun, *steps, last = done.stdout.splitlines()
    step, rows = map(int, re.fullmatch(r"starts at step (\d+): (\d+) rows are there", begun).groups())
    assert 1000 <= step <= 2000
    assert rows in (step - 1, step), "all but the one that was being written"
    assert steps == [f"step {n}" for n in range(step // 100 * 100 + 100, 2001, 100)]
    assert last == "done"


FENCED = re.compile(r"^(```+).*?^\1", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
#: Pages that a reader of the repository meets.
LINKING = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")), *PAGES, ON_RAY]


def prose(page):
    return FENCED.sub("", page.read_text())


def anchors(page):
    """Those of its headings, as the site and code hosts make them."""
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """To a file of the repository and a heading of it. Addresses of other hosts are not asked."""
    for target in LINK.findall(prose(page)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(found), f"{page}: {target}"


def test_the_site_shows_every_page_and_program():
    index = (ROOT / "docs/index.md").read_text()
    lists = re.findall(r"^```{toctree}\n(.*?)^```", index, re.DOTALL | re.MULTILINE)
    listed = [line for part in lists for line in part.splitlines() if re.fullmatch(r"[\w/-]+", line)]
    assert sorted(listed) == sorted(set(listed))
    pages = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(listed) <= pages - {"index"}
    folders = {page for page in pages if "/" in page}
    assert folders <= set(listed), "pages of docs/ that no list names stand among the topics, but not those below it"
    programs = (ROOT / "docs/programs.md").read_text()
    shown = re.findall(r"^```{literalinclude} \.\./examples/(.+)$", programs, re.MULTILINE)
    assert shown == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def configuration():
    """``docs/conf.py`` as a module."""
    pytest.importorskip("sphinx", reason="needs Sphinx, which make docs installs")
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs/conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return conf


def test_the_reference_has_every_public_name():
    conf = configuration()
    pages = [path.read_text() for path in sorted((ROOT / "docs/reference").glob("*.md"))]
    asked = [found for page in pages for found in re.findall(r"^<!-- names of (.+) -->$", page, re.MULTILINE)]
    for module in (one for found in asked for one in found.split() if one != "*"):
        assert any(conf.place(place, [module]) == 0 for place in conf.MODULE_OF.values()), f"no name is from {module}"
    text = "\n".join(map(conf.entries, asked))
    named = re.findall(r"^(?:\.\. auto\w+:: |   \* - :py:class:`)engram\.(\w+)`?$", text, re.MULTILINE)
    assert sorted(named) == engram.__all__


def test_the_page_of_a_class_begins_with_an_example_and_a_table():
    conf = configuration()
    for name in filter(conf.has_a_page, engram.__all__):
        page = conf.class_page(name)
        said, _, details = page.partition(f".. autoclass:: engram.{name}\n")
        assert details, name
        assert said.startswith(f"{name}\n===")
        methods = conf.members(getattr(engram, name))
        assert re.findall(rf"^   \* - :py:obj:`(\w+) <engram\.{name}\.", said, re.MULTILINE) == methods
        if ">>> " in (inspect.getdoc(getattr(engram, name)) or ""):
            assert said.index("\n>>> ") < (said.index(".. list-table") if methods else len(said))
            assert said[: said.index(">>> ")].endswith("\n\n")


def rows(text):
    """Cells of each row of the tables."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def test_every_figure_of_the_readme_has_its_command():
    _, figures = (ROOT / "README.md").read_text().split("## How fast")
    commands = {tuple(cells[:-1]): cells[-1] for cells in rows((ROOT / "docs/performance.md").read_text())}
    shown = [tuple(cells) for cells in rows(figures)[1:]]
    assert len(shown) > 5
    for row in shown:
        (benchmark,) = re.fullmatch(r"`(\w+)( --large)?`", commands[row]).groups()[:1]
        assert (ROOT / f"benchmarks/bench_{benchmark}.py").exists()
