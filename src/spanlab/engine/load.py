"""Loading of models: random weights, or weights from the hub, a folder or a package."""

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
from spanlab.engine.self_check import check_model
from spanlab.engine.settings import EngineSettings, dtype_of
from spanlab.engine.supported import check_support, require_exact
from spanlab.engine.weight_bars import no_weight_bars
from spanlab.engine.weight_layout import store_by_input
from spanlab.model_spec import ModelSpec
from spanlab.models.find import find_config
from spanlab.models.packaged import packaged, packaged_folder


def load_model(settings: EngineSettings, spec: ModelSpec) -> SpanModel:
    """Load the model of the settings, with support check and numeric self-check.

    ValueError for a model that cannot be loaded, differs from the sizes in `spec` or does not allow reuse of spans, and
    for a missing device.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    name, device = settings.name or spec.name, resolve_device(settings.device)
    config, dtype = read_config(settings, name), getattr(torch, dtype_of(spec))
    require_exact(name, check_support(config))
    _check_sizes(spec, config, dtype, settings.path or name)
    if settings.weights == "random":
        return random_model(name, config, dtype=dtype, device=device, seed=settings.seed)
    model = load_pretrained(settings, name, config, dtype)
    return wrap(name, model.to(device))  # type: ignore[arg-type]  # transformers' wrapper of `to` loses `self`


def random_model(
    name: str,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> SpanModel:
    """A checked model with random weights for a config; torch's random generators are unchanged."""
    require_exact(name, check_support(config))
    register()
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return wrap(name, AutoModelForCausalLM.from_config(config, dtype=dtype))


def wrap(name: str, model: PreTrainedModel) -> SpanModel:
    """Hook a transformers model that passed the support check; ValueError if the numeric self-check fails."""
    register()
    model.eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    hook_rows(model)
    pack_mixers(model)
    store_by_input(model)
    return check_model(name, model)


def read_config(settings: EngineSettings, name: str) -> PreTrainedConfig:
    """The transformers config of a model; ValueError if it cannot be loaded."""
    try:
        if settings.weights != "random":
            config: PreTrainedConfig = AutoConfig.from_pretrained(_source(settings, name)).get_text_config(decoder=True)
            return config
        return named_config(name)
    except (OSError, KeyError, StrictDataclassError) as error:
        raise _load_error(settings, name, error) from error


def named_config(name: str) -> PreTrainedConfig:
    """The transformers config for a choice of conf/model, a file, a folder, or a repository's config.json."""
    keys = dict(find_config(name, "engine.name").keys)
    kind = keys.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"engine.name={name}: its model_type is {kind}; expected one of transformers")
    return AutoConfig.for_model(kind, **keys).get_text_config(decoder=True)


def _check_sizes(spec: ModelSpec, config: PreTrainedConfig, dtype: torch.dtype, name: str) -> None:
    """Raise if the model differs from the sizes that policies and timing models use."""
    sizes = asdict(replace(spec_of(spec.name, config, dtype), name=spec.name))
    for key, value in asdict(spec).items():
        if sizes[key] != value:
            raise ValueError(
                f"model.{key}={value}: {name} has {sizes[key]}; expected the sizes of the model that the engine runs"
            )


def _source(settings: EngineSettings, name: str) -> str:
    """The argument of `from_pretrained`: an existing folder, or the name of a repository."""
    if settings.weights == "package":
        return str(packaged_folder(packaged(name, "engine.name")))
    if settings.path is None:
        return name
    if not (Path(settings.path) / "config.json").is_file():
        raise ValueError(f"engine.path={settings.path}: expected a folder with a config.json and weights")
    return settings.path


def load_pretrained(
    settings: EngineSettings, name: str, config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Load stored weights; ValueError if any are missing, because transformers would initialise them randomly."""
    register()
    source = _source(settings, name)
    try:
        with no_weight_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(  # returns a pair, unlike its declared type
                source, config=config, dtype=dtype, output_loading_info=True
            )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _load_error(settings, name, error) from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ValueError(
            f"{_setting(settings, name)}: expected all weights of the model; {len(missing)} are missing, "
            f"first {missing[0]}"
        )
    return model


def _setting(settings: EngineSettings, name: str) -> str:
    return f"engine.path={settings.path}" if settings.path else f"engine.name={name}"


def _load_error(settings: EngineSettings, name: str, error: BaseException) -> ValueError:
    reason = " ".join(str(error).split()).rstrip(".")
    return ValueError(
        f"{_setting(settings, name)} with engine.weights={settings.weights}: expected a model to load: {reason}"
    )


def resolve_device(name: str) -> torch.device:
    """Resolve a device name; `auto` is the first GPU, or else the CPU; ValueError for a missing device."""
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
