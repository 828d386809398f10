"""From a choice of model to a model that runs: built in, random, from the hub or from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spanlab.engine.builtin import BUILTIN
from spanlab.engine.hook import ATTENTION, hook_rows, register
from spanlab.engine.model import SpanModel
from spanlab.engine.recurrent import pack_mixers
from spanlab.engine.self_check import prove
from spanlab.engine.supported import judge, refuse

WEIGHTS = ("random", "hub", "path")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelChoice:
    """Which model to run, with which weights, where.

    `name`          a built-in name or, with `architecture`, any (weights random); the repository's id (weights hub);
                    any (weights path).
    `path`          the folder of a model as transformers saves it, for weights path.
    `architecture`  transformers' model type ('llama', 'qwen3', …), to describe a model by `overrides` alone.
    `overrides`     fields of the transformers config that replace its own.
    `seed`          random weights are a function of it and of the device.
    """

    name: str
    weights: str = "random"
    path: str | None = None
    architecture: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for key, known in (("weights", WEIGHTS), ("dtype", DTYPES)):
            if getattr(self, key) not in known:
                raise ValueError(f"model.{key} is {getattr(self, key)!r}, expected one of {', '.join(known)}.")
        if (self.path is not None) != (self.weights == "path"):
            raise ValueError(
                f"engine.path is {self.path!r} with weights {self.weights}, expected it with weights path only."
            )
        if self.architecture is not None and self.weights != "random":
            raise ValueError(f"model.architecture is {self.architecture!r}, expected it with random weights only.")


def load_model(choice: ModelChoice) -> SpanModel:
    """The model chosen, judged by the support check and proven on a few tokens.

    ValueError, one sentence, for a model that cannot be had, a device that is not there, and a model that spans cannot
    be reused in.
    """
    device = found_device(choice.device)
    config = read_config(choice)
    refuse(choice.name, judge(config))
    register()
    model = _random(choice, config, device) if choice.weights == "random" else _pretrained(choice, config, device)
    return wrap(choice.name, model)


def wrap(name: str, model: PreTrainedModel) -> SpanModel:
    """Make a transformers model ours that the support check lets through; ValueError if it is then not exact."""
    register()
    model.eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    hook_rows(model)
    pack_mixers(model)
    return prove(name, model)


def read_config(choice: ModelChoice) -> PreTrainedConfig:
    """The transformers config of a choice, overrides applied; ValueError where there is none or it cannot be so."""
    try:
        if choice.weights != "random":
            found = AutoConfig.from_pretrained(_source(choice)).get_text_config(decoder=True)
            _check_known(choice, found)
            return type(found).from_dict(found.to_dict() | dict(choice.overrides))
        architecture, fields = _described(choice)
        _check_known(choice, AutoConfig.for_model(architecture))
        return AutoConfig.for_model(architecture, **fields | dict(choice.overrides))
    except (OSError, KeyError, StrictDataclassError) as error:
        raise _cannot_be_had(choice, error) from error


def _described(choice: ModelChoice) -> tuple[str, dict[str, Any]]:
    """Model type and fields of a model that is not stored anywhere."""
    if choice.architecture is not None:
        if choice.architecture not in CONFIG_MAPPING:
            given = choice.architecture
            raise ValueError(
                f"model.architecture is {given!r}, expected a model type of transformers, such as 'llama'."
            )
        return choice.architecture, {}
    if choice.name not in BUILTIN:
        known = ", ".join(BUILTIN)
        raise ValueError(f"model.name is {choice.name!r} with random weights, expected one of {known}.")
    return BUILTIN[choice.name]


def _check_known(choice: ModelChoice, config: PreTrainedConfig) -> None:
    # A config takes whatever it is given, so a slip of the pen would be kept and never read.
    for key in choice.overrides:
        if not hasattr(config, key):
            kind = config.model_type
            raise ValueError(
                f"model.overrides.{key} is set for {choice.name!r}, expected a field of the {kind} config."
            )


def _source(choice: ModelChoice) -> str:
    """What transformers loads from: a folder, looked at first, or the name of a repository."""
    if choice.path is None:
        return choice.name
    if not (Path(choice.path) / "config.json").is_file():
        raise ValueError(f"engine.path is {choice.path!r}, expected a folder with a config.json and weights.")
    return choice.path


def _random(choice: ModelChoice, config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Random weights, drawn on the device itself; torch's own generators are left as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(choice.seed)
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, choice.dtype))


def _pretrained(choice: ModelChoice, config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Stored weights, all of them; what a checkpoint lacks transformers would draw at random."""
    source, dtype = _source(choice), getattr(torch, choice.dtype)
    try:
        model, told = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype, output_loading_info=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _cannot_be_had(choice, error) from error
    missing = sorted(told["missing_keys"])
    if missing:
        where = f"{'engine.path' if choice.path else 'model.name'} is {source!r}"
        raise ValueError(f"{where}, expected all weights of the model; {len(missing)} are missing, first {missing[0]}.")
    return model.to(device)


def _cannot_be_had(choice: ModelChoice, error: BaseException) -> ValueError:
    told = " ".join(str(error).split()).rstrip(".")
    key, value = ("engine.path", choice.path) if choice.path else ("model.name", choice.name)
    return ValueError(f"{key} is {value!r} with {choice.weights} weights, expected a model to load: {told}.")


def found_device(name: str) -> torch.device:
    """The device of that name; ValueError where this machine has none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"engine.device is {name!r}, expected cpu, cuda or cuda:<number>.") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"engine.device is {name!r}, expected cpu, cuda or cuda:<number>.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"engine.device is {name!r}, expected one of this machine's {torch.cuda.device_count()} CUDA devices."
        )
    return device
