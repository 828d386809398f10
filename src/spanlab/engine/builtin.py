"""Models that need no network: tiny ones, and published shapes to be filled with random weights.

The shapes are the config.json of the models they are named after. What cannot be seen in a shape's numbers: the tiny
models draw their weights with variance 2 / hidden_size. At transformers' usual 0.02 attention of so narrow a model is
all but uniform (scores of deviation 0.1), so that wrong positions would hardly change an output; here scores have
deviation 2 (Qwen3, which normalises queries and keys: 1). Recurrent layers normalise what they put out, too: with wide
weights a hybrid would only amplify rounding.
"""

from __future__ import annotations

from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3 = {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_QWEN = {
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_TINY = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": (2 / 256) ** 0.5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_TINY_HYBRID = _TINY | {
    "initializer_range": 0.05,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_conv_kernel_dim": 4,
}
# One group of layers, three recurrent and one of attention; the vocabulary is cut to 512, as arXiv 2605.05219 runs it.
_QWEN35_GROUP = {
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}

BUILTIN: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("llama", _TINY),
    "tiny-qwen2": ("qwen2", _TINY),
    "tiny-qwen3": ("qwen3", _TINY),
    "tiny-mistral": ("mistral", _TINY | {"sliding_window": None}),
    "tiny-hybrid": ("qwen3_5_text", _TINY_HYBRID),
    "tiny-qwen3-next": ("qwen3_next", _TINY_HYBRID | {"num_experts": 0}),
    "qwen3.5-0.8b-group": (
        "qwen3_5_text",
        _QWEN35_GROUP
        | {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
        },
    ),
    "qwen3.5-27b-group": (
        "qwen3_5_text",
        _QWEN35_GROUP
        | {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
        },
    ),
    "llama-3.1-8b": (
        "llama",
        _LLAMA3
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "head_dim": 128,
            "rope_parameters": _LLAMA3_ROPE | {"factor": 8.0},
            "tie_word_embeddings": False,
        },
    ),
    "llama-3.2-1b": (
        "llama",
        _LLAMA3
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "head_dim": 64,
            "rope_parameters": _LLAMA3_ROPE | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-0.5b": (
        "qwen2",
        _QWEN
        | {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-8b": (
        "qwen3",
        _QWEN
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
}
"""name -> (transformers' model type, the fields of its config)."""
