"""Caches whose entries expire: presets of providers beside other caches, and the time to live that
a log shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analyses.fixes import Facts
from spanlab.offline.expiry import NS, Expiry, expiring_reuse, gaps_s
from spanlab.offline.forest import Flags, Floats, Ints
from spanlab.offline.replay import CacheRules, replay
from spanlab.report.table import (
    Cell,
    Field,
    Table,
    percent,
    placeholder,
    seconds_text,
    tabulate,
    word,
)
from spanlab.settings.analyses import PROVIDERS, ExplainSettings

# ------------------------------------------------------------------------------
# Hit rates of caches that expire, beside those of other caches.
# ------------------------------------------------------------------------------

OWN = "ttl"  # name of a cache with the time to live of the settings
# and of caches with both ends of the fitted interval
FITTED = ("fitted_shortest", "fitted_longest")


def caches_of(settings: ExplainSettings, fitted: Mapping[str, Any] | None) -> dict[str, Expiry]:
    """Return the caches that expire, by name: those of providers, of the settings and of the
    fit."""
    names = PROVIDERS if settings.providers is None else settings.providers
    caches = {name: Expiry(**PROVIDERS[name]) for name in names}
    if settings.ttl_s is not None:
        caches[OWN] = Expiry(settings.ttl_s)
    if fitted is not None and fitted["shortest_s"] is not None:
        caches |= {
            name: Expiry(fitted[end])
            for name, end in zip(FITTED, ("shortest_s", "longest_s"), strict=True)
        }
    return caches


def expiry_of(
    facts: Facts, settings: ExplainSettings, rules: CacheRules
) -> tuple[dict[str, Any] | None, dict[str, Ints]]:
    """Return caches that expire and the time to live that the log shows, and the reused tokens of
    each prompt by cache.

    The first is None for a log without times.

    `caches`  by name: `ttl_s`, `refreshes`, `token_hit_rate`, and `expired` and `too_short`, shares
              of the tokens; `in_store` is the hit rate of a cache by `rules` whose entries also
              expire, for the time of the settings and for fitted ones; None for the others
    `fitted`  as `fitted_ttl` returns it; None if the log has no counts of cached tokens
    """
    log = facts.log
    if not log.arrived_ns.any():
        return None, {}
    total = max(facts.prompt_tokens, 1)
    fitted = fitted_ttl(facts)
    caches, reused = {}, {}
    for name, cache in caches_of(settings, fitted).items():
        reuse = expiring_reuse(facts.paths, log.arrived_ns, cache)
        reused[name] = reuse.reused
        caches[name] = {
            "ttl_s": cache.ttl_s,
            "refreshes": cache.refreshes,
            "token_hit_rate": int(reuse.reused.sum()) / total,
            "expired": int(reuse.expired.sum()) / total,
            "too_short": int(reuse.too_short.sum()) / total,
            "in_store": None,
        }
        if name in (OWN, *FITTED):
            limited = replay(facts.in_logged_order, replace(rules, ttl_ns=cache.ttl_ns))
            caches[name]["in_store"] = int(limited.reused.sum()) / total
    return {"caches": caches, "fitted": fitted}, reused


# ------------------------------------------------------------------------------
# The time to live that the provider's counts show.
# ------------------------------------------------------------------------------

# tokens: shorter prefixes are not cached by OpenAI, nor by the first models of Anthropic
LEAST_PREFIX = 1024
# tokens of a prompt that one earlier request used last, to say whether they were found
LEAST_PART = 512
LEAST_MISSES = 2  # lost prefixes behind the fitted time
MOST_CONTRADICTIONS = 0.1  # of the prefixes that were found or lost


@dataclass(frozen=True)
class _Sightings:
    """Prefixes that an earlier request had: seconds since its last use, and whether the provider
    found them."""

    gaps: Floats
    hits: Flags


def fitted_ttl(facts: Facts) -> dict[str, Any] | None:
    """Return the time to live that explains most hits and misses; None without counts of cached
    tokens.

    The last use of a prefix is that by any request, or, if no time is identified so, that by its
    session: servers keep sessions apart, and may find nothing of others.

    `shortest_s`, `longest_s`  ends of the interval: the longest gap that was still found, and the
                               shortest that was not; None if no time is identified
    `hits`, `misses`           prefixes that were found and lost
    `contradictions`           prefixes that were found after the time, or lost before it
    `within_sessions`          whether the last use is that by the session
    `says`                     the result in one sentence
    """
    log = facts.log
    if log.usage is None or np.isnan(log.usage[:, :2]).any(axis=1).all():
        return None
    fitted = _fit(_sightings(facts), within_sessions=False)
    if fitted["shortest_s"] is None and log.sessions is not None:
        within = _fit(_sightings_of_sessions(facts, log.sessions), within_sessions=True)
        fitted = fitted if within["shortest_s"] is None else within
    return fitted


def _fit(seen: _Sightings, *, within_sessions: bool) -> dict[str, Any]:
    hits, misses = int(seen.hits.sum()), int((~seen.hits).sum())
    unknown = {
        "shortest_s": None,
        "longest_s": None,
        "hits": hits,
        "misses": misses,
        "contradictions": None,
    }
    unknown["within_sessions"] = within_sessions
    counted = f"{hits:,} prefixes of earlier prompts were found, {misses:,} were not"
    if not hits or not misses:
        why = "nothing was lost" if hits else "nothing was found"
        longest = float(seen.gaps[seen.hits].max(initial=0.0))
        after = f", the longest after {seconds_text(longest)}" if hits else ""
        return unknown | {"says": f"no time to live is identified: {counted}{after}, so {why}"}
    shortest, longest, contradictions = _threshold(seen)
    behind = int((~seen.hits & (seen.gaps >= longest)).sum()) if np.isfinite(longest) else 0
    share = contradictions / len(seen.gaps)
    if behind < LEAST_MISSES or share > MOST_CONTRADICTIONS or contradictions >= behind:
        best = f"the best time contradicts {contradictions:,} of them"
        return unknown | {"says": f"no time to live is identified: {counted}, and {best}"}
    interval = f"between {seconds_text(shortest)} and {seconds_text(longest)}"
    use = "their last use in the same session" if within_sessions else "their last use"
    fits = [name for name, preset in PROVIDERS.items() if shortest <= preset["ttl_s"] <= longest]
    presets = f"; {', '.join(fits)} fit{'s' * (len(fits) == 1)}" if fits else "; no preset fits"
    return unknown | {
        "shortest_s": shortest,
        "longest_s": longest,
        "contradictions": contradictions,
        "says": f"entries live {interval} after {use}: {counted}, {contradictions:,} contradict{presets}",
    }


def _threshold(seen: _Sightings) -> tuple[float, float, int]:
    """Return the longest gap of a hit before the best time, the shortest of a miss behind it, and
    contradictions."""
    order = np.argsort(seen.gaps, kind="stable")
    gaps, hits = seen.gaps[order], seen.hits[order]
    lost_before = np.concatenate([[0], np.cumsum(~hits)])
    found_behind = np.concatenate([[0], np.cumsum(hits)])
    wrong = lost_before + hits.sum() - found_behind
    is_end = np.concatenate([[True], gaps[1:] > gaps[:-1], [True]])  # equal gaps are on one side
    best = int(np.flatnonzero(is_end)[np.argmin(wrong[is_end])])
    before, behind = gaps[:best][hits[:best]], gaps[best:][~hits[best:]]
    return float(before.max(initial=0.0)), float(behind.min(initial=np.inf)), int(wrong[best])


def _sightings(facts: Facts) -> _Sightings:
    """Return the prefixes that one earlier request used last, with whether the provider counts them
    as cached.

    The parts of a prompt are its runs of nodes with one gap. The first part that was lost ends its
    prompt: those behind it are lost whatever their age. A prefix counts as lost only if the request
    that used it last had ended.
    """
    log, paths = facts.log, facts.paths
    assert log.usage is not None, "the caller has checked it"
    gaps, tokens = gaps_s(paths, log.arrived_ns), paths.tokens[paths.nodes]
    ended = None if log.observed is None else log.observed.last_token
    arrived = log.arrived_ns / NS
    is_found, found_gaps = [], []
    scales = log.usage[:, 0] / np.maximum(paths.prompt_tokens, 1)
    for request in np.flatnonzero(~np.isnan(log.usage[:, :2]).any(axis=1)).tolist():
        start, stop = int(paths.starts[request]), int(paths.starts[request + 1])
        depth, cached = 0.0, float(log.usage[request, 1])
        for gap, part_tokens in _parts(gaps[start:stop], tokens[start:stop]):
            above, depth = depth, depth + part_tokens * float(scales[request])
            if depth < LEAST_PREFIX or depth - above < LEAST_PART:
                continue
            is_hit = cached >= (above + depth) / 2
            if not is_hit and not _had_ended(arrived, ended, request, gap):
                break
            is_found.append(is_hit)
            found_gaps.append(gap)
            if not is_hit:
                break
    return _Sightings(np.array(found_gaps, dtype=np.float64), np.array(is_found, dtype=np.bool_))


def _sightings_of_sessions(facts: Facts, sessions: NDArray[np.int32]) -> _Sightings:
    """Return the prefixes that a request shares with the one before it in its session, and whether
    they were found."""
    log, paths = facts.log, facts.paths
    assert log.usage is not None, "the caller has checked it"
    ended = None if log.observed is None else log.observed.last_token
    arrived = log.arrived_ns / NS
    ends = paths.node_stop[paths.nodes]
    before: dict[int, int] = {}
    is_found, found_gaps = [], []
    for request, session in enumerate(sessions.tolist()):
        previous = before.get(session)
        before[session] = request
        prompt, cached = log.usage[request, :2]
        if previous is None or np.isnan(prompt) or np.isnan(cached):
            continue
        first, second = (
            paths.nodes[paths.starts[each] : paths.starts[each + 1]] for each in (previous, request)
        )
        length = min(len(first), len(second))
        same = int(np.argmin(np.append(first[:length] == second[:length], False)))
        if not same:
            continue
        shared = (
            float(ends[paths.starts[request] + same - 1])
            * prompt
            / max(int(paths.prompt_tokens[request]), 1)
        )
        is_hit = bool(cached >= shared / 2)
        gap = float(arrived[request] - arrived[previous])
        if shared >= LEAST_PREFIX and (is_hit or _had_ended(arrived, ended, request, gap)):
            is_found.append(is_hit)
            found_gaps.append(gap)
    return _Sightings(np.array(found_gaps, dtype=np.float64), np.array(is_found, dtype=np.bool_))


def _parts(gaps: Floats, tokens: Ints) -> list[tuple[float, int]]:
    """Return the gap and the tokens of each run of nodes with one finite gap."""
    known = int(np.isfinite(gaps).sum())
    if not known:
        return []
    begins = np.flatnonzero(np.concatenate([[True], gaps[1:known] != gaps[: known - 1]]))
    sums = np.add.reduceat(tokens[:known], begins)
    return [(float(gaps[begin]), int(size)) for begin, size in zip(begins, sums, strict=True)]


def _had_ended(arrived: Floats, ended: Floats | None, request: int, gap: float) -> bool:
    """Return whether the request that came `gap` seconds before had ended; unknown ends count as
    such."""
    if ended is None:
        return True
    before = int(np.searchsorted(arrived, arrived[request] - gap - 1e-6))
    return bool(np.isnan(ended[before]) or ended[before] <= arrived[request])


# ------------------------------------------------------------------------------
# Tables and sentences.
# ------------------------------------------------------------------------------


def expiry_lines(expiry: Mapping[str, Any] | None) -> list[str]:
    """Return the sentence about the fitted time to live; none where the log says nothing about
    it."""
    return [expiry["fitted"]["says"]] if expiry is not None and expiry["fitted"] is not None else []


def expiry_table(summary: Mapping[str, Any]) -> Table:
    """Return what caches find on the same calls: the provider's count, the arms, caches that
    expire, and bounds."""
    expiry, reported = summary["expiry"], summary["reported"]
    rows: list[dict[str, Any]] = []
    if reported is not None and reported["token_hit_rate"] is not None:
        rows.append(_row("counted by the provider", reported["token_hit_rate"]))
    rows += [_row(name, preset["token_hit_rate"]) for name, preset in summary["presets"].items()]
    rows += [_row(name, **cache) for name, cache in (expiry["caches"] if expiry else {}).items()]
    rows.append(_row("prefix, no limit of memory or time", summary["bounds"]["prefix"]))
    if summary["bounds"]["any_position"] is not None:
        rows.append(_row("seen before, at any position", summary["bounds"]["any_position"]))
    fields = (
        Field("cache", "cache", word, left=True),
        Field(
            "ttl_s",
            "lives\n(s)",
            lambda seconds: (
                placeholder("")
                if seconds is None
                else Cell(seconds, f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}")
            ),
        ),
        Field(
            "refreshes",
            "from its",
            lambda refreshes: (
                placeholder("")
                if refreshes is None
                else Cell(refreshes, "use" if refreshes else "creation")
            ),
            empty=(None,),
        ),
        Field("token_hit_rate", "token\nhit rate", percent),
        Field("expired", "expired", percent, empty=(None,)),
        Field("too_short", "too short", percent, empty=(None,)),
        Field("in_store", "also within\nthe store", percent, empty=(None,)),
    )
    notes = (
        "caches that expire have no limit of memory; expired and too short are shares of the prompt tokens; a cache of "
        "Anthropic stores what the client marks, and counts here as if all were marked; the last column is the hit "
        f"rate of {summary['explained']} whose entries expire, too",
        *expiry_lines(expiry),
    )
    return tabulate("expiry", "What caches find on these calls", fields, rows, notes)


def _row(
    cache: str,
    token_hit_rate: float | None,
    ttl_s: float | None = None,
    refreshes: bool | None = None,
    expired: float | None = None,
    too_short: float | None = None,
    in_store: float | None = None,
) -> dict[str, Any]:
    return {
        "cache": cache,
        "ttl_s": ttl_s,
        "refreshes": refreshes,
        "token_hit_rate": token_hit_rate,
        "expired": expired,
        "too_short": too_short,
        "in_store": in_store,
    }
