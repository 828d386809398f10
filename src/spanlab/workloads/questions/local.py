"""Questions of a user: one JSON object per line, with the passages from the user's retrieval."""

from __future__ import annotations

from pathlib import Path

from spanlab.workloads.files import JsonRow, field, location, read_jsonl, shorten, strings
from spanlab.workloads.questions.task import TASKS, Document, Question, Task, distinct, one_line

KEY = "workload.path"
EXPECTED = (
    "JSON lines with question, answer (a text or a list) and passages (a list, best first), and where known options, "
    "gold (numbers of the passages that hold the answer, from 0) and document (a name)"
)
_FIELDS = ("question", "answer", "passages", "options", "gold", "document")
_INSTRUCTION = "Answer the question from the passages alone, in a few words."


@TASKS.register("local")
def questions(path: Path) -> Task:
    """Read the questions of a file, grouped by `document`, or else by equal passages."""
    rows = read_jsonl(path, KEY, EXPECTED)
    _check_gold(rows, path)
    grouped: dict[tuple[str, ...], list[JsonRow]] = {}
    for row in rows:
        grouped.setdefault(_document_of(row, path), []).append(row)
    documents = tuple(_document(number, members, path) for number, members in enumerate(grouped.values()))
    return Task(path.stem, "local text", f"documents of {path.name}", _INSTRUCTION, documents)


def _document_of(row: JsonRow, path: Path) -> tuple[str, ...]:
    unknown = next((name for name in row if name not in _FIELDS), None)
    if unknown is not None:
        raise ValueError(f"{KEY}={location(row, path)} has the unknown field {unknown!r}; expected {EXPECTED}")
    return _texts(row, "passages", path) if row.get("document") is None else (str(row["document"]),)


def _document(number: int, rows: list[JsonRow], path: Path) -> Document:
    passage_lists = [_texts(row, "passages", path) for row in rows]
    passages = {
        text: index for index, text in enumerate(dict.fromkeys(text for texts in passage_lists for text in texts))
    }
    parsed = [
        _question(row, tuple(passages[text] for text in texts), path)
        for row, texts in zip(rows, passage_lists, strict=True)
    ]
    return Document(str(rows[0].get("document", f"document {number}")), tuple(passages), tuple(parsed))


def _question(row: JsonRow, ranking: tuple[int, ...], path: Path) -> Question:
    answer = field(row, "answer", path, KEY, EXPECTED)
    answers = distinct([answer] if isinstance(answer, str) else _texts(row, "answer", path))
    choices = tuple(map(one_line, _texts(row, "options", path))) if row.get("options") is not None else ()
    if choices and not set(answers) <= set(choices):
        wrong = next((text for text in answers if text not in choices), "")
        raise ValueError(f"{KEY}={location(row, path)} has the answer {wrong!r}; expected one of its options")
    gold = _gold(row, ranking, path) if "gold" in row else None
    text = field(row, "question", path, KEY, EXPECTED, str).strip()
    return Question(text, answers, choices, gold, ranking=tuple(dict.fromkeys(ranking)))


def _gold(row: JsonRow, ranking: tuple[int, ...], path: Path) -> tuple[int, ...]:
    positions = row["gold"] if isinstance(row["gold"], list) else [row["gold"]]
    subject = f"{KEY}={location(row, path)} has gold"
    if not positions:
        raise ValueError(f"{subject}=[]; expected at least one number of a passage, from 0")
    for position in positions:
        if type(position) is not int or not 0 <= position < len(ranking):
            raise ValueError(
                f"{subject}={shorten(position)} with {len(ranking)} passages; expected their numbers from 0"
            )
    return tuple(ranking[position] for position in positions)


def _check_gold(rows: list[JsonRow], path: Path) -> None:
    """Raise ValueError unless all rows or no rows have gold, because gold positions are reported for all or none."""
    has_gold = [("gold" in row) for row in rows]
    if any(has_gold) and not all(has_gold):
        raise ValueError(f"{KEY}={path} has gold in some rows only; expected it in every row or none")


def _texts(row: JsonRow, name: str, path: Path) -> tuple[str, ...]:
    return tuple(text.strip() for text in strings(row, name, path, KEY, EXPECTED))
