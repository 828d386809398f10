"""Bytes and FLOPs of the published models, against numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from spanlab.model_files import find_spec as load
from spanlab.model_spec import causal_pairs

from ..support.models import make_model

HYBRID = {
    "recurrent_layers": 3,
    "recurrent_key_heads": 1,
    "recurrent_value_heads": 2,
    "recurrent_key_dim": 3,
    "recurrent_value_dim": 5,
    "conv_kernel": 4,
}


EXPERTS = {"expert_layers": 1, "experts": 6, "experts_per_token": 2, "expert_intermediate_size": 3}


def test_llama_2_7b_needs_half_a_mebibyte_of_kv_per_token():
    geometry = {"attention_layers": 32, "attention_heads": 32, "kv_heads": 32, "head_dim": 128}
    assert make_model(**geometry).kv_bytes_per_token == 524_288


@pytest.mark.parametrize(
    ("name", "kv", "state"),
    [
        ("llama-3.1-8b", 131_072, 0),
        ("llama-3.2-1b", 32_768, 0),
        ("qwen3-8b", 147_456, 0),
        ("qwen3.5-0.8b-group", 2_048, 3_145_728 + 110_592),
        ("qwen3.5-0.8b", 6 * 2_048, 6 * (3_145_728 + 110_592)),
        ("qwen3.5-27b-group", 4_096, 3 * (48 * 128 * 128 * 4 + (4_096 + 6_144) * 3 * 2)),
        ("qwen3.5-27b", 16 * 4_096, 16 * 9_621_504),
    ],
)
def test_bytes_per_token_and_per_checkpoint(name, kv, state):
    spec = load(name)
    assert (spec.name, spec.kv_bytes_per_token, spec.state_bytes) == (name, kv, state)


def test_a_half_precision_state_halves_all_but_convolutions():
    assert replace(load("qwen3.5-0.8b-group"), state_itemsize=2).state_bytes == 1_572_864 + 110_592


def test_a_small_group_checkpoint_equals_1590_tokens_of_kv():
    spec = load("qwen3.5-0.8b-group")
    assert spec.state_bytes == 1_590 * spec.kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "published", "norms"),
    [
        # norms: two per layer and the last one; Qwen3 adds one of head_dim for each of q and k per layer
        ("llama-3.1-8b", 8_030_261_248, 65 * 4096),
        ("llama-3.2-1b", 1_235_814_400, 33 * 2048),
        ("qwen3-8b", 8_190_735_360, 73 * 4096 + 36 * 2 * 128),
    ],
)
def test_parameters_are_the_published_count_without_norms(name, published, norms):
    spec = load(name)
    assert spec.parameters + spec.embedding_parameters + norms == published
    assert spec.weight_bytes == 2 * (published - norms)


@pytest.mark.parametrize(("small", "whole", "groups"), [("0.8b-group", "0.8b", 6), ("27b-group", "27b", 16)])
def test_a_group_is_one_share_of_the_model(small, whole, groups):
    group, model = load(f"qwen3.5-{small}"), load(f"qwen3.5-{whole}")
    assert model.layer_parameters == groups * group.layer_parameters
    assert model.linear_flops_per_token == groups * group.linear_flops_per_token
    assert model.num_layers == 4 * groups
    assert model.is_hybrid
    assert model.grid == 64


def test_parameters_of_a_toy_by_hand():
    # q 4·4, k and v 4·2 each, output 4·4, SwiGLU 3·4·8
    assert make_model().layer_parameters == 16 + 8 + 8 + 16 + 96
    assert make_model(gated_attention=True).layer_parameters == 144 + 16
    # per recurrent layer: q, k 4·3 each, v, z 4·10 each, a, b 4·2 each, output 10·4, conv 16 channels · 4, SwiGLU 96
    assert make_model(**HYBRID).layer_parameters == 144 + 3 * (24 + 80 + 16 + 40 + 64 + 96)


def test_parameters_of_experts_by_hand():
    # attention 48; router 4·6, six experts 3·4·3 each, in place of the SwiGLU block
    spec = make_model(**EXPERTS, intermediate_size=0)
    assert (spec.layer_parameters, spec.active_layer_parameters) == (48 + 24 + 6 * 36, 48 + 24 + 2 * 36)
    assert spec.linear_flops_per_token == 2 * 144
    assert spec.weight_bytes == 2 * (288 + 40 + 40)
    # one layer of each kind; the shared expert 3·4·5 and its gate 4
    mixed = make_model(**EXPERTS, attention_layers=2, shared_intermediate_size=5)
    assert mixed.layer_parameters == 144 + 288 + 64
    assert mixed.active_layer_parameters == 144 + 144 + 64


def test_every_parameter_of_a_dense_model_is_active():
    for name in ("qwen3-8b", "qwen3.5-0.8b"):
        assert load(name).active_layer_parameters == load(name).layer_parameters


def test_tied_embeddings_are_stored_once():
    assert make_model().weight_bytes == 2 * (144 + 40 + 40)
    assert make_model(tied_embeddings=True).weight_bytes == 2 * (144 + 40)
    assert make_model(tied_embeddings=True).parameters == make_model().parameters == 184


def test_flops_of_a_toy_by_hand():
    spec = make_model(**HYBRID)
    assert spec.linear_flops_per_token == 2 * (144 + 3 * 320) + 7 * 3 * (2 * 3 * 5)
    assert spec.head_flops == 80
    assert spec.attention_flops_per_pair == 4 * 2 * 2
    # tokens 2 and 3 see 3 and 4 keys
    assert spec.prefill_flops(2, 4) == 2 * spec.linear_flops_per_token + 7 * 16


def test_pairs_are_the_sum_of_visible_keys():
    for start, stop in [(0, 0), (0, 1), (3, 3), (5, 17), (0, 100)]:
        assert causal_pairs(start, stop) == sum(t + 1 for t in range(start, stop))


def test_prefill_flops_add_up_over_chunks_and_work_on_arrays():
    spec = load("qwen3.5-0.8b")
    starts = np.array([0, 64, 100_000], dtype=np.int32)
    assert spec.prefill_flops(0, 500) == spec.prefill_flops(0, 192) + spec.prefill_flops(192, 500)
    expected = [spec.prefill_flops(int(start), 131_072) for start in starts]
    assert spec.prefill_flops(starts, 131_072).tolist() == expected
    assert spec.prefill_flops(np.int32(100_000), np.int32(131_072)) == expected[-1]
    assert spec.prefill_flops(0, starts).tolist() == [spec.prefill_flops(0, int(stop)) for stop in starts]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 0}, "model.kv_heads is 0 in 'toy', expected a positive integer"),
        ({"grid": 0}, "model.grid is 0"),
        ({"attention_heads": 3, "kv_heads": 2}, r"model.attention_heads is 3, expected a multiple of kv_heads \(2\)"),
        ({"recurrent_layers": -1}, "model.recurrent_layers is -1, expected 0 or more"),
        ({"recurrent_layers": 1}, "model.recurrent_value_heads is 0"),
        (HYBRID | {"recurrent_key_heads": 3}, "model.recurrent_value_heads is 2, expected a multiple"),
        (HYBRID | {"conv_kernel": 0}, "model.conv_kernel is 0"),
        ({"intermediate_size": 0}, "model.intermediate_size is 0"),
        (EXPERTS | {"expert_layers": -1}, "model.expert_layers is -1, expected 0 or more"),
        (EXPERTS | {"expert_layers": 2}, r"model.expert_layers is 2, expected at most num_mlps \(1\)"),
        (EXPERTS | {"experts_per_token": 7}, r"model.experts_per_token is 7, expected at most experts \(6\)"),
        (EXPERTS | {"expert_intermediate_size": 0}, "model.expert_intermediate_size is 0"),
    ],
)
def test_a_wrong_geometry_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        make_model(**changes)


@pytest.mark.parametrize(
    ("attention", "recurrent", "draft_layers", "per_group", "groups"),
    [
        (16, 48, 0, 16, 3),
        (16, 48, 1, 17, 3),  # 51 layers, of which 3 are padding
        (12, 13, 0, 13, 1),
        (12, 17, 0, 17, 1),  # less than half as many more: attention is padded
        (12, 18, 0, 12, 2),
        (12, 18, 1, 18, 1),  # the drafter's layer changes the groups
    ],
)
def test_groups_of_layers_are_those_of_vllm(attention, recurrent, draft_layers, per_group, groups):
    """`_get_kv_cache_groups_uniform_page_size` of vLLM 0.32.0."""
    model = replace(load("qwen3.5-27b"), attention_layers=attention, recurrent_layers=recurrent)
    assert model.layers_per_group(draft_layers) == per_group
    assert model.count_state_groups(draft_layers) == groups
