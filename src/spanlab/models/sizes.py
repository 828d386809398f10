"""Sizes of a model from its config.json; bytes and FLOPs follow from them (`spanlab.model_spec`).

The keys and their defaults are those of transformers' configuration classes. A default that is a number of one model
and not a rule, such as 32 heads, is not used: the key is required. Vision towers and layers that predict more than one
token are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spanlab.checks import among
from spanlab.model_spec import ModelSpec
from spanlab.models.config import ModelConfig

FULL, RECURRENT = "full_attention", "linear_attention"
SCAN_CHUNK = 64
"""Scan chunk, in tokens, of transformers and of flash-linear-attention; states are stored at multiples of it."""
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelType:
    """Layers of a model type, and the keys that its file must have.

    `hybrid`         GatedDeltaNet layers, and a gate on the output of attention
    `experts`        layers with a mixture of experts: none; listed, by decoder_sparse_step and mlp_only_layers; every
    `shared_expert`  an expert that processes all tokens
    `own_head_dim`   head_dim is required; otherwise it defaults to hidden_size / num_attention_heads
    """

    hybrid: bool = False
    experts: str = "none"
    shared_expert: bool = False
    own_head_dim: bool = False


_QWEN35 = ModelType(hybrid=True, own_head_dim=True)
_QWEN35_MOE = ModelType(hybrid=True, experts="every", shared_expert=True, own_head_dim=True)
MODEL_TYPES = {
    "llama": ModelType(),
    "mistral": ModelType(),
    "qwen2": ModelType(),
    "qwen3": ModelType(own_head_dim=True),
    "qwen3_moe": ModelType(experts="listed"),
    "qwen3_next": ModelType(hybrid=True, experts="listed", shared_expert=True, own_head_dim=True),
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "qwen3_5_moe_text": _QWEN35_MOE,
}


def spec_of(config: ModelConfig) -> ModelSpec:
    """The sizes that a config.json defines; ValueError, naming file and key, for a missing or unsupported value."""
    config.check_value("kv_lora_rank", [None], "none, for models with latent attention (MLA) are not supported")
    kind = _model_type(config)
    layers, itemsize = config.integer("num_hidden_layers"), _itemsize(config)
    recurrent = _recurrent_layers(config, layers) if kind.hybrid else 0
    _check_window(config)
    heads = config.integer("num_attention_heads")
    sparse = _expert_layers(config, kind, layers)
    return ModelSpec(
        name=config.name,
        attention_layers=layers - recurrent,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size") if sparse < layers else 0,
        vocab_size=config.integer("vocab_size"),
        attention_heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=_head_dim(config, kind, heads),
        gated_attention=kind.hybrid,
        tied_embeddings=config.flag("tie_word_embeddings"),
        weight_itemsize=itemsize,
        kv_itemsize=itemsize,
        **(_recurrent_sizes(config, recurrent, itemsize) if recurrent else {}),
        **(_expert_sizes(config, kind, sparse) if sparse else {}),
    )


def _model_type(config: ModelConfig) -> ModelType:
    name = config.get("model_type")
    if name not in MODEL_TYPES:
        raise config.error("model_type", among(str(name), MODEL_TYPES))
    return MODEL_TYPES[name]


def _itemsize(config: ModelConfig) -> int:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    config.check_value(key, list(ITEMSIZES), among(str(config.get(key)), ITEMSIZES))
    return ITEMSIZES[config.keys[key]]


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


def _check_window(config: ModelConfig) -> None:
    """Raise ValueError for sliding-window attention, whose cache does not grow with the prompt."""
    kinds = [FULL, RECURRENT] if _model_type(config).hybrid else [FULL]
    for kind in config.get("layer_types") or ():
        if kind not in kinds:
            raise ValueError(f"{config.source}: {kind} in layer_types: expected {' or '.join(kinds)}")
    if config.get("model_type") == "mistral" and "sliding_window" not in config.keys:
        raise config.error("sliding_window", "null; transformers takes 4096 for a missing one")
    windowed = config.get("model_type") == "mistral" or bool(config.get("use_sliding_window"))
    if not windowed or config.get("sliding_window") is None:
        return
    positions = config.integer("max_position_embeddings")
    if config.integer("sliding_window") < positions:
        raise config.error("sliding_window", f"null, or max_position_embeddings={positions} or more")


# Recurrent layers.


def _recurrent_layers(config: ModelConfig, layers: int) -> int:
    """Number of GatedDeltaNet layers: those that `layer_types` lists, or all but every n-th."""
    kinds = config.get("layer_types")
    if kinds is None:
        return layers - layers // config.integer("full_attention_interval")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.error("layer_types", f"a list of num_hidden_layers={layers} kinds")
    return kinds.count(RECURRENT)


def _recurrent_sizes(config: ModelConfig, layers: int, itemsize: int) -> dict[str, Any]:
    config.check_value("attn_output_gate", [None, True], "true")
    config.check_value("mamba_ssm_dtype", [None, *ITEMSIZES], among("", ITEMSIZES))
    return {
        "recurrent_layers": layers,
        "recurrent_key_heads": config.integer("linear_num_key_heads"),
        "recurrent_value_heads": config.integer("linear_num_value_heads"),
        "recurrent_key_dim": config.integer("linear_key_head_dim"),
        "recurrent_value_dim": config.integer("linear_value_head_dim"),
        "conv_kernel": config.integer("linear_conv_kernel_dim"),
        "state_itemsize": ITEMSIZES[
            config.get("mamba_ssm_dtype") or "float32"
        ],  # the dtype of the state in transformers
        "conv_itemsize": itemsize,
        "grid": SCAN_CHUNK,
    }


# Mixtures of experts.


def _expert_layers(config: ModelConfig, kind: ModelType, layers: int) -> int:
    """Number of layers with a mixture of experts instead of one SwiGLU block."""
    if kind.experts == "none":
        return 0
    if kind.experts == "every":
        return layers
    if config.integer(_experts_key(config), least=0) == 0:
        return 0
    step, dense = config.integer_or("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _experts_key(config: ModelConfig) -> str:
    """The key of the number of experts: files written by transformers use another name than published files."""
    return "num_local_experts" if "num_local_experts" in config.keys else "num_experts"


def _expert_sizes(config: ModelConfig, kind: ModelType, layers: int) -> dict[str, int]:
    shared = config.integer("shared_expert_intermediate_size") if kind.shared_expert else 0
    return {
        "expert_layers": layers,
        "experts": config.integer(_experts_key(config)),
        "experts_per_token": config.integer("num_experts_per_tok"),
        "expert_intermediate_size": config.integer("moe_intermediate_size"),
        "shared_intermediate_size": shared,
    }
