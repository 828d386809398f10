"""The best arm of each family, and whether the lead of the best family is shown."""

import numpy as np
import pytest

from spanlab.analyses.base import MeasuredArm
from spanlab.analyses.families import SMALLEST_LEAD, compare_families, plain, shown_together, without_ratios
from spanlab.stats import positive_ratio_p

FAMILIES = {"prefix": ["a", "b"], "pic": ["c", "absent"], "empty": ["absent"]}


def arm(name: str, ttft: np.ndarray, verdict: str = "steady") -> MeasuredArm:
    """An arm of 1,000 prompt tokens with these seconds of TTFT by seed and group."""
    summary = {
        "stationarity": {"verdict": verdict},
        "ttft_s": {"mean": float(ttft.mean())},
        "ttft_s_interval": {"mean": None},
        "tokens": {"prompt": 1000},
        "token_hit_rate": 0.5,
        "bounds": {"infinite_any_position_tokens": 800, "regret_points": 2.5},
        "bytes": {"kv_resident_mean": 3.0, "state_resident_mean": 4.0, "copied_mean": 5.0},
    }
    return MeasuredArm(name, summary, ttft)


@pytest.fixture
def seconds() -> np.ndarray:
    return 1.0 + np.random.default_rng(0).random((3, 20))


def test_each_family_enters_with_its_fastest_arm(seconds):
    entries, lead = compare_families([arm("a", seconds), arm("b", 0.9 * seconds), arm("c", 0.3 * seconds)], FAMILIES)
    assert [(entry.family, entry.arm) for entry in entries] == [("prefix", "b"), ("pic", "c")]
    assert entries[0].speedup is None
    assert entries[1].speedup is not None
    assert entries[1].speedup.mean == pytest.approx(3.0)
    assert (entries[1].any_position_share, entries[1].resident_bytes) == (0.8, 12.0)
    assert lead is not None
    assert (lead.family, lead.next, lead.shown) == ("pic", "prefix", True)
    assert lead.ratio is not None
    assert lead.ratio.mean == pytest.approx(3.0)


def test_noise_between_families_shows_no_lead(seconds):
    other = np.random.default_rng(1).permutation(seconds.ravel()).reshape(seconds.shape)
    _, lead = compare_families([arm("a", seconds), arm("c", other * 0.999)], FAMILIES)
    assert lead is not None
    assert not lead.shown


@pytest.mark.parametrize(("share", "shown"), [(0.96, False), (0.94, True)])
def test_a_lead_of_a_few_percent_is_not_shown_however_steady(seconds, share, shown):
    _, lead = compare_families([arm("a", seconds), arm("c", share * seconds)], FAMILIES)
    assert lead is not None
    assert lead.ratio is not None
    assert lead.ratio.low == pytest.approx(1 / share)
    assert lead.shown == shown


def test_arms_are_judged_on_seeds_that_did_not_choose_them(seconds):
    """Arm b is lucky in seed 0 and c in seed 1: chosen on the other seeds, each has there the time of its family."""
    lucky, late = seconds.copy(), 0.5 * seconds
    lucky[0] /= 4
    late[1] /= 4
    arms = [arm("a", seconds), arm("b", lucky), arm("d", 0.5 * seconds), arm("c", late)]
    _, lead = compare_families(arms, {"prefix": ["a", "b"], "pic": ["d", "c"]})
    assert (lead.family, lead.next) == ("pic", "prefix")
    # on seeds 1 and 2, a equals b and comes first; on seeds 0 and 2, d equals c
    above, below = seconds.sum(), 0.5 * seconds.sum()
    assert lead.held_out.mean == pytest.approx(above / below)
    assert lead.ratio.mean == pytest.approx(lucky.sum() / late.sum())


def test_a_lead_has_the_p_value_of_five_percent(seconds):
    other = np.random.default_rng(5).permutation(seconds.ravel()).reshape(seconds.shape)
    _, lead = compare_families([arm("a", seconds), arm("c", 0.7 * other)], FAMILIES)
    assert lead.p == positive_ratio_p(seconds, 0.7 * other, SMALLEST_LEAD)
    assert (lead.p < 0.05) == lead.shown
    _, small = compare_families([arm("a", seconds), arm("c", 0.99 * seconds)], FAMILIES)
    assert small.p == 1.0


def test_leads_are_shown_together_by_holm():
    """Five leads: 0.009 is below 0.05 / 5, 0.0124 below 0.05 / 4, and 0.02 is not below 0.05 / 3."""
    leads = [{"p": 0.02}, {"p": 0.009}, None, {"p": None}, {"p": 0.0124}]
    assert shown_together(leads) == [False, True, False, False, True]


def test_one_seed_of_one_group_shows_no_lead():
    _, lead = compare_families([arm("a", np.array([[2.0]])), arm("c", np.array([[1.0]]))], FAMILIES)
    assert lead is not None
    assert (lead.family, lead.shown) == ("pic", False)


def test_a_growing_queue_ranks_last_and_has_no_ratio(seconds):
    entries, lead = compare_families([arm("a", seconds), arm("c", 0.1 * seconds, "saturated")], FAMILIES)
    assert lead is not None
    assert (lead.family, lead.ratio, lead.held_out, lead.p, lead.shown) == ("prefix", None, None, None, False)
    assert entries[1].speedup is None


def test_one_family_alone_leads_nothing(seconds):
    entries, lead = compare_families([arm("a", seconds)], FAMILIES)
    assert plain(entries, lead)["lead"] is None
    assert [entry.family for entry in entries] == ["prefix"]


def test_a_noisy_machine_shows_no_lead(seconds):
    compared = compare_families([arm("a", seconds), arm("c", 0.3 * seconds)], FAMILIES)
    entries, lead = without_ratios(*compared)
    assert lead is not None
    assert (lead.family, lead.ratio, lead.shown) == ("pic", None, False)
    assert [entry.speedup for entry in entries] == [None, None]
