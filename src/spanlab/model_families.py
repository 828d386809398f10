"""Sizes that some families give in keys of their own: heads of attention, blocks in common, streams and adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from spanlab.model_config import BOTH, FULL, MLP, MOE, WINDOW, ModelConfig


class Heads(NamedTuple):
    """Heads of queries and of keys, and the channels of a key and of a value."""

    queries: int
    stored: int
    key: int
    value: int

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes in a specification; those that follow from others are left out."""
        sizes = {"attention_heads": self.queries, "kv_heads": self.stored, "head_dim": self.key}
        if self.key == self.value:
            return sizes
        return sizes | {"kv_size": self.kv_size, "pair_size": self.pair_size}

    @property
    def kv_size(self) -> int:
        """Numbers stored per token."""
        return self.stored * (self.key + self.value)

    @property
    def pair_size(self) -> int:
        """Multiplications per query and key."""
        return self.queries * (self.key + self.value)


HeadsOf = Callable[[ModelConfig, bool], Heads]


def heads_of(config: ModelConfig, own_head_dim: bool) -> Heads:
    heads = config.integer("num_attention_heads")
    stored = _kv_heads(config, heads)
    width = config.integer("head_dim") if own_head_dim else config.integer_or("head_dim", _share(config, heads))
    return Heads(heads, stored, width, width)


def _kv_heads(config: ModelConfig, heads: int) -> int:
    """Number of KV heads: null means one per query head, and so does a missing key of a Llama model."""
    if "num_key_value_heads" in config.keys or config.get("model_type") == "llama":
        return config.integer_or("num_key_value_heads", heads)
    return config.integer("num_key_value_heads")


def _share(config: ModelConfig, heads: int) -> int:
    width = config.integer("hidden_size")
    if width % heads and config.get("head_dim") is None:
        raise config.error("hidden_size", f"a multiple of num_attention_heads={heads}, or head_dim")
    return width // heads


def mimo_heads(config: ModelConfig, own_head_dim: bool) -> Heads:
    heads, stored, width = (config.integer(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    return Heads(heads, stored, width, config.integer_or("v_head_dim", width))


def mimo_window_heads(config: ModelConfig, own_head_dim: bool) -> Heads:
    """A window has heads of its own; in files of transformers, twice as many of keys as other layers."""
    full = mimo_heads(config, own_head_dim)
    return Heads(
        config.integer_or("swa_num_attention_heads", full.queries),
        config.integer_or("swa_num_key_value_heads", 2 * full.stored),
        config.integer_or("swa_head_dim", full.key),
        config.integer_or("swa_v_head_dim", full.value),
    )


def step_heads(config: ModelConfig, own_head_dim: bool) -> Heads:
    stored, width = config.any_integer("num_attention_groups", "num_key_value_heads"), config.integer("head_dim")
    return Heads(config.integer("num_attention_heads"), stored, width, width)


def step_window_heads(config: ModelConfig, own_head_dim: bool) -> Heads:
    """A window has more heads of queries."""
    full, other = step_heads(config, own_head_dim), config.inner("attention_other_setting")
    queries = config.integer_or("num_sliding_attention_heads", full.queries)
    if other.get("attention_type") == "sliding_attention":
        queries = other.integer_or("num_attention_heads", queries)
    return full._replace(queries=queries)


def double_heads(config: ModelConfig, own_head_dim: bool) -> Heads:
    """Heads of the model's input beside the stream, which are twice as wide (Zamba2)."""
    heads, width = config.integer("num_attention_heads"), 2 * config.integer("hidden_size")
    if width % heads:
        raise config.error("num_attention_heads", f"a divisor of 2 · hidden_size={width}")
    return Heads(heads, config.integer_or("num_key_value_heads", heads), width // heads, width // heads)


def listed_drafts(config: ModelConfig) -> bool:
    """Whether the layers of Step-3.5 that draft, behind the others in `layer_types`, have a window."""
    layers, listed = config.integer("num_hidden_layers"), config.get("mtp_layer_types") or []
    drafting = {str(kind) for kind in (config.get("layer_types") or [])[layers:] or listed}
    if len(drafting) > 1:
        raise config.error("mtp_layer_types", "one kind, for the groups of layers of several kinds are not modelled")
    return drafting == {"sliding_attention"}


# Sizes that one family has beside those of all.


def _readers_of(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """Layers that read the keys and values of the last layer before them of their kind (Gemma 3n, small Gemma 4).

    They project queries and outputs alone. Every layer also reads a row of a table of its own.
    """
    layers, hidden = len(kinds), config.integer("hidden_size")
    readers, width = config.get("num_kv_shared_layers") or 0, config.get("hidden_size_per_layer_input") or 0
    sizes: dict[str, Any] = {}
    if width:
        rows = config.integer("vocab_size_per_layer_input")
        sizes = {"table_parameters": rows * layers * width, "other_parameters": 3 * layers * hidden * width}
    if not readers:
        return sizes
    if config.integer("num_kv_shared_layers") >= layers or not {*kinds[-readers:]} <= {*kinds[:-readers]}:
        raise config.error("num_kv_shared_layers", "fewer, so that a layer of each kind before them stores")
    return sizes | {"readers": kinds[-readers:].count(FULL)}


def alternating_streams(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """Gemma 3n has four streams, which are predicted, corrected and added, and low ranks beside attention."""
    config.integer("num_kv_shared_layers", least=0)
    config.integer("hidden_size_per_layer_input")
    sizes, hidden = _readers_of(config, kinds), config.integer("hidden_size")
    streams, rank = config.integer("altup_num_inputs"), config.integer("laurel_rank")
    each = 2 * hidden * rank + streams * (streams + streams**2 + hidden)
    sizes["other_parameters"] += len(kinds) * each + 2 * (streams - 1) * hidden**2
    return sizes


def doubled_blocks(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """Layers of Gemma 4 that read the KV of others may have MLP blocks twice as wide."""
    sizes = _readers_of(config, kinds)
    if config.get("use_double_wide_mlp"):
        wider = 3 * config.integer("hidden_size") * config.integer("intermediate_size")
        readers = config.get("num_kv_shared_layers") or 0
        sizes["other_parameters"] = sizes.get("other_parameters", 0) + readers * wider
    return sizes


def lone_blocks(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """A layer of Nemotron-H has a mixer or an MLP block; experts may read a narrower stream."""
    blocks = kinds.count(MLP) + kinds.count(MOE)
    if not blocks:
        raise config.error("hybrid_override_pattern", "a layer of - or E")
    narrower = config.get("moe_latent_size")
    return {"mlp_layers": blocks} | ({"expert_hidden_size": config.integer("moe_latent_size")} if narrower else {})


def parallel_mixers(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """An MLP block stands behind attention and recurrent layer together (Falcon-H1)."""
    return {"mlp_layers": len(kinds)}


def blocks_in_common(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """Layers of Zamba2 with attention take turns with the weights of a few blocks, each with adapters of its own."""
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    layers, blocks = kinds.count(BOTH), min(config.integer("num_mem_blocks"), kinds.count(BOTH))
    attention, rank = double_heads(config, False), config.integer("adapter_rank")
    channels = attention.queries * attention.key
    stored = attention.stored * attention.key
    projections = 2 * hidden * (channels + 2 * stored) + channels * hidden
    adapters = rank * (hidden + 2 * width)
    if config.get("use_shared_attention_adapter"):
        adapters += 6 * rank * 2 * hidden
    return {
        "mlp_layers": layers,
        "attention_parameters": projections,
        "other_parameters": layers * (hidden**2 + adapters),
        "repeated_parameters": (layers - blocks) * (projections + 3 * hidden * width),
    }


def adjusted_width(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """LFM2 gives the width of an MLP block before it is cut to two thirds and rounded up."""
    width = config.any_integer("intermediate_size", "block_ff_dim")
    if config.get("block_auto_adjust_ff_dim") in (None, True):
        width = int(2 * width / 3)
        factor, multiple = config.get("block_ffn_dim_multiplier"), config.integer("block_multiple_of")
        width = int(width if factor is None else factor * width)
        width = -(-width // multiple) * multiple
    return {"intermediate_size": width}


def gated_heads(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """Every head of Step-3.5 has a gate of its own."""
    if config.get("use_head_wise_attn_gate") is False:
        return {}
    full, window = step_heads(config, True).queries, step_window_heads(config, True).queries
    gates = kinds.count(FULL) * full + kinds.count(WINDOW) * window
    return {"other_parameters": config.integer("hidden_size") * gates}
