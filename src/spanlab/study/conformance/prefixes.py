"""Properties of plain serving: answers, prefixes, chunks and preemption, all beside full forwards of transformers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spanlab.core.batch_rules import BatchRules
from spanlab.core.request import Request, Span
from spanlab.settings import PlacementSettings, Strategy
from spanlab.settings.conformance import PROPERTIES
from spanlab.study.conformance.subject import TOGETHER, Subject
from spanlab.study.conformance.verdicts import Measured

CHUNK = 17  # tokens of a step: chunks end within documents, blocks and grids
OF_LOGITS = "relative difference of logits to a full forward"


def full() -> Strategy:
    """Nothing is kept."""
    return Strategy(keep=False)


def prefixes(subject: Subject) -> Strategy:
    """A radix tree; a hybrid keeps a state at every position of its grid."""
    if not subject.settings.model.is_hybrid:
        return Strategy()
    return Strategy(placement=PlacementSettings(kind="block", interval=subject.settings.model.grid))


@PROPERTIES.register("greedy_generation")
def greedy_generation(subject: Subject) -> Measured:
    """Greedy tokens are those of transformers' own `generate`, but where two logits tie."""
    requests = subject.questions()
    served = subject.serve(full(), requests, TOGETHER)
    gaps, equal, compared = [0.0], 0, 0
    for request in requests:
        ours, theirs = served.output(request), _generated(subject, request)
        first = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        equal, compared = equal + (first is None), compared + len(theirs)
        if first is not None:
            gaps.append(_gap(served.of(request)[first], theirs[first]))
    said = f"{equal} of {len(requests)} answers equal, {compared:,} tokens"
    return Measured(max(gaps), subject.limit, f"gap of logits ÷ their RMS at the first other token; {said}")


@PROPERTIES.register("prefix_reuse")
def prefix_reuse(subject: Subject) -> Measured:
    """Answers over a stored prefix are those of a full forward."""
    requests = _forks(subject)
    served = subject.serve(prefixes(subject), requests)
    reused = [served.reused(request) for request in requests[1:]]
    value = subject.off(served, requests) if all(reused) else None
    return Measured(value, subject.limit, f"{OF_LOGITS}; {sum(reused):,} tokens reused")


@PROPERTIES.register("chunked_prefill")
def chunked_prefill(subject: Subject) -> Measured:
    """A prompt that is computed in small chunks, beside decodes of others, is a prompt computed at once."""
    requests = subject.questions()
    served = subject.serve(full(), requests, BatchRules(max_num_batched_tokens=CHUNK, max_num_seqs=len(requests)))
    return Measured(subject.off(served, requests), subject.limit, f"{OF_LOGITS}; chunks of {CHUNK} tokens")


@PROPERTIES.register("preemption")
def preemption(subject: Subject) -> Measured:
    """A request that loses its memory while it decodes goes on with the same answer."""
    first, second, *_ = subject.questions()
    tokens = first.num_tokens + second.num_tokens + subject.output // 2 + 2
    served = subject.start(full(), [first, second], TOGETHER, tokens)
    served.serve([first, second])
    times = sum(sequence.preemptions for sequence in served.sequences.values())
    value = subject.off(served, [first, second]) if times else None
    return Measured(value, subject.limit, f"{OF_LOGITS}; preempted {times} times")


def _forks(subject: Subject) -> list[Request]:
    """Prompts that share beginnings of other lengths with the first, each with an end of its own."""
    grid = subject.settings.model.grid
    whole = subject.words(0, 2 * grid + subject.settings.document_tokens)
    cuts = np.linspace(grid + 1, len(whole.tokens) - 1, subject.settings.prompts - 1).astype(int)
    forks = [
        subject.ask(number, Span(whole.tokens[:cut]), subject.words(100 + number, 11))
        for number, cut in enumerate(cuts.tolist(), 1)
    ]
    return [subject.ask(0, whole), *forks]


@torch.no_grad()
def _generated(subject: Subject, request: Request) -> list[int]:
    """What transformers generates greedily; it may end early, with the model's own end of a text."""
    ids = torch.from_numpy(request.tokens).long()[None].to(subject.model.device)
    options = {"do_sample": False, "max_new_tokens": subject.output, "attention_mask": torch.ones_like(ids)}
    found: Tensor = subject.twin.generate(ids, **options)  # type: ignore[operator]
    tokens: list[int] = found[0, ids.shape[1] :].tolist()
    return tokens


def _gap(row: Tensor, other: int) -> float:
    """How far the logit of another token lies below the largest, relative to the RMS of all."""
    return float((row.max() - row[other]) / row.square().mean().sqrt())
