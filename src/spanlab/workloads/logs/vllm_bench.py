"""Results of benchmarks against vLLM: lengths and times of requests, nothing of what prompts hold."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
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
            row = Row(orjson.loads(text))
            for tokens, at, output in _requests(row):
                number += 1
                yield lengths_only(tokens, number, at, output)
        except orjson.JSONDecodeError:
            file.refuse(line, "line: expected JSON")
        except BadFieldError as error:
            file.refuse(line, str(error))


def _requests(row: Row) -> list[tuple[int, float | None, int]]:
    """Prompt tokens, time and output tokens of each request of a line."""
    if row.get("input_lens") is None:
        return [(row.count(*INPUTS), row.seconds(*TIMES), row.count(*OUTPUTS, default=0))]
    inputs, outputs = row.whole_numbers("input_lens").tolist(), row.whole_numbers("output_lens").tolist()
    times = row.get("start_times") or [None] * len(inputs)
    if not len(inputs) == len(outputs) == len(times):
        raise BadFieldError("input_lens", "as many as output_lens and start_times")
    return sorted(zip(inputs, times, outputs, strict=True), key=lambda one: one[1] or 0.0)
