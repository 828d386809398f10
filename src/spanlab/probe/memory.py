"""Memory that questions read of documents: KV, convolution tails and recurrent states, by layer.

Every forward is one of transformers' model with transformers' cache. Documents that are encoded apart have their
positions in the prompt; a rotation of stored keys would give the same keys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from spanlab.engine.maps import AffineMap, Transition, affine_scan, assemble
from spanlab.probe.model import mixers

SCAN = "torch_chunk_gated_delta_rule"

Form = Callable[[AffineMap], Transition]
"""Converts the map of a span to the stored form of its transition."""


class AssignedStates(LinearAttentionLayer):
    """The states of one layer, assigned: transformers copies them in place, which stops gradients."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self._kernel = kernel

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **options: Any
    ) -> Tensor:
        """Return the inputs so far [N, channels, T]; store the last `kernel` of them."""
        before = self.conv_states[state_idx]
        inputs = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        self.conv_states[state_idx] = inputs[..., -self._kernel :]
        self.has_previous_state[state_idx] = True
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **options: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


@dataclass(frozen=True)
class Memory:
    """Memory that a question reads.

    `tokens`     tokens before the question
    `kv`         keys and values [N, heads, T, d] of each attention layer
    `conv`       convolution tail [N, channels, kernel] of each recurrent layer
    `recurrent`  state [N, heads, d_k, d_v] of each recurrent layer
    """

    tokens: int
    kv: dict[int, tuple[Tensor, ...]]
    conv: dict[int, Tensor]
    recurrent: dict[int, Tensor]

    def without_kv(self) -> Memory:
        """The memory without KV: attention reads nothing of the documents."""
        return replace(self, kv={})

    def with_first_state(self) -> Memory:
        """The memory with states of the first recurrent layer only, whose inputs are token embeddings."""
        first = min(self.recurrent)
        return replace(self, conv={first: self.conv[first]}, recurrent={first: self.recurrent[first]})

    def without_state(self) -> Memory:
        """The memory without states: recurrent layers read nothing of the documents."""
        return replace(self, conv={}, recurrent={})


EMPTY = Memory(0, {}, {}, {})  # before the first token


@dataclass(frozen=True)
class SpanMemory:
    """Memory of documents that were encoded apart.

    `base`   KV of all documents, convolution tails of the last one, no recurrent states
    `maps`   of each recurrent layer, the map of every document in order
    `tails`  of each recurrent layer, the convolution tail [N, channels, kernel] of every document in order
    """

    base: Memory
    maps: dict[int, list[AffineMap]]
    tails: dict[int, tuple[Tensor, ...]]

    def assembled(self, form: Form) -> Memory:
        """The memory with the states after all documents, from empty states and transitions stored in `form`."""
        return replace(self.base, recurrent={layer: _state(maps, form) for layer, maps in self.maps.items()})


def _state(maps: list[AffineMap], form: Form) -> Tensor:
    return assemble([(form(span), span.state) for span in maps], torch.zeros_like(maps[0].state))


def distances(states: Tensor, expected: Tensor) -> Tensor:
    """Distance of states [N, heads, d_k, d_v] from the expected ones ÷ the norm of the expected ones, [N]."""
    distance: Tensor = (states - expected).flatten(1).norm(dim=1)
    size: Tensor = expected.flatten(1).norm(dim=1)
    return distance / size


def forward_logits(model: PreTrainedModel, documents: Tensor, questions: Tensor, view: str = "all") -> Tensor:
    """Logits [N, Q, vocabulary] of one forward over documents [N, D, L] and questions [N, 2 Q].

    `view`  visibility of attention: `all`: a token sees all tokens before it; `blocks`: documents do not see each
            other; `no_kv`: questions do not see documents

    Recurrent layers process all tokens in every view.
    """
    ids = torch.cat([documents.flatten(1), questions], dim=1)
    _, number, length = documents.shape
    mask = None if view == "all" else _VIEWS[view](number, length, questions.shape[1])
    positions = torch.arange(ids.shape[1])[None]
    return _run(model, ids, None, positions, mask)[:, documents[0].numel() + 1 :: 2]


def _blocks(number: int, length: int, questions: int) -> Tensor:
    """Mask [T, T]: a document sees itself, questions see everything before them."""
    owner = torch.arange(number).repeat_interleave(length)
    owner = torch.cat([owner, torch.full((questions,), number)])
    return (owner[:, None] == owner) | (owner[:, None] == number)


def _no_kv(number: int, length: int, questions: int) -> Tensor:
    """Mask [T, T]: documents see documents, questions see questions."""
    is_question = torch.arange(number * length + questions) >= number * length
    return is_question[:, None] == is_question


_VIEWS: dict[str, Callable[[int, int, int], Tensor]] = {"blocks": _blocks, "no_kv": _no_kv}


def encode_apart(
    model: PreTrainedModel, documents: Tensor, skipped: int = 0, positions: Tensor | None = None
) -> SpanMemory:
    """Encode every document [N, D, L] from empty states, with attention to itself alone.

    `skipped`    number of first tokens whose KV and whose part of the map are not stored
    `positions`  [D, L] of the tokens; None: consecutive documents
    """
    count, number, length = documents.shape
    cache = new_cache(model)
    token_positions = torch.arange(number * length).reshape(number, length) if positions is None else positions
    with recorded_maps(model, skipped) as recorded:
        _run(model, documents.reshape(-1, length), cache, token_positions.repeat(count, 1))
    alone = memory_of(cache, int(token_positions.max()) + 1)
    maps = dict(zip(alone.conv, (_by_document(span, number) for span in recorded), strict=True))
    kv = {
        layer: tuple(_join_documents(rows[:, :, skipped:], number) for rows in pair) for layer, pair in alone.kv.items()
    }
    tails = {layer: tail.unflatten(0, (-1, number)).unbind(1) for layer, tail in alone.conv.items()}
    conv = {layer: layer_tails[-1] for layer, layer_tails in tails.items()}
    return SpanMemory(Memory(alone.tokens, kv, conv, {}), maps, tails)


def _join_documents(rows: Tensor, number: int) -> Tensor:
    """[N D, heads, L, d] to [N, heads, D L, d]."""
    joined: Tensor = rows.unflatten(0, (-1, number)).transpose(1, 2).flatten(2, 3)
    return joined


def _by_document(span: AffineMap, number: int) -> list[AffineMap]:
    columns = (values.unflatten(0, (-1, number)).unbind(1) for values in (span.transition, span.state, span.decay))
    return [AffineMap(*document) for document in zip(*columns, strict=True)]


def question_logits(model: PreTrainedModel, memory: Memory, questions: Tensor) -> Tensor:
    """Logits [N, Q, vocabulary] at the keys of questions [N, 2 Q] that follow the documents."""
    positions = memory.tokens + torch.arange(questions.shape[1])
    return _run(model, questions, cache_of(model, memory), positions[None])[:, 1::2]


def extend_memory(model: PreTrainedModel, memory: Memory, ids: Tensor) -> Memory:
    """The memory after a forward of additional tokens [N, T]."""
    cache, positions = cache_of(model, memory), memory.tokens + torch.arange(ids.shape[1])
    _run(model, ids, cache, positions[None])
    return memory_of(cache, memory.tokens + ids.shape[1])


def cache_of(model: PreTrainedModel, memory: Memory) -> DynamicCache:
    """A cache of transformers with the contents of a memory."""
    cache = new_cache(model)
    for layer, (keys, values) in memory.kv.items():
        cache.update(keys, values, layer)
    for layer, conv in memory.conv.items():
        cache.update_conv_state(conv.clone(), layer)  # cloned, since a forward of one token overwrites it
    for layer, state in memory.recurrent.items():
        cache.update_recurrent_state(state, layer)
    return cache


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache of transformers that keeps gradients."""
    cache = DynamicCache(config=model.config)
    for mixer in mixers(model):
        cache.layers[mixer.layer_idx] = AssignedStates(mixer.conv_kernel_size)
    return cache


def _run(
    model: PreTrainedModel, ids: Tensor, cache: DynamicCache | None, positions: Tensor, visible: Tensor | None = None
) -> Tensor:
    """Logits of a forward; a token sees the tokens up to itself where `visible` [T, T] is true."""
    mask = None if visible is None else visible.tril().expand(len(ids), 1, -1, -1)
    options = {"past_key_values": cache, "use_cache": cache is not None}
    logits: Tensor = model(ids, attention_mask=mask, position_ids=positions.expand(len(ids), -1), **options).logits
    return logits


def memory_of(cache: DynamicCache, tokens: int) -> Memory:
    """The memory of a cache after `tokens` tokens."""
    recurrent = {layer: cached for layer, cached in enumerate(cache.layers) if isinstance(cached, AssignedStates)}
    kv: dict[int, tuple[Tensor, ...]] = {}
    for layer, cached in enumerate(cache.layers):
        if isinstance(cached, CacheLayerMixin) and cached.keys is not None and cached.values is not None:
            kv[layer] = cached.keys, cached.values
    conv = {layer: value for layer, cached in recurrent.items() if (value := cached.conv_states[0]) is not None}
    states = {layer: value for layer, cached in recurrent.items() if (value := cached.recurrent_states[0]) is not None}
    return Memory(tokens, kv, conv, states)


@contextmanager
def recorded_maps(model: PreTrainedModel, skipped: int = 0) -> Iterator[list[AffineMap]]:
    """Record the map of every recurrent layer of forwards from empty states, in the order of layers.

    `skipped`  number of first tokens that the map does not include; outputs and states are those of all tokens
    """
    module, maps = sys.modules[type(mixers(model)[0]).__module__], []
    original = getattr(module, SCAN)

    def scan(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        outputs, span = affine_scan(*tensors, scan=original, **options)
        maps.append(_map_after(skipped, *tensors, scan=original, **options) if skipped else span)
        return outputs, span.state

    setattr(module, SCAN, scan)
    try:
        yield maps
    finally:
        setattr(module, SCAN, original)


def _map_after(
    skipped: int, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> AffineMap:
    """The map of the tokens after the first `skipped` ones, for a scan with these arguments."""
    query, key, value, g, beta = (each[:, skipped:] for each in (query, key, value, g, beta))
    return affine_scan(query, key, value, g, beta, **options)[1]
