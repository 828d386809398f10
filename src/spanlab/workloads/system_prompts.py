"""System prompts of deployed assistants, each followed by user queries."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spanlab.workloads import prompts
from spanlab.workloads.corpus import Corpus
from spanlab.workloads.files import SourceUnavailable, read_jsonl, read_text
from spanlab.workloads.parquet import read_columns, token_lists
from spanlab.workloads.prompts import Document, Part, Question
from spanlab.workloads.shape import committed
from spanlab.workloads.source import workload
from spanlab.workloads.text_source import text_corpus

KEY = "workload.path"
EXPECTED = "a folder of Markdown prompts or a Parquet file with prompt_id and tokens"
QUERIES_KEY = "workload.queries_path"
QUERIES_EXPECTED = "a jsonl file with one user query a row, in the field query"
QUERY_SEED = 20240229
QUERIES_PER_PROMPT = 30  # as in the committed shape


@workload("system_prompts", "shape")
def measured(path: Path | None = None) -> Corpus:
    """Return system prompts by measured lengths: the committed shape, or the one at `path`."""
    return committed("system_prompts", path).corpus()


@workload("system_prompts", "local")
def local(
    path: Path,
    queries_path: Path | None = None,
    tokenizer: str | Path | None = None,
    cache_dir: Path | None = None,
    queries_per_prompt: int | None = None,
) -> Corpus:
    """Read system prompts from a folder of Markdown files or a table of token ids, and queries from a jsonl file."""
    bodies = _system_prompts(path)
    queries = read_queries(queries_path)
    documents = draw_queries(bodies, queries, queries_per_prompt or min(QUERIES_PER_PROMPT, len(queries)))
    nouns = f"{{documents}} system prompts, {{requests}} user queries, {path.name}"
    layout = prompts.SYSTEM_PROMPTS
    return text_corpus(("system_prompts", "local text", nouns), documents, layout, tokenizer, cache_dir)


def read_queries(path: Path | None) -> list[str]:
    """Return distinct user queries in file order; rows of a `kind` other than chat, such as search, are left out."""
    rows = read_jsonl(path, QUERIES_KEY, QUERIES_EXPECTED)
    chat = [row for row in rows if row.get("kind", "chat") == "chat"]
    texts = (row.field("query", str).strip() for row in chat)
    queries = list(dict.fromkeys(text for text in texts if text))
    if not queries:
        raise ValueError(f"{QUERIES_KEY}={path} holds no chat query; expected {QUERIES_EXPECTED}")
    return queries


def draw_queries(bodies: list[Part], queries: list[str], per_prompt: int) -> list[Document]:
    """Draw `per_prompt` different queries for each prompt; the draw is the same on every machine."""
    if not 1 <= per_prompt <= len(queries):
        raise ValueError(
            f"workload.queries_per_prompt={per_prompt}; expected 1 to {len(queries)}, the number of queries"
        )
    rng = np.random.default_rng(QUERY_SEED)
    draws = [rng.choice(len(queries), size=per_prompt, replace=False) for _ in bodies]
    return [
        Document(body, tuple(Question(queries[index]) for index in indexes))
        for body, indexes in zip(bodies, draws, strict=True)
    ]


def _system_prompts(path: Path | None) -> list[Part]:
    if path is not None and path.is_dir():
        files = sorted(path.rglob("*.md"))
        if not files:
            raise ValueError(f"{KEY}={path} holds no Markdown file; expected {EXPECTED}")
        return [read_text(file, KEY, EXPECTED).strip() for file in files]
    if path is None or not path.is_file():
        raise SourceUnavailable(f"{KEY}={path} does not exist; expected {EXPECTED}")
    table = read_columns(path, ("prompt_id", "tokens"), KEY, EXPECTED)
    return list(token_lists(table, "tokens", path, KEY, EXPECTED))
