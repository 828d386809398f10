"""Groups of layers, and the size of their blocks, as vLLM makes them: no model, nothing of spanlab.

usage: PYTHON_OF_VLLM vllm_layout_driver.py LAYERS.json OUT.json

LAYERS.json has layers by name of a model, in order: `[kind, block size, KV heads, head size, span, bytes]`, where bytes
are those of a recurrent state; a head size may be that of a key and that of a value. A model whose layers pack their
entries has one object of its sizes instead, and vLLM's own modules give the tables of its layers. So has one of which
vLLM's own class derives the state and the block size: `architecture`, `config`, `heads`, `width`, and the `layers` that
store, in order. OUT.json has the groups, as kind, tokens per block and span, and the bytes of a block.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm.config.vllm
from transformers import AutoConfig
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf

try:
    from vllm.models.deepseek_v4 import attention as packed_attention
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
    from vllm.v1.core.kv_cache_planning import _get_kv_cache_bytes_per_block, get_kv_cache_groups, get_uniform_page_size
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups, get_uniform_page_size
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

#: A layout whose outermost dimension is no block, as of FlashAttention and FlashMLA.
CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    cache_config=SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False), kv_cache_layout=None
    ),
    speculative_config=None,
    attention_config=SimpleNamespace(hisparse_config=None),
    kv_transfer_config=None,
)


#: A layout whose outermost dimension is the block, as entries of several sizes need.
BLOCKS = SimpleNamespace(is_block_outermost=True)
PACKED = SimpleNamespace(
    **vars(CONFIG)
    | {
        "cache_config": SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: BLOCKS, kv_cache_layout=None, cache_dtype="fp8_ds_mla", block_size=256
        )
    }
)


def packed_specs(sizes: dict) -> dict[str, object]:
    """The specs of DeepSeek-V4's caches, from vLLM's own modules, in the order in which its layers make them."""
    cache, width = PACKED.cache_config, sizes["head_dim"]
    specs = {}
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        for layer, ratio in enumerate(sizes["compress_ratios"]):
            made = {}
            if ratio == 4:
                made["index"] = packed_attention.DeepseekV4IndexerCache(
                    sizes["index_head_dim"] + sizes["index_head_dim"] // 128 * 4, torch.uint8, f"i{layer}", cache, ratio
                )
                made["index states"] = CompressorStateCache(
                    4 * sizes["index_head_dim"], torch.float32, ratio, f"j{layer}"
                )
            made["window"] = DeepseekV4SWACache(width, sizes["sliding_window"], torch.uint8, f"w{layer}", cache)
            if ratio:
                made["entries"] = SimpleNamespace(
                    compress_ratio=ratio, kv_cache_dtype=cache.cache_dtype, head_dim=width, kv_cache_torch_dtype=None
                )
                numbers = (4 if ratio == 4 else 2) * width
                made["states"] = CompressorStateCache(numbers, torch.float32, ratio, f"s{layer}")
            for name, one in made.items():
                specs[f"{layer} {name}"] = (
                    packed_attention.DeepseekV4Attention.get_kv_cache_spec(one, PACKED)
                    if name == "entries"
                    else one.get_kv_cache_spec(PACKED)
                )
    return specs


def group_packed(sizes: dict) -> dict:
    """The groups of a model whose blocks pack entries of several sizes."""
    made = get_kv_cache_groups(PACKED, packed_specs(sizes))
    firsts = [one.kv_cache_spec.first_spec for one in made]
    spans = [getattr(spec, "sliding_window", None) or 0 for spec in firsts]
    listed = [["window" if span else "full", spec.block_size, span] for spec, span in zip(firsts, spans, strict=True)]
    return {"groups": listed, "block_bytes": _get_kv_cache_bytes_per_block(made, BLOCKS)}


def spec_of(kind: str, block_size: int, heads: int, width: int, span: int, state_bytes: int, page: int) -> object:
    """The spec of one layer; a state is as large as a page."""
    if kind == "state":
        shapes = ((state_bytes,),)
        return MambaSpec(
            block_size=block_size, shapes=shapes, dtypes=(torch.uint8,), page_size_padded=page, mamba_cache_mode="align"
        )
    width, of_value = width if isinstance(width, list) else (width, width)
    sizes = {"block_size": block_size, "num_kv_heads": heads, "head_size": width, "dtype": torch.bfloat16}
    if of_value != width:
        sizes["head_size_v"] = of_value
    if kind == "window":
        return SlidingWindowSpec(**sizes, sliding_window=span)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=span)
    return (MLAAttentionSpec if kind == "latent" else FullAttentionSpec)(**sizes)


class Attention:
    """A backend of attention with blocks of 16 tokens."""

    @staticmethod
    def customize_spec(spec: object) -> object:
        return spec

    @staticmethod
    def get_supported_kernel_block_sizes() -> list:
        return [MultipleOf(16)]


class Device(Platform):
    """A device with that backend alone."""

    @classmethod
    def _find_non_ssm_backends(cls, config: object) -> list:
        return [Attention]


def group_stated(sizes: dict) -> dict:
    """The groups of a hybrid whose state and block size vLLM derives from its config.json."""
    module, name = sizes["architecture"]
    model = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    config = AutoConfig.for_model(**sizes["config"])
    cache = SimpleNamespace(
        cache_dtype="auto",
        block_size=16,
        kv_cache_dtype_skip_layers=[],
        mamba_cache_mode="align",
        mamba_page_size_padded=None,
        mamba_block_size=None,
        mamba_cache_dtype="auto",
        mamba_ssm_cache_dtype="auto",
        use_replayssm=False,
    )
    served = SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(
            hf_config=config,
            hf_text_config=config,
            dtype=torch.bfloat16,
            use_mla=False,
            architecture=name,
            get_num_kv_heads=lambda parallel: sizes["heads"],
            get_head_size=lambda: sizes["width"],
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        num_speculative_tokens=0,
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    if name in MODELS_CONFIG_MAP:
        MODELS_CONFIG_MAP[name].verify_and_update_config(served)
    vllm.config.vllm.set_current_vllm_config = lambda config: nullcontext()
    type(ModelRegistry).resolve_model_cls = lambda self, *architectures, **more: (model, name)
    Device._align_hybrid_block_size(served, Attention)
    state = MambaSpec(
        block_size=cache.block_size,
        shapes=model.get_mamba_state_shape_from_config(served),
        dtypes=model.get_mamba_state_dtype_from_config(served),
    )
    full = ["full", cache.block_size, sizes["heads"], sizes["width"], 0, 0]
    kept = ["state", cache.block_size, 0, 0, 0, state.page_size_bytes]
    return group([full if kind == "full" else kept for kind in sizes["layers"]])


def group(layers: list) -> dict:
    """The groups of a model's layers, in order."""
    attention = [spec_of(*layer, 0) for layer in layers if layer[0] != "state"]
    page = max(spec.page_size_bytes for spec in attention)
    specs = {f"{at}": spec_of(*layer, page) for at, layer in enumerate(layers)}
    made = get_kv_cache_groups(CONFIG, specs)
    listed = []
    for one in made:
        spec = one.kv_cache_spec
        kind = layers[int(one.layer_names[0])][0]
        span = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
        listed.append(["full" if kind == "latent" else kind, spec.block_size, span])
    if len(made) == 1:
        return {"groups": listed, "block_bytes": sum(spec.page_size_bytes for spec in specs.values())}
    largest = max(len(one.layer_names) for one in made)
    return {"groups": listed, "block_bytes": largest * get_uniform_page_size([one.kv_cache_spec for one in made])}


if __name__ == "__main__":
    models = json.loads(Path(sys.argv[1]).read_text())
    made = {}
    for name, one in models.items():
        by = group if isinstance(one, list) else group_stated if "architecture" in one else group_packed
        made[name] = by(one)
    Path(sys.argv[2]).write_text(json.dumps(made))
