"""Memory layout of weight matrices on the CPU."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from spanlab.engine.hook import decoder_layers


def store_by_input(model: PreTrainedModel) -> None:
    """Store float32 weights [out, in] of decoder layers in column-major order, on the CPU only.

    torch's product of a few rows with such a weight takes 0.7 to 0.9 times as long, and that of hundreds of rows as
    long as before; prompts with cached prefixes compute few rows. The output head is unchanged: one row reads it, and
    it may be the embedding table.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return
    for module in decoder_layers(model).modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()
