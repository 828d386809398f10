"""A study on a running server: its endpoint, the schedule of requests, and the calls."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, quote_plus, urlsplit, urlunsplit

import httpx
import numpy as np
import orjson

from spanlab.core.request import Request
from spanlab.engine.settings import remap_tokens
from spanlab.judge import api_key
from spanlab.records import NS, ServedRecord, ServedRun
from spanlab.settings.server import NO_ENGINE
from spanlab.settings.study import Study
from spanlab.study.jobs import Backend, Job, RunLogs
from spanlab.study.logs import TokenGaps
from spanlab.study.servers.base import SERVERS, Launch, RunningServer, free_port, running
from spanlab.study.servers.steps import write_last_run
from spanlab.workloads.text import find_tokenizer
from spanlab.workloads.writers import Bodies
from spanlab_sim.server import Source

__all__ = ["SERVERS"]

# ------------------------------------------------------------------------------
# A run on a real OpenAI-compatible server with its own scheduler and cache; records hold
# client-side values.
# ------------------------------------------------------------------------------


class RemoteServer(Backend):
    """Sends requests to `base_url`, or to a server that it starts, at the times of their
    arrivals."""

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        self._server: RunningServer | None = None
        self._started = ExitStack()

    def run(
        self, job: Job, write: Callable[[ServedRecord], None]
    ) -> Generator[None, None, ServedRun]:
        """Replay one run, without pauses; ValueError where no request was answered, or where the
        server ended."""
        yield from ()
        server = self._start(job)
        base_url = str(self._study.server.base_url) if server is None else server.base_url

        # the gaps are those between response chunks
        with RunLogs(replace(job, serving=None), None) as logs:

            def finished(record: ServedRecord) -> None:
                logs.finished(record)
                write(record)

            source = Source(self.served(job.requests), job.clients, job.warmup)
            answers = Answers(job, source.early, finished)
            reset_path = self._study.server.reset_path or (
                None if server is None else server.kind.reset_path
            )
            asyncio.run(replay(self._study, base_url, reset_path, source, answers))
        if server is not None:
            server.check_alive()
        if not answers.served:
            number, first = next(iter(answers.failures.items()))
            failed = f"all {len(job.requests):,} requests failed; request {number}: {first}"
            raise ValueError(f"base_url={base_url}: expected answers, but {failed}")
        if job.serving is not None:
            answers.gaps.write(job.serving)
        # the file of the server's steps; None where it writes none
        if self._server is not None:
            steps = self._server.launch.steps if self._server.kind.logs_steps else None
        else:
            given = self._study.server.step_log
            steps = None if given is None else Path(given)
        if steps is not None:
            write_last_run(steps, job.steps)
        return answers.row()

    def _start(self, job: Job) -> RunningServer | None:
        """Return the running server for a job; None where it is the user's. One that takes the
        job's requests goes on.

        A server whose cache cannot be emptied is started again.
        """
        settings = self._study.server
        if settings.engine == NO_ENGINE:
            return None
        longest = job.max_tokens + max(request.output_len for request in job.requests)
        server = self._server
        if server is None or server.kind.reset_path is None or server.launch.longest < longest:
            self.close()
            names = ("server" if number == 1 else f"server_{number}" for number in count(1))
            folder = next(
                path for name in names if not (path := job.steps.parent.parent / name).exists()
            )
            launch = Launch(self._study, folder, free_port(settings.port), longest)
            self._server = self._started.enter_context(running(launch))
        return self._server

    def close(self) -> None:
        """End the server that it started."""
        self._server = None
        self._started.close()

    def served(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests with token ids of the model's vocabulary."""
        return remap_tokens(requests, self._study.model.vocab_size)


@dataclass
class Answers:
    """Answers and failures of the requests of one run.

    `uncounted`  ids of the warm-up requests; it grows as they arrive
    """

    job: Job
    uncounted: Collection[int]
    write: Callable[[ServedRecord], None]
    served: int = 0
    other_lengths: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    gaps: TokenGaps = field(default_factory=TokenGaps)
    _late_ns: list[int] = field(default_factory=list)
    _end_ns: int = 0
    _began_ns: int = 0

    def answered(self, sent: SentRequest, answer: Answer) -> None:
        """Write the record of a request."""
        times = [time_ns - sent.began_ns for time_ns in answer.chunks_ns]
        counted = sent.request.id not in self.uncounted
        self.served += 1
        self.other_lengths += answer.output_tokens != sent.request.output_len
        self._late_ns.append(answer.sent_ns - sent.began_ns - sent.request.arrived_at)
        self._end_ns = max(self._end_ns, times[-1])
        self._began_ns = sent.began_ns  # one for all requests of a run
        if counted:
            self.gaps.extend(np.diff(times))
        self.write(
            ServedRecord(
                seed=self.job.seed,
                rate_rps=self.job.rate_rps,
                request_id=sent.request.id,
                group_id=sent.request.group_id,
                counted=counted,
                arrived_s=sent.request.arrived_at * NS,
                first_token_s=times[0] * NS,
                finished_s=times[-1] * NS,
                prompt_tokens=answer.prompt_tokens,
                output_tokens=answer.output_tokens,
                reused_tokens=answer.cached_tokens,
                sent_s=(answer.sent_ns - sent.began_ns) * NS,
            )
        )

    def failed(self, sent: SentRequest, reason: str) -> None:
        """Record the failure of a request."""
        self.failures[str(sent.request.id)] = reason

    def row(self) -> ServedRun:
        """Return the row of the finished run."""
        return ServedRun(
            seed=self.job.seed,
            rate_rps=self.job.rate_rps,
            requests=self.served,
            makespan_s=self._end_ns * NS,
            late_mean_s=float(np.mean(self._late_ns)) * NS,
            late_max_s=max(self._late_ns) * NS,
            failures=self.failures,
            other_lengths=self.other_lengths,
            began_s=self._began_ns * NS,
        )


# ------------------------------------------------------------------------------
# Calls of an OpenAI-compatible server: streamed chunks with their times, and the token counts
# of the server.
# ------------------------------------------------------------------------------

_MAX_ERROR_LENGTH = 160  # characters of the error text of a server
_DATA, _DONE = b"data:", b"[DONE]"
_LARGEST_LINE = 1 << 22  # bytes; a line is one chunk of output, possibly with log-probabilities
_LARGEST_REPLY = 1 << 22  # bytes of a reply that is no stream
_LARGEST_STREAM = 1 << 28
_MOST_TOKENS = 1 << 31
_SPARE_CHUNKS = 16  # chunks of one stream without a token: roles, finish reasons


class FailedRequestError(Exception):
    """A request without a complete answer; the message is a short reason, printable and without the
    key."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    `sent_ns`        time at which the request was sent
    `chunks_ns`      arrival time of each chunk with output; a chunk may have several tokens
    `prompt_tokens`, `output_tokens`  token counts of the server
    `cached_tokens`  prompt tokens that the server did not compute; None if the server does not
                     report them
    Times are of `time.perf_counter_ns`.
    """

    sent_ns: int
    chunks_ns: list[int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


def versioned(base_url: str) -> str:
    """The address, with the path /v1 if it has no path."""
    parts = urlsplit(base_url.rstrip("/"))
    return urlunsplit(parts if parts.path else parts._replace(path="/v1"))


@dataclass(frozen=True)
class Patience:
    """Limits of the wait for a reply, seconds.

    `silence_s`  longest time without data
    `request_s`  longest time from sending a request to the end of its answer
    """

    silence_s: float
    request_s: float


class Endpoint:
    """A server; `base_url` is the address before /completions, or the host only.

    `key`  bearer token; empty: none
    """

    def __init__(self, base_url: str, key: str, patience: Patience) -> None:
        self.base_url = versioned(base_url)
        self._public = PublicText(key)
        self._request_s = patience.request_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(
            headers=headers
            | {"Accept-Encoding": "identity"},  # a small compressed reply may be a huge one
            timeout=httpx.Timeout(patience.silence_s),
            limits=limits,
        )

    async def __aenter__(self) -> Endpoint:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(*error)

    async def models(self) -> list[str]:
        """Names of the models of the server."""
        reply = await self._call("GET", f"{self.base_url}/models")
        try:
            return [self._public(model["id"]) for model in orjson.loads(reply)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise self._failed(
                f"the reply is no list of models: {reply.decode(errors='replace')}"
            ) from error

    async def post(self, path: str) -> None:
        """Post to a path of the host without a body: /reset_prefix_cache, /flush_cache."""
        await self._call("POST", self._of_host(path))

    async def get(self, path: str) -> bytes:
        """Return the reply of a path of the host: /metrics."""
        return await self._call("GET", self._of_host(path))

    async def complete(self, call: str, body: bytes) -> bytes:
        """Send one call that is not streamed, and return the reply."""
        return await self._call("POST", f"{self.base_url}/{call}", body)

    def _of_host(self, path: str) -> str:
        return str(httpx.URL(self.base_url).copy_with(raw_path=path.encode()))

    async def stream(self, call: str, body: bytes, tokens: int, name: str) -> Answer:
        """Send one streamed call for at most `tokens` tokens; FailedRequestError without a complete
        answer.

        `name`  identifies the request in logs of the server
        """
        answer = _Stream(time.perf_counter_ns(), tokens)
        try:
            headers = {"X-Request-Id": name}
            opened = self._open("POST", f"{self.base_url}/{call}", body, headers)
            async with asyncio.timeout(self._request_s), opened as reply:
                if reply.status_code != httpx.codes.OK:
                    raise FailedRequestError(_status(reply.status_code, await _read(reply)))
                async for line in _lines(reply):
                    answer.add(line)
            return answer.end()
        except (httpx.HTTPError, FailedRequestError, TimeoutError) as error:
            raise self._failed(self._reason(error)) from error

    def _open(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        kind = {} if body is None else {"Content-Type": "application/json"}
        return self._client.stream(method, url, content=body, headers={**kind, **headers})

    async def _call(self, method: str, url: str, body: bytes | None = None) -> bytes:
        """Send a call and return the reply."""
        try:
            async with asyncio.timeout(self._request_s), self._open(method, url, body) as reply:
                content = await _read(reply)
                if not reply.is_success:
                    raise FailedRequestError(_status(reply.status_code, content))
                return content
        except (httpx.HTTPError, FailedRequestError, TimeoutError) as error:
            raise self._failed(self._reason(error)) from error

    def _failed(self, reason: str) -> FailedRequestError:
        return FailedRequestError(self._public(reason, _MAX_ERROR_LENGTH))

    def _reason(self, error: Exception) -> str:
        if isinstance(error, httpx.TimeoutException):
            return f"no reply in time ({type(error).__name__})"
        if isinstance(error, TimeoutError):
            return f"no end within {self._request_s:g} s"
        if isinstance(error, httpx.HTTPError):
            return f"no connection ({error or type(error).__name__})"
        return str(error)


class PublicText:
    """Makes a server's text fit for files and terminals: without the key, in printable characters,
    on one line."""

    def __init__(self, key: str) -> None:
        spellings = {
            key,
            quote(key, safe=""),
            quote_plus(key),
            html.escape(key),
            orjson.dumps(key).decode()[1:-1],
        }
        pattern = "|".join(re.escape(each) for each in sorted(spellings, key=len, reverse=True))
        self._key = re.compile(pattern, re.IGNORECASE) if key else None

    def __call__(self, text: object, length: int | None = None) -> str:
        """Return the text of an object, at most `length` characters of it."""
        hidden = str(text) if self._key is None else self._key.sub("***", str(text))
        line = " ".join(hidden.split())
        return "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in line[:length]
        )


async def _read(reply: httpx.Response) -> bytes:
    """Return the body of a reply."""
    content = bytearray()
    async for data in _raw(reply, _LARGEST_REPLY):
        content += data
    return bytes(content)


async def _raw(reply: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """Yield the body in pieces, at most `most` bytes of it."""
    if (encoding := reply.headers.get("Content-Encoding", "identity")) != "identity":
        raise FailedRequestError(
            f"the reply has Content-Encoding {encoding}, which was not asked for"
        )
    received = 0
    async for data in reply.aiter_raw():
        received += len(data)
        if received > most:
            raise FailedRequestError(f"the reply is longer than {most:,} bytes")
        yield data


async def _lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the complete lines of an event stream."""
    rest = bytearray()
    async for data in _raw(reply, _LARGEST_STREAM):
        *lines, last = data.split(b"\n")
        for line in lines:
            yield bytes(rest + line)
            rest.clear()
        rest += last
        if len(rest) > _LARGEST_LINE:
            raise FailedRequestError(f"the stream has a line of more than {_LARGEST_LINE:,} bytes")
    yield bytes(rest)


@dataclass
class _Stream:
    """The part of an answer that has arrived."""

    sent_ns: int
    tokens: int
    chunks_ns: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, line: bytes) -> None:
        """Add one line: an output, or the token counts at the end."""
        now, data = time.perf_counter_ns(), line.removeprefix(_DATA).strip()
        if not line.startswith(_DATA) or data == _DONE:
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise FailedRequestError(
                f"the stream holds no JSON: {data.decode(errors='replace')}"
            ) from error
        if not isinstance(event, dict):
            raise FailedRequestError(
                f"the stream holds no JSON object: {data.decode(errors='replace')}"
            )
        if event.get("error"):
            raise FailedRequestError(f"the server ended the stream: {_message(event['error'])}")
        if event.get("choices"):
            self.chunks_ns.append(now)
        if len(self.chunks_ns) > self.tokens + _SPARE_CHUNKS:
            raise FailedRequestError(
                f"the stream goes on after {len(self.chunks_ns):,} chunks for {self.tokens:,} tokens"
            )
        if isinstance(event.get("usage"), dict):
            self.usage.update(event["usage"])

    def end(self) -> Answer:
        """Return the complete answer."""
        if not self.chunks_ns:
            raise FailedRequestError("the stream ended without output")
        if not self.usage:
            raise FailedRequestError(
                "the stream has no usage, which stream_options.include_usage asks for"
            )
        details = self.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else details
        prompt = _count("prompt_tokens", self.usage.get("prompt_tokens"), 1, _MOST_TOKENS)
        output = _count("completion_tokens", self.usage.get("completion_tokens"), 0, _MOST_TOKENS)
        known = None if cached is None else _count("cached_tokens", cached, 0, prompt)
        return Answer(self.sent_ns, self.chunks_ns, prompt, output, known)


def _count(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:  # true and false are integers too
        raise FailedRequestError(
            f"its usage has {name} {value!r}, expected a whole number from {least} to {most}"
        )
    return value


def _status(code: int, reply: bytes) -> str:
    try:
        message = orjson.loads(reply)
    except orjson.JSONDecodeError:
        return f"HTTP {code}: {reply.decode(errors='replace')}"
    if isinstance(message, dict):
        message = message.get("error", message.get("message", message))
    return f"HTTP {code}: {_message(message)}"


def _message(error: Any) -> Any:
    return error["message"] if isinstance(error, dict) and "message" in error else error


# ------------------------------------------------------------------------------
# Open-loop sending of requests at their arrival times, also of requests that wait for others or
# for a client.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request that was sent; its `arrived_at` is the scheduled time, nanoseconds since the start
    of the run.

    `began_ns`  start of the run, by `time.perf_counter_ns`, the monotonic clock of the machine
    """

    request: Request
    began_ns: int


@dataclass(frozen=True)
class Calls:
    """The API call of a request, and the callbacks for its result.

    `call`  path after the address of the endpoint
    `body`  builds the body of a request
    """

    endpoint: Endpoint
    call: str
    body: Callable[[Request], bytes]
    on_answer: Callable[[SentRequest, Answer], None]
    on_failure: Callable[[SentRequest, str], None]


@dataclass
class Replay:
    """Replay of the requests of a source at their arrival times.

    Connections are not limited, so that requests queue in the server only. A request that waits for
    a client or for an earlier turn of its session arrives when the source releases it.
    """

    calls: Calls
    source: Source
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _in_flight: int = 0
    _began_ns: int = 0
    _released_ns: int = 0  # time at which the end of a request last released a waiting one

    async def run(self) -> None:
        """Send all requests and wait until all have ended."""
        self._began_ns = time.perf_counter_ns()
        try:
            async with asyncio.TaskGroup() as tasks:
                while (request := await self._next()) is not None:
                    tasks.create_task(self._send(SentRequest(request, self._began_ns)))
                    self._in_flight += 1
                    await asyncio.sleep(0)  # so that the task starts
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _next(self) -> Request | None:
        """Wait until the next request is due and return it; None after the last one."""
        while (due := self.source.next_at) is not None or self._in_flight:
            if due is not None and due <= self._now():
                return self.source.take(max(due, self._released_ns))
            await self._wait(due)
        return None

    async def _wait(self, due: int | None) -> None:
        """Wait until `due`, or until a request ends, which may release an earlier request."""
        self._ended.clear()
        timeout = None if due is None else (due - self._now()) * 1e-9
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout)

    async def _send(self, sent: SentRequest) -> None:
        try:
            body = self.calls.body(sent.request)
            name = str(sent.request.id)
            answer = await self.calls.endpoint.stream(
                self.calls.call, body, sent.request.output_len, name
            )
        except FailedRequestError as failure:
            self.calls.on_failure(sent, str(failure))
        else:
            self.calls.on_answer(sent, answer)
        finally:
            now, was_blocked = self._now(), self.source.next_at is None
            self.source.finished(sent.request, now)
            self._in_flight -= 1
            if was_blocked:
                self._released_ns = now
            self._ended.set()

    def _now(self) -> int:
        return time.perf_counter_ns() - self._began_ns


# ------------------------------------------------------------------------------
# HTTP calls of one run on a real server.
# ------------------------------------------------------------------------------

_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


async def replay(
    study: Study, base_url: str, reset_path: str | None, source: Source, answers: Answers
) -> None:
    """Send all requests of a source to a server."""
    settings = study.server
    key = api_key("server.api_key_variable", settings.api_key_variable)
    patience = Patience(settings.timeout_s, settings.request_timeout_s)
    async with Endpoint(base_url, key, patience) as endpoint:
        bodies = await _bodies(study, endpoint, base_url)
        if reset_path is not None:
            await reset(endpoint, reset_path)
        calls = Calls(
            endpoint,
            bodies.call,
            lambda request: orjson.dumps(
                bodies.body(request) | _STREAMED, option=orjson.OPT_SERIALIZE_NUMPY
            ),
            answers.answered,
            answers.failed,
        )
        await Replay(calls, source).run()


async def _bodies(study: Study, endpoint: Endpoint, base_url: str) -> Bodies:
    settings = study.server
    tokenizer = None if settings.tokenizer is None else find_tokenizer(settings.tokenizer).tokenizer
    model = settings.served_model or await only_model(endpoint, base_url)
    return Bodies(model, settings.prompts, tokenizer, settings.exact_lengths)


async def only_model(endpoint: Endpoint, base_url: str) -> str:
    """Name of the only model of a server; ValueError where it lists none or several, or gives no
    such list."""
    try:
        models = await endpoint.models()
    except FailedRequestError as failure:
        expected = (
            f"an OpenAI-compatible server, which lists its models at {endpoint.base_url}/models"
        )
        raise ValueError(f"base_url={base_url}: expected {expected}: {failure}") from failure
    if len(models) != 1:
        names = (
            f"one of {', '.join(models)}" if models else "a name, because the server lists no model"
        )
        raise ValueError(f"server.served_model=null: expected {names}")
    return models[0]


async def reset(endpoint: Endpoint, path: str) -> None:
    """Empty the cache of a server; ValueError where the path does not do so."""
    try:
        await endpoint.post(path)
    except FailedRequestError as failure:
        raise ValueError(
            f"server.reset_path={path}: expected a path that empties the cache: {failure}"
        ) from failure
