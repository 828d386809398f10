"""FLOPs of a gap's replays beside recompute, for models whose last layer is of attention, as Qwen3.5's is.

Of recompute, `resident_kv` leaves out the projections of keys and values, and what stands above the last recurrent
block: the MLP block beside it and the last attention layer. `tail_replay` leaves out attention blocks too.
"""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.core.recovery.contract import attention_block_flops, key_value_flops, mlp_flops
from spanlab.model_spec import ModelSpec


@dataclass(frozen=True)
class Price:
    """FLOPs of the tokens of a gap ÷ those of recompute, by recovery."""

    model: str
    context: int
    gap: int
    shares: dict[str, float]


def price(model: ModelSpec, context: int, gap: int) -> Price:
    """The price for a gap behind `context` prompt tokens."""
    whole = model.prefill_flops(context, context + gap)
    pairs = whole - gap * model.linear_flops_per_token
    attention, mlp, layers = attention_block_flops(model), mlp_flops(model), model.attention_layers
    keys_values = key_value_flops(model)
    # The last layer's keys and values are among those of all layers already.
    top = gap * (2 * mlp + attention - keys_values) + pairs // layers
    resident = whole - gap * layers * keys_values - top
    left_out = whole - gap * (layers * attention + 2 * mlp) - pairs
    skipped = left_out - gap * (layers - 1) * mlp
    alone = skipped - gap * (model.recurrent_layers - 1) * mlp
    names = ("resident_kv", "tail_replay", "tail_replay, attention layers skipped", "tail_replay, mixers alone")
    shares = (flops / whole for flops in (resident, left_out, skipped, alone))
    return Price(model.name, context, gap, dict(zip(names, shares, strict=True)))
