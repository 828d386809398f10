"""What a run is made of, written down: a run that is resumed must be made of the same."""

from __future__ import annotations

import hashlib
from typing import Any

from omegaconf import OmegaConf

from spanlab.core.request import Request

# Settings that say where and how a run is done, not what comes out of it: a run may be resumed with others.
_INCIDENTAL = ("output", "tracking", "workers")


def as_yaml(config: dict[str, Any], requests: tuple[Request, ...]) -> str:
    """What a run is made of: its settings, and the contents of its data, which can change under the same name."""
    return f"{settings_yaml(config)}# requests: {_fingerprint(requests)}\n"


def settings_yaml(config: dict[str, Any]) -> str:
    """The settings that decide what comes out of a run."""
    kept = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    return OmegaConf.to_yaml(OmegaConf.create(kept))


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
