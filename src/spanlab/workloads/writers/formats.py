"""Formats that workloads are written in, by name; each is registered by a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from spanlab.core.request import Request
from spanlab.registry import Registry

Line = dict[str, Any]
#: Requests in order of arrival, as one JSON object each, in which numpy arrays are lists.
Writer = Callable[[Iterable[Request]], Iterator[Line]]

#: A registered function returns the writer; its parameters are keys of `writer`.
WRITERS: Registry[Writer] = Registry("writer")
_FOLDER = __package__

for _name in ("mooncake", "guidellm", "openai"):
    WRITERS.later(_name, f"{_FOLDER}.{_name}")
