"""Requests from a file of structured queries: JSON lines, or a sequence of s-expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spanlab.core.request import Request
from spanlab.core.token_string import Tokens
from spanlab.model_files import installed_model
from spanlab.queries import ChatTokenizer, Query, builtin_tokenizer, describe, load_tokenizer
from spanlab.queries.query import (
    MAX_DEPTH,
    SCANNER,
    parse_sexpr,
    query_of,
    text_mistake,
    with_a_message,
)
from spanlab.registry import among
from spanlab.workloads.files import read_text
from spanlab.workloads.load import WORKLOADS, Drawn, OfFile, OfText, Selected
from spanlab.workloads.selection import Selection, check_documents
from spanlab.workloads.workload import Provenance, Workload, workload

KEY = "workload.path"
SEXPR_SUFFIXES = (".sexpr", ".spnl")
EXPECTED = f"JSON lines with one query each, or a file named {' or '.join(SEXPR_SUFFIXES)} with s-expressions"
EXPECTED_TOKENIZER = (
    "a folder with tokenizer.json and a chat template, or null for the built-in tokenizer"
)
LATEST_S = 9e9  # largest time in 64-bit nanoseconds, about 285 years


@dataclass(frozen=True, slots=True)
class QueryLine:
    """One query of a file with its optional fields; None where the file has no value.

    `line`           line of its first character, counted from 1.
    `output_tokens`  length of the answer.
    `arrived_s`      arrival in seconds since the time origin of the file.
    `group`          queries with equal groups belong together, such as a conversation; None makes a
                     separate group.
    `cache_salt`, `answer` as in `core.request.Request`.
    """

    line: int
    query: Query
    output_tokens: int | None = None
    arrived_s: float | None = None
    group: str | int | None = None
    cache_salt: str | None = None
    answer: str | None = None


@dataclass
@WORKLOADS.register("queries")
class Queries(Drawn, Selected, OfText, OfFile):
    """Queries with structure (seq, plus, cross around system, user, assistant): JSON lines, or
    s-expressions."""


@workload("queries", "local")
def local(path: Path, selection: Selection, tokenizer: str | Path | None = None) -> Workload:
    """Return the selected queries of a file, in its order; groups are numbered by first appearance.

    Equal spans share one array of token ids. The output length comes from `selection`, else from
    the line, else from the answer, else from `selection.unknown_output`. Raises ValueError, one
    sentence with file and line, for a query that cannot be read or rendered.
    """
    if not path.is_file():
        raise ValueError(f"{KEY}={path} is not a file; expected {EXPECTED}")
    text = read_text(path, KEY, EXPECTED, "utf-8-sig")
    query_lines = list(
        (_sexprs if path.suffix.lower() in SEXPR_SUFFIXES else _json_lines)(text, path)
    )
    if not query_lines:
        raise ValueError(f"{KEY}={path} holds no query; expected {EXPECTED}")
    timed_line = next(
        (query_line.line for query_line in query_lines if query_line.arrived_s is not None), None
    )
    untimed_line = next(
        (query_line.line for query_line in query_lines if query_line.arrived_s is None), None
    )
    if timed_line is not None and untimed_line is not None:
        raise ValueError(
            f"{KEY}={path} line {untimed_line} has no arrived_s and line {timed_line} has one; "
            "expected it in every line or none"
        )
    chosen = _select_queries(query_lines, selection)
    chat_tokenizer = tokenizer_of(tokenizer)
    requests, delta = _render(chosen, chat_tokenizer, selection, path)
    detail = (
        f"{len(requests)} queries in {len({group for group, _ in chosen})} groups, {path.name}, {chat_tokenizer.name} "
        f"tokenizer, retokenisation delta {delta} of {sum(request.num_tokens for request in requests)} tokens"
    )
    return Workload("queries", requests, Provenance("local text", detail))


def _render(
    chosen: Sequence[tuple[int, QueryLine]],
    tokenizer: ChatTokenizer,
    selection: Selection,
    path: Path,
) -> tuple[tuple[Request, ...], int]:
    """Return the requests, and how many of their tokens differ from tokenising each prompt as one
    text."""
    shared_tokens: dict[bytes, Tokens] = {}
    requests, deltas = [], 0
    for number, (group, query_line) in enumerate(chosen):
        with _at_line(path, query_line.line):
            rendered = describe(query_line.query, tokenizer)
        assert rendered.retokenisation_delta is not None, "describe() measures the delta by default"
        deltas += rendered.retokenisation_delta
        length = selection.output_tokens or query_line.output_tokens
        if length is None and query_line.answer:
            # Some tokenizers drop white space, and an answer may be only white space.
            length = max(1, len(tokenizer.encode(query_line.answer)))
        spans = []
        for span in rendered.request_spans:
            text = span.tokens.tobytes()
            if text not in shared_tokens:
                # A view would keep the token ids of its whole prompt in memory.
                shared_tokens[text] = span.tokens.copy()
            spans.append(replace(span, ids=shared_tokens[text]))
        request = Request(
            number,
            group,
            tuple(spans),
            output_len=length or selection.unknown_output,
            arrived_at=round((query_line.arrived_s or 0) * 1e9),
            cache_salt=query_line.cache_salt or "",
            answer=query_line.answer,
        )
        requests.append(request)
    return tuple(requests), deltas


def _sexprs(text: str, path: Path) -> Iterator[QueryLine]:
    line, counted = 1, 0
    for start, stop in _top_level(text):
        line, counted = line + text.count("\n", counted, start), start
        query = _sexpr(text, start, stop, path)
        with _at_line(path, line):
            yield QueryLine(line, with_a_message(query))


def _sexpr(text: str, start: int, stop: int, path: Path) -> Query:
    try:
        return parse_sexpr(text[start:stop])
    except ValueError:
        pass
    try:
        # White space in place of the preceding text makes the error report line and column of the
        # file.
        return parse_sexpr(re.sub(r"[^\n]", " ", text[:start]) + text[start:stop])
    except ValueError as error:
        raise ValueError(f"{KEY}={path}: {error}") from error


def _top_level(text: str) -> Iterator[tuple[int, int]]:
    """Yield the half-open range of each expression; an unclosed expression ends at the end of the
    text."""
    depth, start = 0, None
    for token in SCANNER.finditer(text):
        if token.lastgroup == "gap":
            continue
        start = token.start() if start is None else start
        depth += {"(": 1, ")": -1}.get(token.group(), 0)
        if depth <= 0:
            yield start, token.end()
            depth, start = 0, None
    if start is not None:
        yield start, len(text)


def _json_lines(text: str, path: Path) -> Iterator[QueryLine]:
    # Not splitlines: it also splits at characters that may occur inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            with _at_line(path, number):
                yield _parse_line(line, number)


def _parse_line(text: str, line: int) -> QueryLine:
    """Parse a line: a query, or an object with a query under `query` and optional fields."""
    try:
        value = json.loads(text, object_pairs_hook=_object_of_distinct_keys)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"this is not JSON ({error.msg}, column {error.colno}); expected {EXPECTED}"
        ) from error
    if not isinstance(value, dict) or "query" not in value:
        return QueryLine(line, with_a_message(query_of(value)))
    query = with_a_message(query_of(value.pop("query")))
    for name, field_value in value.items():
        if name not in _FIELDS:
            raise ValueError(f"{name} is an unknown field; expected {among(name, _FIELDS)}")
        is_valid, expected = _FIELDS[name]
        if field_value is not None and not is_valid(field_value):
            raise ValueError(f"{name} is {json.dumps(field_value)[:40]}; expected {expected}")
    return QueryLine(line, query, **value)


def _object_of_distinct_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    duplicate = next((key for key in keys if keys.count(key) > 1), None)
    if duplicate is not None:
        raise ValueError(f"an object names {duplicate} twice; expected each key once")
    return dict(pairs)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and text_mistake(value) is None


# In Python a boolean is an integer, but in JSON it is not, hence the exact types.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "output_tokens": (lambda value: type(value) is int and value >= 1, "a whole number from 1 up"),
    "arrived_s": (
        lambda value: type(value) in (int, float) and 0 <= value <= LATEST_S,
        "seconds from 0 up",
    ),
    "group": (lambda value: type(value) is int or _is_text(value), "a string or a whole number"),
    "cache_salt": (_is_text, "a string"),
    "answer": (_is_text, "a string"),
}


def _select_queries(
    query_lines: Iterable[QueryLine], selection: Selection
) -> list[tuple[int, QueryLine]]:
    """Return the selected queries with their group numbers: the first queries of each of the first
    groups."""
    numbers: dict[object, int] = {}
    counts: dict[int, int] = {}
    chosen = []
    for position, query_line in enumerate(query_lines):
        # A tuple cannot equal a group of the file, so queries without a group stay separate.
        group = numbers.setdefault(
            (position,) if query_line.group is None else query_line.group, len(numbers)
        )
        counts[group] = counts.get(group, 0) + 1
        group_selected = selection.documents is None or group < selection.documents
        if group_selected and counts[group] <= (selection.questions_per_document or counts[group]):
            chosen.append((group, query_line))
    check_documents(selection, len(numbers), "queries (its groups)")
    return chosen


def tokenizer_of(source: str | Path | None) -> ChatTokenizer:
    """Load a tokenizer with a chat template from a folder, a packaged model, or, for None, the
    built-in one."""
    if source is None:
        return builtin_tokenizer()
    source = installed_model(source)
    folder = Path(source).parent if Path(source).name == "tokenizer.json" else Path(source)
    try:
        tokenizer = load_tokenizer(folder)
    except ValueError as error:
        raise ValueError(f"workload.tokenizer={source} cannot be read: {error}") from error
    if not tokenizer.chat_template:
        raise ValueError(
            f"workload.tokenizer={source} has no chat template; expected {EXPECTED_TOKENIZER}"
        )
    return tokenizer


@contextmanager
def _at_line(path: Path, number: int) -> Iterator[None]:
    """Add file and line to errors of the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{KEY}={path} line {number}: {error}") from error
    except RecursionError as error:
        raise ValueError(
            f"{KEY}={path} line {number}: query nests deeper than {MAX_DEPTH}; expected fewer levels"
        ) from error
