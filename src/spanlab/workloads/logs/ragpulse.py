"""RAGPulse trace: content ids of prompt components, with tables of their lengths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from spanlab.workloads import ragpulse_trace
from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.source import LogFile, LogFormat
from spanlab.workloads.shape import INDEPENDENT, Shape

CONTENT = (
    "ids name contents, wherever they stand: a tool that takes them for a chain would report reuse at any position as "
    "that of a prefix cache"
)


@LOG_FORMATS.register("ragpulse")
def ragpulse() -> LogFormat:
    """The folder of the trace, or its file 0_trace.jsonl."""
    return LogFormat(
        looks_for=f"a folder with {ragpulse_trace.TRACE} and the tables of lengths, or that file",
        recognises=lambda file: (_folder(file.path) / ragpulse_trace.TRACE).is_file() and _is_trace(file.path),
        read=_read_entries,
        ids=Ids.CONTENT,
    )


def _is_trace(path: Path) -> bool:
    return path.is_dir() or path.name == ragpulse_trace.TRACE


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _read_entries(file: LogFile) -> Iterator[Entry]:
    file.notes.append(CONTENT)
    yield from entries(ragpulse_trace.read_trace(_folder(file.path), "local trace"))


def entries(shape: Shape) -> Iterator[Entry]:
    """Yield the requests of a trace; each component is a span."""
    assert shape.arrivals_s is not None, "a trace has arrival times"
    for number, spans in enumerate(shape.requests()):
        keys = np.array(spans, dtype=np.int64)
        arrived_s, output = float(shape.arrivals_s[number]), int(shape.output_lens[number])
        marks = tuple(range(1, len(keys))), tuple(np.flatnonzero(shape.flags[keys] & INDEPENDENT).tolist())
        yield Entry(keys, shape.lengths[keys], number + 1, arrived_s, output, int(shape.groups[number]), None, *marks)
