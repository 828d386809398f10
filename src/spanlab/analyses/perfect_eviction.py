"""Value of perfect eviction: the best clairvoyant arm compared with arms without foresight."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from spanlab.analyses.base import Findings, Finished, MeasuredArm, findings_by_axis, point_entries
from spanlab.analyses.families import ratio_of
from spanlab.report import style
from spanlab.report.style import log_scale
from spanlab.report.sweep import SweepPoint, axis_name, footer_of
from spanlab.report.table import (
    Field,
    Table,
    one_decimal,
    percent,
    ratio,
    ratio_interval,
    seconds,
    tabulate,
    word,
)
from spanlab.settings.analyses import ANALYSES, ARMS, REPEAT, Analysis
from spanlab.stats import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class EvictionResult:
    """Results of one arm under a budget; regrets as in `summary.json`, `utilisation` None without a
    timing model."""

    arm: str
    token_hit_rate: float
    regret_points: float
    ttft_mean_s: float | None
    ttft_regret_s: float | None
    utilisation: float | None


@dataclass(frozen=True)
class PerfectEviction:
    """Three arms, and bounds that hold for all of them.

    `usual`       the baseline
    `best`        the arm with the highest token hit rate among those without foresight
    `known`       the clairvoyant arm with the highest token hit rate
    `bound`       upper bound of the token hit rate over all eviction orders
    `least_s`     lower bound of the mean TTFT over all eviction orders; None where it is unknown
    `gain`        mean TTFT of the baseline ÷ that of the clairvoyant; None where a queue grows
    `throughput`  requests per second at full capacity: the clairvoyant's ÷ the baseline's
    """

    usual: EvictionResult
    best: EvictionResult
    known: EvictionResult
    bound: float
    least_s: float | None
    gain: Interval | None
    throughput: float | None

    def plain(self) -> dict[str, Any]:
        """Return the entry of `summary.json`."""
        return asdict(self) | {"gain": self.gain and self.gain._asdict()}


def perfect_eviction(
    arms: Sequence[MeasuredArm], baseline: str, clairvoyants: Collection[str]
) -> PerfectEviction:
    """Compare arms of one study that store the same prefixes; at least one, not the baseline, is a
    clairvoyant."""
    usual = next(arm for arm in arms if arm.name == baseline)
    best = max((arm for arm in arms if arm.name not in clairvoyants), key=_hits)
    clairvoyant = max((arm for arm in arms if arm.name in clairvoyants), key=_hits)
    usual_busy, clairvoyant_busy = (arm.summary["utilisation"] for arm in (usual, clairvoyant))
    bounds, prompt = usual.summary["bounds"], usual.summary["tokens"]["prompt"]
    return PerfectEviction(
        usual=_eviction_result(usual),
        best=_eviction_result(best),
        known=_eviction_result(clairvoyant),
        bound=bounds["offline_tokens"] / prompt,
        least_s=bounds["least_ttft_s"],
        gain=ratio_of(usual, clairvoyant),
        throughput=usual_busy / clairvoyant_busy if usual_busy and clairvoyant_busy else None,
    )


def _hits(arm: MeasuredArm) -> float:
    return float(arm.summary["token_hit_rate"])


def _eviction_result(arm: MeasuredArm) -> EvictionResult:
    summary = arm.summary
    return EvictionResult(
        arm.name,
        summary["token_hit_rate"],
        summary["bounds"]["regret_points"],
        summary["ttft_s"]["mean"],
        summary["bounds"]["ttft_regret_s"],
        summary["utilisation"],
    )


# ------------------------------------------------------------------------------
# Tables of the analysis `perfect_eviction`, from its entry in `summary.json`.
# ------------------------------------------------------------------------------

#: Labels of the compared arms by their keys in the summary.
ARM_LABELS = {"usual": "baseline", "best": "best without foresight", "known": "clairvoyant"}
NOTES = (
    "offline bound = token hit rate that no eviction exceeds in this order of requests; TTFT bound = mean TTFT that "
    "none goes below: each request, alone on the engine, computes what the best use of memory does not reuse",
    "gain of TTFT = mean TTFT of the baseline ÷ that of the clairvoyant, same requests; of throughput = load that "
    "fills the capacity with the clairvoyant ÷ with the baseline, offered load ÷ utilisation",
)
_ARM_FIELDS = (
    Field("place", "", word, left=True),
    Field("arm", "arm", word, left=True),
    Field("token_hit_rate", "token\nhit rate", percent),
    Field("regret_points", "regret,\npoints", one_decimal),
    Field("ttft_mean_s", "TTFT\nmean", seconds),
    Field("ttft_regret_s", "TTFT above\nits bound", seconds),
    Field("utilisation", "load ÷\ncapacity", percent, keep=1),
)
_POINT_FIELDS = (
    Field("point", "point", word, left=True),
    Field("baseline", "hit rate\nbaseline", percent, "usual.token_hit_rate"),
    Field("best_arm", "best without\nforesight", word, "best.arm", 1, left=True),
    Field("best", "its hit\nrate", percent, "best.token_hit_rate"),
    Field("known_arm", "clairvoyant", word, "known.arm", 3, left=True),
    Field("known", "its hit\nrate", percent, "known.token_hit_rate"),
    Field("bound", "offline\nbound", percent),
    Field("ttft_baseline_s", "TTFT\nbaseline", seconds, "usual.ttft_mean_s"),
    Field("ttft_best_s", "TTFT\nbest", seconds, "best.ttft_mean_s", 2),
    Field("ttft_known_s", "TTFT\nclairvoyant", seconds, "known.ttft_mean_s"),
    Field("least_ttft_s", "TTFT\nbound", seconds, "least_s"),
    Field("gain_of_ttft", "gain of\nTTFT", ratio_interval, "gain"),
    Field("gain_of_throughput", "gain of\nthroughput", ratio, "throughput"),
)


def arms_table(findings: Mapping[str, Any]) -> Table:
    """Return one row per compared arm, and one for the bounds."""
    rows = [{"place": label, **findings[key]} for key, label in ARM_LABELS.items()]
    bound = {"token_hit_rate": findings["bound"], "ttft_mean_s": findings["least_s"]}
    rows.append(dict.fromkeys(rows[0]) | {"place": "bound", "arm": ""} | bound)
    gain, throughput = ratio_interval(findings["gain"]), ratio(findings["throughput"])
    title = f"Perfect eviction: TTFT {gain.text}, throughput {throughput.text}"
    return tabulate("perfect_eviction", title, _ARM_FIELDS, rows, NOTES)


def points_table(name: str, points: Sequence[SweepPoint]) -> Table:
    """One row per point."""
    rows = [{"point": point.name, **point.findings("perfect_eviction")} for point in points]
    return tabulate(name, "Gain of perfect eviction", _POINT_FIELDS, rows, NOTES)


# ------------------------------------------------------------------------------
# The figure of the analysis `perfect_eviction`: hits above, TTFT below, over the budget, one
# column per workload.
# ------------------------------------------------------------------------------

_STROKES = {"usual": ("#222222", "o"), "best": ("#0072b2", "s"), "known": ("#d55e00", "^")}
_BOUND: dict[str, Any] = {"color": "#7f7f7f", "linestyle": "--"}
_HEIGHT_IN = 5.6
_TOP_IN, _LEGEND_IN = 0.85, 0.3  # distances of the panels and of their legend from the top


def draw_perfect_eviction(points: Sequence[SweepPoint]) -> Figure | None:
    """Draw the last setting on the x axis and a panel per value of the others; None where it is not
    numeric."""
    panels: dict[str, list[SweepPoint]] = {}
    *_, last = points[0].settings
    for point in points:
        name = " ".join(value for key, value in point.settings.items() if key != last) or axis_name(
            last
        )
        panels.setdefault(name, []).append(point)
    if not all(point.settings[last].replace(".", "", 1).isdigit() for point in points):
        return None
    title = "Gain of perfect eviction"
    margins = style.Margins(top=_TOP_IN)
    figure, [hits, ttft] = style.framed_with(
        footer_of(points),
        title,
        2,
        len(panels),
        height=_HEIGHT_IN,
        margins=margins,
        hspace=0.16,
        wspace=0.3,
    )
    for upper, lower, (name, group) in zip(hits, ttft, panels.items(), strict=True):
        upper.set_title(name, fontsize=style.TICK_PT, loc="left", pad=3, color=style.INK)
        _panel(upper, group, last, "token_hit_rate", "bound", 100)
        _panel(lower, group, last, "ttft_mean_s", "least_s", 1000)
        upper.set_ylim(0, 100)
        upper.tick_params(labelbottom=False)
        log_scale(lower.yaxis, *lower.dataLim.intervaly)
        style.label(lower, axis_name(last))
    style.label(hits[0], "", "token hit rate (%)")
    style.label(ttft[0], axis_name(last), "mean TTFT (ms)")
    anchor = 0.01, 1 - _LEGEND_IN / figure.get_figheight()
    options = {"ncols": 4, "fontsize": style.NOTE_PT, "frameon": False}
    figure.legend(handles=hits[0].get_lines(), loc="upper left", bbox_to_anchor=anchor, **options)
    return figure


def _panel(
    axes: Axes, points: Sequence[SweepPoint], key: str, measure: str, bound: str, factor: float
) -> None:
    """Draw one measure of the three arms, and its bound, over the last setting."""
    positions = [float(point.settings[key]) for point in points]
    for arm, (colour, marker) in _STROKES.items():
        values = [point.findings("perfect_eviction")[arm][measure] for point in points]
        shown = [
            (x, factor * value)
            for x, value in zip(positions, values, strict=True)
            if value is not None
        ]
        names = {point.findings("perfect_eviction")[arm]["arm"] for point in points}
        label = f"{ARM_LABELS[arm]} ({names.pop()})" if len(names) == 1 else ARM_LABELS[arm]
        axes.plot(
            [x for x, _ in shown], [y for _, y in shown], color=colour, marker=marker, label=label
        )
    limits = [point.findings("perfect_eviction")[bound] for point in points]
    if None not in limits:
        axes.plot(positions, [factor * limit for limit in limits], label="bound", **_BOUND)
    axes.set_xscale("log")
    axes.set_xticks(positions, [f"{x:g}" for x in positions])
    axes.set_xticks([], minor=True)


# ------------------------------------------------------------------------------
# The analysis `perfect_eviction`: the gain of a clairvoyant arm over arms without foresight.
# ------------------------------------------------------------------------------


def perfect_eviction_of_study(finished: Finished) -> Findings:
    """Return baseline, best arm without foresight and clairvoyant; None where one of them did not
    run."""
    study, arms = finished.study, finished.measured
    clairvoyants = {arm.name for arm in arms if study.arms[arm.name].foresees}
    # why the comparison is impossible, or an empty text
    baseline = study.runs.baseline
    bounds = {
        arm.name: arm.summary["bounds"]["offline_tokens"]
        for arm in arms
        if arm.name not in clairvoyants
    }
    if not clairvoyants:
        reason = "no clairvoyant ran"
    elif baseline not in bounds:
        reason = f"the baseline {baseline} is not among the arms without foresight that ran"
    else:
        reason = "" if bounds[baseline] is not None else f"no bound of {baseline} is known"
    if reason:
        return Findings(
            {"perfect_eviction": None}, caveats=(f"no value of perfect eviction: {reason}",)
        )
    entry = perfect_eviction(arms, study.runs.baseline, clairvoyants).plain()
    return Findings({"perfect_eviction": entry}, tables=(arms_table(entry),))


def perfect_eviction_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return every point: one table and one figure per axis of the sweep."""
    ran = [point for point in points if (point.summary or {})["perfect_eviction"] is not None]
    summary = {"perfect_eviction": point_entries(ran, "perfect_eviction")}
    figure = draw_perfect_eviction
    return findings_by_axis("perfect_eviction", ran, points_table, figure, summary)


ANALYSES.add(
    Analysis(
        "perfect_eviction",
        perfect_eviction_of_study,
        needs=(ARMS, REPEAT),
        of_points=perfect_eviction_of_points,
    )
)
