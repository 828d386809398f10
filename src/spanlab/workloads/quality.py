"""QuALITY: long articles, each with about twenty multiple-choice questions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spanlab.workloads import prompts
from spanlab.workloads.corpus import Corpus
from spanlab.workloads.files import JsonRow, read_jsonl
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
    documents = articles(read_jsonl(path, KEY, EXPECTED))
    nouns = f"{{documents}} QuALITY articles, {{requests}} questions, {path.name}"
    return text_corpus(("quality", "local text", nouns), documents, prompts.QUALITY, tokenizer, cache_dir)


@workload("quality", "hub")
def hub(tokenizer: str | Path | None = None, cache_dir: Path | None = None) -> Corpus:
    """Load QuALITY from the hub, which has one row per question with its article."""
    find_tokenizer(tokenizer)  # reports a missing tokenizer before a download of minutes
    documents = articles(hub_rows(HUB, SPLIT, EXPECTED))
    nouns = f"{{documents}} QuALITY articles, {{requests}} questions, {HUB} {SPLIT}"
    return text_corpus(("quality", "hub text", nouns), documents, prompts.QUALITY, tokenizer, cache_dir)


def articles(rows: Iterable[JsonRow]) -> list[Document]:
    """Group the question sets of different writers by article, in order of first appearance."""
    questions: dict[tuple[str, str], list[Question]] = {}
    for row in rows:
        name = row.get("article_id", row.get("doc_id"))
        if name is None:
            row.field("article_id")
        text = row.field("article", str).strip()
        entries = row.rows("questions") if "questions" in row else [row]
        questions.setdefault((str(name), text), []).extend(map(_question, entries))
    return [Document(text, tuple(listed)) for (_, text), listed in questions.items()]


def _question(row: JsonRow) -> Question:
    text = row.field("question", str).strip()
    options = tuple(option.strip() for option in row.list_of("options", str))
    return Question(text, options, _gold(row, options))


def _gold(row: JsonRow, options: tuple[str, ...]) -> tuple[str, ...]:
    """Return the gold option's line; empty if the file has no labels, as in the test split."""
    labels = {name: row[name] for name in ("gold_label", "gold_index") if row.get(name) is not None}
    for name in labels:
        row.field(name, int)
    if not labels:
        return ()
    index = labels["gold_label"] - 1 if "gold_label" in labels else labels["gold_index"]
    if not 0 <= index < len(options):
        raise row.error(f"the gold option number {index} of {len(options)}")
    return (option_line(index, options[index]),)
