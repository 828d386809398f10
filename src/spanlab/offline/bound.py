"""Proven upper bounds on the prompt tokens that any cache of a given memory reuses in one run.

The claim covers every policy that stores whole units, counts running requests inside its budget and
admits in the given order, whatever it places, evicts, refuses or knows about the future.

1. A unit can be reused at admission j only if an earlier request had it in its prompt or output, and it must
   have stayed in memory since the last of these stored it: no other request could bring it back.
   Where memory for a prompt and its states is reserved at admission, they take their place at once;
   after a preemption, where memory is given out step by step, and of output tokens that the workload
   knows, storing ends with the request. So the unit occupies memory in every slot between that last
   storing and j. (`reuses`)
2. These ranges of slots are disjoint for one unit, so memory of one slot serves one reuse only.
3. Where it is reserved, the prompt of request s is in memory in slot s too. It shares no unit with
   the ranges that cross the slot, so those fit beside that prompt and its running state.

Whatever a policy reuses is therefore a set of ranges within these capacities, and the largest such
set bounds it. Memory of older running requests, of output tokens and of partly filled units is left
out, which only loosens the bound. With attention alone the largest set is exact (`belady`). With
recurrent states, or a limit on entries, it is bounded by weak duality (`packing`), at the best prices
of memory (`linear_program`) or, for runs beyond a limit, at good ones (`descent`), and by the exact set
for KV with states for nothing; the smaller of both counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanlab.core.budget import UNLIMITED, Budget
from spanlab.offline.belady import most_reused_tokens
from spanlab.offline.forest import Ints
from spanlab.offline.packing import Resource
from spanlab.offline.pricing import LIMIT, UNITS, priced_tokens
from spanlab.offline.reuses import Reuses


@dataclass(frozen=True)
class CacheMemory:
    """A budget, and what a stored token and a stored state take of it.

    `state_bytes`  0 for a model without recurrent layers
    """

    budget: Budget
    token_bytes: int
    state_bytes: int = 0


@dataclass(frozen=True)
class OfflineBound:
    """Tokens that no cache with a memory can exceed, and how that was found (`pricing`)."""

    tokens: int
    method: str


def offline_bound(reuses: Reuses, memory: CacheMemory, limit: int = LIMIT) -> OfflineBound:
    """The bound; exact where units alone compete.

    `limit`  size of a run from which on prices of memory are not the best ones
    """
    kv_alone = most_reused_tokens(reuses, _room_for_kv(reuses, memory))
    resources = resources_of(reuses, memory)
    if not resources or (not memory.state_bytes and memory.budget.entries >= UNLIMITED):
        return OfflineBound(kv_alone, UNITS)
    tokens, method = priced_tokens(reuses, resources, limit)
    return OfflineBound(min(kv_alone, tokens), method)


def _room_for_kv(reuses: Reuses, memory: CacheMemory) -> Ints:
    """Tokens beside the request's own prompt in each slot."""
    budget = memory.budget
    if not memory.token_bytes:
        return np.full(reuses.slots, UNLIMITED)
    beside = budget.total_bytes - memory.state_bytes * reuses.running
    return np.minimum(budget.kv_bytes, beside) // memory.token_bytes - reuses.prompt_tokens


def resources_of(reuses: Reuses, memory: CacheMemory) -> list[Resource]:
    """The budgets that are limited, less what the slot's own request takes."""
    budget, token, state = memory.budget, memory.token_bytes, memory.state_bytes
    kv, held = token * reuses.prompt_tokens, state * reuses.running
    limits = (
        (budget.kv_bytes, Resource(budget.kv_bytes - kv, token)),
        (budget.state_bytes, Resource(budget.state_bytes - held, 0, state)),
        (budget.total_bytes, Resource(budget.total_bytes - kv - held, token, state)),
        (budget.entries, Resource(np.full_like(kv, budget.entries), per_path=1)),
    )
    return [_never_negative(resource) for limit, resource in limits if limit < UNLIMITED]


def _never_negative(resource: Resource) -> Resource:
    capacity = np.maximum(resource.capacity, 0)
    return Resource(capacity, resource.per_token, resource.per_reuse, resource.per_path)
