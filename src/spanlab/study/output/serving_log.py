"""Serving log of a run: gaps between tokens, and mean batch sizes, which are not in the records.

Token times are not stored. Nearly all gaps are step durations, which all sequences of a step share, so that gaps are
stored as values with counts; percentiles over all gaps stay exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spanlab.core.backend import StepResult
from spanlab.core.scheduled import ScheduledStep
from spanlab.core.step_features import StepFeatures
from spanlab.records import Record, ServedRecord
from spanlab_sim.timing import Nanoseconds, TimingModel

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
    """Tokens of a running request: time of the newest, gaps, and spans of steps with one token each."""

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
    _shared: dict[int, tuple[Ints, int]] = field(default_factory=dict)  # spans by identity, and how many had them
    _sequences_ns: int = 0
    _tokens_ns: int = 0
    _busy_ns: int = 0

    def ran(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        """Log a step that starts at `now`; called before the scheduler advances its sequences."""
        durations = self._durations(result)
        first, end = now + int(durations[0]), now + result.duration_ns
        later_durations = durations[1:]
        for sequence in step.decodes:
            tokens = self._running[sequence.request.id]
            tokens.gaps_ns.append(first - tokens.newest_ns)
            tokens.newest_ns = end
            if result.repeats > 1:
                tokens.spans.append(later_durations)
        self._record_first_tokens(step, end)
        self._add_batch_fill(step, result.duration_ns)

    def _durations(self, result: StepResult) -> Ints:
        if result.repeats == 1:
            return np.array([result.duration_ns], dtype=np.int64)
        assert self.spans is not None, "only a timing model merges steps into one"
        durations = self.spans.last[: result.repeats]
        assert int(durations.sum()) == result.duration_ns, "step durations of a span sum to its duration"
        return durations

    def _record_first_tokens(self, step: ScheduledStep, end: int) -> None:
        """Log the token at the end of a prefill; after a preemption, the gap starts at the last token before it."""
        for chunk in step.chunks:
            if not chunk.last:
                continue
            tokens = self._running.setdefault(chunk.sequence.request.id, _Tokens(end))
            if tokens.newest_ns < end:
                tokens.gaps_ns.append(end - tokens.newest_ns)
                tokens.newest_ns = end

    def _add_batch_fill(self, step: ScheduledStep, duration_ns: int) -> None:
        prefills = len({id(chunk.sequence) for chunk in step.chunks})
        tokens = sum([chunk.tokens for chunk in step.chunks]) + len(step.decodes) + sum(step.drafts)
        self._sequences_ns += (prefills + len(step.decodes)) * duration_ns
        self._tokens_ns += tokens * duration_ns
        self._busy_ns += duration_ns

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
