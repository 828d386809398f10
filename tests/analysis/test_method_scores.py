"""Entries of methods by hand: benefit kept, changes that are shown, the floor, pairs and buckets."""

from dataclasses import replace

import numpy as np
import pytest

from spanlab.analyses.method_data import (
    ArmAnswers,
    References,
    benefit_kept,
    floor_entry,
    loss_by,
    method_entry,
    pair_changes,
)

NOISE = np.array([0.01, -0.02, 0.0, 0.03, -0.01, 0.02])
GROUPS = np.arange(6)
FULL = np.array([1.0, 2.0, 3.0, 1.5, 2.5, 3.5])


def arm(name: str, nll: np.ndarray, ttft: float = 1.0, computed: int = 100, **right: np.ndarray) -> ArmAnswers:
    count = len(nll)
    scores = {"nll": nll, "kl": np.full(count, 0.5), "top1": np.full(count, 0.75)}
    return ArmAnswers(
        name, name, np.full(count, ttft), np.full(count, 100), np.full(count, computed), 4096, scores, right
    )


BASE, WITHOUT = arm("none", FULL), arm("none_view", FULL + 2 + NOISE)
REFERENCES = References(BASE, WITHOUT, arm("none", FULL + 1e-7), GROUPS)


def test_half_of_the_benefit_is_kept():
    half = arm("pic", FULL + 1 + NOISE)
    benefit = benefit_kept(half, REFERENCES)
    assert benefit.mean == pytest.approx(0.5, abs=0.01)
    assert benefit.low <= benefit.mean <= benefit.high
    assert benefit_kept(BASE, REFERENCES).mean == 1.0
    assert benefit_kept(WITHOUT, REFERENCES).mean == 0.0


def test_no_share_of_a_benefit_that_is_not_shown():
    useless = References(BASE, arm("none_view", FULL + NOISE - NOISE.mean()), BASE, GROUPS)
    assert benefit_kept(arm("pic", FULL + 1), useless) is None
    assert benefit_kept(arm("pic", FULL + 1), References(BASE, None, BASE, GROUPS)) is None


def test_an_entry_by_hand():
    entry = method_entry(arm("pic", FULL + 1 + NOISE, ttft=0.25, computed=20), REFERENCES)
    assert entry["gold_loss_change"]["mean"] == pytest.approx(1 + NOISE.mean())
    assert entry["shown"] is True
    assert entry["speedup"] == {"mean": 4.0, "low": 4.0, "high": 4.0}
    assert entry["bound"] == 5.0
    assert entry["computed_tokens"]["mean"] == 20
    assert entry["bytes"] == {"mean": 4096.0, "low": None, "high": None}
    assert entry["top1"]["mean"] == 0.75
    assert entry["exact"] is None
    baseline_entry = method_entry(BASE, REFERENCES)
    assert (baseline_entry["gold_loss_change"], baseline_entry["shown"], baseline_entry["speedup"]) == (
        None,
        None,
        None,
    )


def test_times_of_transformers_stand_beside_prompts_of_equal_lengths():
    beside = References(BASE, WITHOUT, BASE, GROUPS, plain_s=np.full(6, 0.5))
    entry = method_entry(arm("pic", FULL, ttft=0.25), beside)
    assert entry["plain_s"]["mean"] == 0.5
    assert entry["over_plain"] == {"mean": 2.0, "low": 2.0, "high": 2.0}
    assert method_entry(BASE, beside)["over_plain"]["mean"] == 0.5  # the baseline has a speedup over it too
    shorter = replace(arm("none_view", FULL), prompt=np.full(6, 40))
    assert [method_entry(shorter, beside)[name] for name in ("plain_s", "over_plain")] == [None, None]
    assert [method_entry(BASE, REFERENCES)[name] for name in ("plain_s", "over_plain")] == [None, None]


def test_a_change_below_the_floor_is_not_shown():
    tiny = arm("radix", FULL + 5e-8)
    assert method_entry(tiny, REFERENCES)["gold_loss_change"]["low"] > 0  # every question agrees
    assert method_entry(tiny, REFERENCES)["shown"] is False
    assert floor_entry(REFERENCES)["gold_loss_change"]["mean"] == pytest.approx(1e-7)


def test_pairs_are_paired_by_question():
    pic, lego = arm("pic", FULL + 1), arm("lego_link_16", FULL + 0.5 + NOISE)
    (pair,) = pair_changes([pic, lego], REFERENCES)
    assert (pair["first"], pair["second"], pair["shown"]) == ("pic", "lego_link_16", True)
    assert pair["mean"] == pytest.approx(NOISE.mean() - 0.5)


def test_loss_by_bucket():
    losses = loss_by(BASE, np.array(["1", "2", "1", "2", "1", "2"]), GROUPS)
    assert list(losses) == ["1", "2"]
    assert losses["1"]["mean"] == pytest.approx(np.mean([1.0, 3.0, 2.5]))


def test_questions_without_choices_do_not_count():
    right = np.array([1.0, np.nan, 0.0, np.nan, 1.0, np.nan])
    entry = method_entry(arm("pic", FULL, choice=right, f1=np.full(6, np.nan)), REFERENCES)
    assert entry["choice"]["mean"] == pytest.approx(2 / 3)
    assert entry["f1"] is None
