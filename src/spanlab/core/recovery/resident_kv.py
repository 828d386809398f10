"""The exact replay: all layers that a state at the end of the gap depends on run, with the stored KV.

Queries of the gap read resident keys and values, so that these need no projection. Blocks above the last recurrent
block do not run.
"""

from __future__ import annotations

from spanlab.core.recovery.contract import (
    RECOVERIES,
    Plain,
    Recovery,
    Replay,
    attention_block_flops,
    key_value_flops,
    mlp_flops,
)
from spanlab.model_spec import ModelSpec


@RECOVERIES.register("resident_kv")
def resident_kv(most_tokens: int | None = None, *, model: ModelSpec) -> Recovery:
    """`resident_kv`: no projection of keys and values over the gap, and nothing above the last recurrent block.

    The last layer is one of attention, as in Qwen3.5: it is left out whole, with the MLP block below it.

    `most_tokens`  longest gap that is replayed; None: any
    """
    layers = model.attention_layers
    top = attention_block_flops(model) - key_value_flops(model) + 2 * mlp_flops(model)
    flops = layers * key_value_flops(model) + top
    pair, read = model.attention_flops_per_pair // layers, model.kv_bytes_per_token // layers
    return Plain(Replay(True, flops, pair, read, most_tokens))
