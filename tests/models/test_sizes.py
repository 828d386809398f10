"""Sizes from the keys of a config.json; an error names a key that is missing or unsupported."""

from __future__ import annotations

import pytest

from spanlab.model_files import MODEL_TYPES, ModelConfig, spec_of
from spanlab.model_spec import ModelSpec

LLAMA = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = LLAMA | {
    "model_type": "qwen3_5_text",
    "head_dim": 16,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
BASES = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": None},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": LLAMA | EXPERTS | {"model_type": "qwen3_moe"},
    "qwen3_next": HYBRID | EXPERTS | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 16},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe": HYBRID | EXPERTS | {"model_type": "qwen3_5_moe", "shared_expert_intermediate_size": 16},
}


def spec_with(base: str = "llama", without: str = "", **changes: object) -> ModelSpec:
    """The sizes of a small model of a type, with changed keys."""
    keys = {key: value for key, value in (BASES[base] | changes).items() if key != without}
    return spec_of(ModelConfig.of("model=here.json", "small", keys))


@pytest.mark.parametrize("changes", [{"num_key_value_heads": None}, {"without": "num_key_value_heads"}])
def test_llama_without_kv_heads_has_one_per_query_head(changes: dict):
    assert spec_with(**changes).kv_heads == 4


def test_head_dim_is_the_width_over_heads_unless_given():
    assert spec_with().head_dim == spec_with(head_dim=None).head_dim == 16
    assert spec_with(head_dim=20).head_dim == 20


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_a_dtype_is_bytes_of_weights_and_kv(dtype: str, size: int):
    for key in ("dtype", "torch_dtype"):
        spec = spec_with(without="dtype" if key == "torch_dtype" else "", **{key: dtype})
        assert (spec.weight_itemsize, spec.kv_itemsize) == (size, size)


def test_hybrid_layers_are_listed_or_every_nth():
    kinds = ["linear_attention", "full_attention"] * 4
    assert (spec_with("qwen3_5_text").recurrent_layers, spec_with("qwen3_5_text").attention_layers) == (6, 2)
    assert spec_with("qwen3_5_text", full_attention_interval=3).attention_layers == 2
    assert spec_with("qwen3_5_text", layer_types=kinds).attention_layers == 4
    assert spec_with("qwen3_5_text").gated_attention


def test_states_are_fp32_unless_the_file_says_otherwise():
    assert (spec_with("qwen3_5_text").state_itemsize, spec_with("qwen3_5_text").conv_itemsize) == (4, 2)
    assert spec_with("qwen3_5_text", mamba_ssm_dtype="bfloat16").state_itemsize == 2


def test_text_config_is_the_model_and_the_rest_is_beside_it():
    config = {"model_type": "qwen3_5", "vision_config": {"hidden_size": 9}, "dtype": "float32"}
    text = {key: value for key, value in HYBRID.items() if key != "dtype"}
    spec = spec_of(ModelConfig.of("model=here.json", "small", config | {"text_config": text}))
    assert spec == spec_with("qwen3_5_text", dtype="float32")


def test_experts_are_in_every_layer_or_where_the_file_says():
    assert spec_with("qwen3_5_moe", without="intermediate_size").expert_layers == 8
    assert spec_with("qwen3_moe").expert_layers == 8
    assert spec_with("qwen3_moe", decoder_sparse_step=2).expert_layers == 4
    assert spec_with("qwen3_next", mlp_only_layers=[0, 5]).expert_layers == 6
    assert spec_with("qwen3_next", num_experts=0).expert_layers == 0


def test_a_window_of_the_whole_context_is_none():
    assert spec_with("mistral", sliding_window=4096) == spec_with("mistral")
    assert spec_with("qwen2", sliding_window=512, use_sliding_window=False) == spec_with("qwen2")


WINDOW = "sliding_window=512: expected null, or max_position_embeddings=4096 or more"
USER_ERRORS = {
    "an unknown type": ("llama", {"model_type": "lama"}, r"model_type=lama: expected one of .* \(did you mean llama\?"),
    "a type with windows": (
        "llama",
        {"model_type": "gemma3_text", "sliding_window": 512},
        "model_type=gemma3_text: expected a model without windows, for the cache of a layer that attends to 512 tokens",
    ),
    "no type": ("llama", {"without": "model_type"}, "model_type is missing: expected one of llama"),
    "latent attention": ("llama", {"kv_lora_rank": 512}, "kv_lora_rank=512: expected none, .* latent attention"),
    "quantised weights": ("llama", {"quantization_config": {}}, "quantization_config={}: expected none"),
    "no number": ("llama", {"hidden_size": "wide"}, "hidden_size=wide: expected a whole number from 1 on"),
    "zero": ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0: expected a whole number from 1 on"),
    "true for a number": ("llama", {"vocab_size": True}, "vocab_size=True: expected a whole number"),
    "a number for true": ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1: expected true or false"),
    "an unknown dtype": ("llama", {"dtype": "int4"}, "dtype=int4: expected one of float32, bfloat16, float16"),
    "no dtype": ("llama", {"without": "dtype"}, "torch_dtype is missing: expected one of float32"),
    "heads that do not fit": ("llama", {"num_attention_heads": 3}, "hidden_size=64: expected a multiple of"),
    "a window": ("mistral", {"sliding_window": 512}, WINDOW),
    "a window by default": ("mistral", {"without": "sliding_window"}, "sliding_window is missing: expected null"),
    "a window in use": ("qwen2", {"use_sliding_window": True, "sliding_window": 512}, WINDOW),
    "a window in some layers": (
        "qwen3",
        {"layer_types": ["sliding_attention"] * 8},
        "sliding_attention in layer_types: expected full_attention$",
    ),
    "recurrent layers of a dense type": (
        "llama",
        {"layer_types": ["linear_attention"] * 8},
        "linear_attention in layer_types: expected full_attention$",
    ),
    "too few kinds": ("qwen3_5_text", {"layer_types": ["full_attention"]}, "layer_types=.*: expected a list of num_h"),
    "no kinds": ("qwen3_5_text", {"without": "full_attention_interval"}, "full_attention_interval is missing"),
    "no gate": ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False: expected true"),
    "a state of no known type": ("qwen3_5_text", {"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype=int8: expected one of"),
    "two dtypes": ("qwen3_5_text", {"text_config": {"dtype": "float32"}}, "dtype=bfloat16: expected float32, as in"),
    "a text model that is none": ("llama", {"text_config": 3}, "text_config=3: expected the keys of the text model"),
}


@pytest.mark.parametrize("mistake", USER_ERRORS)
def test_a_mistake_names_file_and_key(mistake: str):
    base, changes, sentence = USER_ERRORS[mistake]
    with pytest.raises(ValueError, match=rf"^model=here\.json: {sentence}") as error:
        spec_with(base, **changes)
    assert "\n" not in str(error.value)


OPTIONAL = {"max_position_embeddings", "sliding_window"}
#: Keys that some types need, and others derive or do not read.
DERIVED = {"llama": {"num_key_value_heads"}, "qwen3_5_moe": {"intermediate_size"}}
SPARSE = ("qwen3_moe", "qwen3_next")


@pytest.mark.parametrize("base", BASES)
def test_every_key_that_is_read_must_be_there(base: str):
    for key in BASES[base].keys() - OPTIONAL - DERIVED.get(base, set()):
        if key == "intermediate_size" and base in SPARSE:  # of layers without experts, which these have none of
            continue
        with pytest.raises(ValueError, match=f"{'torch_' * (key == 'dtype')}{key} is missing: expected "):
            spec_with(base, without=key)


def test_every_known_type_is_tried_here():
    assert {*BASES, "qwen3_5", "qwen3_5_moe_text"} == MODEL_TYPES.keys()
