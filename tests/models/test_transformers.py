"""Sizes equal those of transformers: parameters of its modules, bytes of its caches, keys of its files."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spanlab.model_config import ModelConfig
from spanlab.model_files import choices, find_config, find_spec
from spanlab.model_spec import ModelSpec
from spanlab.model_types import spec_of

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "dtype": "float32",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SHARED = {"shared_expert_intermediate_size": 28}
ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = ROUTED | {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
INDEX = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 5}
GEMMA4 = {
    "head_dim": 12,
    "global_head_dim": 20,
    "sliding_window": 16,
    "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 0,
}
LLAMA4 = {
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 28,
    "head_dim": 12,
    "attention_chunk_size": 16,
    "no_rope_layer_interval": 2,
}
MINIMAX_M3 = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 20,
    "rotary_dim": 8,
    "dense_intermediate_size": 28,
    "shared_intermediate_size": 12,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
}
GRANITE4 = MAMBA | {
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 28,
}
ERNIE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, "moe_num_shared_experts": 3}
FEWER = {key: value for key, value in LATENT.items() if key not in ROUTED}  # latents without experts
DEEPSEEK_V4 = {
    "num_hidden_layers": 5,
    "head_dim": 24,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 12,
    "hc_mult": 2,
    "num_key_value_heads": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "sliding_window": 16,
    "compress_ratios": [0, 128, 4, 128, 4],
} | INDEX
CONVOLVED = ["conv", "conv", "full_attention", "conv"]
NEMOTRON_H = {
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "head_dim": 20,
    "ssm_state_size": 10,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 3,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 12,
    "num_experts_per_tok": 2,
}
JAMBA = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_dt_rank": 7,
}
ZAMBA2 = {
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
    "num_hidden_layers": 5,
    "n_mamba_heads": 6,
    "mamba_ngroups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "num_mem_blocks": 3,  # one per layer: transformers builds the weights in common for each layer again
    "adapter_rank": 5,
    "num_key_value_heads": 4,
    "chunk_size": 8,
}
GEMMA3N = {
    "num_hidden_layers": 10,
    "head_dim": 12,
    "sliding_window": 16,
    "num_kv_shared_layers": 4,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 6,
    "altup_num_inputs": 3,
    "laurel_rank": 5,
}
COHERE2_MOE = EXPERTS | {
    "sliding_window": 16,
    "head_dim": 12,
    "num_hidden_layers": 6,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 28,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama with wide heads": ("llama", {"head_dim": 20}),
    "llama without groups": ("llama", {"num_key_value_heads": None}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 20}),
    "qwen3_moe with dense layers": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [1], "decoder_sparse_step": 2}),
    "qwen3_next": ("qwen3_next", LINEAR | EXPERTS | SHARED | {"head_dim": 20}),
    "qwen3_next with dense layers": ("qwen3_next", LINEAR | EXPERTS | SHARED | {"mlp_only_layers": [0, 3]}),
    "qwen3_next, dense": ("qwen3_next", LINEAR | {"num_experts": 0}),
    "qwen3_5_text": ("qwen3_5_text", LINEAR | {"head_dim": 20}),
    "qwen3_5_text, every other": ("qwen3_5_text", LINEAR | {"full_attention_interval": 2}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", LINEAR | EXPERTS | SHARED),
    "mistral with windows": ("mistral", {"sliding_window": 16}),
    "ministral": ("ministral", {"sliding_window": 16, "head_dim": 12}),
    "phi3": ("phi3", {"sliding_window": 16}),
    "qwen2 with a few windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 20, "sliding_window": 16}),
    "gemma2": ("gemma2", {"head_dim": 20, "sliding_window": 16}),
    "gemma3_text": ("gemma3_text", {"head_dim": 20, "sliding_window": 16, "num_hidden_layers": 7}),
    "gemma4_text": ("gemma4_text", GEMMA4),
    "gemma4_text, equal keys and values": (
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_text with experts": (
        "gemma4_text",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20},
    ),
    "gemma4_unified_text": ("gemma4_unified_text", GEMMA4),
    "cohere2": ("cohere2", {"sliding_window": 16, "num_hidden_layers": 5}),
    "olmo3": ("olmo3", {"sliding_window": 16, "num_hidden_layers": 5}),
    "exaone4": ("exaone4", {"sliding_window": 16, "sliding_window_pattern": 2}),
    "llama4_text": ("llama4_text", LLAMA4),
    "llama4_text, every other": ("llama4_text", LLAMA4 | {"interleave_moe_layer_step": 2}),
    "deepseek_v3": ("deepseek_v3", LATENT | {"q_lora_rank": 24}),
    "deepseek_v2": ("deepseek_v2", LATENT | {"q_lora_rank": None}),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT | {"q_lora_rank": 24}),
    "deepseek_v32": ("deepseek_v32", LATENT | INDEX | {"q_lora_rank": 24}),
    "deepseek_v4": ("deepseek_v4", DEEPSEEK_V4),
    "glm_moe_dsa": ("glm_moe_dsa", LATENT | INDEX | {"q_lora_rank": 24, "index_topk_freq": 2}),
    "kimi_linear": (
        "kimi_linear",
        {key: value for key, value in LATENT.items() if key != "n_routed_experts"}
        | {"num_local_experts": 6, "linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]},
    ),
    "glm4_moe": ("glm4_moe", ROUTED | {"head_dim": 20}),
    **{name: (name, {"head_dim": 20}) for name in ("glm4", "seed_oss", "ernie4_5", "hunyuan_v1_dense")},
    **{name: (name, {}) for name in ("olmo2", "granite", "smollm3")},
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE),
    "ernie4_5_moe, every other": ("ernie4_5_moe", ERNIE | {"moe_layer_interval": 2, "moe_layer_end_index": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "granitemoe": ("granitemoe", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | SHARED),
    "exaone_moe": ("exaone_moe", EXPERTS | {"sliding_window": 16, "num_shared_experts": 2, "n_group": 1}),
    "hy_v3": ("hy_v3", EXPERTS | {"head_dim": 20, "num_shared_experts": 1}),
    "solar_open": ("solar_open", {key: value for key, value in ROUTED.items() if key[0] != "f"} | {"head_dim": 20}),
    "axk1": ("axk1", LATENT | {"q_lora_rank": 24}),
    "youtu": ("youtu", FEWER | {"q_lora_rank": 24}),
    "granitemoehybrid": ("granitemoehybrid", GRANITE4),
    "granitemoehybrid, dense": ("granitemoehybrid", GRANITE4 | {"num_local_experts": 0, "num_experts_per_tok": 0}),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "nemotron_h": ("nemotron_h", NEMOTRON_H),
    "nemotron_h with experts of a narrower stream": ("nemotron_h", NEMOTRON_H | {"moe_latent_size": 16}),
    "falcon_h1": ("falcon_h1", MAMBA | {"mamba_d_ssm": 96, "head_dim": 20}),
    "jamba": ("jamba", JAMBA),
    "zamba2": ("zamba2", ZAMBA2),
    "zamba2 with adapters of attention": ("zamba2", ZAMBA2 | {"use_shared_attention_adapter": True}),
    "lfm2": ("lfm2", {"layer_types": CONVOLVED, "conv_L_cache": 3, "block_multiple_of": 8}),
    "lfm2, wide as given": ("lfm2", {"full_attn_idxs": [1, 3], "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", EXPERTS | {"layer_types": CONVOLVED, "conv_L_cache": 3, "num_dense_layers": 1}),
    "gemma3n_text": ("gemma3n_text", GEMMA3N),
    "gemma4_text with layers that read those of others": (
        "gemma4_text",
        GEMMA4
        | {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "hidden_size_per_layer_input": 6}
        | {"vocab_size_per_layer_input": 64, "use_double_wide_mlp": True},
    ),
    "cohere2_moe": ("cohere2_moe", COHERE2_MOE),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        ROUTED | {"n_shared_experts": None, "sliding_window": 16, "head_dim": 20, "v_head_dim": 12},
    ),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 20}),
    "minimax_m3_vl_text": ("minimax_m3_vl_text", MINIMAX_M3),
}


@cache
def small_config(name: str) -> PreTrainedConfig:
    """A small configuration of a model type."""
    kind, keys = MODELS[name]
    return AutoConfig.for_model(kind, **SIZES | keys)


def written_spec(config: PreTrainedConfig) -> ModelSpec:
    """The sizes from the config.json that transformers writes for a configuration."""
    return spec_of(ModelConfig.of("model=config.json", "small", json.loads(config.to_json_string())))


def matrices(config: PreTrainedConfig) -> int:
    """Parameters of the modules, without norms, biases, numbers per head of decay and the sum of streams."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = [weight for name, weight in model.named_parameters() if not name.endswith(("bias", "A_log"))]
    mixed = sum(weight.numel() for name, weight in model.named_parameters() if name.endswith("hc_head.hc_fn"))
    return sum(weight.numel() for weight in weights if weight.ndim > 1) - mixed


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_modules(name: str):
    spec = written_spec(small_config(name))
    assert spec.parameters + spec.embedding_parameters + spec.table_parameters == matrices(small_config(name))


@pytest.mark.parametrize("name", MODELS)
def test_active_parameters_are_all_but_the_experts_passed_over(name: str):
    spec, config = written_spec(small_config(name)), small_config(name)
    with torch.device("meta"):
        named = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    stacked = [weight for key, weight in named.items() if ".experts." in key and weight.ndim == 3]
    unused = [weight.numel() * (spec.experts - spec.experts_per_token) // spec.experts for weight in stacked]
    assert spec.layer_parameters - spec.active_layer_parameters == sum(unused)


def run(config: PreTrainedConfig, tokens: int) -> tuple[PreTrainedModel, Any]:
    """A random model and its cache after a prompt."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(torch.arange(1, tokens + 1)[None], use_cache=True).past_key_values
    return model, cache


def cache_bytes(cache: Any, *names: str) -> int:
    """Bytes of the tensors of these names in all layers of a cache; recurrent layers have one by number of state."""
    values = [vars(layer)[name] for layer in cache.layers for name in names if name in vars(layer)]
    tensors = [tensor for value in values for tensor in (value.values() if isinstance(value, dict) else [value])]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_a_real_cache(name: str):
    spec = written_spec(small_config(name))
    _, cache = run(small_config(name), 7)
    if not spec.has_latents:  # transformers stores the keys and values of all heads, a server one latent
        assert cache_bytes(cache, "keys", "values") == 7 * spec.kv_bytes_per_token
    assert cache_bytes(cache, "recurrent_states") == spec.state_bytes - spec.conv_state_bytes
    needed = spec.conv_kernel - 1  # transformers also keeps the input before those that the next output needs
    assert cache_bytes(cache, "conv_states") * needed == spec.conv_state_bytes * (needed + 1)
    assert spec.is_hybrid == (spec.state_bytes > 0)


@pytest.mark.parametrize("name", sorted({kind for kind, _ in MODELS.values()}))
def test_a_file_that_does_not_say_so_has_the_output_head_of_its_type(name: str):
    keys = json.loads(small_config(next(key for key, (kind, _) in MODELS.items() if kind == name)).to_json_string())
    del keys["tie_word_embeddings"]
    spec = spec_of(ModelConfig.of("model=config.json", "small", keys))
    assert spec.tied_embeddings == AutoConfig.for_model(name).tie_word_embeddings


def test_text_of_a_model_that_sees_is_its_text_model():
    text = small_config("qwen3_5_text").to_dict()
    multimodal = AutoConfig.for_model("qwen3_5", text_config=text, vision_config={"depth": 1}, dtype="float32")
    assert written_spec(multimodal) == written_spec(small_config("qwen3_5_text"))


@pytest.mark.parametrize("name", choices())
def test_choices_of_conf_model_are_models_of_transformers(name: str):
    keys = dict(find_config(name).keys)
    keys.pop("quantization_config", None)  # sizes of weights, not their number
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    assert [key for key in keys if not hasattr(config, key) and key != "full_attention_interval"] == []
    spec = find_spec(name)
    assert spec.parameters + spec.embedding_parameters == matrices(config)


def test_a_saved_model_is_found_by_its_folder(tmp_path: Path):
    model, cache = run(small_config("qwen3"), 3)
    model.save_pretrained(tmp_path)
    assert cache_bytes(cache, "keys", "values") == 3 * find_spec(str(tmp_path)).kv_bytes_per_token
