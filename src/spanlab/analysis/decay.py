"""Whether the gain of a cache lasts while novel requests come in: reuse and speedup in windows of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.stats import Interval, paired_ratio_interval, t_interval

WINDOWS = 10
WORTH = 1.1  # a speedup below which a method is no longer worth its trouble
Columns = Mapping[str, NDArray[Any]]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """One seed's requests in the order in which they arrive.

    `ids`    of the requests, int64 [requests]
    `novel`  which of them nobody else shares a passage with, bool [requests]
    """

    ids: Ints
    novel: Flags

    @property
    def windows(self) -> Ints:
        """The window of each request: 0 before the first novel one, then 1 to WINDOWS with as many novel ones each.

        -1 in the first half of those before, which find an empty cache.
        """
        count = np.cumsum(self.novel, dtype=np.int64)
        windows: Ints = (count * WINDOWS + count[-1] - 1) // count[-1]
        windows[: int(np.argmax(self.novel)) // 2] = -1
        return windows

    def check(self, seed: int) -> None:
        """Refuse a stream with a window that says nothing of known requests."""
        known = set(self.windows[~self.novel].tolist())
        missing = [window for window in range(WINDOWS + 1) if window not in known]
        if self.novel.sum() < WINDOWS or missing:
            told = f"analyses=decay with {self.novel.sum()} novel of {len(self.ids)} requests under seed {seed}"
            raise ValueError(
                f"{told}: expected known ones in each of {WINDOWS} windows with a novel one, and before them"
            )

    def aligned(self, columns: Columns, name: str) -> NDArray[Any]:
        """A column of a run's records, in the order of the stream."""
        rows = np.argsort(columns["request_id"])
        return np.asarray(columns[name])[rows][np.searchsorted(columns["request_id"][rows], self.ids)]


@dataclass(frozen=True)
class Decay:
    """One arm by window, the one before any novel request first; intervals are over seeds.

    `novel`    novel requests up to the end of each window, mean over seeds
    `speedup`  sum of TTFT of the baseline ÷ that of the arm, over known requests; `overall` over all of them
    `reused`   reused ÷ prompt tokens of known requests; `seen` is what a cache without limit would reuse at most
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
        """Novel requests at the end of the first window whose speedup is below `WORTH`; None: it lasts."""
        below = [at for at, speedup in enumerate(self.speedup) if speedup.mean < WORTH]
        return self.novel[below[0]] if below else None

    def summary(self) -> dict[str, Any]:
        """As `summary.json` holds it."""
        names = ("speedup", "overall", "reused", "change")
        numbers = {name: [one._asdict() for one in getattr(self, name)] for name in names}
        return {"novel": self.novel, **numbers, "seen": self.seen, "falls_after": self.falls_after}


def decay_of(
    streams: Sequence[Stream], runs: Sequence[Columns], baseline: Sequence[Columns], changes: Sequence[Floats] = ()
) -> Decay:
    """An arm's windows out of its runs and the baseline's, one of each per stream.

    `changes`  gold loss of each request minus that of the baseline, in the order of the stream; none where not scored
    """
    parts = [_Run(*one) for one in zip(streams, runs, baseline, strict=True)]
    windows = range(WINDOWS + 1)
    return Decay(
        novel=[float(np.mean([part.novel_by(window) for part in parts])) for window in windows],
        speedup=[_speedup(parts, window, all_of_them=False) for window in windows],
        overall=[_speedup(parts, window, all_of_them=True) for window in windows],
        reused=[t_interval([part.share("reused_tokens", window) for part in parts]) for window in windows],
        seen=[float(np.mean([part.share("seen_tokens", window) for part in parts])) for window in windows],
        change=[_change(streams, changes, window) for window in windows] if changes else [],
    )


def _change(streams: Sequence[Stream], changes: Sequence[Floats], window: int) -> Interval:
    known = [(stream.windows == window) & ~stream.novel for stream in streams]
    return t_interval([float(change[rows].mean()) for change, rows in zip(changes, known, strict=True)])


def _speedup(parts: Sequence[_Run], window: int, all_of_them: bool) -> Interval:
    above = [part.ttft(part.baseline, window, all_of_them) for part in parts]
    return paired_ratio_interval(above, [part.ttft(part.run, window, all_of_them) for part in parts])


@dataclass(frozen=True)
class _Run:
    stream: Stream
    run: Columns
    baseline: Columns

    def novel_by(self, window: int) -> int:
        return int(self.stream.novel[self.stream.windows <= window].sum())

    def ttft(self, columns: Columns, window: int, all_of_them: bool) -> float:
        ttft = self.stream.aligned(columns, "first_token_s") - self.stream.aligned(columns, "arrived_s")
        return float(ttft[self._rows(window, all_of_them)].sum())

    def share(self, name: str, window: int) -> float:
        rows = self._rows(window, all_of_them=False)
        return float(
            self.stream.aligned(self.run, name)[rows].sum() / self.stream.aligned(self.run, "prompt_tokens")[rows].sum()
        )

    def _rows(self, window: int, all_of_them: bool) -> Flags:
        rows: Flags = (self.stream.windows == window) & (~self.stream.novel | all_of_them)
        return rows
