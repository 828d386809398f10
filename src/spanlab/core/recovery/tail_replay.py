"""Tail replay: only recurrent and MLP blocks run over the gap. Its results are not exact.

A recurrent layer reads the residual stream, which contains the outputs of the attention layers below it. These are
left out, so every state above the first attention layer is wrong. Source: sgl-project/sglang#40865; compare
vllm-project/vllm#53041.
"""

from __future__ import annotations

from spanlab.core.recovery.contract import RECOVERIES, Plain, Recovery, Replay, attention_block_flops, mlp_flops
from spanlab.model_spec import ModelSpec


@RECOVERIES.register("tail_replay")
def tail_replay(most_tokens: int | None = None, *, model: ModelSpec) -> Recovery:
    """`tail_replay`: no attention block over the gap, and nothing above the last recurrent block.

    The last layer is one of attention, as in Qwen3.5: two MLP blocks are above the last recurrent block.

    `most_tokens`  longest gap that is replayed; None: any
    """
    flops = model.attention_layers * attention_block_flops(model) + 2 * mlp_flops(model)
    return Plain(Replay(False, flops, model.attention_flops_per_pair, model.kv_bytes_per_token, most_tokens))
