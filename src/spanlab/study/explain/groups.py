"""Lost tokens by tenant, session and request, and positions at which prompts diverge from earlier ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from spanlab.offline.forest import Ints
from spanlab.offline.replay import ReplayResult
from spanlab.study.explain.facts import Facts

MOST = 10  # groups and positions in the tables


def groups_of(facts: Facts, replayed: ReplayResult) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of each kind that lose most reusable tokens, in decreasing order."""
    log = facts.log
    groups = {"requests": _losing(facts, replayed, np.arange(log.requests), {})}
    if log.sessions is not None:
        groups["sessions"] = _losing(facts, replayed, log.sessions.astype(np.int64), {})
    if log.tenants is not None:
        groups["tenants"] = _losing(facts, replayed, log.tenants.astype(np.int64), dict(enumerate(log.tenant_names)))
    return groups


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
            "name": names.get(number, str(number)),
            "requests": int(counts[number]),
            "prompt_tokens": int(prompt[number]),
            "reused_tokens": int(reused[number]),
            "lost_by_cause": {cause: int(values[number]) for cause, values in lost.items() if values[number]},
        }
        for number in most.tolist()
        if prompt[number]
    ]


def positions_of(facts: Facts) -> list[dict[str, Any]]:
    """Return positions at which prompts diverge from earlier ones, by the number of reusable tokens before them.

    `states`  distinct prefixes that end at a position, each of which needs one stored state
    """
    paths = facts.paths
    again = np.flatnonzero(~paths.first)
    if not len(again):
        return []
    owner = paths.owner[again]
    ends = paths.nodes[again[np.append(owner[1:] != owner[:-1], True)]]  # end of each prompt's longest earlier prefix
    positions, index = np.unique(paths.node_stop[ends], return_inverse=True)
    requests = np.bincount(index)
    states = np.bincount(index[np.unique(ends, return_index=True)[1]], minlength=len(positions))
    tokens = positions * requests
    most = np.argsort(-tokens, kind="stable")[:MOST]
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
