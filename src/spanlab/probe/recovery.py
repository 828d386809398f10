"""Recoveries: a state at token s is brought to token k, up to which KV is resident; what runs over the gap differs.

`recompute` is the forward of all layers over [s, k), keys and values included. A recurrent layer reads the residual
stream, and that holds the outputs of the attention layers below it. So a replay is exact where attention runs, with
queries of the gap against resident KV; keys and values need no projection, and nothing above the last recurrent block
has to run. Where attention is left out, recurrent layers above it read another residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, apply_rotary_pos_emb

from spanlab.engine.recurrent import MIXER
from spanlab.probe.memory import EMPTY, Memory, cache_of, memory_of, read_on

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Gap:
    """Prompts [N] whose state stands at token `before.tokens`, and whose KV is resident to the end of `ids` [N, T]."""

    model: PreTrainedModel
    before: Memory
    resident: Memory
    ids: Tensor

    @property
    def positions(self) -> Tensor:
        """[T]"""
        return self.before.tokens + torch.arange(self.ids.shape[1])


@dataclass(frozen=True)
class Replay:
    """Which blocks run over a gap beside the recurrent ones.

    `attention`       attention blocks: queries of the gap, resident keys and values
    `attention_mlps`  MLP blocks of attention layers
    `recurrent_mlps`  MLP blocks of recurrent layers
    """

    attention: bool
    attention_mlps: bool
    recurrent_mlps: bool

    def __call__(self, gap: Gap) -> Memory:
        """Resident KV with the state that the replay brings to its end."""
        base: Any = gap.model.base_model
        cache = cache_of(gap.model, replace(gap.before, kv={}))
        hidden = base.embed_tokens(gap.ids)
        rotary = base.rotary_emb(hidden, gap.positions.expand(3, len(gap.ids), -1))
        last = max(gap.before.recurrent)
        for number, layer in enumerate(base.layers[: last + 1]):
            is_recurrent = hasattr(layer, MIXER)
            if is_recurrent:
                hidden = hidden + getattr(layer, MIXER)(layer.input_layernorm(hidden), cache_params=cache)
            elif self.attention:
                hidden = hidden + _attend(layer, hidden, rotary, gap)
            if number < last and (self.recurrent_mlps if is_recurrent else self.attention_mlps):
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        reached = memory_of(cache, gap.resident.tokens)
        return replace(gap.resident, conv=reached.conv, recurrent=reached.recurrent)


def _attend(layer: Qwen3_5DecoderLayer, hidden: Tensor, rotary: Rotary, gap: Gap) -> Tensor:
    """An attention block's output [N, T, H]: no key and no value of the gap is computed."""
    attention, (keys, values) = layer.self_attn, gap.resident.kv[layer.self_attn.layer_idx]
    shape = (*hidden.shape[:2], -1, 2 * attention.head_dim)
    query, gate = attention.q_proj(layer.input_layernorm(hidden)).view(shape).chunk(2, -1)
    query = attention.q_norm(query).transpose(1, 2)
    query, _ = apply_rotary_pos_emb(query, query, *rotary)
    seen = torch.arange(keys.shape[2]) <= gap.positions[:, None]
    read = nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen, scale=attention.scaling, enable_gqa=True
    )
    out: Tensor = attention.o_proj((read.transpose(1, 2) * gate.sigmoid()).flatten(2))
    return out


def no_replay(gap: Gap) -> Memory:
    """The state as it was before the gap, taken for that behind it: a control."""
    return replace(gap.resident, conv=gap.before.conv, recurrent=gap.before.recurrent)


RECOVERIES: dict[str, Callable[[Gap], Memory]] = {
    "resident_kv": Replay(attention=True, attention_mlps=True, recurrent_mlps=True),
    "tail_replay": Replay(attention=False, attention_mlps=True, recurrent_mlps=True),
    "tail_replay, attention layers skipped": Replay(attention=False, attention_mlps=False, recurrent_mlps=True),
    "tail_replay, mixers alone": Replay(attention=False, attention_mlps=False, recurrent_mlps=False),
    "no_replay": no_replay,
}


def captured(model: PreTrainedModel, ids: Tensor, stops: Iterable[int]) -> dict[int, Memory]:
    """What the prefill of `ids` [N, T] holds at every stop and at its end, by number of tokens."""
    found, memory = {}, EMPTY
    for stop in sorted({*stops, ids.shape[1]}):
        found[stop] = memory = read_on(model, memory, ids[:, memory.tokens : stop])
    return found
