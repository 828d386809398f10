"""The finished runs of a sweep, `-m -cn ENTRY KEY=A,B,C`, side by side."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf

from spanlab.report.sweep import SweptRun
from spanlab.study.folder import CONFIG


def read_sweep(folder: Path, entry: str, key: str) -> list[SweptRun]:
    """The runs of `entry` below `folder` whose `key` was set, numbers in increasing order, words in the order made.

    ValueError where they differ in anything else: what they show would not be the key's doing.
    """
    found = sorted(folder.glob(f"{entry},*{key}=*/summary.json"), key=lambda path: path.stat().st_mtime)
    if len(found) < 2:
        raise ValueError(f"{folder}: {len(found)} runs of {entry} with {key}; expected two or more, made with -m")
    configs: list[Any] = [OmegaConf.to_container(OmegaConf.load(path.parent / CONFIG)) for path in found]
    values = [_take(config, key) for config in configs]
    for path, config in zip(found, configs, strict=True):
        if config != configs[0]:
            different = next(name for name in config if config[name] != configs[0][name])
            raise ValueError(f"{path.parent}: {different} differs too; expected runs that differ in {key} alone")
    runs = [
        SweptRun(value if isinstance(value, str) else float(value), orjson.loads(path.read_bytes()))
        for value, path in zip(values, found, strict=True)
    ]
    return runs if isinstance(values[0], str) else sorted(runs, key=lambda run: run.value)


def _take(config: Any, key: str) -> Any:
    """Take a dotted key out of nested settings."""
    *above, last = key.split(".")
    return functools.reduce(lambda inner, name: inner[name], above, config).pop(last)
