"""The page about Python is what its code prints."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
CELL = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_prints_the_text_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    text = PAGE.read_text()
    cells = CELL.findall(text)
    assert len(cells) == text.count("```python") >= 5
    names: dict[str, object] = {}
    for code, shown in cells:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(code, "docs/python.md", "exec"), names)
        assert printed.getvalue() == shown
