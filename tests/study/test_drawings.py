"""Figures of analyses are named by module and function, which are imported only where they draw."""

import re
from pathlib import Path
from pkgutil import resolve_name

import spanlab.study

SOURCES = Path(next(iter(spanlab.study.__path__))).rglob("*.py")
NAMED = re.compile(r'"([a-z_.]+:draw[a-z_]*)"')


def test_every_named_drawing_is_a_function_of_the_report():
    names = {name for path in SOURCES for name in NAMED.findall(path.read_text())}
    assert len(names) > 15
    assert all(callable(resolve_name(f"spanlab.report.{name}")) for name in names)
