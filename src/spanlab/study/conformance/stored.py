"""Properties of what is stored: whose it is, and that nobody writes to it."""

from __future__ import annotations

from spanlab.core.repair import Repair
from spanlab.core.spans import SpanSettings
from spanlab.settings import Strategy
from spanlab.settings.conformance import PROPERTIES
from spanlab.study.conformance.prefixes import prefixes
from spanlab.study.conformance.subject import Subject
from spanlab.study.conformance.verdicts import Measured, absent

BLOCK = 16  # tokens: repairs then write to a part of a page


@PROPERTIES.register("tenant_isolation")
def tenant_isolation(subject: Subject) -> Measured:
    """A prompt finds what its own tenant has stored, and nothing of another's."""
    spans = (subject.words(0, 2 * subject.settings.model.grid + 9), subject.words(1, 5))
    requests = [subject.ask(number, *spans, salt=salt) for number, salt in enumerate(("a", "a", "b"))]
    served = subject.serve(prefixes(subject), requests)
    own, other = (served.reused(request) for request in requests[1:])
    return Measured(float(other) if own else None, 0.0, f"tokens reused of another tenant; {own:,} of its own are")


@PROPERTIES.register("copy_on_write")
def copy_on_write(subject: Subject) -> Measured:
    """Stored pages keep every bit while requests repair the spans in them."""
    if subject.settings.model.is_hybrid:
        return absent("spans of hybrids are not repaired")
    requests = subject.questions()
    strategy = Strategy(block_size=BLOCK, spans=SpanSettings(repair=Repair(kind="first", k=4)))
    served = subject.start(strategy, requests)
    served.serve(requests[:1])
    engine = served.engine
    stored = {page: engine.pool.checksum([page]) for page in engine.nodes.all()}
    served.serve(requests[1:])
    kept = stored.keys() & set(engine.nodes.all())
    changed = sum(engine.pool.checksum([page]) != stored[page] for page in kept)
    reused = sum(served.reused(request) for request in requests[1:])
    value = float(changed) if kept and reused else None
    return Measured(value, 0.0, f"stored pages that changed, of {len(kept)}")
