"""Order of computation: plans are executed token by token, and every row must find all that it reads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.plan import PrefillRange, RepairPass, ReusePlan, work_of
from spanlab.core.repair import Repair
from spanlab.core.tree import as_seen, conditioned, isolated

from .factories import begin, doc, make_map_policy, make_policy, make_prompt, serve_prompt, text

spans = st.builds(
    lambda independent, tokens: (doc if independent else text)(*tokens),
    st.booleans(),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
prompts = st.lists(spans, min_size=1, max_size=6).map(lambda parts: make_prompt(*parts))
REPAIRS = [
    Repair(),
    Repair("first", k=2),
    Repair("last", k=1),
    Repair("random", k=1),
    Repair("strided", ratio=0.4),
    Repair("random", ratio=0.1),
    Repair("deviation", ratio=0.3),
    Repair("deviation_gradual", ratio=0.1),
    Repair("neighbours", k=1),
    Repair("attention", ratio=0.3, layers=[1, 2]),
]


@st.composite
def plans(draw) -> tuple[ReusePlan, bool]:
    """A prompt that finds some of its cache spans, whole or in part, and whether it reads copies."""
    repair = draw(st.sampled_from(REPAIRS))
    copies = repair.rewrites or draw(st.booleans())
    layout = draw(st.sampled_from([isolated, conditioned, as_seen]))
    policy = make_policy(layout=layout, repair=repair, copies=copies, block_size=draw(st.sampled_from([1, 2])))
    request = draw(prompts)
    for now, earlier in enumerate([*draw(st.lists(prompts, max_size=4)), *draw(st.sampled_from([[], [request]]))]):
        serve_prompt(policy, earlier, now)
    return policy.match(request, 9), copies


def reads(plan: ReusePlan, work: PrefillRange) -> set[int]:
    """Prompt tokens that the rows of a cache span's work see besides one another, by the cache span's own context."""
    cache_span = plan.cache_spans[work.cache_span].cache_span
    return {*range(cache_span.context), *range(cache_span.start, work.start)}


@settings(deadline=None, max_examples=150)
@given(made=plans(), generated=st.integers(0, 3))
def test_plans_are_computed_in_an_order_that_finds_all_it_reads(made, generated):
    plan, copies = made
    check_that_rows_find_what_they_read(plan, list(work_of(plan, generated, copies)), generated)
    check_that_spans_are_seen_repaired(plan, work_of(plan, 0, copies))
    check_what_is_to_copy(plan)
    check_copies(plan, work_of(plan, generated, copies), copies)


def check_that_rows_find_what_they_read(plan: ReusePlan, order: list, generated: int) -> None:
    """Every row finds what it reads, and every missing token is computed once."""
    ready = {
        s.start + i for s, span_plan in [(p.cache_span, p) for p in plan.cache_spans] for i in range(span_plan.resume)
    }
    missing = set(range(plan.prompt + generated)) - ready
    repaired = 0
    for work in order:
        rows = work.cache_span_rows(plan, work.start, work.stop)
        row_positions = {position for _, start, stop in rows for position in range(start, stop)}
        assert row_positions <= missing, "a token is computed twice, or was there"
        if isinstance(work, PrefillRange):
            assert work.tokens == work.stop - work.start == len(row_positions)
            assert reads(plan, work) <= ready, "a row reads what is not there yet"
            cache_span = plan.cache_spans[work.cache_span].cache_span
            assert work.unseen == cache_span.start - cache_span.context
        else:
            first, last = work.repaired_rows(plan, work.start, work.stop)
            repaired += last - first
            assert set(range(work.stop)) - row_positions <= ready, "a repair runs before its spans are there"
            assert work.tokens == last - first + len(row_positions)
        ready |= row_positions
        missing -= row_positions
    assert not missing
    assert repaired == plan.repair.count(plan.spans)
    assert sum(work.tokens for work in order) == plan.rows + generated
    assert order[-1].stop == plan.prompt + generated
    assert order[-1].cache_span == len(plan.cache_spans) - 1


def check_that_spans_are_seen_repaired(plan: ReusePlan, order: list) -> None:
    """Every reader of a span reads it repaired."""
    repairs = [index for index, work in enumerate(order) if isinstance(work, RepairPass)]
    expected = plan.repair.compares or plan.repair.count(plan.spans) > 0
    assert len(repairs) == (1 if plan.spans and expected else 0), "one pass repairs everything"
    for index in repairs:
        first = plan.spans[0].start
        for number, work in enumerate(order):
            if number < index:
                assert work.unseen or work.start < first
            if number > index:
                assert not work.unseen and work.start >= plan.spans[-1].stop
        assert (order[index].start, order[index].stop) == (first, plan.spans[-1].stop)
        total = sum(span.stop - span.start for span in plan.spans)
        left_out = total - plan.repair.count(plan.spans) if plan.repair.rewrites else 0
        probed = sum(work.tokens for work in order[index + 1 :]) + order[index].tokens - plan.repair.count(plan.spans)
        assert order[index].shallow == (probed if plan.repair.probes else left_out)


def check_copies(plan: ReusePlan, order: list, copies: bool) -> None:
    """Spans are copied once, when they are there and before they are read."""
    assert sum(work.copied for work in order) == (
        sum(span_plan.to_copy for span_plan in plan.cache_spans) if copies else 0
    )
    copied = 0
    for work in order if copies else ():
        copied += work.copied
        behind = [span_plan for span_plan in plan.cache_spans if span_plan.cache_span.stop <= work.start]
        if not work.unseen:
            assert copied >= sum(span_plan.to_copy for span_plan in behind), "somebody reads across what is not copied"
        else:
            assert not work.copied, "a span that sees nothing copies nothing"


def check_what_is_to_copy(plan: ReusePlan) -> None:
    """Complete spans if they were computed alone; only the reused part if they are computed in view of the prompt."""
    for span_plan in plan.cache_spans:
        cache_span = span_plan.cache_span
        is_as_seen = plan.cache_spans[-1].cache_span.independent is False and cache_span.parent_hash == b"as seen"
        length = span_plan.resume if is_as_seen else cache_span.stop - cache_span.start
        assert span_plan.to_copy == (length if cache_span.independent else 0)


# -- by hand ----------------------------------------------------------------------------------------------------------

HEAD, ONE, TWO, BETWEEN, TAIL = text(1, 2), doc(10, 11, 12), doc(20, 21, 22, 23), text(3), text(4, 5)
PROMPT = make_prompt(HEAD, ONE, BETWEEN, TWO, TAIL)  # [0, 2) [2, 5) [5, 6) [6, 10) [10, 12)


def works(policy, request=PROMPT, generated=0):
    plan = policy.match(request, 1)
    allocation = policy.allocate(plan, 1, generated)
    policy.free(allocation, 0)
    return list(allocation.work)


def test_a_cold_prompt_without_repair_goes_by_position():
    assert works(make_policy(layout=isolated)) == [
        PrefillRange(0, 0, 2),
        PrefillRange(1, 2, 5, unseen=2),
        PrefillRange(2, 5, 6),
        PrefillRange(3, 6, 10, unseen=6),
        PrefillRange(4, 10, 12),
    ]


def test_spans_that_have_seen_the_opening_text_miss_less():
    unseen = [work.unseen for work in works(make_policy(layout=conditioned))]
    assert unseen == [0, 0, 0, 4, 0]
    assert not any(work.unseen for work in works(make_policy(layout=as_seen)))


def test_a_repair_follows_its_spans_and_includes_text_between():
    policy = make_policy(layout=isolated, repair=Repair("first", k=2))
    assert works(policy) == [
        PrefillRange(0, 0, 2),
        PrefillRange(1, 2, 5, unseen=2),
        PrefillRange(3, 6, 10, unseen=6),
        RepairPass(2, 10, 2 + 2 + 1, between=(2,)),
        PrefillRange(4, 10, 12),
    ]
    serve_prompt(policy, PROMPT, 0)
    assert works(policy) == [RepairPass(2, 10, 4), PrefillRange(4, 11, 12)]
    # another order: the spans are there, the text is new because its parent hash is
    moved = make_prompt(HEAD, TWO, BETWEEN, ONE, TAIL)
    assert works(policy, moved) == [RepairPass(2, 10, 2 + 2 + 1, between=(2,)), PrefillRange(4, 10, 12)]


def test_spans_with_maps_are_repaired_one_by_one():
    policy = make_map_policy(repair=Repair("first", k=2))
    assert works(policy) == [
        PrefillRange(0, 0, 2),
        PrefillRange(1, 2, 5, unseen=2),
        RepairPass(2, 6, 2 + 1, between=(2,)),
        PrefillRange(3, 6, 10, unseen=6),
        RepairPass(6, 10, 2, first=2),
        PrefillRange(4, 10, 12),
    ]
    serve_prompt(policy, PROMPT, 0)
    assert works(policy) == [RepairPass(2, 10, 4), PrefillRange(4, 11, 12)]
    third = doc(41, 42, 43)
    new_behind = works(policy, make_prompt(ONE, HEAD, TWO, third, TAIL))
    assert new_behind == [
        PrefillRange(1, 3, 5),
        PrefillRange(3, 9, 12, unseen=9),
        RepairPass(5, 12, 4),
        PrefillRange(4, 12, 14),
    ]


def test_a_pass_contains_only_its_rows():
    plan = make_map_policy(repair=Repair("first", k=2)).match(PROMPT, 0)
    first, second = (work for work in work_of(plan, 0, False, True) if isinstance(work, RepairPass))
    assert [first.token_range(plan, computed, 1) for computed in range(3)] == [(2, 3), (3, 5), (5, 6)]
    assert [second.token_range(plan, computed, 1) for computed in range(2)] == [(6, 7), (7, 10)]
    assert (first.repaired_rows(plan, 2, 6), second.repaired_rows(plan, 6, 10)) == ((0, 2), (2, 4))
    assert second.repaired_rows(plan, 7, 10) == (3, 4)
    assert (first.runs(plan, 2, 6), second.runs(plan, 7, 10)) == ([(1, 2, 4), (2, 5, 6)], [(3, 7, 8)])
    assert [position for position in range(2, 7) if first.captures_at(plan, position)] == [6]


def test_a_span_at_the_very_beginning_needs_no_repair():
    policy = make_policy(layout=isolated, repair=Repair("first", k=2))
    order = works(policy, make_prompt(ONE, TWO, TAIL))
    assert order == [PrefillRange(0, 0, 3), PrefillRange(1, 3, 7, unseen=3), RepairPass(3, 7, 2), PrefillRange(2, 7, 9)]
    assert works(policy, make_prompt(ONE, TAIL)) == [PrefillRange(0, 0, 3), PrefillRange(1, 3, 5)]


def test_a_repair_of_nothing_is_no_work():
    policy = make_policy(layout=isolated, repair=Repair("strided", ratio=0.1))  # a tenth of seven tokens
    assert [work.cache_span for work in works(policy)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("kind", "layers"), [("deviation", 1), ("deviation_gradual", 2)])
def test_cache_blend_compares_every_token_also_without_choice(kind, layers):
    policy = make_policy(layout=isolated, repair=Repair(kind, ratio=0.1), copies=True)
    pairs = 7 * layers * 6
    assert works(policy)[3] == RepairPass(2, 10, 0 + 1, 7, copied=7, between=(2,), shallow_pair_layers=pairs)


@pytest.mark.parametrize("kind", ["neighbours", "attention"])
def test_a_measurement_that_chooses_nothing_is_no_work(kind):
    policy = make_policy(layout=isolated, repair=Repair(kind, ratio=0.1, layers=[1]), copies=True)
    assert all(isinstance(work, PrefillRange) for work in works(policy))


def test_copies_are_made_where_a_span_is_first_read_across():
    copied = [work.copied for work in works(make_policy(layout=isolated, copies=True))]
    assert copied == [0, 0, 3, 0, 4]  # the text between reads the first, the tail the second
    policy = make_policy(layout=isolated, copies=True)
    serve_prompt(policy, PROMPT, 0)
    assert [work.copied for work in works(policy)] == [7]


def test_as_seen_copies_and_repairs_only_reused_spans():
    policy = make_policy(layout=as_seen, repair=Repair("first", k=2), copies=True)
    assert [work.cache_span for work in works(policy)] == [0, 1, 2, 3, 4]
    assert not any(work.copied for work in works(policy)), "all is computed in full view"
    serve_prompt(policy, make_prompt(text(9), TWO, text(9)), 0)
    last_found = works(policy)
    assert last_found == [
        PrefillRange(0, 0, 2),
        PrefillRange(1, 2, 5),
        PrefillRange(2, 5, 6),
        RepairPass(6, 10, 2, copied=4),
        PrefillRange(4, 10, 12),
    ]
    first_found = works(policy, make_prompt(HEAD, TWO, BETWEEN, ONE, TAIL))
    behind = [PrefillRange(2, 6, 7), PrefillRange(3, 7, 10), PrefillRange(4, 10, 12)]
    assert first_found[1:] == [RepairPass(2, 6, 2, copied=4), *behind]


def test_output_of_a_preempted_request_joins_the_tail():
    policy = make_policy(layout=isolated, repair=Repair("first", k=2))
    serve_prompt(policy, PROMPT, 0)
    assert works(policy, generated=3) == [RepairPass(2, 10, 4), PrefillRange(4, 11, 15)]


def test_output_of_a_preempted_request_counts_as_work():
    policy = make_policy(last_token=True)
    serve_prompt(policy, make_prompt(HEAD), 0)
    assert works(policy, make_prompt(HEAD)) == [PrefillRange(0, 2, 2)]
    assert works(policy, make_prompt(HEAD), generated=3) == [PrefillRange(0, 2, 5)]


def test_a_span_goes_on_where_an_interrupted_request_left_it():
    policy = make_policy(layout=isolated)
    _, allocation = begin(policy, PROMPT, 0)
    policy.insert(allocation, 4, 0, 1)  # two of the first document's three tokens
    policy.free(allocation, 0)
    assert works(policy)[1] == PrefillRange(1, 4, 5, unseen=2)
