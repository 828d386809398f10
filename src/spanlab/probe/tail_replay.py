"""Predictions after every recovery and after compressed states, compared with those after exact recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.engine.hook import decoder_layers
from spanlab.engine.recurrent import MIXER, silence_kernel_warnings
from spanlab.probe.memory import Memory, distances, extend_memory, question_logits
from spanlab.probe.model import new_probe
from spanlab.probe.recovery import RECOVERIES, Gap, capture_memories
from spanlab.probe.recovery_scores import Deviation, RecoveryResult, Source, recovery_result
from spanlab.probe.stored_states import FORMATS, Format
from spanlab.probe.task import Batch, Shape, draw
from spanlab.settings.probe import ProbeModel
from spanlab.settings.tail_replay import TailReplay

_TOGETHER = 32  # prompts of a forward


@dataclass(frozen=True)
class Case:
    """Prompts and questions of one forward, and the memories of the prefill of the prompts at every stop."""

    model: PreTrainedModel
    documents: Tensor
    questions: Tensor
    gold: Tensor
    memories: dict[int, Memory]

    @property
    def exact(self) -> Memory:
        """The memory after exact recompute."""
        return self.memories[self.documents.shape[1]]

    @cached_property
    def expected(self) -> Tensor:
        """Log probabilities [N, Q, vocabulary] after exact recompute."""
        return self._log_probabilities(self.exact)

    def gap(self, tokens: int) -> Gap:
        """The gap of the last `tokens` of the prompts."""
        start = self.documents.shape[1] - tokens
        return Gap(self.model, self.memories[start], self.exact, self.documents[:, start:])

    def departure(self, reached: Memory, nbytes: float = 1.0) -> Deviation:
        """Differences of predictions and states between a memory of the same tokens and exact recompute."""
        expected, log_probabilities = self.expected, self._log_probabilities(reached)
        kl = (expected.exp() * (expected - log_probabilities)).sum(-1).clamp(min=0)  # negative only by rounding
        predicted = log_probabilities.argmax(-1)
        same, right = predicted == expected.argmax(-1), predicted == self.gold
        errors = [distances(reached.recurrent[layer], state).double() for layer, state in self.exact.recurrent.items()]
        return Deviation(kl.numpy(), same.numpy(), right.numpy(), torch.stack(errors).numpy(), nbytes)

    def _log_probabilities(self, memory: Memory) -> Tensor:
        return question_logits(self.model, memory, self.questions).double().log_softmax(-1)


Arm = Callable[[Case, int], Deviation]
"""arm(case, gap)"""


def recoveries() -> dict[str, Arm]:
    """Arms that recover a float32 state over the gap."""
    return {name: partial(_recovered, recover=recover) for name, recover in RECOVERIES.items()}


def _recovered(case: Case, tokens: int, recover: Callable[[Gap], Memory]) -> Deviation:
    return case.departure(recover(case.gap(tokens)))


def stored_state_arms() -> dict[str, Arm]:
    """Arms that recompute the gap exactly, from a state in a smaller storage format."""
    return {name: partial(_restored, form=form) for name, form in FORMATS.items()}


def _restored(case: Case, tokens: int, form: Format) -> Deviation:
    before = case.gap(tokens).before
    stored = {layer: form(state) for layer, state in before.recurrent.items()}
    nbytes = sum(layer_state.nbytes for layer_state in stored.values())
    float32_nbytes = sum(state.numel() for state in before.recurrent.values()) * torch.float32.itemsize
    restored = replace(before, recurrent={layer: layer_state.state() for layer, layer_state in stored.items()})
    reached = extend_memory(case.model, restored, case.documents[:, before.tokens :]) if tokens else restored
    return case.departure(reached, nbytes / float32_nbytes)


def random_models(settings: TailReplay) -> Iterator[tuple[Source, PreTrainedModel]]:
    """Models with random weights and slow decay, with attention from nearly uniform to concentrated."""
    for groups in settings.groups:
        torch.manual_seed(settings.seed)
        model = new_probe(ProbeModel(groups=groups), settings.task.vocabulary).eval()
        silence_kernel_warnings(model)
        for score in settings.scores:
            _spread_scores(model, score)
            yield source_of(f"random, scores {score:g}", model, trained=False), model


@torch.no_grad()
def _spread_scores(model: PreTrainedModel, deviation: float) -> None:
    """Set the deviation of attention scores by the weight of the query norm, since queries and keys are normalised."""
    for layer in decoder_layers(model):
        if not hasattr(layer, MIXER):
            attention: Any = layer.self_attn
            attention.q_norm.weight.fill_(deviation - 1)  # transformers adds 1 to the weight


def source_of(name: str, model: PreTrainedModel, *, trained: bool) -> Source:
    """The name of a model in tables, with the attention layers below each recurrent layer."""
    kinds = [hasattr(layer, MIXER) for layer in decoder_layers(model)]
    return Source(name, tuple(kinds[:index].count(False) for index, kind in enumerate(kinds) if kind), trained)


@torch.no_grad()
def measure(
    source: Source, model: PreTrainedModel, settings: TailReplay, arms: dict[str, Arm], gaps: list[int]
) -> Iterator[RecoveryResult]:
    """Every arm over every gap, on the same prompts."""
    cases = list(_cases(model, settings, gaps))
    for gap in gaps:
        for name, arm in arms.items():
            yield recovery_result(source, gap, name, _joined([arm(case, gap) for case in cases]))


def _cases(model: PreTrainedModel, settings: TailReplay, gaps: list[int]) -> Iterator[Case]:
    rng, shape = np.random.default_rng(settings.seed), Shape(settings.documents, settings.tokens, settings.facts)
    batch = draw(rng, settings.task, shape, settings.sequences)
    for documents, questions, gold in _split(batch):
        memories = capture_memories(model, documents, {documents.shape[1] - gap for gap in gaps})
        yield Case(model, documents, questions, gold, memories)


def _split(batch: Batch) -> Iterator[tuple[Tensor, ...]]:
    arrays = (batch.documents.reshape(len(batch.documents), -1), batch.questions, batch.gold)
    return zip(*(torch.from_numpy(array).split(_TOGETHER) for array in arrays), strict=True)


def _joined(departures: list[Deviation]) -> Deviation:
    kl, same, right = (
        np.concatenate([getattr(departure, name) for departure in departures]) for name in ("kl", "same", "right")
    )
    return Deviation(
        kl, same, right, np.concatenate([departure.errors for departure in departures], axis=1), departures[0].nbytes
    )
