"""Properties of spans that are reused at other positions (PIC)."""

from __future__ import annotations

from spanlab.core.spans import SpanSettings
from spanlab.settings import Strategy
from spanlab.settings.conformance import PROPERTIES
from spanlab.study.conformance.subject import ONE_BY_ONE, TOGETHER, Subject
from spanlab.study.conformance.verdicts import Measurement, not_applicable

FORMS = {
    "rotate_queries": SpanSettings(),
    "rotate_keys": SpanSettings(keys="raw", kernel="rotate_keys"),
    "pre_rotated": SpanSettings(kernel="pre_rotated", sharing="private"),
}


@PROPERTIES.register("span_reuse")
def span_reuse(subject: Subject) -> Measurement:
    """In every form of rotation, stored or not, logits equal those of a dense forward with a block-diagonal mask."""
    if subject.settings.model.is_hybrid:
        return not_applicable("spans of hybrids are composed, see map_composition")
    requests, worst, reused = subject.questions(), 0.0, []
    for form in FORMS.values():
        alone, packed = (subject.serve(Strategy(spans=form), requests, rules) for rules in (ONE_BY_ONE, TOGETHER))
        worst = max(worst, *(subject.max_difference(served, requests, blocks=True) for served in (alone, packed)))
        reused += [alone.reused(request) for request in requests[1:]]
    value = worst if all(reused) else None
    return Measurement(
        value, subject.limit, f"relative difference of logits to a block-masked forward; {', '.join(FORMS)}"
    )
