"""Which tokens are computed again, against counting them one by one."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.repair import MEASURED, Repair, ReusedSpan


@st.composite
def reused(draw) -> list[ReusedSpan]:
    """Spans in order with gaps between them, each found in part."""
    spans, position = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=5)):
        start = position + gap
        position = start + length
        spans.append(ReusedSpan(start, position, draw(st.integers(0, length))))
    return spans


PER_SPAN = ("first", "last", "strided", "random")
SHARES = ("strided", "random", *MEASURED)
ks, ratios = st.integers(1, 14), st.integers(0, 100).map(lambda percent: percent / 100)
rules = st.builds(Repair, st.sampled_from(PER_SPAN), k=ks, seed=st.integers(0, 3)) | st.builds(
    Repair, st.sampled_from(SHARES), ratio=ratios, seed=st.integers(0, 3)
)
choosing = rules.filter(lambda rule: not rule.measured)


def places(spans: list[ReusedSpan]) -> list[int]:
    return [position for span in spans for position in range(span.start, span.stop)]


# -- how many ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(spans=reused(), k=ks)
def test_controls_have_the_budget_of_lego_link(spans, k):
    counts = {kind: Repair(kind, k=k).count(spans) for kind in PER_SPAN}
    assert set(counts.values()) == {sum(min(k, span.stop - span.start) for span in spans)}


@settings(deadline=None, max_examples=100)
@given(spans=reused(), percent=st.integers(0, 100))
def test_controls_have_the_budget_of_cache_blend(spans, percent):
    counts = {kind: Repair(kind, ratio=percent / 100).count(spans) for kind in SHARES}
    assert set(counts.values()) == {math.floor(Fraction(percent, 100) * len(places(spans)))}


def test_a_share_is_rounded_down_but_not_because_of_binary_fractions():
    assert Repair("strided", ratio=0.29).count([ReusedSpan(0, 100, 0)]) == 29  # 0.29 · 100 is 28.999999999999996
    assert Repair("strided", ratio=0.15).count([ReusedSpan(3, 9, 6), ReusedSpan(9, 16, 0)]) == 1  # 1.95
    assert Repair("deviation", ratio=1.0).count([ReusedSpan(3, 9, 6)]) == 6


@settings(deadline=None)
@given(spans=reused())
def test_no_repair_touches_nothing(spans):
    none = Repair()
    assert (none.count(spans), none.num_stored(spans), none.private(spans, 4)) == (0, 0, 0)


@settings(deadline=None, max_examples=100)
@given(spans=reused(), rule=rules)
def test_what_is_lost_had_been_found_and_is_computed_again(spans, rule):
    lost, stored, count = rule.num_stored(spans), sum(span.stored for span in spans), rule.count(spans)
    assert 0 <= lost <= min(stored, count)
    if stored == len(places(spans)):
        assert lost == count
    if rule.kind == "first":
        chosen = rule.rows(spans, 0)
        assert lost == sum(
            position - span.start < span.stored for span in spans for position in chosen if _in(position, span)
        )
    elif spans:
        assert lost == math.floor(Fraction(count * stored, len(places(spans))))


def _in(position: int, span: ReusedSpan) -> bool:
    return span.start <= position < span.stop


# -- which ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(spans=reused(), rule=choosing, request=st.integers(0, 1000))
def test_rows_are_as_many_as_counted_increasing_and_inside_the_spans(spans, rule, request):
    chosen = rule.rows(spans, request)
    assert len(chosen) == rule.count(spans)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(places(spans))
    if rule.k:
        assert all(sum(_in(p, span) for p in chosen) == min(rule.k, span.stop - span.start) for span in spans)


@settings(deadline=None)
@given(spans=reused(), k=ks)
def test_first_and_last_are_the_ends_of_every_span(spans, k):
    first, last = Repair("first", k=k).rows(spans, 7), Repair("last", k=k).rows(spans, 7)
    assert first == [p for span in spans for p in range(span.start, span.stop) if p - span.start < k]
    assert last == [p for span in spans for p in range(span.start, span.stop) if span.stop - p <= k]


@settings(deadline=None, max_examples=100)
@given(spans=reused(), percent=st.integers(1, 100))
def test_strided_rows_stand_at_equal_distances(spans, percent):
    everywhere = places(spans)
    indices = [everywhere.index(position) for position in Repair("strided", ratio=percent / 100).rows(spans, 0)]
    if indices:
        gaps = {
            after - before for before, after in zip(indices, [*indices[1:], indices[0] + len(everywhere)], strict=True)
        }
        assert indices[0] == 0
        assert gaps <= {len(everywhere) // len(indices), -(-len(everywhere) // len(indices))}


def test_strided_rows_by_hand():
    assert Repair("strided", k=3).rows([ReusedSpan(10, 18, 8), ReusedSpan(20, 22, 0)], 0) == [10, 12, 15, 20, 21]


@pytest.mark.parametrize("options", [{"k": 8}, {"ratio": 0.15}])
def test_random_rows_are_those_of_the_request_and_the_seed(options):
    spans = [ReusedSpan(0, 60, 60), ReusedSpan(70, 130, 60)]
    rows = Repair("random", seed=1, **options).rows(spans, 5)
    assert rows == Repair("random", seed=1, **options).rows(list(spans), 5)
    assert rows != Repair("random", seed=1, **options).rows(spans, 6)
    assert rows != Repair("random", seed=2, **options).rows(spans, 5)
    # what others found must not matter: an engine and a simulator may differ in nothing else
    assert rows == Repair("random", seed=1, **options).rows([span._replace(stored=0) for span in spans], 5)


def test_random_rows_of_two_spans_are_drawn_apart():
    """They copy no positions from each other, nor from another request at other positions."""
    rule = Repair("random", k=8)
    rows = rule.rows([ReusedSpan(0, 60, 0), ReusedSpan(60, 120, 0)], 0)
    assert [position - 60 for position in rows[8:]] != rows[:8]
    assert [position - 60 for position in rows[8:]] != rule.rows([ReusedSpan(0, 60, 0)], 60)


def test_random_rows_reach_every_place_about_equally_often():
    """240 requests, 10 of 60 places each: 40 hits a place; a binomial strays from it by more than 24 once in 10^4."""
    hits = [0] * 60
    for request in range(240):
        for position in Repair("random", ratio=1 / 6).rows([ReusedSpan(0, 60, 60)], request):
            hits[position] += 1
    assert sum(hits) == 2400
    assert all(abs(hit - 40) <= 24 for hit in hits)


@pytest.mark.parametrize("kind", MEASURED)
def test_measured_rows_cannot_be_asked_for(kind):
    with pytest.raises(AssertionError, match="chooses while it runs"):
        Repair(kind, ratio=0.5).rows([ReusedSpan(0, 4, 4)], 0)


# -- owners of blocks -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(spans=reused(), rule=choosing, block_size=st.sampled_from([1, 2, 3, 4, 16]), request=st.integers(0, 9))
def test_private_tokens_are_those_on_the_pages_that_are_written(spans, rule, block_size, request):
    """Pages are counted from a span's start. Exactly so for the ends of spans; else a bound, for any choice of rows."""
    written_blocks = {
        (span, (p - span.start) // block_size) for p in rule.rows(spans, request) for span in spans if _in(p, span)
    }
    tokens = sum(min(block_size, span.stop - span.start - index * block_size) for span, index in written_blocks)
    private = rule.private(spans, block_size)
    assert private == tokens if rule.kind in ("first", "last") else private >= tokens
    assert private <= len(places(spans))
    if rule.kind not in ("first", "last"):
        assert private <= rule.count(spans) * block_size
