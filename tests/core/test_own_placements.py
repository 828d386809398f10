"""Placements without a published source: budget split and planner chain against enumeration, cues by hand."""

from itertools import combinations, product

import numpy as np
import pytest

from spanlab.core.placement import PLACEMENTS, PrefillInfo, learned, planned
from spanlab.core.placement.planner import Cues, Offers, SharedBudget, prefix_names, split
from spanlab.core.request import Request, Span

from .factories import common, make_facts, make_request

MARK = [901, 902, 903]  # a template behind every document


def place(placer, tokens, past: list[list[int]], *, boundaries=(), group: int = 0, resume: int = 0) -> list[int]:
    """Return positions for one admitted prompt after the prompts `past`."""
    seen_length = max((common(tokens, earlier) for earlier in past), default=0)
    past.append(list(tokens))
    request = make_request(tokens, group=group)
    prefill = PrefillInfo(len(tokens), 0, seen_length, resume, boundaries, request)
    placer.observe(prefill)
    return list(placer.place(prefill))


def document(number: int, length: int = 40) -> list[int]:
    return list(range(1_000 * number, 1_000 * number + length))


@pytest.mark.parametrize("budget", range(9))
def test_split_equals_best_of_all_splits(budget):
    rng = np.random.default_rng(budget)
    for _ in range(20):
        savings = {name: np.sort(rng.integers(0, 6, rng.integers(0, 4)).astype(float))[::-1] for name in range(3)}
        granted, price = split(savings, budget)
        saved = sum(savings[name][:count].sum() for name, count in granted.items())
        counts = product(*(range(len(each) + 1) for each in savings.values()))
        splits = [split for split in counts if sum(split) <= budget]
        assert saved == max(sum(savings[name][:count].sum() for name, count in enumerate(split)) for split in splits)
        assert sum(granted.values()) <= budget
        assert all(each[granted[name] :].max(initial=0.0) <= price or not price for name, each in savings.items())


def test_budget_goes_where_depths_are_spread_and_asked():
    facts = make_facts(10, max_tokens=100)
    placer = SharedBudget(2, 1.0, facts=facts)
    for number in range(64):  # group 0 is left at two depths, group 1 at one; three states for both
        for group, depth in ((0, 30 if number % 2 else 60), (1, 40)):
            request = Request(number, group, (Span(np.arange(100, dtype=np.int32)),))
            prefill = PrefillInfo(100, 0, depth, 0, (), request, free_bytes=lambda: 3)
            placer.observe(prefill)
            positions = {**locals().get("positions", {}), group: list(placer.place(prefill))}
    assert positions == {0: [30, 60], 1: [40]}


def test_shared_budget_rejects_an_impossible_share():
    with pytest.raises(ValueError, match=r"placement.options.share=2: expected a share above 0 and up to 1"):
        PLACEMENTS.check("placement.options", "dp_shared", "placement.kind=dp_shared", {"share": 2}, {"count": 2})


def test_weights_that_grow_are_scaled(monkeypatch):
    from spanlab.core.placement import planner

    plain, scaled = (SharedBudget(2, 1.0, facts=make_facts(10, max_tokens=100)) for _ in range(2))
    rng, placed = np.random.default_rng(0), []
    for placer, heaviest in ((plain, 1e100), (scaled, 1.05)):
        monkeypatch.setattr(planner, "_HEAVIEST", heaviest)
        rng = np.random.default_rng(0)
        for number in range(200):
            request = Request(number, int(rng.integers(4)), (Span(np.arange(100, dtype=np.int32)),))
            prefill = PrefillInfo(100, 0, int(rng.integers(100)), 0, (), request, free_bytes=lambda: 5)
            placer.observe(prefill)
            placed.append(list(placer.place(prefill)))
    assert placed[:200] == placed[200:]
    assert len({tuple(positions) for positions in placed}) > 5


def test_chain_equals_best_of_all_chains():
    rng = np.random.default_rng(1)
    for _ in range(60):
        positions = np.concatenate([[0.0], np.cumsum(rng.integers(1, 9, 6))])
        uses = np.concatenate([[0.0], np.cumsum(rng.integers(0, 3, 6))[::-1]]).astype(float)
        offers, costs = Offers(positions, positions**1.5, uses), (float(rng.integers(0, 30)), float(rng.random()))
        chains = [chain for size in range(7) for chain in combinations(range(1, 7), size)]
        assert net_saving(offers, offers.chain(*costs), *costs) == max(
            net_saving(offers, chain, *costs) for chain in chains
        )


def net_saving(offers: Offers, chain, state_cost: float, token_cost: float) -> float:
    """Return the saving of a chain less its price; rounded, because the order of sums differs."""
    total = 0.0
    for start, stop in zip([0, *chain], chain, strict=False):
        total += offers.saving(start, stop) - state_cost
        total -= token_cost * float(offers.positions[stop] - offers.positions[start])
    return round(total, 6)


def test_names_are_those_of_equal_beginnings():
    rng = np.random.default_rng(2)
    first = rng.integers(0, 50_000, 100).astype(np.int32)
    second = first.copy()
    second[57] += 1
    names, other_names = prefix_names(first, 10), prefix_names(second, 10)
    assert names[:5] == other_names[:5] == prefix_names(first[:50], 10)
    assert not set(names[5:]) & set(other_names)
    assert len(set(names)) == len(names) == 10
    assert prefix_names(first[::-1].copy(), 100) != prefix_names(first, 100)


def test_cue_stands_before_two_parting_points():
    cues = Cues()
    tokens = np.array([*document(1), *MARK, 7], np.int32)
    cues.add(tokens, 43, 1)
    cues.add(tokens, 43, 1)  # the same point again
    assert list(cues.find(tokens, 0)) == []
    cues.add(np.array([*document(2), *MARK, 7, 8], np.int32), 44, 2)  # 7 is shared by chance
    new = np.array([*document(3), *MARK, 9, *MARK], np.int32)
    assert (43, tuple(MARK)) in list(cues.find(new, 0))
    assert (47, tuple(MARK)) in list(cues.find(new, 41))
    assert all(position != 43 for position, _ in cues.find(new, 41))


def test_boundary_of_a_new_document_is_learned_from_what_follows():
    placer, past = learned(facts=make_facts(1, state_bytes=30)), []
    for number in range(12):
        first = place(placer, [*document(number), *MARK, 10 * number], past, group=number)
        place(placer, [*document(number), *MARK, 10 * number + 1], past, group=number)
    assert first == [43]


def test_planner_pays_for_no_neighbour_that_adds_nothing():
    placer, past = planned(facts=make_facts(1, state_bytes=30)), []
    for number in range(20):
        tokens = [*document(number), *MARK, *range(10 * number, 10 * number + 5)]
        placed = place(placer, tokens, past, boundaries=(10, 40), group=number)
        for other in range(3):
            place(placer, [*tokens[:40], 5_000_000 + other + 10 * number], past, boundaries=(10, 40), resume=40)
    assert placed == [40]  # neither the mark at 10, nor the end, nor depths


def test_planner_learns_that_conversations_continue():
    placer, past = planned(facts=make_facts(1, state_bytes=30)), []
    for number in range(8):
        tokens, resume = document(number, 10), 0
        for round in range(6):
            placed = place(placer, tokens, past, group=number, resume=resume)
            resume = max(placed, default=0)
            tokens = [*tokens, *range(10**6 + 100 * number + 10 * round, 10**6 + 100 * number + 10 * round + 10)]
    assert placed == [60]


def test_planner_never_places_behind_prompt_or_before_resume():
    rng, past = np.random.default_rng(3), []
    placer = planned(facts=make_facts(4))
    for _ in range(200):
        tokens = rng.integers(0, 3, rng.integers(1, 60)).tolist()
        resume = int(rng.integers(0, len(tokens)))
        placed = place(placer, tokens, past, boundaries=tuple(rng.integers(1, len(tokens) + 1, 2)), resume=resume)
        assert placed == sorted(set(placed))
        assert all(resume < position <= len(tokens) and position % 4 == 0 for position in placed)
