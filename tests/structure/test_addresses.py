"""Addresses that go to the extension are of tensors with a name, which keeps them for as long as the call runs.

``rows[moved].data_ptr()`` is the address of a tensor that is gone before the call begins. What takes a tensor of rows takes the
tensor itself: ``native/bind/column.h``. The rest, columns of any dtype and the memory of stores, comes as an address; so this lint.
"""

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "engram"


def _is_kept(node):
    """Whether an expression is a name, or an attribute of one: what it stands for is kept elsewhere."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _is_address(node):
    """The expression whose address it takes; None: it takes none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "data_ptr":
        return node.func.value
    if isinstance(node, ast.Attribute) and node.attr == "data":
        inner = node.value
        return inner.value if isinstance(inner, ast.Attribute) and inner.attr == "ctypes" else None
    return None


def refused(source):
    """Lines of Python that take the address of what nothing keeps."""
    tree = ast.parse(source)
    lines = set()
    for node in ast.walk(tree):
        if (of := _is_address(node)) is not None and not _is_kept(of):
            lines.add(node.lineno)
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
            made = [each.target for each in node.generators if not _is_kept(each.iter)]
            names = {name.id for target in made for name in ast.walk(target) if isinstance(name, ast.Name)}
            lines |= {at.lineno for at in ast.walk(node) if getattr(_is_address(at), "id", None) in names}
        if isinstance(node, ast.Call) and any(ast.unparse(it).endswith(".data_ptr") for it in node.args):
            lines |= {it.lineno for it in node.args if not _is_kept(it)}
        if isinstance(node, ast.FunctionDef):
            assigned = [it for it in ast.walk(node) if isinstance(it, ast.Assign) and isinstance(it.value, ast.Call)]
            made = {name.id for it in assigned for name in it.targets if isinstance(name, ast.Name)}
            for out in (it.value for it in ast.walk(node) if isinstance(it, ast.Return)):
                parts = out.elts if isinstance(out, ast.Tuple | ast.List) else [out]
                lines |= {it.lineno for it in parts if getattr(_is_address(it), "id", None) in made}
    return sorted(lines)


@pytest.mark.parametrize(
    "source",
    [
        "f(rows[moved].data_ptr())",
        "f(rows.contiguous().data_ptr(), len(rows))",
        "f(torch.from_numpy(rows).data_ptr())",
        "f(self.rows[0].data_ptr())",
        "f(np.asarray(rows).ctypes.data)",
        "f([row.data_ptr() for row in map(whole, rows)])",
        "f(tuple(map(torch.Tensor.data_ptr, [row.contiguous() for row in rows])))",
        "def f(rows):\n    whole = rows.contiguous()\n    return whole.data_ptr()",
    ],
)
def test_addresses_of_what_nothing_keeps_are_found(source):
    assert refused(source)


@pytest.mark.parametrize(
    "source",
    [
        "f(rows.data_ptr(), len(rows))",
        "f(self.block.tensor.data_ptr())",
        "f([row.data_ptr() for row in self.rows], rows.ctypes.data)",
        "f(tuple(map(torch.Tensor.data_ptr, columns)))",
        "def f(rows):\n    return rows.data_ptr()",
    ],
)
def test_addresses_of_what_has_a_name_are_not(source):
    assert not refused(source)


def test_the_package_takes_no_address_of_what_nothing_keeps():
    sources = {str(path): path.read_text() for path in SOURCES.rglob("*.py")}
    found = {path: refused(text) for path, text in sources.items() if "data_ptr" in text or "ctypes.data" in text}
    assert {path: lines for path, lines in found.items() if lines} == {}
