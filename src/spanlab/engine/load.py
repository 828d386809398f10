"""From settings to a model that runs: random, from the hub or from a folder."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spanlab.engine.hook import ATTENTION, hook_rows, register
from spanlab.engine.model import SpanModel, spec_of
from spanlab.engine.recurrent import pack_mixers
from spanlab.engine.self_check import prove
from spanlab.engine.settings import EngineSettings, dtype_of
from spanlab.engine.supported import judge, refuse
from spanlab.engine.weight_bars import no_weight_bars
from spanlab.engine.weight_layout import store_by_input
from spanlab.model_spec import ModelSpec
from spanlab.models.find import find_config
from spanlab.models.packaged import packaged, packaged_folder


def load_model(settings: EngineSettings, spec: ModelSpec) -> SpanModel:
    """The model that settings name, judged by the support check and proven on a few tokens.

    ValueError, one sentence, for a model that cannot be had, whose sizes are not those of `spec`, or that spans cannot
    be reused in, and for a device that is not there.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    name, device = settings.name or spec.name, found_device(settings.device)
    config, dtype = read_config(settings, name), getattr(torch, dtype_of(spec))
    refuse(name, judge(config))
    _check_sizes(spec, config, dtype, settings.path or name)
    if settings.weights == "random":
        return random_model(name, config, dtype=dtype, device=device, seed=settings.seed)
    model = pretrained(settings, name, config, dtype)
    return wrap(name, model.to(device))  # type: ignore[arg-type]  # transformers' wrapper of `to` loses `self`


def random_model(
    name: str,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> SpanModel:
    """A model of that configuration with random weights, judged and proven; torch's own generators are left alone."""
    refuse(name, judge(config))
    register()
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return wrap(name, AutoModelForCausalLM.from_config(config, dtype=dtype))


def wrap(name: str, model: PreTrainedModel) -> SpanModel:
    """Make a transformers model ours that the support check lets through; ValueError if it is then not exact."""
    register()
    model.eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    hook_rows(model)
    pack_mixers(model)
    store_by_input(model)
    return prove(name, model)


def read_config(settings: EngineSettings, name: str) -> PreTrainedConfig:
    """The transformers config of a model; ValueError, one sentence, where there is none."""
    try:
        if settings.weights != "random":
            config: PreTrainedConfig = AutoConfig.from_pretrained(_source(settings, name)).get_text_config(decoder=True)
            return config
        return described(name)
    except (OSError, KeyError, StrictDataclassError) as error:
        raise _cannot_be_had(settings, name, error) from error


def described(name: str) -> PreTrainedConfig:
    """The transformers config of a choice of conf/model, of a file, of a folder, or of a repository's config.json."""
    keys = dict(find_config(name, "engine.name").keys)
    kind = keys.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"engine.name={name}: its model_type is {kind}; expected one of transformers")
    return AutoConfig.for_model(kind, **keys).get_text_config(decoder=True)


def _check_sizes(spec: ModelSpec, config: PreTrainedConfig, dtype: torch.dtype, name: str) -> None:
    """Refuse a model that policies and timing models would count wrongly."""
    found = asdict(replace(spec_of(spec.name, config, dtype), name=spec.name))
    for key, value in asdict(spec).items():
        if found[key] != value:
            raise ValueError(
                f"model.{key}={value}: {name} has {found[key]}; expected the sizes of the model that the engine runs"
            )


def _source(settings: EngineSettings, name: str) -> str:
    """What transformers loads from: a folder, looked at first, or the name of a repository."""
    if settings.weights == "package":
        return str(packaged_folder(packaged(name, "engine.name")))
    if settings.path is None:
        return name
    if not (Path(settings.path) / "config.json").is_file():
        raise ValueError(f"engine.path={settings.path}: expected a folder with a config.json and weights")
    return settings.path


def pretrained(settings: EngineSettings, name: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Stored weights, all of them; what a checkpoint lacks transformers would draw at random."""
    register()
    source = _source(settings, name)
    try:
        with no_weight_bars():
            found: Any = AutoModelForCausalLM.from_pretrained(  # a pair, unlike what its type says
                source, config=config, dtype=dtype, output_loading_info=True
            )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _cannot_be_had(settings, name, error) from error
    model: PreTrainedModel = found[0]
    missing = sorted(found[1]["missing_keys"])
    if missing:
        raise ValueError(
            f"{_setting(settings, name)}: expected all weights of the model; {len(missing)} are missing, "
            f"first {missing[0]}"
        )
    return model


def _setting(settings: EngineSettings, name: str) -> str:
    return f"engine.path={settings.path}" if settings.path else f"engine.name={name}"


def _cannot_be_had(settings: EngineSettings, name: str, error: BaseException) -> ValueError:
    reason = " ".join(str(error).split()).rstrip(".")
    return ValueError(
        f"{_setting(settings, name)} with engine.weights={settings.weights}: expected a model to load: {reason}"
    )


def found_device(name: str) -> torch.device:
    """The device of that name, `auto` being the first card or else the processor; ValueError where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
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
