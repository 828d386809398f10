"""FLOPs of replays of a gap relative to recompute, for models whose last layer is attention, such as Qwen3.5.

`resident_kv` omits the projections of keys and values, and everything above the last recurrent block: that layer's MLP
block and the last attention layer. `tail_replay` omits attention blocks too.
"""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.core.rules import attention_block_flops, key_value_flops, mlp_flops
from spanlab.model_spec import ModelSpec


@dataclass(frozen=True)
class Price:
    """FLOPs of a gap's tokens ÷ FLOPs of their recompute, by recovery."""

    model: str
    context: int
    gap: int
    shares: dict[str, float]


def price(model: ModelSpec, context: int, gap: int) -> Price:
    """Return the price of a gap after `context` prompt tokens."""
    recompute = model.prefill_flops(context, context + gap)
    pairs = recompute - gap * model.linear_flops_per_token
    attention, mlp, layers = attention_block_flops(model), mlp_flops(model), model.attention_layers
    keys_values = key_value_flops(model)
    # Keys and values of the last layer are already counted with those of all layers.
    top = gap * (2 * mlp + attention - keys_values) + pairs // layers
    resident = recompute - gap * layers * keys_values - top
    left_out = recompute - gap * (layers * attention + 2 * mlp) - pairs
    skipped = left_out - gap * (layers - 1) * mlp
    alone = skipped - gap * (model.recurrent_layers - 1) * mlp
    names = ("resident_kv", "tail_replay", "tail_replay, attention layers skipped", "tail_replay, mixers alone")
    shares = (flops / recompute for flops in (resident, left_out, skipped, alone))
    return Price(model.name, context, gap, dict(zip(names, shares, strict=True)))
