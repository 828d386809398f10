"""Conversion of a GGUF file to a Hugging Face folder: config.json, float16 weights, tokenizer."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

_DROPPED_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "architectures")


def convert(file: Path, folder: Path) -> None:
    """Write model and tokenizer of `file` to `folder`, with dequantised weights."""
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with redirect_stderr(io.StringIO()):  # hides progress bars per tensor; errors raise exceptions
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)  # required by the GGUF loader
        _without_quantization(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the weights to a model without quantisation config, because transformers cannot save one with it."""
    keys = {key: value for key, value in model.config.to_dict().items() if key not in _DROPPED_KEYS}
    with torch.device("meta"):  # skips random initialisation
        plain = type(model)(type(model.config)(**keys, dtype="float16"))
    plain.load_state_dict({name: tensor.half() for name, tensor in model.state_dict().items()}, assign=True)
    plain.tie_weights()
    return plain
