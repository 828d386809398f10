"""Calls of an OpenAI-compatible server: streamed chunks with their times, and the token counts of the server."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import orjson

_MAX_ERROR_LENGTH = 160  # characters of the error text of a server
_DATA, _DONE = "data:", "[DONE]"


class FailedRequestError(Exception):
    """A request without a complete answer; the message is a short reason."""


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


class Endpoint:
    """A server; `base_url` is the address before /completions, or the host only.

    `key`        bearer token; empty: none
    `timeout_s`  longest time without data, seconds
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
        """Names of the models of the server."""
        try:
            reply = await self._client.get(f"{self.base_url}/models")
            reply.raise_for_status()
            return [str(model["id"]) for model in reply.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise FailedRequestError(_reason(error)) from error

    async def post(self, path: str) -> None:
        """Post to a path of the host without a body: /reset_prefix_cache, /flush_cache."""
        try:
            reply = await self._client.post(httpx.URL(self.base_url).join(path))
            reply.raise_for_status()
        except httpx.HTTPError as error:
            raise FailedRequestError(_reason(error)) from error

    async def stream(self, call: str, body: bytes) -> Answer:
        """Send one streamed call; FailedRequestError without a complete answer."""
        sent, chunks, usage = time.perf_counter_ns(), list[int](), dict[str, Any]()
        headers = {"Content-Type": "application/json"}
        try:
            async with self._client.stream("POST", f"{self.base_url}/{call}", content=body, headers=headers) as reply:
                if reply.status_code != httpx.codes.OK:
                    raise FailedRequestError(_status(reply.status_code, await reply.aread()))
                async for line in reply.aiter_lines():
                    _parse_line(line, chunks, usage)
        except httpx.HTTPError as error:
            raise FailedRequestError(_reason(error)) from error
        return _answer(sent, chunks, usage)


def _parse_line(line: str, chunks: list[int], usage: dict[str, Any]) -> None:
    """Add one line of an event stream to `chunks` (time of an output) or to `usage` (token counts at the end)."""
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
        message = orjson.loads(reply)
        message = message.get("error", message.get("message", message)) if isinstance(message, dict) else message
    except orjson.JSONDecodeError:
        message = reply.decode(errors="replace")
    return f"HTTP {code}: {_short(message)}"


def _short(message: object) -> str:
    text = message["message"] if isinstance(message, dict) and "message" in message else message
    return " ".join(str(text).split())[:_MAX_ERROR_LENGTH]


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return _status(error.response.status_code, error.response.content)
    if isinstance(error, httpx.TimeoutException):
        return f"no reply in time ({type(error).__name__})"
    return f"no connection ({_short(error) or type(error).__name__})"
