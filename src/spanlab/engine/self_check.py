"""The self-check of a model: what the support check read from settings, shown on a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.engine.hook import decoder_layers
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import causal_attend, causal_mask, dense_logits, eager_twin, recur_in_pieces
from spanlab.engine.rotation import read_rotation
from spanlab_kernels.angles import AngleTable
from spanlab_kernels.rope import rotate

_TOKENS = 24
_CUTS = (64, 65, 101, 128, 141)  # where a state is put down: on the grid and off it, after one token and after many


def prove(name: str, model: PreTrainedModel) -> SpanModel:
    """A model that carries our hooks, as ours; ValueError if it computes anything but what the support check assumed.

    1. With attention and recurrent layers that give nothing, no layer's input depends on positions; then each layer's
       query and key at position p must be those at position 0, rotated by p. That finds the pairs of channels, and
       every kind of embedding that is no such rotation, layer by layer.
    2. With plain causal attention of ours, and recurrent states that are put down and taken up again, on the grid and
       off it, the logits of a few tokens must be those of transformers' own forward.
    """
    attention: list[Any] = [layer.self_attn for layer in decoder_layers(model) if hasattr(layer, "self_attn")]
    scales = tuple(module.scaling for module in attention)
    ours = SpanModel(name, model, read_rotation(model), scales)
    positions, recorded = _positions(ours), _record(ours)
    for interleaved in (False, True):
        proven = replace(ours, rotation=replace(ours.rotation, interleaved=interleaved))
        if not (wrong := _unlike_rotation(proven, positions, recorded)):
            _check_logits(proven)
            return proven
    raise ValueError(
        f"model.name is {name!r}, expected one rotation per position in all layers; "
        f"layer {wrong[0]} rotates its queries or keys differently."
    )


def _positions(model: SpanModel) -> Tensor:
    """0, 1, 3, 7, … below the context, and the context's last."""
    below = [2**power - 1 for power in range(model.context.bit_length())]
    return torch.tensor([*below, model.context - 1], device=model.device)


def _record(model: SpanModel) -> list[tuple[Tensor, Tensor]]:
    """Each layer's query and key [positions, H, D] of one token at all positions, where attention gives nothing."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        expected = (len(positions), model.kv_heads, model.head_dim)
        if layer != len(seen) or key.shape != expected or value.shape != expected:
            raise ValueError(
                f"model.name is {model.name!r}, expected one attention per layer, with keys and values "
                f"of {model.kv_heads} heads of {model.head_dim} channels; layer {layer} differs."
            )
        seen[layer] = (query, key)
        return torch.zeros_like(query)

    positions = _positions(model)
    token = torch.full_like(positions, model.vocab_size // 2)
    model.forward(token, positions, attend, positions[:0], recur=lambda layer, mixer, hidden: torch.zeros_like(hidden))
    if len(seen) != model.layers:
        raise ValueError(
            f"model.name is {model.name!r}, expected {model.layers} layers whose attention goes through transformers' "
            f"interface; {len(seen)} did."
        )
    return [seen[layer] for layer in range(model.layers)]


def _unlike_rotation(model: SpanModel, positions: Tensor, recorded: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """Layers where a query or key at one of the positions is not that at position 0, rotated."""
    angles = positions.cpu().double()[:, None] * model.rotation.frequencies
    table = AngleTable(angles.cos().float().to(model.device), angles.sin().float().to(model.device))
    rows = torch.arange(len(positions), device=model.device)
    allowed = _tolerance(model) + 2e-7 * positions.cpu()  # the model's own angles are float32
    wrong = []
    for layer, states in enumerate(recorded):
        for state in states:
            still = state[:1].expand_as(state).contiguous()
            rotated = rotate(still, rows, table, interleaved=model.rotation.interleaved)
            distances = torch.tensor([distance(*pair) for pair in zip(state, rotated, strict=True)])
            if not (distances <= allowed).all():
                wrong.append(layer)
    return wrong


def _check_logits(model: SpanModel) -> None:
    states = model.state_shape
    rows = torch.arange(_CUTS[-1] if states else _TOKENS, device=model.device)
    ids = rows % model.vocab_size
    truth = dense_logits(eager_twin(model), ids, causal_mask(len(ids), model.device), rows)
    recur = recur_in_pieces(model, _CUTS) if states else None
    found = model.forward(ids, rows, causal_attend(model), rows, recur=recur)
    if not distance(found, truth) <= _tolerance(model):  # nor if it is no number
        more = ", and recurrent layers that go on from a stored state" if states else ""
        raise ValueError(
            f"model.name is {model.name!r}, expected causal attention over scaled products and nothing else{more}; "
            "its logits differ from those of transformers' own forward."
        )


def distance(result: Tensor, truth: Tensor) -> float:
    """Relative RMS difference."""
    return float((result.float() - truth.float()).norm() / truth.float().norm())


def _tolerance(model: SpanModel) -> float:
    # What is wrong is off by order 1. In half precision cosines, states and sums are rounded to 3 digits or 4.
    return 1e-3 if model.dtype == torch.float32 else 5e-2
