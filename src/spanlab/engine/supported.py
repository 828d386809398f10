"""The support check: which layers of a model allow exact reuse of spans, and the reasons for the others.

The stored keys of a span must equal those that the model would compute at another position, up to one rotation per
position. So every layer must attend to all earlier tokens with a plain softmax of scaled products, and rotate queries
and keys by angles that depend on the position alone. Models that are not known to do so are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spanlab.engine.hook import decoder_layers
from spanlab.engine.recurrent import MIXER
from spanlab.models.sizes import FULL, RECURRENT

EXACT_ROPES = ("default", "linear", "llama3", "yarn")
_MOVING_ROPES = {"dynamic": "dynamic NTK", "longrope": "LongRoPE"}
_WINDOWED = "sliding_attention"
_RECURRENT = ("conv", "hybrid", "hybrid_sliding", "mamba")
_DELTA_NET = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


@dataclass(frozen=True)
class Verdict:
    """Result of the support check for one layer; a non-empty `reason` completes a sentence after 'it'."""

    layer: int
    reason: str = ""

    @property
    def exact(self) -> bool:
        """Whether spans can be reused exactly in this layer."""
        return not self.reason


def check_support(config: PreTrainedConfig) -> tuple[Verdict, ...]:
    """Check all layers of the causal LM that `config` describes, without allocating weights."""
    layers = range(getattr(config, "num_hidden_layers", None) or 1)
    model_reason = _model_class(config)
    verdicts = tuple(Verdict(layer, _kind(config, layer) or model_reason or _rope(config)) for layer in layers)
    if not all(verdict.exact for verdict in verdicts):
        return verdicts
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model_reason = _structure(model)
    return tuple(Verdict(layer, model_reason or _layer(model, layer)) for layer in layers)


def require_exact(name: str, verdicts: Sequence[Verdict]) -> None:
    """Raise a ValueError with the first reason and its layers, unless all layers are exact."""
    reasons = [verdict.reason for verdict in verdicts if not verdict.exact]
    if not reasons:
        return
    layers = [verdict.layer for verdict in verdicts if verdict.reason == reasons[0]]
    location = "every layer" if len(layers) == len(verdicts) else f"layer {', '.join(map(str, layers))}"
    raise ValueError(
        f"model.name is {name!r}, expected a model that spans can be reused in: in {location} it {reasons[0]}."
    )


def _model_class(config: PreTrainedConfig) -> str:
    """Reason against the model class, or an empty string."""
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        return f"is of type {config.model_type!r}, which is no causal language model of transformers"
    if not (model_class.is_backend_compatible() or _is_delta_net(config)):  # those are compatible but do not declare it
        return f"is of type {config.model_type!r}, whose attention does not go through transformers' interface"
    if "logits_to_keep" not in signature(model_class.forward).parameters:
        return f"is of type {config.model_type!r}, which computes the logits of all rows or none"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "attends to later tokens too"
    return ""


def _kind(config: PreTrainedConfig, layer: int) -> str:
    """Reason against a layer's type, or an empty string."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    kind = kinds[layer] if kinds else _WINDOWED if window else FULL
    if kind == RECURRENT:
        return "" if _is_delta_net(config) else "is recurrent, but no GatedDeltaNet whose sizes its config names"
    if kind in _RECURRENT:
        return f"is recurrent ({kind}) in a way whose state is not one of GatedDeltaNet"
    if kind == _WINDOWED:
        covered = window is None or window >= config.max_position_embeddings
        return "" if covered else f"attends to a sliding window of {window} tokens only"
    return "" if kind == FULL else f"uses attention of the kind {kind!r}"


def _is_delta_net(config: PreTrainedConfig) -> bool:
    return all(hasattr(config, size) for size in _DELTA_NET)


def _rope(config: PreTrainedConfig) -> str:
    """Reason against the rotary embedding's settings, or an empty string."""
    rope: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    if not rope:
        return "has no rotary position embedding"
    if "rope_type" not in rope:
        return "has a rotary embedding that differs from layer to layer"
    kind = rope["rope_type"]
    if kind in _MOVING_ROPES:
        return f"uses {_MOVING_ROPES[kind]} rotary embedding, whose angles depend on the length of the prompt"
    if kind not in EXACT_ROPES:
        return f"uses the rotary embedding {kind!r}, which is not one of {', '.join(EXACT_ROPES)}"
    return ""


def _structure(model: PreTrainedModel) -> str:
    """Reason against the modules of the whole model, or an empty string."""
    config, base = model.config, model.base_model
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != config.num_hidden_layers:
        return "does not keep its decoder layers in a plain list"
    rotary = getattr(base, "rotary_emb", None)
    if not (hasattr(rotary, "inv_freq") and hasattr(rotary, "attention_scaling")):
        return "has no common rotary module with its frequencies"
    queries, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if keys and queries % keys:
        return f"has {queries} query heads, which is no multiple of its {keys} key heads"
    return ""


def _layer(model: PreTrainedModel, layer: int) -> str:
    """Reason against a layer's settings and modules, or an empty string."""
    config: PreTrainedConfig = model.config
    rotated = getattr(config, "no_rope_layers", None)  # 1 for layers that do rotate, despite the name
    if rotated and not rotated[layer]:
        return "does not rotate, unlike other layers"
    if getattr(config, "kv_lora_rank", None):
        return "keeps latent keys and values (MLA)"
    module = decoder_layers(model)[layer]
    if hasattr(module, MIXER):
        parameters = signature(getattr(module, MIXER).forward).parameters
        return (
            "" if "cache_params" in parameters else "keeps its recurrent state in a way that is not transformers' own"
        )
    attention: Any = getattr(module, "self_attn", None)
    if not isinstance(getattr(attention, "scaling", None), float):
        return "has no attention module with a fixed softmax scale"
    if getattr(config, "attn_logit_softcapping", None):
        return "caps its attention scores softly"
    if any("sink" in name for name, _ in attention.named_parameters()):
        return "has attention sinks"
    return ""
