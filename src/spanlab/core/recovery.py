"""Recovery of a recurrent state where stored KV reaches deeper: how the gap between both is closed.

`recompute` computes the gap as if its KV were not stored. A replay reads that KV in place, and advances the state
through the gap with fewer blocks of the model. A backfill loads a deeper state from a lower tier.
"""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.model_spec import ModelSpec
from spanlab.registry import Registry


@dataclass(frozen=True, slots=True)
class Replay:
    """The part of a token's computation that a replayed token of a gap skips.

    `exact`           the state and all that follows are those of recompute
    `token_flops`     FLOPs of a token that do not depend on its position
    `pair_flops`      FLOPs of a query-key pair
    `read_bytes`      KV bytes of each token before a row that the row does not read
    `most_tokens`     a longer gap is recomputed; None: no gap is too long
    """

    exact: bool
    token_flops: int
    pair_flops: int
    read_bytes: int
    most_tokens: int | None = None

    def tokens(self, gap: int) -> int:
        """Return the replayed tokens of a gap: all or none."""
        return gap if self.most_tokens is None or gap <= self.most_tokens else 0

    def left_out(self, start: int, stop: int, alone: bool) -> tuple[int, int]:
        """Return the FLOPs and bytes that tokens `[start, stop)` of a gap skip.

        The KV of the gap is read from memory, which takes the bytes that are not written.

        `alone`  no row behind the gap is in the chunk: such a row would read all KV before it
        """
        rows = stop - start
        flops = rows * self.token_flops + rows * (start + stop + 1) // 2 * self.pair_flops
        return flops, stop * self.read_bytes if alone else 0


@dataclass(frozen=True, slots=True)
class Recovery:
    """How an arm recovers a state; each part is None where the arm does not use it.

    `replay`     advances the state through the gap
    `backfill`   loads deeper states from the tiers of the study: always, or break_even, where that is faster
    """

    replay: Replay | None = None
    backfill: str | None = None


#: `model` is the study's.
RECOVERIES: Registry[Recovery] = Registry("recovery", given=("model",))


def key_value_flops(model: ModelSpec) -> int:
    """Return the FLOPs per token of the key and value projections in one attention layer."""
    return 4 * model.hidden_size * model.kv_heads * model.head_dim


def attention_block_flops(model: ModelSpec) -> int:
    """Return the FLOPs per token of all projections of one attention layer, the output's included."""
    return model.projection_flops_per_token + 2 * model.hidden_size * model.attention_heads * model.head_dim


def mlp_flops(model: ModelSpec) -> int:
    """Return the FLOPs per token of one layer's MLP block, or of its router and the experts that a token passes."""
    if not model.expert_layers:
        return 6 * model.hidden_size * model.intermediate_size
    assert model.expert_layers == model.num_layers, "experts are in every layer or in none"
    shared = model.shared_intermediate_size
    width = model.experts_per_token * model.expert_intermediate_size + shared
    return 2 * model.hidden_size * (3 * width + model.experts + (shared > 0))


@RECOVERIES.register("recompute")
def recompute() -> Recovery:
    """`recompute`: all layers over the gap, keys and values included, as in every engine today."""
    return Recovery()


@RECOVERIES.register("resident_kv")
def resident_kv(most_tokens: int | None = None, *, model: ModelSpec) -> Recovery:
    """`resident_kv`: no projection of keys and values over the gap, and nothing above the last recurrent block.

    Exact: all layers that a state at the end of the gap depends on run, and queries of the gap read resident keys and
    values. The last layer is one of attention, as in Qwen3.5: it is left out whole, with the MLP block below it.

    `most_tokens`  longest gap that is replayed; None: any
    """
    layers = model.attention_layers
    top = attention_block_flops(model) - key_value_flops(model) + 2 * mlp_flops(model)
    flops = layers * key_value_flops(model) + top
    pair, read = model.attention_flops_per_pair // layers, model.kv_bytes_per_token // layers
    return Recovery(Replay(True, flops, pair, read, most_tokens))


@RECOVERIES.register("state_backfill")
def state_backfill(always: bool = False) -> Recovery:
    """`state_backfill`: the deepest state that the tiers of the study have within the KV that is there.

    It was evicted from the device while its KV stayed; `core.policies.backfilled` loads it. Sources:
    vllm-project/vllm#52774, which fetches the state alone from the store, and sgl-project/sglang#40680, which demotes
    states of inner nodes to the host.

    `always`  load it even where computing the gap is faster
    """
    return Recovery(backfill="always" if always else "break_even")


@RECOVERIES.register("tail_replay")
def tail_replay(most_tokens: int | None = None, *, model: ModelSpec) -> Recovery:
    """`tail_replay`: no attention block over the gap, and nothing above the last recurrent block. Not exact.

    A recurrent layer reads the residual stream, which contains the outputs of the attention layers below it. These are
    left out, so every state above the first attention layer is wrong. The last layer is one of attention, as in
    Qwen3.5: two MLP blocks are above the last recurrent block. Source: sgl-project/sglang#40865; compare
    vllm-project/vllm#53041.

    `most_tokens`  longest gap that is replayed; None: any
    """
    flops = model.attention_layers * attention_block_flops(model) + 2 * mlp_flops(model)
    return Recovery(Replay(False, flops, model.attention_flops_per_pair, model.kv_bytes_per_token, most_tokens))
