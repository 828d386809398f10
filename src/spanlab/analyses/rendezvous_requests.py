"""Requests of a study as a server gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spanlab.core.request import Request
from spanlab.engine.settings import remap_tokens
from spanlab.settings.server import NO_ENGINE
from spanlab.settings.study import Study
from spanlab.study.servers.base import SERVERS


def as_served(study: Study, requests: Sequence[Request]) -> Sequence[Request]:
    """Return requests as the server gets them: its own ids and answers, and no salts where it ignores them."""
    engine = study.server.engine
    knows_salts = engine == NO_ENGINE or SERVERS.make(engine, {}, {}).knows_salts
    mapped = remap_tokens(requests, study.model.vocab_size)
    salts = [request.cache_salt if knows_salts else "" for request in mapped]
    return [replace(request, output=None, cache_salt=salt) for request, salt in zip(mapped, salts, strict=True)]
