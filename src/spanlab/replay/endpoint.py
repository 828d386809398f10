"""Calls of an OpenAI-compatible server: streamed chunks with their times, and the token counts of the server."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus, urlsplit, urlunsplit

import httpx
import orjson

_MAX_ERROR_LENGTH = 160  # characters of the error text of a server
_DATA, _DONE = b"data:", b"[DONE]"
_LARGEST_LINE = 1 << 22  # bytes; a line is one chunk of output, possibly with log-probabilities
_LARGEST_REPLY = 1 << 22  # bytes of a reply that is no stream
_LARGEST_STREAM = 1 << 28
_MOST_TOKENS = 1 << 31
_SPARE_CHUNKS = 16  # chunks of one stream without a token: roles, finish reasons


class FailedRequestError(Exception):
    """A request without a complete answer; the message is a short reason, printable and without the key."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    `sent_ns`        time at which the request was sent
    `chunks_ns`      arrival time of each chunk with output; a chunk may have several tokens
    `prompt_tokens`, `output_tokens`  token counts of the server
    `cached_tokens`  prompt tokens that the server did not compute; None if the server does not report them
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
            headers=headers | {"Accept-Encoding": "identity"},  # a small compressed reply may be a huge one
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
            raise self._failed(f"the reply is no list of models: {reply.decode(errors='replace')}") from error

    async def post(self, path: str) -> None:
        """Post to a path of the host without a body: /reset_prefix_cache, /flush_cache."""
        await self._call("POST", str(httpx.URL(self.base_url).copy_with(raw_path=path.encode())))

    async def stream(self, call: str, body: bytes, tokens: int) -> Answer:
        """Send one streamed call for at most `tokens` tokens; FailedRequestError without a complete answer."""
        answer = _Stream(time.perf_counter_ns(), tokens)
        try:
            async with asyncio.timeout(self._request_s), self._open(call, body) as reply:
                if reply.status_code != httpx.codes.OK:
                    raise FailedRequestError(_status(reply.status_code, await _read(reply)))
                async for line in _lines(reply):
                    answer.add(line)
            return answer.end()
        except (httpx.HTTPError, FailedRequestError, TimeoutError) as error:
            raise self._failed(self._reason(error)) from error

    def _open(self, call: str, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        return self._client.stream("POST", f"{self.base_url}/{call}", content=body, headers=headers)

    async def _call(self, method: str, url: str) -> bytes:
        """Send a call without a body and return the reply."""
        try:
            async with asyncio.timeout(self._request_s), self._client.stream(method, url) as reply:
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
    """Makes a server's text fit for files and terminals: without the key, in printable characters, on one line."""

    def __init__(self, key: str) -> None:
        spellings = {key, quote(key, safe=""), quote_plus(key), html.escape(key), orjson.dumps(key).decode()[1:-1]}
        pattern = "|".join(re.escape(each) for each in sorted(spellings, key=len, reverse=True))
        self._key = re.compile(pattern, re.IGNORECASE) if key else None

    def __call__(self, text: object, length: int | None = None) -> str:
        """Return the text of an object, at most `length` characters of it."""
        hidden = str(text) if self._key is None else self._key.sub("***", str(text))
        line = " ".join(hidden.split())
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line[:length])


async def _read(reply: httpx.Response) -> bytes:
    """Return the body of a reply."""
    content = bytearray()
    async for data in _raw(reply, _LARGEST_REPLY):
        content += data
    return bytes(content)


async def _raw(reply: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """Yield the body in pieces, at most `most` bytes of it."""
    if (encoding := reply.headers.get("Content-Encoding", "identity")) != "identity":
        raise FailedRequestError(f"the reply has Content-Encoding {encoding}, which was not asked for")
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
            raise FailedRequestError(f"the stream holds no JSON: {data.decode(errors='replace')}") from error
        if not isinstance(event, dict):
            raise FailedRequestError(f"the stream holds no JSON object: {data.decode(errors='replace')}")
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
            raise FailedRequestError("the stream has no usage, which stream_options.include_usage asks for")
        details = self.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else details
        prompt = _count("prompt_tokens", self.usage.get("prompt_tokens"), 1, _MOST_TOKENS)
        output = _count("completion_tokens", self.usage.get("completion_tokens"), 0, _MOST_TOKENS)
        known = None if cached is None else _count("cached_tokens", cached, 0, prompt)
        return Answer(self.sent_ns, self.chunks_ns, prompt, output, known)


def _count(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:  # true and false are integers too
        raise FailedRequestError(f"its usage has {name} {value!r}, expected a whole number from {least} to {most}")
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
