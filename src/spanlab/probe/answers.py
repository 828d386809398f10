"""Answers of one model by arm: arms differ only in the memory of the documents that questions read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.engine.maps import AffineMap, Transition, exact, heads_above, low_rank, scalar
from spanlab.probe.boundaries import encode_repaired, encode_with_halo, with_separators
from spanlab.probe.memory import Form, SpanMemory, encode_apart, forward_logits, question_logits
from spanlab.probe.model import mixers
from spanlab.probe.recall_scores import Answers
from spanlab.probe.task import Batch, Shape, draw
from spanlab.settings.probe import HybridAnswers

FULL_VIEW, EXACT = "full view", "exact"  # the reference arms


@dataclass(frozen=True)
class Case:
    """Documents and questions of one batch; the documents are encoded apart once for all arms."""

    model: PreTrainedModel
    documents: Tensor
    questions: Tensor

    @cached_property
    def spans(self) -> SpanMemory:
        """Memory of the documents, each encoded alone."""
        return encode_apart(self.model, self.documents)


Arm = Callable[[Case], Tensor]
"""Logits [N, Q, vocabulary] of a case."""


def forms(settings: HybridAnswers) -> dict[str, Form]:
    """Storage forms of the transition of a document, by name."""
    ranks: dict[str, Form] = {f"rank {rank}": partial(low_rank, rank=rank) for rank in settings.ranks}
    drops: dict[str, Form] = {f"norm > {norm:g}": partial(heads_above, norm=norm) for norm in settings.drop}
    return {
        EXACT: exact,
        "exact, bf16": partial(exact, dtype=torch.bfloat16),
        **ranks,
        **drops,
        "decay only": lambda span: _scaled(span, span.decay),
        "sum": lambda span: _scaled(span, torch.ones_like(span.decay)),
        "last": lambda span: _scaled(span, torch.zeros_like(span.decay)),
    }


def _scaled(span: AffineMap, factor: Tensor) -> Transition:
    return scalar(factor, span.transition.shape[-1])


def arms(settings: HybridAnswers) -> dict[str, Arm]:
    """All arms by name, the references first."""
    assembled: dict[str, Arm] = {name: partial(_assembled, form=form) for name, form in forms(settings).items()}
    return {
        FULL_VIEW: _full_view,
        "attention in blocks": lambda case: forward_logits(case.model, case.documents, case.questions, "blocks"),
        **assembled,
        **_boundaries(settings),
        "state only": lambda case: question_logits(
            case.model, case.spans.assembled(exact).without_kv(), case.questions
        ),
        "first state": lambda case: question_logits(
            case.model, case.spans.assembled(exact).with_first_state(), case.questions
        ),
        "KV only": lambda case: question_logits(case.model, case.spans.base.without_state(), case.questions),
        "no documents": lambda case: question_logits(
            case.model, case.spans.base.without_state().without_kv(), case.questions
        ),
    }


def _boundaries(settings: HybridAnswers) -> dict[str, Arm]:
    """Arms that change the start of documents: a separator, a halo, or recomputed first tokens."""
    repaired = {f"exact, first {tokens} again": partial(_repaired, tokens=tokens) for tokens in settings.repaired}
    if not settings.separator:
        return {**repaired, "exact, halo": _with_halo}
    return {
        **repaired,
        "exact, halo": _with_halo,
        "exact, separator": lambda case: _assembled(_separated(case, settings.separator), exact),
        "full view, separator": lambda case: _full_view(_separated(case, settings.separator)),
    }


def _repaired(case: Case, tokens: int) -> Tensor:
    return question_logits(case.model, encode_repaired(case.model, case.documents, tokens, exact), case.questions)


def _with_halo(case: Case) -> Tensor:
    """Logits with a halo of the tokens that the convolution sees before the first token."""
    halo = mixers(case.model)[0].conv_kernel_size - 1
    return question_logits(
        case.model, encode_with_halo(case.model, case.documents, halo).assembled(exact), case.questions
    )


def _separated(case: Case, tokens: int) -> Case:
    return Case(case.model, with_separators(case.documents, tokens), case.questions)


def _full_view(case: Case) -> Tensor:
    return forward_logits(case.model, case.documents, case.questions)


def _assembled(case: Case, form: Form) -> Tensor:
    return question_logits(case.model, case.spans.assembled(form), case.questions)


@torch.no_grad()
def answer(model: PreTrainedModel, settings: HybridAnswers, documents: int, tokens: int) -> dict[str, Answers]:
    """Answers of every arm to the same sequences; ValueError if documents are shorter than the convolution."""
    kernel = mixers(model)[0].conv_kernel_size
    if tokens < kernel:
        expected = f"expected documents of {kernel} tokens or more, as many as the convolution sees"
        raise ValueError(f"cases={documents}x{tokens}: {expected}")
    rng, shape = np.random.default_rng([settings.seed, documents, tokens]), Shape(documents, tokens, settings.facts)
    batch = draw(rng, settings.task, shape, settings.sequences)
    first = next(_cases(model, batch, settings.batch)).spans
    nbytes = {name: _bytes(first, form) for name, form in forms(settings).items()}
    arms_by_name = arms(settings)
    logits = [
        [arm(case).log_softmax(-1) for arm in arms_by_name.values()] for case in _cases(model, batch, settings.batch)
    ]
    by_arm = zip(arms_by_name, map(torch.cat, zip(*logits, strict=True)), strict=True)
    return {name: _scored(arm_logits, batch, nbytes.get(name)) for name, arm_logits in by_arm}


def _cases(model: PreTrainedModel, batch: Batch, size: int) -> Iterator[Case]:
    documents, questions = torch.from_numpy(batch.documents), torch.from_numpy(batch.questions)
    for document_batch, question_batch in zip(documents.split(size), questions.split(size), strict=True):
        yield Case(model, document_batch, question_batch)


def _bytes(spans: SpanMemory, form: Form) -> int:
    """Mean bytes of the transitions of one document."""
    maps = [span for layer in spans.maps.values() for span in layer]
    sequences, documents = len(maps[0].state), len(maps) // len(spans.maps)
    return sum(form(span).nbytes for span in maps) // (sequences * documents)


def _scored(logits: Tensor, batch: Batch, nbytes: int | None) -> Answers:
    gold = torch.from_numpy(batch.gold)
    loss = -logits.gather(-1, gold[..., None])[..., 0].double().numpy()
    return Answers((logits.argmax(-1) == gold).numpy(), loss, batch.updated, batch.first, nbytes)
