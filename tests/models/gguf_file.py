"""A small Llama with a tokenizer, as a GGUF file and as the transformers model that it was made from."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he")
CONFIG = LlamaConfig(
    vocab_size=len(VOCABULARY),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)
_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_llama() -> LlamaForCausalLM:
    """A random model whose weights are numbers that float16 has."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    for weights in model.parameters():
        weights.data = (weights + 0.2 * torch.randn_like(weights)).half().float()
    return model


def write_gguf(model: LlamaForCausalLM, path: Path) -> Path:
    """Write what llama.cpp's own conversion would write of the model: rows of queries and keys in its order."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(CONFIG.vocab_size)
    _add_tokenizer(writer)
    for name, weights in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(_named(name), _ordered(name, weights.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(VOCABULARY))
    writer.add_token_types([3 if token in SPECIAL else 1 for token in VOCABULARY])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _named(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, *inner, kind = name.split(".")
        return f"blk.{layer}.{_LAYERS['.'.join(inner)]}.{kind}"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def _ordered(name: str, weights: np.ndarray) -> np.ndarray:
    """Rows of each head in llama.cpp's order: halves of rotated pairs interleaved."""
    heads = {"q_proj": CONFIG.num_attention_heads, "k_proj": CONFIG.num_key_value_heads}
    count = next((count for kind, count in heads.items() if kind in name), None)
    if count is None:
        return weights
    rows, columns = weights.shape
    return np.ascontiguousarray(
        weights.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )
