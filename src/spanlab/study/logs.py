"""Files of a run beside its records: trace, steps and serving log."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from spanlab.core.protocol import Policy, StoredBytes
from spanlab.core.step import ScheduledStep, SpanReads, StepFeatures, StepResult, features
from spanlab.records import Record, ServedRecord
from spanlab_sim.timing import Nanoseconds, TimingModel

# ------------------------------------------------------------------------------
# Trace file of a run in the JSON format of Chrome, for Perfetto and chrome://tracing.
#
# Steps are complete events, requests are nested asynchronous events with their phases, and
# bytes and queues are counters. Events are written immediately, and their order in the file has
# no meaning. Only arrivals, admissions and ends of requests are buffered until the end, for the
# counters.
# ------------------------------------------------------------------------------

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
    _moments: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in _COUNTED}
    )

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
        assert self.store is not None, "a backend that runs steps has a store"
        resident = self.store.kv_cached, self.store.state_cached
        if resident != self._resident:
            self._resident = resident
            counts = dict(zip(("KV", "states"), resident, strict=True))
            self._write({"ph": "C", "name": "bytes held", "ts": now * _US_PER_NS, "args": counts})

    def finished(self, record: Record | ServedRecord) -> None:
        """Write a request and its phases."""
        if isinstance(record, ServedRecord):  # a client sees no admission
            names = ["first token", "decode"]
            times = [record.arrived_s, record.first_token_s, record.finished_s]
        else:
            names = ["queued", "prefill", "decode"]
            times = [record.arrived_s, record.admitted_s, record.first_token_s, record.finished_s]
        self._span(f"request {record.request_id}", record, times[0], times[-1])
        for name, (start, stop) in zip(names, pairwise(times), strict=True):
            self._span(name, record, start, stop)
        for moment, time in zip(_COUNTED, (times[0], times[1], times[-1]), strict=True):
            self._moments[moment].append(time)

    def _span(self, name: str, record: Record | ServedRecord, start: float, stop: float) -> None:
        event = {"cat": "request", "name": name, "id": record.request_id, "tid": 0}
        args = {
            "prompt": record.prompt_tokens,
            "reused": record.reused_tokens,
            "output": record.output_tokens,
        }
        self._write(event | {"ph": "b", "ts": start * _US_PER_S, "args": args})
        self._write(event | {"ph": "e", "ts": stop * _US_PER_S})

    def close(self) -> None:
        """Write the request counters and complete the file."""
        arrived, admitted, finished = (np.array(self._moments[name]) for name in _COUNTED)
        times = np.concatenate([arrived, admitted, finished])
        # a preempted request counts as running
        changes = np.repeat([1, -1, 0], len(arrived)), np.repeat([0, 1, -1], len(arrived))
        stamps, group = np.unique(times, return_inverse=True)
        sums = (
            np.cumsum(np.bincount(group, change, len(stamps))).astype(int).tolist()
            for change in changes
        )
        for time, waiting, running in zip(stamps.tolist(), *sums, strict=True):
            counts = {"waiting": waiting, "running": running}
            self._write({"ph": "C", "name": "requests", "ts": time * _US_PER_S, "args": counts})
        self._file.write(b"\n]}\n")
        self._file.close()


_COUNTED: tuple[str, ...] = ("arrived", "admitted", "finished")


# ------------------------------------------------------------------------------
# Step log of a run on the engine: a JSON line for each step, with its contents and times.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One parsed line of the log: `key` of the scheduled step, times in nanoseconds since the start
    of the run.

    `started_ns`  end of the previous step, or the arrival that ended an idle time
    `phases`      seconds of its phases, by name
    """

    key: tuple[Any, ...]
    features: StepFeatures
    started_ns: int
    ended_ns: int
    phases: dict[str, float]

    @property
    def took_ns(self) -> int:
        """Nanoseconds from `started_ns` to the end of the step."""
        return self.ended_ns - self.started_ns


class StepLog:
    """Writes the log of one run; pass it to `serve` as `on_step=log.ran`.

    A line has the step's times, the seconds of its phases, the fields of `StepFeatures`, and the
    step's key.
    """

    def __init__(self, path: Path, policy: Policy, reads: SpanReads | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._read = policy.store.state_bytes, policy.rules, reads

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def ran(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        """Write the line of a step; called before the scheduler advances its sequences."""
        line = {"started_ns": now, "ended_ns": now + result.duration_ns, **result.phases}
        line |= features(step, *self._read)._asdict() | {"key": step.key()}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def read_steps(path: Path) -> list[LoggedStep]:
    """Read the steps of one run, in order."""
    steps = []
    for line in map(orjson.loads, path.read_bytes().splitlines()):
        features = StepFeatures(**{name: line[name] for name in StepFeatures._fields})
        phases = {name: value for name, value in line.items() if name.endswith("_s")}
        steps.append(
            LoggedStep(
                _as_tuples(line["key"]), features, line["started_ns"], line["ended_ns"], phases
            )
        )
    return steps


def _as_tuples(value: Any) -> Any:
    """Convert nested lists to tuples, which JSON does not have."""
    return tuple([_as_tuples(element) for element in value]) if isinstance(value, list) else value


# ------------------------------------------------------------------------------
# Serving log of a run: gaps between tokens, and mean batch sizes, which are not in the records.
#
# Token times are not stored. Nearly all gaps are step durations, which all sequences of a step
# share, so that gaps are stored as values with counts; percentiles over all gaps stay exact.
# ------------------------------------------------------------------------------

Ints = NDArray[np.int64]
_SPANS = 4096  # spans buffered before their gaps are counted


@dataclass
class TokenGaps:
    """Nanoseconds between successive outputs, pooled over requests: a count for each value.

    An output is a token, with speculation including the accepted drafts after it.
    """

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, gap_ns: int, times: int = 1) -> None:
        """Count a gap."""
        self.counts[gap_ns] += times

    def extend(self, gaps_ns: Iterable[int]) -> None:
        """Count gaps."""
        self.counts.update(map(int, gaps_ns))

    def columns(self) -> dict[str, Ints]:
        """Gaps in increasing order, and their counts."""
        rows = np.array(sorted(self.counts.items()), dtype=np.int64).reshape(-1, 2)
        return {"gap_ns": rows[:, 0], "gap_count": rows[:, 1]}

    def write(self, path: Path) -> None:
        """Write only the gaps, for a run without step times."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # numpy's stub reads arrays by name as options
        np.savez_compressed(path, **self.columns())  # type: ignore[arg-type]


class LastSpanTiming:
    """Timing model that stores the durations of the last span."""

    def __init__(self, timing: TimingModel) -> None:
        self._timing = timing
        self.last: Nanoseconds = np.empty(0, dtype=np.int64)

    def step(self, features: StepFeatures) -> int:
        """Nanoseconds that one step takes."""
        return self._timing.step(features)

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Durations of k decode steps."""
        self.last = self._timing.span(features, k)
        return self.last


@dataclass(slots=True)
class _Tokens:
    """Tokens of a running request: time of the newest, gaps, and spans of steps with one token
    each."""

    newest_ns: int
    gaps_ns: list[int] = field(default_factory=list)
    spans: list[Ints] = field(default_factory=list)


@dataclass
class ServingLog:
    """Log of the steps and records of one run; `ran` and `finished` are callbacks of the run.

    `spans`  durations of the steps of a span, where a backend merges equal steps into one
    """

    spans: LastSpanTiming | None = None
    gaps: TokenGaps = field(default_factory=TokenGaps)
    _running: dict[int, _Tokens] = field(default_factory=dict)  # by request, once it has a token
    # spans by identity, and how many had them
    _shared: dict[int, tuple[Ints, int]] = field(default_factory=dict)
    _sequences_ns: int = 0
    _tokens_ns: int = 0
    _busy_ns: int = 0

    def ran(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        """Log a step that starts at `now`; called before the scheduler advances its sequences."""
        if result.repeats == 1:
            durations = np.array([result.duration_ns], dtype=np.int64)
        else:
            assert self.spans is not None, "only a timing model merges steps into one"
            durations = self.spans.last[: result.repeats]
            assert int(durations.sum()) == result.duration_ns, (
                "step durations of a span sum to its duration"
            )
        first, end = now + int(durations[0]), now + result.duration_ns
        later_durations = durations[1:]
        for sequence in [sequence for sequence in step.decodes if not sequence.has_ended]:
            tokens = self._running[sequence.request.id]
            tokens.gaps_ns.append(first - tokens.newest_ns)
            tokens.newest_ns = end
            if result.repeats > 1:
                tokens.spans.append(later_durations)
        # A prefill ends with a token; after a preemption, its gap starts at the last token before
        # it.
        for chunk in step.chunks:
            if not chunk.last:
                continue
            tokens = self._running.setdefault(chunk.sequence.request.id, _Tokens(end))
            if tokens.newest_ns < end:
                tokens.gaps_ns.append(end - tokens.newest_ns)
                tokens.newest_ns = end
        prefills = len({id(chunk.sequence) for chunk in step.chunks})
        scheduled = (
            sum([chunk.tokens for chunk in step.chunks]) + len(step.decodes) + sum(step.drafts)
        )
        self._sequences_ns += (prefills + len(step.decodes)) * result.duration_ns
        self._tokens_ns += scheduled * result.duration_ns
        self._busy_ns += result.duration_ns

    def finished(self, record: Record | ServedRecord) -> None:
        """Pool the gaps of a request, except in the warm-up."""
        tokens = self._running.pop(record.request_id)
        if not record.counted:
            return
        self.gaps.extend(tokens.gaps_ns)
        for span in tokens.spans:
            self._shared[id(span)] = span, self._shared.get(id(span), (span, 0))[1] + 1
        if len(self._shared) > _SPANS:
            self._pool_spans()

    def _pool_spans(self) -> None:
        for span, requests in self._shared.values():
            for gap in span.tolist():
                self.gaps.add(gap, requests)
        self._shared.clear()

    def write(self, path: Path) -> None:
        """Write gaps and mean batch sizes of the run."""
        self._pool_spans()
        path.parent.mkdir(parents=True, exist_ok=True)
        busy = max(self._busy_ns, 1)
        np.savez_compressed(
            path,
            **self.gaps.columns(),  # type: ignore[arg-type]  # numpy's stub reads arrays as options
            batch_size=np.float64(self._sequences_ns / busy),
            batch_tokens=np.float64(self._tokens_ns / busy),
        )
