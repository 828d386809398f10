"""Recoveries of a state from token s to token k, up to which KV is resident, by the blocks that run over the gap.

`recompute` is the forward of all layers over [s, k), keys and values included. A recurrent layer reads the residual
stream, which includes the outputs of the attention layers below it. So a replay is exact if attention runs, with
queries of the gap against resident KV; keys and values need no projection, and no block above the last recurrent block
has to run. If attention is skipped, recurrent layers above it read a different residual stream.
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
from spanlab.probe.memory import EMPTY, Memory, cache_of, extend_memory, memory_of

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Gap:
    """A gap of tokens `ids` [N, T]: the state is that of token `before.tokens`, and KV is resident to the end."""

    model: PreTrainedModel
    before: Memory
    resident: Memory
    ids: Tensor

    @property
    def positions(self) -> Tensor:
        """Positions of the tokens of the gap, [T]."""
        return self.before.tokens + torch.arange(self.ids.shape[1])


@dataclass(frozen=True)
class Replay:
    """The blocks that run over a gap in addition to the recurrent ones.

    `attention`       attention blocks: queries of the gap, resident keys and values
    `attention_mlps`  MLP blocks of attention layers
    `recurrent_mlps`  MLP blocks of recurrent layers
    """

    attention: bool
    attention_mlps: bool
    recurrent_mlps: bool

    def __call__(self, gap: Gap) -> Memory:
        """Resident KV with the state at the end of the gap after the replay."""
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
        replayed = memory_of(cache, gap.resident.tokens)
        return replace(gap.resident, conv=replayed.conv, recurrent=replayed.recurrent)


def _attend(layer: Qwen3_5DecoderLayer, hidden: Tensor, rotary: Rotary, gap: Gap) -> Tensor:
    """Output [N, T, H] of an attention block, without computing keys and values of the gap."""
    attention, (keys, values) = layer.self_attn, gap.resident.kv[layer.self_attn.layer_idx]
    shape = (*hidden.shape[:2], -1, 2 * attention.head_dim)
    query, gate = attention.q_proj(layer.input_layernorm(hidden)).view(shape).chunk(2, -1)
    query = attention.q_norm(query).transpose(1, 2)
    query, _ = apply_rotary_pos_emb(query, query, *rotary)
    visible = torch.arange(keys.shape[2]) <= gap.positions[:, None]
    attended = nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=visible, scale=attention.scaling, enable_gqa=True
    )
    out: Tensor = attention.o_proj((attended.transpose(1, 2) * gate.sigmoid()).flatten(2))
    return out


def no_replay(gap: Gap) -> Memory:
    """Resident KV with the state before the gap: a control."""
    return replace(gap.resident, conv=gap.before.conv, recurrent=gap.before.recurrent)


RECOVERIES: dict[str, Callable[[Gap], Memory]] = {
    "resident_kv": Replay(attention=True, attention_mlps=True, recurrent_mlps=True),
    "tail_replay": Replay(attention=False, attention_mlps=True, recurrent_mlps=True),
    "tail_replay, attention layers skipped": Replay(attention=False, attention_mlps=False, recurrent_mlps=True),
    "tail_replay, mixers alone": Replay(attention=False, attention_mlps=False, recurrent_mlps=False),
    "no_replay": no_replay,
}


def capture_memories(model: PreTrainedModel, ids: Tensor, stops: Iterable[int]) -> dict[int, Memory]:
    """Memories of the prefill of `ids` [N, T] at every stop and at its end, by number of tokens."""
    memories, memory = {}, EMPTY
    for stop in sorted({*stops, ids.shape[1]}):
        memories[stop] = memory = extend_memory(model, memory, ids[:, memory.tokens : stop])
    return memories
