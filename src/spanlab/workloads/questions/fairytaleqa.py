"""FairytaleQA: short stories in sections, each with questions about one section or a few (arXiv 2203.13947)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spanlab.workloads.files import field, read_jsonl
from spanlab.workloads.questions.task import TASKS, Document, Question, Task, distinct

KEY = "workload.path"
EXPECTED = (
    "FairytaleQA: a folder with section-stories/ and questions/ as published, or a jsonl with doc_id, story, "
    "n_sections and questions[{question, answers, section}]"
)
_INSTRUCTION = "Answer the question about the story from the passages alone, in a few words."
_STORY, _ASKED = "-story.csv", "-questions.csv"


@TASKS.register("fairytaleqa")
def fairytaleqa(path: Path) -> Task:
    """Stories with their sections as passages; those whose sections a jsonl does not tell apart are left out."""
    found = list(_published(path) if path.is_dir() else _rows(path))
    documents = tuple(story for story in found if story is not None)
    if not documents:
        raise ValueError(f"{KEY}={path} holds no story whose sections can be told apart; expected {EXPECTED}")
    nouns = f"FairytaleQA stories, {path.name}"
    return Task("fairytaleqa", "local text", nouns, _INSTRUCTION, documents, len(found) - len(documents))


def _rows(path: Path) -> Iterator[Document | None]:
    """Stories of a jsonl, in its order; None where blank lines inside sections hide where a section ends."""
    for row in read_jsonl(path, KEY, EXPECTED):
        sections = [part.strip() for part in field(row, "story", path, KEY, EXPECTED, str).split("\n\n")]
        if len(sections) != field(row, "n_sections", path, KEY, EXPECTED, int):
            yield None
            continue
        asked = field(row, "questions", path, KEY, EXPECTED, list)
        numbers = {str(at + 1): at for at in range(len(sections))}
        questions = tuple(_question(one, numbers, path) for one in asked)
        yield Document(str(field(row, "doc_id", path, KEY, EXPECTED)), tuple(sections), questions)


def _question(row: Any, numbers: dict[str, int], path: Path) -> Question:
    text, answers, sections = (field(row, name, path, KEY, EXPECTED) for name in ("question", "answers", "section"))
    return Question(str(text).strip(), distinct(answers), gold=_gold(str(sections), numbers, path))


def _published(folder: Path) -> Iterator[Document]:
    """Stories of the published repository: a table of sections and one of questions for each."""
    # The repository holds each story by origin and by split: a name counts once.
    stories = {file.name.removesuffix(_STORY): file for file in sorted(folder.rglob(f"section-stories/**/*{_STORY}"))}
    questions = {file.name.removesuffix(_ASKED): file for file in folder.rglob(f"questions/**/*{_ASKED}")}
    for name, table in stories.items():
        if name not in questions:
            raise ValueError(f"{KEY}={folder} has {table.name} without {name}{_ASKED}; expected {EXPECTED}")
        asked = questions[name]
        sections = _table(table, ("section", "text"))
        numbers = {row["section"]: at for at, row in enumerate(sections)}
        rows = _table(asked, ("question", "cor_section", "answer1"))
        texts = tuple(row["text"].strip() for row in sections)
        yield Document(name, texts, tuple(_tabled(row, numbers, asked) for row in rows))


def _tabled(row: dict[str, str], numbers: dict[str, int], table: Path) -> Question:
    answers = [row.get(f"answer{number}") or "" for number in range(1, 7)]
    return Question(row["question"].strip(), distinct(answers), gold=_gold(row["cor_section"], numbers, table))


def _gold(sections: str, numbers: dict[str, int], path: Path) -> tuple[int, ...]:
    names = [name.strip() for name in sections.split(",")]
    unknown = [name for name in names if name not in numbers]
    if unknown:
        raise ValueError(
            f"{KEY}={path} has a question about section {unknown[0]!r} of {len(numbers)}; expected a section"
        )
    return tuple(dict.fromkeys(numbers[name] for name in names))


def _table(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in columns if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"{KEY}={path} has no column {missing[0]!r}, or no row; expected {EXPECTED}")
    return rows
