"""NarrativeQA: complete books and film scripts, each with about thirty questions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spanlab.workloads import prompts
from spanlab.workloads.corpus import Corpus
from spanlab.workloads.files import JsonRow, SourceUnavailable, read_csv
from spanlab.workloads.prompts import Document, Question
from spanlab.workloads.shape import committed
from spanlab.workloads.source import workload
from spanlab.workloads.text_source import hub_rows, text_corpus
from spanlab.workloads.tokenizer import find_tokenizer

HUB_EXPECTED = "rows with document{id, text}, question{text} and answers[{text}]"
HUB = "deepmind/narrativeqa"
SPLIT = "validation"
KEY = "workload.path"
EXPECTED = "the NarrativeQA folder with documents.csv, qaps.csv and tmp/<document_id>.content (or stories/)"


@workload("narrativeqa", "shape")
def measured(path: Path | None = None) -> Corpus:
    """Return NarrativeQA by modelled lengths: the committed shape, or the one at `path`."""
    return committed("narrativeqa", path).corpus()


@workload("narrativeqa", "local")
def local(path: Path, tokenizer: str | Path | None = None, cache_dir: Path | None = None) -> Corpus:
    """Read NarrativeQA from its official folder, every question once."""
    if not path.is_dir():
        raise SourceUnavailable(f"{KEY}={path} is not a folder; expected {EXPECTED}")
    documents = _folder_documents(path)
    nouns = f"{{documents}} NarrativeQA stories, {{requests}} questions, {path.resolve().name}"
    return text_corpus(("narrativeqa", "local text", nouns), documents, prompts.NARRATIVEQA, tokenizer, cache_dir)


@workload("narrativeqa", "hub")
def hub(tokenizer: str | Path | None = None, cache_dir: Path | None = None) -> Corpus:
    """Load NarrativeQA from the hub, which has one row per question with its story."""
    find_tokenizer(tokenizer)  # reports a missing tokenizer before a download of minutes
    nouns = f"{{documents}} NarrativeQA stories, {{requests}} questions, {HUB} {SPLIT}"
    documents = _hub_documents(hub_rows(HUB, SPLIT, HUB_EXPECTED))
    return text_corpus(("narrativeqa", "hub text", nouns), documents, prompts.NARRATIVEQA, tokenizer, cache_dir)


def _folder_documents(folder: Path) -> list[Document]:
    questions: dict[str, list[Question]] = {}
    columns = ("document_id", "question", "answer1", "answer2")
    for row in read_csv(folder / "qaps.csv", columns, KEY, EXPECTED):
        question = _question(row["question"], (row["answer1"], row["answer2"]))
        questions.setdefault(row["document_id"], []).append(question)
    listed = read_csv(folder / "documents.csv", ("document_id",), KEY, EXPECTED)
    names = [row["document_id"] for row in listed if row["document_id"] in questions]
    if not names:
        raise ValueError(f"{KEY}={folder} has no document with a question in qaps.csv; expected {EXPECTED}")
    return [Document(_story(folder, name), tuple(questions[name])) for name in names]


def _story(folder: Path, name: str) -> str:
    for subfolder in ("tmp", "stories"):
        path = folder / subfolder / f"{name}.content"
        if path.is_file():
            # Some stories are in older encodings; a replaced letter changes a token, but the document stays usable.
            return path.read_text(encoding="utf-8", errors="replace").strip()
    raise SourceUnavailable(f"{KEY}={folder} has no story {name}.content; expected {EXPECTED}")


def _hub_documents(rows: Iterable[JsonRow]) -> list[Document]:
    stories: dict[str, str] = {}
    questions: dict[str, list[Question]] = {}
    for row in rows:
        document, answers = row.row("document"), row.rows("answers")
        name = document.field("id", str)
        stories.setdefault(name, document.field("text", str).strip())
        question = _question(row.row("question").field("text", str), [answer.field("text", str) for answer in answers])
        questions.setdefault(name, []).append(question)
    return [Document(stories[name], tuple(listed)) for name, listed in questions.items()]


def _question(text: str, answers: Iterable[str]) -> Question:
    return Question(text.strip(), answers=tuple(answer.strip() for answer in answers if answer.strip()))
