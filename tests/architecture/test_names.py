"""Local names are specific: words that fit any value are refused."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VAGUE = {"asked", "found", "held", "kept", "one", "own", "part", "place", "said", "told"}


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every parameter and of every assigned variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def test_variables_name_what_they_hold():
    files = [path for package in ("src", "sim", "kernels") for path in (ROOT / package).rglob("*.py")]
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for line, name in bound_names(ast.parse(path.read_text()))
        if name.strip("_") in VAGUE
    ]
    assert files
    assert vague == []
