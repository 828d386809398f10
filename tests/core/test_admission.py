"""Tokens that admission rules keep, on a policy that serves one prompt at a time."""

import pytest

from spanlab.core.admission import ADMISSIONS, AdmissionFacts
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.policies.tree_variants import AdmittingPolicy, PinningPolicy

from ..support.policies import make_tree_policy
from . import factories
from .factories import KV, make_budget, make_request

ONCE, LONG, SHORT = list(range(12)), list(range(100, 140)), list(range(50, 54))


def make_policy(admission: str, *, capacity: int = 100, kind=AdmittingPolicy, eviction: str = "lru", **options):
    budget = make_budget(tokens=capacity)
    rule = ADMISSIONS.make(admission, {}, options, facts=AdmissionFacts(budget, KV))
    return make_tree_policy(None, rule, kind=kind, budget=budget, kv_bytes=KV, block_size=2, eviction=eviction)


def reused(policy: TreePolicy, prompts: list[list[int]]) -> list[int]:
    """Tokens that each prompt reuses."""
    counts = []
    for index, prompt in enumerate(prompts):
        plan = policy.match(make_request(prompt, id=index), index)
        allocation = policy.allocate(plan, index)
        assert allocation is not None
        policy.insert(allocation, plan.prompt, index)
        policy.finish(allocation, 0, index)
        policy.free(allocation, index)
        policy.check()
        counts.append(plan.reused)
    return counts


ASKED = [ONCE, ONCE, SHORT, SHORT, LONG, LONG, [*ONCE, *SHORT], ONCE]


def test_always_keeps_what_a_plain_tree_keeps():
    plain = factories.make_policy(make_budget(tokens=100), block_size=2)
    assert reused(make_policy("always"), ASKED) == reused(plain, ASKED) == [0, 10, 0, 2, 0, 38, 12, 10]


@pytest.mark.parametrize(
    ("admission", "options", "expected"),
    [
        ("second_touch", {}, [0, 0, 0, 0, 0, 0, 12, 10]),
        ("min_length", {"tokens": 12}, [0, 10, 0, 0, 0, 38, 12, 10]),
        ("min_length", {"tokens": 13}, [0, 0, 0, 0, 0, 38, 0, 10]),
        ("bypass", {"share": 0.2}, [0, 10, 0, 2, 0, 0, 12, 10]),
        ("bypass", {"share": 1.0, "known": 0.8}, [0, 0, 0, 0, 0, 0, 12, 10]),
        ("bypass", {"share": 1.0, "known": 0.7}, [0, 0, 0, 0, 0, 0, 12, 10]),
    ],
)
def test_rules_keep_the_documented_tokens(admission, options, expected):
    assert reused(make_policy(admission, **options), ASKED) == expected


def test_bypass_of_large_prompts_saves_small_ones():
    stream = [ONCE, list(range(200, 260)), list(range(300, 360)), ONCE]
    assert reused(make_policy("always"), stream)[-1] == 0
    assert reused(make_policy("bypass", share=0.5), stream)[-1] == 10


def test_admission_and_pins_go_together():
    policy = make_policy("min_length", kind=PinningPolicy, eviction="lease", tokens=5)
    assert reused(policy, ASKED) == reused(make_policy("min_length", tokens=5), ASKED)


def test_what_is_not_admitted_counts_as_refused():
    policy = make_policy("min_length", tokens=20)
    reused(policy, [ONCE])
    losses = policy.match(make_request(ONCE, id=1), 1).losses
    assert (losses.locked, losses.never_seen) == (10, 0)


def test_a_refused_end_keeps_the_admitted_beginning():
    class UpToFour:
        def admit(self, computed):
            return min(5, computed.stop)

        def ended(self, key, tokens):
            self.told = len(tokens)

    rule = UpToFour()
    policy = make_tree_policy(None, rule, kind=AdmittingPolicy, block_size=2)
    assert reused(policy, [ONCE, LONG, LONG]) == [0, 0, 4]
    assert rule.told == len(LONG)


@pytest.mark.parametrize(
    ("admission", "options", "message"),
    [
        ("bypass", {"share": 1.5}, "admission_options.share=1.5: expected a share"),
        ("bypass", {"known": -1.0}, "admission_options.known=-1.0: expected a share"),
        ("min_length", {"tokens": 0}, "admission_options.tokens=0: expected a number above zero"),
    ],
)
def test_options_that_make_no_sense_are_refused(admission, options, message):
    with pytest.raises(ValueError, match=message):
        ADMISSIONS.check("admission_options", admission, f"admission={admission}", options)
