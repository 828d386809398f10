"""Sizes that families of models give in keys of their own: of heads, streams, adapters, recurrent
and packed layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from spanlab.model_config import (
    BOTH,
    COMPRESSED,
    FULL,
    HEAVY,
    ITEMSIZES,
    MLP,
    MOE,
    WINDOW,
    ModelConfig,
)
from spanlab.model_spec import PackedEntries
from spanlab.registry import among

# ------------------------------------------------------------------------------
# Heads of attention, blocks that layers have in common, streams and adapters.
# ------------------------------------------------------------------------------


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
    # number of KV heads: null means one per query head, and so does a missing key of a Llama model
    if "num_key_value_heads" in config.keys or config.get("model_type") == "llama":
        stored = config.integer_or("num_key_value_heads", heads)
    else:
        stored = config.integer("num_key_value_heads")
    if own_head_dim:
        width = config.integer("head_dim")
    else:
        hidden = config.integer("hidden_size")
        if hidden % heads and config.get("head_dim") is None:
            raise config.error(
                "hidden_size", f"a multiple of num_attention_heads={heads}, or head_dim"
            )
        width = config.integer_or("head_dim", hidden // heads)
    return Heads(heads, stored, width, width)


def mimo_heads(config: ModelConfig, own_head_dim: bool) -> Heads:
    heads, stored, width = (
        config.integer(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    return Heads(heads, stored, width, config.integer_or("v_head_dim", width))


def mimo_window_heads(config: ModelConfig, own_head_dim: bool) -> Heads:
    """A window has heads of its own; in files of transformers, twice as many of keys as other
    layers."""
    full = mimo_heads(config, own_head_dim)
    return Heads(
        config.integer_or("swa_num_attention_heads", full.queries),
        config.integer_or("swa_num_key_value_heads", 2 * full.stored),
        config.integer_or("swa_head_dim", full.key),
        config.integer_or("swa_v_head_dim", full.value),
    )


def step_heads(config: ModelConfig, own_head_dim: bool) -> Heads:
    stored = config.any_integer("num_attention_groups", "num_key_value_heads")
    width = config.integer("head_dim")
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
    return Heads(
        heads, config.integer_or("num_key_value_heads", heads), width // heads, width // heads
    )


def listed_drafts(config: ModelConfig) -> bool:
    """Whether the layers of Step-3.5 that draft, behind the others in `layer_types`, have a
    window."""
    layers, listed = config.integer("num_hidden_layers"), config.get("mtp_layer_types") or []
    drafting = {str(kind) for kind in (config.get("layer_types") or [])[layers:] or listed}
    if len(drafting) > 1:
        raise config.error(
            "mtp_layer_types",
            "one kind, for the groups of layers of several kinds are not modelled",
        )
    return drafting == {"sliding_attention"}


# Sizes that one family has beside those of all.


def _readers_of(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """Layers that read the keys and values of the last layer before them of their kind (Gemma 3n,
    small Gemma 4).

    They project queries and outputs alone. Every layer also reads a row of a table of its own.
    """
    layers, hidden = len(kinds), config.integer("hidden_size")
    readers = config.get("num_kv_shared_layers") or 0
    width = config.get("hidden_size_per_layer_input") or 0
    sizes: dict[str, Any] = {}
    if width:
        rows = config.integer("vocab_size_per_layer_input")
        sizes = {
            "table_parameters": rows * layers * width,
            "other_parameters": 3 * layers * hidden * width,
        }
    if not readers:
        return sizes
    if config.integer("num_kv_shared_layers") >= layers or not {*kinds[-readers:]} <= {
        *kinds[:-readers]
    }:
        raise config.error(
            "num_kv_shared_layers", "fewer, so that a layer of each kind before them stores"
        )
    return sizes | {"readers": kinds[-readers:].count(FULL)}


def alternating_streams(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """Gemma 3n has four streams, which are predicted, corrected and added, and low ranks beside
    attention."""
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
    return {"mlp_layers": blocks} | (
        {"expert_hidden_size": config.integer("moe_latent_size")} if narrower else {}
    )


def parallel_mixers(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """An MLP block stands behind attention and recurrent layer together (Falcon-H1)."""
    return {"mlp_layers": len(kinds)}


def blocks_in_common(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """Layers of Zamba2 with attention take turns with the weights of a few blocks, each with
    adapters of its own."""
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
        factor = config.get("block_ffn_dim_multiplier")
        multiple = config.integer("block_multiple_of")
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


# ------------------------------------------------------------------------------
# Layers that are no attention over all tokens: recurrent and packed ones.
#
# Families give the same size different names; the first name of each is that of the type that
# introduced it.
# ------------------------------------------------------------------------------

SCAN_CHUNK = 64
"""Scan chunk, in tokens, of transformers and of flash-linear-attention; states are stored at
multiples of it."""


def recurrent_sizes(config: ModelConfig, recurrence: str, layers: int) -> dict[str, Any]:
    """Sizes of `layers` recurrent layers of a kind; ValueError for a missing or unsupported
    value."""
    sizes = {
        "recurrent_layers": layers,
        "recurrence": recurrence,
        "conv_itemsize": config.itemsize(),
    }
    return sizes | _READERS[recurrence](config)


def _gated_delta_sizes(config: ModelConfig) -> dict[str, Any]:
    config.check_value("attn_output_gate", [None, True], "true")
    config.check_value("mamba_ssm_dtype", [None, *ITEMSIZES], among("", ITEMSIZES))
    return {
        "recurrent_key_heads": config.integer("linear_num_key_heads"),
        "recurrent_value_heads": config.integer("linear_num_value_heads"),
        "recurrent_key_dim": config.integer("linear_key_head_dim"),
        "recurrent_value_dim": config.integer("linear_value_head_dim"),
        "conv_kernel": config.integer("linear_conv_kernel_dim"),
        # the dtype of the state in transformers
        "state_itemsize": ITEMSIZES[config.get("mamba_ssm_dtype") or "float32"],
        "grid": SCAN_CHUNK,
    }


def _kimi_delta_sizes(config: ModelConfig) -> dict[str, Any]:
    """Kimi Delta Attention: as many heads of keys as of values, each with a gate per channel."""
    listed = config.inner("linear_attn_config")
    heads, width, kernel = (
        config.integer(key) if listed.get(name) is None else listed.integer(name)
        for name, key in (
            ("num_heads", "linear_num_heads"),
            ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )
    hidden, channels = config.integer("hidden_size"), heads * width
    # of decay, of the output, and the write strength
    gates = 2 * (hidden * width + width * channels) + hidden * heads
    return {
        "recurrent_key_heads": heads,
        "recurrent_value_heads": heads,
        "recurrent_key_dim": width,
        "recurrent_value_dim": width,
        "conv_kernel": kernel,
        "exports_states": True,
        "recurrent_parameters": 4 * hidden * channels + gates + 3 * channels * kernel,
        "grid": SCAN_CHUNK,
    }


def _mamba_2_sizes(config: ModelConfig) -> dict[str, Any]:
    """Mamba-2: groups of heads share what they write and read, as heads of keys; its state is as in
    vLLM."""
    hidden = config.integer("hidden_size")
    heads = config.any_integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    groups = config.any_integer("mamba_n_groups", "n_groups", "mamba_ngroups")
    numbers = config.any_integer("mamba_d_state", "ssm_state_size")
    kernel = config.any_integer("mamba_d_conv", "conv_kernel")
    width = _mamba_width(config, hidden, heads)
    inner, channels = heads * width, heads * width + 2 * groups * numbers
    return {
        "recurrent_key_heads": groups,
        "recurrent_value_heads": heads,
        "recurrent_key_dim": numbers,
        "recurrent_value_dim": width,
        "conv_kernel": kernel,
        "exports_states": True,
        "recurrent_parameters": hidden * (inner + channels + heads)
        + inner * hidden
        + channels * kernel,
        "state_itemsize": config.itemsize(),
        "grid": 1,  # vLLM ends a scan where a state is stored
    }


def _mamba_width(config: ModelConfig, hidden: int, heads: int) -> int:
    """Channels of a head: as given, or an equal share of those of all heads."""
    names = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    given = next((key for key in names if config.get(key) not in (None, "auto")), None)
    if given is not None:
        return config.integer(given)
    inner = (
        config.integer("mamba_d_ssm")
        if config.get("mamba_d_ssm")
        else config.integer("mamba_expand") * hidden
    )
    if inner % heads:
        raise config.error(
            "mamba_d_head", f"a whole number, for {heads} heads do not divide {inner} channels"
        )
    return inner // heads


def _mamba_1_sizes(config: ModelConfig) -> dict[str, Any]:
    """Mamba-1: every channel has a state of its own, and alone passes the convolution; its state is
    as in vLLM."""
    hidden, numbers, kernel = (
        config.integer(key) for key in ("hidden_size", "mamba_d_state", "mamba_d_conv")
    )
    inner = config.integer("mamba_expand") * hidden
    rank = (
        -(-hidden // 16)
        if config.get("mamba_dt_rank") in (None, "auto")
        else config.integer("mamba_dt_rank")
    )
    # what is written and read, and the step size
    chosen = inner * (rank + 2 * numbers) + rank * inner
    return {
        "recurrent_key_heads": 1,
        "recurrent_value_heads": 1,
        "recurrent_key_dim": numbers,
        "recurrent_value_dim": inner,
        "conv_kernel": kernel,
        "recurrent_parameters": 3 * hidden * inner + inner * kernel + chosen,
        "state_itemsize": config.itemsize(),
        "grid": 1,
    }


def _short_conv_sizes(config: ModelConfig) -> dict[str, Any]:
    """A short convolution between two gates (LFM2): its inputs are its state."""
    hidden, kernel = config.integer("hidden_size"), config.integer("conv_L_cache")
    channels = config.integer_or("conv_dim", hidden)
    return {
        "recurrent_value_heads": 1,
        "recurrent_value_dim": channels,
        "conv_kernel": kernel,
        "recurrent_parameters": 4 * hidden * channels + channels * kernel,
        "grid": 1,
    }


_READERS: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "gated_delta_net": _gated_delta_sizes,
    "kda": _kimi_delta_sizes,
    "mamba_2": _mamba_2_sizes,
    "mamba_1": _mamba_1_sizes,
    "short_conv": _short_conv_sizes,
}


# ------------------------------------------------------------------------------
# Entries of layers that pack several tokens into one, in blocks of their own (DeepSeek-V4).
# ------------------------------------------------------------------------------

#: Tokens of an entry by kind of a layer of DeepSeek-V4, and tokens of a block of its compressor's
#: states, in vLLM.
COMPRESSION = {WINDOW: (0, 0), COMPRESSED: (4, 4), HEAVY: (128, 8)}
PACKED_BLOCK, PACKED_WINDOW = 256, 64  # tokens of a block of entries, and of latents of a window
#: Bytes beside the numbers of one byte in an entry of vLLM's fp8_ds_mla: rotated numbers take two,
#: and scales eight.
PACKED_SCALES, PACKED_ALIGNMENT = 8, 576


def packed_projections(config: ModelConfig) -> int:
    """Parameters of a layer beside its entries: queries, latents, outputs in groups, and
    hyper-connections."""
    hidden, rank, width = (
        config.integer(key) for key in ("hidden_size", "q_lora_rank", "head_dim")
    )
    heads, groups, out = (
        config.integer(key) for key in ("num_attention_heads", "o_groups", "o_lora_rank")
    )
    streams = config.integer("hc_mult")
    mixed = 2 * (2 + streams) * streams * streams * hidden
    return (
        hidden * rank
        + rank * heads * width
        + hidden * width
        + heads * width * out
        + groups * out * hidden
        + mixed
    )


def packed_tables(config: ModelConfig, kinds: list[str]) -> list[PackedEntries]:
    """The tables of entries in the order of vLLM's groups: of the first layer that has each."""
    width, heads, span = (
        config.integer(key) for key in ("head_dim", "num_attention_heads", "sliding_window")
    )
    latent = width + _rotated(config, width) + PACKED_SCALES
    aligned: dict[str, Any] = {"alignment": PACKED_ALIGNMENT}
    read: dict[str, Any] = {"entry_bytes": latent, "pair_size": 2 * heads * width, **aligned}
    tables = {
        "window": PackedEntries(
            layers=len(kinds), span=span, block_size=PACKED_WINDOW, drafts=True, **read
        )
    }
    order = []
    for kind in dict.fromkeys(kinds):
        layers, (tokens, block) = kinds.count(kind), COMPRESSION[kind]
        if not tokens:
            order += ["window"]
            continue
        # entries of 4 tokens also have those of the 4 before
        overlap = 2 if kind == COMPRESSED else 1
        state: dict[str, Any] = {
            "layers": layers,
            "span": overlap * tokens,
            "block_size": block,
            **aligned,
        }
        entries: dict[str, Any] = {"layers": layers, "tokens": tokens, "block_size": PACKED_BLOCK}
        made = {"states": PackedEntries(**state, **_compressor(config, overlap, width))}
        if kind == COMPRESSED:
            made |= {"index": _index_entries(config, entries | aligned)}
            made |= {
                "index states": PackedEntries(
                    **state, **_compressor(config, overlap, _index_width(config))
                )
            }
        made["entries"] = PackedEntries(
            **entries, **read, chosen=config.integer("index_topk") if kind == COMPRESSED else 0
        )
        tables |= {f"{kind} {name}": table for name, table in made.items()}
        # an index is made before the window of its layer, and entries and states behind it
        first = ["index", "index states"] if kind == COMPRESSED else []
        order += [f"{kind} {name}" for name in first] + ["window"]
        order += [f"{kind} {name}" for name in ("entries", "states")]
    return [tables[name] for name in dict.fromkeys(order)]


def _rotated(config: ModelConfig, width: int) -> int:
    """Rotated numbers of a latent, which keep two bytes each."""
    if config.get("qk_rope_head_dim") is not None:
        return config.integer("qk_rope_head_dim")
    share = config.get("partial_rotary_factor")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise config.error("qk_rope_head_dim", "a whole number from 1 on, or partial_rotary_factor")
    return int(width * share)


def _compressor(config: ModelConfig, overlap: int, width: int) -> dict[str, Any]:
    """Bytes per token of a compressor's states, numbers and weights of four bytes, and its
    parameters."""
    numbers = 2 * overlap * width
    return {"entry_bytes": 4 * numbers, "parameters": config.integer("hidden_size") * numbers}


def _index_width(config: ModelConfig) -> int:
    return config.integer("index_head_dim")


def _index_entries(config: ModelConfig, sizes: dict[str, Any]) -> PackedEntries:
    """Keys of an index: a byte per number, and a scale of four bytes for each 128 of them."""
    width, heads = _index_width(config), config.integer("index_n_heads")
    return PackedEntries(
        **sizes,
        entry_bytes=width + width // 128 * 4,
        pair_size=heads * width,
        parameters=config.integer("q_lora_rank") * heads * width
        + config.integer("hidden_size") * heads,
    )
