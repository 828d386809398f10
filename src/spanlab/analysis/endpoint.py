"""Chat requests to an OpenAI-compatible endpoint, with the standard library only, and checks of address and key."""

from __future__ import annotations

import json
import os
from http import HTTPStatus
from http.client import HTTPException, HTTPMessage
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

_LARGEST_REPLY = 1 << 22  # bytes


class UnansweredError(Exception):
    """The endpoint gave no usable reply; the message is a short reason without key, body or reply."""


class _NoRedirect(HTTPRedirectHandler):
    """Handler that treats a redirect as an error, since it would send the key to another host."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def post_chat(base_url: str, body: dict[str, object], key: str, timeout_s: float) -> str:
    """POST {base_url}/chat/completions and return the first choice's text, or raise `UnansweredError`.

    `timeout_s` is the longest silence, in seconds; an empty `key` sends no Authorization header.
    """
    request = Request(f"{base_url.rstrip('/')}/chat/completions", json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        return _content(_read_reply(request, timeout_s))
    except HTTPError as error:
        raise UnansweredError(f"the endpoint answered {_status(error.code)}") from None
    except TimeoutError:
        raise UnansweredError(f"no reply within {timeout_s:g} s") from None
    except URLError as error:
        late = isinstance(error.reason, TimeoutError)
        raise UnansweredError(
            f"no reply within {timeout_s:g} s" if late else f"no connection ({error.reason})"
        ) from None
    except (OSError, HTTPException) as error:
        raise UnansweredError(f"the connection broke ({type(error).__name__})") from None


def _read_reply(request: Request, timeout_s: float) -> bytes:
    with build_opener(_NoRedirect).open(request, timeout=timeout_s) as response:
        reply: bytes = response.read(_LARGEST_REPLY + 1)
    if len(reply) > _LARGEST_REPLY:
        raise UnansweredError(f"the reply is larger than {_LARGEST_REPLY} bytes")
    return reply


def _content(reply: bytes) -> str:
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise UnansweredError("the reply is not a chat completion") from None
    if not isinstance(content, str):
        raise UnansweredError("the reply is not a chat completion")
    return content


def _status(code: int) -> str:
    phrases = {status.value: status.phrase for status in HTTPStatus}
    return f"HTTP {code} {phrases.get(code, '')}".strip()


def check_address(name: str, base_url: str) -> None:
    """Raise ValueError unless `base_url` is an http address without a password; `name` is the settings key."""
    if set("@?#") & set(base_url):  # the value may contain a password, so it is not repeated
        raise ValueError(f"{name} holds one of @ ? #: expected an address alone, the key in an environment variable")
    try:
        parts = urlsplit(base_url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        sound = False
    if not sound or not base_url.isascii() or not base_url.isprintable() or " " in base_url:
        raise ValueError(f"{name}={base_url}: expected http://HOST or https://HOST, with port and path if needed")


def api_key(name: str, variable: str) -> str:
    """Return the key in an environment variable, empty without a variable; no message contains it."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not (key and key.isascii() and key.isprintable()):
        raise ValueError(f"{name}={variable}: expected an environment variable that holds a key")
    return key
