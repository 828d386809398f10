"""Requests to servers with the interfaces of OpenAI or Anthropic: bodies of requests, one JSON
object per line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, compress, count
from typing import Any, NamedTuple

import numpy as np

from spanlab.workloads.logs.bodies import is_body
from spanlab.workloads.logs.log import Entry, Identity, Ids, block_lengths
from spanlab.workloads.logs.observed import NOT_REPORTED, UNKNOWN, Moments, Usage
from spanlab.workloads.logs.rendering import BodyReader
from spanlab.workloads.logs.repeated_lines import RepeatedLines
from spanlab.workloads.logs.rows import (
    OUTPUTS,
    TIMES,
    BadFieldError,
    Row,
    actual,
    has_server_tools,
    identity_of,
    moments_of,
    output_of_cloud,
    record_of,
    usage_in,
    usage_of,
)
from spanlab.workloads.logs.source import (
    FOLDER,
    LOG_FORMATS,
    LogFile,
    LogFormat,
    by_time,
    csv_rows,
    first_row,
    folder_has,
    has_header,
    has_row,
    head_rows,
    lengths_only,
    parse_object,
)
from spanlab.workloads.logs.spans import unpacked

#: Answers, of which a proxy keeps a stream as a text or a list of events.
_ANSWERS = ("response", "response.body", "full_response", "output", "response_body", "responseBody")
SERVER_TOOLS = (
    "requests whose prompt counts results of tools that the server ran (toolUsePromptTokenCount)"
)
FAILED_IN_BATCH = "requests of a batch that failed"
SUFFIXES = (".jsonl", ".json", ".ndjson", ".log")  # of the files of a folder
# prefixes of the request's fields in batch files and proxy logs
PREFIXES = (
    "",
    "body.",
    "params.",
    "request.",
    "request.body.",
    "modelInput.",
    "full_request.",
    "input.",
    "request_body.",
    "requestBody.",
)


@LOG_FORMATS.register("openai")
def openai() -> LogFormat:
    """One request per line, at the top level or inside `body` or `request`; or a folder of such
    files."""
    return LogFormat(
        looks_for="JSONL with messages, prompt, or model and input, or a folder of such files",
        recognises=lambda file: folder_has(file, _has_body, SUFFIXES),
        read=read_bodies,
        ids=Ids.CONTENT,
        fields=("messages",),
    )


_JSON: tuple[str, ...] = (
    "request",
    "response",
    "body",
    "full_request",
    "full_response",
    "input",
    "output",
)
_JSON += ("request_body", "response_body", "requestBody", "responseBody")


def with_json(row: Row) -> Row:
    """Return a row whose request and answer may be JSON inside texts, as tables export them."""
    texts = {
        name: unpacked(row.fields[name]) for name in _JSON if isinstance(row.fields.get(name), str)
    }
    if "input" in texts and not is_body(texts["input"]):  # of a request, JSON may be the prompt
        del texts["input"]
    return Row(row.fields | texts) if texts else row


def body_in(row: Row) -> tuple[str, Mapping[str, Any] | None]:
    """Return the prefix of the body's fields and the body; None if the line has none."""
    for prefix in PREFIXES:
        body = row.get(prefix[:-1]) if prefix else row.fields
        if is_body(body):
            return prefix, body
    return "", None


def _has_body(row: dict[str, Any]) -> bool:
    return body_in(with_json(Row(row)))[1] is not None


def read_bodies(file: LogFile) -> Iterator[Entry]:
    """Yield the requests of a file, or of a folder by time; each line has the body of a request."""
    if not file.content.file.is_dir():
        yield from _bodies(BodyReader(file), file)
        return
    file.notes.append(FOLDER)
    files = file.files(SUFFIXES)
    logs = [inner for inner in files if has_row(replace(inner), _has_body, in_folder=True)]
    file.set_aside("files of the folder without a body of a request", len(files) - len(logs))
    reader = BodyReader(file)
    for number, (_, entry) in enumerate(
        by_time(logs, lambda inner: _bodies(reader, inner), TIMES), 1
    ):
        entry.line = number
        yield entry


def _bodies(reader: BodyReader, file: LogFile) -> Iterator[Entry]:
    lines = RepeatedLines()

    def parse(item: Any, line: int) -> Entry | None:
        row = with_json(parse_object(item, lines.loads))
        if row.get("message_mode") == "delta":
            raise BadFieldError(
                "message_mode", "history, not delta: the new messages of a turn are not read"
            )
        prefix, body = body_in(row)
        if body is None:
            raise BadFieldError(
                "messages", "a list of messages, or prompt as text or token ids, and it is missing"
            )
        streamed = next(
            (each for each in map(row.get, _ANSWERS) if isinstance(each, (str, list))), None
        )
        if streamed is not None and (usage := usage_in(streamed)) is not None:
            row = Row(row.fields | {"usage": usage})
        usage = usage_of(row)
        if np.isnan(usage.prompt):
            # Vertex AI and Bedrock write failed requests of a batch beside the others
            status = row.get("status") if "processed_time" in row.fields else None
            if status or (row.get("modelInput") is not None and row.get("error") is not None):
                file.set_aside(FAILED_IN_BATCH)
                return None
        if has_server_tools(row):
            file.remark(SERVER_TOOLS)
        keys, lengths, opens, prompt = reader.pieces(body, is_line=not prefix, repeats=lines.shares)
        prefixes = [each for each in PREFIXES if not each or each.partition(".")[0] in row.fields]
        return Entry(
            keys,
            lengths,
            line,
            row.seconds(*TIMES),
            row.count(*OUTPUTS, "output_length", default=output_of_cloud(row)),
            row.label("session_id", "conversation_id", "body.session_id"),
            row.label("tenant", "tenant_id") or row.label(*(f"{each}user" for each in prefixes)),
            opens,
            moments=moments_of(row),
            usage=usage,
            identity=identity_of(row, *prefixes) or _model_of_answer(row),
            record=record_of(
                row,
                "request_id",
                "response.id",
                "id",
                "custom_id",
                "response.responseId",
                "recordId",
            ),
            prompt=prompt,
        )

    return file.parsed(parse)


def _model_of_answer(row: Row) -> Identity:
    """Return the model that answered a request to Gemini, whose body names none."""
    model = row.get("response.modelVersion", "response.model_version", "modelVersion")
    return (("model", model),) if isinstance(model, str) else ()


# ------------------------------------------------------------------------------
# TraceLab's table of agent sessions: the prefix that each round shares with the previous one,
# and new tokens.
# ------------------------------------------------------------------------------

HEADER = ("round_idx", "prefix_len", "input_len", "output_len")
ALONE = "sessions share nothing with each other, for the table says only what a round shares with the one before it"
NO_TIMES = "the table has no arrival times: rounds are taken in its order"
ROUND = ("session_id", "input_tokens_total", "prefix_tokens", "newly_append_tokens")
REPORTED = (
    "a round shares with the one before it what the provider found in its cache: a prefix that the provider had lost "
    "counts as new content, and prefixes that sessions have in common are not known"
)
BEYOND = "rounds whose cached prefix is longer than their session so far: the part beyond it counts as new"
WAITS = "a round follows the one before it after the wait for tools: how long an answer took, the table does not say"


@LOG_FORMATS.register("tracelab")
def tracelab() -> LogFormat:
    """One round per CSV row or JSON line: a prefix of the conversation so far, then new tokens."""
    return LogFormat(
        looks_for=f"CSV with the columns session_id or id, {', '.join(HEADER)}; or JSONL with {', '.join(ROUND)}",
        recognises=lambda file: has_header(file, HEADER) or _has_rounds(file),
        read=lambda file: (_rounds_of_lines if _has_rounds(file) else _tracelab_read_entries)(file),
        ids=Ids.CHAINED,
        fields=HEADER,
    )


@dataclass(frozen=True, slots=True)
class _Round:
    line: int
    session: str
    prefix_tokens: int
    new_tokens: int
    output: int
    arrived_s: float | None
    wait_s: float
    identity: Identity


def _round(row: Row, line: int) -> _Round:
    return _Round(
        line,
        str(row.get("session_id", "id")),
        row.count("prefix_len"),
        row.count("input_len"),
        row.count("output_len"),
        row.seconds("arrival_time", scale=1e-3),
        row.duration("tool_wait_after_ms", scale=1e-3) or 0.0,
        identity_of(row),
    )


def _tracelab_read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the rounds by time; contents are generated one round at a time, so only lengths are in
    memory."""
    rounds = list(csv_rows(_round, HEADER)(file))
    timed = any(item.arrived_s is not None for item in rounds)
    file.notes.extend((ALONE, WAITS if timed else NO_TIMES))
    sessions, fresh_keys = dict[str, _Conversation](), count()
    for time, round_ in (
        sorted(_timed(rounds), key=lambda both: both[0])
        if timed
        else ((None, round_) for round_ in rounds)
    ):
        session = sessions.setdefault(round_.session, _Conversation())
        if 0 < session.tokens < round_.prefix_tokens:
            file.refuse(
                round_.line,
                f"prefix_len: expected at most {session.tokens}, the tokens so far, not {round_.prefix_tokens}",
            )
            continue
        tokens = round_.prefix_tokens + round_.new_tokens
        try:
            file.check_length(tokens + round_.output, "input_len")
        except BadFieldError as error:
            file.refuse(round_.line, str(error))
            continue
        keys = session.extend(round_, file.piece, fresh_keys)[: -(-tokens // file.piece)]
        entry = Entry(
            np.array(keys, dtype=np.int64),
            block_lengths(tokens, file.piece),
            round_.line,
            time,
            round_.output,
        )
        yield replace(entry, session=round_.session, wait=session.wait_s, identity=round_.identity)
        session.wait_s = round_.wait_s


def _has_rounds(file: LogFile) -> bool:
    return any(set(ROUND) <= row.keys() for row in head_rows(file))


@dataclass(frozen=True, slots=True)
class _Line:
    """A round of the normalised trace: what the provider counted, and when its input and output
    were complete."""

    round_: _Round
    index: int
    usage: Usage
    end_s: float


_INPUTS, _OUTPUTS = ("user_message", "tool_result"), ("text", "reasoning", "tool_call")


def _line(row: Row, line: int) -> _Line:
    total, prefix = row.count("input_tokens_total"), row.count("prefix_tokens")
    if prefix > total:
        raise BadFieldError("prefix_tokens", f"at most input_tokens_total, {total}, not {prefix}")
    session, index = str(row.label("session_id")), row.count("round_index", default=0)
    sent, ended = (_latest(row, kinds) for kinds in (_INPUTS, _OUTPUTS))
    output = row.count("output_tokens", default=0)
    created = row.count("claude_cache_creation_input_tokens", default=-1)
    usage = Usage(float(total), float(prefix), np.nan if created < 0 else float(created))
    round_ = _Round(
        line,
        session,
        prefix,
        total - prefix,
        output,
        ended if sent is None else sent,
        0.0,
        identity_of(row),
    )
    return _Line(round_, index, usage, np.nan if ended is None else ended)


def _latest(row: Row, kinds: tuple[str, ...]) -> float | None:
    """Return the time of the last event of these kinds in a round."""
    events = row.get("timing_events")
    if events is not None and not (
        isinstance(events, list) and all(isinstance(event, dict) for event in events)
    ):
        raise BadFieldError("timing_events", f"a list of objects{actual(events)}")
    chosen = (
        Row(event).seconds("timestamp")
        for event in events or ()
        if event.get("event_type") in kinds
    )
    return max((time for time in chosen if time is not None), default=None)


def _rounds_of_lines(file: LogFile) -> Iterator[Entry]:
    """Yield the rounds by time; contents are generated one round at a time, so only counts are in
    memory."""
    lines, seen = list[_Line](), set[str]()
    for item in file.parsed(lambda item, number: _line(parse_object(item), number)):
        key = repr((replace(item.round_, line=0), item.index, item.end_s))
        if item.round_.arrived_s is not None and key in seen:
            file.set_aside("requests that repeat an earlier one")
            continue
        seen.add(key)
        lines.append(item)
    file.notes.append(REPORTED)
    is_timed = all(item.round_.arrived_s is not None for item in lines)
    if is_timed:
        lines.sort(key=lambda item: (item.round_.arrived_s, item.index))
    sessions, fresh_keys, ends = dict[str, _Conversation](), count(), dict[str, float]()
    for item in lines:
        round_, at = item.round_, item.round_.arrived_s if is_timed else None
        session = sessions.setdefault(round_.session, _Conversation())
        if 0 < session.tokens < round_.prefix_tokens:
            file.set_aside(BEYOND)
        tokens = round_.prefix_tokens + round_.new_tokens
        try:
            file.check_length(tokens + round_.output, "input_tokens_total")
        except BadFieldError as error:
            file.refuse(round_.line, str(error))
            continue
        keys = session.extend(round_, file.piece, fresh_keys)[: -(-tokens // file.piece)]
        before = ends.get(round_.session, np.nan)
        yield Entry(
            np.array(keys, dtype=np.int64),
            block_lengths(tokens, file.piece),
            round_.line,
            at,
            round_.output,
            round_.session,
            moments=Moments(last_token=item.end_s if is_timed else np.nan),
            wait=0.0 if at is None or np.isnan(before) else max(0.0, at - before),
            usage=item.usage,
            identity=round_.identity,
        )
        ends[round_.session] = item.end_s


def _timed(rounds: list[_Round]) -> Iterator[tuple[float, _Round]]:
    """Yield each round with its time: the session's start plus all earlier waits."""
    clock: dict[str, float] = {}
    for item in rounds:
        time = clock.get(item.session, item.arrived_s or 0.0)
        yield time, item
        clock[item.session] = time + item.wait_s


@dataclass
class _Conversation:
    """State of one session: pieces of prompt and output, length in tokens, and the wait after its
    last round."""

    pieces: list[int] = field(default_factory=list)
    tokens: int = 0
    wait_s: float = 0.0

    def extend(self, round_: _Round, size: int, fresh_keys: Iterator[int]) -> list[int]:
        """Append a round and return the pieces: the complete pieces of its prefix, and fresh
        ones."""
        self.tokens = round_.prefix_tokens + round_.new_tokens + round_.output
        shared = self.pieces[: round_.prefix_tokens // size]
        self.pieces = shared + [
            next(fresh_keys) for _ in range(-(-self.tokens // size) - len(shared))
        ]
        return self.pieces


# ------------------------------------------------------------------------------
# Results of vLLM benchmarks: lengths and times of requests, without prompt content.
# ------------------------------------------------------------------------------

INPUTS = ("input_toks", "input_len", "prompt_tokens", "prompt_len")
BENCH_OUTPUTS = ("output_toks", "output_len", "completion_tokens", "output_tokens")
FAILED = "failed requests"
BENCH_TIMES = ("arrival_time", "start_time", "queued_ts", "timestamp")


@LOG_FORMATS.register("vllm_bench")
def vllm_bench() -> LogFormat:
    """One request per line, or one benchmark result per line with lists of lengths and times."""
    return LogFormat(
        looks_for="JSONL with input_lens, output_lens and start_times, or with input_toks and arrival_time",
        recognises=_recognises,
        read=_vllm_bench_read_entries,
        ids=Ids.NONE,
        fields=("input_lens", "output_lens", "start_times"),
    )


def _recognises(file: LogFile) -> bool:
    row = Row(first_row(file))
    # as traces have, which hold more
    has_objects = any(isinstance(value, dict) for value in row.fields.values())
    is_request = (
        row.get(*INPUTS) is not None and row.get(*BENCH_TIMES) is not None and not has_objects
    )
    return is_request or isinstance(row.get("input_lens"), list)


def _vllm_bench_read_entries(file: LogFile) -> Iterator[Entry]:
    parsed = file.parsed(
        lambda item, line: [(line, request) for request in _requests(parse_object(item), file)]
    )
    for number, (line, request) in enumerate(chain.from_iterable(parsed), 1):
        entry = lengths_only(request.prompt, number, request.at, request.output)
        yield replace(entry, line=line, moments=request.moments, usage=request.usage)


class _Request(NamedTuple):
    """Lengths of a request, its arrival in seconds, and the times of its tokens."""

    prompt: int
    output: int
    at: float | None
    moments: Moments = UNKNOWN
    usage: Usage = NOT_REPORTED


def _requests(row: Row, file: LogFile) -> list[_Request]:
    """Return the requests of a line; failed ones are counted and left out."""
    if row.get("input_lens") is None:
        if row.get("error") or row.get("success") is False:
            file.set_aside(FAILED)
            return []
        lengths = row.count(*INPUTS), row.count(*BENCH_OUTPUTS, default=0)
        usage = usage_of(Row({"usage": {"prompt_tokens": lengths[0]} | row.fields}))
        return [_Request(*lengths, row.seconds(*BENCH_TIMES), _moments_of(row), usage)]
    inputs, outputs = row.counts("input_lens").tolist(), row.counts("output_lens").tolist()
    times = row.get("start_times")  # some may be null
    known = [time for time in times if time is not None] if isinstance(times, list) else times
    if known is not None:
        Row({"start_times": known}).numbers("start_times")
    absent: list[Any] = [None] * len(inputs)
    times = times or absent
    if not len(inputs) == len(outputs) == len(times):
        raise BadFieldError("input_lens", "as many as output_lens and start_times")
    errors, waits = (
        absent if row.get(name) is None else row.get(name) for name in ("errors", "ttfts")
    )
    for name, values in (("errors", errors), ("ttfts", waits)):
        if not isinstance(values, list) or len(values) != len(outputs):
            raise BadFieldError(name, "a list, as long as output_lens")
    # a failed request has an error's text, or no output and a first token at 0 s
    failed = [
        bool(error) or (wait == 0 and not output)
        for error, wait, output in zip(errors, waits, outputs, strict=True)
    ]
    moments = _moments_of_lists(row, times)
    file.set_aside(FAILED, sum(failed))
    requests = compress(
        map(_Request, inputs, outputs, times, moments), [not fails for fails in failed]
    )
    return sorted(requests, key=lambda request: request.at or 0.0)


def _moments_of_lists(row: Row, times: list[float | None]) -> list[Moments]:
    """Return the times of first and last tokens from lists of TTFT and ITL in seconds."""
    arrivals = [time for time in times if time is not None]
    if row.get("ttfts") is None or row.get("itls") is None or len(arrivals) < len(times):
        return [UNKNOWN] * len(times)
    waits, gaps = row.numbers("ttfts"), row.get("itls")
    if not isinstance(gaps, list) or not len(waits) == len(gaps) == len(times):
        raise BadFieldError("ttfts", "as many as itls and start_times")
    gaps = [Row({"itls": itl}).numbers("itls") for itl in gaps]
    at_server, queues = (
        _of_server(row, name, len(times)) for name in ("server_ttfts", "server_queue_times")
    )
    moments = []
    for arrived, wait, own_wait, queue, itl in zip(
        arrivals, waits, at_server, queues, gaps, strict=True
    ):
        if own_wait > wait:
            raise BadFieldError("server_ttfts", f"no more than ttfts, {wait:g}{actual(own_wait)}")
        first = arrived + wait
        # the time outside of the server counts as that of the way to it: the result does not divide
        # it
        moments.append(Moments(first - own_wait, first - own_wait + queue, first, first + sum(itl)))
    return moments


def _of_server(row: Row, name: str, count: int) -> list[float]:
    """Return the seconds that the server reported for each request, of vLLM 0.33; NaN where it
    reported none."""
    values = row.get(name) or [None] * count
    if not isinstance(values, list) or len(values) != count:
        raise BadFieldError(name, "a list, as long as ttfts")
    known = iter(Row({name: [value for value in values if value is not None]}).numbers(name))
    return [np.nan if value is None else next(known) for value in values]


def _moments_of(row: Row) -> Moments:
    """Return the times of a line with vLLM's field names."""
    stamps = [row.seconds(f"{name}_ts") for name in Moments._fields]
    times = Moments(*[np.nan if stamp is None else stamp for stamp in stamps])
    before = np.nan
    for name, time in zip(Moments._fields, times, strict=True):
        if time < before:
            raise BadFieldError(
                f"{name}_ts",
                f"a time no earlier than the one before it, {before:.17g}{actual(time)}",
            )
        before = before if np.isnan(time) else time
    return times
