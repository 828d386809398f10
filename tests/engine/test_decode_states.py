"""A hybrid resumes from states captured during decoding and at chunk ends with the results of a full computation."""

import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request, Span

from .factories import APART, checkpoint, make_hybrid, nothing_leaks, random_tokens, run
from .test_hybrid import GRID, off

PROMPT, ANSWER = random_tokens(1, GRID + 9), random_tokens(2, 2 * GRID)


def turns(at_once: bool) -> list[Request]:
    """A prompt with an answer that is known, and a further turn behind it."""
    request = Request(0, 0, (Span(PROMPT),), len(ANSWER), 0, output=ANSWER)
    history = (Span(PROMPT), Span(ANSWER), Span(random_tokens(3, 11)))
    return [request, Request(1, 0, history, 2, APART * (1 if at_once else 1000))]


@pytest.mark.parametrize("at_once", [False, True], ids=["token by token", "known answers at once"])
@pytest.mark.parametrize(
    ("kinds", "states"), [(["response_end"], [192]), (["decode_interval", "response_end"], [128, 192])]
)
def test_a_next_turn_resumes_in_the_answer(kinds, states, at_once):
    arm = checkpoint("last")
    arm.placement.kind, arm.placement.also = kinds[0], ["last", *kinds[1:]]
    arm.placement.interval = 2 * GRID if kinds[0] == "decode_interval" else None
    requests = turns(at_once)
    result = run(make_hybrid(layers=2), arm, requests, at_once=at_once)
    assert result.engine.policy.checkpoints(requests[1]) == [GRID, *states]
    assert result.records[1].reused_tokens == 3 * GRID
    assert off(result, requests[1]) < 1e-5
    assert nothing_leaks(result)


def test_chunks_end_in_states():
    arm = checkpoint("last")
    arm.placement.kind = "chunk_end"
    long = random_tokens(1, 5 * GRID + 23)
    requests = [
        Request(i, 0, (Span(long[:depth]), Span(random_tokens(-i - 1, 9))), 1, i * APART)
        for i, depth in enumerate([300, 200])
    ]
    result = run(make_hybrid(layers=2), arm, requests, rules=BatchRules(100, 4))
    assert result.engine.policy.checkpoints(requests[0]) == [64, 192, 256]  # chunks of 100 tokens
    assert result.records[1].reused_tokens == 192
    assert off(result, requests[1]) < 1e-5
    assert nothing_leaks(result)
