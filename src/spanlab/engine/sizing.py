"""Pool size of a run, and checks that every request fits."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

from spanlab.core.batch_rules import BatchRules
from spanlab.core.budget import UNLIMITED
from spanlab.core.cache_spans import CacheSpan
from spanlab.core.need import Need
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.core.tree import Node, PrefixTree

GIB = 1 << 30


def pool_pages(policy: TreePolicy, rules: BatchRules, requests: Sequence[Request], context: int) -> int:
    """Pages that suffice for every allocation of the policy's store, for any order of arrivals.

    Sum of three terms: the budget, or all storable tokens plus the largest requests that run at once if that is less;
    up to page - 1 tokens for every page sequence of running requests; the tokens by which their longest options
    exceed their answers. ValueError for a request that alone exceeds the budget, or `context`, the model's context
    length.
    """
    needs = [policy.need(request) for request in requests]
    for request, need in zip(requests, needs, strict=True):
        _check_context(request, context)
        _check_budget(policy, request, need)
    page, running_requests = policy.store.tree.block_size, rules.max_num_seqs
    running = sum(nlargest(running_requests, (need.tokens for need in needs)))
    page_sequences = sum(nlargest(running_requests, (need.sequences for need in needs)))
    stored = stored_tokens(policy, requests) if policy.rules.keeps else 0
    options = sum(nlargest(running_requests, (request.longest_output - request.output_len for request in requests)))
    return (min(_budget_tokens(policy), running + stored) + options + page_sequences * (page - 1)) // page


def stored_tokens(policy: TreePolicy, requests: Sequence[Request]) -> int:
    """Tokens stored after a run without evictions, in full pages; equal cache spans of equal parents count once.

    Answers, and tokens stored beside spans, count for every request, because which requests share them is unknown
    before the run.
    """
    tree, answers = PrefixTree(policy.store.tree.block_size), 0
    roots: dict[object, Node] = {}
    for request in requests:
        cache_spans = policy.layout(request)
        answers += policy.extra_stored_tokens(request)
        answers += _answer_tokens(request, cache_spans[-1], tree.block_size)
        for cache_span in cache_spans:
            if cache_span.storable:
                root = roots.setdefault(policy.index.key(request, cache_span), tree.new_root())
                tree.extend(root, cache_span.tokens, _full_page_tokens(cache_span, tree.block_size), 0)
    return tree.num_tokens + answers


def _answer_tokens(request: Request, last: CacheSpan, page: int) -> int:
    """Tokens by which an answer extends the full pages of the last cache span, without its last, uncomputed token."""
    length = last.stop - last.start
    return (length + request.output_len - 1) // page * page - _full_page_tokens(last, page)


def _full_page_tokens(cache_span: CacheSpan, page: int) -> int:
    return (cache_span.stop - cache_span.start) // page * page


def _budget_tokens(policy: TreePolicy) -> int:
    store = policy.store
    return min(store.budget.kv_bytes, store.budget.total_bytes) // store.token_bytes


def _check_context(request: Request, context: int) -> None:
    tokens = request.num_tokens + request.longest_output - 1
    if tokens > context:
        raise ValueError(
            f"request {request.id} has {tokens:,} tokens, its answer included: "
            f"expected at most {context:,}, the positions that the model was made for"
        )


def _check_budget(policy: TreePolicy, request: Request, need: Need) -> None:
    store = policy.store
    size = need.tokens * store.token_bytes
    for key, limit in (("kv_gib", store.budget.kv_bytes), ("total_gib", store.budget.total_bytes)):
        if limit < UNLIMITED and size > limit:
            raise ValueError(
                f"store.{key}={limit / GIB:.3g}: expected at least {size / GIB:.3g}, for request {request.id} alone "
                f"may need {need.tokens:,} tokens of KV, {need.copies:,} of them in copies of its own"
            )
