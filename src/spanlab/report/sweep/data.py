"""The results of a sweep as rows: arm by point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spanlab.report import measures

Value = str | float

#: Axis names of swept settings; other settings are named by their key.
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

    `settings` every setting of the point by key, as on the command line
    `run`      the name of the run's folder; empty where it has none
    `summary`  the run's `summary.json`; None where it failed
    `failure`  why the run, or some of its arms, failed, in one sentence
    """

    axis: str
    value: Value
    run: str
    summary: Mapping[str, Any] | None
    failure: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Every setting of the point, as on the command line."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())

    def findings(self, analysis: str) -> Any:
        """Return the entry of an analysis in the summary of a point that ran."""
        assert self.summary is not None, "only points that ran are shown"
        return self.summary[analysis]


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
    """Return the text as a number if it is numeric, and unchanged otherwise."""
    try:
        return float(text)
    except ValueError:
        return text


def value_text(value: Value) -> str:
    """A value as short text."""
    return value if isinstance(value, str) else f"{value:g}"


def axis_name(key: str) -> str:
    """Return the name of a swept setting, with its unit."""
    return " × ".join(NAMES.get(setting, setting) for setting in key.split())


def single_setting_points(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Return the points of axes that vary one setting."""
    return [point for point in points if len(point.settings) < 2]


def by_axis(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """Group points by swept setting, in the given order."""
    groups: dict[str, list[SweepPoint]] = {}
    for point in points:
        groups.setdefault(point.axis, []).append(point)
    return groups


def sweep_rows(points: Sequence[SweepPoint]) -> list[SweepRow]:
    """Return a row for every arm of every point that ran."""
    return [
        _row(point, arm, summary)
        for point in points
        if point.summary is not None
        for arm, summary in point.summary["arms"].items()
    ]


def _row(point: SweepPoint, arm: str, summary: Mapping[str, Any]) -> SweepRow:
    hits, ttft = measures.token_hit_rate(summary), measures.mean_ttft(summary)
    return SweepRow(
        axis=point.axis,
        value=point.value,
        arm=arm,
        family=summary["family"],
        token_hit_rate=hits.mean,
        token_hit_rate_low=hits.low,
        token_hit_rate_high=hits.high,
        bound=summary["own_bound_tokens"] / (summary["tokens"]["prompt"] or 1),
        finds=summary["finds"],
        ttft_mean_s=ttft.mean,
        ttft_mean_s_low=ttft.low,
        ttft_mean_s_high=ttft.high,
    )


def footer_of(ran: Sequence[SweepPoint]) -> str:
    """Return the provenance of points that ran; the store is that of points where it is not varied."""
    summaries = [point.summary or {} for point in ran]
    stores = [summary["store"] for point, summary in zip(ran, summaries, strict=True) if "store" not in point.axis]
    seeds = len(summaries[0]["seeds"])
    texts = [
        summaries[0]["study"],
        _distinct(f"{summary['workload']['name']} ({summary['workload']['provenance']})" for summary in summaries),
        _distinct(summary["model"] for summary in summaries),
        _distinct(f"{summary['timing']} on {summary['hardware']}" for summary in summaries),
        "simulated" if summaries[0]["backend"] == "sim" else "measured",
        f"store {_distinct(stores)} where not varied" if stores else "",
        f"{seeds} seed{'s' * (seeds > 1)}",
        f"commit {_distinct(sorted(summary['commit'] for summary in summaries))}",
    ]
    return " · ".join(text for text in texts if text)


def _distinct(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))
