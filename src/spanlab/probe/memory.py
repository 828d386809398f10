"""What questions read of documents: KV, convolution tails and recurrent states, taken and put back layer by layer.

Every forward is one of transformers' model with transformers' cache. Documents that are encoded apart have the
positions at which they stand; a rotation of stored keys would give the same.
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

from spanlab.engine.affine import AffineMap, Transition, affine_scan, assemble
from spanlab.probe.model import mixers

SCAN = "torch_chunk_gated_delta_rule"

Form = Callable[[AffineMap], Transition]
"""Makes of a span's map the form in which its transition is stored."""


class AssignedStates(LinearAttentionLayer):
    """The states of one layer; transformers copies them in place, which ends gradients."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self._kernel = kernel

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **rest: Any
    ) -> Tensor:
        """The inputs so far [N, channels, T]; the last of them stay."""
        before = self.conv_states[state_idx]
        inputs = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        self.conv_states[state_idx] = inputs[..., -self._kernel :]
        self.has_previous_state[state_idx] = True
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **rest: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


@dataclass(frozen=True)
class Memory:
    """What a question reads.

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
        """Attention reads nothing of the documents."""
        return replace(self, kv={})

    def with_first_state(self) -> Memory:
        """Of the recurrent layers, the first alone has seen the documents; its inputs are the tokens themselves."""
        first = min(self.recurrent)
        return replace(self, conv={first: self.conv[first]}, recurrent={first: self.recurrent[first]})

    def without_state(self) -> Memory:
        """Recurrent layers have seen nothing of the documents."""
        return replace(self, conv={}, recurrent={})


EMPTY = Memory(0, {}, {}, {})  # before the first token


@dataclass(frozen=True)
class SpanMemory:
    """Documents that were encoded apart.

    `whole`  KV of all of them, convolution tails of the last, states of none
    `maps`   of each recurrent layer, the map of every document in order
    `tails`  of each recurrent layer, the convolution tail [N, channels, kernel] of every document in order
    """

    whole: Memory
    maps: dict[int, list[AffineMap]]
    tails: dict[int, tuple[Tensor, ...]]

    def assembled(self, form: Form) -> Memory:
        """The states that all documents leave in empty ones, with transitions stored in one form."""
        return replace(self.whole, recurrent={layer: _state(maps, form) for layer, maps in self.maps.items()})


def _state(maps: list[AffineMap], form: Form) -> Tensor:
    return assemble([(form(span), span.state) for span in maps], torch.zeros_like(maps[0].state))


def distances(states: Tensor, expected: Tensor) -> Tensor:
    """Distance of states [N, heads, d_k, d_v] from the expected ones ÷ the norm of these, [N]."""
    apart: Tensor = (states - expected).flatten(1).norm(dim=1)
    size: Tensor = expected.flatten(1).norm(dim=1)
    return apart / size


def read_through(model: PreTrainedModel, documents: Tensor, questions: Tensor, view: str = "all") -> Tensor:
    """Logits [N, Q, vocabulary] where recurrent layers run through documents [N, D, L] and questions [N, 2 Q].

    `view`  what attention sees: `all` before it; `blocks`, where documents do not see each other; `no_kv`, where
            questions do not see documents either way
    """
    ids = torch.cat([documents.flatten(1), questions], dim=1)
    _, number, length = documents.shape
    mask = None if view == "all" else _VIEWS[view](number, length, questions.shape[1])
    positions = torch.arange(ids.shape[1])[None]
    return _run(model, ids, None, positions, mask)[:, documents[0].numel() + 1 :: 2]


def _blocks(number: int, length: int, asked: int) -> Tensor:
    """[T, T]: documents see themselves, questions everything before them."""
    owner = torch.arange(number).repeat_interleave(length)
    owner = torch.cat([owner, torch.full((asked,), number)])
    return (owner[:, None] == owner) | (owner[:, None] == number)


def _no_kv(number: int, length: int, asked: int) -> Tensor:
    """[T, T]: documents see documents, questions questions."""
    is_question = torch.arange(number * length + asked) >= number * length
    return is_question[:, None] == is_question


_VIEWS: dict[str, Callable[[int, int, int], Tensor]] = {"blocks": _blocks, "no_kv": _no_kv}


def encode_apart(
    model: PreTrainedModel, documents: Tensor, behind: int = 0, positions: Tensor | None = None
) -> SpanMemory:
    """Every document [N, D, L] from empty states, with attention to itself alone.

    `behind`     its first tokens, whose KV is left out and whose part of the map is
    `positions`  [D, L] of the tokens; None: one document behind the other
    """
    count, number, length = documents.shape
    cache = new_cache(model)
    stands = torch.arange(number * length).reshape(number, length) if positions is None else positions
    with recorded_maps(model, behind) as recorded:
        _run(model, documents.reshape(-1, length), cache, stands.repeat(count, 1))
    alone = memory_of(cache, int(stands.max()) + 1)
    maps = dict(zip(alone.conv, (_by_document(span, number) for span in recorded), strict=True))
    kv = {layer: tuple(_joined(rows[:, :, behind:], number) for rows in own) for layer, own in alone.kv.items()}
    tails = {layer: tail.unflatten(0, (-1, number)).unbind(1) for layer, tail in alone.conv.items()}
    conv = {layer: own[-1] for layer, own in tails.items()}
    return SpanMemory(Memory(alone.tokens, kv, conv, {}), maps, tails)


def _joined(rows: Tensor, number: int) -> Tensor:
    """[N D, heads, L, d] to [N, heads, D L, d]."""
    joined: Tensor = rows.unflatten(0, (-1, number)).transpose(1, 2).flatten(2, 3)
    return joined


def _by_document(span: AffineMap, number: int) -> list[AffineMap]:
    parts = (part.unflatten(0, (-1, number)).unbind(1) for part in (span.transition, span.state, span.decay))
    return [AffineMap(*own) for own in zip(*parts, strict=True)]


def ask(model: PreTrainedModel, memory: Memory, questions: Tensor) -> Tensor:
    """Logits [N, Q, vocabulary] at the keys of questions [N, 2 Q] that follow the documents."""
    positions = memory.tokens + torch.arange(questions.shape[1])
    return _run(model, questions, cache_of(model, memory), positions[None])[:, 1::2]


def read_on(model: PreTrainedModel, memory: Memory, ids: Tensor) -> Memory:
    """What a forward of further tokens [N, T] leaves behind."""
    cache, positions = cache_of(model, memory), memory.tokens + torch.arange(ids.shape[1])
    _run(model, ids, cache, positions[None])
    return memory_of(cache, memory.tokens + ids.shape[1])


def cache_of(model: PreTrainedModel, memory: Memory) -> DynamicCache:
    """A cache of transformers that holds a memory."""
    cache = new_cache(model)
    for layer, (keys, values) in memory.kv.items():
        cache.update(keys, values, layer)
    for layer, conv in memory.conv.items():
        cache.update_conv_state(conv.clone(), layer)  # which a forward of one token writes over
    for layer, state in memory.recurrent.items():
        cache.update_recurrent_state(state, layer)
    return cache


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache of transformers through which gradients pass."""
    cache = DynamicCache(config=model.config)
    for mixer in mixers(model):
        cache.layers[mixer.layer_idx] = AssignedStates(mixer.conv_kernel_size)
    return cache


def _run(
    model: PreTrainedModel, ids: Tensor, cache: DynamicCache | None, positions: Tensor, seen: Tensor | None = None
) -> Tensor:
    """Logits of a forward; of the tokens before it, a token sees those where `seen` [T, T] is true."""
    mask = None if seen is None else seen.tril().expand(len(ids), 1, -1, -1)
    given = {"past_key_values": cache, "use_cache": cache is not None}
    logits: Tensor = model(ids, attention_mask=mask, position_ids=positions.expand(len(ids), -1), **given).logits
    return logits


def memory_of(cache: DynamicCache, tokens: int) -> Memory:
    """What a cache holds after so many tokens."""
    recurrent = {layer: own for layer, own in enumerate(cache.layers) if isinstance(own, AssignedStates)}
    kv: dict[int, tuple[Tensor, ...]] = {}
    for layer, own in enumerate(cache.layers):
        if isinstance(own, CacheLayerMixin) and own.keys is not None and own.values is not None:
            kv[layer] = own.keys, own.values
    conv = {layer: found for layer, own in recurrent.items() if (found := own.conv_states[0]) is not None}
    states = {layer: found for layer, own in recurrent.items() if (found := own.recurrent_states[0]) is not None}
    return Memory(tokens, kv, conv, states)


@contextmanager
def recorded_maps(model: PreTrainedModel, behind: int = 0) -> Iterator[list[AffineMap]]:
    """Within it, forwards from empty states note the map of every recurrent layer, in order of layers.

    `behind`  tokens that the map leaves out; outputs and states are those of all tokens
    """
    module, maps = sys.modules[type(mixers(model)[0]).__module__], []
    plain = getattr(module, SCAN)

    def scan(*tensors: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        outputs, span = affine_scan(*tensors, scan=plain, **rest)
        maps.append(_map_behind(behind, *tensors, scan=plain, **rest) if behind else span)
        return outputs, span.state

    setattr(module, SCAN, scan)
    try:
        yield maps
    finally:
        setattr(module, SCAN, plain)


def _map_behind(
    behind: int, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **rest: Any
) -> AffineMap:
    """The map of the tokens behind the first ones, of a scan with these arguments."""
    query, key, value, g, beta = (each[:, behind:] for each in (query, key, value, g, beta))
    return affine_scan(query, key, value, g, beta, **rest)[1]
