"""What a run is made of, written down: a run that is resumed must be made of the same, or of more."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

from omegaconf import OmegaConf

from spanlab.analysis.settings_difference import leaves
from spanlab.core.request import Request
from spanlab.plugins import fingerprints
from spanlab.workloads import Workload

# Settings that say where and how a run is done, not what comes out of it: a run may be resumed with others.
_INCIDENTAL = ("output", "tracking", "workers", "executor", "compiled")

#: Settings of a study that add cells or say what is reported of them, and change no cell.
_REPORTED = ("analyses", "families", "goodput", "slo", "plan")
GROWING = ("seeds", "only", "load", "baseline", "count_hit_as", "sweep", *_REPORTED)
_FINGERPRINTS: WeakKeyDictionary[Workload, str] = WeakKeyDictionary()
_DATA = "# requests: "
_PLUGIN = "# plugin: "


def as_yaml(config: dict[str, Any], workload: Workload) -> str:
    """What a run is made of: its settings, and the contents of its data, which can change under the same name."""
    plugins = fingerprints(config.get("plugins", ())).items()
    notes = [f"{_PLUGIN}{name} {contents}\n" for name, contents in plugins]
    return f"{settings_yaml(config)}{''.join(notes)}{_DATA}{_fingerprint(workload)}\n"


def settings_yaml(config: dict[str, Any]) -> str:
    """The settings that decide what comes out of a run."""
    return OmegaConf.to_yaml(OmegaConf.create(_decisive(config)))


def settings_key(config: dict[str, Any]) -> str:
    """Equal where `settings_yaml` is, and cheaper to make."""
    return repr(_decisive(config))


def _decisive(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _INCIDENTAL}


def first_difference(old: str, new: str, growing: tuple[str, ...] = ()) -> str:
    """The first setting that differs, with both values; empty where none does.

    `growing`  settings that may differ; arms may then come and go, but not change
    """
    if old == new:
        return ""
    there, now = read_settings(old), read_settings(new)
    if growing:
        shared = there["arms"].keys() & now["arms"].keys()
        there["arms"], now["arms"] = ({name: own["arms"][name] for name in shared} for own in (there, now))
    a, b = dict(leaves(there)), dict(leaves(now))
    unequal = (key for key in {**a, **b} if a.get(key) != b.get(key) and key.partition(".")[0] not in growing)
    return next((f"{key}: {a.get(key, 'none')} there, {key}: {b.get(key, 'none')} now" for key in unequal), "")


def read_settings(text: str) -> dict[str, Any]:
    """The settings of a written run, and as `data` the fingerprint of its requests."""
    found: Any = OmegaConf.to_container(OmegaConf.create(text))
    plugins = [line.removeprefix(_PLUGIN) for line in text.splitlines() if line.startswith(_PLUGIN)]
    settings: dict[str, Any] = (
        {"arms": {}} | found | {"plugins": ", ".join(plugins), "data": text.partition(_DATA)[2].strip()}
    )
    return settings


def _fingerprint(workload: Workload) -> str:
    """A hash of everything that the requests are, or the log that they are made of; made once for each workload."""
    if workload not in _FINGERPRINTS:
        log = workload.log
        _FINGERPRINTS[workload] = _of_requests(workload.requests) if log is None else log.fingerprint
    return _FINGERPRINTS[workload]


def _of_requests(requests: tuple[Request, ...]) -> str:
    """A hash of everything that the requests are; a span that many share is read once."""
    digest, numbers = hashlib.sha256(), dict[int, int]()
    for request in requests:
        for span in request.spans:
            if id(span) not in numbers:
                numbers[id(span)] = len(numbers)
                digest.update(span.tokens.data)
        spans = [(numbers[id(span)], len(span.tokens), span.independent, span.reusable) for span in request.spans]
        digest.update(repr((request.id, request.group_id, request.output_len, request.arrived_at, spans)).encode())
    return digest.hexdigest()
