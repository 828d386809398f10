"""Finding a model's config.json: a choice of conf/model, a file, a folder that holds one, or a name on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from spanlab.model_spec import ModelSpec
from spanlab.models.config import ModelConfig
from spanlab.models.hub import look_for_network
from spanlab.models.sizes import spec_of

CHOICES = Path(__file__).resolve().parents[3] / "conf" / "model"
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
