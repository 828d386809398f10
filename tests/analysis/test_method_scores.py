"""Entries of methods by hand: benefit kept, changes that are shown, the floor, pairs and buckets."""

from __future__ import annotations

import numpy as np
import pytest

from spanlab.analysis.method_scores import (
    ArmAnswers,
    Compared,
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
BESIDE = Compared(BASE, WITHOUT, arm("none", FULL + 1e-7), GROUPS)


def test_half_of_the_benefit_is_kept():
    half = arm("pic", FULL + 1 + NOISE)
    kept = benefit_kept(half, BESIDE)
    assert kept.mean == pytest.approx(0.5, abs=0.01)
    assert kept.low <= kept.mean <= kept.high
    assert benefit_kept(BASE, BESIDE).mean == 1.0
    assert benefit_kept(WITHOUT, BESIDE).mean == 0.0


def test_no_share_of_a_benefit_that_is_not_shown():
    useless = Compared(BASE, arm("none_view", FULL + NOISE - NOISE.mean()), BASE, GROUPS)
    assert benefit_kept(arm("pic", FULL + 1), useless) is None
    assert benefit_kept(arm("pic", FULL + 1), Compared(BASE, None, BASE, GROUPS)) is None


def test_an_entry_by_hand():
    entry = method_entry(arm("pic", FULL + 1 + NOISE, ttft=0.25, computed=20), BESIDE)
    assert entry["gold_loss_change"]["mean"] == pytest.approx(1 + NOISE.mean())
    assert entry["shown"] is True
    assert entry["speedup"] == {"mean": 4.0, "low": 4.0, "high": 4.0}
    assert entry["bound"] == 5.0
    assert entry["computed_tokens"]["mean"] == 20
    assert entry["bytes"] == {"mean": 4096.0, "low": None, "high": None}
    assert entry["top1"]["mean"] == 0.75
    assert entry["exact"] is None
    own = method_entry(BASE, BESIDE)
    assert (own["gold_loss_change"], own["shown"], own["speedup"]) == (None, None, None)


def test_a_change_below_the_floor_is_not_shown():
    tiny = arm("radix", FULL + 5e-8)
    assert method_entry(tiny, BESIDE)["gold_loss_change"]["low"] > 0  # every question agrees
    assert method_entry(tiny, BESIDE)["shown"] is False
    assert floor_entry(BESIDE)["gold_loss_change"]["mean"] == pytest.approx(1e-7)


def test_pairs_are_paired_by_question():
    pic, lego = arm("pic", FULL + 1), arm("lego_link_16", FULL + 0.5 + NOISE)
    (one,) = pair_changes([pic, lego], BESIDE)
    assert (one["first"], one["second"], one["shown"]) == ("pic", "lego_link_16", True)
    assert one["mean"] == pytest.approx(NOISE.mean() - 0.5)


def test_loss_by_bucket():
    found = loss_by(BASE, np.array(["1", "2", "1", "2", "1", "2"]), GROUPS)
    assert list(found) == ["1", "2"]
    assert found["1"]["mean"] == pytest.approx(np.mean([1.0, 3.0, 2.5]))


def test_questions_without_choices_do_not_count():
    right = np.array([1.0, np.nan, 0.0, np.nan, 1.0, np.nan])
    entry = method_entry(arm("pic", FULL, choice=right, f1=np.full(6, np.nan)), BESIDE)
    assert entry["choice"]["mean"] == pytest.approx(2 / 3)
    assert entry["f1"] is None
