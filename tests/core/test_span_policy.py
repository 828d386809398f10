"""Reuse and memory of prompts of spans, against a dictionary of all stored spans, and counted by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.placement import no_states
from spanlab.core.plan import Losses
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.repair import Repair
from spanlab.core.rules import ReuseRules
from spanlab.core.tree import SharedIndex, as_seen, conditioned, isolated, whole

from .factories import (
    KV,
    assert_drained,
    begin,
    common,
    counters,
    doc,
    finish,
    held,
    make_budget,
    make_policy,
    make_prompt,
    make_store,
    resumes,
    serve_prompt,
    text,
)

HEAD, ONE, TWO, TAIL = text(1, 2), doc(10, 11, 12, 13), doc(20, 21, 22), text(5, 6)
LAYOUTS = [isolated, conditioned, as_seen]


# -- matches ----------------------------------------------------------------------------------------------------

spans = st.builds(
    lambda independent, tokens: (doc if independent else text)(*tokens),
    st.booleans(),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
)


def naive_cache_spans(layout, request, repair):
    """(key, tokens, storable) of every cache span: keys in words, cut again from the spans.

    Text behind a span is stored only where the repair of that span follows from the span itself.
    """
    named = not repair.ratio and repair.kind != "random"
    parts = [(span.independent, tuple(span.tokens.tolist())) for span in request.spans]
    independent, tokens = parts.pop()
    parts += [(True, tokens[:-1]), (False, tokens[-1:])] if independent else [(False, tokens)]
    cut = []
    for independent, tokens in parts:
        if tokens and not independent and cut and not cut[-1][0]:
            cut[-1] = (False, cut[-1][1] + tokens)
        elif tokens:
            cut.append((independent, tokens))
    head = () if cut[0][0] else cut[0][1]
    for index, (independent, tokens) in enumerate(cut):
        if layout is as_seen:
            yield "seen" if independent else "behind" if index else (), tokens, independent or index == 0
        elif layout is conditioned and independent and head:
            yield ("after", head), tokens, True
        else:
            behind = () if independent or index == 0 else (layout is conditioned and head, *cut[:index])
            yield behind, tokens, named or independent or index == 0


@settings(deadline=None, max_examples=150)
@given(
    prompts=st.lists(st.tuples(st.lists(spans, min_size=1, max_size=5), st.sampled_from("xxy")), max_size=8),
    layout=st.sampled_from(LAYOUTS),
    block_size=st.sampled_from([1, 1, 2, 3]),
    repair=st.sampled_from(
        [Repair(), Repair("first", k=2), Repair("strided", k=2), Repair("strided", ratio=0.3), Repair("random", k=2)]
    ),
)
def test_unlimited_matches_equal_a_dictionary(prompts, layout, block_size, repair):
    policy, stored, computed = make_policy(layout=layout, block_size=block_size, repair=repair), {}, {}
    for now, (parts, cache_salt) in enumerate(prompts):
        request = make_prompt(*parts, cache_salt=cache_salt)
        expected, seen, cache_spans = [], [], list(naive_cache_spans(layout, request, repair))
        for index, (key, tokens, storable) in enumerate(cache_spans):
            entries = stored.get((cache_salt, key), []) if storable else []
            matched = max((common(tokens, entry) for entry in entries), default=0) // block_size * block_size
            again = layout is not as_seen and (key, tokens) in [
                cache_span[:2]
                for cache_span, layout_span in zip(cache_spans[:index], policy.layout(request), strict=False)
                if layout_span.independent
            ]
            expected.append(min(matched, len(tokens) - (index == len(cache_spans) - 1)) // block_size * block_size)
            seen.append(max((common(tokens, entry) for entry in computed.get((cache_salt, key), [])), default=0))
            if again and policy.layout(request)[index].independent:
                expected[-1] = seen[-1] = len(tokens)
        plan = serve_prompt(policy, request, now)
        assert resumes(plan) == expected
        assert [layout_span.seen for layout_span in plan.cache_spans] == seen
        assert plan.reused + sum(plan.losses) == plan.prompt == request.num_tokens
        assert plan.losses.repair == repair.num_stored(plan.spans)
        for key, tokens, storable in cache_spans:
            if storable:
                stored.setdefault((cache_salt, key), []).append(tokens[: len(tokens) // block_size * block_size])
                computed.setdefault((cache_salt, key), []).append(tokens)
    pages = {
        (k, t[:end])
        for k, entries in stored.items()
        for t in entries
        for end in range(block_size, len(t) + 1, block_size)
    }
    assert policy.store.kv_cached == len(pages) * block_size * KV
    assert_drained(policy)


def test_a_prefix_cache_finds_the_opening_text_only():
    policy = make_policy(layout=whole)
    serve_prompt(policy, make_prompt(HEAD, ONE, TWO, TAIL), 0)
    assert resumes(policy.match(make_prompt(HEAD, TWO, ONE, TAIL), 1)) == [2]


def test_a_leading_document_is_shared_with_prefix_caching():
    """A span computed alone and the same span computed at the start of a prompt share KV."""
    for first, second in ((whole, isolated), (isolated, whole)):
        store = make_store()
        roots = SharedIndex(store.tree)
        writer, reader = (
            TreePolicy(ReuseRules(layout=layout), store, roots, no_states()) for layout in (first, second)
        )
        serve_prompt(writer, make_prompt(ONE, text(5)), 0)
        assert resumes(reader.match(make_prompt(ONE, text(6)), 1))[0] == 4


@pytest.mark.parametrize("layout", [isolated, conditioned])
def test_a_tail_is_shared_only_after_an_equal_past(layout):
    policy = make_policy(layout=layout)
    serve_prompt(policy, make_prompt(HEAD, ONE, TWO, TAIL), 0)
    assert resumes(policy.match(make_prompt(HEAD, ONE, TWO, TAIL), 1))[-1] == 1  # all but the last token
    assert resumes(policy.match(make_prompt(HEAD, ONE, TWO, text(5, 6, 7)), 1))[-1] == 2
    other_prompts = [
        make_prompt(HEAD, TWO, ONE, TAIL),
        make_prompt(HEAD, ONE, TAIL),
        make_prompt(ONE, TWO, TAIL),
        make_prompt(HEAD, doc(10, 11), doc(12, 13), TWO, TAIL),
        make_prompt(HEAD, text(10, 11, 12, 13), TWO, TAIL),
        make_prompt(text(1), ONE, TWO, TAIL),
    ]
    assert [resumes(policy.match(other, 1))[-1] for other in other_prompts] == [0] * len(other_prompts)


POISON = make_prompt(text(66), ONE, TAIL)


@pytest.mark.parametrize("clean", [isolated, conditioned])
def test_layouts_as_seen_share_nothing_with_other_layouts(clean):
    """One store, one tenant, the same roots: a donor computed behind other text is never read as if it were alone."""
    store = make_store()
    roots = SharedIndex(store.tree)
    dirty, pure = (TreePolicy(ReuseRules(layout=layout), store, roots, no_states()) for layout in (as_seen, clean))
    serve_prompt(dirty, POISON, 0)
    for request in (make_prompt(ONE, TAIL), make_prompt(HEAD, ONE, TAIL), POISON):
        document = next(
            span_plan for span_plan in pure.match(request, 1).cache_spans if span_plan.cache_span.independent
        )
        assert (document.matched, document.seen) == (0, 0)
    assert resumes(dirty.match(make_prompt(HEAD, ONE, TAIL), 1)) == [0, 4, 0], "its own kind finds it"
    serve_prompt(pure, make_prompt(text(7), TWO, TAIL), 2)
    assert resumes(dirty.match(make_prompt(text(7), TWO, TAIL), 3)) == [1, 0, 0], "opening text is the same for all"


def test_text_with_document_words_is_no_lost_document():
    policy = make_policy(layout=as_seen)
    serve_prompt(policy, make_prompt(HEAD, ONE, TAIL), 0)
    plan = policy.match(make_prompt(HEAD, ONE, text(10, 11, 12, 13)), 1)
    assert plan.cache_spans[-1].losses == Losses(4, 0, 0, 0, 0, 0, 0, 0)


def test_pages_are_counted_from_the_beginning_of_each_span():
    policy = make_policy(layout=isolated, block_size=2)
    serve_prompt(policy, make_prompt(text(1), ONE, TWO, text(5, 6, 7)), 0)
    plan = policy.match(make_prompt(text(1), ONE, TWO, text(5, 6, 7)), 1)
    assert resumes(plan) == [0, 4, 2, 2]
    assert plan.losses == Losses(0, 0, 0, 0, 0, 1 + 1, 1, 0)


# -- repairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repair", "lost"), [(Repair("first", k=3), 3 + 3), (Repair("last", k=2), 4), (Repair("strided", ratio=0.5), 3)]
)
def test_repaired_tokens_are_lost_although_they_were_found(repair, lost):
    policy = make_policy(layout=isolated, repair=repair)
    cold = serve_prompt(policy, make_prompt(HEAD, ONE, TWO, TAIL), 0)
    assert (cold.losses.repair, cold.reused, cold.rows) == (0, 0, 11 + lost)
    warm = policy.match(make_prompt(HEAD, TWO, ONE, text(7)), 1)
    assert (warm.resume, warm.losses.repair, warm.reused) == (9, lost, 9 - lost)
    assert warm.rows == 1 + lost


def test_a_repair_as_long_as_the_spans_leaves_nothing_of_them():
    policy = make_policy(layout=isolated, repair=Repair("first", k=99))
    request = make_prompt(HEAD, ONE, TWO, TAIL)
    serve_prompt(policy, request, 0)
    assert policy.match(request, 1).reused == 2 + 1, "the opening text, and the tail but its last token"


def test_a_policy_without_a_store_reports_reusable_tokens():
    policy = make_policy(layout=isolated, repair=Repair("first", k=2), keeps=False)
    request = make_prompt(HEAD, ONE, TAIL)
    serve_prompt(policy, request, 0)
    plan = policy.match(request, 1)
    assert plan.losses == Losses(0, 7, 0, 0, 0, 0, 1, 0, repair=0)
    assert policy.store.kv_cached == 0


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({}, 0),
        ({"copies": True}, 7),
        ({"repair": Repair("first", k=2)}, 2 + 2),
        ({"repair": Repair("first", k=2), "block_size": 4}, 4 + 3),
        ({"repair": Repair("strided", ratio=0.3)}, 2),
        ({"repair": Repair("strided", ratio=0.3), "copies": True}, 7),
        ({"repair": Repair("deviation", ratio=0.3), "copies": True}, 7),
    ],
)
def test_a_request_holds_a_second_copy_of_read_only_tokens(options, own):
    policy, request = make_policy(layout=isolated, **options), make_prompt(HEAD, ONE, TWO, TAIL)
    store, block_size = policy.store, policy.store.tree.block_size
    _, cold = begin(policy, request, 0)
    assert (store.kv_reserved, store.kv_cached, store.kv_locked) == ((11 + own) * KV, 0, 0)
    for cache_span, stop in enumerate([2, 6, 9, 11]):
        policy.insert(cold, stop, 0, cache_span)
    tail = 0 if policy.rules.repair.ratio else 2  # no parent hash covers tokens that a share repaired
    kept = sum(length // block_size * block_size for length in (2, 4, 3, tail))
    assert (store.kv_reserved, store.kv_cached) == ((11 + own - kept) * KV, kept * KV)
    assert store.kv_locked == store.kv_cached
    policy.free(cold, 0)
    assert (store.kv_reserved, store.kv_cached, store.kv_locked) == (0, kept * KV, 0)
    plan, warm = begin(policy, request, 1)
    assert plan.resume == kept - (block_size == 1 and tail > 0)
    assert store.kv_reserved == (11 + own - plan.resume) * KV
    assert store.kv_locked == plan.resume * KV
    finish(policy, warm, 1)
    assert_drained(policy)


def test_a_repeated_document_is_locked_once_and_counted_exactly():
    """Kept: 4 of the document. Locked: those 4, once. Computed: 2 + 2 of text around. Eight tokens in all."""
    request = make_prompt(HEAD, ONE, ONE, text(5, 6))
    for tokens, fits in ((8, True), (7, False)):
        policy = make_policy(make_budget(tokens=tokens), layout=isolated)
        store = policy.store
        serve_prompt(policy, make_prompt(ONE, text(9)), 0)
        before = counters(store), held(policy)
        plan = policy.match(request, 1)
        assert resumes(plan) == [0, 4, 4, 0]
        allocation = policy.allocate(plan, 1)
        assert (allocation is not None) == fits
        if allocation is None:
            assert (counters(store), held(policy)) == before, "a refused admission changed something"
            continue
        assert (store.kv_locked, store.kv_reserved) == (4 * KV, 4 * KV)
        finish(policy, allocation, 1)
        assert_drained(policy)


@pytest.mark.parametrize("order", [(doc(10, 11), ONE), (ONE, doc(10, 11))])
def test_a_document_and_its_own_beginning_lock_one_path(order):
    for tokens, fits in ((8, True), (7, False)):
        policy = make_policy(make_budget(tokens=tokens), layout=isolated)
        serve_prompt(policy, make_prompt(ONE, text(9)), 0)
        plan = policy.match(make_prompt(HEAD, *order, text(5, 6)), 1)
        assert sorted(resumes(plan)) == [0, 0, 2, 4]
        allocation = policy.allocate(plan, 1)
        assert (allocation is not None) == fits
        if allocation is not None:
            assert (policy.store.kv_locked, policy.store.kv_reserved) == (4 * KV, 4 * KV)
            finish(policy, allocation, 1)
            assert_drained(policy)


def test_documents_leave_one_by_one_least_recently_used_first():
    policy = make_policy(make_budget(tokens=13), layout=isolated)
    serve_prompt(policy, make_prompt(text(1), ONE, text(9)), 0)  # 6 tokens
    serve_prompt(policy, make_prompt(text(1), TWO, text(9)), 1)  # 4 more, for the opening text is shared
    serve_prompt(policy, make_prompt(text(1), ONE, text(8, 8, 8)), 2)  # 3 more, and full
    serve_prompt(policy, make_prompt(text(1), doc(30, 31, 32), text(7)), 3)
    # gone are the first tail, and the second document, which is as old as the second tail and was stored before it
    assert held(policy)[0] == sorted([(1,), (10, 11, 12, 13), (9,), (8, 8, 8), (30, 31, 32), (7,)])
    plan = policy.match(make_prompt(text(1), ONE, TWO, text(9)), 4)
    assert plan.losses == Losses(1, 0, 3, 0, 0, 0, 0, 0)


def test_without_reuse_losses_explain_the_full_computation():
    policy = make_policy(layout=isolated, repair=Repair("first", k=2))
    request = make_prompt(HEAD, ONE, TWO, TAIL)
    serve_prompt(policy, request, 0)
    plan = policy.match(request, 1).without_reuse()
    assert (plan.reused, plan.resume, plan.losses.repair, plan.losses.locked) == (0, 0, 0, 10)
    assert sum(plan.losses) == plan.prompt
    allocation = policy.allocate(plan, 1)
    assert [work.tokens for work in allocation.work] == [2, 4, 3, 4, 2]
    finish(policy, allocation, 1)
    assert_drained(policy)


def test_rules_that_exclude_each_other_are_ours_to_avoid():
    with pytest.raises(AssertionError, match="need maps"):
        ReuseRules(layout=isolated, needs_states=True)
    with pytest.raises(AssertionError, match="one cache span"):
        make_policy(layout=isolated, private=True)
    measured = ReuseRules(layout=isolated, repair=Repair("deviation", ratio=0.1), copies=True)
    with pytest.raises(AssertionError, match="writes to every span"):
        replace(measured, copies=False)
