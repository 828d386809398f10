"""Sizes of a model from its config.json, type by type; bytes and FLOPs follow from them (`spanlab.model_spec`).

The keys and their defaults are those of transformers' configuration classes. A default that is a number of one model
and not a rule, such as 32 heads, is not used: the key is required. Vision towers and layers that predict more than one
token are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spanlab.model_spec import LocalLayers, ModelSpec, PackedEntries
from spanlab.registry import among

# ------------------------------------------------------------------------------
# Strict reading of a config.json: an error names the first key that is missing or has an
# unsupported value.
# ------------------------------------------------------------------------------

#: Keys that a config.json of a multimodal model may have at the top level instead of in `text_config`.
_SHARED = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of the text model of a config.json.

    `source`  the setting and its value that selected the file: the prefix of error messages
    `name`    name of the model
    `keys`    keys of the text model
    """

    source: str
    name: str
    keys: Mapping[str, Any]

    @staticmethod
    def of(source: str, name: str, content: object) -> ModelConfig:
        """The text model of the content of a file: its `text_config` if it has one."""
        if not isinstance(content, dict):
            raise ValueError(f"{source}: expected the keys of a config.json")
        config = ModelConfig(source, name, content)
        return ModelConfig(source, name, config._text_keys())

    def _text_keys(self) -> dict[str, Any]:
        if "text_config" not in self.keys:
            return dict(self.keys)
        text = self.keys["text_config"]
        if not isinstance(text, dict):
            raise self.error("text_config", "the keys of the text model")
        top_level = {key: self.keys[key] for key in ("model_type", *_SHARED) if self.keys.get(key) is not None}
        for key in _SHARED:
            if key in top_level and text.get(key, top_level[key]) != top_level[key]:
                raise self.error(key, f"{text[key]}, as in text_config")
        return top_level | text

    def error(self, key: str, expected: str) -> ValueError:
        """The error for a key that is missing, or for an unsupported value."""
        if key in self.keys:
            return ValueError(f"{self.source}: {key}={self.keys[key]}: expected {expected}")
        return ValueError(f"{self.source}: {key} is missing: expected {expected}")

    def get(self, key: str) -> Any:
        """The value of a key, or None if the file does not have the key."""
        return self.keys.get(key)

    def integer(self, key: str, least: int = 1) -> int:
        """The value of a required key, a whole number of at least `least`."""
        value = self.keys.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"a whole number from {least} on")
        return value

    def listed(self, key: str, length: int, kinds: Mapping[str, str]) -> list[str] | None:
        """The values of a list, one per layer, by the names in `kinds`; None if the key is missing or null."""
        values = self.keys.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != length:
            raise self.error(key, f"a list of num_hidden_layers={length} kinds")
        for value in values:
            if value not in kinds:
                raise ValueError(f"{self.source}: {value} in {key}: expected {' or '.join(kinds)}")
        return [kinds[value] for value in values]

    def integer_or(self, key: str, default: int) -> int:
        """A whole number of at least 1; `default` if the key is missing or null."""
        return default if self.keys.get(key) is None else self.integer(key)

    def flag(self, key: str) -> bool:
        """The value of a required key, true or false."""
        value = self.keys.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def check_value(self, key: str, allowed: list[object], expected: str) -> None:
        """Raise ValueError for a value that is not in `allowed`; None represents a missing key."""
        if self.keys.get(key) not in allowed:
            raise self.error(key, expected)


# ------------------------------------------------------------------------------
# Types of models: which kinds of layers they have, and where the sizes of each are.
# ------------------------------------------------------------------------------

FULL, RECURRENT, WINDOW, CHUNK, INDEXED = "full", "recurrent", "window", "chunk", "indexed"
COMPRESSED, HEAVY = "compressed", "heavily compressed"
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
}
SCAN_CHUNK = 64
"""Scan chunk, in tokens, of transformers and of flash-linear-attention; states are stored at multiples of it."""
LATENT_BLOCK, STATED_LATENT_BLOCK = 64, 128
"""Tokens of a block of latents in vLLM's FlashMLA and FlashInfer, and beside states; CUTLASS MLA takes 128."""
#: Tokens of an entry by kind of a layer of DeepSeek-V4, and tokens of a block of its compressor's states, in vLLM.
COMPRESSION = {WINDOW: (0, 0), COMPRESSED: (4, 4), HEAVY: (128, 8)}
PACKED_BLOCK, PACKED_WINDOW = 256, 64  # tokens of a block of entries, and of latents of a window
#: Bytes beside the numbers of one byte in an entry of vLLM's fp8_ds_mla: rotated numbers take two, and scales eight.
PACKED_SCALES, PACKED_ALIGNMENT = 8, 576
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes of a weight of an expert, and of another weight, by the method in `quantization_config`; None: by dtype. Scales
#: of fp8, four bytes for 128 x 128 weights, are left out; those of mxfp4 are one byte for 32 weights.
QUANTISED: dict[str, tuple[float, int | None]] = {"fp8": (1, 1), "mxfp4": (0.5 + 1 / 32, None)}

Pattern = Callable[["ModelConfig", int], list[str]]


def _every(default: int, *keys: str, others: str = WINDOW) -> Pattern:
    """Every n-th layer is full; n is the value of the first of `keys` in the file."""

    def kinds(config: ModelConfig, layers: int) -> list[str]:
        step = next((config.integer(key) for key in keys if config.get(key) is not None), default)
        return [FULL if (layer + 1) % step == 0 else others for layer in range(layers)]

    return kinds


def _all_full(config: ModelConfig, layers: int) -> list[str]:
    return [FULL] * layers


def _all_indexed(config: ModelConfig, layers: int) -> list[str]:
    return [INDEXED] * layers


def _windows(config: ModelConfig, layers: int) -> list[str]:
    """All layers have the window that the file sets, unless it is as long as the context."""
    if "sliding_window" not in config.keys and config.get("model_type") in ("mistral", "ministral"):
        raise config.error("sliding_window", "a number or null; transformers takes 4096 for a missing one")
    window, positions = config.get("sliding_window"), config.get("max_position_embeddings")
    covered = window is None or (positions is not None and config.integer("sliding_window") >= positions)
    return [FULL if covered else WINDOW] * layers


def _late_windows(config: ModelConfig, layers: int) -> list[str]:
    """Layers from `max_window_layers` on have a window, where the file uses it."""
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return [FULL] * layers
    kinds = _windows(config, layers)
    first = config.integer("max_window_layers", least=0)
    return [FULL] * min(first, layers) + kinds[first:]


def _recurrent_but_every(config: ModelConfig, layers: int) -> list[str]:
    step = config.integer("full_attention_interval")
    return [FULL if (layer + 1) % step == 0 else RECURRENT for layer in range(layers)]


def _listed(config: ModelConfig, layers: int) -> list[str]:
    raise config.error("layer_types", "a list of one kind per layer")


def _attended(config: ModelConfig, layers: int) -> list[str]:
    """The layers that `attn_layer_indices` numbers from 0."""
    listed = config.get("attn_layer_indices")
    if not isinstance(listed, list):
        raise config.error("attn_layer_indices", "a list of layers")
    return [FULL if layer in listed else RECURRENT for layer in range(layers)]


def _kimi(config: ModelConfig, layers: int) -> list[str]:
    """The layers that `linear_attn_config` numbers from 1."""
    listed = config.get("linear_attn_config")
    if not isinstance(listed, dict) or "full_attn_layers" not in listed:
        raise config.error("layer_types", "a list, or linear_attn_config with full_attn_layers")
    return [FULL if layer + 1 in listed["full_attn_layers"] else RECURRENT for layer in range(layers)]


def _chunks(config: ModelConfig, layers: int) -> list[str]:
    """Layers with positions read chunks; every `no_rope_layer_interval`-th, without, reads all."""
    listed = config.get("no_rope_layers")
    if listed:
        return [CHUNK if rotated else FULL for rotated in listed]
    return _every(config.integer_or("no_rope_layer_interval", 4), others=CHUNK)(config, layers)


_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _compressed(config: ModelConfig, layers: int) -> list[str]:
    """The layers by the tokens of an entry that `compress_ratios` lists, also of layers that draft."""
    config.check_value("compress_rates", [None, _RATES], f"{_RATES}, as in vLLM")
    listed, kinds = config.get("compress_ratios"), {tokens: kind for kind, (tokens, _) in COMPRESSION.items()}
    kinds[1] = WINDOW
    if not isinstance(listed, list) or len(listed) < layers or any(tokens not in kinds for tokens in listed):
        raise config.error("compress_ratios", f"a list of 0, 1, 4 and 128, for num_hidden_layers={layers} or more")
    return [kinds[tokens] for tokens in listed[:layers]]


def _sparse(config: ModelConfig, layers: int) -> list[str]:
    """The layers that `sparse_attention_config` marks choose the tokens that they read."""
    listed = config.get("sparse_attention_config")
    marked = listed.get("sparse_attention_freq") if isinstance(listed, dict) else None
    return [INDEXED if mark else FULL for mark in marked] if marked else [FULL] * layers


@dataclass(frozen=True)
class ModelType:
    """Layers of a model type, and the keys that its file must have.

    `kinds`          kinds of layers that it may have
    `pattern`        kinds of the layers of a file without `layer_types`
    `gated`          a gate on the output of attention
    `own_head_dim`   head_dim is required; otherwise it defaults to hidden_size / num_attention_heads
    `latent`         keys and values of all heads are one latent (MLA)
    `recurrence`     recurrent layers, whose sizes have keys of their own: GatedDeltaNet, KDA or Mamba-2
    `tied`           a file that does not say so has one table of embeddings for input and output
    `experts`        layers with a mixture of experts: none; every; listed, by decoder_sparse_step and mlp_only_layers;
                     behind, after first_k_dense_replace dense ones, or as mlp_layer_types lists; stepped, every n-th;
                     between, from moe_layer_start_index to moe_layer_end_index
    `dense_first`    dense layers before those with experts, where the file does not say
    `expert_width`   key of the width of an expert
    `dense_width`    key of the width of a layer without experts
    `shared_width`   key of the width of an expert for all tokens; "": none; n_shared_experts: their number
    """

    kinds: tuple[str, ...] = (FULL,)
    pattern: Pattern = _all_full
    gated: bool = False
    own_head_dim: bool = False
    latent: bool = False
    recurrence: str = "GatedDeltaNet"
    tied: bool = False
    experts: str = "none"
    dense_first: int = 1
    expert_width: str = "moe_intermediate_size"
    dense_width: str = "intermediate_size"
    shared_width: str = ""


_LOCAL, _HYBRID = (FULL, WINDOW), (FULL, RECURRENT)
_LATENT = ModelType(latent=True, experts="behind", shared_width="n_shared_experts")
_INDEXED = ModelType((INDEXED,), _all_indexed, latent=True, experts="behind", shared_width="n_shared_experts")
_WINDOWED = ModelType(_LOCAL, _windows)
_GATED = ModelType(_HYBRID, _recurrent_but_every, gated=True, own_head_dim=True)
_GATED_MOE = replace(_GATED, experts="every", shared_width="shared_expert_intermediate_size")
_GEMMA = ModelType(_LOCAL, _every(2), own_head_dim=True, tied=True)
_GEMMA3 = replace(_GEMMA, pattern=_every(6, "sliding_window_pattern", "_sliding_window_pattern"))
_GEMMA4 = replace(_GEMMA, pattern=_every(6), experts="gemma4", shared_width="intermediate_size")
_QWEN2, _QWEN3 = ModelType(_LOCAL, _late_windows), ModelType(_LOCAL, _late_windows, own_head_dim=True)
_QWEN3_MOE = ModelType(_LOCAL, _late_windows, experts="listed")
_GLM4, _GLM4_MOE = (
    ModelType(own_head_dim=True),
    ModelType(own_head_dim=True, experts="behind", shared_width="n_shared_experts"),
)
_LLAMA4 = ModelType(
    (FULL, CHUNK),
    _chunks,
    experts="stepped",
    expert_width="intermediate_size",
    dense_width="intermediate_size_mlp",
    shared_width="intermediate_size",
)
_MINIMAX_M3 = ModelType(
    (FULL, INDEXED),
    _sparse,
    own_head_dim=True,
    experts="behind",
    dense_first=0,
    expert_width="intermediate_size",
    dense_width="dense_intermediate_size",
    shared_width="shared_intermediate_size",
)
_DEEPSEEK_V4 = ModelType(
    (COMPRESSED, HEAVY, WINDOW), _compressed, own_head_dim=True, experts="every", shared_width="n_shared_experts"
)
#: Every layer has experts as wide as its `intermediate_size` says.
_MIXTURE = ModelType(experts="every", expert_width="intermediate_size")
_GRANITE4 = replace(
    _MIXTURE,
    kinds=_HYBRID,
    pattern=_listed,
    recurrence="Mamba-2",
    dense_width="shared_intermediate_size",
    shared_width="shared_intermediate_size",
)
MODEL_TYPES = {
    **dict.fromkeys(("llama", "olmo2", "granite", "hunyuan_v1_dense"), ModelType()),
    "smollm3": ModelType(_LOCAL, _late_windows, tied=True),
    "ernie4_5": replace(_GLM4, tied=True),
    "ernie4_5_moe": ModelType(tied=True, experts="between", shared_width="n_shared_experts"),
    **dict.fromkeys(("seed_oss", "glm4", "glm4v_text"), _GLM4),
    "mistral": _WINDOWED,
    "ministral": _WINDOWED,
    "ministral3": _WINDOWED,
    "mixtral": replace(_MIXTURE, kinds=_LOCAL, pattern=_windows),
    **dict.fromkeys(("granitemoe", "olmoe"), _MIXTURE),
    "phi3": _WINDOWED,
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2),
    "qwen2_moe": replace(_QWEN3_MOE, shared_width="shared_expert_intermediate_size"),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), _QWEN3),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text"), _QWEN3_MOE),
    "qwen3_next": replace(_GATED_MOE, experts="listed"),
    "qwen3_5": _GATED,
    "qwen3_5_text": _GATED,
    "qwen3_5_moe": _GATED_MOE,
    "qwen3_5_moe_text": _GATED_MOE,
    "gpt_oss": ModelType(_LOCAL, _every(2), own_head_dim=True, experts="every", expert_width="intermediate_size"),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), _GEMMA4),
    "cohere2": ModelType(_LOCAL, _every(4, "sliding_window_pattern", "_sliding_window_pattern"), tied=True),
    "olmo3": ModelType(_LOCAL, _every(4)),
    "exaone4": ModelType(_LOCAL, _every(4, "sliding_window_pattern")),
    "exaone_moe": ModelType(
        _LOCAL, _every(4, "sliding_window_pattern"), experts="behind", shared_width="n_shared_experts"
    ),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "axk1"), _LATENT),
    "mistral4": replace(_LATENT, dense_first=0),
    "youtu": ModelType(latent=True, tied=True),
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "kimi_linear": replace(_LATENT, kinds=_HYBRID, pattern=_kimi, recurrence="KDA"),
    "granitemoehybrid": _GRANITE4,
    "bamba": ModelType(_HYBRID, _attended, recurrence="Mamba-2"),
    **dict.fromkeys(("glm4_moe", "glm4v_moe_text", "hy_v3"), _GLM4_MOE),
    "solar_open": replace(_GLM4_MOE, experts="every"),
    "minimax_m2": ModelType(own_head_dim=True, experts="every", expert_width="intermediate_size"),
    "minimax_m3_vl": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
}
_SHARING = "its last layers read the keys and values of others, which is not modelled"


def spec_of(config: ModelConfig) -> ModelSpec:
    """The sizes that a config.json defines; ValueError, naming file and key, for a missing or unsupported value."""
    kind = _model_type(config)
    layers, itemsize = config.integer("num_hidden_layers"), _itemsize(config)
    kinds = config.listed("layer_types", layers, KINDS) or kind.pattern(config, layers)
    for name in kinds:
        if name not in kind.kinds:
            raise ValueError(f"{config.source}: {_names([name])} in layer_types: expected {_names(kind.kinds)}")
    if {*kinds} == {RECURRENT}:
        raise ValueError(f"{config.source}: {_names(kinds[:1])} in all layer_types: expected {_names([FULL])} in one")
    if len(kinds) != layers:
        raise config.error("num_hidden_layers", f"{len(kinds)}, the number of listed layers")
    expert_itemsize, weight_itemsize = _quantised(config, itemsize)
    sparse = _expert_layers(config, kind, layers)
    attention = _attention(config, kind)
    counts = {name: kinds.count(name) for name in KINDS.values()}
    full = layers if kind is _DEEPSEEK_V4 else counts[FULL] + counts[INDEXED]
    return ModelSpec(
        name=config.name,
        attention_layers=full,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=_dense_width(config, kind) if sparse < layers else 0,
        vocab_size=config.integer("vocab_size"),
        attention_heads=config.integer("num_attention_heads"),
        **attention,
        local=[] if kind is _DEEPSEEK_V4 else _local(config, kind, kinds),
        packed=_packed(config, kinds) if kind is _DEEPSEEK_V4 else [],
        gated_attention=kind.gated,
        tied_embeddings=_tied(config, kind),
        weight_itemsize=weight_itemsize,
        expert_itemsize=expert_itemsize,
        kv_itemsize=itemsize,
        **(_index(config, kind, counts[INDEXED]) if counts[INDEXED] else {}),
        **(_recurrent_sizes(config, kind, counts[RECURRENT], itemsize) if counts[RECURRENT] else {}),
        **(_expert_sizes(config, kind, sparse) if sparse else {}),
    )


def _names(kinds: Iterable[str]) -> str:
    """The usual name of each kind in `layer_types`."""
    usual = {kind: name for name, kind in reversed(KINDS.items())}
    return " or ".join(usual[kind] for kind in kinds)


def _model_type(config: ModelConfig) -> ModelType:
    name = config.get("model_type")
    if name == "gemma3n":
        raise config.error("model_type", f"another one, for {_SHARING}")
    if name not in MODEL_TYPES:
        for key in ("layer_types", "layers_block_type"):
            listed = config.get(key)
            if unknown := [kind for kind in listed if kind not in KINDS] if isinstance(listed, list) else []:
                expected = f"expected {' or '.join(KINDS)}, for the memory of other layers is not modelled"
                raise ValueError(f"{config.source}: {unknown[0]} in {key} of model_type={name}: {expected}")
        raise config.error("model_type", among(str(name), MODEL_TYPES))
    if config.get("num_kv_shared_layers"):
        raise config.error("num_kv_shared_layers", f"0, for {_SHARING}")
    if not MODEL_TYPES[name].latent:
        config.check_value("kv_lora_rank", [None], "none, for this type has no latents")
    return MODEL_TYPES[name]


def _itemsize(config: ModelConfig) -> int:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    config.check_value(key, list(ITEMSIZES), among(str(config.get(key)), ITEMSIZES))
    return ITEMSIZES[config.keys[key]]


def _quantised(config: ModelConfig, itemsize: int) -> tuple[float, int]:
    """Bytes of an expert's weight, 0 where it is as others, and of another weight."""
    quantised = config.get("quantization_config")
    if quantised is None:
        return 0.0, itemsize
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if method not in QUANTISED:
        raise config.error("quantization_config", f"quant_method {' or '.join(QUANTISED)}; other sizes are not derived")
    of_experts, of_others = QUANTISED[method]
    if config.get("model_type") == "deepseek_v4" and method == "fp8" and config.get("expert_dtype") in (None, "fp4"):
        of_experts = QUANTISED["mxfp4"][0]  # as in vLLM, unless the file says fp8
    return (0.0 if of_experts == of_others else of_experts), (of_others or itemsize)


def _tied(config: ModelConfig, kind: ModelType) -> bool:
    """Whether the output head is the embedding table; a file that does not say so has the default of its type."""
    return config.flag("tie_word_embeddings") if "tie_word_embeddings" in config.keys else kind.tied


# Attention.


def _attention(config: ModelConfig, kind: ModelType) -> dict[str, Any]:
    """Sizes of the layers that read all tokens."""
    heads = config.integer("num_attention_heads")
    if kind.latent:
        sizes = _latent(config, heads)
        return sizes | {"block_size": STATED_LATENT_BLOCK} if RECURRENT in kind.kinds else sizes
    sizes = {"kv_heads": _kv_heads(config, heads), "head_dim": _head_dim(config, kind, heads)}
    if kind is _DEEPSEEK_V4:
        return sizes | {"attention_parameters": _packed_projections(config), "block_size": PACKED_BLOCK}
    if kind is not _GEMMA4:
        return sizes
    # wider heads, and fewer of keys; without projections of values, they are the keys before rotation
    equal, written = bool(config.get("attention_k_eq_v")), config.get("per_layer_config")
    if written:  # by transformers; the same for every such layer
        listed = list(written.values())
        if any(layer != listed[0] for layer in listed):
            raise config.error("per_layer_config", "the same sizes for all layers that read all tokens")
        sizes = {"kv_heads": listed[0].get("num_key_value_heads", sizes["kv_heads"]), "head_dim": listed[0]["head_dim"]}
    else:
        sizes["head_dim"] = config.integer_or("global_head_dim", 512)
        if equal:
            sizes["kv_heads"] = config.integer_or("num_global_key_value_heads", sizes["kv_heads"])
    projected = 2 * heads + (1 if equal else 2) * sizes["kv_heads"]
    return sizes | {"attention_parameters": config.integer("hidden_size") * projected * sizes["head_dim"]}


def _latent(config: ModelConfig, heads: int) -> dict[str, Any]:
    """Sizes of multi-head latent attention: one latent and one rotated key per token, for all heads."""
    width, rank = config.integer("hidden_size"), config.integer("kv_lora_rank")
    rotated, plain, value = (config.integer(f"{name}_head_dim") for name in ("qk_rope", "qk_nope", "v"))
    query_rank = config.get("q_lora_rank")
    query = heads * (rotated + plain)
    queries = width * query if query_rank is None else config.integer("q_lora_rank") * (width + query)
    keys = width * (rank + rotated) + rank * heads * (plain + value)
    return {
        "kv_heads": 1,
        "head_dim": rotated + plain,
        "kv_size": rank + rotated,
        "block_size": LATENT_BLOCK,
        "pair_size": heads * (rotated + plain + value),
        "attention_parameters": queries + keys + heads * value * width,
    }


def _index(config: ModelConfig, kind: ModelType, layers: int) -> dict[str, Any]:
    """Sizes of the index that chooses the tokens that a query reads, in `layers` layers."""
    if kind is _MINIMAX_M3:  # blocks of tokens, and keys in the model's type
        sparse = config.get("sparse_attention_config") or {}
        names = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks")
        legacy = ("sparse_num_index_heads", "sparse_index_dim", "sparse_block_size", "sparse_topk_blocks")
        pairs = zip(names, legacy, strict=True)
        heads, width, block, blocks = (sparse.get(old) or config.integer(new) for new, old in pairs)
        return {
            "indexed_layers": layers,
            "index_layers": layers,
            "index_bytes": width * _itemsize(config),
            "index_pair_size": heads * width,
            "index_parameters": config.integer("hidden_size") * (heads + 1) * width,
            "selected": block * blocks,
            "block_size": block,
        }
    heads, width = config.integer("index_n_heads"), config.integer("index_head_dim")
    hidden = config.integer("hidden_size")
    return {
        "indexed_layers": layers,
        "index_layers": _indices(config, layers),
        # fp8 keys, and a scale of four bytes for each 128 of their numbers, as in vLLM
        "index_bytes": width + -(-width // 128) * 4,
        "index_pair_size": heads * width,
        "index_parameters": config.integer("q_lora_rank") * heads * width + hidden * (width + heads),
        "selected": config.integer("index_topk"),
    }


def _indices(config: ModelConfig, layers: int) -> int:
    """Number of layers with an index of their own; others use that of a layer before them."""
    listed = config.listed("indexer_types", layers, {"full": "full", "shared": "shared"})
    if listed is not None:
        return listed.count("full")
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, (str, list)):
        return sum(str(mark).upper().startswith("F") for mark in pattern)
    step, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    return sum(max(layer - offset + 1, 0) % step == 0 for layer in range(layers))


def _kv_heads(config: ModelConfig, heads: int) -> int:
    """Number of KV heads: null means one per query head, and so does a missing key of a Llama model."""
    if "num_key_value_heads" in config.keys or config.get("model_type") == "llama":
        return config.integer_or("num_key_value_heads", heads)
    return config.integer("num_key_value_heads")


def _head_dim(config: ModelConfig, kind: ModelType, heads: int) -> int:
    return config.integer("head_dim") if kind.own_head_dim else config.integer_or("head_dim", _share(config, heads))


def _share(config: ModelConfig, heads: int) -> int:
    width = config.integer("hidden_size")
    if width % heads and config.get("head_dim") is None:
        raise config.error("hidden_size", f"a multiple of num_attention_heads={heads}, or head_dim")
    return width // heads


def _local(config: ModelConfig, kind: ModelType, kinds: list[str]) -> list[LocalLayers]:
    """The layers of windows and of chunks."""
    local = []
    for name, reach, key in ((WINDOW, "window", "sliding_window"), (CHUNK, "chunk", "attention_chunk_size")):
        if name in kinds:
            heads = config.integer("num_attention_heads")
            stored, width = _kv_heads(config, heads), _head_dim(config, kind, heads)
            local.append(
                LocalLayers(
                    layers=kinds.count(name),
                    reach=reach,
                    span=config.integer(key),
                    kv_size=2 * stored * width,
                    pair_size=2 * heads * width,
                    parameters=config.integer("hidden_size") * 2 * (heads + stored) * width,
                    first=kinds[0] == name,
                )
            )
    return local


# Layers whose entries share blocks (DeepSeek-V4).


def _packed_projections(config: ModelConfig) -> int:
    """Parameters of a layer beside its entries: queries, latents, outputs in groups, and hyper-connections."""
    hidden, rank, width = (config.integer(key) for key in ("hidden_size", "q_lora_rank", "head_dim"))
    heads, groups, out = (config.integer(key) for key in ("num_attention_heads", "o_groups", "o_lora_rank"))
    streams = config.integer("hc_mult")
    mixed = 2 * (2 + streams) * streams * streams * hidden
    return hidden * rank + rank * heads * width + hidden * width + heads * width * out + groups * out * hidden + mixed


def _packed(config: ModelConfig, kinds: list[str]) -> list[PackedEntries]:
    """The tables of entries in the order of vLLM's groups: of the first layer that has each."""
    width, heads, span = (config.integer(key) for key in ("head_dim", "num_attention_heads", "sliding_window"))
    latent = width + _rotated(config, width) + PACKED_SCALES
    aligned = {"alignment": PACKED_ALIGNMENT}
    read = {"entry_bytes": latent, "pair_size": 2 * heads * width, **aligned}
    tables = {"window": PackedEntries(layers=len(kinds), span=span, block_size=PACKED_WINDOW, **read)}
    order = []
    for kind in dict.fromkeys(kinds):
        layers, (tokens, block) = kinds.count(kind), COMPRESSION[kind]
        if not tokens:
            order += ["window"]
            continue
        overlap = 2 if kind == COMPRESSED else 1  # entries of 4 tokens also have those of the 4 before
        state = {"layers": layers, "span": overlap * tokens, "block_size": block, **aligned}
        entries = {"layers": layers, "tokens": tokens, "block_size": PACKED_BLOCK}
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


def _compressor(config: ModelConfig, overlap: int, width: int) -> dict[str, int]:
    """Bytes per token of a compressor's states, numbers and weights of four bytes, and its parameters."""
    numbers = 2 * overlap * width
    return {"entry_bytes": 4 * numbers, "parameters": config.integer("hidden_size") * numbers}


def _index_width(config: ModelConfig) -> int:
    return config.integer("index_head_dim")


def _index_entries(config: ModelConfig, sizes: dict[str, int]) -> PackedEntries:
    """Keys of an index: a byte per number, and a scale of four bytes for each 128 of them."""
    width, heads = _index_width(config), config.integer("index_n_heads")
    return PackedEntries(
        **sizes,
        entry_bytes=width + width // 128 * 4,
        pair_size=heads * width,
        parameters=config.integer("q_lora_rank") * heads * width + config.integer("hidden_size") * heads,
    )


# Recurrent layers.


def _recurrent_sizes(config: ModelConfig, kind: ModelType, layers: int, itemsize: int) -> dict[str, Any]:
    if kind.recurrence == "KDA":
        return _delta_sizes(config, layers, itemsize)
    if kind.recurrence == "Mamba-2":
        return _mamba_sizes(config, layers, itemsize)
    config.check_value("attn_output_gate", [None, True], "true")
    config.check_value("mamba_ssm_dtype", [None, *ITEMSIZES], among("", ITEMSIZES))
    return {
        "recurrent_layers": layers,
        "recurrent_key_heads": config.integer("linear_num_key_heads"),
        "recurrent_value_heads": config.integer("linear_num_value_heads"),
        "recurrent_key_dim": config.integer("linear_key_head_dim"),
        "recurrent_value_dim": config.integer("linear_value_head_dim"),
        "conv_kernel": config.integer("linear_conv_kernel_dim"),
        # the dtype of the state in transformers
        "state_itemsize": ITEMSIZES[config.get("mamba_ssm_dtype") or "float32"],
        "conv_itemsize": itemsize,
        "grid": SCAN_CHUNK,
    }


def _delta_sizes(config: ModelConfig, layers: int, itemsize: int) -> dict[str, int]:
    """Sizes of Kimi Delta Attention: as many heads of keys as of values, each with a gate per channel."""
    listed = config.get("linear_attn_config") or {}
    heads, width, kernel = (
        listed.get(name) or config.integer(key)
        for name, key in (
            ("num_heads", "linear_num_heads"),
            ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )
    hidden, channels = config.integer("hidden_size"), heads * width
    gates = 2 * (hidden * width + width * channels) + hidden * heads  # of decay, of the output, and the write strength
    return {
        "recurrent_layers": layers,
        "recurrent_key_heads": heads,
        "recurrent_value_heads": heads,
        "recurrent_key_dim": width,
        "recurrent_value_dim": width,
        "conv_kernel": kernel,
        "exports_states": True,
        "recurrent_parameters": 4 * hidden * channels + gates + 3 * channels * kernel,
        "conv_itemsize": itemsize,
        "grid": SCAN_CHUNK,
    }


def _mamba_sizes(config: ModelConfig, layers: int, itemsize: int) -> dict[str, Any]:
    """Sizes of Mamba-2: groups of heads share what they write and read, as heads of keys; its state is as in vLLM."""
    hidden, heads, groups = (
        config.integer("hidden_size"),
        config.integer("mamba_n_heads"),
        config.integer("mamba_n_groups"),
    )
    numbers, kernel = config.integer("mamba_d_state"), config.integer("mamba_d_conv")
    is_derived = config.get("mamba_d_head") in (None, "auto")
    width = config.integer("mamba_expand") * hidden // heads if is_derived else config.integer("mamba_d_head")
    inner, channels = heads * width, heads * width + 2 * groups * numbers
    return {
        "recurrent_layers": layers,
        "recurrent_key_heads": groups,
        "recurrent_value_heads": heads,
        "recurrent_key_dim": numbers,
        "recurrent_value_dim": width,
        "conv_kernel": kernel,
        "exports_states": True,
        "recurrent_parameters": hidden * (inner + channels + heads) + inner * hidden + channels * kernel,
        "state_itemsize": itemsize,
        "conv_itemsize": itemsize,
        "grid": 1,  # vLLM ends a scan where a state is stored
    }


# Mixtures of experts.


def _dense_width(config: ModelConfig, kind: ModelType) -> int:
    return config.integer(kind.dense_width)


def _expert_layers(config: ModelConfig, kind: ModelType, layers: int) -> int:
    """Number of layers with a mixture of experts instead of one SwiGLU block."""
    if kind.experts == "none" or (kind.experts == "gemma4" and not config.get("enable_moe_block")):
        return 0
    if kind.experts in ("every", "gemma4"):
        return layers if kind is not _GRANITE4 or config.integer("num_local_experts", least=0) else 0
    if kind.experts == "behind":
        listed = config.listed("mlp_layer_types", layers, {"dense": "dense", "sparse": "sparse"})
        if listed is not None:
            return listed.count("sparse")
        if isinstance(config.get("moe_layer_freq"), list):
            return sum(map(bool, config.keys["moe_layer_freq"]))
        dense = config.get("first_k_dense_replace")
        return layers - min(layers, kind.dense_first if dense is None else dense)
    if kind.experts == "between":
        first, last = (config.get(f"moe_layer_{end}_index") for end in ("start", "end"))
        inside = range(kind.dense_first if first is None else first, layers if last in (None, -1) else last + 1)
        return sum((layer + 1) % config.integer_or("moe_layer_interval", 1) == 0 for layer in inside)
    if kind.experts == "stepped":
        listed_layers = config.get("moe_layers")
        step = config.integer_or("interleave_moe_layer_step", 1)
        return len(listed_layers) if listed_layers is not None else layers // step
    if config.integer(_experts_key(config), least=0) == 0:
        return 0
    step, dense = config.integer_or("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _experts_key(config: ModelConfig) -> str:
    """The key of the number of experts: files written by transformers use another name than published files."""
    names = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
    return next((name for name in names if config.get(name) is not None), "num_experts")


def _expert_sizes(config: ModelConfig, kind: ModelType, layers: int) -> dict[str, Any]:
    width = config.integer(kind.expert_width)
    names = ("top_k_experts", "num_experts_per_token", "moe_k")
    chosen = next((key for key in names if config.get(key) is not None), "num_experts_per_tok")
    counts = ("num_shared_experts", "moe_num_shared_experts")
    counted = next((name for name in counts if name in config.keys), "n_shared_experts")
    key = counted if kind.shared_width == "n_shared_experts" else kind.shared_width
    shared = config.integer(key, least=0) if key else 0
    return {
        "expert_layers": layers,
        "experts": config.integer(_experts_key(config)),
        "experts_per_token": config.integer(chosen),
        "expert_intermediate_size": width,
        "shared_intermediate_size": shared * width if kind.shared_width == "n_shared_experts" else shared,
        "gated_shared_expert": kind.shared_width == "shared_expert_intermediate_size" or not shared,
    }
