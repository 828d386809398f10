"""Tasks small enough to count by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest

from spanlab.workloads import Workload, load_workload
from spanlab.workloads.questions import Questions, QuestionsWorkload

from ...support.files import write_lines

ROWS = [
    {
        "question": "Where does the fox sleep?",
        "answer": ["in a den", "underground"],
        "passages": ["The fox sleeps in a den.", "The owl hunts at night.", "The pond freezes in winter."],
        "gold": 0,
        "document": "wood",
    },
    {
        "question": "When does the owl hunt?",
        "answer": "night",
        "options": ["day", "night"],
        "passages": ["The owl hunts at night.", "The pond freezes in winter.", "The bear fishes at dawn."],
        "gold": [0],
        "document": "wood",
    },
    {
        "question": "What does the baker sell?",
        "answer": "bread",
        "passages": ["The smith makes nails.", "The baker sells bread and cakes."],
        "gold": [1],
        "document": "town",
    },
]


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write questions as JSON lines; `first` replaces fields of the first row, None removes one."""

    def write(rows: list[dict[str, object]] | None = None, **first: object) -> Path:
        rows = [dict(row) for row in ROWS] if rows is None else rows
        rows[0] = {key: value for key, value in (rows[0] | first).items() if value is not None}
        return write_lines(tmp_path / "mine.jsonl", *rows)

    return write


@pytest.fixture
def load(write_rows: Callable[..., Path]) -> Callable[..., Workload]:
    """Load the rows above; keywords are options of the workload, `path` another file, `settings` other keys."""

    def load(path: Path | None = None, settings: dict[str, object] | None = None, **options: object) -> Workload:
        questions = Questions(**({"task": "local"} | options))
        path_text = str(path or write_rows()) if questions.task != "facts" else None
        return load_workload(QuestionsWorkload(path=path_text, questions=questions, **(settings or {})))

    return load
