"""Tiny served runs against the optimum by exhaustive search, which the offline bound must not fall below."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core import placement
from spanlab.core.admission import BatchRules
from spanlab.core.eviction import EVICTION_ORDERS, FUTURE, EvictionRules, Future
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Budget, Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.core.tree import shared_name, whole
from spanlab.offline.bound import CacheMemory, offline_bound
from spanlab.study.bounds import storage_of
from spanlab_sim.timing import ConstantTiming

from ..offline.brute_force import Exhaustive
from ..support.policies import make_tree_policy
from .serving import serve
from .test_offline_bounds import reuses_of

KV, STATE, UNIT = 1, 3, 2
ALONE = BatchRules(max_num_batched_tokens=64, max_num_seqs=1)
TIMING = ConstantTiming(1e-6)
PLACERS = {
    "block": lambda: placement.every_n(UNIT),
    "last": placement.last,
    "branch": placement.branch,
    "branch_and_last": lambda: placement.Union((placement.branch(), placement.last())),
}


@dataclass(frozen=True)
class Tiny:
    """Prompts of up to three units over two letters, one after another, and memory for little more than one."""

    requests: tuple[Request, ...]
    memory: CacheMemory

    def serve(self, eviction: str, placer: str = "block") -> tuple[TreePolicy, list]:
        hybrid = self.memory.state_bytes > 0
        rules = ReuseRules(True, hybrid, UNIT if hybrid else 1, False)
        future = (
            Future(self.requests, whole, shared_name, UNIT) if eviction in EVICTION_ORDERS.needing(FUTURE) else None
        )
        sizes = {"state_bytes": STATE, "block_size": UNIT, "fixed_blocks": True, "budget": self.memory.budget}
        orders = {"eviction": eviction, "eviction_rules": EvictionRules(future=future)}
        policy = make_tree_policy(rules, placer=PLACERS[placer](), **sizes, **orders)
        return policy, list(serve(self.requests, policy, TIMING, ALONE)[0].values())

    def bounds(self, policy: TreePolicy, records: list) -> tuple[int, int]:
        """The optimum, and the bound."""
        rules = storage_of(policy).rules()
        exact = Exhaustive(self.requests, rules, self.memory).most_reused()
        return exact, offline_bound(reuses_of(records, self.requests, rules), self.memory).tokens


@st.composite
def tiny(draw, states: bool) -> Tiny:
    requests = []
    for number in range(draw(st.integers(3, 5))):
        letters = draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
        tokens = np.repeat([*letters, 100 + number], UNIT).astype(np.int32)
        requests.append(Request(number, 0, (Span(tokens),), 1, 1_000_000 * number))
    longest = max(request.num_tokens for request in requests)
    kv, state = KV * (longest + draw(st.integers(0, 8))), STATE * draw(st.integers(2, 4))
    if not states:
        return Tiny(tuple(requests), CacheMemory(Budget(total_bytes=kv), KV))
    budgets = Budget(total_bytes=kv + state), Budget(kv_bytes=kv, state_bytes=state)
    return Tiny(tuple(requests), CacheMemory(draw(st.sampled_from(budgets)), KV, STATE))


def reused(records: list) -> int:
    return sum(record.reused_tokens for record in records)


EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)


@EXAMPLES
@given(case=tiny(states=False), eviction=st.sampled_from(sorted(EVICTION_ORDERS)))
def test_no_eviction_beats_the_optimum_nor_it_the_bound(case, eviction):
    policy, records = case.serve(eviction)
    exact, bound = case.bounds(policy, records)
    assert reused(records) <= exact <= bound


@settings(EXAMPLES, max_examples=20)
@given(
    case=tiny(states=True), eviction=st.sampled_from(sorted(EVICTION_ORDERS)), placer=st.sampled_from(sorted(PLACERS))
)
def test_no_placement_beats_the_optimum_nor_it_the_bound(case, eviction, placer):
    policy, records = case.serve(eviction, placer)
    exact, bound = case.bounds(policy, records)
    assert reused(records) <= exact <= bound


@EXAMPLES
@given(case=tiny(states=False))
def test_the_clairvoyant_of_equal_blocks_reaches_the_optimum(case):
    """One request at a time, blocks that leave one by one: Belady's rule is optimal."""
    policy, records = case.serve("belady")
    exact, bound = case.bounds(policy, records)
    assert reused(records) == exact == bound
