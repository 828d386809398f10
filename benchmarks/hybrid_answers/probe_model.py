"""The probe: a small hybrid, its weights, its task of facts in documents, and composed states."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from probe_settings import SPECIAL, ProbeModel, TaskSettings, TrainProbe, check_weights
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from spanlab.engine.hook import decoder_layers
from spanlab.engine.load import load_pretrained, read_config
from spanlab.engine.maps import AffineMap, Transition, affine_scan, assemble
from spanlab.engine.recurrent import MIXER, silence_kernel_warnings
from spanlab.engine.settings import EngineSettings

# ------------------------------------------------------------------------------
# The probe: transformers' Qwen3.5 text model at toy size, initialised so that recall is learned
# in minutes.
# ------------------------------------------------------------------------------

MAMBA_DT = (1e-3, 0.1)  # step sizes that Mamba-2 draws
PROBE_DT = (1e-4, 1e-2)  # shorter ones, for sequences of hundreds of tokens that all matter
READ_OUT = 3.0  # gain of the output of a layer over random initialisation, since gates halve it


def config_of(sizes: ProbeModel, vocabulary: int) -> Qwen3_5TextConfig:
    """The transformers config of these sizes; initial weights have the variance 1 / hidden."""
    return Qwen3_5TextConfig(
        vocab_size=vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden,
        num_hidden_layers=4 * sizes.groups,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        head_dim=sizes.head_dim,
        linear_key_head_dim=sizes.head_dim,
        linear_value_head_dim=sizes.head_dim,
        linear_num_key_heads=sizes.heads,
        linear_num_value_heads=sizes.heads,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        initializer_range=sizes.hidden**-0.5,
        tie_word_embeddings=True,
    )


def new_probe(sizes: ProbeModel, vocabulary: int) -> PreTrainedModel:
    """A probe with new weights from torch's random generator."""
    model = Qwen3_5ForCausalLM(config_of(sizes, vocabulary))
    for mixer in mixers(model):
        slow_decay(mixer, PROBE_DT)
        associate_neighbours(mixer)
    return model


class Mixer(Protocol):
    """The attributes of transformers' GatedDeltaNet layers used here."""

    layer_idx: int
    conv_kernel_size: int
    key_dim: int
    value_dim: int
    dt_bias: nn.Parameter
    in_proj_qkv: nn.Linear
    conv1d: nn.Conv1d
    out_proj: nn.Linear


def mixers(model: PreTrainedModel) -> list[Mixer]:
    """The recurrent mixers of a model in order of layers."""
    return [getattr(layer, MIXER) for layer in decoder_layers(model) if hasattr(layer, MIXER)]


@torch.no_grad()
def slow_decay(mixer: Mixer, bounds: tuple[float, float]) -> None:
    """Draw log-uniform step sizes; with transformers' default decay, a state is forgotten after a few tokens."""
    low, high = (torch.tensor(bound).log() for bound in bounds)
    dt = torch.empty_like(mixer.dt_bias).uniform_(float(low), float(high)).exp()
    mixer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus


@torch.no_grad()
def associate_neighbours(mixer: Mixer) -> None:
    """Initialise a layer as an associative memory that stores a token under the key of the token before it.

    Queries and keys share their projection, and the output projection is the transposed projection of values. The
    convolution reads keys of the token before (lag one), queries and values of the token itself (lag zero).
    """
    query, key, value = mixer.in_proj_qkv.weight.split([mixer.key_dim, mixer.key_dim, mixer.value_dim])
    key.copy_(query)
    mixer.out_proj.weight.copy_(READ_OUT * value.T)
    taps = mixer.conv1d.weight[:, 0]
    taps.mul_(0.1)
    query_taps, key_taps, value_taps = taps.split([mixer.key_dim, mixer.key_dim, mixer.value_dim])
    for channel_taps, lag in ((query_taps, 0), (key_taps, 1), (value_taps, 0)):
        channel_taps[:, -1 - lag] += 1


# ------------------------------------------------------------------------------
# Weights of a probe on disk, in the format of transformers.
# ------------------------------------------------------------------------------


def load(key: str, folder: str) -> PreTrainedModel:
    """The model in a folder; ValueError if it has no weights or no recurrent layers."""
    check_weights(key, folder)
    settings = EngineSettings(weights="path", path=folder)
    model = load_pretrained(settings, folder, read_config(settings, folder), torch.float32)
    if not mixers(model):
        raise ValueError(f"{key}={folder}: expected a model with GatedDeltaNet layers")
    silence_kernel_warnings(model)
    model.eval()
    return model


def initial_model(settings: TrainProbe) -> PreTrainedModel:
    """The model to train, new or from `settings.start`; ValueError if stored weights have other sizes."""
    torch.manual_seed(settings.seed)
    if settings.start is None:
        model = new_probe(settings.model, settings.task.vocabulary)
        silence_kernel_warnings(model)
        model.train()
        return model
    model, config = load("start", settings.start), config_of(settings.model, settings.task.vocabulary)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
        actual, expected = getattr(model.config, name), getattr(config, name)
        if actual != expected:
            raise ValueError(
                f"start={settings.start}: expected {name} of {expected}, as model and task say, not {actual}"
            )
    model.train()
    return model


# ------------------------------------------------------------------------------
# Sequences of the recall task: documents that may contradict each other, and questions about
# their facts.
# ------------------------------------------------------------------------------

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

DOCUMENT, QUESTION = range(SPECIAL)


@dataclass(frozen=True)
class Shape:
    """Numbers of documents of a sequence, and of tokens and facts of each document."""

    documents: int
    tokens: int
    facts: int


@dataclass(frozen=True)
class Batch:
    """Sequences of one shape.

    `documents`  token ids [N, D, L]; a document begins with a start mark
    `questions`  token ids [N, 2 Q]: a mark and a key per question; the answer is predicted at the key
    `gold`       value [N, Q] of the key in the last document that has it
    `updated`    [N, Q]: the key has more than one value
    `first`      [N, Q]: the key has one value, in the first document
    """

    documents: Ints
    questions: Ints
    gold: Ints
    updated: Bools
    first: Bools


def draw(rng: np.random.Generator, task: TaskSettings, shape: Shape, count: int) -> Batch:
    """Draw `count` sequences."""
    drawn = [_draw_one(rng, task, shape) for _ in range(count)]
    parts = (np.stack(parts) for parts in zip(*drawn, strict=True))
    return Batch(*parts)


def _draw_one(rng: np.random.Generator, task: TaskSettings, shape: Shape) -> tuple[Ints, Ints, Ints, Bools, Bools]:
    keys = _keys(rng, task, shape)
    values = SPECIAL + task.keys + rng.permutation(task.values)[: keys.size].reshape(keys.shape)
    documents = [_document(rng, task, shape, *facts) for facts in zip(keys, values, strict=True)]
    last = dict(zip(keys.flat, values.flat, strict=True))
    question_keys = np.resize(rng.permutation(list(last)), task.questions)
    times = np.array([(keys == key).sum() for key in question_keys])
    marks = np.full(task.questions, QUESTION)
    questions, gold = np.stack([marks, question_keys], axis=1).ravel(), np.array([last[key] for key in question_keys])
    return np.stack(documents), questions, gold, times > 1, (times == 1) & np.isin(question_keys, keys[0])


def _keys(rng: np.random.Generator, task: TaskSettings, shape: Shape) -> Ints:
    """Keys by document [D, F], distinct within a document."""
    fresh = iter(SPECIAL + rng.permutation(task.keys))
    keys = np.empty((shape.documents, shape.facts), np.int64)
    for number, row in enumerate(keys):
        repeated = rng.binomial(shape.facts, task.updated) if number else 0
        row[:repeated] = rng.permutation(np.unique(keys[:number]))[:repeated]
        row[repeated:] = list(islice(fresh, shape.facts - repeated))
    return keys


def _document(rng: np.random.Generator, task: TaskSettings, shape: Shape, keys: Ints, values: Ints) -> Ints:
    """One document [L]: its start mark, then facts in random order among filler."""
    order = rng.permutation(shape.facts)
    filler = shape.tokens - 1 - 2 * shape.facts
    is_fact = rng.permutation(filler + shape.facts) < shape.facts
    filler_tokens = rng.integers(SPECIAL + task.keys + task.values, task.vocabulary, len(is_fact))
    pieces = np.stack([filler_tokens, np.full(len(filler_tokens), -1)], axis=1)
    pieces[is_fact] = np.stack([keys[order], values[order]], axis=1)
    return np.concatenate([[DOCUMENT], pieces[pieces >= 0]])


# ------------------------------------------------------------------------------
# Memory that questions read of documents: KV, convolution tails and recurrent states, by layer.
#
# Every forward is one of transformers' model with transformers' cache. Documents that are
# encoded apart have their positions in the prompt; a rotation of stored keys would give the
# same keys.
# ------------------------------------------------------------------------------

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


# ------------------------------------------------------------------------------
# Context of the first tokens of a document encoded apart: nothing, a separator, a halo, or the
# full context.
#
# A document that is encoded apart begins after zeros: its convolutions lack the inputs before
# it, in every recurrent layer. A separator moves this error to tokens without content. A halo
# is the last tokens before the document, so that the stored memory is valid after one neighbour
# only. A repair recomputes the first tokens of a document after all tokens before them.
# ------------------------------------------------------------------------------


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
