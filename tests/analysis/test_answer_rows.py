"""Rows of the table equal the single measures, and have None for values that were not measured."""

import numpy as np
import pytest

from spanlab.analyses.answers import ArmResult, Divergence, arm_rows
from spanlab.stats import McNemar, positive_ratio, share, share_interval

GOLDS = [["47"], ["12", "twelve"], ["83"], ["60"]]
FLOOR = [Divergence(8, kl, 1.0, True) for kl in (0.0, 1e-6, 0.0, 0.0)]
FAR = tuple(
    Divergence(8, kl, top1, greedy)
    for kl, top1, greedy in zip((0.1, 0.2, 0.3, 0.4), (1, 0.5, 1, 0.5), (1, 0, 1, 0), strict=True)
)
RIGHT = ArmResult("M0", ("47", "twelve", "83 quonts", "It is 60."), tuple(FLOOR))
WRONG = ArmResult("M3", ("47", "13", "83, or 60", ""), FAR)


def of_prompts(values, kind):
    """The interval of a mean with one cluster per prompt."""
    return kind(np.array([values]), np.ones((1, len(values))))


def test_one_row_per_arm_in_the_order_given():
    rows = arm_rows([WRONG, RIGHT], GOLDS, FLOOR)
    assert [(row.arm, row.n) for row in rows] == [("M3", 4), ("M0", 4)]


def test_accuracy_by_hand():
    wrong, right = (row.accuracy for row in arm_rows([WRONG, RIGHT], GOLDS, FLOOR))
    assert right.exact == share_interval(2, 4)
    assert right.stated == share_interval(4, 4)
    # F1: 1, 1, 2·1/3 and 2·1/4
    assert right.f1 == of_prompts([1, 1, 2 / 3, 1 / 2], share)
    assert wrong.exact == wrong.stated == share_interval(1, 4)
    assert wrong.against_reference == McNemar(3, 0, pytest.approx(0.25))
    assert right.against_reference == McNemar(0, 0, 1.0)


def test_agreement_by_hand_with_the_floor_in_every_row():
    far, near = arm_rows([WRONG, RIGHT], GOLDS, FLOOR)
    assert far.agreement.kl == of_prompts([0.1, 0.2, 0.3, 0.4], positive_ratio)
    assert far.agreement.top1 == of_prompts([1, 0.5, 1, 0.5], share)
    assert far.agreement.greedy == share_interval(2, 4)
    assert far.floor == near.floor == near.agreement
    assert far.floor.kl.mean == pytest.approx(2.5e-7)


def test_with_random_weights_the_table_has_agreement_and_no_accuracy():
    (row,) = arm_rows([ArmResult("M3", divergences=FAR)], GOLDS, FLOOR)
    assert row.accuracy is None
    assert row.agreement.top1.mean == 0.75


def test_what_was_not_decoded_has_no_greedy_share():
    some = (*FAR[:3], Divergence(8, 0.4, 0.5))
    (row,) = arm_rows([ArmResult("M3", divergences=some)], GOLDS, FLOOR)
    assert row.agreement.greedy is None
    (row,) = arm_rows([ArmResult("M0", RIGHT.answers)], GOLDS, FLOOR)
    assert row.agreement is None


@pytest.mark.parametrize(
    ("arms", "floor", "sentence"),
    [
        ([WRONG], FLOOR, r"reference=M0: expected an arm with answers among \['M3'\]"),
        ([ArmResult("M0", ("47",))], FLOOR, r"M0.answers: 1 of them, expected one for each of 4 prompts"),
        ([ArmResult("M5", divergences=FAR[:2])], FLOOR, r"M5.divergences: 2 of them, expected one for each of 4"),
    ],
)
def test_a_table_that_would_mislead_is_refused(arms, floor, sentence):
    with pytest.raises(ValueError, match=sentence):
        arm_rows(arms, GOLDS, floor)


def test_without_a_floor_the_rows_say_nothing_of_it():
    (row,) = arm_rows([RIGHT], GOLDS, [])
    assert row.floor is None
    assert row.accuracy is not None


def test_a_divergence_that_is_no_number_is_refused():
    arm = ArmResult("M3", divergences=(Divergence(8, float("nan"), 1.0, None), Divergence(8, 0.1, 1.0, None)))
    with pytest.raises(ValueError, match="expected finite numbers"):
        arm_rows([arm], [["1"], ["2"]], ())
