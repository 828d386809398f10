"""Hooks of a transformers model: its attention, its recurrent layers, row selection, and loading
without bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from huggingface_hub.utils import enable_progress_bars  # type: ignore[attr-defined]  # not named as exported
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import logging

ATTENTION = "spanlab"

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, query[T, Hq, D], key[T, Hkv, D], value[T, Hkv, D]) -> out[T, Hq, D], in the order
of packed rows.

Query and key are rotated by the rotations passed to the forward. They may be strided views; their
last axis is dense. `layer` is an index among attention layers only.
"""

Recur = Callable[[int, nn.Module, Tensor], Tensor]
"""recur(layer, mixer, hidden[1, T, H]) -> out[1, T, H], in the order of packed rows; `mixer` is
transformers' module.

`layer` is an index among recurrent layers only.
"""

Keep = Callable[[int], Tensor | None]
"""keep(layer) -> indices, int64 on the model's device, into the rows that reach `layer` (>= 1);
None keeps all."""

Projected = Callable[[int, Tensor, Tensor, Tensor], None]
"""projected(layer, query, key, value): called with the projections of all rows that reach a layer,
as in `Attend`."""

Project = Callable[[int], Projected | None]
"""project(layer >= 1) -> a callback for the layer's projections before `keep` is called, or None.

The kept rows are projected again when the layer runs.
"""


@dataclass(slots=True)
class Forward:
    """Callbacks of one forward, passed through the model's keyword arguments, so that forwards
    share no state.

    `order`       for each decoder layer, its index among the layers of the same kind, attention or
                  recurrent
    `row_kwargs`  keyword arguments for the kept rows; the model's loop still passes every layer
                  those of all rows.
    """

    attend: Attend
    order: Sequence[int]
    keep: Keep | None = None
    recur: Recur | None = None
    project: Project | None = None
    row_kwargs: dict[str, Any] = field(default_factory=dict)


def register() -> None:
    """Register spanlab's attention with transformers under `ATTENTION`.

    No mask function is registered: without one, transformers builds no mask. With one, it would
    first search the position ids for packed sequences, which synchronizes with the device.
    """
    AttentionInterface.register(ATTENTION, _attention)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a model, both attention and recurrent."""
    layers = model.base_model.layers
    assert isinstance(layers, nn.ModuleList), (
        "transformers' causal models have a list of decoder layers"
    )
    return layers


def hook_rows(model: PreTrainedModel) -> None:
    """Add a row-selection hook to every decoder layer but the first."""
    for layer, module in enumerate(decoder_layers(model)):
        if layer:
            module.register_forward_pre_hook(partial(_drop_rows, layer), with_kwargs=True)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention [1, H, T, D] -> [1, T, Hq, D], with the signature of transformers'
    interface."""
    forward: Forward | None = kwargs.get("span_forward")
    if attention_mask is not None or forward is None:
        config: Any = module.config
        kind = config.model_type
        fault = "builds masks of its own" if forward else "keeps arguments from them"
        raise ValueError(
            f"Models of type {kind!r} cannot be run: what calls their attention layers {fault}."
        )
    rows = (states[0].transpose(0, 1) for states in (query, key, value))
    layer: Any = module.layer_idx
    return forward.attend(forward.order[layer], *rows)[None], None


def _drop_rows(
    layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pre-hook of a decoder layer: select the kept rows of hidden states, cosines and sines, all
    [1, T, …]."""
    forward: Forward | None = kwargs.get("span_forward")
    if forward is None or forward.keep is None:
        return None
    kwargs = kwargs | forward.row_kwargs
    projected = None if forward.project is None else forward.project(layer)
    if projected is not None:
        _run_projections(module, args, kwargs, projected)
    rows = forward.keep(layer)
    if rows is not None:
        hidden, *rest = args
        args = (hidden.index_select(1, rows), *rest)
        cos, sin = kwargs["position_embeddings"]
        forward.row_kwargs["position_embeddings"] = (
            cos.index_select(1, rows),
            sin.index_select(1, rows),
        )
        forward.row_kwargs["position_ids"] = kwargs["position_ids"].index_select(1, rows)
    return args, kwargs | forward.row_kwargs


class _ProjectionsDone(Exception):  # noqa: N818 - control flow, no error
    """Stops a layer after its query, key and value projections."""


def _run_projections(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], projected: Projected
) -> None:
    """Run a decoder layer, without its hooks, up to its attention."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        projected(layer, query, key, value)
        raise _ProjectionsDone

    with suppress(_ProjectionsDone):
        module.forward(
            *args, **kwargs | {"span_forward": replace(kwargs["span_forward"], attend=attend)}
        )


# ------------------------------------------------------------------------------
# RoPE parameters of a model, read from its rotary module.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rotation:
    """RoPE of all layers: R(p) rotates channel pair i of each head by p · frequencies[i] radians.

    The model multiplies queries and keys by YaRN's attention factor, at any position, so later
    rotations omit it.

    `frequencies`  float64 [rotary_dim / 2] on the CPU, radians per position, including the model's
                   scaling.
    `interleaved`  channel pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
    """

    frequencies: Tensor
    interleaved: bool = False


def read_rotation(model: PreTrainedModel) -> Rotation:
    """Read the rotation of a model that passed the support check."""
    rotary: Any = model.base_model.rotary_emb
    return Rotation(rotary.inv_freq.detach().to("cpu", torch.float64))


# ------------------------------------------------------------------------------
# Memory layout of weight matrices on the CPU.
# ------------------------------------------------------------------------------


def store_by_input(model: PreTrainedModel) -> None:
    """Store float32 weights [out, in] of decoder layers in column-major order, on the CPU only.

    torch's product of a few rows with such a weight takes 0.7 to 0.9 times as long, and that of
    hundreds of rows as long as before; prompts with cached prefixes compute few rows. The output
    head is unchanged: one row reads it, and it may be the embedding table.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return
    for module in decoder_layers(model).modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


# ------------------------------------------------------------------------------
# Loading of weights without transformers' progress bar.
# ------------------------------------------------------------------------------


@contextmanager
def no_weight_bars() -> Iterator[None]:
    """Hide the progress bar of weight loading, which takes seconds; downloads keep the hub's
    progress bar."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    enable_progress_bars()  # the call above disables the hub's bars too
    try:
        yield
    finally:
        logging.enable_progress_bar()
