"""Writes a model with drawn weights as a Hugging Face folder: python make_model.py CONFIG.json
FOLDER DTYPE SEED.

It runs in the environment of a server, which has torch and transformers, and needs nothing of
spanlab. The weights are those of the engine with `engine.weights=random` and the same seed. The
tokenizer has one word per token id.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


def main(config_file: str, folder: str, dtype: str, seed: str) -> None:
    """Draw the weights and write the folder."""
    keys = json.loads(Path(config_file).read_text())
    config = AutoConfig.for_model(keys.pop("model_type"), **keys).get_text_config(decoder=True)
    torch.manual_seed(int(seed))
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    words = {f"t{token}": token for token in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t1", eos_token="t2"
    ).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
