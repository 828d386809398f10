"""Scrapes of vLLM's `/metrics` as a source of a twin: sums over all requests that finished between
two of them.

Between two scrapes, only the number of finished requests and the sums of their times are known. The
log says which requests these are: the simulation finishes requests in an order, and each interval
takes the next of them. A mean of many requests determines two or three rates; single requests and
their spread are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.records import NS
from spanlab.report.table import Field, Table, count, seconds, signed_percent, tabulate, word
from spanlab.typed_json import reading
from spanlab_sim.lockstep import Times

Floats = NDArray[np.float64]

#: vLLM's histograms of times of requests, each observed when the request has finished.
HISTOGRAMS = {
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
NAMES = {"queue": "queue", "prefill": "prefill", "decode": "decode", "e2e": "E2E latency"}
FITTED = ("queue", "prefill", "decode")  # E2E latency has times outside of the engine too
#: Further sums, by name: each may be missing.
_COUNTS = {
    "steps": "vllm:iteration_tokens_total_count",
    "prompt": "vllm:request_prompt_tokens_sum",
    "output": "vllm:request_generation_tokens_sum",
    "preemptions": "vllm:num_preemptions_total",
    "reused": "vllm:prefix_cache_hits_total",
}
_TOTALS = {f"{histogram}_{end}" for histogram in HISTOGRAMS.values() for end in ("sum", "count")}
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(\{.*\})?\s+(\S+)")
_MODEL = re.compile(r'\bmodel_name="([^"]*)"')
_KIND = "scrapes of vLLM's /metrics"


@dataclass(frozen=True)
class Interval:
    """Requests between two scrapes.

    `start`, `stop`  numbers of requests that had finished before and after it
    `means`          seconds per request of each of `HISTOGRAMS`
    """

    start: int
    stop: int
    means: Mapping[str, float]

    @property
    def requests(self) -> int:
        """Number of requests."""
        return self.stop - self.start


@dataclass(frozen=True)
class Sums:
    """What scrapes say of all requests of a log.

    `intervals`  those in which a request finished
    `counts`     totals of `_COUNTS` that the server reports
    `paths`      names the files in messages
    """

    intervals: tuple[Interval, ...]
    counts: Mapping[str, int]
    paths: str

    def trains(self, share: float) -> list[bool]:
        """Return which intervals are fitted: those that end within a share of the requests, at
        least the first."""
        most = share * self.intervals[-1].stop
        return [
            number == 0 or interval.stop <= most for number, interval in enumerate(self.intervals)
        ]

    def check(self, prompts: NDArray[np.int64], outputs: NDArray[np.int64], path: str) -> None:
        """Raise ValueError unless the scrapes are those of exactly these requests."""
        expected = {
            "requests": len(prompts),
            "prompt": int(prompts.sum()),
            "output": int(outputs.sum()),
        }
        counted = {"requests": self.intervals[-1].stop, **self.counts}
        units = {"requests": "requests", "prompt": "prompt tokens", "output": "output tokens"}
        for name, number in expected.items():
            if counted.get(name, number) != number:
                raise ValueError(
                    f"{self.paths}: {counted[name]:,} {units[name]} finished between the scrapes; expected the "
                    f"{number:,} of log={path}"
                )


# ------------------------------------------------------------------------------
# Reading.
# ------------------------------------------------------------------------------


def read_sums(paths: Sequence[str]) -> Sums | None:
    """Return the sums between the scrapes in files, in their order; None without a file.

    A file may hold several scrapes, one behind the other. A single scrape counts from the start of
    the server.
    """
    if not paths:
        return None
    subject = f"twin.metrics=[{', '.join(paths)}]"
    scrapes: list[dict[str, float]] = []
    for path in paths:
        with reading(f"twin.metrics={path}", _KIND):
            text = Path(path).expanduser().read_text(encoding="utf-8")
            if not (of_file := list(_split(text))):
                raise ValueError("no sample of a metric")
        scrapes += of_file
    for number, scrape in enumerate(scrapes, 1):
        if missing := sorted(_TOTALS - scrape.keys()):
            raise ValueError(f"{subject}: scrape {number} has no {missing[0]}; expected {_KIND}")
    if len(scrapes) == 1:
        scrapes.insert(0, dict.fromkeys(scrapes[0], 0.0))
    intervals, finished = [], 0
    for number, (before, after) in enumerate(pairwise(scrapes), 2):
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        if fallen := [name for name, value in grown.items() if value < 0]:
            raise ValueError(
                f"{subject}: {fallen[0]} falls before scrape {number}; expected scrapes of one server in their order"
            )
        seen = {name: round(grown[f"{kind}_count"]) for name, kind in HISTOGRAMS.items()}
        requests = seen["e2e"]
        if set(seen.values()) != {requests}:
            raise ValueError(
                f"{subject}: {seen} observed times; expected one of each kind for every finished request"
            )
        if requests:
            means = {name: grown[f"{kind}_sum"] / requests for name, kind in HISTOGRAMS.items()}
            intervals.append(Interval(finished, finished + requests, means))
            finished += requests
    if not intervals:
        raise ValueError(
            f"{subject}: no request finished between the scrapes; expected one or more"
        )
    first, last = scrapes[0], scrapes[-1]
    counts = {
        name: round(last[key] - first.get(key, 0.0)) for name, key in _COUNTS.items() if key in last
    }
    return Sums(tuple(intervals), counts, subject)


def _split(text: str) -> Iterator[dict[str, float]]:
    """Yield sums over all engines by name; a series that occurs again begins the next scrape."""
    wanted = _TOTALS | set(_COUNTS.values())
    sums: dict[str, float] = {}
    series: set[tuple[str, str]] = set()
    models: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        match = _SAMPLE.match(line)
        if match is None or match[1] not in wanted:
            continue
        name, labels = match[1], match[2] or ""
        if (name, labels) in series:
            yield sums
            sums, series = {}, set()
        series.add((name, labels))
        models |= set(_MODEL.findall(labels))
        if len(models) > 1:
            raise ValueError(
                f"line {number}: models {', '.join(sorted(models))}, of which requests are summed apart"
            )
        try:
            sums[name] = sums.get(name, 0.0) + float(match[3])
        except ValueError as error:
            raise ValueError(f"line {number}: {name}={match[3]}: expected a number") from error
    if sums:
        yield sums


# ------------------------------------------------------------------------------
# The same sums of simulated requests.
# ------------------------------------------------------------------------------


def simulated_seconds(arrived_s: Floats, times: Times) -> dict[str, Floats]:
    """Return the seconds of every request of each of `HISTOGRAMS`.

    `arrived_s`  when each request came to the server; vLLM queues it when the running step ends,
                 and E2E latency alone has the wait until then
    """
    admitted, first, last = (ns * NS for ns in (times.admitted_ns, times.first_ns, times.last_ns))
    # when the step ends that runs at each arrival; an arrival ends a run of equal steps
    starts = np.array([run.start_ns for run in times.runs]) * NS
    ends = np.array([run.end_ns for run in times.runs]) * NS
    running = np.searchsorted(starts, arrived_s, side="right") - 1
    queued_s = np.where(running < 0, arrived_s, np.maximum(arrived_s, ends[np.maximum(running, 0)]))
    waits = {"queue": admitted - np.minimum(queued_s, admitted), "prefill": first - admitted}
    return waits | {"decode": last - first, "e2e": last - arrived_s}


def members(sums: Sums, times: Times) -> list[NDArray[np.int64]]:
    """Return the simulated requests of each interval: the next ones in the order of their ends."""
    order = np.argsort(times.last_ns, kind="stable")
    return [order[interval.start : interval.stop] for interval in sums.intervals]


def output_steps(times: Times) -> int:
    """Return the number of steps that put out a token: vLLM counts no other one."""
    runs = times.runs
    return sum(
        run.repeats
        for run in runs
        if any(rank.num_decodes + rank.num_first_tokens > 0 for rank in run.ranks)
    )


# ------------------------------------------------------------------------------
# Tables.
# ------------------------------------------------------------------------------

_FIELDS = (
    Field("interval", "interval", count),
    Field("requests", "requests", count),
    Field("seen", "fitted", lambda seen: word("yes" if seen else "no")),
    Field("time", "mean of", word, left=True),
    Field("measured_s", "server", seconds),
    Field("modelled_s", "simulated", seconds),
    Field("error", "error", signed_percent),
)
_COUNT_NAMES = {
    "steps": "steps with a token out",
    "preemptions": "preemptions",
    "reused": "reused tokens",
}
_COUNT_FIELDS = (
    Field("name", "number of", word, left=True),
    Field("server", "server", count),
    Field("simulated", "simulated", count),
)


def rows_of(
    sums: Sums, arrived_s: Floats, times: Times, fitted: Sequence[bool]
) -> list[dict[str, Any]]:
    """Return a row for each interval and time.

    `arrived_s`  when each request came to the server
    `fitted`     whether an interval is part of the fit
    """
    modelled = simulated_seconds(arrived_s, times)
    return [
        {
            "interval": number,
            "requests": interval.requests,
            "seen": seen,
            "time": NAMES[name],
            "measured_s": interval.means[name],
            "modelled_s": (mean := float(modelled[name][chosen].mean())),
            "error": mean / interval.means[name] - 1 if interval.means[name] > 0 else None,
        }
        for number, (interval, chosen, seen) in enumerate(
            zip(sums.intervals, members(sums, times), fitted, strict=True), 1
        )
        for name in HISTOGRAMS
    ]


def counts_of(sums: Sums, times: Times, reuse_known: bool) -> list[dict[str, Any]]:
    """Return a row for each total; reused tokens are simulated only where prompts are known."""
    simulated = {"steps": output_steps(times), "preemptions": times.preemptions}
    simulated |= {"reused": int(times.reused.sum())} if reuse_known else {}
    return [
        {"name": label, "server": sums.counts[name], "simulated": simulated.get(name)}
        for name, label in _COUNT_NAMES.items()
        if name in sums.counts
    ]


def tables_of(
    rows: Sequence[dict[str, Any]], counts: Sequence[dict[str, Any]]
) -> tuple[Table, Table]:
    """Return the tables of sums and of totals."""
    note = "the server's sums ÷ requests that finished between two scrapes; simulated: the next requests to finish"
    return (
        tabulate("sums", "Sums of the server", _FIELDS, rows, (note,)),
        tabulate("counts", "Totals of the server", _COUNT_FIELDS, counts),
    )
