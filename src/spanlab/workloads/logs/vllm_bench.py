"""Results of vLLM benchmarks: lengths and times of requests, without prompt content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import orjson

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.observed import UNKNOWN, Moments
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, first_row, lengths_only

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
    number = 0
    for line, text in file.lines():
        try:
            for request in _requests(Row(orjson.loads(text))):
                number += 1
                entry = lengths_only(request.prompt, number, request.at, request.output)
                yield replace(entry, line=line, moments=request.moments)
        except orjson.JSONDecodeError:
            file.refuse(line, "line: expected JSON")
        except BadFieldError as error:
            file.refuse(line, str(error))


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
    inputs, outputs = row.whole_numbers("input_lens").tolist(), row.whole_numbers("output_lens").tolist()
    times = row.get("start_times") or [None] * len(inputs)
    if not len(inputs) == len(outputs) == len(times):
        raise BadFieldError("input_lens", "as many as output_lens and start_times")
    moments = _moments_of_lists(row, times)
    return sorted(map(_Request, inputs, outputs, times, moments), key=lambda request: request.at or 0.0)


def _moments_of_lists(row: Row, times: list[float | None]) -> list[Moments]:
    """Return the times of first and last tokens from lists of TTFT and ITL in seconds."""
    waits, gaps = row.get("ttfts"), row.get("itls")
    if waits is None or gaps is None or None in times:
        return [UNKNOWN] * len(times)
    if not len(waits) == len(gaps) == len(times):
        raise BadFieldError("ttfts", "as many as itls and start_times")
    first = [arrived + wait for arrived, wait in zip(times, waits, strict=True)]
    return [Moments(first_token=start, last_token=start + sum(itl)) for start, itl in zip(first, gaps, strict=True)]


def _moments_of(row: Row) -> Moments:
    """Return the times of a line with vLLM's field names."""
    return Moments(*[_seconds(row, f"{name}_ts") for name in ("queued", "scheduled", "first_token", "last_token")])


def _seconds(row: Row, name: str) -> float:
    return np.nan if row.get(name) is None else float(row.seconds(name) or 0.0)
