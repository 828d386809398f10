"""Context of the first tokens of a document encoded apart: nothing, a separator, a halo, or the full context.

A document that is encoded apart begins after zeros: its convolutions lack the inputs before it, in every recurrent
layer. A separator moves this error to tokens without content. A halo is the last tokens before the document, so that
the stored memory is valid after one neighbour only. A repair recomputes the first tokens of a document after all tokens
before them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.probe.memory import EMPTY, Form, Memory, SpanMemory, encode_apart, extend_memory
from spanlab.probe.task import DOCUMENT


def with_separators(documents: Tensor, tokens: int) -> Tensor:
    """Documents [N, D, L], each with `tokens` additional start marks before it: [N, D, tokens + L]."""
    marks = documents.new_full((*documents.shape[:2], tokens), DOCUMENT)
    return torch.cat([marks, documents], dim=-1)


def encode_with_halo(model: PreTrainedModel, documents: Tensor, halo: int) -> SpanMemory:
    """Encode documents [N, D, L], each after the last `halo` tokens before it, which convolutions and attention read.

    The halo is not stored: neither its KV nor its part of the map.
    """
    number, length = documents.shape[1:]
    first = encode_apart(model, documents[:, :1])
    if number == 1:
        return first
    with_halo = torch.cat([documents[:, :-1, -halo:], documents[:, 1:]], dim=-1)
    starts = length * torch.arange(1, number)[:, None] - halo
    return _concatenate_documents(first, encode_apart(model, with_halo, halo, starts + torch.arange(halo + length)))


def _concatenate_documents(first: SpanMemory, later: SpanMemory) -> SpanMemory:
    """Concatenate the first document and the later ones, as if they had been encoded in one call."""
    kv = {layer: _concatenate_kv(pair, later.base.kv[layer]) for layer, pair in first.base.kv.items()}
    maps = {layer: spans + later.maps[layer] for layer, spans in first.maps.items()}
    tails = {layer: inputs + later.tails[layer] for layer, inputs in first.tails.items()}
    return SpanMemory(replace(later.base, kv=kv), maps, tails)


def _concatenate_kv(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(pair, dim=2) for pair in zip(before, after, strict=True))


def encode_repaired(model: PreTrainedModel, documents: Tensor, tokens: int, form: Form) -> Memory:
    """Memory of documents [N, D, L] whose first tokens are recomputed in full context; the others are encoded apart.

    The state is computed through the first tokens of a document; then the map of its other tokens is applied.
    """
    number, length = documents.shape[1:]
    positions = torch.arange(number * length).reshape(number, length)
    spans, memory = encode_apart(model, documents, tokens, positions), EMPTY
    for document in range(number):
        memory = extend_memory(model, memory, documents[:, document, :tokens])
        memory = _append_document(memory, spans, document, form)
    return memory


def _append_document(memory: Memory, spans: SpanMemory, document: int, form: Form) -> Memory:
    """Extend a memory, which includes the first tokens of a document, by its other tokens."""
    maps = {layer: layer_maps[document] for layer, layer_maps in spans.maps.items()}
    tokens = next(iter(spans.base.kv.values()))[0].shape[2] // len(next(iter(spans.maps.values())))
    rows_of_document = slice(document * tokens, (document + 1) * tokens)
    kv = {
        layer: _concatenate_kv(before, tuple(rows[:, :, rows_of_document] for rows in spans.base.kv[layer]))
        for layer, before in memory.kv.items()
    }
    conv = {layer: _last_inputs(memory.conv[layer], tails[document], tokens) for layer, tails in spans.tails.items()}
    state = {layer: form(span).apply(memory.recurrent[layer]) + span.state for layer, span in maps.items()}
    return Memory(memory.tokens + tokens, kv, conv, state)


def _last_inputs(before: Tensor, tail: Tensor, tokens: int) -> Tensor:
    """The last inputs of a convolution [N, channels, kernel], of which at most `tokens` are from `tail`."""
    return torch.cat([before, tail[..., -tokens:]], dim=-1)[..., -tail.shape[-1] :]
