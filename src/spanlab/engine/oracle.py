"""The oracle: transformers' eager attention under an explicit mask, without a KV cache or spanlab's attention."""

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
from spanlab.engine.recurrent import Recurrence, StateScan
from spanlab.engine.state_pool import StatePool


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of a prompt; rows of an independent segment attend to it and to a common head only."""

    start: int
    stop: int
    independent: bool = False


@dataclass(frozen=True, eq=False)
class DenseRun:
    """Results of a dense forward of N rows: float32 logits [N, V]; rotated keys, and values [layers, N, Hkv, D].

    `layers` counts attention layers only.
    """

    logits: Tensor
    keys: Tensor
    values: Tensor


def eager_twin(model: SpanModel) -> PreTrainedModel:
    """A copy of the model with transformers' eager attention that shares the weights; `model` is unchanged."""
    tensors = chain(model.hf.parameters(), model.hf.buffers())
    twin = copy.deepcopy(model.hf, {id(tensor): tensor for tensor in tensors})
    twin.set_attn_implementation("eager")
    return twin


def causal_mask(length: int, device: torch.device | str = "cpu") -> Tensor:
    """bool [length, length]: row i attends to rows 0..i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def block_mask(segments: Sequence[Segment], head: int = 0, *, device: torch.device | str = "cpu") -> Tensor:
    """Attention mask, bool [N, N], of segments that cover rows [0, N) in order, with spans computed alone.

    A row of an independent segment attends to its segment up to itself, and to rows [0, head), which all segments share
    (spans computed after a common prefix). Every other row attends to all rows up to itself.
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
    """Logits float32 [N, V] of N rows; row i is at `positions[i]` and attends to the rows where mask[i] is true.

    `hf_model` has eager attention. The mask need not be causal: a token may appear twice under two masks, such as a
    repaired token and its original version.
    """
    return dense_run(hf_model, ids, mask, positions).logits


@torch.no_grad()
def dense_run(hf_model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor) -> DenseRun:
    """As `dense_logits`, with each layer's keys and values."""
    assert hf_model.config._attn_implementation == "eager", "the oracle needs transformers' eager attention"
    assert mask.any(-1).all(), "a row sees nothing"
    blocked = torch.zeros(mask.shape, dtype=hf_model.dtype, device=mask.device)
    blocked.masked_fill_(~mask, torch.finfo(hf_model.dtype).min)
    out = hf_model(
        input_ids=ids[None], position_ids=positions[None], attention_mask=blocked[None, None], use_cache=True
    )
    cached = [layer for layer in out.past_key_values.layers if hasattr(layer, "keys")]  # recurrent layers have none
    keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in cached])
    values = torch.stack([layer.values[0].transpose(0, 1) for layer in cached])
    return DenseRun(out.logits[0].float(), keys, values)


def causal_attend(model: SpanModel) -> Attend:
    """Causal attention for `SpanModel.forward`; all rows are one prompt."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
        scale = model.scales[layer]
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def recur_in_parts(model: SpanModel, cuts: Sequence[int], conv: torch.dtype) -> Recur:
    """Recurrent layers for `SpanModel.forward`: all rows are one prompt, scanned in parts that end at `cuts`.

    `conv`  data type of the stored conv states.
    """
    assert model.state_shape is not None, "a model without recurrent layers has no states"
    pool = StatePool(model.state_shape, conv, model.device)
    slot, starts = pool.allocate(), (0, *cuts[:-1])
    scans = [StateScan(start, stop, slot, start) for start, stop in zip(starts, cuts, strict=True)]
    return Recurrence(pool, [scans], model.device).run
