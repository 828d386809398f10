"""Novel requests: prompts as long as existing ones, with passages that occur in no other request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spanlab.core.request import Request, Span
from spanlab.workloads.fresh_ids import FreshIds
from spanlab.workloads.workload import Workload


def with_novel(workload: Workload, count: int, draw: np.random.Generator) -> Workload:
    """Return the workload with `count` more requests, each as long as a drawn one and in a new group.

    Spans before the first passage, such as a system prompt, are shared. All other token ids are fresh, and may exceed a
    vocabulary.
    """
    if not count:
        return workload
    existing = workload.requests
    ids = FreshIds.above(existing)
    groups = 1 + max(request.group_id for request in existing)
    chosen = draw.integers(len(existing), size=count).tolist()
    novel = [
        _novel_request(existing[index], len(existing) + number, groups + number, ids)
        for number, index in enumerate(chosen)
    ]
    return workload.with_requests((*existing, *novel), f"{count} novel requests, whose passages no other one has")


def _novel_request(request: Request, id: int, group: int, ids: FreshIds) -> Request:
    """Return a request with the lengths of another one, of which it shares only the opening spans."""
    first = next((index for index, span in enumerate(request.spans) if span.independent), len(request.spans))
    renewed = [replace(span, tokens=ids.take(len(span.tokens))) for span in request.spans[first:]]
    spans: tuple[Span, ...] = (*request.spans[:first], *renewed)
    return replace(request, id=id, group_id=group, spans=spans, answer=None, gold=())
