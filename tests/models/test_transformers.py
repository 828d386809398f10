"""Sizes equal those of transformers: parameters of its modules, bytes of its caches, keys of its files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spanlab.model_files import ModelConfig, choices, find_config, find_spec, spec_of
from spanlab.model_spec import ModelSpec

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
    """Parameters of the modules, without norms, biases and the numbers per head of decay."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_modules(name: str):
    spec = written_spec(small_config(name))
    assert spec.parameters + spec.embedding_parameters == matrices(small_config(name))


@pytest.mark.parametrize("name", MODELS)
def test_active_parameters_are_all_but_the_experts_passed_over(name: str):
    spec, config = written_spec(small_config(name)), small_config(name)
    unused = getattr(config, "num_experts", 0) - getattr(config, "num_experts_per_tok", 0)
    per_layer = 3 * config.hidden_size * getattr(config, "moe_intermediate_size", 0) * unused
    assert spec.layer_parameters - spec.active_layer_parameters == spec.expert_layers * per_layer


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
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_a_real_cache(name: str):
    spec = written_spec(small_config(name))
    _, cache = run(small_config(name), 7)
    assert cache_bytes(cache, "keys", "values") == 7 * spec.kv_bytes_per_token
    assert cache_bytes(cache, "recurrent_states") == spec.state_bytes - spec.conv_state_bytes
    needed = spec.conv_kernel - 1  # transformers also keeps the input before those that the next output needs
    assert cache_bytes(cache, "conv_states") * needed == spec.conv_state_bytes * (needed + 1)
    assert spec.is_hybrid == (spec.state_bytes > 0)


def test_text_of_a_model_that_sees_is_its_text_model():
    text = small_config("qwen3_5_text").to_dict()
    multimodal = AutoConfig.for_model("qwen3_5", text_config=text, vision_config={"depth": 1}, dtype="float32")
    assert written_spec(multimodal) == written_spec(small_config("qwen3_5_text"))


@pytest.mark.parametrize("name", choices())
def test_choices_of_conf_model_are_models_of_transformers(name: str):
    keys = dict(find_config(name).keys)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    assert [key for key in keys if not hasattr(config, key) and key != "full_attention_interval"] == []
    spec = find_spec(name)
    assert spec.parameters + spec.embedding_parameters == matrices(config)


def test_a_saved_model_is_found_by_its_folder(tmp_path: Path):
    model, cache = run(small_config("qwen3"), 3)
    model.save_pretrained(tmp_path)
    assert cache_bytes(cache, "keys", "values") == 3 * find_spec(str(tmp_path)).kv_bytes_per_token
