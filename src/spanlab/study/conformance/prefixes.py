"""Properties of plain serving: answers, prefixes, chunks and preemption, compared with forwards of transformers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spanlab.core.batch_rules import BatchRules
from spanlab.core.request import Request, Span
from spanlab.settings import PlacementSettings, Strategy
from spanlab.settings.conformance import PROPERTIES
from spanlab.study.conformance.subject import TOGETHER, Subject
from spanlab.study.conformance.verdicts import Measurement

CHUNK = 17  # tokens per step: chunks end inside documents, blocks and grid intervals
OF_LOGITS = "relative difference of logits to a full forward"


def no_reuse() -> Strategy:
    """Strategy that stores nothing."""
    return Strategy(keep=False)


def prefixes(subject: Subject) -> Strategy:
    """Radix tree strategy; for a hybrid, with a state at every grid position."""
    if not subject.settings.model.is_hybrid:
        return Strategy()
    return Strategy(placement=PlacementSettings(kind="block", interval=subject.settings.model.grid))


@PROPERTIES.register("greedy_generation")
def greedy_generation(subject: Subject) -> Measurement:
    """Greedy tokens equal those of transformers' `generate`, except where two logits tie."""
    requests = subject.questions()
    served = subject.serve(no_reuse(), requests, TOGETHER)
    gaps, equal, compared = [0.0], 0, 0
    for request in requests:
        ours, theirs = served.output(request), _generated(subject, request)
        difference_at = next(
            (index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None
        )
        equal, compared = equal + (difference_at is None), compared + len(theirs)
        if difference_at is not None:
            gaps.append(_gap(served.logits_of(request)[difference_at], theirs[difference_at]))
    description = f"{equal} of {len(requests)} answers equal, {compared:,} tokens"
    return Measurement(max(gaps), subject.limit, f"gap of logits ÷ their RMS at the first other token; {description}")


@PROPERTIES.register("prefix_reuse")
def prefix_reuse(subject: Subject) -> Measurement:
    """Logits after a stored prefix equal those of a full forward."""
    requests = _forks(subject)
    served = subject.serve(prefixes(subject), requests)
    reused = [served.reused(request) for request in requests[1:]]
    value = subject.max_difference(served, requests) if all(reused) else None
    return Measurement(value, subject.limit, f"{OF_LOGITS}; {sum(reused):,} tokens reused")


@PROPERTIES.register("chunked_prefill")
def chunked_prefill(subject: Subject) -> Measurement:
    """Logits of a prompt in small chunks, batched with other decodes, equal those of a full forward."""
    requests = subject.questions()
    served = subject.serve(no_reuse(), requests, BatchRules(max_num_batched_tokens=CHUNK, max_num_seqs=len(requests)))
    return Measurement(
        subject.max_difference(served, requests), subject.limit, f"{OF_LOGITS}; chunks of {CHUNK} tokens"
    )


@PROPERTIES.register("preemption")
def preemption(subject: Subject) -> Measurement:
    """A request that is preempted during decode resumes with the same logits."""
    first, second, *_ = subject.questions()
    tokens = first.num_tokens + second.num_tokens + subject.output // 2 + 2
    served = subject.start(no_reuse(), [first, second], TOGETHER, tokens)
    served.serve([first, second])
    times = sum(sequence.preemptions for sequence in served.sequences.values())
    value = subject.max_difference(served, [first, second]) if times else None
    return Measurement(value, subject.limit, f"{OF_LOGITS}; preempted {times} times")


def _forks(subject: Subject) -> list[Request]:
    """Prompts that share prefixes of different lengths with the first, each with a different suffix."""
    grid = subject.settings.model.grid
    longest = subject.random_span(0, 2 * grid + subject.settings.document_tokens)
    cuts = np.linspace(grid + 1, len(longest.tokens) - 1, subject.settings.prompts - 1).astype(int)
    forks = [
        subject.request(number, Span(longest.tokens[:cut]), subject.random_span(100 + number, 11))
        for number, cut in enumerate(cuts.tolist(), 1)
    ]
    return [subject.request(0, longest), *forks]


@torch.no_grad()
def _generated(subject: Subject, request: Request) -> list[int]:
    """Greedy tokens of transformers; generation may stop early at the model's end-of-text token."""
    ids = torch.from_numpy(request.tokens).long()[None].to(subject.model.device)
    options = {"do_sample": False, "max_new_tokens": subject.output, "attention_mask": torch.ones_like(ids)}
    generated: Tensor = subject.reference_model.generate(ids, **options)  # type: ignore[operator]
    tokens: list[int] = generated[0, ids.shape[1] :].tolist()
    return tokens


def _gap(row: Tensor, other: int) -> float:
    """Difference of the largest logit and the logit of `other`, relative to the RMS of all logits."""
    return float((row.max() - row[other]) / row.square().mean().sqrt())
