"""Results of vLLM benchmarks: lengths and times of requests, without prompt content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.observed import UNKNOWN, Moments
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, first_row, lengths_only, parse_object

INPUTS = ("input_toks", "input_len", "prompt_tokens", "prompt_len")
OUTPUTS = ("output_toks", "output_len", "completion_tokens", "output_tokens")
TIMES = ("arrival_time", "start_time", "queued_ts", "timestamp")


@LOG_FORMATS.register("vllm_bench")
def vllm_bench() -> LogFormat:
    """One request per line, or one benchmark result per line with lists of lengths and times."""
    return LogFormat(
        looks_for="JSONL with input_lens, output_lens and start_times, or with input_toks and arrival_time",
        recognises=_recognises,
        read=_read_entries,
        ids=Ids.NONE,
    )


def _recognises(file: LogFile) -> bool:
    row = Row(first_row(file))
    is_request = row.get(*INPUTS) is not None and row.get(*TIMES) is not None
    return is_request or isinstance(row.get("input_lens"), list)


def _read_entries(file: LogFile) -> Iterator[Entry]:
    parsed = file.parsed(lambda text, line: [(line, request) for request in _requests(parse_object(text))])
    for number, (line, request) in enumerate(chain.from_iterable(parsed), 1):
        entry = lengths_only(request.prompt, number, request.at, request.output)
        yield replace(entry, line=line, moments=request.moments)


class _Request(NamedTuple):
    """Lengths of a request, its arrival in seconds, and the times of its tokens."""

    prompt: int
    output: int
    at: float | None
    moments: Moments = UNKNOWN


def _requests(row: Row) -> list[_Request]:
    if row.get("input_lens") is None:
        lengths = row.count(*INPUTS), row.count(*OUTPUTS, default=0)
        return [_Request(*lengths, row.seconds(*TIMES), _moments_of(row))]
    inputs, outputs = row.counts("input_lens"), row.counts("output_lens")
    times = _start_times(row) or [None] * len(inputs)
    if not len(inputs) == len(outputs) == len(times):
        raise BadFieldError("input_lens", "as many as output_lens and start_times")
    moments = _moments_of_lists(row, times)
    return sorted(map(_Request, inputs, outputs, times, moments), key=lambda request: request.at or 0.0)


def _start_times(row: Row) -> list[float | None]:
    """Return the start times, of which some may be null; empty if the field is missing."""
    times = row.get("start_times")
    known = [time for time in times if time is not None] if isinstance(times, list) else times
    if known is not None:
        Row({"start_times": known}).numbers("start_times")
    return times or []


def _moments_of_lists(row: Row, times: list[float | None]) -> list[Moments]:
    """Return the times of first and last tokens from lists of TTFT and ITL in seconds."""
    arrivals = [time for time in times if time is not None]
    if row.get("ttfts") is None or row.get("itls") is None or len(arrivals) < len(times):
        return [UNKNOWN] * len(times)
    waits, gaps = row.numbers("ttfts"), row.get("itls")
    if not isinstance(gaps, list) or not len(waits) == len(gaps) == len(times):
        raise BadFieldError("ttfts", "as many as itls and start_times")
    gaps = [Row({"itls": itl}).numbers("itls") for itl in gaps]
    first = [arrived + wait for arrived, wait in zip(arrivals, waits, strict=True)]
    return [Moments(first_token=start, last_token=start + sum(itl)) for start, itl in zip(first, gaps, strict=True)]


def _moments_of(row: Row) -> Moments:
    """Return the times of a line with vLLM's field names."""
    return Moments(*[_seconds(row, f"{name}_ts") for name in ("queued", "scheduled", "first_token", "last_token")])


def _seconds(row: Row, name: str) -> float:
    return np.nan if row.get(name) is None else float(row.seconds(name) or 0.0)
