"""Tables of the analysis `families`, from its entry in `summary.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.analyses.base import Findings, Finished, MeasuredArm, findings_by_axis, point_entries
from spanlab.report.data import estimate
from spanlab.report.sweep import COLOURS, PALE, GridCell, SweepPoint, draw_grid
from spanlab.report.table import (
    MISSING_TEXT,
    Cell,
    Field,
    Table,
    byte_size,
    one_decimal,
    percent,
    ratio_interval,
    seconds,
    seconds_interval,
    tabulate,
    word,
)
from spanlab.settings.analyses import (
    ANALYSES,
    ARMS,
    ORDERED,
    PLAIN,
    PREFIX,
    REPAIRED,
    REPEAT,
    STEPS,
    Analysis,
    FamilySettings,
)
from spanlab.settings.arms import check_names
from spanlab.settings.study import Study
from spanlab.stats import Interval, holm, positive_ratio, positive_ratio_p

if TYPE_CHECKING:
    from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Comparison of families of arms: the best arm of each, and the lead of the best family.
# ------------------------------------------------------------------------------

# No timing model is accurate to a few percent.
SMALLEST_LEAD = 1.05


@dataclass(frozen=True)
class FamilyEntry:
    """The arm of a family with the lowest mean TTFT.

    `any_position_share`  share of prompt tokens that an infinite cache reuses, with spans matched
                          at any position
    `speedup`             mean TTFT of the first family ÷ that of this one, 95 % interval; None for
                          the first
    """

    family: str
    arm: str
    ttft_mean_s: float
    ttft_mean_s_interval: tuple[float, float] | None
    token_hit_rate: float
    any_position_share: float
    regret_points: float | None
    resident_bytes: float
    speedup: Interval | None


@dataclass(frozen=True)
class Lead:
    """The family with the lowest mean TTFT, and the mean TTFT of the next family ÷ its own, with a
    95 % interval.

    `ratio`     of the best arms; its interval ignores that these were chosen on the same seeds
    `held_out`  the same where the arms of each seed were chosen on the other seeds; as `ratio` for
                one seed
    `p`         two-sided p value of a held-out ratio of `SMALLEST_LEAD`; 1 where it is less, None
                without an interval
    """

    family: str
    next: str
    ratio: Interval | None
    held_out: Interval | None
    p: float | None

    @property
    def shown(self) -> bool:
        """Whether the whole interval lies above `SMALLEST_LEAD`."""
        return (
            self.ratio is not None and self.ratio.low is not None and self.ratio.low > SMALLEST_LEAD
        )


def compare_families(
    arms: Sequence[MeasuredArm], families: Mapping[str, Sequence[str]]
) -> tuple[list[FamilyEntry], Lead | None]:
    """Return the best arm of each family that has one in `arms`, and the lead; speedups are over
    the first family.

    The lead is None where fewer than two families have an arm.
    """
    members = {name: [arm for arm in arms if arm.name in names] for name, names in families.items()}
    best = {
        name: min(candidates, key=lambda arm: arm.rank)
        for name, candidates in members.items()
        if candidates
    }
    reference = next(iter(best.values()), None)
    entries = []
    for name, arm in best.items():
        summary, sizes = arm.summary, arm.summary["bytes"]
        entries.append(
            FamilyEntry(
                family=name,
                arm=arm.name,
                ttft_mean_s=summary["ttft_s"]["mean"],
                ttft_mean_s_interval=summary["ttft_s_interval"]["mean"],
                token_hit_rate=summary["token_hit_rate"],
                any_position_share=summary["bounds"]["infinite_any_position_tokens"]
                / summary["tokens"]["prompt"],
                regret_points=summary["bounds"]["regret_points"],
                resident_bytes=sizes["kv_resident_mean"]
                + sizes["state_resident_mean"]
                + sizes["copied_mean"],
                speedup=None if reference is None or reference is arm else ratio_of(reference, arm),
            )
        )
    ranked = sorted(best, key=lambda name: best[name].rank)
    if len(ranked) < 2:
        return entries, None
    first, second = ranked[:2]
    ratio = ratio_of(best[second], best[first])
    return entries, Lead(
        first, second, ratio, *_judged_by_other_seeds(members[second], members[first])
    )


def _judged_by_other_seeds(
    slower: Sequence[MeasuredArm], faster: Sequence[MeasuredArm]
) -> tuple[Interval | None, float | None]:
    """Return the ratio of the best arms, those of each seed chosen on the others, and the p value
    of a small lead."""
    chosen: list[list[MeasuredArm]] = [[], []]
    for arms, best in zip((slower, faster), chosen, strict=True):
        seeds = np.arange(len(arms[0].ttft_sums))
        for seed in seeds:
            # the least TTFT on all other seeds, saturated arms last; on the only seed if there is one
            others = seeds != seed if len(seeds) > 1 else seeds == seed
            best.append(min(arms, key=lambda arm: (arm.saturated, arm.ttft_sums[others].sum())))
    if any(arm.saturated for arms in chosen for arm in arms):
        return None, None
    above, below = (
        np.stack([arm.ttft_sums[seed] for seed, arm in enumerate(arms)]) for arms in chosen
    )
    ratio, p = positive_ratio(above, below), positive_ratio_p(above, below, SMALLEST_LEAD)
    return ratio, None if np.isnan(p) else p if ratio.mean > SMALLEST_LEAD else 1.0


def shown_together(leads: Sequence[Mapping[str, Any] | None]) -> list[bool]:
    """Return which of several leads, as in `summary.json`, are shown after Holm's correction for
    their number."""
    return holm([math.nan if lead is None or lead["p"] is None else lead["p"] for lead in leads])


def without_ratios(
    entries: Sequence[FamilyEntry], lead: Lead | None
) -> tuple[list[FamilyEntry], Lead | None]:
    """Return the comparison without speedups and ratio of the lead, for a machine that was too
    noisy."""
    return [replace(entry, speedup=None) for entry in entries], lead and replace(
        lead, ratio=None, held_out=None, p=None
    )


def plain(entries: Sequence[FamilyEntry], lead: Lead | None) -> dict[str, Any]:
    """Return the comparison as an entry of `summary.json`."""
    ratios = {} if lead is None else {"ratio": lead.ratio, "held_out": lead.held_out}
    return {
        "entries": [
            asdict(entry) | {"speedup": entry.speedup and entry.speedup._asdict()}
            for entry in entries
        ],
        "lead": lead
        and {
            **asdict(lead),
            **{name: ratio and ratio._asdict() for name, ratio in ratios.items()},
            "shown": lead.shown,
        },
    }


def ratio_of(slower: MeasuredArm, faster: MeasuredArm) -> Interval | None:
    """Return the mean TTFT of one arm ÷ that of another on the same requests; None where a queue
    grows."""
    if slower.saturated or faster.saturated:
        return None
    return positive_ratio(slower.ttft_sums, faster.ttft_sums)


# ------------------------------------------------------------------------------
# Whether position-independent caching pays: its best arms compared with the best arm that keeps
# answers unchanged.
# ------------------------------------------------------------------------------

EXACT = (PREFIX, ORDERED)
#: A gain below this is not worth another method.
LEAST_GAIN = 1.05


@dataclass(frozen=True)
class Step:
    """The arm of a family with the lowest mean TTFT.

    `gain`  mean TTFT of the reference arm ÷ that of this arm. The reference is the best exact arm;
            for cached order, the best prefix cache. None for prefix caches, and where a queue grows
    """

    family: str
    arm: str
    ttft_mean_s: float
    token_hit_rate: float
    gain: Interval | None

    @property
    def pays(self) -> bool:
        """Whether the whole interval of the gain lies above `LEAST_GAIN`."""
        return self.gain is not None and self.gain.low is not None and self.gain.low > LEAST_GAIN


@dataclass(frozen=True)
class BreakEven:
    """The steps of one study, and the family beyond which no further change of answers pays.

    `verdict`  repaired, where repaired spans pay; else plain, where only spans without repair pay
               (the repair costs the gain); else cached_order, where it pays over the given order;
               else prefix
    """

    steps: tuple[Step, ...]
    verdict: str

    def plain(self) -> dict[str, Any]:
        """Return the entry of `summary.json`."""
        steps = [
            asdict(step) | {"gain": step.gain and step.gain._asdict(), "pays": step.pays}
            for step in self.steps
        ]
        return {"steps": steps, "verdict": self.verdict}


def break_even(arms: Sequence[MeasuredArm], families: Mapping[str, Sequence[str]]) -> BreakEven:
    """Compare the families of STEPS; each must have an arm in `arms`, and all arms served the same
    requests."""
    best = {
        name: min((arm for arm in arms if arm.name in families[name]), key=lambda arm: arm.rank)
        for name in STEPS
    }
    exact = min((best[name] for name in EXACT), key=lambda arm: arm.rank)
    references = {ORDERED: best[PREFIX], REPAIRED: exact, PLAIN: exact}
    steps = {}
    for name in STEPS:
        arm, reference = best[name], references.get(name)
        gain = None if reference is None else ratio_of(reference, arm)
        steps[name] = Step(
            name, arm.name, arm.summary["ttft_s"]["mean"], arm.summary["token_hit_rate"], gain
        )
    verdict = next((name for name in (REPAIRED, PLAIN, ORDERED) if steps[name].pays), PREFIX)
    return BreakEven(tuple(steps.values()), verdict)


NO_LEAD = f"no lead above {100 * (SMALLEST_LEAD - 1):.0f} %"
_NOTES = (
    "best arm = the one with the lowest mean TTFT of its family; speedup = mean TTFT of the first family's best arm ÷ "
    "its own, same requests, [a, b] = 95 % interval",
    "any-position bound = share of prompt tokens that an infinite position-independent cache reuses; regret = "
    "offline bound under the arm's memory − reused, in points of prompt tokens",
)


def families_table(findings: Mapping[str, Any]) -> Table:
    """One row per family of one study."""
    return tabulate(
        "families", f"Families: {lead_text(findings['lead'])}", _FIELDS, findings["entries"], _NOTES
    )


def lead_text(lead: Mapping[str, Any] | None) -> str:
    """Describe which family leads, and by which factor."""
    if lead is None:
        return "nothing to compare"
    if not lead["shown"]:
        return f"{NO_LEAD} is shown between {family_text(lead['family'])} and {family_text(lead['next'])}"
    return f"{family_text(lead['family'])} leads {family_text(lead['next'])} by {ratio_interval(lead['ratio']).text}"


def family_text(family: str) -> str:
    """Return the name of a family as text."""
    return family.replace("_", " ")


def family_name(family: str) -> Cell:
    """A cell with the name of a family."""
    return word(family_text(family))


_FIELDS = (
    Field("family", "family", family_name, left=True),
    Field("arm", "best arm", word, left=True),
    Field(
        "ttft_mean_s",
        "mean TTFT",
        seconds_interval,
        lambda entry: estimate(entry["ttft_mean_s"], entry["ttft_mean_s_interval"]),
    ),
    Field("speedup", "speedup", ratio_interval),
    Field("token_hit_rate", "token\nhit rate", percent),
    Field("any_position_share", "any-position\nbound", percent, keep=2),
    Field("regret_points", "regret,\npoints", one_decimal, keep=3),
    Field("resident_bytes", "resident", byte_size, keep=1),
)


def winners_table(table: str, points: Sequence[SweepPoint]) -> Table:
    """One row per point: the leading family, its lead, and token hit rates of all families."""
    names = families_at(points)
    fields = (
        Field("point", "point", word, left=True),
        Field("family", "lowest\nmean TTFT", family_name, "first.family", left=True),
        Field("arm", "its arm", word, "first.arm", left=True),
        Field("lead", "lead over\nthe next", ratio_interval, "lead.ratio"),
        Field(
            "lead_shown",
            "shown",
            lambda shown: Cell(bool(shown), "yes" if shown else "no"),
            "lead.shown",
        ),
        *(family_field("speedup", "speedup", ratio_interval, name, 2) for name in names[1:]),
        *(family_field("token_hit_rate", "token hit rate", percent, name, 1) for name in names),
        Field("any_position_share", "any-position\nbound", percent, "first.any_position_share"),
    )
    first = family_text(names[0])
    note = f"speedup = mean TTFT of the best arm of {first} ÷ that of the family; {_NOTES[1].partition(';')[0]}"
    leads = (
        f"[a, b] = 95 % interval of each point alone; shown = after Holm's correction for all points, a lead is above "
        f"{SMALLEST_LEAD:g}, with the arms of each seed chosen on the other seeds; else {NO_LEAD} is shown"
    )
    rows = []
    for point in points:
        findings = point.findings("families")
        entries, lead = {entry["family"]: entry for entry in findings["entries"]}, findings["lead"]
        first = entries[lead["family"]] if lead else next(iter(entries.values()))
        rows.append({"point": point.name, "lead": lead, "first": first, "families": entries})
    return tabulate(table, "Which family has the lowest mean TTFT", fields, rows, (note, leads))


def families_at(points: Sequence[SweepPoint]) -> list[str]:
    """Return the names of all families of these points, in the order of their first points."""
    return list(
        dict.fromkeys(
            entry["family"] for point in points for entry in point.findings("families")["entries"]
        )
    )


def family_field(
    key: str, label: str, cell: Callable[[Any], Cell], family: str, keep: int = 0
) -> Field:
    """Return the field of the entry `key` of one family, in rows with `families` by name."""
    heading = f"{label}\n{family_text(family)}"
    return Field(
        f"{key}_{family}", heading, cell, lambda row: row["families"].get(family, {}).get(key), keep
    )


# ------------------------------------------------------------------------------
# The figure of the analysis `families`: the family with the lowest mean TTFT at each point.
# ------------------------------------------------------------------------------


def draw_winners(points: Sequence[SweepPoint]) -> Figure:
    """Draw a cell per point of a product of settings, coloured by the family with the lowest mean
    TTFT."""
    from matplotlib.patches import Patch

    names = families_at(points)
    colours = dict(zip(names, COLOURS, strict=False))
    title = f"The family with the lowest mean TTFT, and its speedup over {family_text(names[0])}"
    legend = {family_text(name): colour for name, colour in colours.items()}
    pale = Patch(facecolor="#888888", alpha=PALE, label=f"pale: {NO_LEAD}")
    text_key = Patch(facecolor="none", label="a × · b %: speedup · token hit rate")
    return draw_grid(points, title, legend, (pale, text_key), partial(_cell, colours))


def _cell(colours: Mapping[str, str], point: SweepPoint) -> GridCell | None:
    findings = point.findings("families")
    lead = findings["lead"]
    if lead is None:
        return None
    best = next(entry for entry in findings["entries"] if entry["family"] == lead["family"])
    # the speedup over the first family; missing where a queue grew or the machine was noisy
    if best is findings["entries"][0]:
        speedup = "1 ×"
    else:
        speedup = MISSING_TEXT if best["speedup"] is None else f"{best['speedup']['mean']:.2f} ×"
    text = f"{speedup} · {100 * best['token_hit_rate']:.0f} %"
    return GridCell(colours[best["family"]], text, lead["shown"])


# ------------------------------------------------------------------------------
# The analysis `families`: the best arm of each family of methods, and the family that leads at
# each point.
# ------------------------------------------------------------------------------


def families_of_study(finished: Finished) -> Findings:
    """Return the comparison of the families of one study; no speedups where the machine was
    noisy."""
    compared = compare_families(finished.measured, finished.study.analyses.families.arms)
    entry = plain(*(without_ratios(*compared) if finished.noise_sentence("speedups") else compared))
    return Findings(summary={"families": entry}, tables=(families_table(entry),))


def families_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return the family that leads at each point: one table and one figure per axis of the
    sweep."""
    # `shown`: whether a lead is shown among all points; `shown_alone`: in the point's own study
    leads = [point.findings("families")["lead"] for point in points]
    judged = []
    for point, lead, shown in zip(points, leads, shown_together(leads), strict=True):
        lead = lead and lead | {"shown": shown, "shown_alone": lead["shown"]}
        summary = {**(point.summary or {}), "families": point.findings("families") | {"lead": lead}}
        judged.append(replace(point, summary=summary))
    winners = point_entries(judged, "families")
    return findings_by_axis("winners", judged, winners_table, draw_winners, {"winners": winners})


def check_families(study: Study) -> None:
    """Raise ValueError for fewer than two families, and for unknown arms."""
    is_read = not {"families", "policies", "break_even"}.isdisjoint(study.chosen_analyses())
    if {"families", "policies"} & set(study.chosen_analyses()) and len(
        study.analyses.families.arms
    ) < 2:
        raise ValueError(f"families={study.analyses.families.arms}: expected two families or more")
    if "break_even" in study.chosen_analyses() and set(study.analyses.families.arms) != set(STEPS):
        raise ValueError(
            f"families={study.analyses.families.arms} with analyses=break_even: expected {', '.join(STEPS)}"
        )
    for name, arms in study.analyses.families.arms.items():
        check_names(f"families.{name}", arms, study.arms, is_read)
        if not arms and is_read:
            raise ValueError(f"families.{name}=[]: expected one or more of {', '.join(study.arms)}")


ANALYSES.add(
    Analysis(
        "families",
        families_of_study,
        needs=(ARMS, REPEAT),
        options=FamilySettings,
        check=check_families,
        check_unread=check_families,
        of_points=families_of_points,
    )
)


# ------------------------------------------------------------------------------
# Tables of the analysis `break_even`, from its entry in `summary.json`.
# ------------------------------------------------------------------------------

#: Labels of verdicts, in the order of the legend. Where only plain PIC pays, repair costs as much
#: as PIC gains.
VERDICTS = {
    "prefix": "prefix caching suffices",
    "cached_order": "cached order suffices",
    "plain": "only plain PIC pays",
    "repaired": "repaired PIC pays",
}
NOTE = (
    "gain = mean TTFT of the best exact arm ÷ that of the family's best arm, same requests; of cached order: over "
    "prefix caching; a family pays where the 95 % interval of its gain lies above 1.05: each gain alone, without a "
    "correction for the number of points or for the choice of arms"
)
_STEP_FIELDS = (
    Field("family", "family", family_name, left=True),
    Field("arm", "best arm", word, left=True),
    Field("ttft_mean_s", "mean TTFT", seconds),
    Field("token_hit_rate", "token\nhit rate", percent),
    Field("gain", "gain", ratio_interval),
)


def steps_table(findings: Mapping[str, Any]) -> Table:
    """One row per family of one study."""
    return tabulate(
        "break_even",
        f"Break-even: {VERDICTS[findings['verdict']]}",
        _STEP_FIELDS,
        findings["steps"],
        (NOTE,),
    )


def break_even_table(table: str, points: Sequence[SweepPoint]) -> Table:
    """One row per point: the verdict, and the gains of all families."""
    families = [step["family"] for step in points[0].findings("break_even")["steps"]]
    fields = (
        Field("point", "point", word, left=True),
        Field("verdict", "verdict", lambda verdict: word(VERDICTS[verdict]), left=True),
        *(family_field("gain", "gain", ratio_interval, name) for name in families[1:]),
        *(family_field("token_hit_rate", "token hit rate", percent, name, 1) for name in families),
    )
    rows = []
    for point in points:
        findings = point.findings("break_even")
        steps = {step["family"]: step for step in findings["steps"]}
        rows.append({"point": point.name, "verdict": findings["verdict"], "families": steps})
    return tabulate(table, "Where position-independent caching pays", fields, rows, (NOTE,))


# ------------------------------------------------------------------------------
# The figure of the analysis `break_even`: points where PIC pays, and points where an exact
# method suffices.
# ------------------------------------------------------------------------------

_COLOURS = dict(zip(VERDICTS, COLOURS, strict=False))


def draw_break_even(points: Sequence[SweepPoint]) -> Figure:
    """Draw a cell per point of a product of settings, coloured by the verdict."""
    legend = {label: _COLOURS[verdict] for verdict, label in VERDICTS.items()}
    title = "Where PIC pays: gain of repaired / plain over the best exact method"
    return draw_grid(points, title, legend, (), _step_cell)


def _step_cell(point: SweepPoint) -> GridCell:
    findings = point.findings("break_even")
    gains = {step["family"]: step["gain"] for step in findings["steps"]}
    return GridCell(
        _COLOURS[findings["verdict"]], f"{_short(gains['repaired'])} / {_short(gains['plain'])}"
    )


def _short(gain: dict[str, Any] | None) -> str:
    return MISSING_TEXT if gain is None else f"{gain['mean']:.2g}"


# ------------------------------------------------------------------------------
# The analysis `break_even`: whether position-independent caching pays over prefix caching and
# cached order.
# ------------------------------------------------------------------------------


def break_even_of_study(finished: Finished) -> Findings:
    """Return the families of one study and the one that suffices; None where a family has no arm
    that ran."""
    arms, families = finished.measured, finished.study.analyses.families.arms
    names = {arm.name for arm in arms}
    missing = [name for name in STEPS if names.isdisjoint(families[name])]
    if missing:
        return Findings(
            {"break_even": None}, caveats=(f"no break-even: no arm of {', '.join(missing)} ran",)
        )
    entry = break_even(arms, families).plain()
    return Findings({"break_even": entry}, tables=(steps_table(entry),))


def break_even_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return the family that suffices at each point: one table and one figure per axis of the
    sweep."""
    ran = [point for point in points if (point.summary or {})["break_even"] is not None]
    summary = {"break_even": point_entries(ran, "break_even")}
    figure = draw_break_even
    return findings_by_axis("break_even", ran, break_even_table, figure, summary)


ANALYSES.add(
    Analysis(
        "break_even",
        break_even_of_study,
        needs=(ARMS, REPEAT),
        check=check_families,
        of_points=break_even_of_points,
    )
)
