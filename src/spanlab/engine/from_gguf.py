"""A GGUF file as a plain Hugging Face folder: config.json, weights in float16, tokenizer."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

_OF_THE_FILE = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "architectures")


def convert(file: Path, folder: Path) -> None:
    """Write model and tokenizer of `file` into `folder`; quantised weights become the numbers they stand for."""
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with redirect_stderr(io.StringIO()):  # bars for every tensor; errors are exceptions
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)  # which its reader asks for
        _plain(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that knows nothing of their quantisation, which transformers would not save."""
    keys = {key: value for key, value in model.config.to_dict().items() if key not in _OF_THE_FILE}
    with torch.device("meta"):  # no weights are drawn to be replaced
        plain = type(model)(type(model.config)(**keys, dtype="float16"))
    plain.load_state_dict({name: one.half() for name, one in model.state_dict().items()}, assign=True)
    plain.tie_weights()
    return plain
