"""A file of queries with structure: JSON lines, or s-expressions one after another, become requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spanlab.checks import among
from spanlab.core.request import Request, Tokens
from spanlab.models.packaged import installed_model
from spanlab.queries import ChatTokenizer, Query, builtin_tokenizer, describe, load_tokenizer
from spanlab.queries.from_json import parse_json
from spanlab.queries.query import MAX_DEPTH, text_mistake, with_a_message
from spanlab.queries.sexpr import SCANNER, parse_sexpr
from spanlab.workloads.selection import Selection, check_documents, refuse_cut
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Provenance, Workload

KEY = "workload.path"
SEXPR_SUFFIXES = (".sexpr", ".spnl")
EXPECTED = f"JSON lines with one query each, or a file named {' or '.join(SEXPR_SUFFIXES)} with s-expressions"
EXPECTED_TOKENIZER = "a folder with tokenizer.json and a chat template, or null for the built-in tokenizer"
LATEST_S = 9e9  # what integer nanoseconds can say, about 285 years


@dataclass(frozen=True, slots=True)
class Asked:
    """One query of a file and what the file says about it; None where it says nothing.

    `line`           where it begins, counted from 1.
    `output_tokens`  length of the answer to give.
    `arrived_s`      seconds since the file's beginning of time.
    `group`          queries of equal groups belong together, as a conversation's do; None is a group of its own.
    `cache_salt`, `answer` as in `core.request.Request`.
    """

    line: int
    query: Query
    output_tokens: int | None = None
    arrived_s: float | None = None
    group: str | int | None = None
    cache_salt: str | None = None
    answer: str | None = None


@workload("queries", "local")
def local(path: Path, selection: Selection, tokenizer: str | Path | None = None) -> Workload:
    """The selected queries of a file, in its order; groups are numbered by first appearance.

    Equal spans share one array of token ids. An output is as long as `selection` or else the line says, or as the
    answer is, or `selection.unknown_output`. Raises ValueError, one sentence with file and line, for what cannot be
    read or rendered.
    """
    refuse_cut("queries", selection, "no limit on queries as they are written")
    if not path.is_file():
        raise ValueError(f"{KEY}={path} is not a file; expected {EXPECTED}")
    chosen = _chosen(_read(path), selection)
    found = tokenizer_of(tokenizer)
    requests, delta = _rendered(chosen, found, selection, path)
    detail = (
        f"{len(requests)} queries in {len({group for group, _ in chosen})} groups, {path.name}, {found.name} "
        f"tokenizer, retokenisation delta {delta} of {sum(request.num_tokens for request in requests)} tokens"
    )
    return Workload("queries", requests, Provenance("local text", detail))


def _rendered(
    chosen: Sequence[tuple[int, Asked]], tokenizer: ChatTokenizer, selection: Selection, path: Path
) -> tuple[tuple[Request, ...], int]:
    """The requests, and how many of their tokens the whole texts would not have given."""
    held: dict[bytes, Tokens] = {}
    requests, deltas = [], 0
    for number, (group, asked) in enumerate(chosen):
        with _at_line(path, asked.line):
            rendered = describe(asked.query, tokenizer)
        assert rendered.retokenisation_delta is not None, "a delta was asked for and not measured"
        deltas += rendered.retokenisation_delta
        request = rendered.request(
            number,
            group_id=group,
            output_len=_output_len(asked, tokenizer, selection),
            arrived_at=round((asked.arrived_s or 0) * 1e9),
            cache_salt=asked.cache_salt or "",
            answer=asked.answer,
        )
        requests.append(_with_shared_tokens(request, held))
    return tuple(requests), deltas


def _read(path: Path) -> list[Asked]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{KEY}={path} is not UTF-8 text, at byte {error.start}; expected {EXPECTED}") from error
    asked = list((_sexprs if path.suffix.lower() in SEXPR_SUFFIXES else _json_lines)(text, path))
    if not asked:
        raise ValueError(f"{KEY}={path} holds no query; expected {EXPECTED}")
    _check_times(asked, path)
    return asked


def _check_times(asked: Sequence[Asked], path: Path) -> None:
    timed = next((one.line for one in asked if one.arrived_s is not None), None)
    untimed = next((one.line for one in asked if one.arrived_s is None), None)
    if timed is not None and untimed is not None:
        raise ValueError(
            f"{KEY}={path} line {untimed} has no arrived_s and line {timed} has one; expected it in every line or none"
        )


def _sexprs(text: str, path: Path) -> Iterator[Asked]:
    line, counted = 1, 0
    for start, stop in _top_level(text):
        line, counted = line + text.count("\n", counted, start), start
        query = _sexpr(text, start, stop, path)
        with _at_line(path, line):
            yield Asked(line, with_a_message(query))


def _sexpr(text: str, start: int, stop: int, path: Path) -> Query:
    try:
        return parse_sexpr(text[start:stop])
    except ValueError:
        pass
    try:
        # Once more behind white space of the same shape as all before it: line and column are then those of the file.
        return parse_sexpr(re.sub(r"[^\n]", " ", text[:start]) + text[start:stop])
    except ValueError as error:
        raise ValueError(f"{KEY}={path}: {error}") from error


def _top_level(text: str) -> Iterator[tuple[int, int]]:
    """Half-open ranges of the expressions; one that is never closed goes to the end of the text."""
    depth, start = 0, None
    for piece in SCANNER.finditer(text):
        if piece.lastgroup == "gap":
            continue
        start = piece.start() if start is None else start
        depth += {"(": 1, ")": -1}.get(piece.group(), 0)
        if depth <= 0:
            yield start, piece.end()
            depth, start = 0, None
    if start is not None:
        yield start, len(text)


def _json_lines(text: str, path: Path) -> Iterator[Asked]:
    # Not splitlines: some of the characters that it cuts at may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            with _at_line(path, number):
                yield _asked(line, number)


def _asked(text: str, line: int) -> Asked:
    """A line is a query, or an object with a query under `query` and what is said about it."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON ({error.msg}, column {error.colno}); expected {EXPECTED}") from error
    if not isinstance(value, dict) or "query" not in value:
        return Asked(line, with_a_message(parse_json(json.dumps(value))))
    query = with_a_message(parse_json(json.dumps(value.pop("query"))))
    for name, found in value.items():
        _check_field(name, found)
    return Asked(line, query, **value)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"an object names {repeated} twice; expected each key once")
    return dict(pairs)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and text_mistake(value) is None


# Booleans are numbers in Python and not in JSON, hence the exact types.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "output_tokens": (lambda value: type(value) is int and value >= 1, "a whole number from 1 up"),
    "arrived_s": (lambda value: type(value) in (int, float) and 0 <= value <= LATEST_S, "seconds from 0 up"),
    "group": (lambda value: type(value) is int or _is_text(value), "a string or a whole number"),
    "cache_salt": (_is_text, "a string"),
    "answer": (_is_text, "a string"),
}


def _check_field(name: str, value: object) -> None:
    if name not in _FIELDS:
        raise ValueError(f"{name} stands beside the query; expected {among(name, _FIELDS)}")
    fits, expected = _FIELDS[name]
    if value is not None and not fits(value):
        raise ValueError(f"{name} is {json.dumps(value)[:40]}; expected {expected}")


def _chosen(asked: Iterable[Asked], selection: Selection) -> list[tuple[int, Asked]]:
    """Queries to serve with their groups' numbers: the first groups, and of each the first queries."""
    numbers: dict[object, int] = {}
    counts: dict[int, int] = {}
    chosen = []
    for place, one in enumerate(asked):
        # A tuple is no group that a file could name.
        group = numbers.setdefault((place,) if one.group is None else one.group, len(numbers))
        counts[group] = counts.get(group, 0) + 1
        wanted = selection.documents is None or group < selection.documents
        if wanted and counts[group] <= (selection.questions_per_document or counts[group]):
            chosen.append((group, one))
    check_documents(selection, len(numbers), "queries (its groups)")
    return chosen


def tokenizer_of(where: str | Path | None) -> ChatTokenizer:
    if where is None:
        return builtin_tokenizer()
    where = installed_model(where)
    folder = Path(where).parent if Path(where).name == "tokenizer.json" else Path(where)
    try:
        tokenizer = load_tokenizer(folder)
    except ValueError as error:
        raise ValueError(f"workload.tokenizer={where} cannot be read: {error}") from error
    if not tokenizer.chat_template:
        raise ValueError(f"workload.tokenizer={where} has no chat template; expected {EXPECTED_TOKENIZER}")
    return tokenizer


def _output_len(asked: Asked, tokenizer: ChatTokenizer, selection: Selection) -> int:
    known = selection.output_tokens or asked.output_tokens
    if known is None and asked.answer:
        # Some tokenizers drop white space, which an answer may be.
        known = max(1, len(tokenizer.encode(asked.answer)))
    return known or selection.unknown_output


def _with_shared_tokens(request: Request, held: dict[bytes, Tokens]) -> Request:
    spans = []
    for span in request.spans:
        key = span.tokens.tobytes()
        if key not in held:
            # A view would keep the token ids of its whole prompt in memory.
            held[key] = span.tokens.copy()
        spans.append(replace(span, tokens=held[key]))
    return replace(request, spans=tuple(spans))


@contextmanager
def _at_line(path: Path, number: int) -> Iterator[None]:
    """Mistakes inside say where they are."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{KEY}={path} line {number}: {error}") from error
    except RecursionError as error:
        raise ValueError(
            f"{KEY}={path} line {number}: query nests deeper than {MAX_DEPTH}; expected fewer levels"
        ) from error
