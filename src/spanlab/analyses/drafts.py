"""The analysis `drafts`: what drafting costs the cache, and when it stops to pay.

A drafter with KV of its own costs hits: a block of each match is computed again, until a release
looks one token ahead (`core/releases.py`). In a hybrid each draft also holds and writes a recurrent
state, and a block has more tokens. A sweep compares draft lengths and block sizes; every point is a
way out for the server that runs today.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.analyses.base import Findings, Finished, point_entries
from spanlab.core.policies.block_pool import block_multiple, block_shape
from spanlab.core.releases import RELEASES
from spanlab.records import delays_of
from spanlab.report import style
from spanlab.report.data import token_hit_rate
from spanlab.report.sweep import SweepPoint, footer_of
from spanlab.report.table import (
    Field,
    Table,
    count,
    number_format,
    percent_interval,
    ratio,
    seconds,
    tabulate,
    word,
)
from spanlab.settings.analyses import ANALYSES, ARMS, Analysis
from spanlab.settings.server import held_token_bytes
from spanlab.settings.study import Study
from spanlab.study.numbers import Columns, read_records, select

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAFTS = "batch.speculation.draft_tokens"
Row = dict[str, Any]

# ------------------------------------------------------------------------------
# One study: what each arm serves, and what a hit costs it.
# ------------------------------------------------------------------------------


def drafts_of_study(finished: Finished) -> Findings:
    """Return the drafts of a study, and per arm its block, what a hit recomputes, output tokens per
    second, and E2E."""
    study, speculation, arms = finished.study, finished.study.batch.speculation, {}
    token_bytes = held_token_bytes(study.model, study.batch)
    for result in finished.results:
        name = result.data.name
        records = read_records(finished.files[name].records)
        counted = select(records, records["counted"].astype(bool))
        pool = study.arms[name].pool
        assert pool is not None, "checked before the study ran"
        inner = pool.inner_states
        if inner is None:
            inner = RELEASES[pool.release].exports_states(
                study.model, study.hardware.compute_capability
            )
        # vLLM's block for the model, where the arm gives none
        multiple, drafts = block_multiple(study.model, inner=inner), speculation.draft_tokens
        shape = block_shape(study.model, token_bytes, pool.block_size, multiple, drafts)
        arms[name] = {
            "block_size": shape.size,
            "token_hit_rate": token_hit_rate(result.data.summary)._asdict(),
            "recomputed_per_hit": _recomputed_per_hit(counted),
            "output_throughput": _throughput(counted),
            "e2e_s": float(delays_of(counted)["e2e_s"].mean()),
            "preemptions": int(counted["preemptions"].sum()),
        }
    given = {
        "draft_tokens": speculation.draft_tokens,
        "acceptance": speculation.acceptance,
        "arms": arms,
    }
    return Findings({"drafts": given})


def _recomputed_per_hit(columns: Columns) -> float | None:
    """Return the tokens that a request with a hit computes although an earlier prompt had them, in
    the mean."""
    hits = columns["reused_tokens"] > 0
    if not hits.any():
        return None
    return float((columns["seen_tokens"] - columns["reused_tokens"])[hits].mean())


def _throughput(columns: Columns) -> float:
    """Return the output tokens per second, over all seeds: a ratio of sums."""
    tokens, duration = 0, 0.0
    for seed in np.unique(columns["seed"]):
        of_seed = columns["seed"] == seed
        tokens += int(columns["output_tokens"][of_seed].sum())
        duration += float(
            columns["finished_s"][of_seed].max() - columns["arrived_s"][of_seed].min()
        )
    return tokens / duration


# ------------------------------------------------------------------------------
# A sweep: draft lengths and block sizes beside each other.
# ------------------------------------------------------------------------------


def drafts_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return every point and arm of a sweep, the fastest first in each panel, and curves over the
    draft length."""
    rows = _rows(points)
    return Findings(
        summary={"drafts": point_entries(points, "drafts")},
        tables=(drafts_table(rows),),
        figures={"drafts": partial(draw_drafts, rows, footer_of(points))},
    )


def _rows(points: Sequence[SweepPoint]) -> list[Row]:
    """Return a row per point and arm; `against_none` divides by the same arm and settings without
    drafts."""
    rows = []
    for point in points:
        if point.summary is None:
            continue
        others = {key: value for key, value in point.settings.items() if key != DRAFTS}
        panel = " ".join(value for key, value in others.items() if not key.endswith(".block_size"))
        blocks_given = next(
            (value for key, value in others.items() if key.endswith(".block_size")), "null"
        )
        measured = point.summary["drafts"]
        for arm, values in measured["arms"].items():
            drafts = measured["draft_tokens"]
            rows.append(
                {
                    "panel": panel,
                    "arm": arm,
                    "blocks": blocks_given,
                    "draft_tokens": drafts,
                    **values,
                }
            )
    plain = {
        (row["panel"], row["arm"], row["blocks"]): row for row in rows if row["draft_tokens"] == 0
    }
    for row in rows:
        without = plain.get((row["panel"], row["arm"], row["blocks"]))
        row["against_none"] = without and row["output_throughput"] / without["output_throughput"]
    return sorted(rows, key=lambda row: (row["panel"], -row["output_throughput"]))


def drafts_table(rows: Sequence[Row]) -> Table:
    """Return a row per point and arm, as ordered."""
    fields = (
        Field("panel", "load", word, left=True, empty=("",)),
        Field("draft_tokens", "drafts", number_format("d")),
        Field("block_size", "tokens\nper block", number_format(",")),
        Field("arm", "arm", word, left=True),
        Field("output_throughput", "output\ntokens/s", number_format(",.0f")),
        Field("against_none", "÷ without\ndrafts", ratio),
        Field("token_hit_rate", "token hit rate", percent_interval),
        Field("recomputed_per_hit", "recomputed\nper hit", number_format(",.0f")),
        Field("e2e_s", "E2E", seconds),
        Field("preemptions", "preemptions", count),
    )
    notes = (
        "the fastest first; output tokens/s = output tokens ÷ time from the first arrival to the last token, over all "
        "seeds; recomputed per hit = tokens that an earlier prompt had, and that a request with a hit computes again, "
        "in the mean; E2E = last token − arrival, mean",
    )
    return tabulate("drafts", "Ways to draft: throughput and hits", fields, rows, notes)


_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v")


def draw_drafts(rows: Sequence[Row], footer: str) -> Figure:
    """Draw throughput and token hit rate over the draft length: colours are arms, lines are block
    sizes."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(row["panel"] for row in rows))
    arms = sorted({row["arm"] for row in rows})
    blocks = sorted(
        {row["blocks"] for row in rows}, key=lambda value: (value != "null", len(value), value)
    )
    figure, axes = style.panels(
        footer,
        "Drafts: throughput and token hit rate by draft length",
        2 * len(names),
        2,
        (1.75, 2.6),
        margins=style.Margins(top=1.0, bottom=0.95),
        share=("col", "none"),
        hspace=0.5,
    )
    for at, panel in enumerate(names):
        for side, key in enumerate(("output_throughput", "token_hit_rate")):
            ax = axes[2 * at + side]
            for arm, colour in zip(arms, _COLOURS, strict=False):
                for blocks_given, line, marker in zip(blocks, _LINES, _MARKERS, strict=False):
                    curve = _curve(rows, panel, arm, blocks_given, key)
                    ax.plot(
                        *curve,
                        color=colour,
                        linestyle=line,
                        marker=marker,
                        markersize=4,
                        linewidth=1.3,
                    )
            ax.set_title(
                panel.replace("_", " "), fontsize=style.TICK_PT, color=style.INK, loc="left"
            )
            ax.set_xlabel("draft tokens per step", fontsize=style.TICK_PT)
            ax.set_ylabel(
                "reused (%)" if key == "token_hit_rate" else "output tokens per second",
                fontsize=style.LABEL_PT,
            )
            ax.set_ylim(0, 100 if key == "token_hit_rate" else None)
            ax.locator_params(axis="x", integer=True)
    lines = [
        Line2D([], [], color=colour, label=arm) for arm, colour in zip(arms, _COLOURS, strict=False)
    ]
    for blocks_given, line, marker in zip(blocks, _LINES, _MARKERS, strict=False):
        label = (
            "vLLM's block" if blocks_given == "null" else f"{int(blocks_given):,} tokens per block"
        )
        lines.append(Line2D([], [], color=style.INK, linestyle=line, marker=marker, label=label))
    top = 1 - 0.33 / figure.get_figheight()
    figure.legend(
        handles=lines,
        loc="upper left",
        bbox_to_anchor=(0.01, top),
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    return figure


def _curve(
    rows: Sequence[Row], panel: str, arm: str, blocks_given: str, key: str
) -> tuple[list[int], list[float]]:
    wanted = panel, arm, blocks_given
    chosen = [row for row in rows if (row["panel"], row["arm"], row["blocks"]) == wanted]
    chosen.sort(key=lambda row: row["draft_tokens"])
    values = [100 * row[key]["mean"] if key == "token_hit_rate" else row[key] for row in chosen]
    return [row["draft_tokens"] for row in chosen], values


def _check(study: Study) -> None:
    """Raise ValueError for an arm without a pool of blocks."""
    for name in study.chosen():
        if study.arms[name].pool is None:
            policy = study.arms[name].policy_name
            raise ValueError(
                f"analyses=drafts with arms.{name}.policy={policy}: expected a pool of blocks, as vLLM's"
            )


ANALYSES.add(
    Analysis("drafts", drafts_of_study, needs=(ARMS,), check=_check, of_points=drafts_of_points)
)
