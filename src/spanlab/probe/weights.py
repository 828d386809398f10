"""Weights of a probe on disk, in the format of transformers."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from spanlab.engine.load import load_pretrained, read_config
from spanlab.engine.recurrent import silence_kernel_warnings
from spanlab.engine.settings import EngineSettings
from spanlab.probe.model import config_of, mixers, new_probe
from spanlab.settings.probe import TrainProbe, check_weights


def load(key: str, folder: str) -> PreTrainedModel:
    """The model in a folder; ValueError if it has no weights or no recurrent layers."""
    check_weights(key, folder)
    settings = EngineSettings(weights="path", path=folder)
    model = load_pretrained(settings, folder, read_config(settings, folder), torch.float32)
    if not mixers(model):
        raise ValueError(f"{key}={folder}: expected a model with GatedDeltaNet layers")
    silence_kernel_warnings(model)
    model.eval()
    return model


def initial_model(settings: TrainProbe) -> PreTrainedModel:
    """The model to train, new or from `settings.start`; ValueError if stored weights have other sizes."""
    torch.manual_seed(settings.seed)
    if settings.start is None:
        model = new_probe(settings.model, settings.task.vocabulary)
        silence_kernel_warnings(model)
        model.train()
        return model
    model, config = load("start", settings.start), config_of(settings.model, settings.task.vocabulary)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
        actual, expected = getattr(model.config, name), getattr(config, name)
        if actual != expected:
            raise ValueError(
                f"start={settings.start}: expected {name} of {expected}, as model and task say, not {actual}"
            )
    model.train()
    return model
