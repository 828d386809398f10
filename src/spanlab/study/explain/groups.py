"""Where tokens are lost: by tenant, session and request, and at which positions prompts part."""

from __future__ import annotations

from typing import Any

import numpy as np

from spanlab.offline.forest import Ints
from spanlab.offline.replay import ReplayResult
from spanlab.study.explain.facts import Facts

MOST = 10  # groups and positions that are shown


def groups_of(facts: Facts, replayed: ReplayResult) -> dict[str, list[dict[str, Any]]]:
    """The groups of each kind that lose most tokens that were seen before, most first."""
    log = facts.log
    found = {"requests": _losing(facts, replayed, np.arange(log.requests), {})}
    if log.sessions is not None:
        found["sessions"] = _losing(facts, replayed, log.sessions.astype(np.int64), {})
    if log.tenants is not None:
        found["tenants"] = _losing(facts, replayed, log.tenants.astype(np.int64), dict(enumerate(log.tenant_names)))
    return found


def _losing(facts: Facts, replayed: ReplayResult, group: Ints, names: dict[int, str]) -> list[dict[str, Any]]:
    def by_group(values: Ints) -> Ints:
        return np.bincount(group, values).astype(np.int64)

    prompt, reused = by_group(facts.paths.prompt_tokens), by_group(replayed.reused)
    lost = {cause: by_group(values) for cause, values in replayed.lost.items()}
    missed = prompt - reused - lost.get("never_seen", 0)
    counts = np.bincount(group)
    most = np.argsort(-missed, kind="stable")[:MOST]
    return [
        {
            "name": names.get(at, str(at)),
            "requests": int(counts[at]),
            "prompt_tokens": int(prompt[at]),
            "reused_tokens": int(reused[at]),
            "lost_by_cause": {cause: int(values[at]) for cause, values in lost.items() if values[at]},
        }
        for at in most.tolist()
        if prompt[at]
    ]


def positions_of(facts: Facts) -> list[dict[str, Any]]:
    """Positions at which prompts part from what came before, by the reusable tokens that lie in front of them.

    `states`  different prefixes that end there: so many states would be stored
    """
    paths = facts.paths
    again = np.flatnonzero(~paths.first)
    if not len(again):
        return []
    owner = paths.owner[again]
    ends = paths.nodes[again[np.append(owner[1:] != owner[:-1], True)]]  # how far each prompt was there before
    positions, at = np.unique(paths.node_stop[ends], return_inverse=True)
    requests, states = np.bincount(at), np.bincount(at[np.unique(ends, return_index=True)[1]], minlength=len(positions))
    tokens = positions * requests
    most = np.argsort(-tokens, kind="stable")[:MOST]
    total = int(paths.seen_tokens.sum())
    return [
        {
            "position": int(positions[one]),
            "states": int(states[one]),
            "requests": int(requests[one]),
            "share_of_reusable": int(tokens[one]) / total,
        }
        for one in most.tolist()
    ]
