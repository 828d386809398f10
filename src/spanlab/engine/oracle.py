"""The oracle: transformers' own eager attention under an explicit mask, with no cache and none of our code in it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from spanlab.engine.hook import Attend, Recur
from spanlab.engine.model import SpanModel
from spanlab.engine.recurrent import Piece, Recurrence
from spanlab.engine.state_pool import StatePool


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of a prompt; those of an independent one see no row of other segments but a common head."""

    start: int
    stop: int
    independent: bool = False


@dataclass(frozen=True, eq=False)
class DenseRun:
    """What a dense forward of N rows gives: logits float32 [N, V]; keys, rotated, and values [layers, N, Hkv, D].

    Keys and values are those of the attention layers.
    """

    logits: Tensor
    keys: Tensor
    values: Tensor


def eager_twin(model: SpanModel) -> PreTrainedModel:
    """The same model with transformers' eager attention, on the same weights; ours is left as it is."""
    tensors = chain(model.hf.parameters(), model.hf.buffers())
    twin = copy.deepcopy(model.hf, {id(tensor): tensor for tensor in tensors})
    twin.set_attn_implementation("eager")
    return twin


def causal_mask(length: int, device: torch.device | str = "cpu") -> Tensor:
    """bool [length, length]: row i sees rows 0..i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def block_mask(segments: Sequence[Segment], head: int = 0, *, device: torch.device | str = "cpu") -> Tensor:
    """bool [N, N] of segments that cover rows [0, N) in order: who sees whom where spans are computed alone.

    A row of an independent segment sees its own segment up to itself, and rows [0, head) that all share (spans computed
    behind a common prefix); every other row sees all rows up to itself.
    """
    mask = causal_mask(segments[-1].stop, device)
    reached = 0
    for segment in segments:
        assert segment.start == reached, "segments leave a gap or overlap"
        reached = segment.stop
        if segment.independent:
            mask[segment.start : segment.stop, min(head, segment.start) : segment.start] = False
    return mask


def dense_logits(hf_model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """Logits float32 [N, V] of N rows, row i at `positions[i]` and seeing the rows where mask[i] is true.

    `hf_model` has eager attention. The mask need not be causal: a row may be given twice, under two masks, which is how
    a repaired token and its first version stand side by side.
    """
    return dense_run(hf_model, ids, mask, positions).logits


@torch.no_grad()
def dense_run(hf_model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor) -> DenseRun:
    """The same with each layer's keys and values."""
    assert hf_model.config._attn_implementation == "eager", "the oracle takes transformers' own attention"
    assert mask.any(-1).all(), "a row sees nothing"
    blocked = torch.zeros(mask.shape, dtype=hf_model.dtype, device=mask.device)
    blocked.masked_fill_(~mask, torch.finfo(hf_model.dtype).min)
    out = hf_model(
        input_ids=ids[None], position_ids=positions[None], attention_mask=blocked[None, None], use_cache=True
    )
    cached = [layer for layer in out.past_key_values.layers if hasattr(layer, "keys")]  # recurrent ones have none
    keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in cached])
    values = torch.stack([layer.values[0].transpose(0, 1) for layer in cached])
    return DenseRun(out.logits[0].float(), keys, values)


def causal_attend(model: SpanModel) -> Attend:
    """An attention for `SpanModel.forward`: all rows are one prompt, and each sees those before it and itself."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
        scale = model.scales[layer]
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def recur_in_pieces(model: SpanModel, cuts: Sequence[int]) -> Recur:
    """Recurrent layers for `SpanModel.forward`: all rows are one prompt, cut into pieces that end at `cuts`."""
    assert model.state_shape is not None, "a model without recurrent layers has no states"
    pool = StatePool(model.state_shape, model.dtype, model.device)
    slot, starts = pool.take(), (0, *cuts[:-1])
    pieces = [Piece(start, stop, slot, start) for start, stop in zip(starts, cuts, strict=True)]
    return Recurrence(pool, [pieces], model.device).run
