"""Sizes of recurrent layers from a config.json, by kind (`spanlab.recurrences`).

Families give the same size different names; the first name of each is that of the type that introduced it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spanlab.model_config import ITEMSIZES, ModelConfig
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
