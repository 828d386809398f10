"""What must come out of a reuse method: dense forwards with no cache and none of the engine in them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.core.repair import Repair, ReusedSpan
from spanlab.core.request import Request
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import Segment, block_mask, causal_mask, dense_logits, eager_twin
from spanlab.settings import Strategy

from .factories import Run, nothing_leaks, run
from .plain import Bank, Blended, Plain, Selection, ape_logits, blend, linear_counts

KEPT = 64  #: forwards that are remembered: arms that are tested one after another compute the same prompts


@cache
def twin_of(model: SpanModel) -> PreTrainedModel:
    """The model with transformers' own attention."""
    return eager_twin(model)


def segments_of(request: Request, length: int) -> list[Segment]:
    """A prompt's spans as rows; the last one reaches to `length`."""
    found, place = [], 0
    for span in request.spans:
        if len(span.tokens):
            found.append(Segment(place, place + len(span.tokens), span.independent))
            place += len(span.tokens)
    if found[-1].independent:  # the last token always sees everything
        found[-1:] = [replace(found[-1], stop=place - 1), Segment(place - 1, place)]
    found[-1] = replace(found[-1], stop=length)
    return [segment for segment in found if segment.start < segment.stop]


def all_ids(request: Request, output: Sequence[int]) -> Tensor:
    """Prompt and output without the last token, which is never computed."""
    return torch.from_numpy(np.concatenate([request.tokens, np.array(output[:-1], np.int64)]).astype(np.int64))


def dense(model: SpanModel, request: Request, output: Sequence[int], *, blocks: bool) -> Tensor:
    """Logits [output, V] of a dense forward: fully causal (M0), or with spans that see themselves alone (M4)."""
    ids = all_ids(request, output)
    segments = tuple(segments_of(request, len(ids))) if blocks else ()
    return _dense(model, tuple(ids.tolist()), segments)[request.num_tokens - 1 :]


@lru_cache(KEPT)
def _dense(model: SpanModel, ids: tuple[int, ...], segments: tuple[Segment, ...]) -> Tensor:
    """Logits [N, V] of all rows, under a block mask if segments are passed."""
    mask = block_mask(segments) if segments else causal_mask(len(ids))
    return dense_logits(twin_of(model), torch.tensor(ids), mask, torch.arange(len(ids)))


def repaired(model: SpanModel, request: Request, output: Sequence[int], again: Iterable[int]) -> Tensor:
    """Logits [output, V] where prompt positions `again` of spans are computed twice: alone, and seeing everything.

    Every row stands twice, as what it was and as what it becomes, and whoever sees everything sees what became of each.
    """
    ids = all_ids(request, output)
    count, segments = len(ids), segments_of(request, len(ids))
    fresh = torch.ones(count, dtype=torch.bool)
    for segment in segments:
        fresh[segment.start : segment.stop] = not segment.independent
    fresh[list(again)] = True
    causal = causal_mask(count)
    mask = torch.zeros(2 * count, 2 * count, dtype=torch.bool)
    mask[:count, :count] = block_mask(segments)
    mask[count:, :count], mask[count:, count:] = causal & ~fresh, causal & fresh
    mask[count:, count:].fill_diagonal_(True)  # rows that are not fresh are discarded, but must attend to a key
    logits = dense_logits(twin_of(model), ids.repeat(2), mask, torch.arange(count).repeat(2))
    return logits[count + request.num_tokens - 1 :]


def far(logits: Tensor, truth: Tensor) -> float:
    """The largest difference."""
    assert logits.shape == truth.shape
    return float((logits - truth).abs().max())


def apart(logits: Tensor, truth: Tensor) -> float:
    """The largest difference as a share of the largest logit: float32 has about 1e-7 of it."""
    return far(logits, truth) / float(truth.abs().max())


def error(run: Run, *requests: Request, blocks: bool) -> float:
    """Largest difference between a run's logits and dense forwards of prompts and outputs."""
    outputs = run.engine.outputs
    return max(
        far(run.of(request), dense(run.engine.model, request, outputs[request.id], blocks=blocks))
        for request in requests
    )


def divergence(truth: Tensor, logits: Tensor) -> float:
    """Mean KL of logits from the truth's, in nats."""
    p, q = truth.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


# -- by brute force ---------------------------------------------------------------------------------------------------


def alone(model: SpanModel, ids: Tensor, segments: Sequence[Segment]) -> Bank:
    """Keys and values of a prompt whose spans were computed alone."""
    return Plain(model).bank(ids, block_mask(segments), torch.arange(len(ids)))


def places(segments: Iterable[Segment]) -> Tensor:
    """Their rows."""
    return torch.tensor([row for segment in segments for row in range(segment.start, segment.stop)], dtype=torch.int64)


def found_in(segments: Iterable[Segment]) -> list[ReusedSpan]:
    """Spans that a repair may choose from."""
    return [ReusedSpan(segment.start, segment.stop, 0) for segment in segments if segment.independent and segment.start]


def selection_of(repair: Repair, layers: int, spans: Sequence[Segment], tail: int) -> Selection:
    """A measured repair as rows by layer: of the tokens of `spans`, which stand before prompt position `tail`."""
    inside = repair.kind == "neighbours" or (repair.kind == "deviation" and repair.filter == "queries")
    first, total = repair.check_layer if inside else repair.check_layer + 1, len(places(spans))
    count = repair.count([ReusedSpan(segment.start, segment.stop, 0) for segment in spans])
    counts = [total] * first + [count] * (layers - first)
    if repair.kind == "deviation_gradual":
        counts = linear_counts(layers, first, count, total)
    if repair.kind != "neighbours":
        return Selection(counts, repair.score, inside, repair.writes)
    starts = torch.zeros(tail, dtype=torch.int64)
    for segment in spans:
        starts[segment.start : segment.stop] = segment.start
    return Selection(counts, "outside", inside, starts=starts)


def most_read(model: SpanModel, request: Request, repair: Repair) -> list[int]:
    """Prompt positions of span tokens that the query attends to most, by transformers' own attention weights."""
    ids = torch.from_numpy(request.tokens.astype(np.int64))
    segments, positions = segments_of(request, len(ids)), torch.arange(len(ids))
    blocked = torch.zeros(len(ids), len(ids)).masked_fill_(~block_mask(segments), torch.finfo(torch.float32).min)
    with torch.no_grad():
        out = twin_of(model)(ids[None], blocked[None, None], positions[None], output_attentions=True)
    mass = sum(out.attentions[layer][0, :, segments[-1].start :].sum((0, 1)) for layer in repair.layers)
    spans = found_in(segments)
    free = torch.cat([torch.arange(span.start, span.stop) for span in spans])
    return sorted(free[mass[free].topk(repair.count(spans)).indices].tolist())


def blending(
    model: SpanModel, request: Request, output: Sequence[int], repair: Repair, bank: Bank | None = None
) -> Blended:
    """CacheBlend over spans computed alone, or over the KV in `bank`."""
    ids = all_ids(request, output)
    segments = segments_of(request, len(ids))
    spans = [segment for segment in segments if segment.independent and segment.start]
    again, tail = places(spans), spans[-1].stop
    along = places(s for s in segments if not s.independent and spans[0].start < s.start < tail)
    rule = selection_of(repair, model.layers, spans, tail)
    return blend(Plain(model), ids, bank or alone(model, ids, segments), again, along, tail, rule)


def blended(
    model: SpanModel, request: Request, output: Sequence[int], repair: Repair, bank: Bank | None = None
) -> Tensor:
    """CacheBlend's logits [output, V]."""
    result = blending(model, request, output, repair, bank)
    return result.logits[len(result.logits) - len(output) :]


def overlapped(model: SpanModel, request: Request, output: Sequence[int], heat: float, scale: float) -> Tensor:
    """APE: logits [output, V]; spans attend to the opening text, share one position, and are reweighed."""
    ids = all_ids(request, output)
    segments = segments_of(request, len(ids))
    marked = places(segment for segment in segments if segment.independent)
    head = int(marked.min())
    spans = torch.zeros(len(ids), dtype=torch.bool)
    spans[marked] = True
    positions, behind = torch.arange(len(ids)), head + max(s.stop - s.start for s in segments if s.independent)
    for segment in segments[1:] if head else segments:
        start = head if segment.independent else behind
        positions[segment.start : segment.stop] = torch.arange(start, start + segment.stop - segment.start)
        behind += 0 if segment.independent else segment.stop - segment.start
    own = block_mask(segments, head)
    return ape_logits(Plain(model), ids, positions, own, spans, heat, scale)[request.num_tokens - 1 :]


def truth_of(strategy: Strategy, repair: Repair, model: SpanModel, request: Request, output: Sequence[int]) -> Tensor:
    """The logits that an arm must have under any storing, batching, eviction and preemption."""
    spans = strategy.spans
    if spans is None:
        return dense(model, request, output, blocks=False)
    if spans.positions == "overlapping":
        return overlapped(model, request, output, spans.temperature, spans.scale)
    found = found_in(segments_of(request, request.num_tokens))
    if not (repair.compares or repair.count(found)):
        return dense(model, request, output, blocks=True)
    if repair.probes:
        return repaired(model, request, output, most_read(model, request, repair))
    if repair.measured:
        return blended(model, request, output, repair)
    return repaired(model, request, output, repair.rows(found, request.id))


def wrong(run: Run, strategy: Strategy, *requests: Request) -> float:
    """Largest difference between a run's logits and the oracle of its arm."""
    engine = run.engine
    repair = engine.policy.rules.repair
    return max(
        far(run.of(request), truth_of(strategy, repair, engine.model, request, engine.outputs[request.id]))
        for request in requests
    )


def run_checked(model: SpanModel, strategy: Strategy, requests: Sequence[Request], **options: object) -> Run:
    """A run from an empty cache: logits equal the arm's oracle, and no page stays occupied."""
    result = run(model, strategy, requests, **options)
    assert wrong(result, strategy, *requests) < 1e-4
    assert nothing_leaks(result)
    return result
