"""Requests are spans end to end."""

import numpy as np

from spanlab.core.request import Request, Span


def make_span(*tokens: int, reusable: bool = False) -> Span:
    return Span(np.array(tokens, np.int32), reusable=reusable)


def test_the_prompt_is_its_spans_end_to_end():
    request = Request(0, 0, (make_span(1, 2), make_span(), make_span(3)))
    assert request.tokens.tolist() == [1, 2, 3]
    assert request.num_tokens == 3


def test_the_prompt_of_one_span_is_that_span():
    span = make_span(1, 2, 3)
    assert Request(0, 0, (span,)).tokens is span.tokens


def test_boundaries_are_the_ends_of_reusable_spans():
    spans = (make_span(1, 2, reusable=True), make_span(3), make_span(4, 5, reusable=True), make_span(6))
    assert Request(0, 0, spans).boundaries == (2, 5)
    assert Request(0, 0, spans[1:2]).boundaries == ()
