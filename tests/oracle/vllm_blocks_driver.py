"""Asks vLLM's own functions for the block sizes of hybrid models: no weights, no GPU, nothing of spanlab.

usage: PYTHON_OF_VLLM vllm_blocks_driver.py MODELS.json OUT.json

`MODELS.json` has the keys of a config.json by name. For each format of KV, number of drafts and of devices, the output
has the tokens of a block, the bytes of a layer's state on a device, and the groups of recurrent layers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from copy import deepcopy
from itertools import product
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

#: Architectures of the text models, by `model_type`.
ARCHITECTURES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
KV = ("auto", "fp8")
DRAFTS = (0, 1, 3)
DEVICES = (1, 2)


def model_config(keys: dict, folder: Path) -> ModelConfig:
    """The configuration that vLLM reads from a config.json, which stays in `folder`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys | {"architectures": [ARCHITECTURES[keys["model_type"]]]}))
    return ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype=keys["dtype"], max_model_len=8192
    )


def ask(model: ModelConfig, kv: str, drafts: int, devices: int) -> list[int]:
    """Tokens of a block, bytes of a layer's state on one device, and groups of recurrent layers."""
    drafted = None
    if drafts:
        drafted = SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2, prompt_lookup_min=1
        )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(cache_dtype=kv, enable_prefix_caching=True),
        device_config=DeviceConfig(device="cpu"),
        parallel_config=ParallelConfig(),
        speculative_config=drafted,
    )
    config.parallel_config.tensor_parallel_size = devices  # needs no such devices here
    Platform._align_hybrid_block_size(config, FlashAttentionBackend)
    kind, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    size, padded = config.cache_config.block_size, config.cache_config.mamba_page_size_padded
    shapes, dtypes = (kind.get_mamba_state_shape_from_config(config), kind.get_mamba_state_dtype_from_config(config))
    state = MambaSpec(block_size=size, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
    page = MambaSpec(block_size=size, shapes=shapes, dtypes=dtypes, page_size_padded=padded, mamba_cache_mode="align")
    attention = FullAttentionSpec(
        block_size=size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype if kv == "auto" else torch.float8_e4m3fn,
    )
    kinds = model.hf_text_config.layer_types
    layers = {f"model.layers.{at}": page if one == "linear_attention" else attention for at, one in enumerate(kinds)}
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.kv_cache_layout = "LBNHC"  # the preferred one of the attention kernels
    groups = get_kv_cache_groups(config, layers)
    recurrent = sum(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
    return [size, state.page_size_bytes, recurrent]


if __name__ == "__main__":
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in json.loads(Path(sys.argv[1]).read_text()).items():
            model = model_config(keys, Path(folder, name))
            told[name] = {
                f"{kv}, {drafts} drafts, {devices} devices": ask(deepcopy(model), kv, drafts, devices)
                for kv, drafts, devices in product(KV, DRAFTS, DEVICES)
            }
    Path(sys.argv[2]).write_text(json.dumps(told))
