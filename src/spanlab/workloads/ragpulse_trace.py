"""Reader of the RAGPulse trace files; it returns a shape of lengths, content numbers, sessions and times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.workloads.files import JsonRow, Label, SourceUnavailable, file_sha256, read_jsonl, shorten
from spanlab.workloads.parquet import LARGEST_TOKEN
from spanlab.workloads.shape import FORMAT_VERSION, INDEPENDENT, REUSABLE, Shape
from spanlab.workloads.workload import ProvenanceKind

KEY = "workload.path"
EXPECTED = "the RAGPulse folder with 0_trace.jsonl and the tables 1_sys_prompt.jsonl to 5_web_search.jsonl"
TRACE = "0_trace.jsonl"
_MOST_DIGITS = 99  # int() refuses strings of thousands of digits
WEEK_S = 7 * 24 * 3600


class Kind(NamedTuple):
    """One kind of component: its field in a request, its table, and the table's field with the id."""

    field: str
    table: str
    id_field: str
    independent: bool


# In prompt order.
KINDS = (
    Kind("sys_prompt", "1_sys_prompt.jsonl", "sys_prompt_id", False),
    Kind("passages_ids", "2_passages.jsonl", "passage_id", True),
    Kind("history", "3_history.jsonl", "history_id", True),
    Kind("web_search", "5_web_search.jsonl", "web_search_id", True),
    Kind("user_input", "4_user_input.jsonl", "user_input_id", False),
)
Content = tuple[int, int]


def read_trace(folder: Path | None, kind: ProvenanceKind) -> Shape:
    """Read the complete trace; contents and sessions are numbered by first appearance.

    The first component of a system prompt is marked reusable: the assistant's fixed opening, of which the trace has
    three variants. Raises SourceUnavailable for a missing file, and ValueError, naming it, for an invalid one.
    """
    if folder is None or not folder.is_dir():
        raise SourceUnavailable(f"{KEY}={folder} is not a folder; expected {EXPECTED}")
    tables = [_lengths(folder / kind.table, kind) for kind in KINDS]
    rows = read_jsonl(folder / TRACE, KEY, EXPECTED)
    prompts = [list(_contents(row, tables)) for row in rows]
    numbers = _number_by_appearance([content for prompt in prompts for content in prompt])
    lengths = np.array([tables[kind][name] for kind, name in numbers], dtype=np.int64)
    return Shape(
        lengths=lengths,
        lcps=np.zeros_like(lengths),
        flags=_flags(numbers, prompts),
        request_spans=np.array([numbers[content] for prompt in prompts for content in prompt], dtype=np.int64),
        span_counts=np.array([len(prompt) for prompt in prompts], dtype=np.int64),
        groups=_sessions(rows),
        output_lens=_numbers(rows, "output_length", 1),
        meta={
            "format": FORMAT_VERSION,
            "name": "ragpulse",
            "kind": kind,
            "detail": "RAGPulse trace, {requests} requests of {documents} sessions",
            "inputs": {name: file_sha256(folder / name) for name in sorted([TRACE, *(kind.table for kind in KINDS)])},
        },
        arrivals_s=_arrivals(_numbers(rows, "timestamp", 0), folder / TRACE),
    )


def _lengths(path: Path, kind: Kind) -> dict[int, int]:
    rows = read_jsonl(path, KEY, EXPECTED)
    names = [row.field(kind.id_field, int) for row in rows]
    lengths = _numbers(rows, "token_length", 1).tolist()
    table = dict(zip(names, lengths, strict=True))
    if len(table) < len(rows):
        raise ValueError(f"{KEY}={path} lists a {kind.id_field} twice; expected {EXPECTED}")
    return table


def _contents(row: JsonRow, tables: Sequence[dict[int, int]]) -> Iterator[Content]:
    """Yield a request's components as (kind, id), in prompt order."""
    components_by_kind, components = row.row("hash_ids"), 0
    for index, kind in enumerate(KINDS):
        for name in components_by_kind.field(kind.field, list):
            if not isinstance(name, int) or name not in tables[index]:
                raise row.error(f"the {kind.id_field} {shorten(name)}, which {kind.table} lacks")
            components += 1
            yield index, name
    if not components:
        raise row.error("a request without any component")


def _number_by_appearance(contents: Sequence[Any]) -> dict[Any, int]:
    return {content: number for number, content in enumerate(dict.fromkeys(contents))}


def _flags(numbers: dict[Content, int], prompts: Sequence[Sequence[Content]]) -> NDArray[np.uint8]:
    flags = np.array([INDEPENDENT * KINDS[kind].independent for kind, _ in numbers], dtype=np.uint8)
    openings = {prompt[0] for prompt in prompts if KINDS[prompt[0][0]].field == "sys_prompt"}
    flags[[numbers[opening] for opening in openings]] |= REUSABLE
    return flags


def _sessions(rows: Sequence[JsonRow]) -> NDArray[np.int64]:
    names = [row.field("session_id", Label) for row in rows]
    numbers = _number_by_appearance(names)
    return np.array([numbers[name] for name in names], dtype=np.int64)


def _numbers(rows: Sequence[JsonRow], name: str, minimum: int) -> NDArray[np.int64]:
    """Return one field of all rows as integers; the trace stores its timestamps as text."""
    values = [row.field(name) for row in rows]
    for row, value in zip(rows, values, strict=True):
        digits = str(value)[:_MOST_DIGITS]
        if not digits.isdecimal() or not minimum <= int(digits) <= LARGEST_TOKEN:
            raise row.error(f"{name}={shorten(value)}", f"a whole number from {minimum}, as {EXPECTED}")
    return np.array([int(value) for value in values], dtype=np.int64)


def _arrivals(stamps: NDArray[np.int64], path: Path) -> NDArray[np.int64]:
    """Seconds since the first request.

    The file lists one week after another, each with timestamps from zero, so that timestamps go back by a week between
    them. Session names contain the wall clock: the second week begins seven days after the first.
    """
    weeks = np.concatenate([[0], np.cumsum(np.diff(stamps) < 0)])
    seconds = stamps + weeks * WEEK_S
    if (np.diff(seconds) < 0).any():
        raise ValueError(f"{KEY}={path} has decreasing timestamps within a week; expected {EXPECTED}")
    since_first: NDArray[np.int64] = seconds - seconds[0]
    return since_first
