"""Reader of llama2.c's checkpoints (version 0): trained models small enough for tests."""

import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

_HEADER = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")


def read_model(file: Path) -> LlamaForCausalLM:
    """The model in a checkpoint, float32."""
    data = file.read_bytes()
    sizes = dict(zip(_HEADER, struct.unpack_from("<7i", data), strict=True))
    weights = _tensors(np.frombuffer(data, "<f4", offset=28), sizes)
    weights["wq"] = _apart(weights["wq"], sizes["n_heads"])
    weights["wk"] = _apart(weights["wk"], sizes["n_kv_heads"])
    model = LlamaForCausalLM(_config(sizes))
    model.load_state_dict(_state(weights))
    return model


def _tensors(numbers: np.ndarray, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Every tensor by llama2.c's name; those with one matrix per layer have the layers as first axis."""
    dim, hidden, layers, vocab = (sizes[key] for key in ("dim", "hidden_dim", "n_layers", "vocab_size"))
    kv_dim = dim // sizes["n_heads"] * sizes["n_kv_heads"]
    shapes = {
        "embedding": (vocab, dim),
        "attention_norm": (layers, dim),
        "wq": (layers, dim, dim),
        "wk": (layers, kv_dim, dim),
        "wv": (layers, kv_dim, dim),
        "wo": (layers, dim, dim),
        "ffn_norm": (layers, dim),
        "w1": (layers, hidden, dim),
        "w2": (layers, dim, hidden),
        "w3": (layers, hidden, dim),
        "norm": (dim,),
    }
    tensors, start = {}, 0
    for name, shape in shapes.items():
        stop = start + int(np.prod(shape))
        tensors[name] = torch.from_numpy(numbers[start:stop].reshape(shape).copy())
        start = stop
    tables = 2 * sizes["seq_len"] * (dim // sizes["n_heads"] // 2)  # cosines and sines, which we compute ourselves
    assert start + tables == len(numbers), "the checkpoint's size does not fit its header"
    return tensors


def _apart(matrix: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs (2i, 2i + 1) to pairs (i, i + half), as transformers' Llama rotates them."""
    layers, rows, columns = matrix.shape
    pairs = matrix.view(layers, heads, rows // heads // 2, 2, columns)
    return pairs.transpose(2, 3).reshape(matrix.shape)


def _config(sizes: dict[str, int]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["dim"],
        intermediate_size=sizes["hidden_dim"],
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes["n_heads"],
        num_key_value_heads=sizes["n_kv_heads"],
        max_position_embeddings=sizes["seq_len"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
    )


def _state(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "attention_norm": "input_layernorm",
        "wq": "self_attn.q_proj",
        "wk": "self_attn.k_proj",
        "wv": "self_attn.v_proj",
        "wo": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "w1": "mlp.gate_proj",
        "w2": "mlp.down_proj",
        "w3": "mlp.up_proj",
    }
    state = {
        f"model.layers.{layer}.{name}.weight": tensor
        for ours, name in names.items()
        for layer, tensor in enumerate(weights[ours])
    }
    embedding = weights["embedding"]
    return state | {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": weights["norm"],
    }


def read_pieces(file: Path) -> list[str]:
    """Texts of the ids of tok512.bin, from 0; a single byte is unchanged."""
    data = file.read_bytes()
    pieces, at = [], 4
    while at < len(data):
        length = struct.unpack_from("<fi", data, at)[1]
        pieces.append(data[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return [chr(int(piece[3:5], 16)) if piece.startswith("<0x") else piece for piece in pieces]
