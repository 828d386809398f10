"""Predictions after every recovery and after states in fewer bytes, beside those after exact recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.analysis.recovery import Departure, Measured, Source, measured
from spanlab.engine.hook import decoder_layers
from spanlab.engine.recurrent import MIXER, hush_kernels
from spanlab.probe.memory import Memory, ask, distances, read_on
from spanlab.probe.model import new_probe
from spanlab.probe.recovery import RECOVERIES, Gap, captured
from spanlab.probe.stored_states import FORMATS, Format
from spanlab.probe.task import Batch, Shape, draw
from spanlab.settings.probe import ProbeModel
from spanlab.settings.tail_replay import TailReplay

_TOGETHER = 32  # prompts of a forward


@dataclass(frozen=True)
class Case:
    """Prompts and questions of one forward, and what the prefill of the prompts held at every stop."""

    model: PreTrainedModel
    documents: Tensor
    questions: Tensor
    gold: Tensor
    held: dict[int, Memory]

    @property
    def whole(self) -> Memory:
        """What exact recompute leaves behind."""
        return self.held[self.documents.shape[1]]

    @cached_property
    def expected(self) -> Tensor:
        """Log probabilities [N, Q, vocabulary] after exact recompute."""
        return self._asked(self.whole)

    def gap(self, tokens: int) -> Gap:
        """The last `tokens` of the prompts, behind a state."""
        start = self.documents.shape[1] - tokens
        return Gap(self.model, self.held[start], self.whole, self.documents[:, start:])

    def departure(self, reached: Memory, nbytes: float = 1.0) -> Departure:
        """How far a memory of the same tokens leads."""
        expected, found = self.expected, self._asked(reached)
        kl = (expected.exp() * (expected - found)).sum(-1).clamp(min=0)  # below zero by rounding alone
        best = found.argmax(-1)
        same, right = best == expected.argmax(-1), best == self.gold
        errors = [distances(reached.recurrent[layer], state).double() for layer, state in self.whole.recurrent.items()]
        return Departure(kl.numpy(), same.numpy(), right.numpy(), torch.stack(errors).numpy(), nbytes)

    def _asked(self, memory: Memory) -> Tensor:
        return ask(self.model, memory, self.questions).double().log_softmax(-1)


Arm = Callable[[Case, int], Departure]
"""arm(case, gap)"""


def recoveries() -> dict[str, Arm]:
    """Arms that bring a float32 state over the gap."""
    return {name: partial(_recovered, recover=recover) for name, recover in RECOVERIES.items()}


def _recovered(case: Case, tokens: int, recover: Callable[[Gap], Memory]) -> Departure:
    return case.departure(recover(case.gap(tokens)))


def stored() -> dict[str, Arm]:
    """Arms that recompute the gap exactly, from a state that was stored in fewer bytes."""
    return {name: partial(_restored, form=form) for name, form in FORMATS.items()}


def _restored(case: Case, tokens: int, form: Format) -> Departure:
    before = case.gap(tokens).before
    kept = {layer: form(state) for layer, state in before.recurrent.items()}
    share = sum(own.nbytes for own in kept.values())
    whole = sum(state.numel() for state in before.recurrent.values()) * torch.float32.itemsize
    restored = replace(before, recurrent={layer: own.state() for layer, own in kept.items()})
    reached = read_on(case.model, restored, case.documents[:, before.tokens :]) if tokens else restored
    return case.departure(reached, share / whole)


def random_models(settings: TailReplay) -> Iterator[tuple[Source, PreTrainedModel]]:
    """Models with random weights that forget slowly, with attention that sees one token or all alike."""
    for groups in settings.groups:
        torch.manual_seed(settings.seed)
        model = new_probe(ProbeModel(groups=groups), settings.task.vocabulary).eval()
        hush_kernels(model)
        for score in settings.scores:
            _spread_scores(model, score)
            yield source_of(f"random, scores {score:g}", model, trained=False), model


@torch.no_grad()
def _spread_scores(model: PreTrainedModel, deviation: float) -> None:
    """Queries and keys are normalised, so that the query's factor alone sets how far scores of tokens differ."""
    for layer in decoder_layers(model):
        if not hasattr(layer, MIXER):
            attention: Any = layer.self_attn
            attention.q_norm.weight.fill_(deviation - 1)  # transformers adds the one


def source_of(name: str, model: PreTrainedModel, *, trained: bool) -> Source:
    """A model as tables name it."""
    kinds = [hasattr(layer, MIXER) for layer in decoder_layers(model)]
    return Source(name, tuple(kinds[:at].count(False) for at, kind in enumerate(kinds) if kind), trained)


@torch.no_grad()
def measure(
    source: Source, model: PreTrainedModel, settings: TailReplay, arms: dict[str, Arm], gaps: list[int]
) -> Iterator[Measured]:
    """Every arm over every gap, on the same prompts."""
    cases = list(_cases(model, settings, gaps))
    for gap in gaps:
        for name, arm in arms.items():
            yield measured(source, gap, name, _joined([arm(case, gap) for case in cases]))


def _cases(model: PreTrainedModel, settings: TailReplay, gaps: list[int]) -> Iterator[Case]:
    rng, shape = np.random.default_rng(settings.seed), Shape(settings.documents, settings.tokens, settings.facts)
    batch = draw(rng, settings.task, shape, settings.sequences)
    for documents, questions, gold in _split(batch):
        held = captured(model, documents, {documents.shape[1] - gap for gap in gaps})
        yield Case(model, documents, questions, gold, held)


def _split(batch: Batch) -> Iterator[tuple[Tensor, ...]]:
    parts = (batch.documents.reshape(len(batch.documents), -1), batch.questions, batch.gold)
    return zip(*(torch.from_numpy(part).split(_TOGETHER) for part in parts), strict=True)


def _joined(parts: list[Departure]) -> Departure:
    kl, same, right = (np.concatenate([getattr(part, name) for part in parts]) for name in ("kl", "same", "right"))
    return Departure(kl, same, right, np.concatenate([part.errors for part in parts], axis=1), parts[0].nbytes)
