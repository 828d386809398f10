"""Reuse of caches whose entries expire, as those of providers do: no limit of memory, and a time to
live."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanlab.offline.forest import Flags, Floats, Ints
from spanlab.offline.replay import Paths

NS = 1e9


@dataclass(frozen=True)
class Expiry:
    """A prefix cache without a limit of memory, whose entries expire.

    `ttl_s`      seconds from the last use of an entry, or from its creation, to its end
    `refreshes`  whether a use restarts the time
    `least`      prompts with fewer tokens, and shorter prefixes, are not cached
    `unit`       reused tokens are a multiple of it
    """

    ttl_s: float
    refreshes: bool = True
    least: int = 0
    unit: int = 1

    @property
    def ttl_ns(self) -> int:
        """The time to live in nanoseconds."""
        return round(self.ttl_s * NS)


@dataclass(frozen=True)
class ExpiringReuse:
    """Tokens of each prompt, shape (requests,): they sum to its length.

    `reused`      read from the cache
    `expired`     in an earlier prompt, and expired since
    `too_short`   below the least length or the unit of the cache
    `never_seen`  in no earlier prompt
    """

    reused: Ints
    expired: Ints
    too_short: Ints
    never_seen: Ints


def gaps_s(paths: Paths, arrived_ns: Ints) -> Floats:
    """Return the seconds since an earlier request visited the node of each visit; infinite at the
    first visit.

    Whoever uses a node uses all above it, so that gaps never decrease along a path.
    """
    owner = paths.owner
    order = np.argsort(paths.nodes, kind="stable")
    again = paths.nodes[order][1:] == paths.nodes[order][:-1]
    gaps = np.full(len(paths.nodes), np.inf)
    later, earlier = owner[order[1:][again]], owner[order[:-1][again]]
    gaps[order[1:][again]] = (arrived_ns[later] - arrived_ns[earlier]) / NS
    return gaps


def expiring_reuse(paths: Paths, arrived_ns: Ints, expiry: Expiry) -> ExpiringReuse:
    """Return what requests find that arrive at these times; a prompt is stored from its arrival
    on."""
    if expiry.refreshes:
        is_alive = gaps_s(paths, arrived_ns) * NS <= expiry.ttl_ns
    else:
        is_alive = _created(paths, arrived_ns, expiry)
    prompt, seen = paths.prompt_tokens, paths.seen_tokens
    alive = paths.per_request(np.where(is_alive, paths.tokens[paths.nodes], 0))
    usable = np.minimum(alive, np.maximum(prompt - 1, 0)) // expiry.unit * expiry.unit
    reused = np.where((prompt < expiry.least) | (usable < expiry.least), 0, usable)
    return ExpiringReuse(reused, seen - alive, alive - reused, prompt - seen)


def _created(paths: Paths, arrived_ns: Ints, expiry: Expiry) -> Flags:
    """Return whether the entry of each visit is alive, if only a new creation restarts its time."""
    created: dict[int, int] = {}
    alive = np.zeros(len(paths.nodes), dtype=np.bool_)
    starts, nodes = paths.starts.tolist(), paths.nodes.tolist()
    for request, now in enumerate(arrived_ns.tolist()):
        is_found = True
        for visit in range(starts[request], starts[request + 1]):
            node = nodes[visit]
            is_found = is_found and node in created and now - created[node] <= expiry.ttl_ns
            alive[visit] = is_found
            if not is_found:
                created[node] = now
    return alive
