"""Registry of output formats of workloads; each format is registered by its module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from spanlab.core.request import Request
from spanlab.registry import Registry

Line = dict[str, Any]
#: Converts requests in order of arrival to one JSON object each, in which numpy arrays are lists.
Writer = Callable[[Iterable[Request]], Iterator[Line]]

#: A registered function returns the writer; its parameters are keys of `writer`.
WRITERS: Registry[Writer] = Registry("writer")

WRITERS.later("mooncake", "spanlab.workloads.writers.mooncake")
WRITERS.later("guidellm", "spanlab.workloads.writers.guidellm")
WRITERS.later("openai", "spanlab.workloads.writers.openai")
