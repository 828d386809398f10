"""Groups of layers, and the size of their blocks, as vLLM makes them: no model, nothing of spanlab.

usage: PYTHON_OF_VLLM vllm_layout_driver.py LAYERS.json OUT.json

LAYERS.json has layers by name of a model, in order: `[kind, block size, KV heads, head size, span, bytes]`, where bytes
are those of a recurrent state. OUT.json has its groups, as kind, tokens per block and span, and the bytes of a block.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups, get_uniform_page_size
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


def spec_of(kind: str, block_size: int, heads: int, width: int, span: int, state_bytes: int, page: int) -> object:
    """The spec of one layer; a state is as large as a page."""
    if kind == "state":
        shapes = ((state_bytes,),)
        return MambaSpec(
            block_size=block_size, shapes=shapes, dtypes=(torch.uint8,), page_size_padded=page, mamba_cache_mode="align"
        )
    sizes = {"block_size": block_size, "num_kv_heads": heads, "head_size": width, "dtype": torch.bfloat16}
    if kind == "window":
        return SlidingWindowSpec(**sizes, sliding_window=span)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=span)
    return (MLAAttentionSpec if kind == "latent" else FullAttentionSpec)(**sizes)


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
    Path(sys.argv[2]).write_text(json.dumps({name: group(layers) for name, layers in models.items()}))
