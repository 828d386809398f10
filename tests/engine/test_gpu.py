"""Every method on a CUDA device, by Triton, against the same run on the CPU."""

from __future__ import annotations

import pytest

from spanlab.core.scheduler import BatchRules

from .factories import arm, make_small, nothing_leaks, questions, run
from .oracles import far

pytestmark = pytest.mark.gpu
ARMS = ["none", "radix", "pic", "pic_raw", "pic_turned", "lego_link_16", "cache_blend_15", "ape", "as_seen_blend_15"]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", ARMS)
def test_a_run_says_what_it_says_on_the_cpu(name, page):
    requests = questions([(0, 1), (1, 2), (2, 0), (2, 1, 0)], (20, 5, 33), output=3, at=0)
    rules = BatchRules(token_budget=48, max_num_seqs=3)
    here, there = (run(make_small(device=device), arm(name, page), requests, rules=rules) for device in ("cpu", "cuda"))
    for request in requests:
        assert far(here.of(request), there.of(request)) < 1e-3
        assert here.records[request.id].reused_tokens == there.records[request.id].reused_tokens
    assert nothing_leaks(there)
