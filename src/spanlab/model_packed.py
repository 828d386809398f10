"""Tables of entries of layers that pack several of them into one block (DeepSeek-V4), from a config.json."""

from __future__ import annotations

from typing import Any

from spanlab.model_config import ModelConfig
from spanlab.model_kinds import COMPRESSED, HEAVY, WINDOW
from spanlab.model_spec import PackedEntries

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
