"""Logits that are no finite numbers are found, and finite ones are never taken for them."""

import pytest
import torch

from spanlab.core.step import ScheduledSequence
from spanlab.engine.outputs import DueToken, Sampler, StepTokens

from .factories import make_request, text


def choose(logits: torch.Tensor) -> dict[int, list[int]]:
    """The first token of one request, by id, from its row of logits [V]."""
    outputs: dict[int, list[int]] = {}
    tokens = StepTokens("toy", Sampler(), outputs)
    tokens.choose([DueToken(ScheduledSequence(make_request(7, text(0, 3))), 0)], logits[None])
    tokens.read(4)
    return outputs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_finite_logits_give_a_token_however_large_their_sum(dtype):
    logits = torch.full((50_000,), -5.0, dtype=dtype)  # the sum is -250,000: float16 ends at 65,504
    logits[31] = 2.0
    assert choose(logits) == {7: [31]}


@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_logit_that_is_no_finite_number_ends_the_step(dtype, broken):
    logits = torch.zeros(50_000, dtype=dtype)
    logits[12] = broken
    with pytest.raises(FloatingPointError, match=r"no finite numbers in step 4\.$"):
        choose(logits)
