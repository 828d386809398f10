"""An infinite cache over the RAGPulse trace: the policies find the tokens that counting components gives.

Published for the whole trace are 31.5 % of the tokens by prefix and 72.0 % at any position, in the order system,
passages, history, web, user. A policy differs from counting in two exact ways: one token of a prompt that is known
whole is computed for its logits; and the last token of a prompt is ordered text, so a component that ends a prompt is
stored, and found there, without it. Content that a prompt holds twice is computed once, unless it ends the prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from spanlab.build import build_policy, build_workload
from spanlab.cli import compose
from spanlab.core.request import Request

INFINITE = ("workload=ragpulse", "workload.ragpulse.independent=all", "store=unlimited", "arms=pic")
SETTINGS = ("model=llama-3.1-8b", "arrivals=as_given", "arrivals.rate_rps=null", "load.rates_rps=[]", "load.arms=[]")
QUALITY_ONLY = ("workload.documents=null", "workload.questions_per_document=null")


class Counted(NamedTuple):
    """Tokens of components seen before, what a policy must make of them, and where they differ."""

    total: int
    prefix: int
    anywhere: int  # in an earlier prompt, or earlier in the same one
    found: int
    twice: int  # first seen earlier in the same prompt
    ends: int  # last tokens of components that end a prompt, or were only ever stored as such
    whole: int  # prompts that were known whole


def count(requests: Sequence[Request]) -> Counted:
    """Component by component, with plain dictionaries."""
    longest: dict[bytes, int] = {}
    prompts: set[tuple[bytes, ...]] = set()
    seen: set[bytes] = set()
    total = prefix = anywhere = found = twice = ends = whole = 0
    for request in requests:
        contents = [span.tokens.tobytes() for span in request.spans]
        lengths = [len(span.tokens) for span in request.spans]
        total += sum(lengths)
        known = [tuple(contents[: at + 1]) in prompts for at in range(len(contents))]
        prefix += sum(length for length, there in zip(lengths, known, strict=True) if there)
        whole += known[-1]
        for at, (content, length) in enumerate(zip(contents, lengths, strict=True)):
            end, again = at == len(contents) - 1, content in contents[:at]
            anywhere += length if content in seen or again else 0
            twice += length if content not in seen and again else 0
            usable = min(length - end, longest.get(content, 0)) + (end and known[-1])
            usable = length if again and not end else usable
            found += usable
            ends += length - usable if content in seen or again else 0
        for at, (content, length) in enumerate(zip(contents, lengths, strict=True)):
            longest[content] = max(longest.get(content, 0), length - (at == len(contents) - 1))
        seen.update(contents)
        prompts.update(tuple(contents[: at + 1]) for at in range(len(contents)))
    return Counted(total, prefix, anywhere, found, twice, ends, whole)


def reused(arm: str, count: str) -> tuple[tuple[Request, ...], int, int]:
    """The requests, served one after another from a store without limit, and the tokens an arm reused and had seen."""
    study = compose("smoke", [*INFINITE, *SETTINGS, *QUALITY_ONLY, f"workload.ragpulse.requests={count}"])
    requests = build_workload(study.workload, "unused").requests
    policy = build_policy(study, study.arms[arm], 0, 10_000)
    tokens = seen = 0
    for now, request in enumerate(requests):
        plan = policy.match(request, now)
        tokens, seen = tokens + plan.reused, seen + plan.seen
        allocation = policy.allocate(plan, now)
        assert allocation is not None, "a store without limit has room"
        for at, part in enumerate(plan.cache_spans):
            policy.insert(allocation, part.cache_span.stop, now, at)
        policy.free(allocation, 0)
    return requests, tokens, seen


@pytest.mark.parametrize("requests", ["400", pytest.param("null", marks=pytest.mark.slow)])
def test_policies_find_what_counting_components_finds(requests: str):
    asked, tokens, seen = reused("radix", requests)
    counted = count(asked)
    assert (tokens, seen) == (counted.prefix - counted.whole, counted.prefix)
    _, tokens, seen = reused("pic", requests)
    assert (tokens, seen) == (counted.found - counted.whole, counted.found)
    assert counted.anywhere == counted.found + counted.ends


@pytest.mark.slow
def test_an_infinite_cache_reuses_the_published_shares_of_the_whole_trace():
    requests, by_prefix, _ = reused("radix", "null")
    _, anywhere, _ = reused("pic", "null")
    counted = count(requests)
    assert (counted.total, counted.prefix, counted.whole) == (20_851_449, 6_574_248, 1)
    assert by_prefix == 6_574_248 - 1
    published = 15_018_605  # components seen in an earlier prompt, or earlier in the same one
    assert (counted.anywhere, counted.twice) == (published, 3_918)
    assert anywhere == published - counted.ends - counted.whole
    assert (round(by_prefix / counted.total, 3), round(anywhere / counted.total, 3)) == (0.315, 0.72)
    assert counted.ends == 813
