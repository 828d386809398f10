"""The oracle: transformers' eager attention under an explicit mask, without a KV cache or spanlab's
attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from spanlab.core.policies.tree import TreePolicy
from spanlab.core.policies.tree_variants import PublishedStudyPolicy
from spanlab.core.repair import SpanSettings
from spanlab.core.tree import whole
from spanlab.engine.hook import Attend, Recur, decoder_layers, read_rotation
from spanlab.engine.maps import Exact, MapShape, SpanMaps
from spanlab.engine.model import SpanModel
from spanlab.engine.pages import PagePool
from spanlab.engine.recurrent import MIXER, Action, Recurrence, SlotRef, StateScan
from spanlab.engine.slots import StatePool
from spanlab.engine.states import ApplyMap, MapScan, StoreMap
from spanlab.model_families import SCAN_CHUNK
from spanlab_kernels import AngleTable
from spanlab_kernels.blocks import rotate


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of a prompt; rows of an independent segment attend to it and to a common
    head only."""

    start: int
    stop: int
    independent: bool = False


@dataclass(frozen=True, eq=False)
class DenseRun:
    """Results of a dense forward of N rows: float32 logits [N, V]; rotated keys, and values
    [layers, N, Hkv, D].

    `layers` counts attention layers only.
    """

    logits: Tensor
    keys: Tensor
    values: Tensor


def eager_twin(model: SpanModel) -> PreTrainedModel:
    """A copy of the model with transformers' eager attention, which takes any mask; see
    `twin_of`."""
    return twin_of(model, "eager")


def twin_of(model: SpanModel, attention: str) -> PreTrainedModel:
    """A copy of the model with an attention of transformers that shares the weights; `model` is
    unchanged."""
    tensors = chain(model.hf.parameters(), model.hf.buffers())
    twin = copy.deepcopy(model.hf, {id(tensor): tensor for tensor in tensors})
    twin.set_attn_implementation(attention)
    return twin


def causal_mask(length: int, device: torch.device | str = "cpu") -> Tensor:
    """bool [length, length]: row i attends to rows 0..i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def block_mask(
    segments: Sequence[Segment], head: int = 0, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Attention mask, bool [N, N], of segments that cover rows [0, N) in order, with spans computed
    alone.

    A row of an independent segment attends to its segment up to itself, and to rows [0, head),
    which all segments share (spans computed after a common prefix). Every other row attends to all
    rows up to itself.
    """
    mask = causal_mask(segments[-1].stop, device)
    stop = 0
    for segment in segments:
        assert segment.start == stop, "segments leave a gap or overlap"
        stop = segment.stop
        if segment.independent:
            mask[segment.start : segment.stop, min(head, segment.start) : segment.start] = False
    return mask


def dense_logits(hf_model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """Logits float32 [N, V] of N rows; row i is at `positions[i]` and attends to the rows where
    mask[i] is true.

    `hf_model` has eager attention. The mask need not be causal: a token may appear twice under two
    masks, such as a repaired token and its original version.
    """
    return dense_run(hf_model, ids, mask, positions).logits


@torch.no_grad()
def dense_run(hf_model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor) -> DenseRun:
    """As `dense_logits`, with each layer's keys and values."""
    assert hf_model.config._attn_implementation == "eager", (
        "the oracle needs transformers' eager attention"
    )
    assert mask.any(-1).all(), "a row sees nothing"
    blocked = torch.zeros(mask.shape, dtype=hf_model.dtype, device=mask.device)
    blocked.masked_fill_(~mask, torch.finfo(hf_model.dtype).min)
    out = hf_model(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=blocked[None, None],
        use_cache=True,
    )
    # recurrent layers have none
    cached = [layer for layer in out.past_key_values.layers if hasattr(layer, "keys")]
    keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in cached])
    values = torch.stack([layer.values[0].transpose(0, 1) for layer in cached])
    return DenseRun(out.logits[0].float(), keys, values)


def causal_attend(model: SpanModel) -> Attend:
    """Causal attention for `SpanModel.forward`; all rows are one prompt."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
        scale = model.scales[layer]
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    return attend


def recur_in_parts(model: SpanModel, cuts: Sequence[int], conv: torch.dtype) -> Recur:
    """Recurrent layers for `SpanModel.forward`: all rows are one prompt, scanned in parts that end
    at `cuts`.

    `conv`  data type of the stored conv states.
    """
    assert model.state_shape is not None, "a model without recurrent layers has no states"
    pool = StatePool(model.state_shape, conv, model.device)
    slot, starts = pool.allocate(), (0, *cuts[:-1])
    scans = [StateScan(start, stop, slot, start) for start, stop in zip(starts, cuts, strict=True)]
    return Recurrence(pool, [scans], model.device).run


# ------------------------------------------------------------------------------
# Numeric self-check of a model: tests on a few tokens what the support check read from the
# config.
# ------------------------------------------------------------------------------

# drawn from the whole vocabulary: the first ids are often special tokens, whose logits amplify
# rounding
_TOKENS = 48
# largest relative difference in float32; wrong results differ by order 1
_TOLERANCE = 1e-3
# Rounding in half precision, as a multiple of transformers' own: two right forwards differ in the
# order of their sums.
_SPREAD = 4
# where a state is stored and reloaded: on and off the grid, after one token and after many
_CUTS = (64, 65, 101, 128, 141)


def check_model(name: str, model: PreTrainedModel) -> SpanModel:
    """Return a hooked model as a `SpanModel`; ValueError if its outputs contradict the support
    check.

    1. If attention and recurrent layers return zeros, no layer's input depends on positions. Each
       layer's query and key at position p must then equal those at position 0, rotated by p. This
       determines the pair layout and detects other position embeddings, layer by layer.
    2. With causal attention, and recurrent states that are stored and reloaded on and off the grid,
       the logits of a few tokens must equal those of transformers' forward.
    3. In half precision, these logits may differ from those in float32 by no more than
       transformers' own do.

    The first two run in float32 for every model, so that rounding hides no fault.
    """
    attention: list[Any] = [
        layer.self_attn for layer in decoder_layers(model) if hasattr(layer, "self_attn")
    ]
    scales = tuple(module.scaling for module in attention)
    candidate = SpanModel(name, model, read_rotation(model), scales)
    with in_float32(model):
        positions, recorded = _positions(candidate), _record(candidate)
    layouts = [
        replace(candidate, rotation=replace(candidate.rotation, interleaved=interleaved))
        for interleaved in (False, True)
    ]
    faults = [_wrong_layers(layout, positions, recorded) for layout in layouts]
    wrong, checked = min(zip(faults, layouts, strict=True), key=lambda pair: len(pair[0]))
    if wrong:
        raise ValueError(
            f"model.name is {name!r}, expected one rotation per position in all layers; "
            f"layer {wrong[0]} rotates its queries or keys differently."
        )
    _check_logits(checked)
    return checked


def _positions(model: SpanModel) -> Tensor:
    """Positions 0, 1, 3, 7, … below the context length, and the last position."""
    below = [2**power - 1 for power in range(model.context.bit_length())]
    return torch.tensor([*below, model.context - 1], device=model.device)


def _record(model: SpanModel) -> list[tuple[Tensor, Tensor]]:
    """Record each layer's query and key [positions, H, D] of one token at all positions, with zero
    attention."""
    recorded: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        expected = (len(positions), model.kv_heads, model.head_dim)
        if layer != len(recorded) or key.shape != expected or value.shape != expected:
            raise ValueError(
                f"model.name is {model.name!r}, expected one attention per layer, with keys and values "
                f"of {model.kv_heads} heads of {model.head_dim} channels; layer {layer} differs."
            )
        recorded[layer] = (query, key)
        return torch.zeros_like(query)

    positions = _positions(model)
    token = torch.full_like(positions, model.vocab_size // 2)
    model.forward(
        token,
        positions,
        attend,
        positions[:0],
        recur=lambda layer, mixer, hidden: torch.zeros_like(hidden),
    )
    if len(recorded) != model.layers:
        raise ValueError(
            f"model.name is {model.name!r}, expected {model.layers} layers whose attention goes through transformers' "
            f"interface; {len(recorded)} did."
        )
    return [recorded[layer] for layer in range(model.layers)]


def _wrong_layers(
    model: SpanModel, positions: Tensor, recorded: Sequence[tuple[Tensor, Tensor]]
) -> list[int]:
    """Layers with a query or key that differs from the rotated query or key at position 0."""
    angles = positions.cpu().double()[:, None] * model.rotation.frequencies
    table = AngleTable(angles.cos().float().to(model.device), angles.sin().float().to(model.device))
    rows = torch.arange(len(positions), device=model.device)
    allowed = _TOLERANCE + 2e-7 * positions.cpu()  # the model computes angles in float32
    wrong = []
    for layer, states in enumerate(recorded):
        for state in states:
            unrotated = state[:1].expand_as(state).contiguous()
            rotated = rotate(unrotated, rows, table, interleaved=model.rotation.interleaved)
            distances = torch.tensor([distance(*pair) for pair in zip(state, rotated, strict=True)])
            if not (distances <= allowed).all():
                wrong.append(layer)
    return wrong


def _check_logits(model: SpanModel) -> None:
    count = _CUTS[-1] if model.state_shape else _TOKENS
    ids = torch.randint(model.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).to(
        model.device
    )
    twin = eager_twin(model)
    with in_float32(model.hf), in_float32(twin):
        ours, truth = _logits(model, twin, ids, torch.float32)
    if not distance(ours, truth) <= _TOLERANCE:  # also fails for NaN
        more = ", and recurrent layers that go on from a stored state" if model.state_shape else ""
        raise ValueError(
            f"model.name is {model.name!r}, expected causal attention over scaled products and nothing else{more}; "
            "its logits differ from those of transformers' own forward."
        )
    if model.dtype == torch.float32:
        return
    ours, theirs = _logits(model, twin, ids, model.dtype)
    precision = str(model.dtype).removeprefix("torch.")
    if not theirs.isfinite().all():
        raise ValueError(
            f"model.name is {model.name!r}, expected finite logits in {precision}; "
            "transformers' own forward overflows in this precision."
        )
    error, rounding = distance(ours, truth), distance(theirs, truth)
    if not error <= _SPREAD * rounding + _TOLERANCE:
        raise ValueError(
            f"model.name is {model.name!r}, expected logits as close to those in float32 as those of transformers' "
            f"own forward in {precision}, which differ by {rounding:.2g}; these differ by {error:.2g}."
        )


@torch.no_grad()
def _logits(
    model: SpanModel, twin: PreTrainedModel, ids: Tensor, states: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Logits [N, V] of one prompt: with spanlab's hooks and conv states in `states`, and of
    transformers' forward."""
    rows = torch.arange(len(ids), device=model.device)
    recur = recur_in_parts(model, _CUTS, states) if model.state_shape else None
    ours = model.forward(ids, rows, causal_attend(model), rows, recur=recur)
    # under the masks that transformers builds
    theirs = twin(input_ids=ids[None], use_cache=False).logits[0]
    return ours, theirs.float()


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Run a model's forwards in float32, with one decoder layer converted at a time; its weights
    are unchanged.

    Hidden states stay float32 from the embedding to the logits.
    """
    layers = decoder_layers(model)
    around = [*model.base_model.children(), *model.children()]
    modules = [*layers, *(module for module in around if module not in (layers, model.base_model))]
    originals: dict[Tensor, Tensor] = {}

    def widen(module: nn.Module, args: object) -> None:
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.dtype in (torch.float16, torch.bfloat16):
                originals[tensor], tensor.data = tensor.data, tensor.data.float()

    def restore(*_: object) -> None:
        for tensor, original in originals.items():
            tensor.data = original
        originals.clear()

    with ExitStack() as hooks:
        hooks.callback(restore)  # where a forward ended by an error
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(widen).remove)
            hooks.callback(module.register_forward_hook(restore).remove)
        yield


def distance(result: Tensor, truth: Tensor) -> float:
    """Relative RMS difference of two tensors."""
    return float((result.float() - truth.float()).norm() / truth.float().norm())


def tolerance(model: SpanModel) -> float:
    """Largest relative difference of a right result in the model's precision, on ordinary
    inputs."""
    # Wrong results differ by order 1. In half precision cosines, states and sums are rounded to 3
    # or 4 digits.
    return _TOLERANCE if model.dtype == torch.float32 else 5e-2


# ------------------------------------------------------------------------------
# Numeric check that span maps reproduce a model's recurrent layers, on a few rows.
# ------------------------------------------------------------------------------

_ROWS = 7  # few, so that A is far from zero; the last row is scanned separately, because single rows use another scan


def check_maps(model: SpanModel) -> None:
    """ValueError unless scanning rows and applying their map give the same state in the first
    recurrent layer.

    The installed version of transformers, or a faster scan that it calls, may not support the
    columns of A.
    """
    if next(map_errors(model)) > tolerance(model):
        raise ValueError(
            f"spans.maps with model.name={model.name}: expected recurrent layers that a span takes from state to state "
            "by an affine map; the map of a few rows led elsewhere than the rows themselves"
        )


def map_errors(model: SpanModel) -> Iterator[float]:
    """Relative error of a stored map against a scan of its rows, for each recurrent layer.

    The maximum of two errors: of the recurrent state and of the conv state.
    """
    mixers = [
        getattr(layer, MIXER).mixer for layer in decoder_layers(model.hf) if hasattr(layer, MIXER)
    ]
    for mixer in mixers:
        yield _map_error(model, mixer)


@torch.no_grad()
def _map_error(model: SpanModel, mixer: nn.Module) -> float:
    assert model.state_shape is not None, "a model without recurrent layers has no maps"
    shape, device = replace(model.state_shape, layers=1), model.device
    states = StatePool(shape, model.dtype, device)
    maps = SpanMaps(MapShape(shape, Exact(torch.float32), model.dtype), device)
    scanned, mapped = states.allocate(), states.allocate()
    span, target = maps.working.allocate(), maps.stored.allocate()
    for slot in (scanned, mapped):
        states.recurrent(0, slot).copy_(_random(states.recurrent(0, slot)))
    rows = [MapScan(maps, 0, _ROWS - 1, span, 0), MapScan(maps, _ROWS - 1, _ROWS, span, _ROWS - 1)]
    _run(model, mixer, states, [StateScan(0, _ROWS, scanned, 0)])
    stored: list[Action] = [
        *rows,
        StoreMap(maps, span, _ROWS, target),
        ApplyMap(maps, mapped, 0, _ROWS, SlotRef(maps.stored, target)),
    ]
    _run(model, mixer, states, stored)
    return max(
        distance(state_of(0, mapped), state_of(0, scanned))
        for state_of in (states.recurrent, states.conv)
    )


def _run(model: SpanModel, mixer: nn.Module, states: StatePool, actions: Sequence[Action]) -> None:
    hidden = torch.zeros(1, _ROWS, model.config.hidden_size, dtype=model.dtype, device=model.device)
    Recurrence(states, [actions], model.device).run(0, mixer, _random(hidden))


def _random(like: Tensor) -> Tensor:
    """Deterministic normal random numbers in the shape and type of `like`."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(like)


# ------------------------------------------------------------------------------
# Consistency checks on the parts of an engine: model, pools, policy and key layout.
# ------------------------------------------------------------------------------


def check_components(
    model: SpanModel, pool: PagePool, policy: TreePolicy, key_layout: SpanSettings
) -> None:
    """Raise if model, KV pool, policy and key layout do not fit together."""
    rules, repair = policy.rules, policy.rules.repair
    assert policy.store.tree.block_size == pool.shape.page_size, (
        "the policy's pages are not the pool's"
    )
    private = isinstance(policy, PublishedStudyPolicy)
    assert not (private or rules.last_token), "these rules are the simulator's alone"
    assert rules.copies == key_layout.copies, (
        "policy and engine disagree on whether spans are copied"
    )
    moved = rules.layout is not whole and key_layout.positions != "original"
    assert key_layout.keys != "absolute" or not moved, (
        "absolute keys of spans can only be read in place"
    )
    last = repair.last_check_layer(model.layers)
    if repair.rewrites and not 1 <= repair.check_layer <= last:
        # Keys and values of layer 0 depend on no other token: there is nothing to measure yet.
        raise ValueError(
            f"repair.check_layer={repair.check_layer}: expected a layer from 1 to {last} of {model.name}"
        )
    if repair.probes:
        assert repair.layers and repair.layers[-1] < model.layers, (
            "profiled layers are not the model's"
        )


def check_memory(
    model: SpanModel, policy: TreePolicy, states: StatePool | None, maps: SpanMaps | None
) -> None:
    """Raise if states or maps differ from the model's, or from the sizes that the policy counts."""
    rules = policy.rules
    shape = None if states is None else states.shape
    assert shape == model.state_shape, "the pool of states is not the model's"
    assert rules.needs_states == (states is not None), (
        "policy and model disagree on whether prefixes need states"
    )
    assert states is None or (rules.grid % SCAN_CHUNK == 0), (
        "states lie off the grid that resuming was proven on"
    )
    assert states is None or states.slot_bytes == policy.store.state_bytes, (
        "a state weighs more than it is counted"
    )
    assert (rules.maps is None) == (maps is None), (
        "policy and engine disagree on whether spans have maps"
    )
    assert maps is None or maps.stored.slot_bytes == rules.map_bytes, (
        "a map weighs more than it is counted"
    )
    if maps is not None:
        check_maps(model)
