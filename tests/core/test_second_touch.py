"""Admission at the second touch, against a brute force over all earlier prompts."""

import numpy as np
import pytest

from spanlab.core.admission import BatchRules, SecondTouch
from spanlab.core.ledger import NoLedger
from spanlab.core.policies.tree_variants import AdmittingPolicy
from spanlab.core.request import Request
from spanlab.core.rules import ReuseRules
from spanlab.core.tree import isolated

from ..support.policies import make_tree_policy
from . import factories
from .factories import KV, common, doc, make_budget, make_prompt, make_request, text
from .steps import serve_waves


def make_policy(budget=None, *, block_size: int = 1, ledger=None, **rules) -> AdmittingPolicy:
    sizes = {"budget": budget, "kv_bytes": KV, "block_size": block_size}
    return make_tree_policy(ReuseRules(**rules), SecondTouch(), ledger, kind=AdmittingPolicy, **sizes)


def served(policy, requests: list[Request]) -> list[int]:
    """Serve requests one after another; return the reused tokens of each."""
    sequences = serve_waves(policy, [[request] for request in requests], BatchRules(max_num_batched_tokens=7))
    return [sequence.first_plan.reused for sequence in sequences.values()]


def expected(prompts: list[list[int]], block_size: int) -> list[int]:
    """Return the reused tokens of prompts: a prefix is stored by the second prompt that has it."""
    reused, touched = [], []
    for number, prompt in enumerate(prompts):
        shared = [common(prompt, other) for other in prompts[:number]]
        stored = [min(length, touched[other]) for other, length in enumerate(shared)]
        longest = min(max(stored, default=0), len(prompt) - 1)
        reused.append(longest // block_size * block_size)
        touched.append(max(shared, default=0))
    return reused


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("ledger", [None, NoLedger()])
def test_prefixes_are_stored_as_far_as_two_prompts_had_them(block_size: int, ledger):
    for seed in range(20):
        draw = np.random.default_rng(seed)
        prompts = [draw.integers(0, 2, draw.integers(1, 12)).tolist() for _ in range(15)]
        requests = [make_request(prompt, id=number) for number, prompt in enumerate(prompts)]
        assert served(make_policy(block_size=block_size, ledger=ledger), requests) == expected(prompts, block_size)


def test_a_span_is_kept_at_its_second_touch():
    policy, document = make_policy(layout=isolated), doc(*range(50, 60))
    requests = [make_prompt(text(1), document, text(100 + number), id=number) for number in range(4)]
    assert served(policy, requests) == [0, 0, 11, 11]


def test_novel_prompts_displace_nothing():
    repeated = make_request(range(30), id=0)
    novel = [make_request(range(100 * number, 100 * number + 30), id=number) for number in range(1, 20)]
    stream = [repeated, repeated, *novel, repeated]
    requests = [make_request(request.tokens, id=number) for number, request in enumerate(stream)]
    assert served(make_policy(make_budget(tokens=65)), requests)[-1] == 29
    plain = [make_request(request.tokens, id=number) for number, request in enumerate(requests)]
    assert served(factories.make_policy(make_budget(tokens=65)), plain)[-1] == 0
