"""Numeric self-check of a model: tests on a few tokens what the support check read from the config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanlab.engine.hook import decoder_layers
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import causal_attend, eager_twin, recur_in_parts
from spanlab.engine.rotation import read_rotation
from spanlab_kernels.angles import AngleTable
from spanlab_kernels.rope import rotate

# drawn from the whole vocabulary: the first ids are often special tokens, whose logits amplify rounding
_TOKENS = 48
# largest relative difference in float32; wrong results differ by order 1
_TOLERANCE = 1e-3
# Rounding in half precision, as a multiple of transformers' own: two right forwards differ in the order of their sums.
_SPREAD = 4
# where a state is stored and reloaded: on and off the grid, after one token and after many
_CUTS = (64, 65, 101, 128, 141)


def check_model(name: str, model: PreTrainedModel) -> SpanModel:
    """Return a hooked model as a `SpanModel`; ValueError if its outputs contradict the support check.

    1. If attention and recurrent layers return zeros, no layer's input depends on positions. Each layer's query and key
       at position p must then equal those at position 0, rotated by p. This determines the pair layout and detects
       other position embeddings, layer by layer.
    2. With causal attention, and recurrent states that are stored and reloaded on and off the grid, the logits of a few
       tokens must equal those of transformers' forward.
    3. In half precision, these logits may differ from those in float32 by no more than transformers' own do.

    The first two run in float32 for every model, so that rounding hides no fault.
    """
    attention: list[Any] = [layer.self_attn for layer in decoder_layers(model) if hasattr(layer, "self_attn")]
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
    """Record each layer's query and key [positions, H, D] of one token at all positions, with zero attention."""
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
    model.forward(token, positions, attend, positions[:0], recur=lambda layer, mixer, hidden: torch.zeros_like(hidden))
    if len(recorded) != model.layers:
        raise ValueError(
            f"model.name is {model.name!r}, expected {model.layers} layers whose attention goes through transformers' "
            f"interface; {len(recorded)} did."
        )
    return [recorded[layer] for layer in range(model.layers)]


def _wrong_layers(model: SpanModel, positions: Tensor, recorded: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
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
    ids = torch.randint(model.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).to(model.device)
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
def _logits(model: SpanModel, twin: PreTrainedModel, ids: Tensor, states: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits [N, V] of one prompt: with spanlab's hooks and conv states in `states`, and of transformers' forward."""
    rows = torch.arange(len(ids), device=model.device)
    recur = recur_in_parts(model, _CUTS, states) if model.state_shape else None
    ours = model.forward(ids, rows, causal_attend(model), rows, recur=recur)
    theirs = twin(input_ids=ids[None], use_cache=False).logits[0]  # under the masks that transformers builds
    return ours, theirs.float()


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Run a model's forwards in float32, with one decoder layer converted at a time; its weights are unchanged.

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
    """Largest relative difference of a right result in the model's precision, on ordinary inputs."""
    # Wrong results differ by order 1. In half precision cosines, states and sums are rounded to 3 or 4 digits.
    return _TOLERANCE if model.dtype == torch.float32 else 5e-2
