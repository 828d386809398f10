"""The RAGPulse trace: retrieval-augmented requests as content ids, component by component.

RAGPulse (arXiv 2511.12979, MIT licence) recorded two weeks of a deployed assistant, without any
text: each request lists the ids of its components, and a table per kind of component gives an id's
length in tokens. Equal ids are equal content, so the reuse of a prefix cache and the reuse at any
position are both known exactly. Token ids are derived from the content's number. A prompt is as
long as its components; the trace's `input_length` adds only 6 to 12 tokens of a template that was
not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.core.token_string import Tokens, array_of
from spanlab.kinds import check_fields, field
from spanlab.registry import positive
from spanlab.workloads.files import (
    LARGEST_TOKEN,
    JsonRow,
    Label,
    SourceUnavailable,
    file_sha256,
    read_jsonl,
    shorten,
)
from spanlab.workloads.shape import FORMAT_VERSION, INDEPENDENT, REUSABLE, Shape, committed
from spanlab.workloads.workload import Corpus, ProvenanceKind, workload

# ------------------------------------------------------------------------------
# Reader of the RAGPulse trace files; it returns a shape of lengths, content numbers, sessions
# and times.
# ------------------------------------------------------------------------------

KEY = "workload.path"
EXPECTED = (
    "the RAGPulse folder with 0_trace.jsonl and the tables 1_sys_prompt.jsonl to 5_web_search.jsonl"
)
TRACE = "0_trace.jsonl"
_MOST_DIGITS = 99  # int() refuses strings of thousands of digits
WEEK_S = 7 * 24 * 3600


class Kind(NamedTuple):
    """One kind of component: its field in a request, its table, and the table's field with the
    id."""

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

    The first component of a system prompt is marked reusable: the assistant's fixed opening, of
    which the trace has three variants. Raises SourceUnavailable for a missing file, and ValueError,
    naming it, for an invalid one.
    """
    if folder is None or not folder.is_dir():
        raise SourceUnavailable(f"{KEY}={folder} is not a folder; expected {EXPECTED}")
    tables = []
    for component in KINDS:
        path = folder / component.table
        rows = read_jsonl(path, KEY, EXPECTED)
        names = [row.field(component.id_field, int) for row in rows]
        table = dict(zip(names, _numbers(rows, "token_length", 1).tolist(), strict=True))
        if len(table) < len(rows):
            raise ValueError(
                f"{KEY}={path} lists a {component.id_field} twice; expected {EXPECTED}"
            )
        tables.append(table)
    rows = read_jsonl(folder / TRACE, KEY, EXPECTED)
    prompts = [list(_contents(row, tables)) for row in rows]
    numbers = _number_by_appearance([content for prompt in prompts for content in prompt])
    lengths = np.array([tables[kind][name] for kind, name in numbers], dtype=np.int64)
    flags = np.array([INDEPENDENT * KINDS[kind].independent for kind, _ in numbers], dtype=np.uint8)
    openings = {prompt[0] for prompt in prompts if KINDS[prompt[0][0]].field == "sys_prompt"}
    flags[[numbers[opening] for opening in openings]] |= REUSABLE
    sessions = [row.field("session_id", Label) for row in rows]
    session_numbers = _number_by_appearance(sessions)
    return Shape(
        lengths=lengths,
        lcps=np.zeros_like(lengths),
        flags=flags,
        request_spans=np.array(
            [numbers[content] for prompt in prompts for content in prompt], dtype=np.int64
        ),
        span_counts=np.array([len(prompt) for prompt in prompts], dtype=np.int64),
        groups=np.array([session_numbers[name] for name in sessions], dtype=np.int64),
        output_lens=_numbers(rows, "output_length", 1),
        meta={
            "format": FORMAT_VERSION,
            "name": "ragpulse",
            "kind": kind,
            "detail": "RAGPulse trace, {requests} requests of {documents} sessions",
            "inputs": {
                name: file_sha256(folder / name)
                for name in sorted([TRACE, *(kind.table for kind in KINDS)])
            },
        },
        arrivals_s=_arrivals(_numbers(rows, "timestamp", 0), folder / TRACE),
    )


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


def _numbers(rows: Sequence[JsonRow], name: str, minimum: int) -> NDArray[np.int64]:
    """Return one field of all rows as integers; the trace stores its timestamps as text."""
    values = [row.field(name) for row in rows]
    for row, value in zip(rows, values, strict=True):
        digits = str(value)[:_MOST_DIGITS]
        if not digits.isdecimal() or not minimum <= int(digits) <= LARGEST_TOKEN:
            raise row.error(
                f"{name}={shorten(value)}", f"a whole number from {minimum}, as {EXPECTED}"
            )
    return np.array([int(value) for value in values], dtype=np.int64)


def _arrivals(stamps: NDArray[np.int64], path: Path) -> NDArray[np.int64]:
    """Seconds since the first request.

    The file lists one week after another, each with timestamps from zero, so that timestamps go
    back by a week between them. Session names contain the wall clock: the second week begins seven
    days after the first.
    """
    weeks = np.concatenate([[0], np.cumsum(np.diff(stamps) < 0)])
    seconds = stamps + weeks * WEEK_S
    if (np.diff(seconds) < 0).any():
        raise ValueError(
            f"{KEY}={path} has decreasing timestamps within a week; expected {EXPECTED}"
        )
    since_first: NDArray[np.int64] = seconds - seconds[0]
    return since_first


MASK = np.uint64(2**31 - 1)
ODD = (np.uint64(0x1E3779B1), np.uint64(0x2545F491))


@dataclass
class RagPulse:
    """The first `requests` of the RAGPulse trace, with recorded gaps, or gaps scaled to `rate_rps`
    or by `speedup`."""

    requests: int | None = field(None, positive, "the first requests of the trace; null: all")
    rate_rps: float | None = field(
        None, positive, "mean rate after scaling the recorded gaps; null: as recorded"
    )
    speedup: float = field(1.0, positive, "factor by which the gaps shrink; not with `rate_rps`")
    independent: str = field(
        "passages",
        ("passages", "all"),
        "which components are independent spans: passages (with history and web pages), or all",
    )

    def __post_init__(self) -> None:
        check_fields(self, "workload.ragpulse")
        if self.rate_rps is not None and self.speedup != 1.0:
            raise ValueError(
                f"workload.ragpulse.speedup={self.speedup} with workload.ragpulse.rate_rps={self.rate_rps}; "
                f"expected one of them"
            )


@workload("ragpulse", "shape")
def measured(ragpulse: RagPulse, path: Path | None = None) -> Corpus:
    """Return the committed trace, or the shape that make_shape wrote to `path`."""
    trace = committed("ragpulse", path)
    if trace.arrivals_s is None:
        raise ValueError(
            f"workload.path={path} has no array arrivals_s; expected a shape of the RAGPulse trace"
        )
    return trace_corpus(trace, ragpulse)


@workload("ragpulse", "local")
def local(path: Path, ragpulse: RagPulse) -> Corpus:
    """Read the original files of the trace."""
    return trace_corpus(read_trace(path, "local trace"), ragpulse)


def trace_corpus(trace: Shape, options: RagPulse) -> Corpus:
    """Return the first requests of a trace with scaled gaps and scattered token ids; groups are
    sessions."""
    assert trace.arrivals_s is not None, "a trace has arrival times"
    source = trace.corpus()
    count = len(source.rows) if options.requests is None else options.requests
    if count > len(source.rows):
        raise ValueError(
            f"workload.ragpulse.requests={count}; expected at most {len(source.rows)}, the requests of the trace"
        )
    if options.rate_rps is not None:
        gaps = f"gaps stretched to {options.rate_rps:g} requests a second"
    else:
        gaps = (
            "gaps as recorded"
            if options.speedup == 1.0
            else f"gaps {options.speedup:g} times shorter"
        )
    components = (
        "every component" if options.independent == "all" else "passages, history and web pages"
    )
    return replace(
        source,
        detail=f"{source.detail}, {gaps}, {components} independent",
        independent=np.ones_like(source.independent)
        if options.independent == "all"
        else source.independent,
        rows=source.rows[:count],
        expand=lambda counts: {
            span: scatter(array_of(ids)) for span, ids in source.expand(counts).items()
        },
        arrived_at=scaled_arrivals(trace.arrivals_s[:count], options),
    )


def scaled_arrivals(seconds: NDArray[np.int64], options: RagPulse) -> list[int]:
    """Return arrival times in integer nanoseconds, with all gaps of `seconds` scaled by the same
    factor."""
    factor = 1 / options.speedup
    if options.rate_rps is not None and len(seconds) > 1:
        if seconds[-1] == seconds[0]:
            raise ValueError(
                f"workload.ragpulse.rate_rps={options.rate_rps} with {len(seconds)} requests at the same second; "
                f"expected more requests"
            )
        factor = (len(seconds) - 1) / (options.rate_rps * float(seconds[-1] - seconds[0]))
    times: list[int] = np.rint(seconds * (factor * 1e9)).astype(np.int64).tolist()
    return times


def scatter(ids: Tokens) -> Tokens:
    """Permute the numbers from 0 to 2^31 - 1.

    Consecutive ids of two contents would still run in parallel after a modulo by the vocabulary
    size; permuted ids do not. Each step is invertible: a multiplication by an odd number modulo
    2^31, and an xor of the number with its upper half.
    """
    mixed = ids.astype(np.uint64)
    for odd in ODD:
        mixed = mixed * odd & MASK
        mixed ^= mixed >> np.uint64(16)
    return mixed.astype(np.int32)
