"""Errors of composed states relative to the full view, by the context of the first tokens of documents."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.engine.maps import exact
from spanlab.probe.boundaries import encode_repaired, encode_with_halo, with_separators
from spanlab.probe.memory import Memory, distances, encode_apart
from spanlab.probe.model import mixers
from spanlab.probe.norms import sources
from spanlab.probe.recall_scores import StateError
from spanlab.probe.task import Shape, draw
from spanlab.settings.probe import HybridAnswers, parse_case


@torch.no_grad()
def state_errors(model: PreTrainedModel, settings: HybridAnswers, case: str) -> Iterator[StateError]:
    """Errors of states after the last document, under the same weights as the norms."""
    shape = Shape(*parse_case(case), settings.facts)
    rng = np.random.default_rng([settings.seed, shape.documents, shape.tokens])
    documents = torch.from_numpy(draw(rng, settings.task, shape, settings.norms.spans).documents)
    for source, weights in sources(model, settings.norms, settings.seed):
        for arm, composed, full in _memories(weights, documents, settings):
            for layer, state in full.recurrent.items():
                yield StateError(source, arm, layer, float(distances(composed.recurrent[layer], state).mean()))


def _memories(
    model: PreTrainedModel, documents: Tensor, settings: HybridAnswers
) -> Iterator[tuple[str, Memory, Memory]]:
    """Arms, with their memory and the memory of the full view of the same tokens."""
    full, halo = _full_view(model, documents), mixers(model)[0].conv_kernel_size - 1
    yield "exact", encode_apart(model, documents).assembled(exact), full
    for tokens in settings.repaired:
        yield f"exact, first {tokens} again", encode_repaired(model, documents, tokens, exact), full
    yield "exact, halo", encode_with_halo(model, documents, halo).assembled(exact), full
    if settings.separator:
        marked = with_separators(documents, settings.separator)
        yield "exact, separator", encode_apart(model, marked).assembled(exact), _full_view(model, marked)


def _full_view(model: PreTrainedModel, documents: Tensor) -> Memory:
    return encode_apart(model, documents.flatten(1)[:, None]).assembled(exact)
