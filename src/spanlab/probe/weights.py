"""Weights of a probe on disk, as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from spanlab.engine.load import pretrained, read_config
from spanlab.engine.recurrent import hush_kernels
from spanlab.engine.settings import EngineSettings
from spanlab.probe.model import config_of, mixers, new_probe
from spanlab.settings.probe import TrainProbe


def load(key: str, folder: str) -> PreTrainedModel:
    """The model in a folder; ValueError where it has no weights, or no recurrent layers."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{key}={folder}: expected a folder with a config.json and weights")
    settings = EngineSettings(weights="path", path=folder)
    model = pretrained(settings, folder, read_config(settings, folder), torch.float32)
    if not mixers(model):
        raise ValueError(f"{key}={folder}: expected a model with GatedDeltaNet layers")
    hush_kernels(model)
    model.eval()
    return model


def to_train(settings: TrainProbe) -> PreTrainedModel:
    """New weights, or those that training goes on from; ValueError where these have other sizes."""
    torch.manual_seed(settings.seed)
    if settings.start is None:
        model = new_probe(settings.model, settings.task.vocabulary)
        hush_kernels(model)
        model.train()
        return model
    model, wanted = load("start", settings.start), config_of(settings.model, settings.task.vocabulary)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
        found, expected = getattr(model.config, name), getattr(wanted, name)
        if found != expected:
            raise ValueError(
                f"start={settings.start}: expected {name} of {expected}, as model and task say, not {found}"
            )
    model.train()
    return model
