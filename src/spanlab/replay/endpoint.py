"""Calls of an OpenAI-compatible server: a stream of chunks with the time of each, and what the server counted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import orjson

_SHOWN = 160  # characters of what a server says about an error
_DATA, _DONE = "data:", "[DONE]"


class FailedRequestError(Exception):
    """A request that has no whole answer; says why in a few words."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    `sent_ns`        when the request was sent
    `chunks_ns`      when each chunk with output arrived; a chunk may hold several tokens
    `prompt_tokens`, `output_tokens`  as the server counts them
    `cached_tokens`  prompt tokens that the server did not compute; None where it does not say
    Times are of `time.perf_counter_ns`.
    """

    sent_ns: int
    chunks_ns: list[int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


def versioned(base_url: str) -> str:
    """An address without a path stands for its /v1."""
    parts = urlsplit(base_url.rstrip("/"))
    return urlunsplit(parts if parts.path else parts._replace(path="/v1"))


class Endpoint:
    """A server; `base_url` is what stands before /completions, or its host alone.

    `key`        sent as a bearer token; empty: none
    `timeout_s`  longest silence, seconds
    """

    def __init__(self, base_url: str, key: str, timeout_s: float) -> None:
        self.base_url = versioned(base_url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(timeout_s), limits=limits)

    async def __aenter__(self) -> Endpoint:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(*error)

    async def models(self) -> list[str]:
        """Names of the models that the server has."""
        try:
            reply = await self._client.get(f"{self.base_url}/models")
            reply.raise_for_status()
            return [str(model["id"]) for model in reply.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise FailedRequestError(_words(error)) from error

    async def post(self, path: str) -> None:
        """Call a path of the host without a body: /reset_prefix_cache, /flush_cache."""
        try:
            reply = await self._client.post(httpx.URL(self.base_url).join(path))
            reply.raise_for_status()
        except httpx.HTTPError as error:
            raise FailedRequestError(_words(error)) from error

    async def ask(self, call: str, body: bytes) -> Answer:
        """One streamed call; FailedRequestError where no whole answer comes."""
        sent, chunks, usage = time.perf_counter_ns(), list[int](), dict[str, Any]()
        headers = {"Content-Type": "application/json"}
        try:
            async with self._client.stream("POST", f"{self.base_url}/{call}", content=body, headers=headers) as reply:
                if reply.status_code != httpx.codes.OK:
                    raise FailedRequestError(_status(reply.status_code, await reply.aread()))
                async for line in reply.aiter_lines():
                    _read(line, chunks, usage)
        except httpx.HTTPError as error:
            raise FailedRequestError(_words(error)) from error
        return _answer(sent, chunks, usage)


def _read(line: str, chunks: list[int], usage: dict[str, Any]) -> None:
    """Take one line of an event stream in: the time of output, or the counts at its end."""
    now, data = time.perf_counter_ns(), line.removeprefix(_DATA).strip()
    if not line.startswith(_DATA) or data == _DONE:
        return
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FailedRequestError(f"the stream holds no JSON: {_short(data)}") from error
    if not isinstance(event, dict):
        raise FailedRequestError(f"the stream holds no JSON object: {_short(data)}")
    if event.get("error"):
        raise FailedRequestError(f"the server ended the stream: {_short(event['error'])}")
    if event.get("choices"):
        chunks.append(now)
    if isinstance(event.get("usage"), dict):
        usage.update(event["usage"])


def _answer(sent: int, chunks: list[int], usage: dict[str, Any]) -> Answer:
    if not chunks:
        raise FailedRequestError("the stream ended without output")
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(output, int):
        raise FailedRequestError("the stream has no usage, which stream_options.include_usage asks for")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Answer(sent, chunks, prompt, output, cached if isinstance(cached, int) else None)


def _status(code: int, reply: bytes) -> str:
    try:
        said = orjson.loads(reply)
        said = said.get("error", said.get("message", said)) if isinstance(said, dict) else said
    except orjson.JSONDecodeError:
        said = reply.decode(errors="replace")
    return f"HTTP {code}: {_short(said)}"


def _short(said: object) -> str:
    text = said["message"] if isinstance(said, dict) and "message" in said else said
    return " ".join(str(text).split())[:_SHOWN]


def _words(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return _status(error.response.status_code, error.response.content)
    if isinstance(error, httpx.TimeoutException):
        return f"no reply in time ({type(error).__name__})"
    return f"no connection ({_short(error) or type(error).__name__})"
