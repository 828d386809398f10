"""Caveats of a study's numbers: one sentence each, under the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from spanlab import build
from spanlab.analysis.bootstrap import describe_few
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
    return (
        *foreign_tokenizer(study),
        *_inexact(study),
        *_drafted(study),
        *([f"no speedups, for {study.baseline} failed"] if study.baseline in failed else []),
        *_recorded(study),
        *_few(arms),
        *_saturated(study, arms),
        *_unsettled(arms),
        *_warmup(study, arms),
        *_full_store(arms),
        *_extrapolated(arms),
        *describe_beaten(study, arms),
        *_loose_bounds(arms),
    )


def _loose_bounds(arms: Sequence[ArmData]) -> Iterator[str]:
    """Yield a caveat where runs are too large for the tightest offline bound."""
    if any(DESCENT in (arm.summary["bounds"]["offline_methods"] or ()) for arm in arms):
        yield f"offline bounds are looser than they could be: runs of more than {LIMIT:,} reuses and slots"


def _drafted(study: Study) -> Iterator[str]:
    speculation = study.batch.speculation
    if not speculation.draft_tokens:
        return
    accepted = (
        f"each of {speculation.draft_tokens} drafts per step is accepted with probability {speculation.acceptance:g}"
    )
    layers = f", and layers of the drafter ({speculation.draft_layers}) are as large as the model's"
    size = layers if speculation.has_kv else ""
    yield f"speculative decoding: {accepted} if those before it are{size}: assumed, not measured"


def _inexact(study: Study) -> Iterator[str]:
    """Yield caveats about answers that the arms change and the simulator does not compute."""
    if study.backend == "sim" and any(study.arms[name].spans is not None for name in study.chosen()):
        yield UNKNOWN_QUALITY
    replays = {name: build.build_recovery(study.model, study.arms[name]).replay for name in study.chosen()}
    replayed = [name for name, replay in replays.items() if replay is not None and not replay.exact]
    rounded = [name for name in study.chosen() if study.arms[name].state_format != "native"]
    for sentence, names in ((INEXACT_REPLAY, replayed), (ROUNDED_STATES, rounded)):
        if names:
            yield sentence.format(", ".join(names))


def _recorded(study: Study) -> Iterator[str]:
    if not study.draws_arrivals():
        yield "arrivals are given and nothing is drawn: one seed is run, and intervals are over groups only"


def _few(arms: Sequence[ArmData]) -> Iterator[str]:
    sizes = dict.fromkeys((len(arm.summary["seeds"]), arm.summary["groups"]) for arm in arms)
    yield from filter(None, (describe_few(*size) for size in sizes))


def with_verdict(arms: Sequence[ArmData], verdict: str) -> list[str]:
    """Return the names of the arms with this verdict."""
    return [arm.name for arm in arms if arm.summary["stationarity"]["verdict"] == verdict]


def _saturated(study: Study, arms: Sequence[ArmData]) -> Iterator[str]:
    names = with_verdict(arms, SATURATED)
    if not names:
        return
    no_speedups = f"; no speedups, for {study.baseline} is one of them" if study.baseline in names else ""
    yield (
        f"saturated at {load_words(study)}: {', '.join(names)}: the queue grows as long as requests arrive, so that "
        f"mean delays depend on the length of the run{no_speedups}"
    )


def _unsettled(arms: Sequence[ArmData]) -> Iterator[str]:
    if names := with_verdict(arms, UNSETTLED):
        yield f"not settled: {', '.join(names)}: MSER-5 finds no end of the warm-up in the first half of the run"


def _warmup(study: Study, arms: Sequence[ArmData]) -> Iterator[str]:
    if len(with_verdict(arms, TOO_SHORT)) == len(arms):
        yield "too few requests to detect a warm-up: fewer than 100 per seed"
        return
    warmups = [arm.summary["stationarity"]["warmup_requests"] or 0 for arm in arms]
    if any(warmups) and not study.warmup_fraction:
        yield (
            f"delays include the warm-up from an empty cache, {min(warmups)} to {max(warmups)} requests by MSER-5; "
            "warmup_fraction=0.5 leaves it out"
        )


def _full_store(arms: Sequence[ArmData]) -> Iterator[str]:
    if measures.bytes_say_little(arms):
        yield (
            "no Pareto figures: the store is full, so that resident bytes equal the budget, whatever the arm; sweep "
            'the budget instead: sweep=["store.total_gib=A,B,C"]'
        )


def load_words(study: Study) -> str:
    """Return a label of the study's load: clients, requests per second, or the given arrivals."""
    rate, clients = study.arrivals.rate_rps, study.arrivals.clients
    if clients is not None:
        return f"{clients} client" + ("s" if clients > 1 else "")
    per = " per group" if study.arrivals.kind == "poisson_per_group" else ""
    return "the given arrivals" if rate is None else f"{rate:g}/s{per}"


def _extrapolated(arms: Sequence[ArmData]) -> Iterator[str]:
    """Yield a caveat about steps outside the fitted range of the timing model, most frequent features first."""
    steps: Counter[str] = Counter()
    for run in (run for arm in arms for run in arm.runs):
        steps.update(run["beyond"])
    # A run of equal decode steps counts once.
    features = ", ".join(f"{name} in {count:,} steps" for name, count in steps.most_common())
    if features:
        yield f"timing beyond what its profile was measured on: {features}"
