"""Registered analyses of a study, and the checks that each of them needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from spanlab.engine.settings import reads_baseline
from spanlab.registry import Registry, not_negative, one_of, positive, require, share
from spanlab.settings.arms import check_names
from spanlab_sim.timings import KV, WEIGHTS

if TYPE_CHECKING:
    from spanlab.analyses.base import Findings
    from spanlab.analyses.plan import SearchResult
    from spanlab.settings.study import Study
    from spanlab.stats import Verdict


# ------------------------------------------------------------------------------
# Registered acceptance bars of the analysis `bars`, and the checks that each of them needs.
# ------------------------------------------------------------------------------

#: Functions of a finished study and the name of an arm; `spanlab.study.analyses.bars` holds ours.
BARS: Registry[Sequence[Verdict]] = Registry("bars", given=("finished", "arm"))
_REORDERED = "repeated_documents"  # the workload whose orders are known
for _name in ("prefill_speedup", "expected_prefix", "computed_once", "near_infinite", "thrash", "beyond_whole_prompts"):
    BARS.later(_name, "spanlab.analyses.bars")


def check_bars(study: Study) -> None:
    """Raise ValueError for unknown bars and arms, and for workloads that a bar does not support."""
    is_read = "bars" in study.chosen_analyses()
    for name, arms in study.bars.items():
        one_of("bars", name, BARS)
        check_names(f"bars.{name}", arms, study.arms, is_read)
    if not is_read:
        return
    if not study.bars:
        raise ValueError("bars={} with analyses=bars: expected arms of a bar, as in bars.near_infinite=[radix]")
    if "expected_prefix" in study.bars and study.workload.kind != _REORDERED:
        raise ValueError(f"bars.expected_prefix with workload.kind={study.workload.kind}: expected {_REORDERED}")
    if "prefill_speedup" in study.bars:
        _check_alone(study)
    if "thrash" in study.bars and study.model.is_hybrid:
        raise ValueError(
            f"bars.thrash with model.name={study.model.name}: expected attention layers alone, for it counts KV"
        )
    if "beyond_whole_prompts" in study.bars and len(arms := whole_prompt_arms(study)) != 1:
        names = ", ".join(arms) or "none"
        raise ValueError(
            f"bars.beyond_whole_prompts with {names} of policy=exact_hash: expected one such arm that runs"
        )


def whole_prompt_arms(study: Study) -> list[str]:
    """Return the arms that run and match whole prompts only."""
    return [name for name in study.chosen() if study.arms[name].policy_name == "exact_hash"]


def _check_alone(study: Study) -> None:
    """Raise ValueError where requests share the device, for the bar compares single prefills."""
    if study.arrivals.clients != 1:
        clients = f"arrivals.clients={study.arrivals.clients}"
        raise ValueError(f"bars.prefill_speedup with {clients}: expected arrivals=closed_loop with 1")
    if study.baseline not in study.chosen():
        raise ValueError(f"bars.prefill_speedup with baseline={study.baseline}: expected one of the arms that run")


# ------------------------------------------------------------------------------
# Checks of a study with the analysis `decay`.
# ------------------------------------------------------------------------------

DECAY = "decay"


def check_decay(study: Study) -> None:
    """Raise ValueError where requests are not labelled as novel, or no baseline runs."""
    if DECAY not in study.chosen_analyses():
        return
    if study.arrivals.kind != "novel_stream":
        raise ValueError(f"arrivals.kind={study.arrivals.kind} with analyses=decay: expected novel_stream")
    if study.baseline not in study.chosen():
        raise ValueError(f"baseline={study.baseline} with analyses=decay: expected one of the arms that run")
    if study.backend == "server":
        raise ValueError("backend=server with analyses=decay: expected sim or engine, for a server reports no causes")


# ------------------------------------------------------------------------------
# Settings of the analysis `methods`: its reference arms and its noise floor.
# ------------------------------------------------------------------------------

METHODS = "methods"


@dataclass
class MethodSettings:
    """Reference arms with other passages in their prompts, and the noise of the baseline; for the analysis methods.

    `without_context`  arm without passages, whose loss is the zero point of the benefit of the context; null: shares
                       of the benefit are not reported
    `gold_only`        arm with the gold passage only, as perfect retrieval would give; null: none
    `floor_tokens`     most prompt tokens of a step in the baseline's second run; its distance from the first run is
                       the floor of all distances
    """

    without_context: str | None = None
    gold_only: str | None = None
    floor_tokens: int = 128

    def __post_init__(self) -> None:
        positive("methods.floor_tokens", self.floor_tokens)


def check_methods(study: Study) -> None:
    """Raise ValueError for arms that do not run, and for a study that records neither scores nor answers."""
    settings = study.methods
    if METHODS not in study.chosen_analyses():
        _refuse_unread(settings, study.chosen_analyses())
        return
    for key in ("without_context", "gold_only"):
        arm = getattr(settings, key)
        if arm is not None:
            one_of(f"methods.{key}", arm, study.arms)
    if study.engine.record not in ("scores", "tokens"):
        raise ValueError(f"analyses=methods with engine.record={study.engine.record}: expected scores or tokens")
    if study.engine.record == "tokens" and (study.engine.teacher or study.engine.weights == "random"):
        answers = f"engine.teacher={study.engine.teacher}, engine.weights={study.engine.weights}"
        raise ValueError(f"engine.record=tokens with {answers}: expected engine.teacher=null and trained weights")
    if study.baseline not in study.chosen():
        raise ValueError(f"baseline={study.baseline} with analyses=methods: expected one of the arms that run")
    if study.arrivals.clients != 1:
        clients = f"arrivals.clients={study.arrivals.clients}"
        raise ValueError(f"analyses=methods with {clients}: expected arrivals=closed_loop with 1")
    if settings.floor_tokens >= study.batch.max_num_batched_tokens:
        most = f"batch.max_num_batched_tokens={study.batch.max_num_batched_tokens}"
        raise ValueError(f"methods.floor_tokens={settings.floor_tokens} with {most}: expected fewer")


def _refuse_unread(settings: MethodSettings, analyses: list[str]) -> None:
    """Raise ValueError for settings that no analysis reads."""
    usual = asdict(MethodSettings())
    for key, value in asdict(settings).items():
        if value != usual[key]:
            raise ValueError(f"methods.{key}={value} with analyses={analyses}: expected methods among them")


# ------------------------------------------------------------------------------
# Settings of the analysis `plan`, and the checks of a study with it.
# ------------------------------------------------------------------------------

PLAN = "plan"
#: Functions of a planner (`spanlab.study.plan.planner`); each returns the result of one search.
SEARCHES: Registry[SearchResult] = Registry("plan.search", given=("planner",))
SEARCHES.later("memory", "spanlab.analyses.plan_searches")
SEARCHES.later("load", "spanlab.analyses.plan_searches")
SEARCHES.later("tier", "spanlab.analyses.plan_searches")
SEARCHES.later("replicas", "spanlab.analyses.plan_searches")
SEARCHES.later("ratio", "spanlab.analyses.plan_searches")
SEARCHES.later("interval", "spanlab.analyses.plan_searches")
SEARCHES.later("block", "spanlab.analyses.plan_searches")


@dataclass
class PlanSettings:
    """Search for settings that meet the targets of `slo`.

    `search`      memory: least store; load: most requests per second; tier: least size of the last tier; replicas:
                  fewest; ratio: of states to KV; interval: between states; block: tokens per block; null: memory and
                  load
    `resolution`  smallest distance of two tried values, relative to the value
    `points`      values over the whole range that are tried first, before the search narrows
    `shakes`      runs of recorded arrivals; all but the first shift each arrival by a small random time
    """

    search: list[str] | None = None
    resolution: float = 0.05
    points: int = 5
    shakes: int = 3

    def __post_init__(self) -> None:
        for name in self.search or ():
            one_of("plan.search", name, SEARCHES)
        if self.search == [] or len(set(self.search or ())) < len(self.search or ()):
            raise ValueError(f"plan.search={self.search}: expected one or more of {', '.join(SEARCHES)}, each once")
        if not 0.001 <= self.resolution <= 1:
            raise ValueError(f"plan.resolution={self.resolution}: expected a share from 0.001 to 1")
        if not 2 <= self.points <= 100:
            raise ValueError(f"plan.points={self.points}: expected 2 to 100")
        positive("plan.shakes", self.shakes)

    @property
    def searches(self) -> list[str]:
        """Names of the searches, in order."""
        return ["memory", "load"] if self.search is None else self.search


def check_plan(study: Study) -> None:
    """Raise ValueError for settings that `plan` does not read, and for its keys in other studies."""
    analyses, targets = study.chosen_analyses(), study.slo.targets
    if PLAN not in analyses:
        if targets:
            raise ValueError(f"slo.{targets[0].key}={targets[0].limit_s} with analyses={analyses}: expected [plan]")
        if study.plan != PlanSettings():
            raise ValueError(f"plan.search={study.plan.search} with analyses={analyses}: expected analyses=[plan]")
        return
    if not targets:
        raise ValueError("slo is empty with analyses=plan: expected a target, as in slo.ttft_p95_s=0.5")
    require(
        "analyses=plan",
        ("analyses", analyses, [PLAN]),
        ("backend", study.backend, "sim"),
        ("load.rates_rps", study.load.rates_rps, []),
        ("sweep", study.sweep, []),
        ("only", study.chosen(), [study.baseline]),
        *(
            (f"store.{key}", getattr(study.store, key), None)
            for key in ("kv_gib", "state_gib", "state_ratio", "entries")
        ),
    )
    for name in study.plan.searches:
        _check_search(study, name)


def _check_search(study: Study, name: str) -> None:
    """Raise ValueError for a search without the store, router, model or arm that it changes."""
    hybrid, pool = study.model.is_hybrid, study.arms[study.baseline].pool is not None
    arm = f"model.name={study.model.name} and baseline={study.baseline}"
    tree = (arm, "a hybrid model and an arm that keeps a tree")
    needs = {
        "tier": [(bool(study.store.tiers), "store.tiers={}", "a tier, as in +tier@store.tiers.host=dram")],
        "replicas": [(study.replicas.routing is not None, "replicas.routing=null", "a routing, as least_loaded")],
        "interval": [(hybrid and not pool, *tree)],
        "ratio": [
            (hybrid and not pool, *tree),
            (study.store.total_gib is not None, "store.total_gib=null", "the memory that is split"),
        ],
        "block": [(not (hybrid and pool), arm, "an arm whose blocks need not hold a state")],
    }
    for met, given, expected in needs.get(name, ()):
        if not met:
            raise ValueError(f"{given} with plan.search={name}: expected {expected}")


# ------------------------------------------------------------------------------
# Settings of the analysis `twin`: facts about a server that its log lacks.
# ------------------------------------------------------------------------------

TWIN = "twin"


@dataclass
class TwinSettings:
    """Configuration of the server that wrote the log; null: from the log's meta.json, or else vLLM's default.

    `train_share`             share of the requests that are used for the fit, in arrival order; the others test it
    `num_gpu_blocks`          KV blocks of one rank; null without meta.json: estimated from the device's memory
    `gpu_memory_utilization`  share of the device memory that the engine uses, where blocks are estimated
    `prefix_caching`          whether prefix caching is on; hybrids then store states at block boundaries
    `tensor_parallel`         devices that share each layer
    `data_parallel`           ranks that share the experts and take every step together
    `async_scheduling`        whether steps are scheduled during the previous one; null and no meta.json: the better fit
    `weights`                 model (the type in its config.json), fp8 or int4
    `kv`                      model, fp8 or int4
    `cuda_graphs`             whether steps are padded to the sizes of captured CUDA graphs
    """

    train_share: float = 0.5
    num_gpu_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    prefix_caching: bool | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    async_scheduling: bool | None = None
    weights: str | None = None
    kv: str | None = None
    cuda_graphs: bool | None = None

    def __post_init__(self) -> None:
        for key in ("num_gpu_blocks", "gpu_memory_utilization", "tensor_parallel", "data_parallel"):
            positive(f"twin.{key}", getattr(self, key))
        share("twin.train_share", self.train_share, below_one=True)
        positive("twin.train_share", self.train_share)
        for key, value, formats in (("weights", self.weights, WEIGHTS), ("kv", self.kv, KV)):
            if value is not None:
                one_of(f"twin.{key}", value, formats)


def check_twin(study: Study) -> None:
    """Raise ValueError for settings that `twin` does not read, and for its keys in other studies."""
    if TWIN not in study.chosen_analyses():
        if study.twin != TwinSettings():
            raise ValueError(f"twin with analyses={study.chosen_analyses()}: expected -cn twin")
        return
    require(
        "analyses=twin",
        ("analyses", study.chosen_analyses(), [TWIN]),
        ("workload.kind", study.workload.kind, "log"),
        ("workload.popularity.requests", study.workload.popularity.requests, None),
        ("arrivals.kind", study.arrivals.kind, "as_given"),
        ("load.rates_rps", study.load.rates_rps, []),
        ("backend", study.backend, "sim"),
        ("timing.kind", study.timing.kind, "roofline"),
        ("seeds", study.seeds, study.seeds[:1]),
        ("warmup_fraction", study.warmup_fraction, 0.0),
        ("batch.async_scheduling", study.batch.async_scheduling, False),
        ("batch.speculation.draft_tokens", study.batch.speculation.draft_tokens, 0),
        ("store.total_gib", study.store.total_gib, None),
        ("store.state_gib", study.store.state_gib, None),
        ("store.state_ratio", study.store.state_ratio, None),
        ("store.entries", study.store.entries, None),
        ("only one arm, with a pool", [study.arms[name].pool is not None for name in study.chosen()], [True]),
    )
    if study.store.kv_gib is not None and study.twin.num_gpu_blocks is not None:
        raise ValueError(f"store.kv_gib={study.store.kv_gib} with twin.num_gpu_blocks: expected one of them")


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
ANALYSES.later("summary", "spanlab.analyses.summary", needs=(ARMS, REPEAT))
ANALYSES.later("families", "spanlab.analyses.families", needs=(ARMS, REPEAT))
ANALYSES.later("policies", "spanlab.analyses.policies", needs=(ARMS,))
ANALYSES.later("bars", "spanlab.analyses.bars", needs=(ARMS,))
ANALYSES.later("state_ratio", "spanlab.analyses.state_ratio", needs=(ARMS,))
ANALYSES.later("break_even", "spanlab.analyses.break_even", needs=(ARMS, REPEAT))
ANALYSES.later("perfect_eviction", "spanlab.analyses.perfect_eviction", needs=(ARMS, REPEAT))
ANALYSES.later("compare_backends", "spanlab.analyses.compare_backends", needs=(MEASURED,))
ANALYSES.later("fit_profile", "spanlab.analyses.fit_profile", needs=(MEASURED,))
ANALYSES.later("serving", "spanlab.analyses.serving", needs=(TOKENS,))
ANALYSES.later("prefill", "spanlab.analyses.prefill", needs=(REPEAT, LABELS))
ANALYSES.later("answers", "spanlab.analyses.answers", needs=(MEASURED, REPEAT, LABELS))
ANALYSES.later(METHODS, "spanlab.analyses.methods", needs=(MEASURED, REPEAT, LABELS, FLOOR))
ANALYSES.later("tiers", "spanlab.analyses.tiers", needs=(ARMS,))
ANALYSES.later("replicas", "spanlab.analyses.replicas", needs=(ARMS,))
ANALYSES.later(DECAY, "spanlab.analyses.decay")
ANALYSES.later("explain", "spanlab.analyses.explain", needs=(LOG,))
ANALYSES.later(PLAN, "spanlab.analyses.plan", needs=(POINTS,))
ANALYSES.later("twin", "spanlab.analyses.twin", needs=(LOG,))
#: Functions of a study and its log; each raises ValueError for a log that its analysis cannot use.
LOG_CHECKS: Registry[None] = Registry("checks of a log", given=("study", "log"))
LOG_CHECKS.later("explain", "spanlab.analyses.explain")
LOG_CHECKS.later("twin", "spanlab.analyses.twin")
#: Functions of the points of a sweep that ran, for analyses that also compare the points.
OF_POINTS: Registry[Findings] = Registry("analyses of points", given=("points",))
OF_POINTS.later("prefill", "spanlab.analyses.prefill")
OF_POINTS.later("families", "spanlab.analyses.families")
OF_POINTS.later("policies", "spanlab.analyses.policies")
OF_POINTS.later("bars", "spanlab.analyses.bars")
OF_POINTS.later("state_ratio", "spanlab.analyses.state_ratio")
OF_POINTS.later("break_even", "spanlab.analyses.break_even")
OF_POINTS.later("perfect_eviction", "spanlab.analyses.perfect_eviction")
OF_POINTS.later("tiers", "spanlab.analyses.tiers")
OF_POINTS.later("replicas", "spanlab.analyses.replicas")
OF_POINTS.later(DECAY, "spanlab.analyses.decay")
#: Families by their effect on answers. The first two leave answers unchanged, up to the order of passages.
PREFIX, ORDERED, REPAIRED, PLAIN = "prefix", "cached_order", "repaired", "plain"
STEPS = (PREFIX, ORDERED, REPAIRED, PLAIN)
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


# ------------------------------------------------------------------------------
# Latency limits that a request must meet to count in the goodput.
# ------------------------------------------------------------------------------


@dataclass
class RequestGoal:
    """Limits of one request; it counts in the goodput if it meets all of them; null: no limit.

    `ttft_s`  time to first token, seconds
    `tpot_s`  time per output token after the first, seconds; a request with one output token meets it
    `e2e_s`   time to the last token, seconds
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        limits = vars(self)
        for key, limit in limits.items():
            positive(f"goodput.{key}", limit)
        if set(limits.values()) == {None}:
            raise ValueError("goodput without a limit: expected ttft_s, tpot_s or e2e_s")


def check_goodput(study: Study) -> None:
    """Raise ValueError for goals that no analysis reads."""
    if study.goodput and "serving" not in study.chosen_analyses():
        goals = ", ".join(study.goodput)
        raise ValueError(f"goodput of {goals} with analyses={study.chosen_analyses()}: expected serving among them")


# ------------------------------------------------------------------------------
# Latency targets of the analysis `plan`.
# ------------------------------------------------------------------------------


class Target(NamedTuple):
    """`statistic` (mean, p50, p95, p99) of `delay` (queue, ttft, tpot, e2e) is at most `limit_s` seconds."""

    key: str
    delay: str
    statistic: str
    limit_s: float

    @property
    def words(self) -> str:
        """The target as text."""
        return f"{self.key} ≤ {self.limit_s:g}"


@dataclass
class SloSettings:
    """Latency targets over all requests, in seconds; every target that is set must be met.

    `queue_mean_s`, `queue_p50_s`, `queue_p95_s`, `queue_p99_s`  admission − arrival
    `ttft_mean_s`, `ttft_p50_s`, `ttft_p95_s`, `ttft_p99_s`  first token − arrival
    `tpot_mean_s`, `tpot_p50_s`, `tpot_p95_s`, `tpot_p99_s`  (last − first token) ÷ (output tokens − 1), of each request
    `e2e_mean_s`, `e2e_p50_s`, `e2e_p95_s`, `e2e_p99_s`  last token − arrival
    """

    queue_mean_s: float | None = None
    queue_p50_s: float | None = None
    queue_p95_s: float | None = None
    queue_p99_s: float | None = None
    ttft_mean_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_mean_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    tpot_p99_s: float | None = None
    e2e_mean_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p95_s: float | None = None
    e2e_p99_s: float | None = None

    def __post_init__(self) -> None:
        for key, limit in vars(self).items():
            positive(f"slo.{key}", limit)

    @property
    def targets(self) -> list[Target]:
        """The targets that are set."""
        limits = {key: limit for key, limit in vars(self).items() if limit is not None}
        keys = [key.split("_") for key in limits]
        return [
            Target(key, delay, statistic, limit)
            for (key, limit), (delay, statistic, _) in zip(limits.items(), keys, strict=True)
        ]


# ------------------------------------------------------------------------------
# A limit on a result that ends a run with an error: `token_hit_rate<0.6`.
# ------------------------------------------------------------------------------

METRICS = ("token_hit_rate", "mean_token_hit_rate", "request_hit_rate")
_FORM = re.compile(rf"\s*({'|'.join(METRICS)})\s*([<>])\s*(\d*\.?\d+)\s*")


@dataclass(frozen=True)
class Limit:
    """`metric` below or above `value`, a share from 0 to 1, is an error."""

    metric: str
    below: bool
    value: float

    def holds(self, numbers: Mapping[str, Any]) -> bool:
        """Return whether the metric is beyond the limit."""
        measured = numbers[self.metric]
        return bool(measured < self.value if self.below else measured > self.value)


def parse_limit(text: str) -> Limit:
    """Parse a limit such as `token_hit_rate<0.6`; ValueError for any other text."""
    match = _FORM.fullmatch(text)
    if match is None or float(match[3]) > 1:
        expected = f"expected METRIC<SHARE or METRIC>SHARE, METRIC one of {', '.join(METRICS)}, SHARE from 0 to 1"
        raise ValueError(f"fail_on={text}: {expected}")
    return Limit(match[1], match[2] == "<", float(match[3]))


# ------------------------------------------------------------------------------
# Settings of the designed shapes, which calibrate the timing of engine steps.
# ------------------------------------------------------------------------------


@dataclass
class DesignSettings:
    """Shapes to measure for calibration: a few requests each, over all lengths and batch sizes.

    `shapes`   number of shapes, distributed over the arms
    `repeats`  measurements of every shape, each time in another order; the median is used
    `longest`  largest prompt, in tokens; null: that of the requests to predict
    `outputs`  most output tokens of a request; null: that of the requests to predict
    `seed`     seed of sizes, tokens and order
    """

    shapes: int = 48
    repeats: int = 3
    longest: int | None = None
    outputs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("shapes", "repeats", "longest", "outputs"):
            positive(f"design.{key}", getattr(self, key))
        not_negative("design.seed", self.seed)
        if self.longest is not None and self.longest < 16:
            raise ValueError(f"design.longest={self.longest}: expected 16 tokens or more")
        if self.shapes < 2:
            raise ValueError(f"design.shapes={self.shapes}: expected 2 or more, for each is predicted from the others")
