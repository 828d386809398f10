"""Questions of a user: one JSON object per line, with the passages from the user's retrieval."""

from __future__ import annotations

from pathlib import Path

from spanlab.workloads.files import JsonRow, read_jsonl, shorten
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
        grouped.setdefault(_document_of(row), []).append(row)
    documents = tuple(_document(number, members) for number, members in enumerate(grouped.values()))
    return Task(path.stem, "local text", f"documents of {path.name}", _INSTRUCTION, documents)


def _document_of(row: JsonRow) -> tuple[str, ...]:
    unknown = next((name for name in row if name not in _FIELDS), None)
    if unknown is not None:
        raise row.error(f"the unknown field {unknown!r}")
    return _texts(row, "passages") if row.get("document") is None else (str(row["document"]),)


def _document(number: int, rows: list[JsonRow]) -> Document:
    passage_lists = [_texts(row, "passages") for row in rows]
    passages = {
        text: index for index, text in enumerate(dict.fromkeys(text for texts in passage_lists for text in texts))
    }
    parsed = [
        _question(row, tuple(passages[text] for text in texts)) for row, texts in zip(rows, passage_lists, strict=True)
    ]
    return Document(str(rows[0].get("document", f"document {number}")), tuple(passages), tuple(parsed))


def _question(row: JsonRow, ranking: tuple[int, ...]) -> Question:
    answer = row.field("answer")
    answers = distinct([answer] if isinstance(answer, str) else _texts(row, "answer"))
    choices = tuple(map(one_line, _texts(row, "options"))) if row.get("options") is not None else ()
    if choices and not set(answers) <= set(choices):
        wrong = next((text for text in answers if text not in choices), "")
        raise row.error(f"the answer {wrong!r}", "one of its options")
    gold = _gold(row, ranking) if "gold" in row else None
    text = row.field("question", str).strip()
    return Question(text, answers, choices, gold, ranking=tuple(dict.fromkeys(ranking)))


def _gold(row: JsonRow, ranking: tuple[int, ...]) -> tuple[int, ...]:
    positions = row["gold"] if isinstance(row["gold"], list) else [row["gold"]]
    if not positions:
        raise row.error("gold=[]", "at least one number of a passage, from 0")
    for position in positions:
        if type(position) is not int or not 0 <= position < len(ranking):
            raise row.error(f"gold={shorten(position)} with {len(ranking)} passages", "their numbers from 0")
    return tuple(ranking[position] for position in positions)


def _check_gold(rows: list[JsonRow], path: Path) -> None:
    """Raise ValueError unless all rows or no rows have gold, because gold positions are reported for all or none."""
    has_gold = [("gold" in row) for row in rows]
    if any(has_gold) and not all(has_gold):
        raise ValueError(f"{KEY}={path} has gold in some rows only; expected it in every row or none")


def _texts(row: JsonRow, name: str) -> tuple[str, ...]:
    return tuple(text.strip() for text in row.list_of(name, str))
