"""Lines of a log inside the lines of a collector: of containers, journals and clouds, or behind a
time.

Programs that write JSON lines to their output leave them in the log of a container or of a cloud.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from spanlab.workloads.logs.rows import TIMES, parse_json


@dataclass(frozen=True)
class _Wrapper:
    """A collector's line: the fields that it has, and those with the line inside it and with its
    time."""

    fields: frozenset[str]
    inner: str
    time: str


_WRAPPERS = (
    _Wrapper(frozenset({"log", "stream"}), "log", "time"),  # of Docker
    _Wrapper(
        frozenset({"MESSAGE", "__REALTIME_TIMESTAMP"}), "MESSAGE", "__REALTIME_TIMESTAMP"
    ),  # of journald
    _Wrapper(frozenset({"jsonPayload", "insertId"}), "jsonPayload", "timestamp"),  # of Google Cloud
    _Wrapper(frozenset({"textPayload", "insertId"}), "textPayload", "timestamp"),
    _Wrapper(frozenset({"message", "ingestionTime"}), "message", "timestamp"),  # of CloudWatch
    _Wrapper(frozenset({"@message", "@timestamp"}), "@message", "@timestamp"),
)
#: Fields of a request, which may get the collector's time; other lines without a time mean
#: something by that.
_OF_REQUESTS = frozenset({"messages", "prompt", "contents", "input", "request", "body"})
#: What `docker logs -t`, Kubernetes and exports of CloudWatch write in front of a line.
_PREFIX = re.compile(
    rb"\A\d{4}-\d\d-\d\d[T ][\d:.,]+(Z|[+-]\d\d:?\d\d)? +((stdout|stderr) [FP] )?(?=\{)"
)


def without_prefix(line: bytes) -> bytes:
    """Return a line of JSON without the time in front of it; any other line as it is."""
    prefix = _PREFIX.match(line)
    return line if prefix is None else line[prefix.end() :]


def unwrapped(row: dict[str, Any]) -> dict[str, Any]:
    """Return the object inside a collector's line, a request with its time if it has none; any
    other as it is."""
    for wrapper in _WRAPPERS:
        if wrapper.fields <= row.keys():
            inner = _object(row[wrapper.inner])
            if inner is None:
                continue
            is_untimed = _OF_REQUESTS & inner.keys() and all(
                inner.get(name) is None for name in TIMES
            )
            time = row.get(wrapper.time) if is_untimed else None
            return inner if time is None else {"timestamp": time, **inner}
    return row


def _object(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            value = parse_json(value)
        except orjson.JSONDecodeError:
            return None
    return value if isinstance(value, dict) else None
