"""Results of vLLM benchmarks: lengths and times of requests, without prompt content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, compress
from typing import NamedTuple

import numpy as np

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.observed import UNKNOWN, Moments
from spanlab.workloads.logs.source import (
    BadFieldError,
    LogFile,
    LogFormat,
    Row,
    actual,
    first_row,
    lengths_only,
    parse_object,
)

INPUTS = ("input_toks", "input_len", "prompt_tokens", "prompt_len")
OUTPUTS = ("output_toks", "output_len", "completion_tokens", "output_tokens")
FAILED = "failed requests"
TIMES = ("arrival_time", "start_time", "queued_ts", "timestamp")


@LOG_FORMATS.register("vllm_bench")
def vllm_bench() -> LogFormat:
    """One request per line, or one benchmark result per line with lists of lengths and times."""
    return LogFormat(
        looks_for="JSONL with input_lens, output_lens and start_times, or with input_toks and arrival_time",
        recognises=_recognises,
        read=_read_entries,
        ids=Ids.NONE,
        fields=("input_lens", "output_lens", "start_times"),
    )


def _recognises(file: LogFile) -> bool:
    row = Row(first_row(file))
    is_request = row.get(*INPUTS) is not None and row.get(*TIMES) is not None
    return is_request or isinstance(row.get("input_lens"), list)


def _read_entries(file: LogFile) -> Iterator[Entry]:
    parsed = file.parsed(lambda item, line: [(line, request) for request in _requests(parse_object(item), file)])
    for number, (line, request) in enumerate(chain.from_iterable(parsed), 1):
        entry = lengths_only(request.prompt, number, request.at, request.output)
        yield replace(entry, line=line, moments=request.moments)


class _Request(NamedTuple):
    """Lengths of a request, its arrival in seconds, and the times of its tokens."""

    prompt: int
    output: int
    at: float | None
    moments: Moments = UNKNOWN


def _requests(row: Row, file: LogFile) -> list[_Request]:
    """Return the requests of a line; failed ones are counted and left out."""
    if row.get("input_lens") is None:
        if row.get("error") or row.get("success") is False:
            file.set_aside(FAILED)
            return []
        lengths = row.count(*INPUTS), row.count(*OUTPUTS, default=0)
        return [_Request(*lengths, row.seconds(*TIMES), _moments_of(row))]
    inputs, outputs = row.counts("input_lens").tolist(), row.counts("output_lens").tolist()
    times = _start_times(row) or [None] * len(inputs)
    if not len(inputs) == len(outputs) == len(times):
        raise BadFieldError("input_lens", "as many as output_lens and start_times")
    failed, moments = _failed(row, outputs), _moments_of_lists(row, times)
    file.set_aside(FAILED, sum(failed))
    requests = compress(map(_Request, inputs, outputs, times, moments), [not fails for fails in failed])
    return sorted(requests, key=lambda request: request.at or 0.0)


def _failed(row: Row, outputs: list[int]) -> list[bool]:
    """Return whether each request of a result failed: it has an error's text, or no output and a first token at 0 s."""
    absent = [None] * len(outputs)
    errors, waits = (absent if row.get(name) is None else row.get(name) for name in ("errors", "ttfts"))
    for name, values in (("errors", errors), ("ttfts", waits)):
        if not isinstance(values, list) or len(values) != len(outputs):
            raise BadFieldError(name, "a list, as long as output_lens")
    of_request = zip(errors, waits, outputs, strict=True)
    return [bool(error) or (wait == 0 and not output) for error, wait, output in of_request]


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
    times = Moments(*[_seconds(row, f"{name}_ts") for name in Moments._fields])
    before = np.nan
    for name, time in zip(Moments._fields, times, strict=True):
        if time < before:
            raise BadFieldError(f"{name}_ts", f"a time no earlier than the one before it, {before:.17g}{actual(time)}")
        before = before if np.isnan(time) else time
    return times


def _seconds(row: Row, name: str) -> float:
    time = row.seconds(name)
    return np.nan if time is None else time
