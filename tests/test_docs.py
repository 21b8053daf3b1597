"""Every example that is shown works: in the README, in docs/ and in docstrings."""

import doctest
import importlib.util
import re
import subprocess
import warnings
from pathlib import Path

import pytest

import engram
from tests import interpreter
from tests.test_api import MODULES

ROOT = Path(__file__).parents[1]
#: tests/cluster runs it, in its cluster.
ON_RAY = ROOT / "docs/ray.md"
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ON_RAY})
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: Code of another library, which the word behind "python" imports.
THEIRS = re.compile(r"^```python (\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MOVING = sorted((ROOT / "docs/moving").glob("*.md"))
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_a_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page)


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


def run_page(page):
    """The blocks of a page are one program."""
    run_text(page.read_text(), page)


def run_text(text, page):
    names = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        code = "\n" * line + block.group(1)
        if ">>> " in block.group(1):
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), 0)
            run(test, clear=False)
            names.update(test.globs)
        else:
            exec(compile(code, str(page), "exec"), names)


def run(test, *, clear=True):
    said = []
    failed, _ = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append, clear_globs=clear)
    assert not failed, "".join(said)


@pytest.mark.parametrize("name", ["engram", *MODULES])
def test_examples_of_a_module(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        if test.examples:
            run(test)


def test_the_classes_show_how_they_are_used():
    for name in (
        "ReplayBuffer",
        "TensorDictReplayBuffer",
        "LazyTensorStorage",
        "LazyMemmapStorage",
        "ListStorage",
        "TensorStorage",
        "RandomSampler",
        "SamplerWithoutReplacement",
        "RoundRobinWriter",
        "TensorDictMaxValueWriter",
        "ImmutableDatasetWriter",
        "Checkpointer",
        "plan",
    ):
        assert ">>> " in getattr(engram, name).__doc__, name


def first_block(page):
    return BLOCK.search((ROOT / "docs" / page).read_text())[1]


def test_the_quickstart_survives_its_kill(tmp_path):
    """Its script is killed with SIGKILL in the middle and started again by the same command."""
    (tmp_path / "train.py").write_text(first_block("quickstart.md"))
    command = [interpreter.executable(), "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as script:
        lines = iter(script.stdout.readline, "")
        assert next(lines) == "starts at step 0: 0 rows are there\n"
        assert "step 1000\n" in lines
        script.kill()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    begun, *steps, last = done.stdout.splitlines()
    (step,) = re.fullmatch(r"starts at step (\d+): \1 rows are there", begun).groups()
    assert 1000 <= int(step) <= 2000
    assert steps == [f"step {n}" for n in range(int(step) // 100 * 100 + 100, 2001, 100)]
    assert last == "done"


# ---- the site --------------------------------------------------------------------------------------------------------------

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


def test_the_reference_has_every_public_name():
    pytest.importorskip("sphinx", reason="needs Sphinx, which make docs installs")
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs/conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    pages = [path.read_text() for path in sorted((ROOT / "docs/reference").glob("*.md"))]
    asked = [found for page in pages for found in re.findall(r"^<!-- names of (.+) -->$", page, re.MULTILINE)]
    named = re.findall(r"^\.\. auto\w+:: engram\.(\w+)$", "\n".join(map(conf.entries, asked)), re.MULTILINE)
    assert sorted(named) == engram.__all__


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
