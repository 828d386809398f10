"""Sizes from the keys of a config.json; an error names a key that is missing or unsupported."""

import pytest

from spanlab.model_config import OPTIONAL as OPTIONAL_KEYS
from spanlab.model_config import ModelConfig
from spanlab.model_spec import ModelSpec
from spanlab.model_types import MODEL_TYPES, spec_of

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
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_expand": 2}
WINDOWED = LLAMA | {"sliding_window": 64, "head_dim": 16}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
LATENT = (
    {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    | ROUTED
    | {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
)
#: Types whose files are read like those of another one.
ALIKE = {
    "llama": {"olmo2", "granite", "hunyuan_v1_dense"},
    "mistral": {"ministral", "ministral3"},
    "qwen2": {"smollm3", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"},
    "qwen3": {"seed_oss", "glm4", "glm4v_text", "ernie4_5", "qwen3_vl_text"},
    "qwen3_moe": {"qwen2_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"},
    "mixtral": {"granitemoe", "olmoe"},
    "glm4_moe": {"ernie4_5_moe", "glm4v_moe_text", "hy_v3", "solar_open", "exaone_moe"},
    "granitemoehybrid": {"bamba"},
    "qwen3_5_text": {"qwen3_5"},
    "qwen3_5_moe": {"qwen3_5_moe_text"},
    "gemma3_text": {"gemma2", "gemma3", "cohere2", "olmo3", "exaone4"},
    "gemma4_text": {"gemma4", "gemma4_unified", "gemma4_unified_text"},
    "gemma3n_text": {"gemma3n"},
    "step3p5": {"step3p7"},
    "llama4_text": {"llama4"},
    "deepseek_v3": {"deepseek_v2", "kimi_k2", "glm4_moe_lite", "axk1", "mistral4", "youtu"},
    "glm_moe_dsa": {"deepseek_v32"},
    "minimax_m3_vl_text": {"minimax_m3_vl"},
}
BASES = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": None},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": LLAMA | EXPERTS | {"model_type": "qwen3_moe"},
    "qwen3_next": HYBRID | EXPERTS | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 16},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_experts": 8, "num_experts_per_tok": 2},
    "granitemoehybrid": LLAMA
    | {"model_type": "granitemoehybrid", "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"shared_intermediate_size": 48, "layer_types": [*["mamba"] * 7, "attention"], "mamba_n_heads": 8}
    | {"mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_expand": 2},
    "phi3": LLAMA | {"model_type": "phi3", "sliding_window": None},
    "gpt_oss": WINDOWED | {"model_type": "gpt_oss", "num_experts": 8, "num_experts_per_tok": 2},
    "gemma3_text": WINDOWED | {"model_type": "gemma3_text"},
    "gemma4_text": WINDOWED | {"model_type": "gemma4_text"},
    "llama4_text": LLAMA
    | {"model_type": "llama4_text", "num_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 128}
    | {"attention_chunk_size": 64},
    "deepseek_v3": LATENT | {"model_type": "deepseek_v3"},
    "glm_moe_dsa": LATENT
    | {"model_type": "glm_moe_dsa", "index_n_heads": 2, "index_head_dim": 8, "index_topk": 16, "q_lora_rank": 24},
    "deepseek_v4": {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    | {"model_type": "deepseek_v4", "head_dim": 16, "qk_rope_head_dim": 4, "q_lora_rank": 24, "o_groups": 2}
    | {"o_lora_rank": 8, "hc_mult": 2, "sliding_window": 64, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 16}
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
    | {"compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 0]},
    "kimi_linear": {key: value for key, value in LATENT.items() if key != "n_shared_experts"}
    | {"model_type": "kimi_linear", "num_shared_experts": 1}
    | {"linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8]}},
    "glm4_moe": LLAMA | ROUTED | {"model_type": "glm4_moe", "head_dim": 16},
    "minimax_m2": LLAMA | {"model_type": "minimax_m2", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2},
    "minimax_m3_vl_text": LLAMA
    | {"model_type": "minimax_m3_vl_text", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
    | {"dense_intermediate_size": 128, "shared_intermediate_size": 32, "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1]},
    "nemotron_h": LLAMA
    | ROUTED
    | {"model_type": "nemotron_h", "hybrid_override_pattern": "M-ME*-ME", "moe_shared_expert_intermediate_size": 24}
    | {"ssm_state_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "conv_kernel": 4},
    "falcon_h1": LLAMA | MAMBA | {"model_type": "falcon_h1"},
    "jamba": LLAMA
    | {
        "model_type": "jamba",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
    }
    | {"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    "zamba2": {key: value for key, value in (LLAMA | MAMBA).items() if key != "num_key_value_heads"}
    | {"model_type": "zamba2", "layer_types": [*["mamba", "mamba", "mamba", "hybrid"] * 2], "num_mem_blocks": 1}
    | {"adapter_rank": 4},
    "lfm2": LLAMA
    | {"model_type": "lfm2", "layer_types": [*["conv", "conv", "full_attention", "conv"] * 2], "conv_L_cache": 3}
    | {"block_multiple_of": 16},
    "lfm2_moe": LLAMA
    | EXPERTS
    | {"model_type": "lfm2_moe", "full_attn_idxs": [2, 5], "conv_L_cache": 3, "num_dense_layers": 2},
    "gemma3n_text": WINDOWED
    | {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "vocab_size_per_layer_input": 50,
    }
    | {"hidden_size_per_layer_input": 8, "altup_num_inputs": 4, "laurel_rank": 4},
    "cohere2_moe": WINDOWED
    | {"model_type": "cohere2_moe", "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1},
    "step3p5": {key: value for key, value in WINDOWED.items() if key != "num_key_value_heads"}
    | {"model_type": "step3p5", "layer_types": [*["full_attention", *["sliding_attention"] * 3] * 2]}
    | {"num_attention_groups": 2, "moe_num_experts": 8, "moe_top_k": 2, "moe_intermediate_size": 32}
    | {"share_expert_dim": 48, "moe_layers_enum": "2,3,4,5,6,7,8"},
    "mimo_v2_flash": WINDOWED
    | {"model_type": "mimo_v2_flash", "hybrid_layer_pattern": [0, 1, 1, 1, 0, 1, 1, 1], "v_head_dim": 8}
    | {"swa_num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"moe_layer_freq": [0, *[1] * 7]},
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


USER_ERRORS = {
    "an unknown type": ("llama", {"model_type": "lama"}, r"model_type=lama: expected one of .* \(did you mean llama\?"),
    "entries of two tokens": (
        "deepseek_v4",
        {"compress_ratios": [0, 2, 4, 128, 4, 128, 4, 128]},
        r"compress_ratios=.*: expected a list of 0, 1, 4 and 128, for num_hidden_layers=8 or more",
    ),
    "other tokens of an entry": (
        "deepseek_v4",
        {"compress_rates": {"compressed_sparse_attention": 8}},
        "compress_rates=.*: expected {'compressed_sparse_attention': 4, 'heavily_compressed_attention': 128}, as in",
    ),
    "layers that read those of others": (
        "gemma4_text",
        {"num_kv_shared_layers": 4},
        "num_kv_shared_layers=4: expected fewer, so that a layer of each kind before them stores",
    ),
    "no type": ("llama", {"without": "model_type"}, "model_type is missing: expected one of llama"),
    "latents of another type": (
        "llama",
        {"kv_lora_rank": 512},
        "kv_lora_rank=512: expected none, for this type has no",
    ),
    "quantised weights": ("llama", {"quantization_config": {}}, "quantization_config.quant_method=None: expected fp8"),
    "no number": ("llama", {"hidden_size": "wide"}, "hidden_size=wide: expected a whole number from 1 on"),
    "zero": ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0: expected a whole number from 1 on"),
    "true for a number": ("llama", {"vocab_size": True}, "vocab_size=True: expected a whole number"),
    "a number for true": ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1: expected true or false"),
    "an unknown dtype": ("llama", {"dtype": "int4"}, "dtype=int4: expected one of float32, bfloat16, float16"),
    "no dtype": ("llama", {"without": "dtype"}, "torch_dtype is missing: expected one of float32"),
    "heads that do not fit": ("llama", {"num_attention_heads": 3}, "hidden_size=64: expected a multiple of"),
    "a window by default": (
        "mistral",
        {"without": "sliding_window"},
        "sliding_window is missing: expected a number or",
    ),
    "windows from no layer on": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 512},
        "max_window_layers is missing: expected a whole number from 0 on",
    ),
    "a kind that no type has": (
        "qwen3",
        {"layer_types": ["strided_attention"] * 8},
        "strided_attention in layer_types: expected full_attention or linear_attention or sliding_attention",
    ),
    "a window in some layers": (
        "llama",
        {"layer_types": ["sliding_attention"] * 8},
        "sliding_attention in layer_types: expected full_attention$",
    ),
    "recurrent layers of a dense type": (
        "llama",
        {"layer_types": ["linear_attention"] * 8},
        "linear_attention in layer_types: expected full_attention$",
    ),
    "a kind beside an unknown type": (
        "llama",
        {"model_type": "lfm9", "layer_types": ["ring", "full_attention"]},
        "ring in layer_types of model_type=lfm9: expected full_attention or .*, for the memory of other layers is not",
    ),
    "no attention": (
        "granitemoehybrid",
        {"layer_types": ["mamba"] * 8},
        "no attention in layer_types: expected full_attention in one",
    ),
    "too few kinds": (
        "qwen3_5_text",
        {"layer_types": ["full_attention"]},
        "layer_types of 1: expected a list of num_h",
    ),
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


OPTIONAL = {"max_position_embeddings", "sliding_window", "tie_word_embeddings"}
#: Keys that some types need, and others derive or do not read.
DERIVED = {
    "llama": {"num_key_value_heads"},
    "qwen3_5_moe": {"intermediate_size"},
    "granitemoehybrid": {"mamba_d_head", "mamba_expand"},
    "minimax_m3_vl_text": {"moe_layer_freq", "dense_intermediate_size"},
    "llama4_text": {"intermediate_size_mlp"},
    "kimi_linear": {"linear_attn_config"},
    "lfm2": {"layer_types"},
    "nemotron_h": {"num_hidden_layers", "mamba_head_dim"},
    "cohere2_moe": {"head_dim", "num_shared_experts"},
    "step3p5": {"moe_layers_enum"},
    "mimo_v2_flash": {"v_head_dim", "swa_num_key_value_heads", "moe_layer_freq"},
}
#: Keys with several names, and the one that an error names.
NAMED = {"dtype": "torch_dtype", "n_routed_experts": "num_experts", "num_shared_experts": "n_shared_experts"}
NAMED |= {"moe_num_experts": "num_experts", "moe_top_k": "num_experts_per_tok"}
SPARSE = ("qwen3_moe", "qwen3_next")
NEEDED = {"deepseek_v4", "gpt_oss", "gemma3_text", "gemma4_text", "gemma3n_text", "cohere2_moe", "step3p5"}
NEEDED |= {"mimo_v2_flash"}  # types whose window must be there


@pytest.mark.parametrize("base", BASES)
def test_every_key_that_is_read_must_be_there(base: str):
    optional = OPTIONAL - {"sliding_window"} if base in NEEDED else OPTIONAL
    for key in BASES[base].keys() - optional - DERIVED.get(base, set()):
        if key == "intermediate_size" and base in SPARSE:  # of layers without experts, which these have none of
            continue
        with pytest.raises(ValueError, match=rf"{NAMED.get(key, key)}( or .*)? is missing: expected "):
            spec_with(base, without=key)


WRONG = ("x", "4", -1, 1.5, [1], {"a": 1}, [None], [[]])


@pytest.mark.parametrize("base", BASES)
def test_a_wrong_value_of_any_key_is_accepted_or_refused_by_one_sentence(base: str):
    sentences = []
    for key in BASES[base].keys() | OPTIONAL_KEYS:
        for value in WRONG:
            try:
                spec_with(base, **{key: value})
            except ValueError as error:
                sentences.append(str(error))
    assert len(sentences) > len(BASES[base])
    assert [one for one in sentences if "\n" in one or not one.startswith(("model=here.json: ", "model."))] == []


def test_every_known_type_is_tried_here():
    assert {*BASES}.union(*ALIKE.values()) == MODEL_TYPES.keys()


def test_windows_and_chunks_are_layers_of_their_own():
    spec = spec_with("gpt_oss")
    (local,) = spec.local
    assert (spec.attention_layers, local.layers, local.reach, local.span) == (4, 4, "window", 64)
    assert spec.kv_bytes_per_token == 8 * 2 * 2 * 16 * 2
    assert spec.full_bytes_per_token == spec.context_bytes_per_token == spec.kv_bytes_per_token // 2
    (chunked,) = spec_with("llama4_text").local
    assert (chunked.layers, chunked.reach, chunked.span) == (6, "chunk", 64)
    assert spec_with("phi3", sliding_window=512).attention_layers == 0
    late = spec_with("qwen2", use_sliding_window=True, sliding_window=512, max_window_layers=5)
    assert (late.attention_layers, late.local[0].layers, late.local[0].first) == (5, 3, False)


def test_a_latent_is_stored_for_all_heads():
    spec = spec_with("deepseek_v3")
    assert spec.kv_bytes_per_token == 8 * (32 + 8) * 2
    assert spec.attention_flops_per_pair == 8 * 2 * 4 * (8 + 16 + 16)


def test_blocks_of_latents_beside_states_are_multiples_of_128_tokens():
    spec = spec_with("kimi_linear")
    assert (spec.block_size, spec_with("deepseek_v3").block_size) == (128, 64)
    of_states = spec.layer_state_bytes()
    assert spec.block_tokens_per_state(spec.block_size) == 128 * -(-of_states // (128 * (32 + 8) * 2))


def test_states_of_mamba_have_numbers_of_every_channel_and_of_the_convolution():
    spec = spec_with("granitemoehybrid")
    assert (spec.recurrent_layers, spec.attention_layers, spec.grid) == (7, 1, 1)
    assert spec.layer_state_bytes() == 2 * 8 * 16 * 32 + 2 * 3 * (8 * 16 + 2 * 32)
    assert spec_with("granitemoehybrid", mamba_d_head="auto") == spec
    assert spec_with("granitemoehybrid", num_local_experts=0).expert_layers == 0


def test_an_index_is_stored_beside_latents_and_chooses_what_is_read():
    spec = spec_with("glm_moe_dsa", index_topk_freq=4, index_skip_topk_offset=1)
    assert (spec.indexed_layers, spec.index_layers, spec.selected) == (8, 2, 16)
    assert spec.kv_bytes_per_token == 8 * (32 + 8) * 2 + 2 * (8 + 4)
    assert spec.context_bytes_per_token == 2 * (8 + 4)
    shared = ["full", *["shared"] * 7]
    assert spec_with("glm_moe_dsa", indexer_types=shared).index_layers == 1


def test_entries_of_several_tokens_are_tables_of_their_own():
    """An entry has 16 + 4 + 8 bytes, and the entries of a block are multiples of 576 bytes."""
    spec = spec_with("deepseek_v4")
    spans = [(table.layers, table.span, table.tokens, table.page_bytes) for table in spec.packed]
    assert spans == [
        (8, 64, 1, 2304),  # 64 · 28 bytes, in multiples of 576
        (3, 0, 4, 576),  # index: 64 · 8
        (3, 8, 1, 576),  # its states: 4 · 2 · 2 · 8 · 4
        (3, 0, 4, 2304),
        (3, 8, 1, 1152),  # 4 · 2 · 2 · 16 · 4
        (3, 0, 128, 576),  # 2 · 28
        (3, 128, 1, 1152),
    ]
    assert spec.full_bytes_per_token == -(-3 * (576 + 2304 + 576) // 256)
    assert spec.kv_bytes_per_token == -(-3 * (576 + 2304 + 576) // 256 + -8 * 2304 // 64)
    assert spec.attention_flops_per_pair == 2 * 3 * (2 * 8) // 4 + 2 * 3 * (2 * 4 * 16) // 128
    chosen = [(reads.span, reads.pair_flops) for reads in spec.bounded]
    assert chosen == [(64, 2 * 8 * 2 * 4 * 16), (16 * 4, 2 * 3 * 2 * 4 * 16 // 4)]


def test_quantised_weights_are_smaller_and_keys_are_not():
    spec = spec_with("deepseek_v3", quantization_config={"quant_method": "fp8"})
    assert (spec.weight_itemsize, spec.expert_itemsize, spec.kv_itemsize) == (1, 0.0, 2)
    experts = spec_with("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    assert (experts.weight_itemsize, experts.expert_bytes) == (2, experts.expert_parameters * 17 / 32)
