"""What the first tokens of a document see, which is encoded apart: nothing, a separator, a halo, or the full context.

A document that is encoded apart begins behind zeros: its convolutions lack the inputs before it, in every recurrent
layer. A separator moves that to tokens without content. A halo is the last tokens before the document; what is stored
is then of one neighbour alone. A repair computes the document's first tokens again, behind all that stands before them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.probe.memory import EMPTY, Form, Memory, SpanMemory, encode_apart, read_on
from spanlab.probe.task import DOCUMENT


def separated(documents: Tensor, tokens: int) -> Tensor:
    """Documents [N, D, L] with further marks of their start before each, [N, D, tokens + L]."""
    marks = documents.new_full((*documents.shape[:2], tokens), DOCUMENT)
    return torch.cat([marks, documents], dim=-1)


def encode_with_halo(model: PreTrainedModel, documents: Tensor, halo: int) -> SpanMemory:
    """Documents [N, D, L], each behind the last `halo` tokens before it: inputs of convolutions, seen by attention.

    Nothing of a halo is stored: neither its KV nor its part of the map.
    """
    number, length = documents.shape[1:]
    first = encode_apart(model, documents[:, :1])
    if number == 1:
        return first
    behind = torch.cat([documents[:, :-1, -halo:], documents[:, 1:]], dim=-1)
    starts = length * torch.arange(1, number)[:, None] - halo
    return _joined(first, encode_apart(model, behind, halo, starts + torch.arange(halo + length)))


def _joined(first: SpanMemory, others: SpanMemory) -> SpanMemory:
    """Documents behind others, as if they had been encoded together."""
    kv = {layer: _side_by_side(own, others.whole.kv[layer]) for layer, own in first.whole.kv.items()}
    maps = {layer: own + others.maps[layer] for layer, own in first.maps.items()}
    tails = {layer: own + others.tails[layer] for layer, own in first.tails.items()}
    return SpanMemory(replace(others.whole, kv=kv), maps, tails)


def _side_by_side(before: tuple[Tensor, ...], behind: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(pair, dim=2) for pair in zip(before, behind, strict=True))


def read_repaired(model: PreTrainedModel, documents: Tensor, tokens: int, form: Form) -> Memory:
    """Documents [N, D, L] whose first tokens are computed again behind all before them; the others are encoded apart.

    The state runs through the first tokens, then comes the map of the others.
    """
    number, length = documents.shape[1:]
    stands = torch.arange(number * length).reshape(number, length)
    spans, memory = encode_apart(model, documents, tokens, stands), EMPTY
    for document in range(number):
        memory = read_on(model, memory, documents[:, document, :tokens])
        memory = _followed(memory, spans, document, form)
    return memory


def _followed(memory: Memory, spans: SpanMemory, document: int, form: Form) -> Memory:
    """What one document adds, but for its first tokens, to a memory that they are in."""
    maps = {layer: own[document] for layer, own in spans.maps.items()}
    tokens = next(iter(spans.whole.kv.values()))[0].shape[2] // len(next(iter(spans.maps.values())))
    own = slice(document * tokens, (document + 1) * tokens)
    kv = {
        layer: _side_by_side(before, tuple(rows[:, :, own] for rows in spans.whole.kv[layer]))
        for layer, before in memory.kv.items()
    }
    conv = {layer: _last(memory.conv[layer], own[document], tokens) for layer, own in spans.tails.items()}
    state = {layer: form(span).apply(memory.recurrent[layer]) + span.state for layer, span in maps.items()}
    return Memory(memory.tokens + tokens, kv, conv, state)


def _last(before: Tensor, tail: Tensor, tokens: int) -> Tensor:
    """The last inputs of a convolution [N, channels, kernel], `tokens` of which at most are those of a tail."""
    return torch.cat([before, tail[..., -tokens:]], dim=-1)[..., -tail.shape[-1] :]
