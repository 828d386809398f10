"""Kinds of a model's layers, and which layer is of which kind where a config.json has no `layer_types`."""

from __future__ import annotations

from collections.abc import Callable

from spanlab.model_config import ModelConfig

FULL, RECURRENT, WINDOW, CHUNK, INDEXED = "full", "recurrent", "window", "chunk", "indexed"
COMPRESSED, HEAVY = "compressed", "heavily compressed"
BOTH = "full beside recurrent"  # in one layer
MLP, MOE = "dense alone", "experts alone"  # layers without a mixer
#: Kinds of layers by the names that transformers gives them in `layer_types`.
KINDS = {
    "full_attention": FULL,
    "linear_attention": RECURRENT,
    "sliding_attention": WINDOW,
    "chunked_attention": CHUNK,
    "indexed_attention": INDEXED,
    "minimax_m3_sparse": INDEXED,
    "compressed_sparse_attention": COMPRESSED,
    "heavily_compressed_attention": HEAVY,
    "attention": FULL,  # of Granite 4, beside mamba
    "mamba": RECURRENT,
    "conv": RECURRENT,
    "hybrid": BOTH,
    "mlp": MLP,
    "moe": MOE,
}
Pattern = Callable[[ModelConfig, int], list[str]]


def every_nth(default: int, *keys: str, others: str = WINDOW) -> Pattern:
    """Every n-th layer is full; n is the value of the first of `keys` in the file."""

    def kinds(config: ModelConfig, layers: int) -> list[str]:
        letters = next((config.get(key) for key in keys if isinstance(config.get(key), str)), "")
        if letters and {*letters} <= {"L", "G"}:  # EXAONE 4: local and global
            return [FULL if letters[layer % len(letters)] == "G" else others for layer in range(layers)]
        step = next((config.integer(key) for key in keys if config.get(key) is not None), default)
        return [FULL if (layer + 1) % step == 0 else others for layer in range(layers)]

    return kinds


def all_full(config: ModelConfig, layers: int) -> list[str]:
    return [FULL] * layers


def all_indexed(config: ModelConfig, layers: int) -> list[str]:
    return [INDEXED] * layers


def windows(config: ModelConfig, layers: int) -> list[str]:
    """All layers have the window that the file sets, unless it is as long as the context."""
    if "sliding_window" not in config.keys and config.get("model_type") in ("mistral", "ministral"):
        raise config.error("sliding_window", "a number or null; transformers takes 4096 for a missing one")
    window, positions = config.get("sliding_window"), config.get("max_position_embeddings")
    covered = window is None or (positions is not None and config.integer("sliding_window") >= positions)
    return [FULL if covered else WINDOW] * layers


def late_windows(config: ModelConfig, layers: int) -> list[str]:
    """Layers from `max_window_layers` on have a window, where the file uses it."""
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return [FULL] * layers
    kinds = windows(config, layers)
    first = config.integer("max_window_layers", least=0)
    return [FULL] * min(first, layers) + kinds[first:]


def recurrent_but_every(config: ModelConfig, layers: int) -> list[str]:
    step = config.integer("full_attention_interval")
    return [FULL if (layer + 1) % step == 0 else RECURRENT for layer in range(layers)]


def only_listed(config: ModelConfig, layers: int) -> list[str]:
    raise config.error("layer_types", "a list of one kind per layer")


def numbered(key: str) -> Pattern:
    """The layers that a list numbers from 0 are full, others recurrent."""

    def kinds(config: ModelConfig, layers: int) -> list[str]:
        listed = config.get(key)
        if not isinstance(listed, list):
            raise config.error(key, "a list of layers")
        return [FULL if layer in listed else RECURRENT for layer in range(layers)]

    return kinds


def periodic(config: ModelConfig, layers: int) -> list[str]:
    """One layer of each period is full, others recurrent (Jamba)."""
    period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset", least=0)
    return [FULL if layer % period == offset else RECURRENT for layer in range(layers)]


def both_in_one(config: ModelConfig, layers: int) -> list[str]:
    return [BOTH] * layers


#: Kinds of layers by the letters of `hybrid_override_pattern`.
LETTERS = {"M": RECURRENT, "*": FULL, "-": MLP, "E": MOE}


def lettered(config: ModelConfig, layers: int) -> list[str]:
    """The layers by the letters of a pattern (Nemotron-H)."""
    config.check_value("sliding_window", [None], "null, for windows beside states are not modelled")
    letters = config.get("hybrid_override_pattern")
    if not isinstance(letters, str) or not letters or not {*letters} <= LETTERS.keys():
        raise config.error("hybrid_override_pattern", f"a string of {', '.join(LETTERS)}, or layers_block_type")
    return [LETTERS[letter] for letter in letters]


def marked_windows(config: ModelConfig, layers: int) -> list[str]:
    """The layers that `hybrid_layer_pattern` marks have a window (MiMo-V2-Flash)."""
    listed = config.listed("hybrid_layer_pattern", layers, {0: FULL, 1: WINDOW})
    if listed is None:
        raise config.error("hybrid_layer_pattern", "a list of 0 and 1, or layer_types")
    return listed


def behind_dense(config: ModelConfig, layers: int) -> list[str]:
    """Every `sliding_window_pattern`-th layer is full, counted from 1 again behind the dense ones (Cohere2-MoE)."""
    dense, step = config.get("first_k_dense_replace") or 0, config.integer_or("sliding_window_pattern", 4)
    first = config.integer_or("prefix_dense_sliding_window_pattern", 1)
    kinds = [FULL if (layer + 1) % first == 0 else WINDOW for layer in range(dense)]
    return kinds + [FULL if (layer + 1) % step == 0 else WINDOW for layer in range(layers - dense)]


def kimi(config: ModelConfig, layers: int) -> list[str]:
    """The layers that `linear_attn_config` numbers from 1."""
    listed = config.get("linear_attn_config")
    if not isinstance(listed, dict) or "full_attn_layers" not in listed:
        raise config.error("layer_types", "a list, or linear_attn_config with full_attn_layers")
    return [FULL if layer + 1 in listed["full_attn_layers"] else RECURRENT for layer in range(layers)]


def chunks(config: ModelConfig, layers: int) -> list[str]:
    """Layers with positions read chunks; every `no_rope_layer_interval`-th, without, reads all."""
    listed = config.get("no_rope_layers")
    if listed:
        return [CHUNK if rotated else FULL for rotated in listed]
    return every_nth(config.integer_or("no_rope_layer_interval", 4), others=CHUNK)(config, layers)


_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def compressed(config: ModelConfig, layers: int) -> list[str]:
    """The layers by the tokens of an entry that `compress_ratios` lists, also of layers that draft."""
    config.check_value("compress_rates", [None, _RATES], f"{_RATES}, as in vLLM")
    listed, kinds = config.get("compress_ratios"), {0: WINDOW, 1: WINDOW, 4: COMPRESSED, 128: HEAVY}
    if not isinstance(listed, list) or len(listed) < layers or any(tokens not in kinds for tokens in listed):
        raise config.error("compress_ratios", f"a list of 0, 1, 4 and 128, for num_hidden_layers={layers} or more")
    return [kinds[tokens] for tokens in listed[:layers]]


def sparse(config: ModelConfig, layers: int) -> list[str]:
    """The layers that `sparse_attention_config` marks choose the tokens that they read."""
    listed = config.get("sparse_attention_config")
    marked = listed.get("sparse_attention_freq") if isinstance(listed, dict) else None
    return [INDEXED if mark else FULL for mark in marked] if marked else [FULL] * layers
