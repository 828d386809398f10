"""Tables of the analysis `tiers`: arms, traffic of tiers, lengths from which loading pays, and
points of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.analyses.base import Findings, Finished, findings_by_axis
from spanlab.build import build_policy, build_prefill_time, tiers_of
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.tiers import Link, TierRules, overlapped
from spanlab.report import style
from spanlab.report.style import log_scale
from spanlab.report.sweep import SweepPoint, axis_name, footer_of, value_text
from spanlab.report.table import (
    Cell,
    Field,
    Table,
    byte_size,
    count,
    number_format,
    percent,
    seconds,
    tabulate,
    word,
)
from spanlab.settings.analyses import ANALYSES, ARMS, Analysis
from spanlab.settings.study import Study
from spanlab.study.numbers import RunCell
from spanlab_sim.bounds import PrefillTime, break_even_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Arms = Mapping[str, Mapping[str, Any]]

_LOADED = "loaded = came from lower tiers ÷ prompt tokens, in all admissions; reused tokens count them too"
_DECLINED = (
    "declined = tokens in lower tiers that were computed, because that was faster ÷ prompt tokens"
)
_CRITICAL = "load on path = delay of the first token by loads, mean over requests"
_NOTES = (_LOADED, _DECLINED, _CRITICAL, "TTFT – = saturated, no steady-state delay")
_MEASURES = (
    Field("token_hit_rate", "token\nhit rate", percent),
    Field("loaded_share", "loaded", percent),
    Field("declined_share", "declined", percent),
    Field("critical_load_s", "load\non path", seconds),
    Field("ttft_mean_s", "TTFT\nmean", seconds),
)
_ARM = Field("arm", "arm", word, left=True)


def arms_table(arms: Arms, caveats: tuple[str, ...] = ()) -> Table:
    """Return loads and mean TTFT of each arm; `caveats` are notes of the table."""
    rows = [{"arm": name, **arm} for name, arm in arms.items()]
    return tabulate(
        "tiers", "Loads from lower tiers", (_ARM, *_MEASURES), rows, (*_NOTES, *caveats)
    )


def break_even_table(
    rules: Mapping[str, Mapping[str, Any]], tokens: Mapping[str, int | None]
) -> Table:
    """Return the shortest length at which loading from an idle tier is faster than computing, by
    tier."""
    fields = (
        Field("tier", "tier", word, left=True),
        Field("gib", "GiB", number_format("g")),
        Field("bandwidth_gb_s", "GB/s", number_format("g")),
        Field("latency_s", "latency", seconds),
        Field(
            "break_even_tokens",
            "loading pays\nfrom (tokens)",
            lambda length: Cell(length, _length(length)),
        ),
    )
    rows = [
        {**rule, "tier": name, "break_even_tokens": tokens[name]} for name, rule in rules.items()
    ]
    note = (
        "prefix of a prompt alone on the device, over an idle link; transfers in flight move it up"
    )
    return tabulate("tiers_break_even", "Load or compute", fields, rows, (note,))


def tiers_table(arms: Arms) -> Table:
    """Return resident bytes and traffic of each tier, mean over runs; tiers that an arm does not
    use are absent."""
    fields = (
        _ARM,
        Field("tier", "tier", word, "name", left=True),
        Field("resident_peak_bytes", "peak", byte_size),
        Field("loaded_bytes", "loaded", byte_size),
        Field("written_bytes", "written", byte_size),
        Field("evicted_blocks", "evicted\nblocks", count, keep=1),
        Field("demoted_blocks", "demoted\nblocks", count, keep=3),
        Field("quantised_blocks", "quantised\nblocks", count, keep=4),
        Field("refused_blocks", "refused\nblocks", count, keep=2),
        Field("mean_transfers", "transfers\nin flight", number_format(".2f")),
    )
    rows = [{"arm": name, **tier} for name, arm in arms.items() for tier in arm["tiers"]]
    note = "refused = not written, because every evictable block was in use; transfers in flight = mean over time"
    return tabulate("tiers_traffic", "Traffic of tiers", fields, rows, (note,))


def points_table(name: str, points: Sequence[SweepPoint]) -> Table:
    """Every arm at every point of one axis."""
    axis = axis_name(points[0].axis)
    lengths = Field(
        "break_even_tokens",
        "loading pays\nfrom (tokens)",
        lambda tokens: word(
            ", ".join(f"{tier} {_length(length)}" for tier, length in tokens.items())
        ),
        keep=1,
    )
    fields = (Field("point", axis, word, left=True), _ARM, *_MEASURES, lengths)
    rows = [
        {
            "point": value_text(point.value),
            "arm": name,
            "break_even_tokens": tiers["break_even_tokens"],
            **arm,
        }
        for point, tiers in ((point, point.findings("tiers")) for point in points)
        for name, arm in tiers["arms"].items()
    ]
    return tabulate(name, f"Loads from lower tiers by {axis}", fields, rows, _NOTES)


def _length(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens:,}"


# ------------------------------------------------------------------------------
# The figure of the analysis `tiers`: hits and TTFT side by side, over one swept number.
# ------------------------------------------------------------------------------


def draw_tiers(points: Sequence[SweepPoint]) -> Figure | None:
    """Draw hit rate and mean TTFT of every arm without saturated points; None where the axis is not
    numeric."""
    if len(points) < 2 or not all(
        isinstance(point.value, float) and point.value > 0 for point in points
    ):
        return None
    title, axis = "Hits and TTFT by a tier below the device", axis_name(points[0].axis)
    figure, [[hits, ttft]] = style.framed_with(footer_of(points), title, cols=2, wspace=0.3)
    _panel(hits, points, "token_hit_rate", 100)
    _panel(ttft, points, "ttft_mean_s", 1000)
    style.label(hits, axis, "token hit rate (%)")
    style.label(ttft, axis, "mean TTFT (ms)")
    hits.set_ylim(0, 100)
    log_scale(ttft.yaxis, *ttft.dataLim.intervaly)
    hits.legend(fontsize=style.TICK_PT, frameon=False)
    return figure


def _panel(axes: Axes, points: Sequence[SweepPoint], key: str, factor: float) -> None:
    """One measure of every arm, over the swept number on a log scale."""
    for arm, stroke in style.strokes((arm, arm) for arm in _arms(points[0])).items():
        values = [(point.value, _arms(point)[arm][key]) for point in points]
        shown = sorted(
            (position, factor * value) for position, value in values if value is not None
        )
        axes.plot(
            [position for position, _ in shown],
            [value for _, value in shown],
            label=arm,
            **stroke.options,
        )
    ticks = [float(point.value) for point in points]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


def _arms(point: SweepPoint) -> dict[str, Any]:
    return dict(point.findings("tiers")["arms"])


# ------------------------------------------------------------------------------
# The analysis `tiers`: loaded and declined tokens by arm, traffic by tier, and the break-even
# length of loading.
# ------------------------------------------------------------------------------


def tiers_of_study(finished: Finished) -> Findings:
    """Return loads by arm, traffic by tier, and the break-even length of each tier."""
    study, arms = finished.study, {}
    for result in finished.results:
        name, summary = result.data.name, result.data.summary
        prompt, loads = summary["tokens"]["prompt"], _loads(finished, name)
        traffic = [run["tiers"] for run in result.data.runs if "tiers" in run]
        means = [
            {"name": rows[0]["name"]}
            | {key: float(np.mean([row[key] for row in rows])) for key in rows[0] if key != "name"}
            for rows in zip(*traffic, strict=True)
        ]
        arms[name] = {
            "token_hit_rate": summary["token_hit_rate"],
            "ttft_mean_s": summary["ttft_s"]["mean"],
            "loaded_share": loads["loaded_tokens"] / prompt,
            "declined_share": loads["declined_tokens"] / prompt,
            "critical_load_s": loads["critical_load_s"] / summary["requests"],
            "tiers": means,
        }
    least = break_even(study)
    entry = {"break_even_tokens": least, "arms": arms}
    quantised = [
        f"{name} ({rules.quantise_to})"
        for name, rules in study.store.tiers.items()
        if rules.quantise_to
    ]
    effect = (
        "is read in its quantised form: answers change, and the effect is unknown in the simulator"
    )
    caveats = (f"KV from {', '.join(quantised)} {effect}",) if quantised else ()
    rules = {name: vars(tier) for name, tier in study.store.tiers.items()}
    return Findings(
        summary={"tiers": entry},
        tables=(arms_table(arms, caveats), break_even_table(rules, least), tiers_table(arms)),
        caveats=caveats,
    )


def tiers_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return hits and times by arm at every point: one table and one figure per axis of the
    sweep."""
    return findings_by_axis("tiers", points, points_table, draw_tiers, {})


def break_even(study: Study) -> dict[str, int | None]:
    """Return the least number of tokens that load faster from an idle tier than they compute, by
    tier; None: no number.

    Blocks are loaded where an arm has a pool, else one state, which replaces all tokens before it.
    """
    arms = [study.arms[name] for name in study.chosen()]
    pools = [arm for arm in arms if arm.pool is not None]
    arm = pools[0] if pools else next(arm for arm in arms if tiers_of(study, arm))
    policy = build_policy(study, arm, 0, 1)
    steps = build_prefill_time(study, policy, study.batch)
    if isinstance(policy, TreePolicy):
        size, state = policy.store.tree.block_size, policy.store.state_bytes
        ready = {
            name: partial(_state_ready_ns, rules, state, steps)
            for name, rules in study.store.tiers.items()
        }
    else:
        assert isinstance(policy, BlockPolicy), "other policies are refused where there are tiers"
        size, layers = policy.blocks.size, study.model.num_layers
        ready = {
            name: partial(_ready_ns, rules, policy, steps, layers)
            for name, rules in study.store.tiers.items()
        }
    return {name: break_even_tokens(ready_ns, steps, size) for name, ready_ns in ready.items()}


def _state_ready_ns(rules: TierRules, state_bytes: int, steps: PrefillTime, tokens: int) -> int:
    """Return nanoseconds until the token after a prefix is computed, with the state of the prefix
    loaded."""
    return Link(rules.bytes_per_s, rules.latency_s).delay(state_bytes) + sum(
        steps(tokens, tokens + 1)
    )


def _ready_ns(
    rules: TierRules, policy: BlockPolicy, steps: PrefillTime, layers: int, tokens: int
) -> int:
    """Return nanoseconds until the token after a prefix is computed, with the prefix loaded over an
    idle link."""
    blocks = tokens // policy.blocks.size + (
        policy.blocks.state_groups if policy.rules.needs_states else 0
    )
    load_ns = Link(rules.bytes_per_s, rules.latency_s).delay(blocks * policy.store.block_bytes)
    (step_ns,) = steps(tokens, tokens + 1)
    return overlapped(load_ns, step_ns, layers) if rules.load == "layerwise" else load_ns + step_ns


def _loads(finished: Finished, arm: str) -> dict[str, float]:
    """Return sums over the arm's counted requests at the study's own load; zeros for an arm without
    tiers."""
    study, names = finished.study, ("loaded_tokens", "declined_tokens", "critical_load_s")
    if not tiers_of(study, study.arms[arm]):
        return dict.fromkeys(names, 0.0)
    cells = {RunCell(seed, study.arrivals.rate_rps) for seed in study.runs.seeds}
    runs = [columns for cell, columns in finished.files[arm].columns().items() if cell in cells]
    return {
        name: float(sum(run[name][run["counted"].astype(bool)].sum() for run in runs))
        for name in names
    }


ANALYSES.add(Analysis("tiers", tiers_of_study, needs=(ARMS,), of_points=tiers_of_points))
