"""Serves a model by llama.cpp's server: python llama_server.py FOLDER FILE.gguf -- ARGUMENTS OF
llama-server.

It runs in the environment `llama_cpp` and needs nothing of spanlab. It writes the weights of a
Hugging Face folder as GGUF, in their own precision, and becomes the server. The tokenizer has one
word per token id: prompts are ids.
"""

import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np

#: By model type: llama.cpp's architecture, and whether it pairs the halves of a head otherwise than
#: Hugging Face.
ARCHITECTURES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, True),
    "mistral": (gguf.MODEL_ARCH.LLAMA, True),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, False),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, False),
}
TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def tensors_of(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a safetensors file; bfloat16 as float32."""
    length = int.from_bytes(file.open("rb").read(8), "little")
    content = np.memmap(file, np.uint8, "r")
    header = json.loads(content[8 : 8 + length].tobytes())
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in TYPES:
            raise SystemExit(
                f"{file.name}: {name} has type {entry['dtype']}, expected one of {', '.join(TYPES)}"
            )
        start, stop = entry["data_offsets"]
        values = (
            content[8 + length + start : 8 + length + stop]
            .view(TYPES[entry["dtype"]])
            .reshape(entry["shape"])
        )
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        yield name, values


def paired(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return query or key weights with the rows of each head in llama.cpp's order: neighbours
    rotate together."""
    rows = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return rows.swapaxes(1, 2).reshape(weights.shape)


def write(folder: Path, target: Path) -> None:
    """Write a model's folder as GGUF."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise SystemExit(f"model_type={kind}: expected one of {', '.join(ARCHITECTURES)}")
    architecture, pairs = ARCHITECTURES[kind]
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    add_settings(writer, config, heads, kv_heads)
    add_words(writer, config)
    names = gguf.get_tensor_name_map(architecture, layers)
    for file in sorted(folder.glob("*.safetensors")):
        for name, values in tensors_of(file):
            short = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if short is None:
                raise SystemExit(
                    f"{file.name}: {name} has no place in llama.cpp's architecture {kind}"
                )
            if pairs and ".q_proj." in name:
                values = paired(values, heads)
            if pairs and ".k_proj." in name:
                values = paired(values, kv_heads)
            writer.add_tensor(
                short,
                np.ascontiguousarray(values if values.ndim > 1 else values.astype(np.float32)),
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_settings(
    writer: gguf.GGUFWriter, config: dict[str, Any], heads: int, kv_heads: int
) -> None:
    """Add the sizes of the model and its rotation."""
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    if (kind := rope.get("rope_type", "default")) != "default":
        raise SystemExit(f"rope_type={kind}: expected default")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_words(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add a vocabulary with one word per token id."""
    count = config["vocab_size"]
    writer.add_vocab_size(count)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{token}" for token in range(count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    for key, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
    ):
        if isinstance(token := config.get(key), int):
            add(token)
    writer.add_add_bos_token(False)


def server() -> Path:
    """Return the program, which the environment's package has built."""
    package = find_spec("llama_cpp")
    folders = package.submodule_search_locations if package is not None else None
    for folder in folders or ():
        if (program := Path(folder) / "bin" / "llama-server").is_file():
            return program
    raise SystemExit(
        "the package llama_cpp has no bin/llama-server: expected the one of requirements/llama_cpp.txt"
    )


def main() -> None:
    """Write the model if it is not there yet, and become the server."""
    folder, target, _, *arguments = sys.argv[1:]
    program = server()
    if not Path(target).is_file():
        write(Path(folder), Path(target))
    os.execv(program, [str(program), "--model", target, *arguments])


if __name__ == "__main__":
    main()
