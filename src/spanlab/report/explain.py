"""Tables of the analysis `explain`: verdict and hit rates, bounds and losses, the curve over memory, fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report.cells import count, percent, placeholder, word
from spanlab.report.tables import Cell, Column, Table

Summary = Mapping[str, Any]
CAUSES = {
    "never_seen": "never seen",
    "kv_evicted": "KV evicted",
    "state_evicted": "state evicted",
    "state_never_placed": "no state placed",
    "alignment": "alignment",
    "last_token": "last token",
    "never_stored": "never stored",
    "repair": "repair",
}


def tables_of(summary: Summary, title: str, caveats: tuple[str, ...]) -> tuple[Table, ...]:
    """Return the tables for which the log has numbers; `caveats` are notes of the first table."""
    if not summary["presets"]:
        return (_lengths(summary, title, caveats),)
    tables = [make(summary) for make in (_bounds, _fixes, _curve, _positions)]
    return (
        _presets(summary, title, caveats),
        *tables,
        *(_losses(kind, rows) for kind, rows in summary["losses"].items()),
    )


def _head(summary: Summary) -> str:
    tokens = summary["tokens"]["prompt"]
    return f"{summary['requests']:,} requests, {tokens:,} prompt tokens\n{summary['verdict']}"


def _lengths(summary: Summary, title: str, caveats: tuple[str, ...]) -> Table:
    rows = [(word(name), count(value)) for name, value in summary["prompt_lengths"].items()]
    columns = (Column("length", "prompt\nlength", left=True), Column("tokens", "tokens"))
    return Table("explain", f"{title}\n{_head(summary)}", columns, tuple(rows), caveats)


def _presets(summary: Summary, title: str, caveats: tuple[str, ...]) -> Table:
    causes = [
        cause for cause in CAUSES if any(cause in preset["lost_by_cause"] for preset in summary["presets"].values())
    ]
    columns = (
        Column("preset", "preset", left=True),
        Column("token_hit_rate", "token\nhit rate"),
        Column("mean_token_hit_rate", "mean per\nrequest", 2),
        Column("request_hit_rate", "requests\nwith a hit", 3),
        *(
            Column(f"lost_{cause}", CAUSES[cause].replace(" ", "\n", 1), 4 + index)
            for index, cause in enumerate(causes)
        ),
    )
    total = summary["tokens"]["prompt"]
    rows = tuple(
        (
            word(name),
            *(percent(preset[key]) for key in ("token_hit_rate", "mean_token_hit_rate", "request_hit_rate")),
            *(percent(preset["lost_by_cause"].get(cause, 0) / total) for cause in causes),
        )
        for name, preset in summary["presets"].items()
    )
    notes = (
        "token hit rate: reused ÷ prompt tokens, a ratio of sums; mean per request: the mean of the requests' ratios",
        f"the others: share of the prompt tokens, by why they were not reused; explained is {summary['explained']}",
        *caveats,
    )
    return Table("explain", f"{title}\n{_head(summary)}", columns, rows, notes)


def _bounds(summary: Summary) -> Table:
    bounds = summary["bounds"]
    unknown = placeholder("unknown: chained ids")
    rows = (
        (word("prefix, no limit of memory"), percent(bounds["prefix"])),
        (word("any position, no limit of memory"), _percent_or(bounds["any_position"], unknown)),
        (word(f"best eviction, memory of {summary['explained']}"), percent(bounds["offline_optimum"])),
    )
    columns = (Column("bound", "bound", left=True), Column("token_hit_rate", "token\nhit rate"))
    return Table("bounds", "What could be reused", columns, rows)


def _percent_or(share: float | None, other: Cell) -> Cell:
    return other if share is None else percent(share)


def _fixes(summary: Summary) -> Table:
    columns = (
        Column("fix", "fix", left=True),
        Column("token_hit_rate", "token\nhit rate"),
        Column("gain_points", "gain\n(points)"),
        Column("extra_gib", "more\nGiB", 2),
        Column("gain_per_gib", "points\nper GiB", 3),
        Column("says", "what it is", 4, left=True),
    )
    rows = tuple(
        (
            word(fix["name"]),
            percent(fix["token_hit_rate"]),
            Cell(100 * fix["gain"], f"{100 * fix['gain']:+.1f}" if fix["helps"] else "no help"),
            Cell(fix["extra_gib"], f"{fix['extra_gib']:.4g}"),
            Cell(fix["gain_per_gib"], "–" if fix["gain_per_gib"] is None else f"{100 * fix['gain_per_gib']:.3g}"),
            word(f"{fix['says']}; {fix['caution']}" if fix["caution"] else fix["says"]),
        )
        for fix in summary["fixes"]
    )
    return Table("fixes", "What would help, by gain for its memory; each is simulated", columns, rows)


def _curve(summary: Summary) -> Table:
    columns = (Column("blocks", "blocks"), Column("gib", "GiB"), Column("token_hit_rate", "token\nhit rate"))
    rows = tuple(
        (
            Cell(point["blocks"], f"{point['blocks']:,}"),
            Cell(point["gib"], f"{point['gib']:.4g}"),
            percent(point["token_hit_rate"]),
        )
        for point in summary["capacity_curve"]
    )
    return Table("capacity_curve", "Hit rate of an LRU cache of KV by its size", columns, rows)


def _positions(summary: Summary) -> Table:
    columns = (
        Column("position", "position\n(tokens)"),
        Column("states", "states"),
        Column("requests", "requests"),
        Column("share_of_reusable", "share of\nreusable"),
    )
    rows = tuple(
        (
            Cell(row["position"], f"{row['position']:,}"),
            count(row["states"]),
            count(row["requests"]),
            percent(row["share_of_reusable"]),
        )
        for row in summary["checkpoint_positions"]
    )
    notes = ("reusable: what a prefix cache without limit reuses",)
    return Table("checkpoint_positions", "Positions where prompts diverge: useful states", columns, rows, notes)


def _losses(kind: str, rows: Sequence[Summary]) -> Table:
    causes = [cause for cause in CAUSES if any(cause in row["lost_by_cause"] for row in rows)]
    columns = (
        Column("name", kind[:-1], left=True),
        Column("requests", "requests", 3),
        Column("prompt_tokens", "prompt\ntokens"),
        Column("token_hit_rate", "token\nhit rate"),
        *(
            Column(f"lost_{cause}", CAUSES[cause].replace(" ", "\n", 1), 4 + index)
            for index, cause in enumerate(causes)
        ),
    )
    cells = tuple(
        (
            word(row["name"]),
            count(row["requests"]),
            count(row["prompt_tokens"]),
            percent(row["reused_tokens"] / row["prompt_tokens"]),
            *(percent(row["lost_by_cause"].get(cause, 0) / row["prompt_tokens"]) for cause in causes),
        )
        for row in rows
    )
    title = f"The {kind} that lose most of what was seen before"
    return Table(f"losses_of_{kind}", title, columns, cells)
