"""The ledger names causes and decides nothing; looking leaves no trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.ledger import Ledger, NoLedger, _PathCursor
from spanlab.core.placement import every_n
from spanlab.core.token_string import string_of
from spanlab.core.tree import PrefixTree, as_seen, isolated, whole

from .factories import doc, finish, make_budget, make_policy, make_prompt, make_request, text

prompts = st.lists(
    st.builds(
        lambda independent, tokens: (doc if independent else text)(*tokens),
        st.booleans(),
        st.lists(st.integers(0, 1), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=4,
)
POLICIES = {
    "prefix": {"layout": whole},
    "states": {"layout": whole, "hybrid": True, "placer": every_n(2)},
    "isolated": {"layout": isolated, "block_size": 2},
    "as seen": {"layout": as_seen, "copies": True},
    "private": {"private": True},
}

ZEROS = string_of([np.zeros(4, np.int32)])


def served(options: dict, ledger: Ledger, parts: list) -> list[tuple[object, ...]]:
    """What each of some requests in a row, served alone, reuses, computes and captures."""
    policy, records = make_policy(make_budget(tokens=40, states=4), ledger=ledger, **options), []
    for now, spans in enumerate(parts):
        plan = policy.match(make_prompt(*spans, id=now), now)
        allocation = policy.allocate(plan, now)
        records.append(
            (plan.matched, plan.resume, allocation.work, list(allocation.captures), allocation.stored.copy())
        )
        finish(policy, allocation, now)
    return records


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
@settings(deadline=None, max_examples=60)
@given(parts=st.lists(prompts, min_size=1, max_size=6))
def test_policy_decides_alike_without_a_ledger(options, parts):
    assert served(options, Ledger(), parts) == served(options, NoLedger(), parts)


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_planned_prompts_that_are_never_admitted_leave_nothing(options):
    policy = make_policy(**options)
    for number in range(100):
        policy.match(make_request([number, 1, 2]), 0)
        policy.match(make_prompt(doc(number), text(number, 1), id=number), 0)
    assert list(policy.index.all()) == []
    assert policy.index._roots == {}
    assert policy.ledger._roots == {}


def test_refusals_are_forgotten_once_the_tokens_are_kept():
    ledger = Ledger()
    ledger.computed("key", ZEROS, 4)
    ledger.refused("key", ZEROS, 3)
    assert ledger.lookup("key", ZEROS) == (4, 3)
    ledger.stored("key", ZEROS, 3)
    assert ledger.lookup("key", ZEROS) == (4, 0)
    assert ledger.lookup("other", ZEROS) == (0, 0)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_strings_followed_again_are_known_like_new_ones(data):
    bits = st.lists(st.integers(0, 1), min_size=1, max_size=8)
    strings = data.draw(st.lists(bits, min_size=1, max_size=3))
    token_strings = [string_of([np.array(ids, np.int32)]) for ids in strings]
    ledger, computed = Ledger(), set()
    for _ in range(data.draw(st.integers(1, 12))):
        index, key = data.draw(st.integers(0, len(token_strings) - 1)), data.draw(st.sampled_from("ab"))
        if data.draw(st.booleans()):
            length = data.draw(st.integers(0, len(strings[index])))
            ledger.computed(key, token_strings[index], length)
            computed |= {(key, *strings[index][:stop]) for stop in range(length + 1)}
        else:
            lengths = [stop for stop in range(len(strings[index]) + 1) if (key, *strings[index][:stop]) in computed]
            assert ledger.lookup(key, token_strings[index]) == (max(lengths, default=0), 0)


def test_a_string_is_followed_from_where_it_was_left():
    tree, trail, ones = PrefixTree(), _PathCursor(), string_of([np.ones(4, np.int32)])
    root = tree.new_root()
    node = tree.extend(root, ZEROS, 3, 0)
    trail.note(root, ZEROS, node, 3)
    assert trail.start(root, ZEROS, 4) is node
    assert trail.start(root, ZEROS, 2) is root
    assert trail.start(root, ones, 4) is root
    other = tree.new_root()
    assert trail.start(other, ZEROS, 4) is other
