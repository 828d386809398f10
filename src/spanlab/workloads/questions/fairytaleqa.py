"""FairytaleQA: short stories in sections, each with questions about one section or a few (arXiv 2203.13947)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spanlab.workloads.files import JsonRow, Label, read_csv, read_jsonl
from spanlab.workloads.questions.task import TASKS, Document, Question, Task, distinct

KEY = "workload.path"
EXPECTED = (
    "FairytaleQA: a folder with section-stories/ and questions/ as published, or a jsonl with doc_id, story, "
    "n_sections and questions[{question, answers, section}]"
)
_INSTRUCTION = "Answer the question about the story from the passages alone, in a few words."
_STORY, _QUESTIONS = "-story.csv", "-questions.csv"


@TASKS.register("fairytaleqa")
def fairytaleqa(path: Path) -> Task:
    """Read stories with their sections as passages; stories with ambiguous section boundaries are left out."""
    stories = list(_published_stories(path) if path.is_dir() else _jsonl_stories(path))
    documents = tuple(story for story in stories if story is not None)
    if not documents:
        raise ValueError(f"{KEY}={path} has no story with recognisable sections; expected {EXPECTED}")
    nouns = f"FairytaleQA stories, {path.name}"
    return Task("fairytaleqa", "local text", nouns, _INSTRUCTION, documents, len(stories) - len(documents))


def _jsonl_stories(path: Path) -> Iterator[Document | None]:
    """Yield the stories of a jsonl in order; None if blank lines inside sections make their boundaries ambiguous."""
    for row in read_jsonl(path, KEY, EXPECTED):
        sections = [section.strip() for section in row.field("story", str).split("\n\n")]
        if len(sections) != row.field("n_sections", int):
            yield None
            continue
        numbers = {str(index + 1): index for index in range(len(sections))}
        questions = tuple(_question(entry, numbers) for entry in row.rows("questions"))
        yield Document(str(row.field("doc_id")), tuple(sections), questions)


def _question(row: JsonRow, numbers: dict[str, int]) -> Question:
    text, sections = (str(row.field(name, Label)) for name in ("question", "section"))
    return Question(text.strip(), distinct(row.list_of("answers", str)), gold=_gold(sections, numbers, row.location))


def _published_stories(folder: Path) -> Iterator[Document]:
    """Yield the stories of the published repository, each with a table of sections and a table of questions."""
    # The repository lists each story by origin and by split: use each name once.
    stories = {file.name.removesuffix(_STORY): file for file in sorted(folder.rglob(f"section-stories/**/*{_STORY}"))}
    questions = {file.name.removesuffix(_QUESTIONS): file for file in folder.rglob(f"questions/**/*{_QUESTIONS}")}
    for name, table in stories.items():
        if name not in questions:
            raise ValueError(f"{KEY}={folder} has {table.name} without {name}{_QUESTIONS}; expected {EXPECTED}")
        question_table = questions[name]
        sections = _table(table, ("section", "text"))
        numbers = {row["section"]: index for index, row in enumerate(sections)}
        rows = _table(question_table, ("question", "cor_section", "answer1"))
        texts = tuple(row["text"].strip() for row in sections)
        yield Document(name, texts, tuple(_question_from_table(row, numbers, question_table) for row in rows))


def _question_from_table(row: dict[str, str], numbers: dict[str, int], table: Path) -> Question:
    answers = [row.get(f"answer{number}") or "" for number in range(1, 7)]
    gold = _gold(row["cor_section"], numbers, f"{KEY}={table}")
    return Question(row["question"].strip(), distinct(answers), gold=gold)


def _gold(sections: str, numbers: dict[str, int], location: str) -> tuple[int, ...]:
    names = [name.strip() for name in sections.split(",")]
    unknown = [name for name in names if name not in numbers]
    if unknown:
        raise ValueError(
            f"{location} has a question about section {unknown[0]!r} of {len(numbers)}; expected a section"
        )
    return tuple(dict.fromkeys(numbers[name] for name in names))


def _table(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    return read_csv(path, columns, KEY, EXPECTED, "utf-8-sig")
