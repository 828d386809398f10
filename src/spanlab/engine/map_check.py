"""Numeric check that span maps reproduce a model's recurrent layers, on a few rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from spanlab.engine.conv_windows import SlotRef
from spanlab.engine.hook import decoder_layers
from spanlab.engine.map_forms import Exact
from spanlab.engine.map_pool import MapShape, SpanMaps
from spanlab.engine.model import SpanModel
from spanlab.engine.recurrent import MIXER, Action, Recurrence, StateScan
from spanlab.engine.self_check import distance, tolerance
from spanlab.engine.span_actions import ApplyMap, MapScan, StoreMap
from spanlab.engine.state_pool import StatePool

_ROWS = 7  # few, so that A is far from zero; the last row is scanned separately, because single rows use another scan


def check_maps(model: SpanModel) -> None:
    """ValueError unless scanning rows and applying their map give the same state in the first recurrent layer.

    The installed version of transformers, or a faster scan that it calls, may not support the columns of A.
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
    mixers = [getattr(layer, MIXER).mixer for layer in decoder_layers(model.hf) if hasattr(layer, MIXER)]
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
    return max(distance(state_of(0, mapped), state_of(0, scanned)) for state_of in (states.recurrent, states.conv))


def _run(model: SpanModel, mixer: nn.Module, states: StatePool, actions: Sequence[Action]) -> None:
    hidden = torch.zeros(1, _ROWS, model.config.hidden_size, dtype=model.dtype, device=model.device)
    Recurrence(states, [actions], model.device).run(0, mixer, _random(hidden))


def _random(like: Tensor) -> Tensor:
    """Deterministic normal random numbers in the shape and type of `like`."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(like)
