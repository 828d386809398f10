"""QuALITY: long articles, each with about twenty multiple-choice questions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spanlab.workloads import prompts
from spanlab.workloads.corpus import Corpus
from spanlab.workloads.files import field, read_jsonl
from spanlab.workloads.prompts import Document, Question, option_line
from spanlab.workloads.text_source import TextOptions, hub_rows, text_corpus

HUB = "tasksource/QuALITY"
SPLIT = "validation"
KEY = "workload.path"
EXPECTED = "a QuALITY jsonl with article_id or doc_id, article, and questions[{question, options, gold_label}]"


def local(options: TextOptions) -> Corpus:
    """QuALITY from a jsonl file: the official one, or one article a row with `gold_index`."""
    rows = read_jsonl(options.path, KEY, EXPECTED)
    assert options.path is not None, "read_jsonl lets no missing path through"
    nouns = f"{{documents}} QuALITY articles, {{requests}} questions, {options.path.name}"
    return text_corpus("quality", "local text", nouns, articles(rows, options.path), prompts.QUALITY, options)


def hub(options: TextOptions) -> Corpus:
    """QuALITY from the hub: one question a row, its article repeated in each."""
    rows = hub_rows(HUB, SPLIT)
    nouns = f"{{documents}} QuALITY articles, {{requests}} questions, {HUB} {SPLIT}"
    return text_corpus("quality", "hub text", nouns, articles(rows, HUB), prompts.QUALITY, options)


def articles(rows: Iterable[dict[str, Any]], path: Path | str) -> list[Document]:
    """Group the question sets of different writers under their article, in order of first appearance."""
    asked: dict[tuple[str, str], list[Question]] = {}
    for row in rows:
        name = row.get("article_id", row.get("doc_id"))
        if name is None:
            field(row, "article_id", path, KEY, EXPECTED)
        text = field(row, "article", path, KEY, EXPECTED).strip()
        asked.setdefault((str(name), text), []).extend(_questions(row, path))
    return [Document(text, tuple(questions)) for (_, text), questions in asked.items()]


def _questions(row: dict[str, Any], path: Path | str) -> Iterator[Question]:
    for entry in row.get("questions", [row]):
        text = field(entry, "question", path, KEY, EXPECTED)
        options = tuple(option.strip() for option in field(entry, "options", path, KEY, EXPECTED))
        yield Question(text.strip(), options, _gold(entry, options, path))


def _gold(entry: dict[str, Any], options: tuple[str, ...], path: Path | str) -> tuple[str, ...]:
    """The gold option's line; empty where the file keeps its labels to itself, as the test split does."""
    label = entry.get("gold_label")
    index = entry.get("gold_index") if label is None else label - 1
    if index is None:
        return ()
    if not 0 <= index < len(options):
        raise ValueError(f"{KEY}={path} has the gold option number {index} of {len(options)}; expected {EXPECTED}")
    return (option_line(index, options[index]),)
