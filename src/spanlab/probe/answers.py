"""Answers of one model by arm: what questions read of the same documents differs, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.analysis.recall import Answers
from spanlab.engine.affine import AffineMap, Transition, exact, heads_above, low_rank, scalar
from spanlab.probe.boundaries import encode_with_halo, read_repaired, separated
from spanlab.probe.memory import Form, SpanMemory, ask, encode_apart, read_through
from spanlab.probe.model import mixers
from spanlab.probe.task import Batch, Shape, draw
from spanlab.settings.probe import HybridAnswers

FULL_VIEW, EXACT = "full view", "exact"  # the references


@dataclass(frozen=True)
class Case:
    """Documents and questions of one batch, encoded apart once for all arms."""

    model: PreTrainedModel
    documents: Tensor
    questions: Tensor

    @cached_property
    def spans(self) -> SpanMemory:
        """The documents, each encoded alone."""
        return encode_apart(self.model, self.documents)


Arm = Callable[[Case], Tensor]
"""Logits [N, Q, vocabulary] of a case."""


def forms(settings: HybridAnswers) -> dict[str, Form]:
    """Ways to store a document's transition, by name."""
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
        FULL_VIEW: _read_through,
        "attention in blocks": lambda case: read_through(case.model, case.documents, case.questions, "blocks"),
        **assembled,
        **_boundaries(settings),
        "state only": lambda case: ask(case.model, case.spans.assembled(exact).without_kv(), case.questions),
        "first state": lambda case: ask(case.model, case.spans.assembled(exact).with_first_state(), case.questions),
        "KV only": lambda case: ask(case.model, case.spans.whole.without_state(), case.questions),
        "no documents": lambda case: ask(case.model, case.spans.whole.without_state().without_kv(), case.questions),
    }


def _boundaries(settings: HybridAnswers) -> dict[str, Arm]:
    """Arms whose documents begin otherwise: behind a separator or a halo, or with tokens that are computed again."""
    repaired = {f"exact, first {tokens} again": partial(_repaired, tokens=tokens) for tokens in settings.repaired}
    if not settings.separator:
        return {**repaired, "exact, halo": _with_halo}
    return {
        **repaired,
        "exact, halo": _with_halo,
        "exact, separator": lambda case: _assembled(_separated(case, settings.separator), exact),
        "full view, separator": lambda case: _read_through(_separated(case, settings.separator)),
    }


def _repaired(case: Case, tokens: int) -> Tensor:
    return ask(case.model, read_repaired(case.model, case.documents, tokens, exact), case.questions)


def _with_halo(case: Case) -> Tensor:
    """As many tokens as the convolution sees before the first."""
    halo = mixers(case.model)[0].conv_kernel_size - 1
    return ask(case.model, encode_with_halo(case.model, case.documents, halo).assembled(exact), case.questions)


def _separated(case: Case, tokens: int) -> Case:
    return Case(case.model, separated(case.documents, tokens), case.questions)


def _read_through(case: Case) -> Tensor:
    return read_through(case.model, case.documents, case.questions)


def _assembled(case: Case, form: Form) -> Tensor:
    return ask(case.model, case.spans.assembled(form), case.questions)


@torch.no_grad()
def answer(model: PreTrainedModel, settings: HybridAnswers, documents: int, tokens: int) -> dict[str, Answers]:
    """Answers of every arm to the same sequences; ValueError where documents are shorter than the convolution."""
    kernel = mixers(model)[0].conv_kernel_size
    if tokens < kernel:
        expected = f"expected documents of {kernel} tokens or more, as many as the convolution sees"
        raise ValueError(f"cases={documents}x{tokens}: {expected}")
    rng, shape = np.random.default_rng([settings.seed, documents, tokens]), Shape(documents, tokens, settings.facts)
    batch = draw(rng, settings.task, shape, settings.sequences)
    first = next(_cases(model, batch, settings.batch)).spans
    nbytes = {name: _bytes(first, form) for name, form in forms(settings).items()}
    asked = arms(settings)
    logits = [[arm(case).log_softmax(-1) for arm in asked.values()] for case in _cases(model, batch, settings.batch)]
    own = zip(asked, map(torch.cat, zip(*logits, strict=True)), strict=True)
    return {name: _scored(parts, batch, nbytes.get(name)) for name, parts in own}


def _cases(model: PreTrainedModel, batch: Batch, size: int) -> Iterator[Case]:
    documents, questions = torch.from_numpy(batch.documents), torch.from_numpy(batch.questions)
    for part, asked in zip(documents.split(size), questions.split(size), strict=True):
        yield Case(model, part, asked)


def _bytes(spans: SpanMemory, form: Form) -> int:
    """Mean bytes of the transitions of one document."""
    maps = [span for layer in spans.maps.values() for span in layer]
    sequences, documents = len(maps[0].state), len(maps) // len(spans.maps)
    return sum(form(span).nbytes for span in maps) // (sequences * documents)


def _scored(logits: Tensor, batch: Batch, nbytes: int | None) -> Answers:
    gold = torch.from_numpy(batch.gold)
    loss = -logits.gather(-1, gold[..., None])[..., 0].double().numpy()
    return Answers((logits.argmax(-1) == gold).numpy(), loss, batch.updated, batch.first, nbytes)
