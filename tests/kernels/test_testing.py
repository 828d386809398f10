"""The verdict accepts rounding errors only."""

import math

import pytest
import torch

from spanlab_kernels.testing import BLOCK_CASES, ROPE_CASES, agrees, fresh, random_tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_once_agrees_even_with_a_torch_path_without_error(dtype):
    truth = random_tensor(1000, dtype=torch.float64)
    assert agrees(truth.to(dtype), truth, truth, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_off_by_two_places_of_the_largest_does_not(dtype):
    truth = random_tensor(100_000, dtype=torch.float64)
    result = truth.to(dtype)
    result[17] += 2 * torch.finfo(dtype).eps * float(truth.abs().max())
    verdict = agrees(result, truth, truth, dtype)
    assert not verdict
    assert verdict.relative_rms <= verdict.relative_rms_allowed


def test_errors_up_to_those_of_torch_pass():
    truth = random_tensor(1000, dtype=torch.float64)
    torchs = truth + 1e-6
    assert agrees(truth + 1.4e-6, truth, torchs, torch.float32)
    assert not agrees(truth + 2.1e-6, truth, torchs, torch.float32)


def test_many_small_errors_fail_by_their_rms():
    truth = torch.ones(1000, dtype=torch.float64)
    off = truth + 2e-5
    verdict = agrees(off, truth, off, torch.float32)
    assert not verdict
    assert verdict.error <= verdict.error_allowed


def test_nan_never_passes():
    truth = torch.zeros(4, dtype=torch.float64)
    result = truth.clone()
    result[2] = torch.nan
    assert not agrees(result, truth, truth, torch.float32)
    assert not agrees(truth, truth, result, torch.float32)


def test_nan_in_the_truth_is_an_error_of_the_test():
    with pytest.raises(AssertionError, match="truth"):
        agrees(fresh(3), fresh(3), fresh(3), torch.float32)


def test_infinities_must_stand_where_they_should():
    truth = torch.tensor([1.0, -math.inf])
    assert agrees(truth, truth, truth, torch.float32)
    for wrong in ([1.0, math.inf], [-math.inf, -math.inf], [1.0, -1e30]):
        assert not agrees(torch.tensor(wrong), truth, truth, torch.float32)
    assert agrees(truth[1:], truth[1:], truth[1:], torch.float32)


def test_zero_must_be_zero():
    zero = torch.zeros(5)
    assert agrees(zero, zero, zero, torch.float32)
    assert not agrees(zero + 1e-30, zero, zero, torch.float32)


def test_cases_have_names_of_their_own_and_fit():
    for cases in (ROPE_CASES, BLOCK_CASES):
        assert len({str(case) for case in cases}) == len(cases)
    for case in BLOCK_CASES:
        source, target = (slots.tolist() for slots in case.two_sets())
        assert len({*source, *target}) == 2 * case.slots
        assert max(*source, *target) < case.num_pages * case.page_size
