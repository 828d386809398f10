"""Properties of stored entries: tenant isolation, and copy-on-write."""

from __future__ import annotations

from spanlab.core.repair import Repair
from spanlab.core.spans import SpanSettings
from spanlab.settings import Strategy
from spanlab.settings.conformance import PROPERTIES
from spanlab.study.conformance.prefixes import prefixes
from spanlab.study.conformance.subject import Subject
from spanlab.study.conformance.verdicts import Measurement, not_applicable

BLOCK = 16  # tokens; a repair then writes to a part of a page


@PROPERTIES.register("tenant_isolation")
def tenant_isolation(subject: Subject) -> Measurement:
    """A prompt reuses entries of its tenant, and no entry of another tenant."""
    spans = (subject.random_span(0, 2 * subject.settings.model.grid + 9), subject.random_span(1, 5))
    requests = [subject.request(number, *spans, salt=salt) for number, salt in enumerate(("a", "a", "b"))]
    served = subject.serve(prefixes(subject), requests)
    own_tokens, other_tokens = (served.reused(request) for request in requests[1:])
    return Measurement(
        float(other_tokens) if own_tokens else None,
        0.0,
        f"tokens reused of another tenant; {own_tokens:,} of its own are",
    )


@PROPERTIES.register("copy_on_write")
def copy_on_write(subject: Subject) -> Measurement:
    """Stored pages do not change while requests repair the spans in them."""
    if subject.settings.model.is_hybrid:
        return not_applicable("spans of hybrids are not repaired")
    requests = subject.questions()
    strategy = Strategy(block_size=BLOCK, spans=SpanSettings(repair=Repair(kind="first", k=4)))
    served = subject.start(strategy, requests)
    served.serve(requests[:1])
    engine = served.engine
    stored = {page: engine.pool.checksum([page]) for page in engine.nodes.all()}
    served.serve(requests[1:])
    remaining = stored.keys() & set(engine.nodes.all())
    changed = sum(engine.pool.checksum([page]) != stored[page] for page in remaining)
    reused = sum(served.reused(request) for request in requests[1:])
    value = float(changed) if remaining and reused else None
    return Measurement(value, 0.0, f"stored pages that changed, of {len(remaining)}")
