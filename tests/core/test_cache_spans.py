"""Cuts of prompts, compared with a cut by token; parent hashes, compared with all earlier text, written out."""

from itertools import groupby, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.request import Request
from spanlab.core.tree import LAYOUTS, CacheSpan, as_seen, conditioned, isolated, token_runs, whole

from .factories import doc, make_prompt, text

spans = st.builds(
    lambda independent, tokens: (doc if independent else text)(*tokens),
    st.booleans(),
    st.lists(st.integers(0, 1), max_size=3),
)
prompts = st.lists(spans, min_size=1, max_size=5).map(lambda parts: make_prompt(*parts)).filter(lambda r: r.num_tokens)
SPAN_LAYOUTS = [isolated, conditioned, as_seen]

Stretches = list[tuple[bool, tuple[int, ...]]]


def cut_by_token(request: Request) -> Stretches:
    """Every token is labelled with its span, or as ordered; neighbours of one label belong together."""
    labels = [
        index if span.independent else -1 for index, span in enumerate(request.spans) for _ in span.tokens.tolist()
    ]
    labels[-1] = -1
    tokens = request.tokens.tolist()
    groups = groupby(range(len(tokens)), key=lambda position: labels[position])
    return [(label >= 0, tuple(tokens[position] for position in places)) for label, places in groups]


def unpacked(cache_span: CacheSpan) -> tuple[int, ...]:
    return tuple(np.frombuffer(cache_span.tokens.tobytes(), np.int32).tolist())


def true_parent(layout, cut: Stretches, index: int) -> object:
    """Everything that the KV of a cache span depends on, besides its tokens."""
    independent, _ = cut[index]
    if index == 0 and not (independent and layout is as_seen):
        return ()
    head = () if cut[0][0] else cut[0][1]
    if independent:
        return {isolated: (), conditioned: ("head", head) if head else (), as_seen: "as seen"}[layout]
    # after a span it also matters what that span has seen, which is unknown where spans are kept as seen
    return "unknown" if layout is as_seen else ("all", head if layout is conditioned else (), cut[:index])


# -- cutting ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(request=prompts, layout=st.sampled_from(list(LAYOUTS.values())))
def test_cache_spans_cover_the_prompt_exactly(request, layout):
    cache_spans = layout(request)
    assert b"".join(cache_span.tokens.tobytes() for cache_span in cache_spans) == request.tokens.tobytes()
    assert [0, *(cache_span.stop for cache_span in cache_spans)] == [
        *(cache_span.start for cache_span in cache_spans),
        request.num_tokens,
    ]
    assert all(cache_span.stop - cache_span.start == len(cache_span.tokens) > 0 for cache_span in cache_spans)


@settings(deadline=None, max_examples=150)
@given(request=prompts, layout=st.sampled_from(SPAN_LAYOUTS))
def test_cache_spans_are_independent_spans_and_text_between(request, layout):
    cut = cut_by_token(request)
    assert [(one.independent, unpacked(one)) for one in layout(request)] == cut
    assert [stretch[:4] for stretch in token_runs(request)] == [cache_span[:4] for cache_span in layout(request)]
    assert not cut[-1][0], "the answer starts from ordered text"
    assert all(one[0] or other[0] for one, other in pairwise(cut)), "ordered text was cut"


def test_one_cache_span_where_prefixes_are_cached():
    request = make_prompt(text(1, 2), doc(3), text(4))
    assert whole(request) == (CacheSpan(0, 4, False, request.string, b"", 0),)


# -- parent hashes -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(one=prompts, other=prompts, layout=st.sampled_from(SPAN_LAYOUTS))
def test_pasts_are_equal_exactly_for_equal_dependencies(one, other, layout):
    known = [
        (true_parent(layout, cut_by_token(request), index), cache_span.parent_hash)
        for request in (one, other)
        for index, cache_span in enumerate(layout(request))
    ]
    for (truth, parent_hash), (true_other, parent_other) in product(known, known):
        assert (truth == true_other) == (parent_hash == parent_other)


@settings(deadline=None, max_examples=150)
@given(parts=st.lists(spans, min_size=1, max_size=4), tail=st.lists(st.integers(0, 1), min_size=1, max_size=3))
def test_the_same_tokens_cut_or_marked_otherwise_are_another_past(parts, tail):
    """All ways of marking the same spans: behind any two of them that cut differently, parent hashes differ."""
    tails = {}
    for marks in product([False, True], repeat=len(parts)):
        marked = [(doc if mark else text)(*span.tokens.tolist()) for mark, span in zip(marks, parts, strict=True)]
        request = make_prompt(*marked, doc(9), text(*tail))
        cache_span = isolated(request)[-1]
        tails.setdefault(cache_span.parent_hash, []).append(cut_by_token(request)[:-1])
    for cuts in tails.values():
        assert all(cut == cuts[0] for cut in cuts)
    assert len({str(cuts[0]) for cuts in tails.values()}) == len(tails)


def test_layouts_share_keys_only_for_equal_kv():
    request = make_prompt(text(1), doc(2, 3), text(4), doc(2, 3), text(5))
    keys = {layout: [cache_span.parent_hash for cache_span in layout(request)] for layout in SPAN_LAYOUTS}
    assert len({parent_hashes[0] for parent_hashes in keys.values()}) == 1, "the opening text is the same for everybody"
    for index in range(1, 5):
        assert len({parent_hashes[index] for parent_hashes in keys.values()}) == 3
    for parent_hashes in keys.values():
        assert parent_hashes[1] == parent_hashes[3], "one document at two places is one entry"
        assert parent_hashes[2] != parent_hashes[4] or parent_hashes is keys[as_seen], (
            "text is not shared between different parent hashes"
        )


# -- contexts ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(request=prompts)
def test_isolated_spans_see_nothing_and_text_sees_all(request):
    for cache_span in isolated(request):
        assert cache_span.context == (0 if cache_span.independent else cache_span.start)
        assert cache_span.exact == (not cache_span.independent or cache_span.start == 0)
        assert cache_span.parent_hash == b"" or not cache_span.independent
        assert cache_span.storable


@settings(deadline=None)
@given(request=prompts)
def test_conditioned_spans_see_the_opening_text(request):
    opening = next((len(tokens) for independent, tokens in cut_by_token(request)[:1] if not independent), 0)
    for cache_span in conditioned(request):
        assert cache_span.context == (opening if cache_span.independent else cache_span.start)
        assert cache_span.exact == (not cache_span.independent or cache_span.start == opening)
        assert cache_span.storable


@settings(deadline=None)
@given(request=prompts)
def test_spans_as_seen_see_all_and_later_text_is_not_kept(request):
    for cache_span in as_seen(request):
        assert cache_span.context == cache_span.start
        assert cache_span.exact == (not cache_span.independent)
        assert cache_span.storable == (cache_span.independent or cache_span.start == 0)


def test_without_opening_text_conditioned_is_isolated():
    request = make_prompt(doc(1, 2), text(3), doc(4), text(5))
    assert conditioned(request) == isolated(request)


@pytest.mark.parametrize("layout", SPAN_LAYOUTS)
def test_a_prompt_without_spans_is_one_cache_span(layout):
    request = make_prompt(text(1, 2), text(3))
    assert layout(request) == whole(request)
