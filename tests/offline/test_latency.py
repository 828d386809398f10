"""The bound on the mean TTFT against all choices of reuses, and closed forms."""

from itertools import product

import numpy as np
import pytest

from spanlab.core.request import Budget
from spanlab.offline.bound import CacheMemory, Prefill, least_ttft, occupied, resources_of
from spanlab.offline.forest import Reuses

from .test_bounds import documents_in_turn, in_turn, prefixes, prompt

KV = 2
STEP_NS = 30


def computing(start, stop):
    """Return nanoseconds: one and a half per call, three per token and 0.2 per query-key pair."""
    return 1.5 + 3.0 * (stop - start) + 0.2 * (stop * (stop + 1) - start * (start + 1)) / 2


def prefill_of(requests) -> Prefill:
    tokens = np.array([request.num_tokens for request in requests])
    return Prefill(tokens, np.ones(len(tokens), np.bool_), computing, STEP_NS)


def traffic(seed: int) -> list:
    """Return two long documents and a short one in random order, each with a question."""
    rng, lengths = np.random.default_rng(seed), (18, 12, 6)
    documents = rng.integers(0, 3, 8)
    return [prompt(n, [1_000 * (d + 1)] * lengths[d], [n] * rng.integers(1, 4)) for n, d in enumerate(documents)]


def rounded(start, stop):
    """Return whole nanoseconds of one step for tokens `[start, stop)`, at least the shortest step."""
    return np.maximum(np.floor(computing(start, stop)), STEP_NS)


def least_by_trying(reuses: Reuses, memory: CacheMemory, prefill: Prefill) -> float:
    """Return the least sum of TTFTs over all reused lengths that fit; each path has one node here."""
    resources = resources_of(reuses, memory)
    best, fixed = np.inf, np.setdiff1d(np.arange(reuses.slots), reuses.stop)
    cold = float(rounded(0, prefill.prompt_tokens[fixed]).sum())
    for lengths in product(*(range(tokens + 1) for tokens in (reuses.tokens // reuses.unit).tolist())):
        reused = np.array(lengths) * reuses.unit
        kv = occupied(reuses.first, reuses.stop, reused, reuses.slots)
        states = occupied(reuses.first, reuses.stop, (reused > 0).astype(np.int64), reuses.slots)
        if all((r.per_token * kv + r.per_reuse * states <= r.capacity).all() for r in resources):
            times = rounded(reused, prefill.prompt_tokens[reuses.stop])
            best = min(best, cold + float(times.sum()))
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("state", [0, 9])
def test_no_choice_of_reuses_is_quicker(seed, state):
    requests = traffic(seed)
    reuses, prefill = in_turn(requests, prefixes(6)), prefill_of(requests)
    memory = CacheMemory(Budget(total_bytes=KV * 40 + 2 * state), KV, state)
    bound, best = least_ttft(reuses, memory, prefill).value, least_by_trying(reuses, memory, prefill)
    cold = float(rounded(0, prefill.prompt_tokens).sum())
    assert 0.6 * best < bound <= best
    assert best < cold


def test_with_memory_for_all_every_request_computes_what_is_new():
    requests = documents_in_turn(3, 4, 18)
    reuses, prefill = in_turn(requests, prefixes()), prefill_of(requests)
    reused = np.zeros(len(requests), np.int64)
    np.maximum.at(reused, reuses.stop, reuses.depth)
    alone = rounded(reused, prefill.prompt_tokens).sum()
    bound = least_ttft(reuses, CacheMemory(Budget(), KV), prefill).value
    assert 0.95 * alone - len(requests) < bound <= alone
    assert least_ttft(reuses, CacheMemory(Budget(total_bytes=1), KV), prefill).value > 1.5 * alone


def test_reuse_beyond_the_least_step_saves_nothing():
    prefill = prefill_of([prompt(0, range(50)), prompt(1, range(5))])
    (long, short) = prefill.useful_tokens(1).tolist()
    assert computing(long, 50) - 1 <= STEP_NS < computing(long - 1, 50) - 1
    assert short == 0  # its five tokens take less than a step
    assert prefill.useful_tokens(8).tolist() == [-(-long // 8) * 8, 0]
