"""Retention of a state over a span: norm of the transition and decay, by layer, head and length."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.engine.maps import AffineMap, spectral_norm
from spanlab.probe.memory import encode_apart
from spanlab.probe.model import MAMBA_DT, mixers, slow_decay
from spanlab.probe.recall_scores import SEEN, HeadNorm
from spanlab.probe.task import Shape, draw
from spanlab.settings.probe import HybridAnswers, NormSettings


@torch.no_grad()
def head_norms(model: PreTrainedModel, settings: HybridAnswers) -> Iterator[HeadNorm]:
    """Norms of the same spans under the weights of the model, and under new weights of the same sizes."""
    for source, weights in sources(model, settings.norms, settings.seed):
        for tokens in settings.norms.lengths:
            for layer, (span,) in encode_apart(weights, _spans(model, settings, tokens)).maps.items():
                yield from _heads(source, layer, tokens, span)


def _spans(model: PreTrainedModel, settings: HybridAnswers, tokens: int) -> Tensor:
    """Token ids [N, 1, L]."""
    rng, count = np.random.default_rng([settings.seed, tokens]), settings.norms.spans
    if settings.norms.tokens == "random":
        return torch.from_numpy(rng.integers(model.config.vocab_size, size=(count, 1, tokens)))
    return torch.from_numpy(draw(rng, settings.task, Shape(1, tokens, settings.facts), count).documents)


def sources(model: PreTrainedModel, settings: NormSettings, seed: int) -> Iterator[tuple[str, PreTrainedModel]]:
    """The model, and new ones of its sizes: with transformers' initial weights, and with slow decay."""
    yield "trained", model
    if not (settings.published or settings.slow):
        return
    torch.manual_seed(seed)
    new = type(model)(copy.deepcopy(model.config)).eval()
    if settings.published:
        yield "published", new
    if settings.slow:
        for mixer in mixers(new):
            slow_decay(mixer, MAMBA_DT)
        yield "slow", new


def _heads(source: str, layer: int, tokens: int, span: AffineMap) -> Iterator[HeadNorm]:
    norms, decays = spectral_norm(span.transition).mean(0), span.decay.mean(0)
    ranks = (torch.linalg.svdvals(span.transition) > SEEN).sum(-1).double().mean(0)
    for head, values in enumerate(zip(norms, decays, ranks, strict=True)):
        yield HeadNorm(source, layer, head, tokens, *map(float, values))
