"""Decay of a cache's gain while novel requests arrive: reuse and speedup in windows of a request stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.stats import Interval, paired_ratio_interval, t_interval

WINDOWS = 10
LEAST_SPEEDUP = 1.1  # the gain counts as lost below this speedup
Columns = Mapping[str, NDArray[Any]]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """The requests of one seed in order of arrival.

    `ids`    ids of the requests, int64 [requests]
    `novel`  whether a request shares no passage with any other request, bool [requests]
    """

    ids: Ints
    novel: Flags

    @property
    def windows(self) -> Ints:
        """The window of each request: 0 before the first novel request, then 1 to WINDOWS.

        Windows 1 to WINDOWS have equally many novel requests. The first half of the requests before them has -1, since
        it meets an empty cache.
        """
        count = np.cumsum(self.novel, dtype=np.int64)
        windows: Ints = (count * WINDOWS + count[-1] - 1) // count[-1]
        windows[: int(np.argmax(self.novel)) // 2] = -1
        return windows

    def check(self, seed: int) -> None:
        """Raise ValueError where a window has no known request, or novel requests are fewer than windows."""
        known = set(self.windows[~self.novel].tolist())
        missing = [window for window in range(WINDOWS + 1) if window not in known]
        if self.novel.sum() < WINDOWS or missing:
            setting = f"analyses=decay with {self.novel.sum()} novel of {len(self.ids)} requests under seed {seed}"
            raise ValueError(
                f"{setting}: expected known ones in each of {WINDOWS} windows with a novel one, and before them"
            )

    def aligned(self, columns: Columns, name: str) -> NDArray[Any]:
        """Return a column of a run's records, in the order of the stream."""
        rows = np.argsort(columns["request_id"])
        return np.asarray(columns[name])[rows][np.searchsorted(columns["request_id"][rows], self.ids)]


@dataclass(frozen=True)
class Decay:
    """One arm by window, starting with the window before any novel request; intervals are over seeds.

    `novel`    number of novel requests up to the end of each window, mean over seeds
    `speedup`  sum of TTFT of the baseline ÷ that of the arm, over known requests; `overall` over all requests
    `reused`   reused ÷ prompt tokens of known requests; `seen` is the upper bound of an infinite cache, at the
               positions where the arm looks
    `change`   gold loss − that of the baseline, nats, mean over known requests; empty where no answers are scored
    """

    novel: list[float]
    speedup: list[Interval]
    overall: list[Interval]
    reused: list[Interval]
    seen: list[float]
    change: list[Interval]

    @property
    def falls_after(self) -> float | None:
        """Novel requests at the end of the first window whose speedup is below `LEAST_SPEEDUP`; None without one."""
        below = [window for window, speedup in enumerate(self.speedup) if speedup.mean < LEAST_SPEEDUP]
        return self.novel[below[0]] if below else None

    def summary(self) -> dict[str, Any]:
        """Return the entry of `summary.json`."""
        names = ("speedup", "overall", "reused", "change")
        numbers = {name: [interval._asdict() for interval in getattr(self, name)] for name in names}
        return {"novel": self.novel, **numbers, "seen": self.seen, "falls_after": self.falls_after}


def decay_of(
    streams: Sequence[Stream], runs: Sequence[Columns], baseline: Sequence[Columns], changes: Sequence[Floats] = ()
) -> Decay:
    """Return an arm's windows, from its runs and the baseline's, one of each per stream.

    `changes`  gold loss of each request minus that of the baseline, in the order of the stream; empty where not scored
    """
    pairs = [_PairedRun(*pair) for pair in zip(streams, runs, baseline, strict=True)]
    windows = range(WINDOWS + 1)
    return Decay(
        novel=[float(np.mean([pair.novel_by(window) for pair in pairs])) for window in windows],
        speedup=[_speedup(pairs, window, with_novel=False) for window in windows],
        overall=[_speedup(pairs, window, with_novel=True) for window in windows],
        reused=[t_interval([pair.share("reused_tokens", window) for pair in pairs]) for window in windows],
        seen=[1 - float(np.mean([pair.share("lost_never_seen", window) for pair in pairs])) for window in windows],
        change=[_change(streams, changes, window) for window in windows] if changes else [],
    )


def _change(streams: Sequence[Stream], changes: Sequence[Floats], window: int) -> Interval:
    known = [(stream.windows == window) & ~stream.novel for stream in streams]
    return t_interval([float(change[rows].mean()) for change, rows in zip(changes, known, strict=True)])


def _speedup(pairs: Sequence[_PairedRun], window: int, with_novel: bool) -> Interval:
    above = [pair.ttft(pair.baseline, window, with_novel) for pair in pairs]
    return paired_ratio_interval(above, [pair.ttft(pair.run, window, with_novel) for pair in pairs])


@dataclass(frozen=True)
class _PairedRun:
    stream: Stream
    run: Columns
    baseline: Columns

    def novel_by(self, window: int) -> int:
        return int(self.stream.novel[self.stream.windows <= window].sum())

    def ttft(self, columns: Columns, window: int, with_novel: bool) -> float:
        ttft = self.stream.aligned(columns, "first_token_s") - self.stream.aligned(columns, "arrived_s")
        return float(ttft[self._rows(window, with_novel)].sum())

    def share(self, name: str, window: int) -> float:
        rows = self._rows(window, with_novel=False)
        return float(
            self.stream.aligned(self.run, name)[rows].sum() / self.stream.aligned(self.run, "prompt_tokens")[rows].sum()
        )

    def _rows(self, window: int, with_novel: bool) -> Flags:
        rows: Flags = (self.stream.windows == window) & (~self.stream.novel | with_novel)
        return rows
