"""The probe: transformers' Qwen3.5 text model at toy size, initialised so that recall is learned in minutes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from spanlab.engine.hook import decoder_layers
from spanlab.engine.recurrent import MIXER
from spanlab.settings.probe import ProbeModel

MAMBA_DT = (1e-3, 0.1)  # step sizes that Mamba-2 draws
PROBE_DT = (1e-4, 1e-2)  # shorter ones, for sequences of hundreds of tokens that all matter
READ_OUT = 3.0  # gain of the output of a layer over random initialisation, since gates halve it


def config_of(sizes: ProbeModel, vocabulary: int) -> Qwen3_5TextConfig:
    """The transformers config of these sizes; initial weights have the variance 1 / hidden."""
    return Qwen3_5TextConfig(
        vocab_size=vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden,
        num_hidden_layers=4 * sizes.groups,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        head_dim=sizes.head_dim,
        linear_key_head_dim=sizes.head_dim,
        linear_value_head_dim=sizes.head_dim,
        linear_num_key_heads=sizes.heads,
        linear_num_value_heads=sizes.heads,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        initializer_range=sizes.hidden**-0.5,
        tie_word_embeddings=True,
    )


def new_probe(sizes: ProbeModel, vocabulary: int) -> PreTrainedModel:
    """A probe with new weights from torch's random generator."""
    model = Qwen3_5ForCausalLM(config_of(sizes, vocabulary))
    for mixer in mixers(model):
        slow_decay(mixer, PROBE_DT)
        associate_neighbours(mixer)
    return model


class Mixer(Protocol):
    """The attributes of transformers' GatedDeltaNet layers used here."""

    layer_idx: int
    conv_kernel_size: int
    key_dim: int
    value_dim: int
    dt_bias: nn.Parameter
    in_proj_qkv: nn.Linear
    conv1d: nn.Conv1d
    out_proj: nn.Linear


def mixers(model: PreTrainedModel) -> list[Mixer]:
    """The recurrent mixers of a model in order of layers."""
    return [getattr(layer, MIXER) for layer in decoder_layers(model) if hasattr(layer, MIXER)]


@torch.no_grad()
def slow_decay(mixer: Mixer, bounds: tuple[float, float]) -> None:
    """Draw log-uniform step sizes; with transformers' default decay, a state is forgotten after a few tokens."""
    low, high = (torch.tensor(bound).log() for bound in bounds)
    dt = torch.empty_like(mixer.dt_bias).uniform_(float(low), float(high)).exp()
    mixer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus


@torch.no_grad()
def associate_neighbours(mixer: Mixer) -> None:
    """Initialise a layer as an associative memory that stores a token under the key of the token before it.

    Queries and keys share their projection, and the output projection is the transposed projection of values. The
    convolution reads keys of the token before (lag one), queries and values of the token itself (lag zero).
    """
    query, key, value = mixer.in_proj_qkv.weight.split([mixer.key_dim, mixer.key_dim, mixer.value_dim])
    key.copy_(query)
    mixer.out_proj.weight.copy_(READ_OUT * value.T)
    taps = mixer.conv1d.weight[:, 0]
    taps.mul_(0.1)
    query_taps, key_taps, value_taps = taps.split([mixer.key_dim, mixer.key_dim, mixer.value_dim])
    for channel_taps, lag in ((query_taps, 0), (key_taps, 1), (value_taps, 0)):
        channel_taps[:, -1 - lag] += 1
