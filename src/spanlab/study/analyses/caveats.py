"""Caveats of a study's numbers: one sentence each, under the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from spanlab import build
from spanlab.offline.pricing import DESCENT, LIMIT
from spanlab.report import measures
from spanlab.report.data import ArmData
from spanlab.settings import Study
from spanlab.steady import SATURATED, TOO_SHORT, UNSETTLED
from spanlab.study.foreign_tokenizer import foreign_tokenizer
from spanlab.study.numbers.clairvoyants import describe_beaten

UNKNOWN_QUALITY = (
    "reuse of a span at another position than the one at which it was computed changes answers, and a repair undoes a "
    "part of the change: the simulator does not show how good the answers are"
)


ROUNDED_STATES = "{}: states are stored in a rounded format; the effect on answers is unknown in the simulator"
INEXACT_REPLAY = (
    "{}: not exact: recurrent layers read a residual stream without the outputs of attention; the effect on "
    "answers is not simulated"
)


def caveats(study: Study, arms: Sequence[ArmData], failed: dict[str, str]) -> tuple[str, ...]:
    """Return every caveat of a study, most general first."""
    has_spans = any(study.arms[name].spans is not None for name in study.chosen())
    unknown: tuple[str, ...] = (UNKNOWN_QUALITY,) if has_spans and study.backend == "sim" else ()
    unknown += _inexact(study)
    no_baseline = (f"no speedups, for {study.baseline} failed",) if study.baseline in failed else ()
    runs = [run for arm in arms for run in arm.runs]
    of_arms = (*describe_beaten(study, arms), *_loose_bounds(arms))
    return (
        *foreign_tokenizer(study),
        *unknown,
        *_drafted(study),
        *no_baseline,
        *_recorded(study),
        *_of_load(study, arms),
        *_extrapolated(runs),
        *of_arms,
    )


def _loose_bounds(arms: Sequence[ArmData]) -> list[str]:
    """Return a caveat where runs are too large for the tightest offline bound."""
    if not any(DESCENT in (arm.summary["bounds"]["offline_methods"] or ()) for arm in arms):
        return []
    return [f"offline bounds are looser than they could be: runs of more than {LIMIT:,} reuses and slots"]


def _drafted(study: Study) -> tuple[str, ...]:
    speculation = study.batch.speculation
    if not speculation.draft_tokens:
        return ()
    accepted = (
        f"each of {speculation.draft_tokens} drafts per step is accepted with probability {speculation.acceptance:g}"
    )
    layers = f", and layers of the drafter ({speculation.draft_layers}) are as large as the model's"
    size = layers if speculation.has_kv else ""
    return (f"speculative decoding: {accepted} if those before it are{size}: assumed, not measured",)


def _inexact(study: Study) -> tuple[str, ...]:
    replays = {name: build.build_recovery(study.model, study.arms[name]).replay for name in study.chosen()}
    replayed = [name for name, replay in replays.items() if replay is not None and not replay.exact]
    rounded = [name for name in study.chosen() if study.arms[name].state_format != "native"]
    sentences = ((INEXACT_REPLAY, replayed), (ROUNDED_STATES, rounded))
    return tuple(sentence.format(", ".join(names)) for sentence, names in sentences if names)


def _recorded(study: Study) -> tuple[str, ...]:
    if study.draws_arrivals():
        return ()
    return ("arrivals are given and nothing is drawn: one seed is run, and intervals are over groups only",)


def _of_load(study: Study, arms: Sequence[ArmData]) -> tuple[str, ...]:
    sentences = (_saturated(study, arms), _unsettled(arms), _warmup(study, arms), _full_store(arms))
    return tuple(sentence for sentence in sentences if sentence)


def with_verdict(arms: Sequence[ArmData], verdict: str) -> list[str]:
    """Return the names of the arms with this verdict."""
    return [arm.name for arm in arms if arm.summary["stationarity"]["verdict"] == verdict]


def _saturated(study: Study, arms: Sequence[ArmData]) -> str:
    names = with_verdict(arms, SATURATED)
    if not names:
        return ""
    load = load_words(study)
    no_speedups = f"; no speedups, for {study.baseline} is one of them" if study.baseline in names else ""
    return (
        f"saturated at {load}: {', '.join(names)}: the queue grows as long as requests arrive, so that mean delays "
        f"depend on the length of the run{no_speedups}"
    )


def _unsettled(arms: Sequence[ArmData]) -> str:
    names = with_verdict(arms, UNSETTLED)
    if not names:
        return ""
    return f"not settled: {', '.join(names)}: MSER-5 finds no end of the warm-up in the first half of the run"


def _warmup(study: Study, arms: Sequence[ArmData]) -> str:
    if len(with_verdict(arms, TOO_SHORT)) == len(arms):
        return "too few requests to detect a warm-up: fewer than 100 per seed"
    warmups = [arm.summary["stationarity"]["warmup_requests"] or 0 for arm in arms]
    if not warmups or not max(warmups) or study.warmup_fraction:
        return ""
    return (
        f"delays include the warm-up from an empty cache, {min(warmups)} to {max(warmups)} requests by MSER-5; "
        "warmup_fraction=0.5 leaves it out"
    )


def _full_store(arms: Sequence[ArmData]) -> str:
    if not measures.bytes_say_little(arms):
        return ""
    return (
        "no Pareto figures: the store is full, so that resident bytes equal the budget, whatever the arm; sweep the "
        'budget instead: sweep=["store.total_gib=A,B,C"]'
    )


def load_words(study: Study) -> str:
    """Return a label of the study's load: clients, requests per second, or the given arrivals."""
    rate, clients = study.arrivals.rate_rps, study.arrivals.clients
    if clients is not None:
        return f"{clients} client" + ("s" if clients > 1 else "")
    per = " per group" if study.arrivals.kind == "poisson_per_group" else ""
    return "the given arrivals" if rate is None else f"{rate:g}/s{per}"


def _extrapolated(runs: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return a caveat about steps outside the fitted range of the timing model, most frequent features first."""
    steps: Counter[str] = Counter()
    for run in runs:
        steps.update(run["beyond"])
    if not steps:
        return ()
    # A run of equal decode steps counts once.
    features = ", ".join(f"{name} in {count:,} steps" for name, count in steps.most_common())
    return (f"timing beyond what its profile was measured on: {features}",)
