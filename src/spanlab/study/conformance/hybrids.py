"""Properties of recurrent layers: states at their depth, and spans as maps of the state."""

from __future__ import annotations

from spanlab.core.maps import MapRules
from spanlab.core.request import Span
from spanlab.core.spans import SpanSettings
from spanlab.engine.map_proof import map_errors
from spanlab.engine.self_check import distance
from spanlab.settings import PlacementSettings, Strategy
from spanlab.settings.conformance import PROPERTIES
from spanlab.study.conformance.prefixes import OF_LOGITS, prefixes
from spanlab.study.conformance.subject import Subject
from spanlab.study.conformance.verdicts import Measured, absent

NO_STATES = "the model has no recurrent layers"
DEPTHS = 3  # positions of the grid


@PROPERTIES.register("state_depth")
def state_depth(subject: Subject) -> Measured:
    """A prompt resumes from the last state that it shares with another, and answers as a full forward."""
    grid = subject.settings.model.grid
    if not subject.settings.model.is_hybrid:
        return absent(NO_STATES)
    long = subject.words(0, DEPTHS * grid + 5)
    requests = [subject.ask(0, long)]
    for depth in range(1, DEPTHS + 1):
        shared = Span(long.tokens[: depth * grid + 3])
        requests.append(subject.ask(depth, shared, subject.words(100 + depth, 7)))
    served = subject.serve(prefixes(subject), requests)
    reused = [served.reused(request) for request in requests[1:]]
    exact = reused == [depth * grid for depth in range(1, DEPTHS + 1)]
    value = subject.off(served, requests) if exact else None
    return Measured(value, subject.limit, f"{OF_LOGITS}; resumed at {', '.join(map(str, reused))}")


@PROPERTIES.register("map_composition")
def map_composition(subject: Subject) -> Measured:
    """In every recurrent layer a span's map leads where its rows lead; stored maps answer as those just computed."""
    if not subject.settings.model.is_hybrid:
        return absent(NO_STATES)
    what = "relative difference of states by maps to states by rows, and warm to cold"
    errors = max(map_errors(subject.model))
    if errors > subject.limit:  # which the engine would refuse to serve
        return Measured(errors, subject.limit, what)
    strategy = Strategy(placement=PlacementSettings(kind="boundary"), spans=SpanSettings(maps=MapRules()))
    requests = subject.questions()
    warm = subject.serve(strategy, requests)
    cold = [subject.serve(strategy, [request]).of(request) for request in requests]
    answers = [distance(warm.of(one), other) for one, other in zip(requests, cold, strict=True)]
    reused = all(warm.reused(request) for request in requests[1:])
    return Measured(max(errors, *answers) if reused else None, subject.limit, what)
