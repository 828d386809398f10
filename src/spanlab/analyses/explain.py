"""Tables of the analysis `explain`: verdict and hit rates, bounds and losses, the curve over
memory, fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.analyses.base import Findings, Finished, footer
from spanlab.analyses.breaks import breaks_of, breaks_table, top_breaks_table
from spanlab.analyses.expiry import expiry_lines, expiry_of, expiry_table
from spanlab.analyses.explain_figures import (
    CAUSES,
    EXPIRING,
    calls_of,
    draw_calls,
    draw_curve,
    draw_over_time,
    over_time,
)
from spanlab.analyses.fixes import (
    ExplainedArm,
    Facts,
    Fix,
    Rules,
    check_fits,
    curve_of,
    mends_of,
    ranked_fixes,
    rates,
    rules_of,
    verdict,
)
from spanlab.analyses.money import money_lines, money_of, money_table, saved_money
from spanlab.model_spec import GIB
from spanlab.offline.forest import Ints
from spanlab.offline.replay import CacheRules, ReplayResult
from spanlab.registry import require
from spanlab.report.table import (
    MISSING,
    Cell,
    Field,
    Table,
    count,
    count_text,
    number_format,
    percent,
    placeholder,
    seconds,
    seconds_text,
    tabulate,
    whole,
    word,
)
from spanlab.settings.analyses import ANALYSES, LOG, Analysis, ExplainSettings
from spanlab.settings.study import Study
from spanlab.study.bounds import BoundCrossedError
from spanlab.workloads.logs.bodies import Rewrite
from spanlab.workloads.logs.log import Ids, Log
from spanlab.workloads.logs.observed import Unread
from spanlab.workloads.logs.prompts import write_log

if TYPE_CHECKING:
    pass


# ------------------------------------------------------------------------------
# Lost tokens by tenant, session and request, and positions at which prompts diverge from
# earlier ones.
# ------------------------------------------------------------------------------

MOST_GROUPS = 10  # groups and positions in the tables


def groups_of(
    facts: Facts, replayed: ReplayResult, *, redact: bool
) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of each kind that lose most reusable tokens, in decreasing order; `redact`:
    without names."""
    log = facts.log
    groups = {"requests": _losing(facts, replayed, np.arange(log.requests), {})}
    if log.sessions is not None:
        groups["sessions"] = _losing(facts, replayed, log.sessions.astype(np.int64), {})
    if log.tenants is not None:
        names = {} if redact else dict(enumerate(log.tenant_names))
        groups["tenants"] = _losing(facts, replayed, log.tenants.astype(np.int64), names)
    return groups


def _losing(
    facts: Facts, replayed: ReplayResult, group: Ints, names: dict[int, str]
) -> list[dict[str, Any]]:
    def by_group(values: Ints) -> Ints:
        return np.bincount(group, values).astype(np.int64)

    prompt, reused = by_group(facts.paths.prompt_tokens), by_group(replayed.reused)
    lost = {cause: by_group(values) for cause, values in replayed.lost.items()}
    missed = prompt - reused - lost.get("never_seen", 0)
    counts = np.bincount(group)
    most = np.argsort(-missed, kind="stable")[:MOST_GROUPS]
    return [
        {
            "name": names.get(number, str(number)),
            "requests": int(counts[number]),
            "prompt_tokens": int(prompt[number]),
            "reused_tokens": int(reused[number]),
            "lost_by_cause": {
                cause: int(values[number]) for cause, values in lost.items() if values[number]
            },
        }
        for number in most.tolist()
        if prompt[number]
    ]


def positions_of(facts: Facts) -> list[dict[str, Any]]:
    """Return positions at which prompts diverge from earlier ones, by the number of reusable tokens
    before them.

    `states`  distinct prefixes that end at a position, each of which needs one stored state
    """
    paths = facts.paths
    again = np.flatnonzero(~paths.first)
    if not len(again):
        return []
    owner = paths.owner[again]
    # end of each prompt's longest earlier prefix
    ends = paths.nodes[again[np.append(owner[1:] != owner[:-1], True)]]
    positions, index = np.unique(paths.node_stop[ends], return_inverse=True)
    requests = np.bincount(index)
    states = np.bincount(index[np.unique(ends, return_index=True)[1]], minlength=len(positions))
    tokens = positions * requests
    most = np.argsort(-tokens, kind="stable")[:MOST_GROUPS]
    total = int(paths.seen_tokens.sum())
    return [
        {
            "position": int(positions[rank]),
            "states": int(states[rank]),
            "requests": int(requests[rank]),
            "share_of_reusable": int(tokens[rank]) / total,
        }
        for rank in most.tolist()
    ]


Summary = Mapping[str, Any]


def tables_of(
    summary: Summary, title: str, caveats: tuple[str, ...]
) -> tuple[tuple[Table, ...], tuple[Table, ...]]:
    """Return the tables for which the log has numbers: those that a terminal shows, and the others.

    `caveats` are notes of the first table.
    """
    if not summary["presets"]:
        lengths = summary["prompt_lengths"].items()
        fields = (
            Field("length", "prompt\nlength", word, left=True),
            Field("tokens", "tokens", count),
        )
        rows = [{"length": name, "tokens": value} for name, value in lengths]
        return (tabulate("explain", f"{title}\n{_head_table(summary)}", fields, rows, caveats),), ()
    further = [
        make(summary) for make in (_fixes, expiry_table, _bounds_table, _curve_table, _positions)
    ]
    losses = [_losses(kind, rows) for kind, rows in summary["losses"].items()]
    if summary["money"] is not None:
        further.insert(1, money_table(summary))
    shown = _presets(summary, title, caveats), top_breaks_table(summary), _best_fixes(summary)
    return shown, (breaks_table(summary), *further, *losses)


def _head_table(summary: Summary) -> str:
    tokens = summary["tokens"]["prompt"]
    size = f"{summary['requests']:,} requests, {tokens:,} prompt tokens"
    lines = list(summary["measured"])
    if (written := summary["written"]) is not None and written["path"] is None:
        lines.append(
            "no mended log is written, for no mend helps; analyses.explain.mend=NAME writes any of them"
        )
    elif written is not None:
        requests = f"{written['path']}: {written['requests']:,} requests after {written['mend']}"
        line = f"{requests}, of whose tokens {100 * written['token_hit_rate']:.1f} % are reused"
        if left_out := written["left_out"]:
            line += f"; {left_out:,} without a prompt in the log are left out"
        lines.append(line)
    return "\n".join([*lines, size, summary["verdict"]])


def _presets(summary: Summary, title: str, caveats: tuple[str, ...]) -> Table:
    total = summary["tokens"]["prompt"]
    rows = [
        {"preset": name, "prompt_tokens": total, **preset}
        for name, preset in summary["presets"].items()
    ]
    fields = (
        Field("preset", "preset", word, left=True),
        Field("token_hit_rate", "token\nhit rate", percent),
        Field("mean_token_hit_rate", "mean per\nrequest", percent, keep=2),
        Field("request_hit_rate", "requests\nwith a hit", percent, keep=3),
        *_causes(rows),
    )
    # the first caveats, and how many more the page has
    first, further = list(caveats[:MOST_CAVEATS]), len(caveats) - MOST_CAVEATS
    if further > 0:
        first[-1] += f"; {further} further caveats stand at the top of report.html"
    notes = (
        f"{summary['explained']} is explained; mean per request: of all ratios; then shares of the tokens by cause",
        *first,
    )
    return tabulate("explain", f"{title}\n{_head_table(summary)}", fields, rows, notes)


def _causes(rows: Sequence[Summary]) -> list[Field]:
    """Return a field for each cause of these rows: its share of the prompt tokens."""
    causes = [cause for cause in CAUSES if any(cause in row["lost_by_cause"] for row in rows)]
    return [_cause(cause, keep) for keep, cause in enumerate(causes, 4)]


def _cause(cause: str, keep: int) -> Field:
    def share(row: Summary) -> float:
        return float(row["lost_by_cause"].get(cause, 0) / row["prompt_tokens"])

    return Field(f"lost_{cause}", CAUSES[cause].replace(" ", "\n", 1), percent, share, keep)


def _bounds_table(summary: Summary) -> Table:
    bounds = summary["bounds"]
    rows = [
        {"bound": "prefix, no limit of memory", "token_hit_rate": bounds["prefix"]},
        {
            "bound": "contents seen before, at any position",
            "token_hit_rate": bounds["any_position"],
        },
        {
            "bound": f"best eviction, memory of {summary['explained']}",
            "token_hit_rate": bounds["offline_optimum"],
        },
    ]
    fields = (
        Field("bound", "bound", word, left=True),
        Field(
            "token_hit_rate",
            "token\nhit rate",
            lambda share: (
                placeholder("unknown: only beginnings are compared")
                if share is None
                else percent(share)
            ),
        ),
    )
    return tabulate("bounds", "What could be reused", fields, rows)


MOST_FIXES = 3  # in a terminal
MOST_CAVEATS = 1  # below the first table; the page has all of them at its top


def _best_fixes(summary: Summary) -> Table:
    """Return the first fixes that help, in short; the page has all of them."""
    fields = (
        Field("fix", "fix", word, "name", left=True),
        Field("token_hit_rate", "token\nhit rate", percent),
        Field("gain_points", "gain\n(points)", _gain, whole),
        Field("saved_tokens", "tokens\nsaved", _saved),
        Field("prefill_s", "prefill", seconds, empty=(None,)),
        Field("saved_money", "money\nsaved", number_format(",.4g"), empty=(None,)),
        Field("extra_gib", "more\nGiB", number_format(".4g"), keep=1),
    )
    helpful = [fix for fix in summary["fixes"] if fix["helps"]]
    now = f"the timing model computes a prompt in {seconds_text(summary['prefill_s'])} now"
    title = f"What would help most of {len(summary['fixes'])} simulated fixes; {now}"
    return tabulate("best_fixes", title, fields, helpful[:MOST_FIXES])


def _fixes(summary: Summary) -> Table:
    fields = (
        Field("fix", "fix", word, "name", left=True),
        Field("token_hit_rate", "token\nhit rate", percent),
        Field("gain_points", "gain\n(points)", _gain, whole),
        Field("saved_tokens", "tokens\nsaved", _saved, keep=5),
        Field("prefill_s", "prefill", seconds, keep=5, empty=(None,)),
        Field("saved_money", "money\nsaved", number_format(",.4g"), keep=5, empty=(None,)),
        Field("extra_gib", "more\nGiB", number_format(".4g"), keep=2),
        Field(
            "gain_per_gib",
            "points\nper GiB",
            lambda gain: MISSING if gain is None else Cell(gain, f"{100 * gain:.3g}"),
            keep=3,
        ),
        Field(
            "says",
            "what it is",
            lambda fix: word(f"{fix['says']}; {fix['caution']}" if fix["caution"] else fix["says"]),
            whole,
            keep=4,
            left=True,
            explains=True,
        ),
    )
    title = "What would help, by gain for its memory; each is simulated"
    return tabulate("fixes", title, fields, summary["fixes"])


def _saved(tokens: int) -> Cell:
    return Cell(tokens, count_text(tokens) if tokens >= 0 else f"-{count_text(-tokens)}")


def _gain(fix: Summary) -> Cell:
    gain = 100 * fix["gain"]
    return Cell(gain, f"{gain:+.1f}" if fix["helps"] else "no help")


def _curve_table(summary: Summary) -> Table:
    fields = (
        Field("blocks", "blocks", number_format(",")),
        Field("gib", "GiB", number_format(".4g")),
        Field("token_hit_rate", "token\nhit rate", percent),
    )
    title = "Hit rate of an LRU cache of KV by its size"
    return tabulate("capacity_curve", title, fields, summary["capacity_curve"])


def _positions(summary: Summary) -> Table:
    fields = (
        Field("position", "position\n(tokens)", number_format(",")),
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
        Field(
            "token_hit_rate",
            "token\nhit rate",
            percent,
            lambda row: row["reused_tokens"] / row["prompt_tokens"],
        ),
        *_causes(rows),
    )
    return tabulate(
        f"losses_of_{kind}", f"The {kind} that lose most of what was seen before", fields, rows
    )


# ------------------------------------------------------------------------------
# What the server itself reports about a log: cached tokens beside those that are possible, and
# lengths of prompts.
# ------------------------------------------------------------------------------

SAME_LENGTH = 0.02  # reported and counted lengths that are nearer to each other are not mentioned
# a server that reuses so much less than possible has another problem than its prompts
SURPRISING = 0.05


def reported_of(facts: Facts, reused: Ints) -> dict[str, Any] | None:
    """Return the server's counts beside ours on the same requests; None if it reports none.

    `requests`        requests with a reported number of cached tokens; the hit rates are over these
    `token_hit_rate`  reported cached tokens ÷ reported prompt tokens
    `possible`        the same ratio of the explained arm
    `prompt_tokens`   mean reported length of the requests that report one, and `counted_tokens` by
                      our count
    `sums`            sums of the server's counts, as `reported_sums` returns them
    """
    usage = facts.log.usage
    if usage is None:
        return None
    prompt, cached, _ = usage.T
    counted = facts.paths.prompt_tokens
    has_prompt, has_both = ~np.isnan(prompt), ~np.isnan(prompt) & ~np.isnan(cached) & (counted > 0)
    total, ours = float(prompt[has_both].sum()), int(counted[has_both].sum())
    rates: dict[str, float | None] = {"token_hit_rate": None, "possible": None}
    if total and ours:
        rates = {
            "token_hit_rate": float(cached[has_both].sum()) / total,
            "possible": int(reused[has_both].sum()) / ours,
        }
    lengths: dict[str, float | None] = {"prompt_tokens": None, "counted_tokens": None}
    if has_prompt.any():
        means = (float(prompt[has_prompt].mean()), float(counted[has_prompt].mean()))
        lengths = dict(zip(lengths, means, strict=True))
    return {"requests": int(has_both.sum()), **rates, **lengths, "sums": reported_sums(facts.log)}


def reported_sums(log: Log) -> dict[str, int] | None:
    """Return sums of the server's counts over the requests that report a length; None if none does.

    `requests`          requests that report the length of their prompt, and `without_cached` those
                        of them that report no cached tokens, which count as fresh
    `prompt_tokens`     all tokens of their prompts = `cached_tokens` + `created_tokens` +
                        `fresh_tokens`
    `output_tokens`     of all requests of the log
    """
    if log.usage is None or np.isnan(log.usage[:, 0]).all():
        return None
    counts = log.usage[~np.isnan(log.usage[:, 0])]
    prompt, cached, created = (int(total) for total in np.nansum(counts, axis=0))
    return {
        "requests": len(counts),
        "without_cached": int(np.isnan(counts[:, 1]).sum()),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "created_tokens": created,
        "fresh_tokens": prompt - cached - created,
        "output_tokens": int(log.output_lens.astype(np.int64).sum()),
    }


def _sums_line(sums: dict[str, int]) -> str:
    """Return the sentence about the server's own counts of prompt tokens."""
    names = [
        ("cached_tokens", "cached"),
        ("created_tokens", "created in a cache"),
        ("fresh_tokens", "fresh"),
    ]
    parts = ", ".join(
        f"{sums[key]:,} {name}" for key, name in names if sums[key] or key != "created_tokens"
    )
    unknown = sums["without_cached"]
    without = f"; {unknown:,} of {sums['requests']:,} requests report no cached ones, which count as fresh"
    output = f", and {sums['output_tokens']:,} output tokens"
    return f"the server counts {sums['prompt_tokens']:,} prompt tokens: {parts}{output}{without * bool(unknown)}"


def reported_lines(reported: dict[str, Any] | None, arm: str, log: Log) -> list[str]:
    """Return the first lines of the page: measured beside possible, and reported beside counted
    lengths."""
    lines = log.counters.lines() if log.counters else []
    if reported is None:
        return lines
    if reported["token_hit_rate"] is not None:
        fewer = f" ({reported['requests']:,} of {log.requests:,} requests report it)"
        lines.append(
            f"the server reports {100 * reported['token_hit_rate']:.1f} % of the prompt tokens as cached, and "
            f"{100 * reported['possible']:.1f} % are possible as {arm}{fewer * (reported['requests'] < log.requests)}"
        )
    if reported["sums"] is not None:
        lines.append(_sums_line(reported["sums"]))
        if reported["counted_tokens"] and reported["prompt_tokens"] is not None:
            ratio = reported["prompt_tokens"] / reported["counted_tokens"]
            if abs(ratio - 1) >= SAME_LENGTH:
                lines[-1] += f"; its lengths are {ratio:.2f} times those of the log"
    return lines


def is_surprising(reported: dict[str, Any] | None) -> bool:
    """Return whether the server reuses clearly less than its prompts allow."""
    if reported is None or reported["token_hit_rate"] is None:
        return False
    return bool(reported["possible"] - reported["token_hit_rate"] > SURPRISING)


# ------------------------------------------------------------------------------
# The analysis `explain`: hit rates of a log under the arms, bounds, losses, hit rates by
# memory, and fixes.
# ------------------------------------------------------------------------------

ALONE = (
    "requests are replayed one after another: running requests take memory from the cache of a real server, and two "
    "that arrive together reuse nothing of each other; blocks leave one by one, the longest unused first; an answer "
    "that comes back in a later prompt counts as new there, though an engine may still hold it"
)
LENGTHS = "the log holds lengths only: it has no ids of shared content, so no hit rate is computed"
CHAINED = (
    "the ids of the log are chained: each identifies a block and all blocks before it, so reuse at other positions "
    "cannot be computed from it"
)


def check_log(study: Study, log: Log) -> None:
    """Raise ValueError for an arm that no replay of a log can express, or that its longest prompt
    alone exceeds."""
    if log.ids == Ids.NONE:
        return
    facts = Facts(log)
    computable = [name for name in study.chosen() if _is_computable(study, facts, name)]
    rules = {name: _rules(study, log, name) for name in computable}
    if not isinstance(rules.get(study.runs.baseline), CacheRules):
        raise ValueError(
            f"baseline={study.runs.baseline} with analyses=explain: expected an arm that keeps prefixes"
        )


def explain(finished: Finished) -> Findings:
    """Return reuse of the log under the arms; a log of lengths alone has no reuse to compute."""
    log = finished.workload.log
    assert log is not None, "the settings let no other workload pass"
    summary = _lengths(log) if log.ids == Ids.NONE else _reuse(finished.study, log)
    title = f"{finished.name} · {footer(finished)}"
    means = {Ids.NONE: (LENGTHS,), Ids.CHAINED: (CHAINED, ALONE), Ids.CONTENT: (ALONE,)}
    caveats = (*log.notes, *means[log.ids])
    drawn = {"capacity_curve": draw_curve, "session": draw_calls, "over_time": draw_over_time}
    figures = {name: partial(draw, summary, title) for name, draw in drawn.items() if summary[name]}
    return Findings(summary, *tables_of(summary, title, caveats), figures, caveats)


#: What a server reports about a log of lengths alone, beside the sums of its counts.
_REPORTED_LENGTHS: dict[str, Any] = {
    "requests": 0,
    "token_hit_rate": None,
    "possible": None,
    "prompt_tokens": None,
    "counted_tokens": None,
}


def _lengths(log: Log) -> dict[str, Any]:
    sums = reported_sums(log)
    return _head(log) | {
        "bounds": {"prefix": None, "any_position": None, "offline_optimum": None},
        "presets": {},
        "capacity_curve": [],
        "session": None,
        "over_time": [],
        "expiry": None,
        "money": None,
        "fixes": [],
        "prefill_s": None,
        "written": None,
        "lost_by_cause": {},
        "reported": sums and _REPORTED_LENGTHS | {"sums": sums},
        "measured": [_sums_line(sums)] if sums else [],
        "verdict": "no verdict: the log has lengths and times, and no ids of shared content",
    }


def _head(log: Log) -> dict[str, Any]:
    prompt, outputs = log.prompt_tokens, log.output_lens.astype(np.int64)
    return {
        "log": {
            "format": log.format,
            "ids": str(log.ids),
            "block": log.block,
            "notes": list(log.notes),
        },
        "requests": log.requests,
        "unread": {
            "share": log.unread.share,
            "bytes_read": log.unread.read,
            "bytes_left_out": dict(log.unread.left),
        },
        "tokens": {"prompt": int(prompt.sum()), "output": int(outputs.sum())},
        "prompt_lengths": {
            f"p{percent}": float(np.percentile(prompt, percent)) for percent in (5, 50, 95, 100)
        },
        "counters": log.counters and {"prompt": log.counters.prompt, "cached": log.counters.cached},
        "span_s": float(log.arrived_ns.max() - log.arrived_ns.min()) * 1e-9,
    }


@dataclass(frozen=True)
class _Arm:
    rules: Rules
    replayed: ReplayResult


def _reuse(study: Study, log: Log) -> dict[str, Any]:
    facts = Facts(log)
    prompt = facts.paths.prompt_tokens
    arms = {}
    for name in study.chosen():
        if _is_computable(study, facts, name):
            rules = _rules(study, log, name)
            arms[name] = _Arm(rules, facts.reused(rules))
    presets = {name: rates(arm.replayed, prompt) for name, arm in arms.items()}
    baseline = arms[study.runs.baseline]
    other_reused = {
        name: arm.replayed.reused for name, arm in arms.items() if name != study.runs.baseline
    }
    assert isinstance(baseline.rules, CacheRules), "the check of the log lets no other arm pass"
    rate = int(baseline.replayed.reused.sum()) / facts.prompt_tokens
    explained = ExplainedArm(study, facts, baseline.rules, rate, other_reused)
    redact = study.analyses.explain.redact
    breaks = breaks_of(facts, redact=redact)
    mends = mends_of(explained, breaks.classes)
    fixes = ranked_fixes(explained, [fix for fix, _ in mends])
    # shares of the prompt tokens: prefix by the log's pieces, optimum by the arm's memory and
    # blocks
    total = facts.prompt_tokens
    anywhere = int(facts.contents.seen_anywhere().sum()) / total if facts.names_contents else None
    bounds = {
        "prefix": int(facts.paths.seen_tokens.sum()) / total,
        "any_position": anywhere,
        "offline_optimum": explained.offline_optimum / total,
    }
    _check_bounds(study, presets, bounds)
    reported = reported_of(facts, baseline.replayed.reused)
    expiry, expiring = expiry_of(facts, study.analyses.explain, explained.rules)
    fitted = expiry and expiry["fitted"]
    price = study.analyses.explain.price
    money = money_of(
        price, reported and reported["sums"], _uses(facts, presets, bounds, expiry), log
    )
    measured = [
        *reported_lines(reported, study.runs.baseline, log),
        *expiry_lines(expiry),
        *money_lines(money, study.runs.baseline),
    ]
    return _head(log) | {
        "bounds": bounds,
        "explained": study.runs.baseline,
        "presets": presets,
        "capacity_curve": _curve(study, facts, explained.rules.block),
        "fixes": [
            {
                "rank": number,
                **asdict(fix),
                "gain_per_gib": fix.gain_per_gib,
                "helps": fix.helps,
                "saved_money": saved_money(price, fix, explained),
            }
            for number, fix in enumerate(fixes, 1)
        ],
        "money": money,
        "session": calls_of(facts, baseline.replayed, breaks.of_request, fitted),
        "over_time": over_time(
            facts,
            baseline.replayed,
            {name: expiring[name] for name in EXPIRING if name in expiring},
        ),
        "expiry": expiry,
        "prefill_s": explained.mean_prefill_s(prompt, baseline.replayed.reused),
        "written": _written(study, log, mends),
        "lost_by_cause": presets[study.runs.baseline]["lost_by_cause"],
        "losses": groups_of(facts, baseline.replayed, redact=redact),
        "checkpoint_positions": positions_of(facts),
        "breaks": breaks.rows,
        "breaks_found": {
            "requests": breaks.requests,
            "with_class": breaks.compared,
            "notes": list(breaks.notes),
        },
        "reported": reported,
        "measured": [*measured, *([breaks.sentence] if breaks.sentence else [])],
        "verdict": _verdict(
            log.unread, reported, verdict(explained, fixes, bounds["prefix"] or 0.0)
        ),
    }


def _uses(
    facts: Facts,
    presets: Summary,
    bounds: Mapping[str, float | None],
    expiry: dict[str, Any] | None,
) -> dict[str, int]:
    """Return the tokens that caches reuse, by name: the arms, caches that expire, no cache, all
    prefixes."""
    rates = {name: preset["token_hit_rate"] for name, preset in presets.items()}
    rates |= {
        name: cache["token_hit_rate"]
        for name, cache in (expiry["caches"] if expiry else {}).items()
    }
    rates |= {"no_cache": 0.0, "prefix": bounds["prefix"]}
    return {name: round((rate or 0.0) * facts.prompt_tokens) for name, rate in rates.items()}


def _written(study: Study, log: Log, mends: Sequence[tuple[Fix, Rewrite]]) -> dict[str, Any] | None:
    """Write the log after its best mend, if the study asks for it; return what was written."""
    settings = study.analyses.explain
    if settings.write_fixed is None:
        return None
    names = [fix.name for fix, _ in mends]
    if settings.mend is not None and settings.mend not in names:
        expected = (
            f"one of {', '.join(names)}" if names else "null, for no mend changes its prompts"
        )
        raise ValueError(f"analyses.explain.mend={settings.mend}: expected {expected}")
    chosen = [
        (fix, rewrite)
        for fix, rewrite in mends
        if (fix.name == settings.mend if settings.mend else fix.helps)
    ]
    if not chosen:
        return {
            "path": None,
            "mend": None,
            "requests": 0,
            "left_out": log.requests,
            "token_hit_rate": None,
        }
    fix, rewrite = max(chosen, key=lambda mend: mend[0].token_hit_rate)
    requests = write_log(log, rewrite, Path(settings.write_fixed))
    return {
        "path": settings.write_fixed,
        "mend": fix.name,
        "requests": requests,
        "left_out": log.requests - requests,
        "token_hit_rate": fix.token_hit_rate,
    }


def _verdict(unread: Unread, reported: dict[str, Any] | None, sentence: str) -> str:
    """Return the verdict, or why none stands: it would be about the part of the log that was
    read."""
    if not unread.allows_verdict:
        return f"no verdict stands, because too much of the log is unknown: {unread.reason}"
    if is_surprising(reported):
        return f"first find out why the server reuses less than it can, as with its prefix cache off; {sentence}"
    return sentence


def _is_computable(study: Study, facts: Facts, name: str) -> bool:
    """Return whether the log suffices for an arm: spans at any position need ids of contents."""
    return facts.names_contents or study.arms[name].spans is None


def _rules(study: Study, log: Log, name: str) -> Rules:
    longest = int(np.argmax(log.prompt_tokens))
    tokens = int(log.prompt_tokens[longest])
    rules = rules_of(study, name, tokens)
    check_fits(study, name, rules, tokens, longest)
    return rules


def _check_bounds(
    study: Study, presets: Mapping[str, Mapping[str, Any]], bounds: Mapping[str, float | None]
) -> None:
    """Raise where an arm exceeds a bound: the bound or the replay is wrong, and the page reports no
    result."""
    for name, preset in presets.items():
        finds_prefixes = study.arms[name].spans is None and study.arms[name].passages.are_default
        checked = (
            ["prefix"] * finds_prefixes
            + ["any_position"]
            + ["offline_optimum"] * (name == study.runs.baseline)
        )
        for bound in checked:
            share, most = preset["token_hit_rate"], bounds[bound]
            if most is not None and share > most:
                raise BoundCrossedError(
                    f"arms.{name} reuses {share:.4%} of the prompt tokens: expected at most {most:.4%}, "
                    f"the bound {bound}; this is a fault of the program"
                )


def _curve(study: Study, facts: Facts, block: int) -> list[dict[str, Any]]:
    curve = curve_of(facts, block)
    bytes_per_block = curve.block * study.model.kv_bytes_per_token
    return [
        {
            "blocks": size,
            "gib": size * bytes_per_block / GIB,
            "token_hit_rate": curve.tokens(size) / facts.prompt_tokens,
        }
        for size in curve.sizes
    ]


def _check(study: Study) -> None:
    """Raise ValueError for settings that `explain` does not read."""
    require(
        "analyses=explain",
        ("analyses", study.chosen_analyses(), ["explain"]),
        ("workload.kind", study.workload.kind, "log"),
        ("workload.popularity.requests", study.workload.popularity.requests, None),
        ("arrivals.kind", study.arrivals.kind, "as_given"),
        ("load.rates_rps", study.runs.load.rates_rps, []),
        ("backend", study.backend, "sim"),
        ("replicas.count", study.replicas.count, 1),
        ("seeds", study.runs.seeds, study.runs.seeds[:1]),
        ("warmup_fraction", study.runs.warmup_fraction, 0.0),
    )
    if study.runs.baseline not in study.chosen():
        raise ValueError(
            f"baseline={study.runs.baseline} with analyses=explain: expected one of the arms that run"
        )


ANALYSES.add(
    Analysis(
        "explain", explain, needs=(LOG,), options=ExplainSettings, check=_check, check_log=check_log
    )
)
