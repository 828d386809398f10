"""Text between spans and repairs cut by the token budget: the logits of the uncut pass, whatever the chunks."""

from dataclasses import asdict
from itertools import product

import pytest

from spanlab.core.admission import BatchRules

from ..support.products import in_turn
from .factories import KERNELS, arm, make_small, parted, permutations, questions, run
from .oracles import error, far, run_checked
from .test_cache_blend import FORMS as DEVIATIONS
from .test_query_aware import FORMS as COPIES

CHUNKED = ("lego_link_16", "random_16", "last_16", "strided_15")
ARMS = (*CHUNKED, "pic", "pic_raw", "pic_turned", "cache_blend_15", "neighbour_aware_16", "query_aware_16")


def arm_of(name: str, block_size: int, **spans: object):
    """The arm with documents half of which are repaired, so that a repair has many chunks."""
    repair = asdict(arm(name).spans.repair)
    return arm(name, block_size, repair | ({"ratio": 0.5} if repair["ratio"] else {}), **spans)


@pytest.mark.parametrize(
    ("cut", "block_size"), in_turn([*product(CHUNKED, [5]), *product(ARMS, [23]), *product(CHUNKED, [16])], (1, 16))
)
def test_logits_are_those_of_the_dense_repair(cut, block_size):
    name, budget = cut
    rules = BatchRules(max_num_batched_tokens=budget, max_num_seqs=3)
    run_checked(make_small(), arm_of(name, block_size), parted(output=5), rules=rules)


@pytest.mark.parametrize("kernel", ["rotate_keys", "pre_rotated"])
def test_every_kernel_repairs_in_chunks(kernel):
    rules = BatchRules(max_num_batched_tokens=11, max_num_seqs=3)
    run_checked(make_small(), arm_of("lego_link_16", 16, **KERNELS[kernel]), parted(output=5), rules=rules)


def test_chunked_and_uncut_say_the_same():
    requests, logits = parted(output=5), []
    for chunked in (None, False):
        strategy = arm_of("random_16", 1)
        strategy.spans.repair.chunked = chunked
        result = run(make_small(), strategy, requests, rules=BatchRules(max_num_batched_tokens=8, max_num_seqs=1))
        logits.append([result.of(request) for request in requests])
        steps = result.rows[0].steps
        logits[-1].append(steps)
    assert logits[0].pop() > logits[1].pop()
    assert max(far(logit, other) for logit, other in zip(*logits, strict=True)) < 1e-5


# -- Measured repairs at both ends of their budget: all tokens of spans are full recompute, none are plain reuse. ---


LENGTHS, LAYERS = (20, 9, 33), 6
CASES = {
    **{name: ("cache_blend_15", {"kind": "deviation"} | form, {}) for name, form in DEVIATIONS.items()},
    **{f"query-aware, {name}": ("query_aware_16", {"kind": "attention"}, form) for name, form in COPIES.items()},
    "neighbour-aware": ("neighbour_aware_16", {"kind": "neighbours"}, {}),
}


#: A deviation writes the keys and values of its check layer, however few tokens it chooses.
BUDGETS = [*product(CASES, [1.0]), *((case, 0.0) for case in CASES if case not in DEVIATIONS)]


@pytest.mark.parametrize(("case", "ratio"), BUDGETS)
def test_everything_repaired_is_full_recompute_and_nothing_plain_reuse(case, ratio):
    name, repair, spans = CASES[case]
    requests = questions(permutations(3), LENGTHS, output=2)
    strategy = arm(name, 16, repair | {"ratio": ratio}, **spans)
    result = run(make_small(layers=LAYERS), strategy, requests)
    assert error(result, *requests, blocks=not ratio) < 1e-4
