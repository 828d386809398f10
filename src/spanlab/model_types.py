"""Sizes of a model from its config.json, type by type; bytes and FLOPs follow from them
(`spanlab.model_spec`).

The keys and their defaults are those of transformers' configuration classes. A default that is a
number of one model and not a rule, such as 32 heads, is not used: the key is required. Vision
towers and layers that predict more than one token are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from spanlab.model_config import (
    BOTH,
    CHUNK,
    COMPRESSED,
    FULL,
    HEAVY,
    INDEXED,
    ITEMSIZES,
    KINDS,
    MLP,
    MOE,
    RECURRENT,
    WINDOW,
    ModelConfig,
    Pattern,
    all_full,
    all_indexed,
    behind_dense,
    both_in_one,
    chunks,
    compressed,
    every_nth,
    kimi,
    late_windows,
    lettered,
    marked_windows,
    numbered,
    only_listed,
    periodic,
    recurrent_but_every,
    sparse,
    windows,
)
from spanlab.model_families import (
    PACKED_BLOCK,
    HeadsOf,
    adjusted_width,
    alternating_streams,
    blocks_in_common,
    double_heads,
    doubled_blocks,
    gated_heads,
    heads_of,
    listed_drafts,
    lone_blocks,
    mimo_heads,
    mimo_window_heads,
    packed_projections,
    packed_tables,
    parallel_mixers,
    recurrent_sizes,
    step_heads,
    step_window_heads,
)
from spanlab.model_spec import LocalLayers, ModelSpec
from spanlab.registry import among

# ------------------------------------------------------------------------------
# Types of models: which kinds of layers they have, and where the sizes of each are.
# ------------------------------------------------------------------------------

LATENT_BLOCK, STATED_LATENT_BLOCK = 64, 128
"""Tokens of a block of latents in vLLM's FlashMLA and FlashInfer, and beside states; CUTLASS MLA
takes 128."""
#: Bytes of a weight of an expert, and of another weight, by the method in `quantization_config`;
#: None: by dtype. Scales of fp8, four bytes for 128 x 128 weights, are left out; those of mxfp4 are
#: one byte for 32 weights.
QUANTISED: dict[str, tuple[float, int | None]] = {"fp8": (1, 1), "mxfp4": (0.5 + 1 / 32, None)}


@dataclass(frozen=True)
class ModelType:
    """Layers of a model type, and the keys that its file must have.

    `kinds`          kinds of layers that it may have
    `pattern`        kinds of the layers of a file without `layer_types`
    `gated`          a gate on the output of attention
    `own_head_dim`   head_dim is required; otherwise it defaults to hidden_size /
                     num_attention_heads
    `latent`         keys and values of all heads are one latent (MLA)
    `heads`          sizes of the heads of layers that read all tokens, and of those with a window
    `beyond`         tokens that a window has beyond `sliding_window`, as in vLLM: the token itself,
                     in Cohere's
    `window_drafts`  whether layers of multi-token prediction have a window, as in vLLM
    `recurrence`     kind of its recurrent layers, whose sizes have keys of their own
    `state_key`      key of the type of their states, float32 if it is missing; "": the model's type
    `attends_first`  attention is made before recurrent layers, whatever the first layer is, as in
                     vLLM
    `tied`           a file that does not say so has one table of embeddings for input and output
    `experts`        layers with a mixture of experts: none; every; counted, every one unless the
                     number of experts is zero; listed, by decoder_sparse_step and mlp_only_layers;
                     behind, after first_k_dense_replace dense ones, or as mlp_layer_types lists;
                     stepped, every n-th; between, from moe_layer_start_index to
                     moe_layer_end_index; periodic, as attention; alone, in layers of their own
    `dense_first`    dense layers before those with experts, where the file does not say; None: it
                     must
    `expert_width`   key of the width of an expert
    `dense_width`    key of the width of a layer without experts
    `shared_width`   key of the width of an expert for all tokens; "": none; n_shared_experts: their
                     number
    `counts_shared`  that is the width of one of n_shared_experts
    `shares`         a file must give their number; else there are none if it does not
    `matrices`       of an MLP block and of an expert
    `others`         further sizes, from the kinds of layers
    """

    kinds: tuple[str, ...] = (FULL,)
    pattern: Pattern = all_full
    gated: bool = False
    own_head_dim: bool = False
    latent: bool = False
    heads: tuple[HeadsOf, HeadsOf] = (heads_of, heads_of)
    beyond: int = 0
    window_drafts: Callable[[ModelConfig], bool] = lambda config: False
    recurrence: str = "gated_delta_net"
    state_key: str = ""
    attends_first: bool = False
    tied: bool = False
    experts: str = "none"
    dense_first: int | None = 1
    expert_width: str = "moe_intermediate_size"
    dense_width: str = "intermediate_size"
    shared_width: str = ""
    counts_shared: bool = False
    shares: bool = True
    matrices: int = 3
    others: Callable[[ModelConfig, list[str]], dict[str, Any]] = lambda config, kinds: {}


_LOCAL, _HYBRID = (FULL, WINDOW), (FULL, RECURRENT)
_LATENT = ModelType(latent=True, experts="behind", shared_width="n_shared_experts")
_INDEXED = ModelType(
    (INDEXED,), all_indexed, latent=True, experts="behind", shared_width="n_shared_experts"
)
_WINDOWED = ModelType(_LOCAL, windows)
_GATED = ModelType(_HYBRID, recurrent_but_every, gated=True, own_head_dim=True)
_GATED_MOE = replace(_GATED, experts="every", shared_width="shared_expert_intermediate_size")
_GEMMA = ModelType(_LOCAL, every_nth(2), own_head_dim=True, tied=True)
_GEMMA3 = replace(_GEMMA, pattern=every_nth(6, "sliding_window_pattern", "_sliding_window_pattern"))
_GEMMA4 = replace(
    _GEMMA,
    pattern=every_nth(6),
    experts="gemma4",
    shared_width="intermediate_size",
    others=doubled_blocks,
)
_GEMMA3N = replace(_GEMMA, pattern=every_nth(5), others=alternating_streams)
_QWEN2, _QWEN3 = ModelType(_LOCAL, late_windows), ModelType(_LOCAL, late_windows, own_head_dim=True)
_QWEN3_MOE = ModelType(_LOCAL, late_windows, experts="listed")
_GLM4 = ModelType(own_head_dim=True)
_GLM4_MOE = ModelType(own_head_dim=True, experts="behind", shared_width="n_shared_experts")
_LLAMA4 = ModelType(
    (FULL, CHUNK),
    chunks,
    experts="stepped",
    expert_width="intermediate_size",
    dense_width="intermediate_size_mlp",
    shared_width="intermediate_size",
)
_MINIMAX_M3 = ModelType(
    (FULL, INDEXED),
    sparse,
    own_head_dim=True,
    experts="behind",
    dense_first=0,
    expert_width="intermediate_size",
    dense_width="dense_intermediate_size",
    shared_width="shared_intermediate_size",
)
_DEEPSEEK_V4 = ModelType(
    (COMPRESSED, HEAVY, WINDOW),
    compressed,
    own_head_dim=True,
    experts="every",
    shared_width="n_shared_experts",
)
#: Every layer has experts as wide as its `intermediate_size` says.
_MIXTURE = ModelType(experts="every", expert_width="intermediate_size")
_GRANITE4 = replace(
    _MIXTURE,
    kinds=_HYBRID,
    pattern=only_listed,
    recurrence="mamba_2",
    experts="counted",
    dense_width="shared_intermediate_size",
    shared_width="shared_intermediate_size",
)
_NEMOTRON_H = ModelType(
    (FULL, RECURRENT, MLP, MOE),
    lettered,
    recurrence="mamba_2",
    state_key="mamba_ssm_cache_dtype",
    experts="alone",
    shared_width="moe_shared_expert_intermediate_size",
    counts_shared=True,
    matrices=2,
    others=lone_blocks,
)
_JAMBA = ModelType(
    _HYBRID, periodic, recurrence="mamba_1", experts="periodic", expert_width="intermediate_size"
)
_ZAMBA2 = ModelType(
    (RECURRENT, BOTH),
    only_listed,
    heads=(double_heads, double_heads),
    recurrence="mamba_2",
    attends_first=True,
    tied=True,
    others=blocks_in_common,
)
_LFM2 = ModelType(_HYBRID, numbered("full_attn_idxs"), recurrence="short_conv", tied=True)
_COHERE2 = ModelType(
    _LOCAL, every_nth(4, "sliding_window_pattern", "_sliding_window_pattern"), beyond=1, tied=True
)
_COHERE2_MOE = replace(
    _COHERE2,
    pattern=behind_dense,
    experts="behind",
    dense_first=0,
    expert_width="intermediate_size",
    dense_width="prefix_dense_intermediate_size",
    shared_width="n_shared_experts",
    shares=False,
)
_STEP3P5 = ModelType(
    _LOCAL,
    only_listed,
    heads=(step_heads, step_window_heads),
    window_drafts=listed_drafts,
    experts="behind",
    shared_width="share_expert_dim",
    others=gated_heads,
)
_MIMO_V2 = ModelType(
    _LOCAL,
    marked_windows,
    heads=(mimo_heads, mimo_window_heads),
    window_drafts=lambda config: True,
    experts="behind",
)
MODEL_TYPES = {
    **dict.fromkeys(("llama", "olmo2", "granite", "hunyuan_v1_dense"), ModelType()),
    "smollm3": ModelType(_LOCAL, late_windows, tied=True),
    "ernie4_5": replace(_GLM4, tied=True),
    "ernie4_5_moe": ModelType(tied=True, experts="between", shared_width="n_shared_experts"),
    **dict.fromkeys(("seed_oss", "glm4", "glm4v_text"), _GLM4),
    "mistral": _WINDOWED,
    "ministral": _WINDOWED,
    "ministral3": _WINDOWED,
    "mixtral": replace(_MIXTURE, kinds=_LOCAL, pattern=windows),
    **dict.fromkeys(("granitemoe", "olmoe"), _MIXTURE),
    "phi3": _WINDOWED,
    **dict.fromkeys(
        ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2
    ),
    "qwen2_moe": replace(_QWEN3_MOE, shared_width="shared_expert_intermediate_size"),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), _QWEN3),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), _QWEN3_MOE),
    "qwen3_next": replace(_GATED_MOE, experts="listed"),
    "qwen3_5": _GATED,
    "qwen3_5_text": _GATED,
    "qwen3_5_moe": _GATED_MOE,
    "qwen3_5_moe_text": _GATED_MOE,
    "gpt_oss": ModelType(
        _LOCAL, every_nth(2), own_head_dim=True, experts="every", expert_width="intermediate_size"
    ),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), _GEMMA4),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _GEMMA3N),
    "cohere2": _COHERE2,
    "cohere2_moe": _COHERE2_MOE,
    **dict.fromkeys(("step3p5", "step3p7"), _STEP3P5),
    "mimo_v2_flash": _MIMO_V2,
    "olmo3": ModelType(_LOCAL, every_nth(4)),
    "exaone4": ModelType(_LOCAL, every_nth(4, "sliding_window_pattern")),
    "exaone_moe": ModelType(
        _LOCAL,
        every_nth(4, "sliding_window_pattern"),
        experts="behind",
        shared_width="n_shared_experts",
    ),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "axk1"), _LATENT),
    "mistral4": replace(_LATENT, dense_first=0),
    "youtu": ModelType(latent=True, tied=True),
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "kimi_linear": replace(_LATENT, kinds=_HYBRID, pattern=kimi, recurrence="kda"),
    "granitemoehybrid": _GRANITE4,
    "bamba": ModelType(_HYBRID, numbered("attn_layer_indices"), recurrence="mamba_2"),
    "nemotron_h": _NEMOTRON_H,
    "falcon_h1": ModelType((BOTH,), both_in_one, recurrence="mamba_2", others=parallel_mixers),
    "jamba": _JAMBA,
    "zamba2": _ZAMBA2,
    "lfm2": replace(_LFM2, others=adjusted_width),
    "lfm2_moe": replace(_LFM2, experts="behind", dense_first=None),
    **dict.fromkeys(("glm4_moe", "glm4v_moe_text", "hy_v3"), _GLM4_MOE),
    "solar_open": replace(_GLM4_MOE, experts="every"),
    "minimax_m2": ModelType(own_head_dim=True, experts="every", expert_width="intermediate_size"),
    "minimax_m3_vl": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
}


def spec_of(config: ModelConfig) -> ModelSpec:
    """The sizes that a config.json defines; ValueError, naming file and key, for a missing or
    unsupported value."""
    kind = _model_type(config)
    itemsize = config.itemsize()
    kinds = _kinds(config, kind)
    layers = len(kinds)
    expert_itemsize, weight_itemsize = _quantised(config, itemsize)
    sparse = kinds.count(MOE) if kind.experts == "alone" else _expert_layers(config, kind, layers)
    others = kind.others(config, kinds)
    stored = kinds[: layers - (config.get("num_kv_shared_layers") or 0)]
    counts = {name: stored.count(name) for name in KINDS.values()}
    full = layers if kind is _DEEPSEEK_V4 else counts[FULL] + counts[INDEXED] + counts[BOTH]
    recurrent = counts[RECURRENT] + counts[BOTH]
    widths = (
        _dense_widths(config, kind, layers) if sparse < others.get("mlp_layers", layers) else [0]
    )
    sizes: dict[str, Any] = _attention(config, kind)
    if recurrent:
        sizes |= recurrent_sizes(config, kind.recurrence, recurrent)
        sizes["attention_first"] = kind.attends_first or kinds[0] in (FULL, BOTH)
        if kind.state_key:
            # a number of a state is a float32 unless the file says otherwise
            config.check_value(kind.state_key, [None, *ITEMSIZES], among("", ITEMSIZES))
            sizes["state_itemsize"] = ITEMSIZES[config.get(kind.state_key) or "float32"]
    if counts[INDEXED]:
        sizes |= _index(config, kind, counts[INDEXED])
    if sparse:
        sizes |= _expert_sizes(config, kind, sparse)
    sizes |= {"intermediate_size": min(widths)} | others
    more = sum(widths) - len(widths) * min(widths)  # of blocks wider than others
    projected = (
        _query_parameters(config, kind, kinds[len(stored) :])
        + 3 * config.integer("hidden_size") * more
    )
    sizes["other_parameters"] = sizes.get("other_parameters", 0) + projected
    # a file that does not say whether the head is the embedding table has the default of its type
    tied = config.flag("tie_word_embeddings") if "tie_word_embeddings" in config.keys else kind.tied
    return ModelSpec(
        name=config.name,
        attention_layers=full,
        hidden_size=config.integer("hidden_size"),
        vocab_size=config.integer("vocab_size"),
        mlp_matrices=kind.matrices,
        local=[] if kind is _DEEPSEEK_V4 else _local(config, kind, kinds, len(stored)),
        packed=packed_tables(config, kinds) if kind is _DEEPSEEK_V4 else [],
        gated_attention=kind.gated,
        tied_embeddings=tied,
        weight_itemsize=weight_itemsize,
        expert_itemsize=expert_itemsize,
        kv_itemsize=itemsize,
        **sizes,
    )


def _kinds(config: ModelConfig, kind: ModelType) -> list[str]:
    """The kind of each layer, as the file lists them, else by the pattern of the type."""
    pattern = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    layers = (
        len(pattern)
        if pattern and "num_hidden_layers" not in config.keys
        else config.integer("num_hidden_layers")
    )
    key = "layer_types" if config.get("layer_types") is not None else "layers_block_type"
    kinds = config.listed(key, layers, KINDS) or kind.pattern(config, layers)
    for name in kinds:
        if name not in kind.kinds:
            raise ValueError(
                f"{config.source}: {_names([name])} in layer_types: expected {_names(kind.kinds)}"
            )
    if not {FULL, WINDOW, CHUNK, INDEXED, COMPRESSED, HEAVY, BOTH} & {*kinds}:
        attention = FULL if FULL in kind.kinds else BOTH
        raise ValueError(
            f"{config.source}: no attention in layer_types: expected {_names([attention])} in one"
        )
    if len(kinds) != layers:
        raise config.error("num_hidden_layers", f"{len(kinds)}, the number of listed layers")
    return kinds


def _names(kinds: Iterable[str]) -> str:
    """The usual name of each kind in `layer_types`."""
    usual = {kind: name for name, kind in reversed(KINDS.items())}
    return " or ".join(usual[kind] for kind in kinds)


def _model_type(config: ModelConfig) -> ModelType:
    name = config.get("model_type")
    if name not in MODEL_TYPES:
        for key in ("layer_types", "layers_block_type"):
            listed = config.get(key)
            if (
                unknown := [kind for kind in listed if kind not in KINDS]
                if isinstance(listed, list)
                else []
            ):
                expected = (
                    f"expected {' or '.join(KINDS)}, for the memory of other layers is not modelled"
                )
                raise ValueError(
                    f"{config.source}: {unknown[0]} in {key} of model_type={name}: {expected}"
                )
        raise config.error("model_type", among(str(name), MODEL_TYPES))
    if config.get("num_kv_shared_layers") and MODEL_TYPES[name] not in (_GEMMA3N, _GEMMA4):
        raise config.error(
            "num_kv_shared_layers", "0, for layers of this type read no keys and values of others"
        )
    if not MODEL_TYPES[name].latent:
        config.check_value("kv_lora_rank", [None], "none, for this type has no latents")
    return MODEL_TYPES[name]


def _quantised(config: ModelConfig, itemsize: int) -> tuple[float, int]:
    """Bytes of an expert's weight, 0 where it is as others, and of another weight."""
    quantised = config.get("quantization_config")
    if quantised is None:
        return 0.0, itemsize
    method = quantised.get("quant_method")
    if method not in QUANTISED:
        expected = f"expected {' or '.join(QUANTISED)}; other sizes are not derived"
        raise ValueError(f"{config.source}: quantization_config.quant_method={method}: {expected}")
    of_experts, of_others = QUANTISED[method]
    if (
        config.get("model_type") == "deepseek_v4"
        and method == "fp8"
        and config.get("expert_dtype") in (None, "fp4")
    ):
        of_experts = QUANTISED["mxfp4"][0]  # as in vLLM, unless the file says fp8
    return (0.0 if of_experts == of_others else of_experts), (of_others or itemsize)


# Attention.


def _attention(config: ModelConfig, kind: ModelType) -> dict[str, Any]:
    """Sizes of the layers that read all tokens."""
    if kind.latent:
        sizes = _latent(config, config.integer("num_attention_heads"))
        return sizes | {"block_size": STATED_LATENT_BLOCK} if RECURRENT in kind.kinds else sizes
    of_full = kind.heads[0](config, kind.own_head_dim)
    sizes, heads = of_full.sizes, of_full.queries
    if of_full.key != of_full.value:
        sizes["attention_parameters"] = config.integer("hidden_size") * (
            of_full.pair_size + of_full.kv_size
        )
    if kind is _DEEPSEEK_V4:
        return sizes | {
            "attention_parameters": packed_projections(config),
            "block_size": PACKED_BLOCK,
        }
    if kind is not _GEMMA4:
        return sizes
    # wider heads, and fewer of keys; without projections of values, they are the keys before
    # rotation
    equal, written = bool(config.get("attention_k_eq_v")), config.get("per_layer_config")
    if written:  # by transformers; the same for every such layer
        listed = list(written.values())
        if not isinstance(listed[0], dict) or any(layer != listed[0] for layer in listed):
            raise config.error(
                "per_layer_config", "the same sizes for all layers that read all tokens"
            )
        wider = ModelConfig(config.source, config.name, listed[0], "per_layer_config.")
        sizes["kv_heads"] = wider.integer_or("num_key_value_heads", sizes["kv_heads"])
        sizes["head_dim"] = wider.integer("head_dim")
    else:
        sizes["head_dim"] = config.integer_or("global_head_dim", 512)
        if equal:
            sizes["kv_heads"] = config.integer_or("num_global_key_value_heads", sizes["kv_heads"])
    projected = 2 * heads + (1 if equal else 2) * sizes["kv_heads"]
    return sizes | {
        "attention_parameters": config.integer("hidden_size") * projected * sizes["head_dim"]
    }


def _latent(config: ModelConfig, heads: int) -> dict[str, Any]:
    """Sizes of multi-head latent attention: one latent and one rotated key per token, for all
    heads."""
    width, rank = config.integer("hidden_size"), config.integer("kv_lora_rank")
    rotated, plain, value = (
        config.integer(f"{name}_head_dim") for name in ("qk_rope", "qk_nope", "v")
    )
    query_rank = config.get("q_lora_rank")
    query = heads * (rotated + plain)
    queries = (
        width * query if query_rank is None else config.integer("q_lora_rank") * (width + query)
    )
    keys = width * (rank + rotated) + rank * heads * (plain + value)
    return {
        "attention_heads": heads,
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
        sparse = config.inner("sparse_attention_config")
        names = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks")
        legacy = (
            "sparse_num_index_heads",
            "sparse_index_dim",
            "sparse_block_size",
            "sparse_topk_blocks",
        )
        pairs = zip(names, legacy, strict=True)
        heads, width, block, blocks = (
            config.integer(new) if sparse.get(old) is None else sparse.integer(old)
            for new, old in pairs
        )
        return {
            "indexed_layers": layers,
            "index_layers": layers,
            "index_bytes": width * config.itemsize(),
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
        "index_parameters": config.integer("q_lora_rank") * heads * width
        + hidden * (width + heads),
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


def _local(
    config: ModelConfig, kind: ModelType, kinds: list[str], stored: int
) -> list[LocalLayers]:
    """The layers of windows and of chunks; those from `stored` on read the keys and values of
    others."""
    local = []
    for name, reach, names in (
        (WINDOW, "window", ("sliding_window", "sliding_window_size")),
        (CHUNK, "chunk", ("attention_chunk_size",)),
    ):
        if name in kinds:
            heads, hidden = kind.heads[1](config, kind.own_head_dim), config.integer("hidden_size")
            local.append(
                LocalLayers(
                    layers=kinds[:stored].count(name),
                    reach=reach,
                    span=config.any_integer(*names) + kind.beyond,
                    kv_size=heads.kv_size,
                    pair_size=heads.pair_size,
                    parameters=hidden * (heads.pair_size + heads.kv_size),
                    first=kinds[0] == name,
                    readers=kinds[stored:].count(name),
                    drafts=name == WINDOW and kind.window_drafts(config),
                )
            )
    return local


def _query_parameters(config: ModelConfig, kind: ModelType, kinds: list[str]) -> int:
    """Parameters of layers that project queries and outputs, and read the keys and values of
    others."""
    widths = {WINDOW: kind.heads[1](config, kind.own_head_dim).pair_size} if WINDOW in kinds else {}
    if FULL in kinds:
        of_full = _attention(config, kind)
        widths[FULL] = 2 * of_full["attention_heads"] * of_full["head_dim"]
    return config.integer("hidden_size") * sum(widths[name] for name in kinds)


# Mixtures of experts.


def _dense_widths(config: ModelConfig, kind: ModelType, layers: int) -> list[int]:
    """Widths of the MLP blocks: one for all, or as many as the file lists."""
    widths = config.get(kind.dense_width)
    if (
        isinstance(widths, list)
        and widths
        and all(isinstance(width, int) and width > 0 for width in widths)
    ):
        return widths
    names = (
        (kind.dense_width, "block_ff_dim")
        if kind.recurrence == "short_conv"
        else (kind.dense_width,)
    )
    return [config.any_integer(*names)]


def _expert_layers(config: ModelConfig, kind: ModelType, layers: int) -> int:
    """Number of layers with a mixture of experts instead of one SwiGLU block."""
    if kind.experts == "none" or (kind.experts == "gemma4" and not config.get("enable_moe_block")):
        return 0
    if kind.experts in ("every", "gemma4"):
        return layers
    if kind.experts == "counted":
        return layers if config.integer("num_local_experts", least=0) else 0
    if kind.experts == "behind":
        listed = config.listed("mlp_layer_types", layers, {"dense": "dense", "sparse": "sparse"})
        if listed is not None:
            return listed.count("sparse")
        if isinstance(config.get("moe_layer_freq"), list):
            return sum(map(bool, config.keys["moe_layer_freq"][:layers]))
        if config.get("moe_layers_enum"):  # Step-3.5; layers that draft have numbers, too
            numbers = config.keys["moe_layers_enum"].split(",")
            if not all(number.strip().isdecimal() for number in numbers):
                raise config.error("moe_layers_enum", "numbers of layers with commas between them")
            return sum(int(number) < layers for number in numbers)
        names = ("first_k_dense_replace", "num_dense_layers")
        key = next((key for key in names if config.get(key) is not None), None)
        if key is None and kind.dense_first is not None:
            return layers - min(layers, kind.dense_first)
        return layers - min(layers, config.integer(key or names[1], least=0))
    if kind.experts == "periodic":
        period = config.integer("expert_layer_period")
        offset = config.integer("expert_layer_offset", least=0)
        sparse = sum(layer % period == offset for layer in range(layers))
        return sparse if config.integer("num_experts") > 1 else 0
    if kind.experts == "between":
        first, last = (config.get(f"moe_layer_{end}_index") for end in ("start", "end"))
        inside = range(
            (kind.dense_first or 0) if first is None else first,
            layers if last in (None, -1) else last + 1,
        )
        return sum(
            (layer + 1) % config.integer_or("moe_layer_interval", 1) == 0 for layer in inside
        )
    if kind.experts == "stepped":
        listed_layers = config.get("moe_layers")
        step = config.integer_or("interleave_moe_layer_step", 1)
        return len(listed_layers) if listed_layers is not None else layers // step
    if config.integer(_experts_key(config), least=0) == 0:
        return 0
    step, dense = config.integer_or("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _experts_key(config: ModelConfig) -> str:
    """The key of the number of experts: files written by transformers use another name than
    published files."""
    names = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
    return next((name for name in names if config.get(name) is not None), "num_experts")


def _expert_sizes(config: ModelConfig, kind: ModelType, layers: int) -> dict[str, Any]:
    width = config.integer(kind.expert_width)
    names = ("top_k_experts", "num_experts_per_token", "moe_k", "moe_top_k")
    chosen = next((key for key in names if config.get(key) is not None), "num_experts_per_tok")
    counts = ("num_shared_experts", "moe_num_shared_experts")
    counted = next((name for name in counts if name in config.keys), "n_shared_experts")
    key = counted if kind.shared_width == "n_shared_experts" else kind.shared_width
    shared = (
        config.integer(key, least=0) if key and (kind.shares or config.get(key) is not None) else 0
    )
    if kind.counts_shared:
        shared *= config.integer("n_shared_experts", least=0)
    return {
        "expert_layers": layers,
        "experts": config.integer(_experts_key(config)),
        "experts_per_token": config.integer(chosen),
        "expert_intermediate_size": width,
        "shared_intermediate_size": shared * width
        if kind.shared_width == "n_shared_experts"
        else shared,
        "gated_shared_expert": kind.shared_width == "shared_expert_intermediate_size" or not shared,
    }
