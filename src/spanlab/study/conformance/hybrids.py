"""Properties of recurrent layers: resume from states at each depth, and composition of span maps."""

from __future__ import annotations

from spanlab.core.maps import MapRules
from spanlab.core.request import Span
from spanlab.core.spans import SpanSettings
from spanlab.engine.map_check import map_errors
from spanlab.engine.self_check import distance
from spanlab.settings import PlacementSettings, Strategy
from spanlab.settings.conformance import PROPERTIES
from spanlab.study.conformance.prefixes import OF_LOGITS, prefixes
from spanlab.study.conformance.subject import Subject
from spanlab.study.conformance.verdicts import Measurement, not_applicable

NO_STATES = "the model has no recurrent layers"
DEPTHS = 3  # number of grid positions


@PROPERTIES.register("state_depth")
def state_depth(subject: Subject) -> Measurement:
    """A prompt resumes from the last shared state, with the logits of a full forward."""
    grid = subject.settings.model.grid
    if not subject.settings.model.is_hybrid:
        return not_applicable(NO_STATES)
    long = subject.random_span(0, DEPTHS * grid + 5)
    requests = [subject.request(0, long)]
    for depth in range(1, DEPTHS + 1):
        shared = Span(long.tokens[: depth * grid + 3])
        requests.append(subject.request(depth, shared, subject.random_span(100 + depth, 7)))
    served = subject.serve(prefixes(subject), requests)
    reused = [served.reused(request) for request in requests[1:]]
    exact = reused == [depth * grid for depth in range(1, DEPTHS + 1)]
    value = subject.max_difference(served, requests) if exact else None
    return Measurement(value, subject.limit, f"{OF_LOGITS}; resumed at {', '.join(map(str, reused))}")


@PROPERTIES.register("map_composition")
def map_composition(subject: Subject) -> Measurement:
    """A span's map gives the same state as its rows in every recurrent layer; stored maps give equal answers."""
    if not subject.settings.model.is_hybrid:
        return not_applicable(NO_STATES)
    description = "relative difference of states by maps to states by rows, and warm to cold"
    errors = max(map_errors(subject.model))
    if errors > subject.limit:  # the engine would raise
        return Measurement(errors, subject.limit, description)
    strategy = Strategy(placement=PlacementSettings(kind="boundary"), spans=SpanSettings(maps=MapRules()))
    requests = subject.questions()
    warm = subject.serve(strategy, requests)
    cold = [subject.serve(strategy, [request]).logits_of(request) for request in requests]
    answers = [distance(warm.logits_of(request), answer) for request, answer in zip(requests, cold, strict=True)]
    reused = all(warm.reused(request) for request in requests[1:])
    return Measurement(max(errors, *answers) if reused else None, subject.limit, description)
