"""Products of parameters of which the default tests run a few cases and `-m slow` the others."""

from collections.abc import Callable, Collection, Iterable
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """Parameters of a product; every value of the longest axis is quick once, with values of the others in turn."""
    return _chosen([[*axis] for axis in axes], _each_value)


def every_pair(*axes: Iterable[Any]) -> list[Any]:
    """Parameters of a product; any two values of different axes stand together in a quick case."""
    return _chosen([[*axis] for axis in axes], _each_pair)


def _chosen(axes: list[list[Any]], choose: Callable[[list[int]], Collection[Case]]) -> list[Any]:
    quick = choose([len(axis) for axis in axes])
    places = product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, place, strict=True)), marks=() if place in quick else pytest.mark.slow
        )
        for place in places
    ]


def _each_value(sizes: list[int]) -> set[Case]:
    return {tuple(rank % size for size in sizes) for rank in range(max(sizes))}


def _each_pair(sizes: list[int]) -> list[Case]:
    """Greedily: the first of the cases that have most of the pairs that no case has."""
    cases = [*product(*map(range, sizes))]
    pairs = {case: {*combinations(enumerate(case), 2)} for case in cases}
    missing, quick = set().union(*pairs.values()), []
    while missing:
        quick.append(max(cases, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[quick[-1]]
    return quick
