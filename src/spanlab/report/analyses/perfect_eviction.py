"""Tables of the analysis `perfect_eviction`, from its entry in `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report import cells
from spanlab.report.measures import interval
from spanlab.report.sweep.data import SweepPoint
from spanlab.report.tables import MISSING, Cell, Column, Table

#: Labels of the compared arms by their keys in the summary.
ARM_LABELS = {"usual": "baseline", "best": "best without foresight", "known": "clairvoyant"}
NOTES = (
    "offline bound = token hit rate that no eviction exceeds in this order of requests; TTFT bound = mean TTFT that "
    "none goes below: each request, alone on the engine, computes what the best use of memory does not reuse",
    "gain of TTFT = mean TTFT of the baseline ÷ that of the clairvoyant, same requests; of throughput = load that "
    "fills the capacity with the clairvoyant ÷ with the baseline, offered load ÷ utilisation",
)
_ARM_COLUMNS = (
    Column("place", "", left=True),
    Column("arm", "arm", left=True),
    Column("token_hit_rate", "token\nhit rate"),
    Column("regret_points", "regret,\npoints"),
    Column("ttft_mean_s", "TTFT\nmean"),
    Column("ttft_regret_s", "TTFT above\nits bound"),
    Column("utilisation", "load ÷\ncapacity", 1),
)
_POINT_COLUMNS = (
    Column("point", "point", left=True),
    Column("baseline", "hit rate\nbaseline"),
    Column("best_arm", "best without\nforesight", 1, left=True),
    Column("best", "its hit\nrate"),
    Column("known_arm", "clairvoyant", 3, left=True),
    Column("known", "its hit\nrate"),
    Column("bound", "offline\nbound"),
    Column("ttft_baseline_s", "TTFT\nbaseline"),
    Column("ttft_best_s", "TTFT\nbest", 2),
    Column("ttft_known_s", "TTFT\nclairvoyant"),
    Column("least_ttft_s", "TTFT\nbound"),
    Column("gain_of_ttft", "gain of\nTTFT"),
    Column("gain_of_throughput", "gain of\nthroughput"),
)


def arms_table(findings: Mapping[str, Any]) -> Table:
    """Return one row per compared arm, and one for the bounds."""
    rows = [(cells.word(label), *_arm_cells(findings[key])) for key, label in ARM_LABELS.items()]
    bound = cells.percent(findings["bound"]), MISSING, cells.seconds(findings["least_s"]), MISSING, MISSING
    rows.append((cells.word("bound"), cells.word(""), *bound))
    title = (
        f"Perfect eviction: TTFT {_ratio(findings['gain']).text}, throughput {cells.ratio(findings['throughput']).text}"
    )
    return Table("perfect_eviction", title, _ARM_COLUMNS, tuple(rows), NOTES)


def points_table(name: str, points: Sequence[SweepPoint]) -> Table:
    """One row per point."""
    return Table(name, "Gain of perfect eviction", _POINT_COLUMNS, tuple(map(_point_row, points)), NOTES)


def findings_at(point: SweepPoint) -> Mapping[str, Any]:
    """Return the findings of the analysis at a point that ran."""
    assert point.summary is not None, "only points that ran are shown"
    findings: Mapping[str, Any] = point.summary["perfect_eviction"]
    return findings


def _arm_cells(arm: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        cells.word(arm["arm"]),
        cells.percent(arm["token_hit_rate"]),
        Cell(arm["regret_points"], f"{arm['regret_points']:.1f}"),
        cells.seconds(arm["ttft_mean_s"]),
        cells.seconds(arm["ttft_regret_s"]),
        cells.percent(arm["utilisation"]),
    )


def _point_row(point: SweepPoint) -> tuple[Cell, ...]:
    findings = findings_at(point)
    usual, best, clairvoyant = (findings[key] for key in ARM_LABELS)
    return (
        cells.word(" ".join(f"{key}={value}" for key, value in point.settings.items())),
        cells.percent(usual["token_hit_rate"]),
        cells.word(best["arm"]),
        cells.percent(best["token_hit_rate"]),
        cells.word(clairvoyant["arm"]),
        cells.percent(clairvoyant["token_hit_rate"]),
        cells.percent(findings["bound"]),
        *(cells.seconds(arm["ttft_mean_s"]) for arm in (usual, best, clairvoyant)),
        cells.seconds(findings["least_s"]),
        _ratio(findings["gain"]),
        cells.ratio(findings["throughput"]),
    )


def _ratio(gain: Mapping[str, Any] | None) -> Cell:
    return MISSING if gain is None else cells.ratio(gain["mean"], interval((gain["low"], gain["high"])))
