"""The one place where a transformers model calls us: its attention, its recurrent layers, and the rows that go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

ATTENTION = "spanlab"

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, query[T, Hq, D], key[T, Hkv, D], value[T, Hkv, D]) -> out[T, Hq, D], rows as packed.

Query and key come rotated by the rotations given to the forward. They may be strided views; their last axis is dense.
Attention layers are counted from 0, as if there were no others.
"""

Recur = Callable[[int, nn.Module, Tensor], Tensor]
"""recur(layer, mixer, hidden[1, T, H]) -> out[1, T, H], rows as packed; `mixer` is transformers' own recurrent module.

Recurrent layers are counted from 0, as if there were no others.
"""

Keep = Callable[[int], Tensor | None]
"""keep(layer) -> row indices, int64 on the model's device, into the rows that reach `layer` (>= 1); None keeps all."""

Projected = Callable[[int, Tensor, Tensor, Tensor], None]
"""projected(layer, query, key, value) of all rows that reach a layer, as `Attend` gets them."""

Project = Callable[[int], Projected | None]
"""project(layer >= 1) -> what takes the layer's projections before `keep` is asked about it; None: nothing does.

Rows that then are kept are projected a second time, with the layer.
"""


@dataclass(slots=True)
class Forward:
    """What one forward carries through the model's keyword arguments, so that two forwards never share anything.

    `order`  for each decoder layer, its rank among those of its kind, attention or recurrent
    `kept`   what belongs to the rows that are left: the model's loop goes on handing every layer that of all rows.
    """

    attend: Attend
    order: Sequence[int]
    keep: Keep | None = None
    recur: Recur | None = None
    project: Project | None = None
    kept: dict[str, Any] = field(default_factory=dict)


def register() -> None:
    """Make our attention known to transformers under `ATTENTION`.

    No mask function is registered beside it: for a name without one, transformers builds no mask at all, whereas with
    one it would first search the position ids for packed sequences, and wait for the device to do so.
    """
    AttentionInterface.register(ATTENTION, _attention)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a model, attention and recurrent ones."""
    layers = model.base_model.layers
    assert isinstance(layers, nn.ModuleList), "transformers' causal models all have one"
    return layers


def hook_rows(model: PreTrainedModel) -> None:
    """Let every decoder layer but the first ask the running forward which rows to go on with."""
    for layer, module in enumerate(decoder_layers(model)):
        if layer:
            module.register_forward_pre_hook(partial(_drop_rows, layer), with_kwargs=True)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
) -> tuple[Tensor, None]:
    """One layer's attention [1, H, T, D] -> [1, T, Hq, D], in the form that transformers asks for."""
    forward: Forward | None = rest.get("span_forward")
    if attention_mask is not None or forward is None:
        config: Any = module.config
        kind, fault = config.model_type, "builds masks of its own" if forward else "keeps arguments from them"
        raise ValueError(f"Models of type {kind!r} cannot be run: what calls their attention layers {fault}.")
    rows = (states[0].transpose(0, 1) for states in (query, key, value))
    layer: Any = module.layer_idx
    return forward.attend(forward.order[layer], *rows)[None], None


def _drop_rows(
    layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a decoder layer: its hidden states, cosines and sines, all [1, T, …], for the rows to go on with."""
    forward: Forward | None = kwargs.get("span_forward")
    if forward is None or forward.keep is None:
        return None
    kwargs = kwargs | forward.kept
    projected = None if forward.project is None else forward.project(layer)
    if projected is not None:
        _run_projections(module, args, kwargs, projected)
    rows = forward.keep(layer)
    if rows is not None:
        hidden, *others = args
        args = (hidden.index_select(1, rows), *others)
        cos, sin = kwargs["position_embeddings"]
        forward.kept["position_embeddings"] = (cos.index_select(1, rows), sin.index_select(1, rows))
        forward.kept["position_ids"] = kwargs["position_ids"].index_select(1, rows)
    return args, kwargs | forward.kept


class _Enough(Exception):  # noqa: N818 - no error
    """Ends a layer whose queries, keys and values are known."""


def _run_projections(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], projected: Projected) -> None:
    """Run a decoder layer, without its hooks, up to its attention."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        projected(layer, query, key, value)
        raise _Enough

    with suppress(_Enough):
        module.forward(*args, **kwargs | {"span_forward": replace(kwargs["span_forward"], attend=attend)})
