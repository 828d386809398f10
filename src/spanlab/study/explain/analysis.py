"""The analysis `explain`: hit rates of a log under the arms, bounds, losses, hit rates by memory, and fixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from spanlab.build import GIB
from spanlab.offline.replay import CacheRules, ReplayResult
from spanlab.report.explain import tables_of
from spanlab.report.explain_figure import draw_curve
from spanlab.settings import Study
from spanlab.settings.analyses import ANALYSES, LOG_CHECKS
from spanlab.study.analyses.head import footer
from spanlab.study.explain.breaks import breaks_of
from spanlab.study.explain.facts import Facts, curve_of, rates
from spanlab.study.explain.fixes import ExplainedArm, Fix, ranked_fixes, verdict
from spanlab.study.explain.groups import groups_of, positions_of
from spanlab.study.explain.reported import is_surprising, reported_lines, reported_of
from spanlab.study.explain.rules import Rules, check_fits, rules_of
from spanlab.study.findings import Findings, Finished
from spanlab.study.numbers.bounds import BoundCrossedError
from spanlab.workloads.logs import Ids, Log
from spanlab.workloads.logs.unread import Unread

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


@LOG_CHECKS.register("explain")
def check_log(study: Study, log: Log) -> None:
    """Raise ValueError for an arm that no replay of a log can express, or that its longest prompt alone exceeds."""
    if log.ids == Ids.NONE:
        return
    facts = Facts(log)
    computable = [name for name in study.chosen() if _is_computable(study, facts, name)]
    rules = {name: _rules(study, log, name) for name in computable}
    if not isinstance(rules.get(study.baseline), CacheRules):
        raise ValueError(f"baseline={study.baseline} with analyses=explain: expected an arm that keeps prefixes")


@ANALYSES.register("explain")
def explain(finished: Finished) -> Findings:
    """Return reuse of the log under the arms; a log of lengths alone has no reuse to compute."""
    log = finished.workload.log
    assert log is not None, "the settings let no other workload pass"
    summary = _lengths(log) if log.ids == Ids.NONE else _reuse(finished.study, log)
    title = f"{finished.name} · {footer(finished)}"
    draw, caveats = partial(draw_curve, summary, title), _caveats(log)
    figures = {"capacity_curve": draw} if summary["capacity_curve"] else {}
    return Findings(summary, tables_of(summary, title, caveats), (), figures, caveats)


def _caveats(log: Log) -> tuple[str, ...]:
    means = {Ids.NONE: (LENGTHS,), Ids.CHAINED: (CHAINED, ALONE), Ids.CONTENT: (ALONE,)}
    return (*log.notes, *means[log.ids])


def _lengths(log: Log) -> dict[str, Any]:
    return _head(log) | {
        "bounds": {"prefix": None, "any_position": None, "offline_optimum": None},
        "presets": {},
        "capacity_curve": [],
        "fixes": [],
        "lost_by_cause": {},
        "reported": None,
        "measured": [],
        "verdict": "no verdict: the log has lengths and times, and no ids of shared content",
    }


def _head(log: Log) -> dict[str, Any]:
    prompt, outputs = log.prompt_tokens, log.output_lens.astype(np.int64)
    return {
        "log": {"format": log.format, "ids": str(log.ids), "block": log.block, "notes": list(log.notes)},
        "requests": log.requests,
        "unread": {"share": log.unread.share, "bytes_read": log.unread.read, "bytes_left_out": dict(log.unread.left)},
        "tokens": {"prompt": int(prompt.sum()), "output": int(outputs.sum())},
        "prompt_lengths": {f"p{percent}": float(np.percentile(prompt, percent)) for percent in (5, 50, 95, 100)},
        "span_s": float(log.arrived_ns.max() - log.arrived_ns.min()) * 1e-9,
    }


@dataclass(frozen=True)
class _Arm:
    rules: Rules
    replayed: ReplayResult


def _reuse(study: Study, log: Log) -> dict[str, Any]:
    facts = Facts(log)
    prompt = facts.paths.prompt_tokens
    arms = {name: _arm(study, facts, name) for name in study.chosen() if _is_computable(study, facts, name)}
    presets = {name: rates(arm.replayed, prompt) for name, arm in arms.items()}
    baseline = arms[study.baseline]
    other_tokens = {name: int(arm.replayed.reused.sum()) for name, arm in arms.items() if name != study.baseline}
    explained = _explained(study, facts, baseline, other_tokens)
    fixes = ranked_fixes(explained)
    bounds = _bounds(facts, explained)
    _check_bounds(study, presets, bounds)
    reported = reported_of(facts, baseline.replayed.reused)
    return _head(log) | {
        "bounds": bounds,
        "explained": study.baseline,
        "presets": presets,
        "capacity_curve": _curve(study, facts, explained.rules.block),
        "fixes": [_fix_entry(number, fix) for number, fix in enumerate(fixes, 1)],
        "lost_by_cause": presets[study.baseline]["lost_by_cause"],
        "losses": groups_of(facts, baseline.replayed),
        "checkpoint_positions": positions_of(facts),
        "breaks": breaks_of(facts),
        "reported": reported,
        "measured": reported_lines(reported, study.baseline, log.requests),
        "verdict": _verdict(log.unread, reported, verdict(explained, fixes, bounds["prefix"] or 0.0)),
    }


def _verdict(unread: Unread, reported: dict[str, Any] | None, sentence: str) -> str:
    """Return the verdict, or why none stands: it would be about the part of the log that was read."""
    if not unread.allows_verdict:
        return f"no verdict stands, because too much of the log is unknown: {unread.reason}"
    if is_surprising(reported):
        return f"first find out why the server reuses less than it can, such as a prefix cache that is off; {sentence}"
    return sentence


def _is_computable(study: Study, facts: Facts, name: str) -> bool:
    """Return whether the log suffices for an arm: spans at any position need ids of contents."""
    return facts.names_contents or study.arms[name].spans is None


def _rules(study: Study, log: Log, name: str) -> Rules:
    longest = int(np.argmax(log.prompt_tokens))
    tokens = int(log.prompt_tokens[longest])
    rules = rules_of(study, name, tokens)
    check_fits(study, rules, tokens, longest)
    return rules


def _arm(study: Study, facts: Facts, name: str) -> _Arm:
    rules = _rules(study, facts.log, name)
    return _Arm(rules, facts.reused(rules))


def _explained(study: Study, facts: Facts, arm: _Arm, other_tokens: Mapping[str, int]) -> ExplainedArm:
    assert isinstance(arm.rules, CacheRules), "the check of the log lets no other arm pass"
    rate = int(arm.replayed.reused.sum()) / facts.prompt_tokens
    return ExplainedArm(study, facts, arm.rules, rate, other_tokens)


def _bounds(facts: Facts, explained: ExplainedArm) -> dict[str, float | None]:
    """Return bounds as shares of prompt tokens: prefix by the log's pieces, optimum by the arm's memory and blocks."""
    total = facts.prompt_tokens
    anywhere = int(facts.contents.seen_anywhere().sum()) / total if facts.names_contents else None
    return {
        "prefix": int(facts.paths.seen_tokens.sum()) / total,
        "any_position": anywhere,
        "offline_optimum": facts.offline_optimum(explained.rules) / total,
    }


def _check_bounds(study: Study, presets: Mapping[str, Mapping[str, Any]], bounds: Mapping[str, float | None]) -> None:
    """Raise where an arm exceeds a bound: the bound or the replay is wrong, and the page reports no result."""
    for name, preset in presets.items():
        finds_prefixes = study.arms[name].spans is None and study.arms[name].passages.are_default
        checked = ["prefix"] * finds_prefixes + ["any_position"] + ["offline_optimum"] * (name == study.baseline)
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


def _fix_entry(rank: int, fix: Fix) -> dict[str, Any]:
    return {"rank": rank} | asdict(fix) | {"gain_per_gib": fix.gain_per_gib, "helps": fix.helps}
