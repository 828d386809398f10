"""Tables of the analysis `explain`: verdict and hit rates, bounds and losses, the curve over memory, fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report.cells import count, number, percent, placeholder, word
from spanlab.report.fields import Field, tabulate, whole
from spanlab.report.tables import MISSING, Cell, Table

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
    tables = [make(summary) for make in (_bounds, _breaks, _fixes, _curve, _positions)]
    return (
        _presets(summary, title, caveats),
        *tables,
        *(_losses(kind, rows) for kind, rows in summary["losses"].items()),
    )


def _head(summary: Summary) -> str:
    tokens = summary["tokens"]["prompt"]
    lines = [*summary["measured"], f"{summary['requests']:,} requests, {tokens:,} prompt tokens", summary["verdict"]]
    return "\n".join(lines)


def _lengths(summary: Summary, title: str, caveats: tuple[str, ...]) -> Table:
    fields = (Field("length", "prompt\nlength", word, left=True), Field("tokens", "tokens", count))
    rows = [{"length": name, "tokens": value} for name, value in summary["prompt_lengths"].items()]
    return tabulate("explain", f"{title}\n{_head(summary)}", fields, rows, caveats)


def _presets(summary: Summary, title: str, caveats: tuple[str, ...]) -> Table:
    total = summary["tokens"]["prompt"]
    rows = [{"preset": name, "prompt_tokens": total, **preset} for name, preset in summary["presets"].items()]
    fields = (
        Field("preset", "preset", word, left=True),
        Field("token_hit_rate", "token\nhit rate", percent),
        Field("mean_token_hit_rate", "mean per\nrequest", percent, keep=2),
        Field("request_hit_rate", "requests\nwith a hit", percent, keep=3),
        *_causes(rows),
    )
    notes = (
        "token hit rate: reused ÷ prompt tokens, a ratio of sums; mean per request: the mean of the requests' ratios",
        f"the others: share of the prompt tokens, by why they were not reused; explained is {summary['explained']}",
        *caveats,
    )
    return tabulate("explain", f"{title}\n{_head(summary)}", fields, rows, notes)


def _causes(rows: Sequence[Summary]) -> list[Field]:
    """Return a field for each cause of these rows: its share of the prompt tokens."""
    causes = [cause for cause in CAUSES if any(cause in row["lost_by_cause"] for row in rows)]
    return [_cause(cause, keep) for keep, cause in enumerate(causes, 4)]


def _cause(cause: str, keep: int) -> Field:
    def share(row: Summary) -> float:
        return float(row["lost_by_cause"].get(cause, 0) / row["prompt_tokens"])

    return Field(f"lost_{cause}", CAUSES[cause].replace(" ", "\n", 1), percent, share, keep)


def _bounds(summary: Summary) -> Table:
    bounds = summary["bounds"]
    rows = [
        {"bound": "prefix, no limit of memory", "token_hit_rate": bounds["prefix"]},
        {"bound": "contents seen before, at any position", "token_hit_rate": bounds["any_position"]},
        {"bound": f"best eviction, memory of {summary['explained']}", "token_hit_rate": bounds["offline_optimum"]},
    ]
    fields = (Field("bound", "bound", word, left=True), Field("token_hit_rate", "token\nhit rate", _bound))
    return tabulate("bounds", "What could be reused", fields, rows)


def _bound(share: float | None) -> Cell:
    return placeholder("unknown: only beginnings are compared") if share is None else percent(share)


def _breaks(summary: Summary) -> Table:
    fields = (
        Field("position", "position\n(tokens)", number(",")),
        Field("requests", "requests", count),
        Field("tokens", "tokens\nbehind", count),
        Field("path", "in", _text, left=True, keep=1, empty=(None,)),
        Field("character", "character", number(","), keep=2, empty=(None,)),
        Field("earlier", "an earlier prompt", _text, left=True, keep=3, empty=(None,), explains=True),
        Field("later", "a later prompt", _text, left=True, keep=3, empty=(None,), explains=True),
    )
    title = "Where prompts part from earlier ones: most tokens behind the break"
    notes = ("texts: of the prompt that loses most, | is the break; workload.log.show_text=false hides them",)
    return tabulate("breaks", title, fields, summary["breaks"], notes)


def _text(text: str | None) -> Cell:
    return MISSING if text is None else word(text)


def _fixes(summary: Summary) -> Table:
    fields = (
        Field("fix", "fix", word, "name", left=True),
        Field("token_hit_rate", "token\nhit rate", percent),
        Field("gain_points", "gain\n(points)", _gain, whole),
        Field("extra_gib", "more\nGiB", number(".4g"), keep=2),
        Field("gain_per_gib", "points\nper GiB", _gain_per_gib, keep=3),
        Field("says", "what it is", _description, whole, keep=4, left=True, explains=True),
    )
    return tabulate("fixes", "What would help, by gain for its memory; each is simulated", fields, summary["fixes"])


def _gain(fix: Summary) -> Cell:
    gain = 100 * fix["gain"]
    return Cell(gain, f"{gain:+.1f}" if fix["helps"] else "no help")


def _gain_per_gib(gain: float | None) -> Cell:
    return MISSING if gain is None else Cell(gain, f"{100 * gain:.3g}")


def _description(fix: Summary) -> Cell:
    return word(f"{fix['says']}; {fix['caution']}" if fix["caution"] else fix["says"])


def _curve(summary: Summary) -> Table:
    fields = (
        Field("blocks", "blocks", number(",")),
        Field("gib", "GiB", number(".4g")),
        Field("token_hit_rate", "token\nhit rate", percent),
    )
    title = "Hit rate of an LRU cache of KV by its size"
    return tabulate("capacity_curve", title, fields, summary["capacity_curve"])


def _positions(summary: Summary) -> Table:
    fields = (
        Field("position", "position\n(tokens)", number(",")),
        Field("states", "states", count),
        Field("requests", "requests", count),
        Field("share_of_reusable", "share of\nreusable", percent),
    )
    title = "Positions where prompts diverge: useful states"
    notes = ("reusable: what a prefix cache without limit reuses",)
    return tabulate("checkpoint_positions", title, fields, summary["checkpoint_positions"], notes)


def _losses(kind: str, rows: Sequence[Summary]) -> Table:
    fields = (
        Field("name", kind[:-1], word, left=True),
        Field("requests", "requests", count, keep=3),
        Field("prompt_tokens", "prompt\ntokens", count),
        Field("token_hit_rate", "token\nhit rate", percent, lambda row: row["reused_tokens"] / row["prompt_tokens"]),
        *_causes(rows),
    )
    return tabulate(f"losses_of_{kind}", f"The {kind} that lose most of what was seen before", fields, rows)
