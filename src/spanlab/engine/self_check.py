"""Numeric self-check of a model: tests on a few tokens what the support check read from the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.engine.hook import decoder_layers
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import causal_attend, causal_mask, dense_logits, eager_twin, recur_in_parts
from spanlab.engine.rotation import read_rotation
from spanlab_kernels.angles import AngleTable
from spanlab_kernels.rope import rotate

_TOKENS = 24
# where a state is stored and reloaded: on and off the grid, after one token and after many
_CUTS = (64, 65, 101, 128, 141)


def check_model(name: str, model: PreTrainedModel) -> SpanModel:
    """Return a hooked model as a `SpanModel`; ValueError if its outputs contradict the support check.

    1. If attention and recurrent layers return zeros, no layer's input depends on positions. Each layer's query and key
       at position p must then equal those at position 0, rotated by p. This determines the pair layout and detects
       other position embeddings, layer by layer.
    2. With causal attention, and recurrent states that are stored and reloaded on and off the grid, the logits of a few
       tokens must equal those of transformers' forward.
    """
    attention: list[Any] = [layer.self_attn for layer in decoder_layers(model) if hasattr(layer, "self_attn")]
    scales = tuple(module.scaling for module in attention)
    candidate = SpanModel(name, model, read_rotation(model), scales)
    positions, recorded = _positions(candidate), _record(candidate)
    for interleaved in (False, True):
        checked = replace(candidate, rotation=replace(candidate.rotation, interleaved=interleaved))
        if not (wrong := _wrong_layers(checked, positions, recorded)):
            _check_logits(checked)
            return checked
    raise ValueError(
        f"model.name is {name!r}, expected one rotation per position in all layers; "
        f"layer {wrong[0]} rotates its queries or keys differently."
    )


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
    allowed = tolerance(model) + 2e-7 * positions.cpu()  # the model computes angles in float32
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
    states = model.state_shape
    rows = torch.arange(_CUTS[-1] if states else _TOKENS, device=model.device)
    ids = rows % model.vocab_size
    truth = dense_logits(eager_twin(model), ids, causal_mask(len(ids), model.device), rows)
    recur = recur_in_parts(model, _CUTS) if states else None
    logits = model.forward(ids, rows, causal_attend(model), rows, recur=recur)
    if not distance(logits, truth) <= tolerance(model):  # also fails for NaN
        more = ", and recurrent layers that go on from a stored state" if states else ""
        raise ValueError(
            f"model.name is {model.name!r}, expected causal attention over scaled products and nothing else{more}; "
            "its logits differ from those of transformers' own forward."
        )


def distance(result: Tensor, truth: Tensor) -> float:
    """Relative RMS difference of two tensors."""
    return float((result.float() - truth.float()).norm() / truth.float().norm())


def tolerance(model: SpanModel) -> float:
    """Largest relative difference of a right result."""
    # Wrong results differ by order 1. In half precision cosines, states and sums are rounded to 3 or 4 digits.
    return 1e-3 if model.dtype == torch.float32 else 5e-2
