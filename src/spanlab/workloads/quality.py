"""QuALITY: long articles, each with about twenty multiple-choice questions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spanlab.workloads import prompts
from spanlab.workloads.corpus import Corpus
from spanlab.workloads.files import field, location, read_jsonl, strings
from spanlab.workloads.prompts import Document, Question, option_line
from spanlab.workloads.shape import committed
from spanlab.workloads.source import workload
from spanlab.workloads.text_source import hub_rows, text_corpus
from spanlab.workloads.tokenizer import find_tokenizer

HUB = "tasksource/QuALITY"
SPLIT = "validation"
KEY = "workload.path"
EXPECTED = "a QuALITY jsonl with article_id or doc_id, article, and questions[{question, options, gold_label}]"


@workload("quality", "shape")
def measured(path: Path | None = None) -> Corpus:
    """Return QuALITY by measured lengths: the committed shape, or the one at `path`."""
    return committed("quality", path).corpus()


@workload("quality", "local")
def local(path: Path, tokenizer: str | Path | None = None, cache_dir: Path | None = None) -> Corpus:
    """Read QuALITY from a jsonl file: the official one, or one article per row with `gold_index`."""
    documents = articles(read_jsonl(path, KEY, EXPECTED), path)
    nouns = f"{{documents}} QuALITY articles, {{requests}} questions, {path.name}"
    return text_corpus(("quality", "local text", nouns), documents, prompts.QUALITY, tokenizer, cache_dir)


@workload("quality", "hub")
def hub(tokenizer: str | Path | None = None, cache_dir: Path | None = None) -> Corpus:
    """Load QuALITY from the hub, which has one row per question with its article."""
    find_tokenizer(tokenizer)  # reports a missing tokenizer before a download of minutes
    rows = hub_rows(HUB, SPLIT)
    nouns = f"{{documents}} QuALITY articles, {{requests}} questions, {HUB} {SPLIT}"
    return text_corpus(("quality", "hub text", nouns), articles(rows, HUB), prompts.QUALITY, tokenizer, cache_dir)


def articles(rows: Iterable[dict[str, Any]], path: Path | str) -> list[Document]:
    """Group the question sets of different writers by article, in order of first appearance."""
    questions: dict[tuple[str, str], list[Question]] = {}
    for row in rows:
        name = row.get("article_id", row.get("doc_id"))
        if name is None:
            field(row, "article_id", path, KEY, EXPECTED)
        text = field(row, "article", path, KEY, EXPECTED, str).strip()
        questions.setdefault((str(name), text), []).extend(_questions(row, path))
    return [Document(text, tuple(listed)) for (_, text), listed in questions.items()]


def _questions(row: dict[str, Any], path: Path | str) -> Iterator[Question]:
    entries = field(row, "questions", path, KEY, EXPECTED, list) if "questions" in row else [row]
    subject = location(row, path) if "questions" in row else path
    for entry in entries:
        text = field(entry, "question", subject, KEY, EXPECTED, str)
        options = tuple(option.strip() for option in strings(entry, "options", subject, KEY, EXPECTED))
        yield Question(text.strip(), options, _gold(entry, options, subject))


def _gold(entry: dict[str, Any], options: tuple[str, ...], path: Path | str) -> tuple[str, ...]:
    """Return the gold option's line; empty if the file has no labels, as in the test split."""
    labels = {name: entry[name] for name in ("gold_label", "gold_index") if entry.get(name) is not None}
    for name in labels:
        field(entry, name, path, KEY, EXPECTED, int)
    if not labels:
        return ()
    index = labels["gold_label"] - 1 if "gold_label" in labels else labels["gold_index"]
    if not 0 <= index < len(options):
        raise ValueError(
            f"{KEY}={location(entry, path)} has the gold option number {index} of {len(options)}; expected {EXPECTED}"
        )
    return (option_line(index, options[index]),)
