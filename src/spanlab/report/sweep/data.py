"""The results of a sweep as rows: arm by point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spanlab.report import measures

Value = str | float

#: What a swept setting is called on its axis; others are called by their key.
NAMES = {
    "compared": "model",
    "traffic": "workload",
    "workload.rag.order": "order of passages",
    "workload.rag.passage_tokens": "tokens per passage",
    "workload.rag.k": "passages per prompt",
    "workload.rag.zipf": "Zipf exponent of popularity",
    "arrivals.clients": "requests in flight",
    "workload.ragpulse.rate_rps": "offered load (requests/s)",
    "workload.questions_per_document": "questions per document",
    "arrivals.rate_rps": "offered load (requests/s)",
    "arrivals.order": "arrival order",
    "store.tiers.host.bandwidth_gb_s": "bandwidth of the host tier (GB/s)",
    "store.total_gib": "memory budget (GiB)",
    "store.state_ratio": "states ÷ KV (bytes)",
    "split": "model and memory",
}


@dataclass(frozen=True)
class SweepPoint:
    """One value of one swept setting, or one combination of several.

    `settings` every setting of the point, as written on the command line, by key
    `run`      the name of the run's folder; empty where there is none
    `summary`  the run's `summary.json`; None where it failed
    `failure`  why the run, or some of its arms, failed, in one sentence
    """

    axis: str
    value: Value
    run: str
    summary: Mapping[str, Any] | None
    failure: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepRow:
    """One arm at one point; intervals are those of the run's summary, None where it has none."""

    axis: str
    value: Value
    arm: str
    family: str
    token_hit_rate: float
    token_hit_rate_low: float | None
    token_hit_rate_high: float | None
    bound: float
    finds: str
    ttft_mean_s: float | None
    ttft_mean_s_low: float | None
    ttft_mean_s_high: float | None


def as_value(text: str) -> Value:
    """A number where the text is one."""
    try:
        return float(text)
    except ValueError:
        return text


def value_text(value: Value) -> str:
    """A value as short text."""
    return value if isinstance(value, str) else f"{value:g}"


def axis_name(key: str) -> str:
    """What a swept setting is called, with its unit."""
    return " × ".join(NAMES.get(part, part) for part in key.split())


def one_by_one(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Points of axes that vary one setting."""
    return [point for point in points if len(point.settings) < 2]


def by_axis(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """Points by swept setting, in the order given."""
    groups: dict[str, list[SweepPoint]] = {}
    for point in points:
        groups.setdefault(point.axis, []).append(point)
    return groups


def sweep_rows(points: Sequence[SweepPoint]) -> list[SweepRow]:
    """Every arm of every point that ran."""
    return [
        _row(point, arm, summary)
        for point in points
        if point.summary is not None
        for arm, summary in point.summary["arms"].items()
    ]


def _row(point: SweepPoint, arm: str, summary: Mapping[str, Any]) -> SweepRow:
    hits = measures.interval(summary["token_hit_rate_interval"]) or (None, None)
    ttft = measures.interval(summary["ttft_s_interval"]["mean"]) or (None, None)
    return SweepRow(
        axis=point.axis,
        value=point.value,
        arm=arm,
        family=summary["family"],
        token_hit_rate=summary["token_hit_rate"],
        token_hit_rate_low=hits[0],
        token_hit_rate_high=hits[1],
        bound=summary["own_bound_tokens"] / (summary["tokens"]["prompt"] or 1),
        finds=summary["finds"],
        ttft_mean_s=summary["ttft_s"]["mean"],
        ttft_mean_s_low=ttft[0],
        ttft_mean_s_high=ttft[1],
    )


def footer_of(ran: Sequence[SweepPoint]) -> str:
    """The provenance of points that ran; the store is that of points where it is not varied."""
    summaries = [point.summary or {} for point in ran]
    stores = [told["store"] for point, told in zip(ran, summaries, strict=True) if "store" not in point.axis]
    seeds = len(summaries[0]["seeds"])
    parts = [
        summaries[0]["study"],
        _distinct(f"{told['workload']['name']} ({told['workload']['provenance']})" for told in summaries),
        _distinct(told["model"] for told in summaries),
        _distinct(f"{told['timing']} on {told['hardware']}" for told in summaries),
        "simulated" if summaries[0]["backend"] == "sim" else "measured",
        f"store {_distinct(stores)} where not varied" if stores else "",
        f"{seeds} seed{'s' * (seeds > 1)}",
        f"commit {_distinct(sorted(told['commit'] for told in summaries))}",
    ]
    return " · ".join(part for part in parts if part)


def _distinct(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))
