"""Results of benchmarks and answers of servers: times, lengths and counts of requests, without
their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.observed import NOT_REPORTED, Moments
from spanlab.workloads.logs.openai import FAILED
from spanlab.workloads.logs.rows import (
    TIMES,
    BadFieldError,
    Row,
    actual,
    count_of,
    counted,
    inclusive,
    output_in,
    record_of,
    usage_in,
)
from spanlab.workloads.logs.source import (
    LOG_FORMATS,
    LogFile,
    LogFormat,
    head_rows,
    lengths_only,
    parse_object,
)

NO_LENGTH = "requests without a length of their prompt"
IN_TURN = "the benchmarks of a report follow each other in time: their requests are one log"


def _read_by_time(
    parse: Callable[[Row, int, LogFile], Iterator[Entry]],
) -> Callable[[LogFile], Iterator[Entry]]:
    """Return a reader of requests of known length, sorted by time; requests of items are numbered
    in their order."""

    def entries(file: LogFile) -> Iterator[Entry]:
        requests = [
            entry
            for found_entries in file.parsed(
                lambda item, line: [*parse(parse_object(item), line, file)]
            )
            for entry in found_entries
        ]
        is_timed = all(entry.at is not None for entry in requests)
        for number, entry in enumerate(
            sorted(requests, key=lambda entry: entry.at or 0.0) if is_timed else requests, 1
        ):
            yield replace(entry, keys=np.array([number], dtype=np.int64))

    return entries


# ------------------------------------------------------------------------------
# GuideLLM: a report with benchmarks, each with lists of requests.
# ------------------------------------------------------------------------------

_STARTS = (
    "request_start_time",
    "start_time",
    "info.timings.request_start",
    "info.timings.resolve_start",
)
_INPUTS = ("prompt_tokens", "input_metrics.total_tokens", "input_metrics.text_tokens")
_FIRSTS = ("first_token_time", "info.timings.first_token_iteration")
_LASTS = ("last_token_time", "info.timings.last_token_iteration", "request_end_time", "end_time")


@LOG_FORMATS.register("guidellm")
def guidellm() -> LogFormat:
    """The report of GuideLLM as JSON; requests of all its benchmarks that succeeded."""
    return LogFormat(
        looks_for="JSON of GuideLLM: benchmarks with requests.successful",
        recognises=lambda file: any(_is_report(row) for row in head_rows(file)),
        read=_read_by_time(_report_entries),
        ids=Ids.NONE,
        fields=("benchmarks",),
        marks=(frozenset({"benchmarks"}),),
    )


def _is_report(row: dict[str, Any]) -> bool:
    benchmarks = row.get("benchmarks")
    return isinstance(benchmarks, list) and any(
        isinstance(benchmark, dict) and isinstance(benchmark.get("requests"), dict)
        for benchmark in benchmarks
    )


def _report_entries(row: Row, line: int, file: LogFile) -> Iterator[Entry]:
    benchmarks = row.get("benchmarks")
    if not isinstance(benchmarks, list) or not all(
        isinstance(benchmark, dict) for benchmark in benchmarks
    ):
        raise BadFieldError("benchmarks", f"a list of objects{actual(benchmarks)}")
    if len(benchmarks) > 1:
        file.notes.append(IN_TURN)
    for index, benchmark in enumerate(map(Row, benchmarks)):
        path = f"benchmarks[{index}].requests"
        for kind in ("errored", "incomplete"):
            others = benchmark.get(f"requests.{kind}")
            file.set_aside(f"{kind} requests", len(others) if isinstance(others, list) else 0)
        successful = benchmark.get("requests.successful")
        if not isinstance(successful, list):
            raise BadFieldError(f"{path}.successful", f"a list of requests{actual(successful)}")
        counted = benchmark.get(
            "metrics.request_totals.successful", "run_stats.requests_made.successful"
        )
        if isinstance(counted, int) and counted > len(successful):
            file.set_aside(
                "successful requests that the report counts without a record",
                counted - len(successful),
            )
        for number, request in enumerate(successful):
            yield from _guided_request(request, f"{path}.successful[{number}]", line, file)


def _guided_request(request: Any, path: str, line: int, file: LogFile) -> Iterator[Entry]:
    if not isinstance(request, dict):
        raise BadFieldError(path, f"an object{actual(request)}")
    row = Row(request)
    try:
        tokens = row.get(*_INPUTS)
        output = row.count("output_tokens", "output_metrics.text_tokens", default=0)
        start = row.seconds(*_STARTS)
        if tokens is None:
            file.set_aside(NO_LENGTH)
            return
        length = row.count(*_INPUTS)
        first, last = row.seconds(*_FIRSTS), row.seconds(*_LASTS)
        wait, gap = (
            row.duration(f"{name}_ms", scale=1e-3)
            for name in ("time_to_first_token", "inter_token_latency")
        )
    except BadFieldError as error:
        raise BadFieldError(
            f"{path}.{str(error).partition(':')[0]}", str(error).partition("expected ")[2]
        ) from error
    if first is None and wait is not None and start is not None:
        first = start + wait
    if last is None and first is not None and gap is not None:
        last = first + gap * max(output - 1, 0)
    moments = Moments(
        first_token=np.nan if first is None else first, last_token=np.nan if last is None else last
    )
    cached = count_of(request, "cached_tokens")
    usage = NOT_REPORTED if np.isnan(cached) else inclusive(float(length), cached)
    session = row.label("info.conversation_id")
    yield replace(
        lengths_only(length, 0, start, output),
        line=line,
        moments=moments,
        usage=usage,
        session=session,
        record=record_of(row, "request_id"),
    )


# ------------------------------------------------------------------------------
# AIPerf: a record per request, with metrics as values and units.
# ------------------------------------------------------------------------------

_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}


@LOG_FORMATS.register("aiperf")
def aiperf() -> LogFormat:
    """The file profile_export.jsonl of AIPerf."""
    return LogFormat(
        looks_for="JSONL of AIPerf: metadata and metrics.input_sequence_length",
        recognises=lambda file: any(_is_record(row) for row in head_rows(file)),
        read=_read_by_time(_record_entries),
        ids=Ids.NONE,
        fields=("metadata", "metrics"),
        marks=(frozenset({"metadata", "metrics"}),),
    )


def _is_record(row: dict[str, Any]) -> bool:
    metrics = row.get("metrics")
    lengths = {"input_sequence_length", "error_isl"}
    return (
        isinstance(row.get("metadata"), dict)
        and isinstance(metrics, dict)
        and bool(lengths & metrics.keys())
    )


def _record_entries(row: Row, line: int, file: LogFile) -> Iterator[Entry]:
    if row.get("error") is not None:
        file.set_aside(FAILED)
        return
    if row.get("metadata.benchmark_phase") == "warmup":
        file.set_aside("requests of the warm-up")
        return
    tokens = row.count("metrics.input_sequence_length.value")
    output = row.count(
        "metrics.output_sequence_length.value", "metrics.output_token_count.value", default=0
    )
    start = row.seconds("metadata.request_start_ns", "metadata.timestamp_ns", scale=1e-9)
    first, whole = _metric(row, "time_to_first_token", "ttft"), _metric(row, "request_latency")
    last = row.seconds("metadata.request_end_ns", scale=1e-9)
    if last is None and start is not None and whole is not None:
        last = start + whole
    moments = Moments(
        first_token=np.nan if first is None or start is None else start + first,
        last_token=np.nan if last is None else last,
    )
    names = ("usage_prompt_tokens", "usage_prompt_cache_read_tokens")
    prompt, cached = (count_of(row.get(f"metrics.{name}"), "value") for name in names)
    usage = NOT_REPORTED if np.isnan(prompt) else inclusive(prompt, cached)
    yield replace(
        lengths_only(tokens, 0, start, output),
        line=line,
        moments=moments,
        usage=usage,
        session=row.label("metadata.x_correlation_id", "metadata.conversation_id"),
        record=record_of(row, "metadata.x_request_id"),
    )


def _metric(row: Row, *names: str) -> float | None:
    """Return a time of a record in seconds."""
    for name in names:
        if row.get(f"metrics.{name}.value") is not None:
            unit = row.get(f"metrics.{name}.unit")
            if unit is not None and unit not in _UNITS:
                raise BadFieldError(f"metrics.{name}.unit", f"ns, us, ms or s{actual(unit)}")
            return row.duration(f"metrics.{name}.value", scale=_UNITS.get(unit, 1e-3))
    return None


# ------------------------------------------------------------------------------
# Answers of servers with the interface of OpenAI or Anthropic, without their requests: output
# files of batches, and stored responses.
# ------------------------------------------------------------------------------

ANSWERS = (
    "the log has answers without their requests: their prompts are known by their length alone"
)
_OBJECTS = ("chat.completion", "text_completion", "response")


@LOG_FORMATS.register("openai_answers")
def openai_answers() -> LogFormat:
    """The output of a batch, or answers alone; one request per answer that reports its usage."""
    return LogFormat(
        looks_for="JSONL of answers: response.body, result.message or object, with usage, and without messages",
        recognises=lambda file: any(_answer_of(Row(row)) is not None for row in head_rows(file)),
        read=_read_by_time(_answer_entries),
        ids=Ids.NONE,
        fields=("custom_id", "response"),
    )


def _answer_of(row: Row) -> dict[str, Any] | None:
    """Return the answer in a line; None if there is none."""
    for value in (row.fields, row.get("response.body"), row.get("response")):
        if not isinstance(value, dict):
            continue
        counts_of_gemini = value.get("usageMetadata", value.get("usage_metadata"))
        if value.get("object") in _OBJECTS or isinstance(counts_of_gemini, dict):
            return value
    # a proxy keeps model, time and counts of a call without its prompt
    fields = row.fields
    has_model_and_time = "model" in fields and any(name in fields for name in TIMES)
    if has_model_and_time and "type" not in fields and isinstance(fields.get("usage"), dict):
        return fields
    message = row.get("result.message")
    return message if isinstance(message, dict) and message.get("type") == "message" else None


def _answer_entries(row: Row, line: int, file: LogFile) -> Iterator[Entry]:
    file.notes.append(ANSWERS)
    answer = _answer_of(row)
    if answer is None:
        response, result = row.get("response"), row.get("result.type")
        # of a batch
        if {"custom_id", "key"} & row.fields.keys() and response is None and result != "succeeded":
            file.set_aside(FAILED)
            return
        if response is not None:
            raise BadFieldError("response", f"an object with a body{actual(response)}")
        raise BadFieldError("object", f"{', '.join(_OBJECTS)}{actual(row.get('object'))}")
    reported = usage_in(answer)
    usage = counted(reported)
    if np.isnan(usage.prompt):
        file.set_aside(NO_LENGTH)
        return
    output = np.nan_to_num(output_in(reported))
    at = Row(answer).seconds(*TIMES, "createTime")
    model = Row(answer).label("model", "modelVersion", "model_version")
    yield replace(
        lengths_only(int(usage.prompt), 0, at, int(output)),
        line=line,
        usage=usage,
        session=row.label("session_id", "conversation_id"),
        tenant=row.label("tenant", "user"),
        identity=() if model is None else (("model", model),),
        record=record_of(row, "id", "response.request_id", "custom_id", "key", "responseId"),
    )
