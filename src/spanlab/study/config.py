"""What a run is made of, written down: a run that is resumed must be made of the same, or of more."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from spanlab.core.request import Request

# Settings that say where and how a run is done, not what comes out of it: a run may be resumed with others.
_INCIDENTAL = ("output", "tracking", "workers", "executor", "compiled")

#: Settings of a study that add cells or say what is reported of them, and change no cell.
GROWING = ("seeds", "only", "load", "baseline", "hit", "sweep")
_DATA = "# requests: "


def as_yaml(config: dict[str, Any], requests: tuple[Request, ...]) -> str:
    """What a run is made of: its settings, and the contents of its data, which can change under the same name."""
    return f"{settings_yaml(config)}{_DATA}{_fingerprint(requests)}\n"


def settings_yaml(config: dict[str, Any]) -> str:
    """The settings that decide what comes out of a run."""
    kept = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    return OmegaConf.to_yaml(OmegaConf.create(kept))


def first_difference(old: str, new: str, growing: tuple[str, ...] = ()) -> str:
    """The first setting that differs, with both values; empty where none does.

    `growing`  settings that may differ; arms may then come and go, but not change
    """
    if old == new:
        return ""
    there, now = _settings(old), _settings(new)
    if growing:
        shared = there["arms"].keys() & now["arms"].keys()
        there["arms"], now["arms"] = ({name: own["arms"][name] for name in shared} for own in (there, now))
    a, b = dict(_leaves(there)), dict(_leaves(now))
    unequal = (key for key in {**a, **b} if a.get(key) != b.get(key) and key.partition(".")[0] not in growing)
    return next((f"{key}: {a.get(key, 'none')} there, {key}: {b.get(key, 'none')} now" for key in unequal), "")


def _settings(text: str) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(OmegaConf.create(text))
    return {"arms": {}} | found | {"data": text.partition(_DATA)[2].strip()}


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their whole key."""
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from _leaves(inner, f"{key}.{name}" if key else name)


def _fingerprint(requests: tuple[Request, ...]) -> str:
    """A hash of everything that the requests are; a span that many share is read once."""
    digest, numbers = hashlib.sha256(), {}
    for request in requests:
        for span in request.spans:
            if id(span) not in numbers:
                numbers[id(span)] = len(numbers)
                digest.update(span.tokens.data)
        spans = [(numbers[id(span)], len(span.tokens), span.independent, span.reusable) for span in request.spans]
        digest.update(repr((request.id, request.group_id, request.output_len, request.arrived_at, spans)).encode())
    return digest.hexdigest()
