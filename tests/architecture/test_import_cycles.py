"""No file needs itself, and imports have few levels: those in functions, for types and by name as text count too."""

import ast
from pathlib import Path
from runpy import run_path

import grimp
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"spanlab": "src", "spanlab_sim": "sim", "spanlab_kernels": "kernels"}


def modules_named_in_text(module: str, modules: set[str]) -> set[str]:
    """Modules whose full names a file holds as text, outside the table of moved modules."""
    path = ROOT / PACKAGES[module.partition(".")[0]] / module.replace(".", "/")
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    tables = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MOVED"
    ]
    moved = {id(node) for table in tables for node in ast.walk(table)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in moved and "." in str(node.value) and node.value in modules
    }


def cycles() -> list[tuple[str, ...]]:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    modules = sorted(graph.modules)
    index = {module: number for number, module in enumerate(modules)}
    edges = [
        (index[module], index[other])
        for module in modules
        for other in {*graph.find_modules_directly_imported_by(module), *modules_named_in_text(module, set(modules))}
        if other != module and other in index
    ]
    rows, columns = np.array(edges).T
    matrix = coo_array((np.ones(len(edges)), (rows, columns)), shape=(len(modules), len(modules)))
    count, group = connected_components(matrix, directed=True, connection="strong")
    groups = [
        tuple(module for module, number in zip(modules, group, strict=True) if number == each) for each in range(count)
    ]
    return sorted(members for members in groups if len(members) > 1)


def test_no_file_needs_itself():
    assert cycles() == []


def test_imports_have_at_most_twenty_levels():
    house = run_path(str(ROOT / "benchmarks" / "house.py"))
    graph = house["imports"](house["sources"]())
    assert house["levels"](graph, house["knots"](graph)) <= 20
