"""Properties of spans that are reused at other positions."""

from __future__ import annotations

from spanlab.core.spans import SpanSettings
from spanlab.settings import Strategy
from spanlab.settings.conformance import PROPERTIES
from spanlab.study.conformance.subject import ONE_BY_ONE, TOGETHER, Subject
from spanlab.study.conformance.verdicts import Measured, absent

FORMS = {
    "rotate_queries": SpanSettings(),
    "rotate_keys": SpanSettings(keys="raw", kernel="rotate_keys"),
    "pre_rotated": SpanSettings(kernel="pre_rotated", sharing="private"),
}


@PROPERTIES.register("span_reuse")
def span_reuse(subject: Subject) -> Measured:
    """In every form of rotation, stored or not, spans are those of a dense forward in which each sees itself alone."""
    if subject.settings.model.is_hybrid:
        return absent("spans of hybrids are composed, see map_composition")
    requests, worst, reused = subject.questions(), 0.0, []
    for form in FORMS.values():
        alone, packed = (subject.serve(Strategy(spans=form), requests, rules) for rules in (ONE_BY_ONE, TOGETHER))
        worst = max(worst, *(subject.off(served, requests, blocks=True) for served in (alone, packed)))
        reused += [alone.reused(request) for request in requests[1:]]
    value = worst if all(reused) else None
    return Measured(
        value, subject.limit, f"relative difference of logits to a block-masked forward; {', '.join(FORMS)}"
    )
