"""Registered analyses, and the settings that only they read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import update_wrapper
from typing import Any, NamedTuple

from spanlab.model_spec import KV, WEIGHTS
from spanlab.registry import Factory, Registry, not_negative, one_of, positive, share_below_one
from spanlab.settings.server import check_address

# ------------------------------------------------------------------------------
# Analyses by name. Each stands in one file of `spanlab.analyses`, which registers it.
# ------------------------------------------------------------------------------

#: What an analysis may need:
#: ARMS      the summary of every arm
#: REPEAT    a second run of the baseline in engine studies: the noise of the machine, or of its
#:           numerics
#: MEASURED  runs on an engine
#: LABELS    the labels of the workload's requests
#: FLOOR     a run of the baseline with other chunk sizes: the noise of its numerics
#: PLAIN     in engine studies, a run of the same requests in plain transformers, without a cache
#: TOKENS    the gaps between output tokens
#: LOG       a log, which the analysis reads itself; the study serves no request
#: POINTS    runs with other settings, which the analysis submits to the study's executor; the study
#:           runs no arm itself
ARMS, REPEAT, MEASURED, LABELS = "arms", "repeat", "measured", "labels"
TOKENS, FLOOR, PLAIN = "tokens", "floor", "plain"
LOG, POINTS = "log", "points"


def accept(*_: object) -> None:
    """Refuse nothing: the check of an analysis that reads any study, or any log."""


@dataclass(eq=False)
class Analysis:
    """A named analysis; `spanlab.analyses.base` describes its input and output.

    `name`            as in `analyses=[NAME]`
    `run`             function of a finished study that returns its findings
    `needs`           what the study must prepare
    `options`         dataclass of its settings, `analyses.NAME`; None: it has none
    `check`           raises ValueError for a study that the analysis cannot read
    `check_unread`    raises ValueError in a study without the analysis, for its options; None: they
                      are refused unless they have their defaults
    `check_requests`  raises ValueError for a study's requests that the analysis cannot read
    `check_log`       raises ValueError for a study's log that the analysis cannot read
    `of_points`       function of the points of a sweep that ran; None: the points are not compared
    """

    name: str
    run: Callable[[Any], Any]
    needs: Iterable[str] = ()
    options: type[Any] | None = None
    check: Callable[[Any], None] = accept
    check_unread: Callable[[Any], None] | None = None
    check_requests: Callable[[Any, Any], Any] = accept
    check_log: Callable[[Any, Any], None] = accept
    of_points: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        update_wrapper(self, self.run)  # its file and its description are those of the function

    def __call__(self, finished: Any) -> Any:
        """Return the findings of a finished study."""
        return self.run(finished)


class AnalysisRegistry(Registry[Any]):
    """Analyses by name; `register` makes one from the function that computes it."""

    def __iter__(self) -> Iterator[str]:
        """Yield the names by the alphabet, whichever file was imported first."""
        return iter(sorted(super().__iter__()))

    def __getitem__(self, name: str) -> Analysis:
        analysis = super().__getitem__(name)
        assert isinstance(analysis, Analysis), "`register` and `add` take nothing else"
        return analysis

    def register(
        self, name: str, needs: Iterable[str] = (), **parts: Any
    ) -> Callable[[Factory], Factory]:
        """Return a decorator that registers a function with its `needs` and further parts."""

        def register(run: Factory) -> Factory:
            self.add(Analysis(name, run, needs, **parts))
            return run

        return register

    def add(self, analysis: Analysis) -> None:
        """Register an analysis."""
        super().register(analysis.name, analysis.needs)(analysis)

    def section(self) -> type[Analyses]:
        """Return the dataclass of the section `analyses`: the names, and the options of each
        analysis."""
        options = ((name, self[name].options) for name in self)
        key = tuple((name, kind) for name, kind in options if kind is not None)
        if key not in _schemas:
            keys: list[Any] = [
                (name, kind, dataclasses.field(default_factory=kind)) for name, kind in key
            ]
            names = ("names", list[str] | None, None)
            made = make_dataclass("Analyses", [names, *keys], bases=(Analyses,))
            made.__doc__, made.__module__ = Analyses.__doc__, Analyses.__module__
            _schemas[key] = made
        return _schemas[key]


class Analyses:
    """The analyses to report, and the options of each.

    `names`  analyses to report; null: those of summary, compare_backends, fit_profile, tiers and
             serving that the study has data for
    `*`      options of this analysis
    """

    names: list[str] | None

    def __getattr__(self, name: str) -> Any:
        """Return the options of an analysis."""
        raise AttributeError(name)  # those of registered analyses are fields

    def __reduce__(self) -> Any:
        # The class is made at run time: another process makes its own, once plugins are loaded.
        return _analyses, (vars(self),)


def _analyses(values: dict[str, Any]) -> Analyses:
    return ANALYSES.section()(**values)


_schemas: dict[Any, type[Analyses]] = {}

ANALYSES = AnalysisRegistry("analyses", given=("finished",))
#: Families by their effect on answers. The first two leave answers unchanged, up to the order of
#: passages.
PREFIX, ORDERED, REPAIRED, PLAIN = "prefix", "cached_order", "repaired", "plain"
STEPS = (PREFIX, ORDERED, REPAIRED, PLAIN)
DESIGNED = "designed_shapes"  # the workload of a calibration


# ------------------------------------------------------------------------------
# Settings that name arms, of the analyses `families` (and policies, break_even) and `bars`.
# ------------------------------------------------------------------------------


@dataclass
class FamilySettings:
    """Families of methods, for the analyses families, policies and break_even.

    `arms`  arms of each family, by the family's name
    """

    arms: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class BarSettings:
    """Acceptance bars, for the analysis bars; a missed bar ends with exit code 1.

    `arms`  arms by acceptance bar
    """

    arms: dict[str, list[str]] = field(default_factory=dict)


ASKS = ("score", "correct")


@dataclass
class JudgeSettings:
    """A model behind an OpenAI-compatible endpoint that scores answers too, where `base_url` is
    given.

    `base_url`          what stands before /chat/completions, http or https; empty: no judge
    `model`             the model's name there
    `asks`              score: a number from 0 to 100; correct: yes or no
    `timeout_s`         seconds that the endpoint may stay silent
    `api_key_variable`  name of the environment variable that holds the key; empty: none
    """

    base_url: str = ""
    model: str = ""
    asks: str = "score"
    timeout_s: float = 60.0
    api_key_variable: str = ""

    def __post_init__(self) -> None:
        if self.base_url:
            check_address("judge.base_url", self.base_url)
        if bool(self.base_url) != bool(self.model):
            raise ValueError(
                f"judge.model={self.model} with judge.base_url={self.base_url}: expected both or neither, "
                "a model that the endpoint serves"
            )
        if self.asks not in ASKS:
            raise ValueError(f"judge.asks={self.asks}: expected one of {', '.join(ASKS)}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"judge.timeout_s={self.timeout_s}: expected a number above zero")


@dataclass
class AnswerSettings:
    """A model that scores answers, for the analysis answers.

    `judge`  a model that also scores answers
    """

    judge: JudgeSettings = field(default_factory=JudgeSettings)


# ------------------------------------------------------------------------------
# Settings of the analysis `methods`: its reference arms and its noise floor.
# ------------------------------------------------------------------------------


@dataclass
class MethodSettings:
    """Reference arms with other passages in their prompts, and the noise of the baseline; for the
    analysis methods.

    `without_context`  arm without passages, whose loss is the zero point of the benefit of the
                       context; null: shares of the benefit are not reported
    `gold_only`        arm with the gold passage only, as perfect retrieval would give; null: none
    `floor_tokens`     most prompt tokens of a step in the baseline's second run; its distance from
                       the first run is the floor of all distances
    """

    without_context: str | None = None
    gold_only: str | None = None
    floor_tokens: int = 128

    def __post_init__(self) -> None:
        positive("methods.floor_tokens", self.floor_tokens)


# ------------------------------------------------------------------------------
# Settings of the analysis `twin`: facts about a server that its log lacks.
# ------------------------------------------------------------------------------


@dataclass
class TwinSettings:
    """Configuration of the server that wrote the log; null: from the log's meta.json, or else
    vLLM's default.

    `train_share`             share of the requests that are used for the fit, in arrival order; the
                              others test it
    `num_gpu_blocks`          KV blocks of one rank; null without meta.json: estimated from the
                              device's memory
    `gpu_memory_utilization`  share of the device memory that the engine uses, where blocks are
                              estimated
    `prefix_caching`          whether prefix caching is on; hybrids then store states at block
                              boundaries
    `tensor_parallel`         devices that share each layer
    `data_parallel`           ranks that share the experts and take every step together
    `async_scheduling`        whether steps are scheduled during the previous one; null and no
                              meta.json: the better fit
    `weights`                 model (the type in its config.json), fp8 or int4
    `kv`                      model, fp8 or int4
    `cuda_graphs`             whether steps are padded to the sizes of captured CUDA graphs
    `predict`                 folders of other runs of replay or rendezvous, which the fitted server
                              predicts
    `draws`                   simulations of each of them, with step times and delays drawn from the
                              fitted run
    `forward`                 JSON files of vllm bench forward with the same model and device,
                              fitted with the log
    `metrics`                 scrapes of /metrics from before to after the log's requests, in their
                              order; fitted where the log has no times, else compared
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
    predict: list[str] = field(default_factory=list)
    draws: int = 100
    forward: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for key in (
            "num_gpu_blocks",
            "gpu_memory_utilization",
            "tensor_parallel",
            "data_parallel",
            "draws",
        ):
            positive(f"twin.{key}", getattr(self, key))
        share_below_one("twin.train_share", self.train_share)
        positive("twin.train_share", self.train_share)
        for key, value, formats in (("weights", self.weights, WEIGHTS), ("kv", self.kv, KV)):
            if value is not None:
                one_of(f"twin.{key}", value, formats)


# ------------------------------------------------------------------------------
# Latency limits that a request must meet to count in the goodput.
# ------------------------------------------------------------------------------


@dataclass
class RequestGoal:
    """Limits of one request; it counts in the goodput if it meets all of them; null: no limit.

    `ttft_s`  time to first token, seconds
    `tpot_s`  time per output token after the first, seconds; a request with one output token meets
              it
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


@dataclass
class ServingSettings:
    """Goals of the analysis serving.

    `goodput`  latency limits of a request, by the name of the goal
    """

    goodput: dict[str, RequestGoal] = field(default_factory=dict)


# ------------------------------------------------------------------------------
# Latency targets of the analysis `plan`.
# ------------------------------------------------------------------------------


class Target(NamedTuple):
    """`statistic` (mean, p50, p95, p99) of `delay` (queue, ttft, tpot, e2e) is at most `limit_s`
    seconds."""

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
    `tpot_mean_s`, `tpot_p50_s`, `tpot_p95_s`, `tpot_p99_s`  (last − first token) ÷ (output tokens −
                                                             1), of each request
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
# Settings of the analysis `plan`.
# ------------------------------------------------------------------------------


@dataclass
class PlanSettings:
    """Search for settings that meet the targets of `slo`, for the analysis plan.

    `search`      memory: least store; load: most requests per second; tier: least size of the last
                  tier; replicas: fewest; ratio: of states to KV; interval: between states; block:
                  tokens per block; null: memory and load
    `resolution`  smallest distance of two tried values, relative to the value
    `points`      values over the whole range that are tried first, before the search narrows
    `shakes`      runs of recorded arrivals; all but the first shift each arrival by a small random
                  time
    `slo`         latency targets
    """

    search: list[str] | None = None
    resolution: float = 0.05
    points: int = 5
    shakes: int = 3
    slo: SloSettings = field(default_factory=SloSettings)

    def __post_init__(self) -> None:
        if not 0.001 <= self.resolution <= 1:
            raise ValueError(f"plan.resolution={self.resolution}: expected a share from 0.001 to 1")
        if not 2 <= self.points <= 100:
            raise ValueError(f"plan.points={self.points}: expected 2 to 100")
        positive("plan.shakes", self.shakes)

    @property
    def searches(self) -> list[str]:
        """Names of the searches, in order."""
        return ["memory", "load"] if self.search is None else self.search


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


#: Caches of providers as their documents described them in November 2026: seconds until an entry
#: ends, whether a use restarts them, the shortest prefix, and the unit of reused tokens. OpenAI
#: names a range for caches in memory: they end 5 to 10 minutes after the last use, and within an
#: hour.
PROVIDERS: dict[str, dict[str, Any]] = {
    "anthropic_5m": {"ttl_s": 300.0, "least": 1024},
    "anthropic_1h": {"ttl_s": 3600.0, "least": 1024},
    "openai_5m": {"ttl_s": 300.0, "least": 1024, "unit": 128},
    "openai_1h": {"ttl_s": 3600.0, "least": 1024, "unit": 128},
    "openai_24h": {"ttl_s": 86_400.0, "least": 1024, "unit": 128},
    "gemini_1h": {"ttl_s": 3600.0, "refreshes": False},
}


@dataclass
class PriceSettings:
    """Prices of a million tokens, in any currency; null: no sum of money is shown, or as stated.

    `input`   of prompt tokens that are computed and not written into a cache
    `cached`  of prompt tokens that come from a cache; null: as input
    `write`   of prompt tokens that are computed and written into a cache; null: as input
    `output`  of output tokens; null: they are not counted
    """

    input: float | None = None
    cached: float | None = None
    write: float | None = None
    output: float | None = None

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            not_negative(f"price.{key}", value)
        others = [key for key, value in vars(self).items() if value is not None]
        if others and self.input is None:
            raise ValueError(
                f"price.{others[0]}={getattr(self, others[0]):g} with price.input=null: expected both"
            )


@dataclass
class ExplainSettings:
    """A limit for the analysis explain, what its report shows, and the file of the mended log.

    `fail_on`      condition under which the run ends with exit code 1, such as token_hit_rate<0.6
    `redact`       leave every text of the log out of the report, which otherwise has excerpts
    `write_fixed`  new file for the log after a mend, as bodies of chat completions that can be
                   replayed; null: none
    `mend`         fix that `write_fixed` writes, such as volatile_last; null: the mend with the
                   highest hit rate
    `providers`    caches of providers whose entries expire, by name; null: all
    `ttl_s`        seconds after their last use at which entries of a further such cache expire;
                   null: none
    `price`        prices of tokens
    """

    fail_on: str | None = None
    redact: bool = False
    write_fixed: str | None = None
    mend: str | None = None
    providers: list[str] | None = None
    ttl_s: float | None = None
    price: PriceSettings = field(default_factory=PriceSettings)

    def __post_init__(self) -> None:
        positive("analyses.explain.ttl_s", self.ttl_s)
        for name in self.providers or ():
            one_of("analyses.explain.providers", name, PROVIDERS)
        if self.fail_on is not None:
            parse_limit(self.fail_on)
        if self.mend is not None and self.write_fixed is None:
            raise ValueError(
                f"analyses.explain.mend={self.mend}: expected write_fixed=FILE beside it"
            )


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
            raise ValueError(
                f"design.shapes={self.shapes}: expected 2 or more, for each is predicted from the others"
            )


# ------------------------------------------------------------------------------
# Short names of keys of a study, as on the command line: `seeds=[0,1]` sets `runs.seeds`.
# ------------------------------------------------------------------------------

#: Key by short name. A key below a short name is set in the same way: `slo.ttft_p95_s`.
SHORT_NAMES = {
    "analyses": "analyses.names",
    "fail_on": "analyses.explain.fail_on",
    "write_fixed": "analyses.explain.write_fixed",
    "redact": "analyses.explain.redact",
    "price": "analyses.explain.price",
    "families": "analyses.families.arms",
    "bars": "analyses.bars.arms",
    "goodput": "analyses.serving.goodput",
    "design": "analyses.compare_backends",
    "methods": "analyses.methods",
    "judge": "analyses.answers.judge",
    "twin": "analyses.twin",
    "slo": "analyses.plan.slo",
    "plan": "analyses.plan",
    **{
        key: f"runs.{key}"
        for key in (
            "only", "baseline", "seeds", "repeats", "warmup_fraction", "count_hit_as", "load", "sweep",
        )
    },
    "base_url": "server.base_url",
    "workers": "executor.workers",
    "compiled": "executor.compiled",
}  # fmt: skip
#: Earlier names of sections, which are read and not shown.
EARLIER = {"replay": "server"}
#: Short names of `workload.path`, with the kind of workload that they are for.
PATHS = {"log": "log", "local": "questions"}


def full_key(key: str) -> str:
    """Return the key of a study that a key, perhaps below a short name, means."""
    name, dot, below = key.partition(".")
    if name == "analyses" and dot:
        return key  # a short name of its own section, which has the options too
    if name in PATHS and not dot:
        return "workload.path"
    return f"{(SHORT_NAMES | EARLIER).get(name, name)}{dot}{below}"


def short_key(key: str) -> str:
    """Return the shortest name of a key of a study, as errors and tables have it."""
    for full, name in _BY_LENGTH:
        if key == full or key.startswith((f"{full}.", f"{full}[")):
            return name + key[len(full) :]
    return key


def with_short_keys(text: str) -> str:
    """Return a sentence with the short names of the keys in it."""
    return _KEYS.sub(lambda match: short_key(match[0]), text)


_BY_LENGTH = sorted(
    ((full, name) for name, full in SHORT_NAMES.items()), key=lambda pair: -len(pair[0])
)
_KEYS = re.compile(r"(?<![\w.])(?:runs|server|executor|analyses)(?:\.\w+)+")
