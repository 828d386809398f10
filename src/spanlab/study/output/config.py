"""The config file of a run: a resumed run must have the same settings and data, or more cells."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

from omegaconf import OmegaConf

from spanlab.analysis.settings_difference import leaves
from spanlab.core.request import Request
from spanlab.plugins import fingerprints
from spanlab.workloads import Workload

# Settings that decide where and how a run executes, not its results: they may change when a run is resumed.
_INCIDENTAL = ("output", "tracking", "workers", "executor", "compiled")

#: Settings of a study that select the reported results, or add cells; they change no cell.
_REPORTED = ("analyses", "families", "goodput", "slo", "plan")
GROWING = ("seeds", "only", "load", "baseline", "count_hit_as", "sweep", *_REPORTED)
_FINGERPRINTS: WeakKeyDictionary[Workload, str] = WeakKeyDictionary()
_DATA = "# requests: "
_PLUGIN = "# plugin: "


def as_yaml(config: dict[str, Any], workload: Workload) -> str:
    """Settings of a run as YAML, with fingerprints of its plugins and requests, which can change under one name."""
    plugins = fingerprints(config.get("plugins", ())).items()
    notes = [f"{_PLUGIN}{name} {contents}\n" for name, contents in plugins]
    return f"{settings_yaml(config)}{''.join(notes)}{_DATA}{_fingerprint(workload)}\n"


def settings_yaml(config: dict[str, Any]) -> str:
    """Settings that decide the results of a run, as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(_decisive(config)))


def settings_key(config: dict[str, Any]) -> str:
    """Key that is equal where `settings_yaml` is equal, and cheaper to compute."""
    return repr(_decisive(config))


def _decisive(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _INCIDENTAL}


def first_difference(old: str, new: str, growing: tuple[str, ...] = ()) -> str:
    """The first setting that differs, with both values; empty where no setting differs.

    `growing`  settings that may differ; arms may then be added or removed, but not changed
    """
    if old == new:
        return ""
    stored, current = read_settings(old), read_settings(new)
    if growing:
        shared = stored["arms"].keys() & current["arms"].keys()
        stored["arms"], current["arms"] = (
            {name: config["arms"][name] for name in shared} for config in (stored, current)
        )
    a, b = dict(leaves(stored)), dict(leaves(current))
    unequal = (key for key in {**a, **b} if a.get(key) != b.get(key) and key.partition(".")[0] not in growing)
    return next((f"{key}: {a.get(key, 'none')} there, {key}: {b.get(key, 'none')} now" for key in unequal), "")


def read_settings(text: str) -> dict[str, Any]:
    """Parse the config file of a run; `data` is the fingerprint of its requests."""
    config: Any = OmegaConf.to_container(OmegaConf.create(text))
    plugins = [line.removeprefix(_PLUGIN) for line in text.splitlines() if line.startswith(_PLUGIN)]
    settings: dict[str, Any] = (
        {"arms": {}} | config | {"plugins": ", ".join(plugins), "data": text.partition(_DATA)[2].strip()}
    )
    return settings


def _fingerprint(workload: Workload) -> str:
    """Hash of the requests' contents, or of the log that they come from; computed once for each workload."""
    if workload not in _FINGERPRINTS:
        log = workload.log
        _FINGERPRINTS[workload] = _requests_fingerprint(workload.requests) if log is None else log.fingerprint
    return _FINGERPRINTS[workload]


def _requests_fingerprint(requests: tuple[Request, ...]) -> str:
    """Hash of the requests' contents; a shared span is hashed once."""
    digest, numbers = hashlib.sha256(), dict[int, int]()
    for request in requests:
        for span in request.spans:
            if id(span) not in numbers:
                numbers[id(span)] = len(numbers)
                digest.update(span.tokens.data)
        spans = [(numbers[id(span)], len(span.tokens), span.independent, span.reusable) for span in request.spans]
        digest.update(repr((request.id, request.group_id, request.output_len, request.arrived_at, spans)).encode())
    return digest.hexdigest()
