"""Sizes of layers that are no attention over all tokens, from a config.json: recurrent and packed ones.

Families give the same size different names; the first name of each is that of the type that introduced it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spanlab.model_config import COMPRESSED, HEAVY, ITEMSIZES, WINDOW, ModelConfig
from spanlab.model_spec import PackedEntries
from spanlab.registry import among

SCAN_CHUNK = 64
"""Scan chunk, in tokens, of transformers and of flash-linear-attention; states are stored at multiples of it."""


def recurrent_sizes(config: ModelConfig, recurrence: str, layers: int) -> dict[str, Any]:
    """Sizes of `layers` recurrent layers of a kind; ValueError for a missing or unsupported value."""
    sizes = {"recurrent_layers": layers, "recurrence": recurrence, "conv_itemsize": config.itemsize()}
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
    gates = 2 * (hidden * width + width * channels) + hidden * heads  # of decay, of the output, and the write strength
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
    """Mamba-2: groups of heads share what they write and read, as heads of keys; its state is as in vLLM."""
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
        "recurrent_parameters": hidden * (inner + channels + heads) + inner * hidden + channels * kernel,
        "state_itemsize": config.itemsize(),
        "grid": 1,  # vLLM ends a scan where a state is stored
    }


def _mamba_width(config: ModelConfig, hidden: int, heads: int) -> int:
    """Channels of a head: as given, or an equal share of those of all heads."""
    names = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    given = next((key for key in names if config.get(key) not in (None, "auto")), None)
    if given is not None:
        return config.integer(given)
    inner = config.integer("mamba_d_ssm") if config.get("mamba_d_ssm") else config.integer("mamba_expand") * hidden
    if inner % heads:
        raise config.error("mamba_d_head", f"a whole number, for {heads} heads do not divide {inner} channels")
    return inner // heads


def _mamba_1_sizes(config: ModelConfig) -> dict[str, Any]:
    """Mamba-1: every channel has a state of its own, and alone passes the convolution; its state is as in vLLM."""
    hidden, numbers, kernel = (config.integer(key) for key in ("hidden_size", "mamba_d_state", "mamba_d_conv"))
    inner = config.integer("mamba_expand") * hidden
    rank = -(-hidden // 16) if config.get("mamba_dt_rank") in (None, "auto") else config.integer("mamba_dt_rank")
    chosen = inner * (rank + 2 * numbers) + rank * inner  # what is written and read, and the step size
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

#: Tokens of an entry by kind of a layer of DeepSeek-V4, and tokens of a block of its compressor's states, in vLLM.
COMPRESSION = {WINDOW: (0, 0), COMPRESSED: (4, 4), HEAVY: (128, 8)}
PACKED_BLOCK, PACKED_WINDOW = 256, 64  # tokens of a block of entries, and of latents of a window
#: Bytes beside the numbers of one byte in an entry of vLLM's fp8_ds_mla: rotated numbers take two, and scales eight.
PACKED_SCALES, PACKED_ALIGNMENT = 8, 576


def packed_projections(config: ModelConfig) -> int:
    """Parameters of a layer beside its entries: queries, latents, outputs in groups, and hyper-connections."""
    hidden, rank, width = (config.integer(key) for key in ("hidden_size", "q_lora_rank", "head_dim"))
    heads, groups, out = (config.integer(key) for key in ("num_attention_heads", "o_groups", "o_lora_rank"))
    streams = config.integer("hc_mult")
    mixed = 2 * (2 + streams) * streams * streams * hidden
    return hidden * rank + rank * heads * width + hidden * width + heads * width * out + groups * out * hidden + mixed


def packed_tables(config: ModelConfig, kinds: list[str]) -> list[PackedEntries]:
    """The tables of entries in the order of vLLM's groups: of the first layer that has each."""
    width, heads, span = (config.integer(key) for key in ("head_dim", "num_attention_heads", "sliding_window"))
    latent = width + _rotated(config, width) + PACKED_SCALES
    aligned: dict[str, Any] = {"alignment": PACKED_ALIGNMENT}
    read: dict[str, Any] = {"entry_bytes": latent, "pair_size": 2 * heads * width, **aligned}
    tables = {"window": PackedEntries(layers=len(kinds), span=span, block_size=PACKED_WINDOW, drafts=True, **read)}
    order = []
    for kind in dict.fromkeys(kinds):
        layers, (tokens, block) = kinds.count(kind), COMPRESSION[kind]
        if not tokens:
            order += ["window"]
            continue
        overlap = 2 if kind == COMPRESSED else 1  # entries of 4 tokens also have those of the 4 before
        state: dict[str, Any] = {"layers": layers, "span": overlap * tokens, "block_size": block, **aligned}
        entries: dict[str, Any] = {"layers": layers, "tokens": tokens, "block_size": PACKED_BLOCK}
        made = {"states": PackedEntries(**state, **_compressor(config, overlap, width))}
        if kind == COMPRESSED:
            made |= {"index": _index_entries(config, entries | aligned)}
            made |= {"index states": PackedEntries(**state, **_compressor(config, overlap, _index_width(config)))}
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
    """Bytes per token of a compressor's states, numbers and weights of four bytes, and its parameters."""
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
        parameters=config.integer("q_lora_rank") * heads * width + config.integer("hidden_size") * heads,
    )
