"""Whether a model's recurrent layers really are what their maps take them for, shown on a few rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from spanlab.engine.hook import decoder_layers
from spanlab.engine.map_forms import Exact
from spanlab.engine.map_pool import MapShape, SpanMaps
from spanlab.engine.model import SpanModel
from spanlab.engine.recurrent import MIXER, Action, Piece, Recurrence
from spanlab.engine.span_actions import Fold, SpanPiece, StoreMap
from spanlab.engine.state_pool import StatePool

_ROWS = 7  # few, for A is still far from zero, and the last by itself, as a single row has a scan of its own


def prove_maps(model: SpanModel) -> None:
    """ValueError unless rows take a random state to where the map of the same rows takes it, in the first such layer.

    The installed version of transformers, or a faster scan that it calls, may not let A through.
    """
    if next(map_errors(model)) > (1e-3 if model.dtype == torch.float32 else 5e-2):
        raise ValueError(
            f"spans.maps with model.name={model.name}: expected recurrent layers that a span takes from state to state "
            "by an affine map; the map of a few rows led elsewhere than the rows themselves"
        )


def map_errors(model: SpanModel) -> Iterator[float]:
    """For each recurrent layer, how far a stored map leads from where its rows lead, relative to the state there.

    The larger of two parts: the recurrent state, and the last inputs of the convolution.
    """
    mixers = [getattr(layer, MIXER).mixer for layer in decoder_layers(model.hf) if hasattr(layer, MIXER)]
    for mixer in mixers:
        yield _map_error(model, mixer)


@torch.no_grad()
def _map_error(model: SpanModel, mixer: nn.Module) -> float:
    assert model.state_shape is not None, "a model without recurrent layers has no maps"
    shape, device = replace(model.state_shape, layers=1), model.device
    states = StatePool(shape, model.dtype, device)
    maps = SpanMaps(MapShape(shape, Exact(torch.float32), model.dtype), device)
    through, folded, span, kept = states.take(), states.take(), maps.working.take(), maps.stored.take()
    for slot in (through, folded):
        states.recurrent(0, slot).copy_(_random(states.recurrent(0, slot)))
    rows = [SpanPiece(maps, 0, _ROWS - 1, span, 0), SpanPiece(maps, _ROWS - 1, _ROWS, span, _ROWS - 1)]
    _run(model, mixer, states, [Piece(0, _ROWS, through, 0)])
    stored: list[Action] = [*rows, StoreMap(maps, span, _ROWS, kept), Fold(maps, folded, 0, _ROWS, stored=kept)]
    _run(model, mixer, states, stored)
    return max(_distance(part(0, folded), part(0, through)) for part in (states.recurrent, states.conv))


def _distance(found: Tensor, truth: Tensor) -> float:
    return float((found.float() - truth.float()).norm() / truth.float().norm())


def _run(model: SpanModel, mixer: nn.Module, states: StatePool, actions: Sequence[Action]) -> None:
    hidden = torch.zeros(1, _ROWS, model.config.hidden_size, dtype=model.dtype, device=model.device)
    Recurrence(states, [actions], model.device).run(0, mixer, _random(hidden))


def _random(like: Tensor) -> Tensor:
    """The same normal numbers for the same shape."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(like)
