"""Evicted states are loaded from a tier: reuse equals that of unlimited memory for states."""

from dataclasses import fields

import numpy as np
import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.placement import Union, branch, last
from spanlab.core.policies.tiered import BackfilledPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import UNLIMITED, Budget, Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.core.tiers import Link, Tier, TierRules, Tiers
from spanlab.records import LOSS_CAUSES, Record
from spanlab_sim.timing import ConstantTiming

from ..support.policies import make_tree_policy
from .serving import serve

STATE, NS = 40, 1_000_000_000


def make_tree(states: int, backfills: bool = True) -> TreePolicy:
    """A tree with unlimited memory for KV, and room for `states` states."""
    budget = Budget(state_bytes=UNLIMITED if states >= UNLIMITED else states * STATE)
    rules = ReuseRules(needs_states=True, backfills=backfills)
    return make_tree_policy(rules, budget=budget, placer=Union((branch(), last())), kv_bytes=2, state_bytes=STATE)


def make_backfilled(states: int, write: str = "through", steps=None, gib: float = 1.0, bandwidth: float = 1.0):
    rules = TierRules(gib, bandwidth, write=write)
    tiers = Tiers([Tier("host", rules, STATE, STATE)], [Link(rules.bytes_per_s, rules.latency_s)])
    return BackfilledPolicy(make_tree(states), tiers, steps)


def trace(seed: int, number: int = 40) -> list[Request]:
    """Prompts that begin as earlier ones did, for a random while; each comes when the one before has ended."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = [[0]]
    for _ in range(number):
        base = prompts[int(rng.integers(len(prompts)))]
        prefix = base[: int(rng.integers(0, len(base) + 1))]
        prompts.append((prefix + rng.integers(0, 3, int(rng.integers(1, 10))).tolist())[:40])
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    return [Request(index, 0, (Span(prompt),), 2, index * NS) for index, prompt in enumerate(arrays)]


def served(requests, policy, chunk: int = 64) -> list[Record]:
    loads = policy if isinstance(policy, BackfilledPolicy) else None
    look = lambda *step: policy.check()  # noqa: E731
    records, _ = serve(requests, policy, ConstantTiming(1e-6), BatchRules(chunk, 4), loads=loads, on_step=look)
    assert policy.store.kv_reserved == policy.store.state_reserved == policy.store.state_locked == 0
    for record in records.values():
        losses = [getattr(record, f"lost_{cause}") for cause in LOSS_CAUSES]
        assert min(losses) >= 0
        assert record.reused_tokens + sum(losses) == record.prompt_tokens
        assert record.reused_tokens <= record.resumable_tokens <= record.matched_tokens
    return list(records.values())


@pytest.mark.parametrize("chunk", [64, 3])
@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("seed", range(4))
def test_reuse_is_that_of_endless_states(seed, write, chunk):
    requests = trace(seed)
    endless = served(requests, make_tree(UNLIMITED, backfills=False), chunk)
    limited = served(requests, make_tree(4, backfills=False), chunk)
    backfilled = served(requests, make_backfilled(4, write), chunk)
    reused = [[record.reused_tokens for record in run] for run in (limited, endless, backfilled)]
    assert reused[2] == reused[1] != reused[0]


def asked(*prompts: range) -> list[Request]:
    return [
        Request(index, 0, (Span(np.array(tokens, np.int32)),), 1, index * 1000 * NS)
        for index, tokens in enumerate(prompts)
    ]


#: The first prompt's state is evicted for the others; its KV stays, and the last prompt continues it.
VISITS = asked(range(10), range(100, 110), range(200, 210), range(300, 310), range(11))


def test_a_loaded_state_delays_its_request():
    policy = make_backfilled(3, bandwidth=4e-9)  # 4 bytes a second: a state takes 10 s
    record = served(VISITS, policy)[-1]
    assert record.reused_tokens == 10
    assert record.first_token_s - record.arrived_s > 10
    note = policy.take_note(4)
    assert (note.tokens, note.bytes) == (10, [STATE])
    assert note.critical_ns >= 10 * NS


@pytest.mark.parametrize(("step_ns", "reused"), [(5 * NS, 10), (1, 0)])
def test_the_faster_of_loading_and_computing_is_chosen(step_ns, reused):
    """A token costs `step_ns`, and the link brings the state in 10 s."""
    policy = make_backfilled(3, steps=lambda start, stop: ((stop - start) * step_ns,), bandwidth=4e-9)
    assert served(VISITS, policy)[-1].reused_tokens == reused


def test_a_tier_without_the_state_brings_nothing():
    policy = make_backfilled(3, gib=STATE / (1 << 30))  # room for one
    assert served(VISITS, policy)[-1].reused_tokens == 0


def test_records_equal_unlimited_memory_except_times():
    names = {column.name for column in fields(Record)} - {
        "captured_states",
        "captured_state_bytes",
        "loaded_state_bytes",
    }
    timeless = [name for name in names if not name.endswith("_s")]
    endless = served(VISITS, make_tree(UNLIMITED, backfills=False))[-1]
    backfilled = served(VISITS, make_backfilled(3))[-1]
    assert [getattr(endless, name) for name in timeless] == [getattr(backfilled, name) for name in timeless]
