"""Registered analyses of a study, and the checks that each of them needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.analysis.break_even import STEPS
from spanlab.checks import one_of, require
from spanlab.engine.settings import reads_baseline
from spanlab.registry import Registry
from spanlab.settings.arms import check_names
from spanlab.settings.bars import check_bars
from spanlab.settings.decay import DECAY, check_decay
from spanlab.settings.methods import METHODS, check_methods
from spanlab.settings.plan import PLAN, check_plan
from spanlab.settings.twin import check_twin

if TYPE_CHECKING:
    from spanlab.settings.study import Study
    from spanlab.study.findings import Findings

#: Functions of a finished study; `spanlab.study.findings` describes their input and output. An analysis may need:
#: ARMS      the summary of every arm
#: REPEAT    a second run of the baseline in engine studies: the noise of the machine, or of its numerics
#: MEASURED  runs on an engine
#: LABELS    the labels of the workload's requests
#: FLOOR     a run of the baseline with other chunk sizes: the noise of its numerics
#: TOKENS    the gaps between output tokens
#: LOG       a log, which the analysis reads itself; the study serves no request
#: POINTS    runs with other settings, which the analysis submits to the study's executor; the study runs no arm itself
ARMS, REPEAT, MEASURED, LABELS, TOKENS, FLOOR = "arms", "repeat", "measured", "labels", "tokens", "floor"
LOG, POINTS = "log", "points"
ANALYSES: Registry[Findings] = Registry("analyses", given=("finished",))
ANALYSES.later("summary", "spanlab.study.analyses.summary", needs=(ARMS, REPEAT))
ANALYSES.later("families", "spanlab.study.analyses.families", needs=(ARMS, REPEAT))
ANALYSES.later("policies", "spanlab.study.analyses.policies", needs=(ARMS,))
ANALYSES.later("bars", "spanlab.study.analyses.bars", needs=(ARMS,))
ANALYSES.later("state_ratio", "spanlab.study.analyses.state_ratio", needs=(ARMS,))
ANALYSES.later("break_even", "spanlab.study.analyses.break_even", needs=(ARMS, REPEAT))
ANALYSES.later("perfect_eviction", "spanlab.study.analyses.perfect_eviction", needs=(ARMS, REPEAT))
ANALYSES.later("compare_backends", "spanlab.study.fidelity.compare_backends", needs=(MEASURED,))
ANALYSES.later("fit_profile", "spanlab.study.fidelity.fit_profile", needs=(MEASURED,))
ANALYSES.later("serving", "spanlab.study.analyses.serving", needs=(TOKENS,))
ANALYSES.later("prefill", "spanlab.study.analyses.prefill", needs=(REPEAT, LABELS))
ANALYSES.later("answers", "spanlab.study.analyses.answers", needs=(MEASURED, REPEAT, LABELS))
ANALYSES.later(METHODS, "spanlab.study.analyses.methods", needs=(MEASURED, REPEAT, LABELS, FLOOR))
ANALYSES.later("tiers", "spanlab.study.analyses.tiers", needs=(ARMS,))
ANALYSES.later("replicas", "spanlab.study.analyses.replicas", needs=(ARMS,))
ANALYSES.later(DECAY, "spanlab.study.analyses.decay")
ANALYSES.later("explain", "spanlab.study.explain.analysis", needs=(LOG,))
ANALYSES.later(PLAN, "spanlab.study.plan.analysis", needs=(POINTS,))
ANALYSES.later("twin", "spanlab.study.twin.analysis", needs=(LOG,))
#: Functions of a study and its log; each raises ValueError for a log that its analysis cannot use.
LOG_CHECKS: Registry[None] = Registry("checks of a log", given=("study", "log"))
LOG_CHECKS.later("explain", "spanlab.study.explain.analysis")
LOG_CHECKS.later("twin", "spanlab.study.twin.analysis")
#: Functions of the points of a sweep that ran, for analyses that also compare the points.
OF_POINTS: Registry[Findings] = Registry("analyses of points", given=("points",))
OF_POINTS.later("prefill", "spanlab.study.analyses.prefill")
OF_POINTS.later("families", "spanlab.study.analyses.families")
OF_POINTS.later("policies", "spanlab.study.analyses.policies")
OF_POINTS.later("bars", "spanlab.study.analyses.bars")
OF_POINTS.later("state_ratio", "spanlab.study.analyses.state_ratio")
OF_POINTS.later("break_even", "spanlab.study.analyses.break_even")
OF_POINTS.later("perfect_eviction", "spanlab.study.analyses.perfect_eviction")
OF_POINTS.later("tiers", "spanlab.study.analyses.tiers")
OF_POINTS.later("replicas", "spanlab.study.analyses.replicas")
OF_POINTS.later(DECAY, "spanlab.study.analyses.decay")
DESIGNED = "designed_shapes"  # the workload of a calibration
EXPLAIN = "explain"
_PACED = ("poisson", "gamma", "deterministic")


def needed(study: Study, need: str) -> bool:
    """Return whether an analysis of the study declares `need`."""
    return not set(ANALYSES.needing(need)).isdisjoint(study.chosen_analyses())


def check_analyses(study: Study) -> None:
    """Raise ValueError for an analysis whose input the study does not produce."""
    if study.analyses is not None and not study.analyses:
        raise ValueError(f"analyses=[]: expected one or more of {', '.join(ANALYSES)}")
    for name in study.chosen_analyses():
        one_of("analyses", name, ANALYSES)
        if name in ANALYSES.needing(MEASURED) and study.backend != "engine":
            raise ValueError(f"analyses={name} with backend={study.backend}: expected backend=engine")
        if name in ANALYSES.needing(ARMS) and study.backend == "server":
            raise ValueError(f"analyses={name} with backend=server: expected serving, for a server reports no causes")
        if (name == "fit_profile") != (study.workload.kind == DESIGNED):
            raise ValueError(
                f"analyses={name} with workload.kind={study.workload.kind}: expected fit_profile with {DESIGNED}"
            )
        if name == "state_ratio" and not study.model.is_hybrid:
            raise ValueError(f"analyses=state_ratio with model.name={study.model.name}: expected a hybrid model")
        if name == "replicas" and study.replicas.count == 1:
            raise ValueError("analyses=replicas with replicas.count=1: expected two replicas or more")
        if name == "prefill" and study.arrivals.clients != 1:
            raise ValueError(
                f"analyses=prefill with arrivals.clients={study.arrivals.clients}: expected arrivals=closed_loop with 1"
            )
        if name == "answers" and study.engine.record not in ("tokens", "logits"):
            raise ValueError(f"analyses=answers with engine.record={study.engine.record}: expected tokens or logits")
        if name == "answers" and study.engine.weights == "random" and study.engine.record == "tokens":
            raise ValueError("engine.record=tokens with engine.weights=random: expected logits, or trained weights")
        if name in ANALYSES.needing(LABELS) and study.workload.popularity.requests is not None:
            drawn = f"workload.popularity.requests={study.workload.popularity.requests}"
            raise ValueError(f"{drawn} with analyses={name}: expected null, for it groups requests by number")
        if study.repeats > 1:
            _check_repeats(study, name)
    check_explain(study)
    check_decay(study)
    check_plan(study)
    check_twin(study)
    check_methods(study)
    check_families(study)
    check_bars(study)
    check_teacher(study)
    check_judge(study)
    if study.sweep and "summary" not in study.chosen_analyses():  # its arms are the rows of a sweep
        raise ValueError(
            f"sweep={study.sweep} with analyses={study.chosen_analyses()}: expected sweep=[], or summary among them"
        )
    _check_alternate(study)


def _check_alternate(study: Study) -> None:
    """Raise ValueError where arms would hardly alternate: under load, an engine is rarely without a request."""
    clients = study.arrivals.clients
    if study.engine.alternate and clients != 1:
        raise ValueError(
            f"engine.alternate=true with arrivals.clients={'null' if clients is None else clients}: "
            "expected arrivals=closed_loop with 1"
        )


def check_explain(study: Study) -> None:
    """Raise ValueError for settings that `explain` does not read, and for its keys in other studies."""
    if EXPLAIN not in study.chosen_analyses():
        if study.fail_on is not None:
            raise ValueError(f"fail_on={study.fail_on} with analyses={study.chosen_analyses()}: expected [explain]")
        return
    require(
        "analyses=explain",
        ("analyses", study.chosen_analyses(), [EXPLAIN]),
        ("workload.kind", study.workload.kind, "log"),
        ("workload.popularity.requests", study.workload.popularity.requests, None),
        ("arrivals.kind", study.arrivals.kind, "as_given"),
        ("load.rates_rps", study.load.rates_rps, []),
        ("backend", study.backend, "sim"),
        ("replicas.count", study.replicas.count, 1),
        ("seeds", study.seeds, study.seeds[:1]),
        ("warmup_fraction", study.warmup_fraction, 0.0),
    )
    if study.baseline not in study.chosen():
        raise ValueError(f"baseline={study.baseline} with analyses=explain: expected one of the arms that run")


def _check_repeats(study: Study, name: str) -> None:
    """Raise ValueError for repeats that would be equal or unread; `check_design` checks those of designed shapes."""
    if study.backend != "engine":
        raise ValueError(f"repeats={study.repeats} with backend={study.backend}: expected 1, for runs would be equal")
    if name not in ("compare_backends", "fit_profile"):
        raise ValueError(f"repeats={study.repeats} with analyses={name}: expected repeats=1, or more seeds")


def check_families(study: Study) -> None:
    """Raise ValueError for fewer than two families, and for unknown arms."""
    is_read = not {"families", "policies", "break_even"}.isdisjoint(study.chosen_analyses())
    if {"families", "policies"} & set(study.chosen_analyses()) and len(study.families) < 2:
        raise ValueError(f"families={study.families}: expected two families or more")
    if "break_even" in study.chosen_analyses() and set(study.families) != set(STEPS):
        raise ValueError(f"families={study.families} with analyses=break_even: expected {', '.join(STEPS)}")
    for name, arms in study.families.items():
        check_names(f"families.{name}", arms, study.arms, is_read)
        if not arms and is_read:
            raise ValueError(f"families.{name}=[]: expected one or more of {', '.join(study.arms)}")


def check_teacher(study: Study) -> None:
    """Raise ValueError if the teacher, or the reference of scores, is not among the arms that run."""
    engine = study.engine
    if reads_baseline(engine) and study.baseline not in study.chosen():
        key = f"engine.teacher={engine.teacher} with engine.record={engine.record}"
        raise ValueError(f"{key}: expected baseline={study.baseline} among the arms that run")


def check_judge(study: Study) -> None:
    """Raise ValueError for a judge without answers: each arm must generate its own, with trained weights."""
    if not study.judge.base_url:
        return
    engine = study.engine
    key = f"judge.base_url={study.judge.base_url}"
    if "answers" not in study.chosen_analyses():
        raise ValueError(f"{key} with analyses={study.chosen_analyses()}: expected answers among them")
    if engine.teacher is not None or engine.weights == "random":
        answers = f"engine.teacher={engine.teacher}, engine.weights={engine.weights}"
        raise ValueError(f"{key} with {answers}: expected engine.teacher=null and trained weights")


def check_design(study: Study) -> None:
    """Raise ValueError for settings that a study of designed shapes does not read."""
    if study.workload.kind != DESIGNED:
        return
    require(
        f"workload.kind={DESIGNED}",
        ("backend", study.backend, "engine"),
        ("arrivals.kind", study.arrivals.kind, "as_given"),
        ("engine.clock", study.engine.clock, "virtual"),
        ("engine.alternate", study.engine.alternate, False),
        ("repeats", study.repeats, 1),
        ("warmup_fraction", study.warmup_fraction, 0.0),
        ("load.rates_rps", study.load.rates_rps, []),
    )
    for key in ("longest", "outputs"):
        if getattr(study.design, key) is None:
            raise ValueError(f"design.{key}=null with workload.kind={DESIGNED}: expected a number of tokens")


def check_shares(study: Study) -> None:
    """Raise ValueError for `load.shares` where arrivals cannot be scaled to a share of saturation."""
    arrivals, shares = study.arrivals, study.load.shares
    if not shares:
        return
    if study.backend != "engine":
        raise ValueError(f"load.shares={shares} with backend={study.backend}: expected backend=engine")
    if study.sweep:
        raise ValueError(f"sweep={study.sweep} with load.shares={shares}: expected sweep=[]")
    if len(study.seeds) != 1:
        raise ValueError(f"seeds={study.seeds} with load.shares: expected one seed, whose arrivals are repeated")
    if study.baseline not in study.chosen():
        raise ValueError(f"baseline={study.baseline} with load.shares: expected one of the arms that run")
    if arrivals.kind not in _PACED or study.workload.kind == "ragpulse":
        kinds = f"arrivals.kind={arrivals.kind} and workload.kind={study.workload.kind} with load.shares"
        raise ValueError(f"{kinds}: expected arrivals that can be paced, {', '.join(_PACED)}, and no recorded times")
    if arrivals.rate_rps != 1.0:
        raise ValueError(
            f"arrivals.rate_rps={arrivals.rate_rps} with load.shares: expected 1, for shares of saturation set it"
        )
