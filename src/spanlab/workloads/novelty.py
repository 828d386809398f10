"""Requests for documents that nobody has asked about: prompts of known lengths, and passages of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spanlab.core.request import Request, Span
from spanlab.workloads.fresh_ids import FreshIds
from spanlab.workloads.workload import Workload


def with_novel(workload: Workload, count: int, draw: np.random.Generator) -> Workload:
    """The workload with `count` further requests, each as long as one drawn from it, in a group of its own.

    Ordered text up to the first passage is shared, as a system prompt is; all other token ids are fresh, and beyond a
    vocabulary.
    """
    if not count:
        return workload
    known = workload.requests
    ids = FreshIds.beyond(known)
    groups = 1 + max(request.group_id for request in known)
    chosen = draw.integers(len(known), size=count).tolist()
    novel = [_renewed(known[at], len(known) + number, groups + number, ids) for number, at in enumerate(chosen)]
    return workload.changed((*known, *novel), f"{count} novel requests, whose passages no other one has")


def _renewed(request: Request, id: int, group: int, ids: FreshIds) -> Request:
    """A request as long as another one, with nothing of it but its opening text."""
    first = next((at for at, span in enumerate(request.spans) if span.independent), len(request.spans))
    renewed = [replace(span, tokens=ids.take(len(span.tokens))) for span in request.spans[first:]]
    spans: tuple[Span, ...] = (*request.spans[:first], *renewed)
    return replace(request, id=id, group_id=group, spans=spans, answer=None, gold=())
