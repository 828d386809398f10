"""Drawn tokens: greedy, by their probabilities, independent of the batch."""

import pytest
import torch
from scipy.stats import chisquare

from spanlab.core.admission import BatchRules
from spanlab.core.step import ScheduledSequence
from spanlab.engine.outputs import Draw, DueToken, Sampler, StepTokens

from .factories import arm, least_budget, make_request, make_small, questions, run, text

LENGTHS = (20, 9, 33)


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert Sampler().choose(logits, [Draw(0, 0), Draw(1, 0)]).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_tokens_come_with_their_shares(temperature):
    logits = torch.tensor([2.0, -torch.inf, 0.0, 1.0])
    draws = [Draw(request, index) for request in range(100) for index in range(40)]
    drawn = Sampler(temperature, 5).choose(logits.repeat(len(draws), 1), draws)
    counts = torch.bincount(drawn, minlength=4)
    assert counts[1] == 0
    shares = torch.softmax(logits / temperature, 0)[[0, 2, 3]]
    expected = shares.double() / shares.double().sum() * len(draws)
    assert chisquare(counts[[0, 2, 3]].double(), expected).pvalue > 1e-3


def test_a_draw_depends_on_seed_request_and_index_alone():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    draws = [Draw(request, index) for request in (3, 4) for index in range(3)]
    together = Sampler(1.0, 7).choose(logits, draws).tolist()
    order = [5, 0, 3, 1, 4, 2]
    assert Sampler(1.0, 7).choose(logits[order], [draws[i] for i in order]).tolist() == [together[i] for i in order]
    same = logits[:1].repeat(60, 1)
    again = [Draw(request, index) for request in range(6) for index in range(10)]
    outcomes = [Sampler(1.0, seed).choose(same, again).tolist() for seed in (1, 2)]
    assert outcomes[0] != outcomes[1]
    assert outcomes[0][:10] != outcomes[0][10:20]


def test_no_rows_no_tokens():
    assert Sampler(1.0).choose(torch.empty(0, 9), []).tolist() == []


def test_outputs_do_not_depend_on_batch_or_memory():
    requests = questions([(0, 1), (1, 2), (2, 0), (1, 0)], LENGTHS, output=20, at=0)
    model, strategy = make_small(), arm("pic")
    tight = least_budget(model, strategy, requests)
    tokens = []
    for seats, budget in ((1, None), (4, None), (4, tight)):
        rules = BatchRules(max_num_batched_tokens=32, max_num_seqs=seats)
        result = run(model, strategy, requests, rules=rules, budget=budget, sampler=Sampler(1.0, 3))
        tokens.append(result.engine.outputs)
    assert result.rows[0].preemptions > 0
    assert tokens[0] == tokens[1] == tokens[2]
    assert tokens[0] != run(model, strategy, requests, sampler=Sampler(1.0, 4)).engine.outputs


# -- Logits that are no finite numbers are found, and finite ones are never taken for them. ---


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
