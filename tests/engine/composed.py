"""The oracle of spans on hybrid models: transformers' own model and caches, fed cache span by cache span.

Each independent span runs alone through a cache of its own. What its recurrent layers' scans are given is recorded, and
A and B follow from it token by token in float64. Where first tokens are repaired, they run as text does, and A and B
are those of the tokens behind them. None of the engine's code takes part.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DynamicCache

from spanlab.core.request import Request
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import Segment

from .factories import Run
from .oracles import KEPT, all_ids, apart, segments_of, twin_of

CHUNK_SCAN = "torch_chunk_gated_delta_rule"


@dataclass(frozen=True)
class Map:
    """A [heads, d_k, d_k], B [heads, d_k, d_v] and γ [heads] of one span in one layer, float64."""

    a: Tensor
    b: Tensor
    gamma: Tensor


Form = Callable[[Map], Map]
"""What is kept of a map."""


def exact(span: Map) -> Map:
    return span


def scalar(span: Map) -> Map:
    return Map(span.gamma[:, None, None] * torch.eye(span.a.shape[-1]), span.b, span.gamma)


def total(span: Map) -> Map:
    return Map(torch.eye(span.a.shape[-1]).double().expand_as(span.a), span.b, span.gamma)


def last(span: Map) -> Map:
    return Map(torch.zeros_like(span.a), span.b, span.gamma)


FORMS = {"exact": exact, "scalar": scalar, "sum": total, "last": last}


def low_rank(rank: int) -> Form:
    """γ I and the best directions of the rest."""

    def form(span: Map) -> Map:
        forgets = scalar(span).a
        values, vectors = torch.linalg.eigh((span.a - forgets).mT @ (span.a - forgets))
        best = vectors[..., values.shape[-1] - rank :]  # the right singular vectors of the largest values
        return Map(forgets + (span.a - forgets) @ best @ best.mT, span.b, span.gamma)

    return form


def half(span: Map) -> Map:
    """Both in bfloat16."""
    return Map(span.a.bfloat16().double(), span.b.bfloat16().double(), span.gamma)


@contextmanager
def recording(twin: torch.nn.Module, begin: int = 0) -> Iterator[list[Map]]:
    """The maps of tokens from `begin` on in the recurrent layers that run inside, in order; all start from nothing."""
    module, found = sys.modules[type(twin).__module__], []
    scan = getattr(module, CHUNK_SCAN)

    def recorded(query: Tensor, key: Tensor, value: Tensor, **rest: object) -> object:
        assert rest["initial_state"] is None, "a span starts from nothing"
        found.append(map_of(*(each[0, begin:] for each in (key, value, rest["g"], rest["beta"]))))
        return scan(query, key, value, **rest)

    with patch.object(module, CHUNK_SCAN, recorded):
        yield found


def map_of(key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Map:
    """Token by token: S_t = exp(g_t) (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ."""
    heads, width = value.shape[1], key.shape[-1]
    key, value, g, beta = key.double(), value.double(), g.double(), beta.double()
    key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)
    key = key.repeat_interleave(heads // key.shape[1], dim=1)
    identity = torch.eye(width, dtype=torch.float64)
    a, b = identity.expand(heads, -1, -1), torch.zeros(heads, width, value.shape[-1], dtype=torch.float64)
    for k, v, decay, rate in zip(key[..., None], value[:, :, None], g.exp(), beta, strict=True):
        step = decay[:, None, None] * (identity - rate[:, None, None] * k @ k.mT)
        a, b = step @ a, step @ b + rate[:, None, None] * k @ v
    return Map(a, b, g.sum(0).exp())


def composed(
    model: SpanModel, request: Request, output: Sequence[int], form: Form = exact, repaired: int = 0
) -> Tensor:
    """Logits [output, V] of a prompt whose spans are computed alone and composed, and of its output.

    The first `repaired` tokens of every span are computed again, but of a span that begins the prompt.
    """
    ids = all_ids(request, output)
    segments = tuple(segments_of(request, len(ids)))
    logits = _composed(model, tuple(ids.tolist()), segments, form, repaired)
    return logits[request.num_tokens - 1 - segments[-1].start :]


def worst(result: Run, requests: Sequence[Request], form: Form = exact, repaired: int = 0) -> float:
    """How far a run's logits are from those of spans composed outside, as a share of the largest logit."""
    model, outputs = result.engine.model, result.engine.outputs
    return max(
        apart(result.of(request), composed(model, request, outputs[request.id], form, repaired)) for request in requests
    )


@lru_cache(KEPT)
@torch.no_grad()
def _composed(
    model: SpanModel, words: tuple[int, ...], segments: tuple[Segment, ...], form: Form, repaired: int
) -> Tensor:
    """Logits of the last segment's rows."""
    twin, ids = twin_of(model), torch.tensor(words)
    cache, logits = DynamicCache(config=twin.config), torch.empty(0)
    for segment in segments:
        rows = torch.arange(segment.start, segment.stop)
        if segment.independent:
            append_span(twin, cache, ids[rows], rows, form, repaired * (segment.start > 0))
        else:
            out = twin(input_ids=ids[rows][None], position_ids=rows[None], past_key_values=cache, use_cache=True)
            logits = out.logits[0]
    return logits


def append_span(
    twin: torch.nn.Module, cache: DynamicCache, ids: Tensor, rows: Tensor, form: Form, repaired: int
) -> None:
    """Compute a span alone and compose it into a cache of earlier text, in which its first tokens are computed."""
    span_cache = DynamicCache(config=twin.config)
    with recording(twin, repaired) as maps:
        twin(input_ids=ids[None], position_ids=rows[None], past_key_values=span_cache, use_cache=True)
    if repaired:
        first = slice(0, repaired)
        twin(input_ids=ids[None, first], position_ids=rows[None, first], past_key_values=cache, use_cache=True)
    if repaired >= len(ids):
        return
    found = iter(maps)
    for layer, alone in zip(cache.layers, span_cache.layers, strict=True):
        if hasattr(alone, "recurrent_states"):
            span = form(next(found))
            before = layer.recurrent_states[0]
            state = torch.zeros_like(span.b) if before is None else before[0].double()
            layer.update_conv_state(_inputs(layer.conv_states[0], alone.conv_states[0], len(ids) - repaired, repaired))
            layer.update_recurrent_state((span.a @ state + span.b)[None].float())
        else:
            layer.update(alone.keys[:, :, repaired:], alone.values[:, :, repaired:])


def _inputs(before: Tensor | None, alone: Tensor, tokens: int, repaired: int) -> Tensor:
    """The last inputs [1, channels, kernel] of a convolution: a span's alone, or its last behind what ran before."""
    if before is None or not repaired:
        return alone
    kernel = alone.shape[-1]
    return torch.cat([before, alone[..., kernel - min(tokens, kernel) :]], dim=-1)[..., -kernel:]
