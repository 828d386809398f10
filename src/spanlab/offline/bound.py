"""Proven upper bounds on the prompt tokens that any cache of a given memory reuses in one run.

The claim covers every policy that stores whole units, counts running requests inside its budget and
admits in the given order, independent of its placement, eviction, admission and knowledge of the future.

1. A unit can be reused at admission j only if an earlier request had it in its prompt or output, and it must
   have stayed in memory since the last of these stored it: no other request could restore it.
   Where memory for a prompt and its states is reserved at admission, they are stored at once. After a
   preemption, where memory is allocated step by step, and for output tokens that the workload contains,
   storing ends with the request. So the unit occupies memory in every slot between that last storing
   and j. (`reuses`)
2. These ranges of slots are disjoint for one unit, so memory of one slot serves one reuse only.
3. Where it is reserved, the prompt of request s is in memory in slot s too. It shares no unit with
   the ranges that cross the slot, so these fit beside that prompt and its running state.

The reuse of any policy is therefore a set of ranges within these capacities, and the largest such set
is an upper bound. Memory of older running requests, of output tokens and of partly filled units is
ignored, which only loosens the bound. With attention alone the largest set is exact (`belady`). With
recurrent states, or a limit on entries, it is bounded by weak duality (`packing`), at optimal prices of
memory (`linear_program`) or, for runs beyond a limit, at approximate ones (`descent`). It is also
bounded by the exact set for KV with states at no cost. The smaller of the two bounds is returned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spanlab.core.budget import UNLIMITED, Budget
from spanlab.offline.belady import most_reused_tokens
from spanlab.offline.forest import Ints
from spanlab.offline.packing import Resource
from spanlab.offline.pricing import LIMIT, UNITS, priced_tokens
from spanlab.offline.reuses import Reuses


@dataclass(frozen=True)
class CacheMemory:
    """A budget, and the bytes of a stored token and of a stored state.

    `state_bytes`  0 for a model without recurrent layers
    """

    budget: Budget
    token_bytes: int
    state_bytes: int = 0


@dataclass(frozen=True)
class OfflineBound:
    """A bound on the reused tokens of any cache with a memory, and its method (`pricing`)."""

    tokens: int
    method: str


def offline_bound(reuses: Reuses, memory: CacheMemory, limit: int = LIMIT) -> OfflineBound:
    """Return the bound; it is exact where only units compete for memory.

    `limit`  size of a run above which the prices of memory are approximate
    """
    kv_alone = most_reused_tokens(reuses, _room_for_kv(reuses, memory))
    resources = resources_of(reuses, memory)
    if not resources or (not memory.state_bytes and memory.budget.entries >= UNLIMITED):
        return OfflineBound(kv_alone, UNITS)
    tokens, method = priced_tokens(reuses, resources, limit)
    return OfflineBound(min(kv_alone, tokens), method)


def _room_for_kv(reuses: Reuses, memory: CacheMemory) -> Ints:
    """Return the tokens of other prompts that fit beside the slot's prompt."""
    budget = memory.budget
    if not memory.token_bytes:
        return np.full(reuses.slots, UNLIMITED)
    unreserved = budget.total_bytes - memory.state_bytes * reuses.running
    return np.minimum(budget.kv_bytes, unreserved) // memory.token_bytes - reuses.prompt_tokens


def resources_of(reuses: Reuses, memory: CacheMemory) -> list[Resource]:
    """Return the limited budgets, less the memory of each slot's request."""
    budget, token, state = memory.budget, memory.token_bytes, memory.state_bytes
    kv, running_state = token * reuses.prompt_tokens, state * reuses.running
    limits = (
        (budget.kv_bytes, Resource(budget.kv_bytes - kv, token)),
        (budget.state_bytes, Resource(budget.state_bytes - running_state, 0, state)),
        (budget.total_bytes, Resource(budget.total_bytes - kv - running_state, token, state)),
        (budget.entries, Resource(np.full_like(kv, budget.entries), per_path=1)),
    )
    return [replace(used, capacity=np.maximum(used.capacity, 0)) for limit, used in limits if limit < UNLIMITED]
