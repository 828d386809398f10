"""Questions of a user's own: one JSON object a line, with the passages that a search of theirs found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spanlab.workloads.files import field, read_jsonl
from spanlab.workloads.questions.task import TASKS, Document, Question, Task, distinct, one_line

KEY = "workload.path"
EXPECTED = (
    "JSON lines with question, answer (a text or a list) and passages (a list, best first), and where known options, "
    "gold (numbers of the passages that hold the answer, from 0) and document (a name)"
)
_KNOWN = ("question", "answer", "passages", "options", "gold", "document")
_INSTRUCTION = "Answer the question from the passages alone, in a few words."


@TASKS.register("local")
def questions(path: Path) -> Task:
    """Questions of a file; those of one `document`, or else with the same passages, belong together."""
    rows = read_jsonl(path, KEY, EXPECTED)
    _check_gold(rows, path)
    grouped: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(_document_of(row, path), []).append(row)
    documents = tuple(_document(number, members, path) for number, members in enumerate(grouped.values()))
    return Task(path.stem, "local text", f"documents of {path.name}", _INSTRUCTION, documents)


def _document_of(row: dict[str, Any], path: Path) -> tuple[str, ...]:
    strange = next((name for name in row if name not in _KNOWN), None)
    if strange is not None:
        raise ValueError(f"{KEY}={path} has a row with the field {strange!r}; expected {EXPECTED}")
    return _texts(row, "passages", path) if row.get("document") is None else (str(row["document"]),)


def _document(number: int, rows: list[dict[str, Any]], path: Path) -> Document:
    found = [_texts(row, "passages", path) for row in rows]
    passages = {text: at for at, text in enumerate(dict.fromkeys(text for texts in found for text in texts))}
    asked = [
        _question(row, tuple(passages[text] for text in texts), path) for row, texts in zip(rows, found, strict=True)
    ]
    return Document(str(rows[0].get("document", f"document {number}")), tuple(passages), tuple(asked))


def _question(row: dict[str, Any], ranking: tuple[int, ...], path: Path) -> Question:
    answer = field(row, "answer", path, KEY, EXPECTED)
    answers = distinct([answer] if isinstance(answer, str) else _texts(row, "answer", path))
    choices = tuple(map(one_line, _texts(row, "options", path))) if row.get("options") is not None else ()
    if choices and not set(answers) <= set(choices):
        raise ValueError(f"{KEY}={path} has the answer {answers[0]!r}; expected one of its options")
    gold = _gold(row, ranking, path) if "gold" in row else None
    text = field(row, "question", path, KEY, EXPECTED, str).strip()
    return Question(text, answers, choices, gold, ranking=tuple(dict.fromkeys(ranking)))


def _gold(row: dict[str, Any], ranking: tuple[int, ...], path: Path) -> tuple[int, ...]:
    places = row["gold"] if isinstance(row["gold"], list) else [row["gold"]]
    for place in places:
        if type(place) is not int or not 0 <= place < len(ranking):
            raise ValueError(
                f"{KEY}={path} has gold={place!r} with {len(ranking)} passages; expected their numbers from 0"
            )
    return tuple(ranking[place] for place in places)


def _check_gold(rows: list[dict[str, Any]], path: Path) -> None:
    """Positions of gold passages are reported for all questions or for none."""
    without = [("gold" in row) for row in rows]
    if any(without) and not all(without):
        raise ValueError(f"{KEY}={path} has gold in some rows only; expected it in every row or none")


def _texts(row: dict[str, Any], name: str, path: Path) -> tuple[str, ...]:
    texts = field(row, name, path, KEY, EXPECTED, list)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{KEY}={path} has {name} that are no texts; expected {EXPECTED}")
    return tuple(text.strip() for text in texts)
