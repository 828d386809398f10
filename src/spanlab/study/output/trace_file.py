"""Trace file of a run in the JSON format of Chrome, for Perfetto and chrome://tracing.

Steps are complete events, requests are nested asynchronous events with their phases, and bytes and queues are counters.
Events are written immediately, and their order in the file has no meaning. Only arrivals, admissions and ends of
requests are buffered until the end, for the counters.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from spanlab.core.backend import StepResult
from spanlab.core.protocol import StoredBytes
from spanlab.core.scheduled import ScheduledStep
from spanlab.records import Record, ServedRecord

_US_PER_NS, _US_PER_S = 1e-3, 1e6
_PROCESS = 1
_STEPS = 1  # the thread of the steps


@dataclass
class TraceFile:
    """Writes the trace of one run; `close` completes the file.

    `title`  process name in the trace
    `store`  store whose resident bytes are counted; None where they are unknown
    """

    path: Path
    title: str
    store: StoredBytes | None = None
    _events: int = 0
    _resident: tuple[int, int] = (-1, -1)
    _moments: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in _COUNTED})

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = self.path.open("wb")
        self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        self._name("process_name", self.title)
        if self.store is not None:
            self._name("thread_name", "steps")

    def _name(self, kind: str, name: str) -> None:
        self._write({"ph": "M", "name": kind, "tid": _STEPS, "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(b",\n" if self._events else b"\n")
        self._file.write(orjson.dumps(event | {"pid": _PROCESS}))
        self._events += 1

    def ran(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        """Write a step, and the resident bytes at its start."""
        prefills = len({id(chunk.sequence) for chunk in step.chunks})
        counts = {"prefill": prefills, "decode": len(step.decodes)}
        args = {
            "prefills": prefills,
            "prefill_tokens": sum([chunk.tokens for chunk in step.chunks]),
            "decodes": len(step.decodes),
            "drafts": sum(step.drafts),
            "repeats": result.repeats,
        }
        times = {"ts": now * _US_PER_NS, "dur": result.duration_ns * _US_PER_NS}
        name = " + ".join(kind for kind, count in counts.items() if count) or "preemption"
        self._write({"ph": "X", "cat": "step", "name": name, "tid": _STEPS, **times, "args": args})
        self._count_bytes(now)

    def _count_bytes(self, now: int) -> None:
        assert self.store is not None, "a backend that runs steps has a store"
        resident = self.store.kv_cached, self.store.state_cached
        if resident != self._resident:
            self._resident = resident
            counts = dict(zip(("KV", "states"), resident, strict=True))
            self._write({"ph": "C", "name": "bytes held", "ts": now * _US_PER_NS, "args": counts})

    def finished(self, record: Record | ServedRecord) -> None:
        """Write a request and its phases."""
        names, times = _phases(record)
        self._span(f"request {record.request_id}", record, times[0], times[-1])
        for name, (start, stop) in zip(names, pairwise(times), strict=True):
            self._span(name, record, start, stop)
        for moment, time in zip(_COUNTED, (times[0], times[1], times[-1]), strict=True):
            self._moments[moment].append(time)

    def _span(self, name: str, record: Record | ServedRecord, start: float, stop: float) -> None:
        event = {"cat": "request", "name": name, "id": record.request_id, "tid": 0}
        args = {"prompt": record.prompt_tokens, "reused": record.reused_tokens, "output": record.output_tokens}
        self._write(event | {"ph": "b", "ts": start * _US_PER_S, "args": args})
        self._write(event | {"ph": "e", "ts": stop * _US_PER_S})

    def close(self) -> None:
        """Write the request counters and complete the file."""
        for time, waiting, running in _queues(*(np.array(self._moments[name]) for name in _COUNTED)):
            counts = {"waiting": waiting, "running": running}
            self._write({"ph": "C", "name": "requests", "ts": time * _US_PER_S, "args": counts})
        self._file.write(b"\n]}\n")
        self._file.close()


_COUNTED: tuple[str, ...] = ("arrived", "admitted", "finished")


def _phases(record: Record | ServedRecord) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Names of a request's phases, and their start times with the end of the last; a client sees no admission."""
    if isinstance(record, ServedRecord):
        return ("first token", "decode"), (record.arrived_s, record.first_token_s, record.finished_s)
    times = record.arrived_s, record.admitted_s, record.first_token_s, record.finished_s
    return ("queued", "prefill", "decode"), times


def _queues(arrived: Any, admitted: Any, finished: Any) -> Iterator[tuple[float, int, int]]:
    """Yield (time, waiting, running) after every change; a preempted request counts as running."""
    times = np.concatenate([arrived, admitted, finished])
    waiting, running = np.repeat([1, -1, 0], len(arrived)), np.repeat([0, 1, -1], len(arrived))
    stamps, group = np.unique(times, return_inverse=True)
    sums = (np.cumsum(np.bincount(group, change, len(stamps))).astype(int).tolist() for change in (waiting, running))
    yield from zip(stamps.tolist(), *sums, strict=True)
