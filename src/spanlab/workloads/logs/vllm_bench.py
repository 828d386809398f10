"""Results of benchmarks against vLLM: lengths and times of requests, nothing of what prompts hold."""

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
    """A request a line with its lengths and times, or a whole result a line with one list for each of them."""
    return LogFormat(
        looks_for="JSONL with input_lens, output_lens and start_times, or with input_toks and arrival_time",
        recognises=_recognises,
        read=_read,
        ids=Ids.NONE,
    )


def _recognises(file: LogFile) -> bool:
    row = Row(first_row(file))
    one = row.get(*INPUTS) is not None and row.get(*TIMES) is not None
    return one or isinstance(row.get("input_lens"), list)


def _read(file: LogFile) -> Iterator[Entry]:
    number = 0
    for line, text in file.lines():
        try:
            for one in _requests(Row(orjson.loads(text))):
                number += 1
                entry = lengths_only(one.prompt, number, one.at, one.output)
                yield replace(entry, line=line, moments=one.moments)
        except orjson.JSONDecodeError:
            file.refuse(line, "line: expected JSON")
        except BadFieldError as error:
            file.refuse(line, str(error))


class _Request(NamedTuple):
    """Lengths of a request, seconds of its arrival, and when its tokens came."""

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
    return sorted(map(_Request, inputs, outputs, times, moments), key=lambda one: one.at or 0.0)


def _moments_of_lists(row: Row, times: list[float | None]) -> list[Moments]:
    """First and last tokens from lists of seconds: to the first one, and from each to the next."""
    waits, gaps = row.get("ttfts"), row.get("itls")
    if waits is None or gaps is None or None in times:
        return [UNKNOWN] * len(times)
    if not len(waits) == len(gaps) == len(times):
        raise BadFieldError("ttfts", "as many as itls and start_times")
    first = [at + wait for at, wait in zip(times, waits, strict=True)]
    return [Moments(first_token=at, last_token=at + sum(own)) for at, own in zip(first, gaps, strict=True)]


def _moments_of(row: Row) -> Moments:
    """The times of a line that names them as vLLM does."""
    return Moments(*[_seconds(row, f"{name}_ts") for name in ("queued", "scheduled", "first_token", "last_token")])


def _seconds(row: Row, name: str) -> float:
    return np.nan if row.get(name) is None else float(row.seconds(name) or 0.0)
