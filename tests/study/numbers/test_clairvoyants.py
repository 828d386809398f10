"""Clairvoyants and bounds that are exceeded: refused if impossible, else reported."""

from typing import Any

import numpy as np
import pytest

from spanlab.cli import compose
from spanlab.report.data import ArmData
from spanlab.study.bounds import (
    BoundCrossedError,
    ClairvoyantBeatenError,
    check_not_crossed,
    describe_beaten,
    served_alone,
)

BLOCKS = ("model=llama-3.1-8b", "arms=evictions", "arms.lru.match=block_hash", "arms.lru.block_size=16")


def study_of(*options: str):
    chosen = ("only=[none,lru,belady]", "arms.belady.match=block_hash", "arms.belady.block_size=16")
    return compose("smoke", [*BLOCKS, *chosen, "baseline=lru", "load.rates_rps=[]", "load.arms=[]", *options])


def arm(name: str, reused: int, alone: bool = True) -> ArmData:
    summary: dict[str, Any] = {"tokens": {"reused": reused}, "bounds": {"served_alone": alone}}
    return ArmData(name, "", {}, [], summary)


def test_an_optimal_clairvoyant_that_is_beaten_fails_the_study():
    with pytest.raises(ClairvoyantBeatenError, match=r"arms.lru reused 1,201 .* at most 1,200, those of arms.belady"):
        describe_beaten(study_of(), [arm("lru", 1_201), arm("belady", 1_200)])
    assert describe_beaten(study_of(), [arm("lru", 1_200), arm("belady", 1_200)]) == []


@pytest.mark.parametrize(
    ("options", "alone"), [((), False), (("arms.belady.eviction=belady_size",), True), (("store.entries=5",), True)]
)
def test_a_clairvoyant_by_rule_may_be_beaten(options, alone):
    (caveat,) = describe_beaten(study_of(*options), [arm("lru", 1_201, alone), arm("belady", 1_200, alone)])
    assert "1,201" in caveat
    assert "no bound here" in caveat


def test_other_units_are_no_rivals():
    assert describe_beaten(study_of("arms.lru.block_size=32"), [arm("lru", 9_000), arm("belady", 1_200)]) == []


def test_requests_are_alone_where_none_overlaps():
    columns = {
        "seed": np.array([0, 1, 0, 1]),
        "admitted_s": np.array([0.0, 0.5, 1.0, 2.0]),
        "finished_s": np.array([1.0, 2.0, 3.0, 3.0]),
    }
    assert served_alone(columns)
    assert not served_alone(columns | {"finished_s": np.array([1.0, 2.5, 3.0, 3.0])})


def test_a_crossed_bound_names_both_numbers():
    records = {"reused_tokens": np.array([700, 500]), "counted": np.array([True, True]), "seed": np.array([3, 3])}
    check_not_crossed("lru", records, 1_200)
    check_not_crossed("lru", records | {"counted": np.array([True, False])}, 700)
    with pytest.raises(BoundCrossedError, match=r"arms.lru with seed 3 reused 1,200 tokens: expected at most 1,199"):
        check_not_crossed("lru", records, 1_199)
