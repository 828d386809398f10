"""Groups of layers and bytes of a block are vLLM's own, for the sizes of published models.

`vllm_layouts.json` has what vLLM 0.33.0 printed; the marker `oracle` asks it again.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spanlab.core.policies.block_pool import BlockShape, block_shape
from spanlab.core.policies.named import blocks
from spanlab.core.request import Budget
from spanlab.model_config import ModelConfig
from spanlab.model_types import spec_of

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "vllm_layouts.json").read_text())
PYTHON = Path(os.environ.get("SPANLAB_ORACLE_VLLM", HERE.parents[1] / ".venvs/vllm/bin/python"))

COMMON = {"dtype": "bfloat16", "vocab_size": 1000, "tie_word_embeddings": False, "max_position_embeddings": 1 << 20}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}


MAMBA_H = {"ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
#: DeepSeek-V4: windows, entries of 4 tokens with an index, and entries of 128.
PACKED = ROUTED | {"q_lora_rank": 1024, "qk_rope_head_dim": 64, "o_groups": 8, "o_lora_rank": 1024, "hc_mult": 4}
PACKED |= {"sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512}


def sizes(
    kind: str, layers: int, hidden: int, heads: int, kv_heads: int, width: int | None, **more: Any
) -> dict[str, Any]:
    """Keys of a config.json; sizes that change no block are small."""
    keys = {"model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    keys |= {"num_key_value_heads": kv_heads, "intermediate_size": 64} | ({"head_dim": width} if width else {})
    return COMMON | keys | more


#: Layers, widths, heads and windows of published models.
MODELS = {
    "gpt-oss-20b": sizes(
        "gpt_oss", 24, 2880, 64, 8, 64, sliding_window=128, num_local_experts=8, num_experts_per_tok=4
    ),
    "gpt-oss-120b": sizes(
        "gpt_oss", 36, 2880, 64, 8, 64, sliding_window=128, num_local_experts=8, num_experts_per_tok=4
    ),
    "gemma-3-4b": sizes("gemma3_text", 34, 2560, 8, 4, 256, sliding_window=1024),
    "gemma-3-27b": sizes("gemma3_text", 62, 5376, 32, 16, 128, sliding_window=1024),
    "gemma-4-31b": sizes(
        *("gemma4_text", 60, 5376, 32, 16, 256),
        sliding_window=1024,
        global_head_dim=512,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
    ),
    "gemma-4-26b-a4b": sizes(
        *("gemma4_text", 30, 2816, 16, 8, 256),
        sliding_window=1024,
        global_head_dim=512,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
    ),
    "llama-4-scout": sizes(
        *("llama4_text", 48, 5120, 40, 8, 128), attention_chunk_size=8192, num_local_experts=16, num_experts_per_tok=1
    ),
    "command-a": sizes("cohere2", 64, 12288, 96, 8, None, sliding_window=4096),
    "olmo-3-32b": sizes("olmo3", 64, 5120, 40, 8, None, sliding_window=4096),
    "mistral-7b-v0.1": sizes("mistral", 32, 4096, 32, 8, None, sliding_window=4096),
    "qwen2-7b with windows": sizes(
        *("qwen2", 28, 3584, 28, 4, None), use_sliding_window=True, sliding_window=4096, max_window_layers=21
    ),
    "deepseek-v3": sizes("deepseek_v3", 61, 7168, 128, 128, None, **LATENT, **ROUTED),
    "deepseek-v3.2": sizes(
        *("deepseek_v32", 61, 7168, 128, 128, None),
        **(LATENT | ROUTED | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}),
    ),
    "deepseek-v4, 43 layers": sizes(
        *("deepseek_v4", 43, 4096, 64, 1, 512), **(PACKED | {"compress_ratios": [0, 0, *[4, 128] * 20, 4]})
    ),
    "deepseek-v4, 61 layers": sizes(
        *("deepseek_v4", 61, 7168, 128, 1, 512),
        **(PACKED | {"q_lora_rank": 1536, "o_groups": 16, "index_topk": 1024}),
        compress_ratios=[128, 128, *[4, 128] * 29, 4],
    ),
    "deepseek-v4, entries of 128 alone": sizes(
        *("deepseek_v4", 30, 4096, 64, 1, 512), **(PACKED | {"compress_ratios": [0, *[128] * 9] * 3})
    ),
    "kimi-linear-48b": sizes(
        *("kimi_linear", 27, 2304, 32, 32, None),
        **(LATENT | ROUTED | {"q_lora_rank": None, "num_shared_experts": 1}),
        linear_attn_config={
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        },
    ),
    "granite-4.0-h-small": sizes(
        *("granitemoehybrid", 40, 4096, 32, 8, None),
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_d_conv=4,
        layer_types=["attention" if at in (5, 15, 25, 35) else "mamba" for at in range(40)],
    ),
    "nemotron-3-nano-30b-a3b": sizes(
        *("nemotron_h", 52, 2688, 32, 2, 128),
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        moe_shared_expert_intermediate_size=64,
        **(ROUTED | MAMBA_H | {"mamba_num_heads": 64, "mamba_head_dim": 64}),
    ),
    "nemotron-nano-9b-v2": sizes(
        *("nemotron_h", 56, 4480, 40, 8, 128),
        hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        **(MAMBA_H | {"mamba_num_heads": 128, "mamba_head_dim": 80}),
    ),
    "falcon-h1-1.5b": sizes(
        *("falcon_h1", 24, 2048, 8, 2, 128),
        mamba_d_ssm=3072,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=256,
        mamba_n_groups=1,
        mamba_d_conv=4,
    ),
    "jamba-1.5-mini": sizes(
        *("jamba", 32, 4096, 32, 8, None),
        attn_layer_period=8,
        attn_layer_offset=4,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=8,
        num_experts_per_tok=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
    ),
    "zamba2-7b": sizes(
        *("zamba2", 81, 3584, 32, 32, None),
        layers_block_type=["hybrid" if at in (6, *range(11, 78, 6)) else "mamba" for at in range(81)],
        n_mamba_heads=112,
        mamba_ngroups=2,
        mamba_d_state=64,
        mamba_d_conv=4,
        mamba_expand=2,
        num_mem_blocks=2,
        adapter_rank=128,
    ),
    "lfm2-1.2b": sizes(
        *("lfm2", 16, 2048, 32, 8, None),
        conv_L_cache=3,
        conv_dim=2048,
        block_multiple_of=256,
        layer_types=["full_attention" if at in (2, 5, 8, 10, 12, 14) else "conv" for at in range(16)],
    ),
    "lfm2-8b-a1b": sizes(
        *("lfm2_moe", 24, 2048, 32, 8, None),
        conv_L_cache=3,
        num_dense_layers=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        layer_types=["full_attention" if at in (2, 6, 10, 14, 18, 21) else "conv" for at in range(24)],
    ),
    "gemma-3n-e4b": sizes(
        *("gemma3n_text", 35, 2048, 8, 2, 256),
        sliding_window=512,
        num_kv_shared_layers=15,
        vocab_size_per_layer_input=1000,
        hidden_size_per_layer_input=256,
        altup_num_inputs=4,
        laurel_rank=64,
    ),
    "gemma-4-e4b": sizes(
        *("gemma4_text", 42, 2560, 8, 2, 256), sliding_window=512, global_head_dim=512, num_kv_shared_layers=18
    ),
    "cohere2-moe, 49 layers": sizes(
        *("cohere2_moe", 49, 4096, 64, 8, 128),
        sliding_window=4096,
        num_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        prefix_dense_intermediate_size=64,
    ),
    "step-3.5-flash": sizes(
        *("step3p5", 45, 4096, 64, 8, 128),
        layer_types=["sliding_attention" if at % 4 else "full_attention" for at in range(45)],
        attention_other_setting={"attention_type": "sliding_attention", "num_attention_heads": 96},
        sliding_window=512,
        moe_num_experts=8,
        moe_top_k=2,
        moe_intermediate_size=64,
        share_expert_dim=64,
    ),
    "mimo-v2-flash": sizes(
        *("mimo_v2_flash", 48, 4096, 64, 4, 192),
        v_head_dim=128,
        swa_num_key_value_heads=8,
        swa_head_dim=192,
        swa_v_head_dim=128,
        hybrid_layer_pattern=[0, *[1, 1, 1, 1, 0], *[1, 1, 1, 1, 1, 0] * 7],
        sliding_window_size=128,
        **ROUTED,
    ),
    "qwen3.5-27b": sizes(
        *("qwen3_5_text", 64, 5120, 24, 4, 256),
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
}


#: Models whose modules of multi-token prediction have another kind of KV than layers that read all tokens.
DRAFTED = {
    f"{name}, {modules} modules": (name, modules)
    for name, modules in (
        *(("deepseek-v4, 43 layers", 1), ("deepseek-v4, entries of 128 alone", 2)),
        *(("mimo-v2-flash", 3), ("mimo-v2-flash", 7)),  # the second: one group more
    )
}
MODELS |= {name: MODELS[base] | {"num_nextn_predict_layers": modules} for name, (base, modules) in DRAFTED.items()}


def shape_of(name: str) -> BlockShape:
    """The blocks of a model, those of its drafter among them."""
    spec = spec_of(ModelConfig.of("model=config.json", name, MODELS[name]))
    drafting = DRAFTED.get(name, ("", 0))[1]
    return block_shape(spec, spec.kv_bytes_per_token + drafting * spec.drafter_layer_bytes)


@pytest.mark.parametrize("name", MODELS)
def test_groups_and_bytes_are_vllms(name: str):
    shape = shape_of(name)
    assert [list(rule) for rule in shape.layout] == EXPECTED[name]["groups"]
    assert shape.block_bytes == EXPECTED[name]["block_bytes"]


#: Modules and classes of vLLM that derive the state of a layer.
STATED = {
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "falcon_h1": ("falcon_h1", "FalconH1ForCausalLM"),
    "jamba": ("jamba", "JambaForCausalLM"),
    "zamba2": ("zamba2", "Zamba2ForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeForCausalLM"),
}


def stored_layers(keys: dict[str, Any]) -> list[str]:
    """What stores something, in the order in which vLLM's classes make it."""
    kind, layers = keys["model_type"], range(keys["num_hidden_layers"])
    if kind == "nemotron_h":
        return [{"M": "state", "*": "full"}[mark] for mark in keys["hybrid_override_pattern"] if mark in "M*"]
    if kind == "falcon_h1":
        return ["full", "state"] * len(layers)
    if kind == "jamba":
        return ["full" if at % 8 == 4 else "state" for at in layers]
    if kind == "zamba2":  # the attention of all layers before the first of them
        return ["full"] * keys["layers_block_type"].count("hybrid") + ["state"] * len(layers)
    return ["state" if name == "conv" else "full" for name in keys["layer_types"]]


def layers_of(name: str) -> list[list[Any]] | dict[str, Any]:
    """Kind, block size, KV heads, head size, span and bytes of state of each layer, in order; not by our reader."""
    keys, size = MODELS[name], EXPECTED[name]["block_size"]
    drafting = keys.get("num_nextn_predict_layers", 0)
    if keys["model_type"] == "deepseek_v4":
        return keys | {"compress_ratios": [*keys["compress_ratios"], *[0] * drafting]}  # a module has a window alone
    if keys["model_type"] in STATED:
        return {
            "architecture": STATED[keys["model_type"]],
            "config": keys,
            "heads": keys["num_key_value_heads"],
            "width": 224 if name == "zamba2-7b" else keys.get("head_dim") or keys["hidden_size"] // 32,
            "layers": stored_layers(keys),
        }
    count, heads, kv = (keys[key] for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"))
    width, kind = keys.get("head_dim") or keys["hidden_size"] // heads, keys["model_type"]
    full = ["full", size, kv, width, 0, 0]
    window = ["window", size, kv, width, keys.get("sliding_window"), 0]
    latent = ["latent", size, 1, 576, 0, 0]
    at = range(1, count + 1)
    if kind == "cohere2":  # a window is one token longer than the file says
        window[4] += 1
    if kind == "cohere2_moe":
        window[4] += 1
        return [full, *(full if layer % 4 == 0 else window for layer in range(1, count))]
    if kind == "gemma3n_text":  # 15 layers store nothing
        return [full if layer % 5 == 0 else window for layer in range(1, 21)]
    if kind == "gemma4_text" and name == "gemma-4-e4b":  # 18 layers store nothing
        return [["full", size, 2, 512, 0, 0] if layer % 6 == 0 else window for layer in range(1, 25)]
    if kind == "step3p5":
        return [window if layer % 4 else full for layer in range(count)]
    if kind == "mimo_v2_flash":
        ends = (0, *range(5, 48, 6))
        window = ["window", size, 8, [192, 128], 128, 0]
        full = ["full", size, 4, [192, 128], 0, 0]
        return [full if layer in ends else window for layer in range(count)] + [window] * drafting
    if kind in ("gpt_oss", "gemma3_text", "cohere2", "olmo3"):
        step = {"gpt_oss": 2, "gemma3_text": 6}.get(kind, 4)
        return [full if layer % step == 0 else window for layer in at]
    if kind == "gemma4_text":
        wide = ["full", size, keys["num_global_key_value_heads"], keys["global_head_dim"], 0, 0]
        return [wide if layer % 6 == 0 else window for layer in at]
    if kind == "llama4_text":
        return [full if layer % 4 == 0 else ["chunk", size, kv, width, keys["attention_chunk_size"], 0] for layer in at]
    if kind == "mistral":
        return [window] * count
    if kind == "qwen2":
        return [window if layer > keys["max_window_layers"] else full for layer in at]
    if kind == "deepseek_v3":
        return [latent] * count
    if kind == "deepseek_v32":  # an index of 132 bytes per token beside each latent
        return [layer for _ in at for layer in (latent, ["latent", size, 1, 66, 0, 0])]
    if kind == "kimi_linear":
        state = 32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2
        return [
            latent if layer in keys["linear_attn_config"]["full_attn_layers"] else ["state", size, 0, 0, 0, state]
            for layer in at
        ]
    if kind == "granitemoehybrid":
        state = 128 * 64 * 128 * 2 + 3 * (128 * 64 + 2 * 128) * 2
        return [full if at == "attention" else ["state", size, 0, 0, 0, state] for at in keys["layer_types"]]
    state = 48 * 128 * 128 * 4 + 3 * (2 * 16 + 48) * 128 * 2
    return [full if layer % 4 == 0 else ["state", size, 0, 0, 0, state] for layer in at]


@pytest.mark.oracle
def test_vllm_makes_the_stored_groups(tmp_path: Path):
    (tmp_path / "layers.json").write_text(json.dumps({name: layers_of(name) for name in MODELS}))
    driver = [PYTHON, HERE / "vllm_layout_driver.py", tmp_path / "layers.json", tmp_path / "groups.json"]
    subprocess.run(
        driver, check=True, env=os.environ | {"PYTHONPATH": str(PYTHON.parents[1] / "releases" / "vllm_0_33")}
    )
    made = json.loads((tmp_path / "groups.json").read_text())
    assert made == {name: {key: EXPECTED[name][key] for key in ("groups", "block_bytes")} for name in MODELS}


@pytest.mark.parametrize("name", ["deepseek-v4, 43 layers", "mimo-v2-flash"])
def test_a_drafter_in_the_windows_needs_a_release_with_lookahead(name: str):
    spec = spec_of(ModelConfig.of("model=config.json", name, MODELS[name]))
    budget, token_bytes = Budget(1 << 40, 1 << 40, 1 << 40, 1), spec.kv_bytes_per_token + spec.drafter_layer_bytes
    blocks(spec, budget, token_bytes, drafts=1, drafter=1, release="vllm_0_33")
    with pytest.raises(ValueError, match=r"^release=vllm_0_32 with model.name=.*: expected method=ngram, or a release"):
        blocks(spec, budget, token_bytes, drafts=1, drafter=1, release="vllm_0_32")
