"""Digests of blocks against their prefixes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.policies.block_pool import Chain
from spanlab.core.request import Request, Span

PROMPTS = st.lists(st.sampled_from([-1, 0, 1, 1 << 16]), max_size=14)


def request(tokens, id=0, cache_salt="", output=None):
    output_ids = None if output is None else np.array(output, np.int32)
    return Request(id, 0, (Span(np.array(tokens, np.int32)),), cache_salt=cache_salt, output=output_ids)


@settings(max_examples=300, deadline=None)
@given(PROMPTS, PROMPTS, st.integers(1, 4))
def test_digests_agree_as_far_as_prefixes_do(left, right, size):
    first, second = (Chain(request(tokens), size).digests for tokens in (left, right))
    assert (len(first), len(second)) == (len(left) // size, len(right) // size)
    for count, (left_digest, right_digest) in enumerate(zip(first, second, strict=False), 1):
        assert (left_digest == right_digest) == (left[: count * size] == right[: count * size])


@settings(max_examples=100, deadline=None)
@given(PROMPTS, PROMPTS, st.integers(1, 4), st.data())
def test_an_output_is_digested_like_the_next_prompt(prompt, output, size, data):
    chain = Chain(request(prompt, output=output), size)
    for length in sorted(data.draw(st.lists(st.integers(0, len(prompt + output))))):
        chain.digests_to(length)
    grown = chain.digests_to(len(prompt + output))
    assert grown == Chain(request(prompt + output), size).digests


def test_outputs_without_known_ids_share_no_digest():
    chains = [Chain(request(range(8), id), 4).digests_to(12) for id in range(2)]
    assert chains[0][:2] == chains[1][:2]
    assert not set(chains[0][2:]) & set(chains[1][2:])


def test_a_million_prefixes_have_distinct_digests():
    digests = Chain(request(np.zeros(1_000_000)), 1).digests + Chain(request(np.ones(1_000_000)), 1).digests
    assert len(set(digests)) == 2_000_000
