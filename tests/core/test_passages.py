"""Passages in the order of the cache, against all orders; and the views of a prompt."""

from itertools import permutations

import numpy as np
import pytest

from spanlab.cli import compose
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.protocol import Arranger, PassageRules, by_cache, greedy, stored_beginning, with_passages
from spanlab.core.request import Request
from spanlab.core.tree import isolated
from spanlab.study.prepare import check_passages

from .factories import doc, make_budget, make_policy, make_prompt, text
from .steps import serve_waves

HEAD, LENGTHS = text(*range(5)), (3, 4, 4, 6, 7)
DOCUMENTS = [doc(*range(100 * at, 100 * at + length)) for at, length in enumerate(LENGTHS, 1)]


def prompt(order, *, id: int = 0, between: bool = False) -> Request:
    """Documents behind a head, with a word between two of them or not, and a question of the request's own."""
    spans = [DOCUMENTS[index] for index in order]
    spans.insert(1, text(90)) if between else None
    return make_prompt(HEAD, *spans, text(1000 + id, 7), id=id)


def serve(policy, request: Request) -> None:
    """Compute a prompt at once, and store what the policy stores."""
    serve_waves(policy, [[request]])


def make_pool(blocks: int = 400) -> BlockPolicy:
    return BlockPolicy(BlockRules(2, "none", 0, 0), BlockStore(BlockPool(blocks), 1, 0))


def served_by(policy, draw: np.random.Generator, prompts: int) -> None:
    for number in range(prompts):
        serve(policy, prompt(draw.choice(5, draw.integers(1, 5), replace=False), id=number, between=number % 3 == 0))


def cached(policy, request: Request, order) -> int:
    return stored_beginning(policy.match(with_passages(request, order), 99))


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("make", [make_policy, lambda: make_policy(make_budget(tokens=60)), make_pool])
def test_greedy_order_lies_between_given_and_best(make, between: bool):
    better = []
    for seed in range(12):
        draw, policy = np.random.default_rng(seed), make()
        served_by(policy, draw, 12)
        request = prompt(draw.permutation(4), id=50, between=between)
        orders = {order: cached(policy, request, order) for order in permutations(range(4))}
        ours = orders[tuple(by_cache(request, policy, 99))]
        assert orders[0, 1, 2, 3] <= ours <= max(orders.values())
        better.append(ours - orders[0, 1, 2, 3])
    assert max(better) > 0


def test_greedy_order_is_best_at_one_level():
    for seed in range(20):
        draw, policy = np.random.default_rng(seed), make_policy()
        for index in draw.choice(5, 2, replace=False):
            serve(policy, prompt([index], id=int(index)))
        request = prompt(draw.permutation(5), id=50)
        best = max(cached(policy, request, order) for order in permutations(range(5)))
        assert cached(policy, request, by_cache(request, policy, 99)) == best > len(HEAD.tokens)


def test_uncached_passages_keep_their_order():
    policy = make_policy()
    serve(policy, prompt([0, 1]))
    assert by_cache(prompt([4, 2, 3]), policy, 9) == [0, 1, 2]
    assert by_cache(prompt([4, 2, 0, 3, 1]), policy, 9) == [2, 4, 0, 1, 3]


def test_equal_passages_go_by_given_order():
    policy = make_policy()
    serve(policy, prompt([1]))
    serve(policy, prompt([2], id=1))
    assert by_cache(prompt([4, 2, 1], id=3), policy, 9) == [1, 0, 2]
    assert by_cache(prompt([4, 1, 2], id=3), policy, 9) == [1, 0, 2]


def test_spans_found_anywhere_keep_their_order():
    policy = make_policy(layout=isolated)
    serve(policy, prompt([3, 1, 2]))
    assert by_cache(prompt([1, 2, 3], id=1), policy, 9) == [0, 1, 2]


def test_asking_for_orders_changes_no_policy():
    policy = make_pool()
    serve(policy, prompt([0, 1, 2]))
    request = prompt([2, 1, 0], id=1)
    before = policy.match(request, 9).matched
    arranged = Arranger(PassageRules(order="cached"), policy)(request, 9)
    assert policy.match(request, 9).matched == before < policy.match(arranged, 9).matched
    policy.check()


def test_order_is_reported_once():
    policy = make_policy()
    serve(policy, prompt([0, 1]))
    arranger = Arranger(PassageRules(order="cached"), policy)
    request = prompt([1, 0], id=8)
    served = arranger(request, 9)
    assert served.tokens.tolist() == prompt([0, 1], id=8).tokens.tolist()
    assert arranger.take_order(8) == [1, 0]
    with pytest.raises(KeyError):
        arranger.take_order(8)


@pytest.mark.parametrize(("view", "kept"), [("all", [0, 1, 2]), ("none", []), ("gold", [1])])
def test_views_leave_passages_out(view: str, kept: list[int]):
    request = make_prompt(HEAD, *DOCUMENTS[:3], text(7))
    request = Request(0, 0, request.spans, gold=(2,))
    arranger = Arranger(PassageRules(view=view), make_policy())
    served = arranger(request, 0)
    assert [span.tokens.tolist() for span in served.spans] == [
        span.tokens.tolist() for span in (HEAD, *(DOCUMENTS[at] for at in kept), text(7))
    ]
    assert arranger.take_order(0) == kept
    assert [served.spans[at] for at in served.gold] == [DOCUMENTS[1]] * (1 in kept)


def test_moved_passages_stay_gold():
    request = Request(0, 0, prompt([0, 1, 2]).spans, gold=(1, 3))
    moved = with_passages(request, [2, 1, 0])
    assert {moved.spans[index] for index in moved.gold} == {DOCUMENTS[0], DOCUMENTS[2]}
    assert with_passages(request, [0, 1, 2]) is request


def test_greedy_stops_where_nothing_has_a_rank():
    assert greedy(
        [4, 5, 6, 7], lambda placed, remaining: [passage if len(placed) < 2 else 0 for passage in remaining]
    ) == [7, 6, 4, 5]
    assert greedy([4, 5], lambda placed, remaining: [-1] * len(remaining)) == [4, 5]
    assert greedy([], lambda placed, remaining: [1]) == []


REFUSED = [
    (["arms.pic.passages.order=any"], "arms.pic.passages.order=any: expected one of given, cached"),
    (["arms.pic.passages.view=half"], "arms.pic.passages.view=half: expected one of all, none, gold"),
    (
        ["arms.pic.passages.order=cached", "arms.pic.passages.view=none"],
        "arms.pic.passages.order=cached with view=none: expected given, or view=all",
    ),
    (["arms.none.passages.order=cached"], "arms.none.passages.order=cached with keep=false"),
    (
        ["arms.pic.passages.order=cached", "replicas.count=2", "replicas.routing=random"],
        "arms.pic.passages.order=cached, view=all with replicas.count=2: expected given and all",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), REFUSED)
def test_a_choice_without_meaning_is_refused(overrides: list[str], expected: str):
    with pytest.raises(ValueError, match="^" + expected):
        compose("pic_sim", overrides)


def test_a_workload_without_passages_is_refused():
    study = compose("pic_sim", ["arms.radix.passages.order=cached"])
    with pytest.raises(ValueError, match=r"^arms\.radix\.passages\.order=cached, view=all with workload.kind=rag: exp"):
        check_passages(study, (make_prompt(HEAD, text(7)),))
    check_passages(study, (prompt([1]),))


def test_a_workload_without_gold_is_refused():
    study = compose("pic_sim", ["arms.radix.passages.view=gold"])
    with pytest.raises(ValueError, match=r"^arms\.radix\.passages\.view=gold with workload.kind=rag: expected all or"):
        check_passages(study, (prompt([1]),))
    check_passages(study, (Request(0, 0, prompt([1]).spans, gold=(1,)),))
