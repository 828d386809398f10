"""Figures of the code itself: files, lines, levels, knots, and the files that one request passes.

    .venvs/sim/bin/python benchmarks/house.py          # prints the table
    .venvs/sim/bin/python benchmarks/house.py --write  # also writes it into docs/architecture.md

Counts come from syntax trees. Imports inside functions and under TYPE_CHECKING count like all others. The traced run
is `-cn smoke` with one arm, one seed and one request, figures left out.
"""

from __future__ import annotations

import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("src", "sim", "kernels")
PAGE = ROOT / "docs" / "architecture.md"
MARKS = ("<!-- figures of house.py -->", "<!-- end of figures -->")
WIDE = 100  # characters
#: Runs the console script, and writes the names of the source files whose functions were called.
TRACED = """
import json, sys, threading
from pathlib import Path
root, target = Path(sys.argv[1]), sys.argv[2]
sources = tuple(str(root / name) + "/" for name in ("src", "sim", "kernels"))
seen = set()
def note(frame, event, argument):
    # functions alone: bodies of modules and classes, and comprehensions in them, run at an import
    if event == "call" and frame.f_code.co_flags & 1 and frame.f_code.co_name[0] != "<":
        seen.add(frame.f_code.co_filename)
sys.setprofile(note)
threading.setprofile(note)
sys.argv = ["spanlab", *sys.argv[3:]]
from spanlab.__main__ import main
try:
    main()
finally:
    sys.setprofile(None)
    Path(target).write_text(json.dumps(sorted(name for name in seen if name.startswith(sources))))
"""


def main() -> None:
    """Print the table, and write it into the page where that is asked for."""
    text = table(figures())
    print(text)
    if "--write" in sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        PAGE.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def figures() -> dict[str, tuple[str, str]]:
    """Return each figure and its bar by name."""
    files = sources()
    texts = {path: path.read_text().splitlines() for path in files}
    lines = [line for text in texts.values() for line in text]
    full = [line for line in lines if line.strip()]
    graph = imports(files)
    groups = knots(graph)
    once, private = called_once(files)
    tests = sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    wide = sum(len(line) > WIDE for line in full)
    return {
        "files in src, sim and kernels": (str(len(files)), "≤ 180"),
        "lines": (f"{len(lines):,}", "≤ 52,000"),
        "mean line (characters, blank lines left out)": (f"{statistics.mean(map(len, full)):.1f}", "≤ 54"),
        f"lines above {WIDE} characters": (f"{100 * wide / len(full):.1f} %", "≤ 3 %"),
        "median file (lines)": (str(int(statistics.median(map(len, texts.values())))), "200 to 400"),
        "files that one request of one arm passes": (str(traced_files()), "≤ 75"),
        "modules that `--version` imports": (str(modules_of_version()), "≤ 60"),
        "levels of imports": (str(levels(graph, groups)), "≤ 20"),
        "files in knots (import cycles)": (str(sum(map(len, groups))), "0"),
        "private functions called once": (f"{100 * once / private:.0f} %", "≤ 50 %"),
        "lines of tests": (f"{tests:,}", "≤ 43,000"),
    }


def table(rows: dict[str, tuple[str, str]]) -> str:
    """Return the figures as a Markdown table."""
    body = [f"| {name} | {value} | {bar} |" for name, (value, bar) in rows.items()]
    return "\n".join(["| figure | now | bar |", "|---|---:|---:|", *body])


def sources() -> list[Path]:
    """Return all source files."""
    return sorted(path for name in SOURCES for path in (ROOT / name).rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the module name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(files: Sequence[Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports, wherever the statement stands, and by strings that name a module."""
    names = {module_of(path) for path in files}
    graph: dict[str, set[str]] = {}
    for path in files:
        found = set(_named(ast.parse(path.read_text()), names))
        graph[module_of(path)] = found - {module_of(path)}
    return graph


def _named(tree: ast.AST, names: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from ({whole, node.module} & names if whole not in names else {whole})
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & names
        elif isinstance(node, ast.Call):
            strings = {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
            yield from {name for name in strings & names if "." in str(name)}


def knots(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components with more than one module (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            component = set(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(component)

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return found


def levels(graph: dict[str, set[str]], groups: Sequence[set[str]]) -> int:
    """Return the number of levels of the import graph; the modules of a knot stand on one level."""
    knot_of = {module: number for number, group in enumerate(groups) for module in group}
    depth: dict[str, int] = {}

    def level(module: str) -> int:
        if module not in depth:
            group = groups[knot_of[module]] if module in knot_of else {module}
            below = {other for member in group for other in graph[member]} - group
            height = 1 + max((level(other) for other in below), default=0)
            depth.update(dict.fromkeys(group, height))
        return depth[module]

    return max(map(level, graph))


def called_once(files: Sequence[Path]) -> tuple[int, int]:
    """Return the number of private functions that their own file names once, and of all private functions.

    A function that a decorator registers is called by others, and is left out.
    """
    once = private = 0
    for path in files:
        tree = ast.parse(path.read_text())
        defined = [
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and node.name.startswith("_")
            and not node.name.startswith("__")
            and not node.decorator_list
        ]
        used = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        used += Counter(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        private += len(defined)
        once += sum(used[name] == 1 for name in defined)
    return once, private


def traced_files() -> int:
    """Return the number of source files whose functions a study of one request of one arm calls."""
    one = ("workload.documents=1", "workload.questions_per_document=1", "only=[none]", "seeds=[0]")
    rest = ("load.rates_rps=[]", "load.arms=[]", "executor=here", "tracking=none", "output.figures=false")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "files.json")
        command = [sys.executable, "-c", TRACED, str(ROOT), str(target), "-cn", "smoke", *one, *rest]
        environment = os.environ | {"SPANLAB_ENVIRONMENT": Path(sys.prefix).name, "SPANLAB_COMPILED": "never"}
        done = subprocess.run(
            [*command, f"output.root={folder}"], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"the traced run failed:\n{done.stderr[-2000:]}")
        return len(json.loads(target.read_text()))


def modules_of_version() -> int:
    """Return the number of our modules that `--version` imports."""
    code = "import sys; sys.argv = ['spanlab', '--version']; from spanlab.__main__ import main; main()"
    code += "; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"\bspanlab[\w.]*", printed.splitlines()[-1]))


if __name__ == "__main__":
    main()
