"""What a user may set: unfrozen schemas for Hydra, checked when they become objects.

Unfrozen because OmegaConf makes a frozen schema read-only. Every message names the key, the value and what was
expected. Sizes are GiB, times seconds, rates requests per second; None means "no limit" or "not set".
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from spanlab.model_spec import ModelSpec
from spanlab_sim.hardware import HardwareSpec

PLACEMENTS = ("none", "block", "balanced", "sqrt", "log", "dp", "last", "boundary", "branch")
ALSO = ("last", "boundary", "branch")
WORKLOADS = ("quality", "narrativeqa", "system_prompts", "synthetic", "tokenised")
ARRIVALS = ("poisson", "poisson_per_group", "gamma", "deterministic", "as_given", "interleaved_legacy")
REQUIRED: Any = "???"  # OmegaConf's mark of a value that must be given


def one_of(key: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a value that is not among the choices, suggesting the nearest."""
    choices = tuple(choices)
    if value not in choices:
        near = difflib.get_close_matches(value, choices, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{key}={value}: expected one of {', '.join(choices)}{hint}")


def refuse_strangers(settings: object, path: str = "") -> None:
    """Refuse keys that no schema knows: `+key=value` on the command line can add them."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            refuse_strangers(value, f"{path}{name}.")
    if not is_dataclass(settings):
        return
    known = [field.name for field in fields(settings)]
    for name, value in list(vars(settings).items()):
        if name in known:
            refuse_strangers(value, f"{path}{name}.")
        elif not hasattr(type(settings), name):  # what a class computes once and keeps is no key
            raise ValueError(f"{path}{name}: no such key; expected one of {', '.join(known)}")


def positive(key: str, value: float | None) -> None:
    """Refuse zero and below, and infinity; None passes."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{key}={value}: expected a number above zero")


def not_negative(key: str, value: float | None) -> None:
    """Refuse what is below zero, and infinity; None passes."""
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{key}={value}: expected zero or more")


def share(key: str, value: float, *, below_one: bool = False) -> None:
    """Refuse what is not a share of one."""
    if not (0 <= value < 1 if below_one else 0 <= value <= 1):
        raise ValueError(f"{key}={value}: expected a share from 0 to {'below 1' if below_one else '1'}")


def check_seeds(key: str, seeds: list[int]) -> None:
    """Refuse seeds that are absent, repeated, negative, or too large to be written down."""
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0 or max(seeds) >= 1 << 63:
        raise ValueError(f"{key}={seeds}: expected one or more different numbers from 0 to 2^63 - 1")


@dataclass
class Popularity:
    """How often each document is asked about. `requests` None asks every question once; else so many are drawn."""

    requests: int | None = None
    zipf: float = 0.0

    def __post_init__(self) -> None:
        positive("workload.popularity.requests", self.requests)
        not_negative("workload.popularity.zipf", self.zipf)
        if self.zipf and self.requests is None:
            raise ValueError("workload.popularity.zipf is set: expected workload.popularity.requests too")


@dataclass
class Overlap:
    """The shared prefix of a synthetic group: `kind` uniform (low, high), normal (mean, sd) or fixed (value)."""

    groups: int = 48
    requests_per_group: int = 16
    prompt_tokens: int = 4096
    kind: str = "uniform"
    unit: str = "fraction"
    value: float = 0.8
    low: float = 0.5
    high: float = 0.95
    mean: float = 0.8
    sd: float = 0.1
    seed: int = 0


@dataclass
class WorkloadSettings:
    """Which requests are asked, and from where they come; see the README for the sources."""

    kind: str = REQUIRED
    source: str = "shape"
    path: str | None = None
    queries_path: str | None = None
    tokenizer: str | None = None
    cache_dir: str | None = None
    documents: int | None = None
    questions_per_document: int | None = None
    max_prompt_tokens: int | None = None
    too_long: str = "cut"
    output_tokens: int | None = None
    vocab_fold: int | None = None
    popularity: Popularity = field(default_factory=Popularity)
    synthetic: Overlap | None = None

    def __post_init__(self) -> None:
        one_of("workload.kind", self.kind, WORKLOADS)
        one_of("workload.source", self.source, ("shape", "local", "hub", "modelled"))
        one_of("workload.too_long", self.too_long, ("cut", "drop"))
        for key in ("documents", "questions_per_document", "max_prompt_tokens", "output_tokens", "vocab_fold"):
            positive(f"workload.{key}", getattr(self, key))
        if (self.kind == "synthetic") != (self.synthetic is not None):
            raise ValueError(f"workload.synthetic with workload.kind={self.kind}: expected both or neither synthetic")
        if self.source == "local" and self.path is None:
            raise ValueError("workload.source=local needs workload.path: expected a file or folder")
        text = self.source in ("local", "hub") and self.kind != "tokenised"
        for key in ("tokenizer", "cache_dir"):
            if getattr(self, key) is not None and not text:
                raise ValueError(
                    f"workload.{key}={getattr(self, key)} with workload.source={self.source}: no text to tokenise"
                )
        if self.source != "local" and self.path is not None:
            raise ValueError(f"workload.path={self.path} with workload.source={self.source}: expected source=local")


@dataclass
class ArrivalSettings:
    """When requests come. `rate_rps` counts the whole system, or each group for poisson_per_group."""

    kind: str = "poisson"
    rate_rps: float | None = None
    burstiness: float | None = None
    order: str | None = None

    def __post_init__(self) -> None:
        one_of("arrivals.kind", self.kind, ARRIVALS)
        timed = self.kind not in ("as_given", "interleaved_legacy")
        if timed and self.rate_rps is None:
            raise ValueError(f"arrivals.kind={self.kind} needs arrivals.rate_rps: expected requests per second")
        if not timed and self.rate_rps is not None:
            raise ValueError(
                f"arrivals.rate_rps={self.rate_rps} with arrivals.kind={self.kind}: expected arrivals.rate_rps=null"
            )
        positive("arrivals.rate_rps", self.rate_rps)
        positive("arrivals.burstiness", self.burstiness)
        if (self.kind == "gamma") != (self.burstiness is not None):
            raise ValueError(
                f"arrivals.burstiness={self.burstiness} with arrivals.kind={self.kind}: it goes with gamma"
            )
        if self.order is not None:
            one_of("arrivals.order", self.order, ("shuffled", "as_given"))
            if self.kind not in ("poisson", "gamma", "deterministic"):
                raise ValueError(f"arrivals.order={self.order} with arrivals.kind={self.kind}: it has its own order")


@dataclass
class TimingSettings:
    """How long steps take: `roofline` (model × hardware), or `constant` seconds per computed token and per step."""

    kind: str = "roofline"
    seconds_per_computed_token: float | None = None
    seconds_per_decode_token: float | None = None
    seconds_per_step: float | None = None

    def __post_init__(self) -> None:
        one_of("timing.kind", self.kind, ("roofline", "constant"))
        for key in ("seconds_per_computed_token", "seconds_per_decode_token", "seconds_per_step"):
            value = getattr(self, key)
            not_negative(f"timing.{key}", value)
            if value is not None and self.kind != "constant":
                raise ValueError(f"timing.{key}={value} with timing.kind={self.kind}: it goes with constant")
        if self.kind == "constant" and self.seconds_per_computed_token is None:
            raise ValueError("timing.kind=constant needs timing.seconds_per_computed_token: expected seconds")


@dataclass
class BatchSettings:
    """Continuous batching; `max_num_seqs=1 chunked=false` is the plain single server."""

    token_budget: int = 8192
    max_num_seqs: int = 64
    chunked: bool = True
    prefill_first: bool = False

    def __post_init__(self) -> None:
        positive("batch.max_num_seqs", self.max_num_seqs)
        if self.token_budget < self.max_num_seqs:
            raise ValueError(
                f"batch.token_budget={self.token_budget}: expected at least batch.max_num_seqs={self.max_num_seqs}"
            )


@dataclass
class StoreSettings:
    """What the device may hold for caching and running requests together: GiB of KV, of states, of both; entries."""

    total_gib: float | None = None
    kv_gib: float | None = None
    state_gib: float | None = None
    entries: int | None = None

    def __post_init__(self) -> None:
        for key in ("total_gib", "kv_gib", "state_gib", "entries"):
            positive(f"store.{key}", getattr(self, key))


@dataclass
class Dp:
    """How `placement.kind=dp` learns; see `spanlab.core.placement.Learned`.

    `warmup` None is the study's own; `max_tokens` None is the longest prompt of the workload.
    """

    update: str = "decayed"
    every: int = 10
    decay: float = 0.99
    warmup: int | None = None
    max_tokens: int | None = None
    smoothing: float = 0.0
    backtrack: str = "per_length"
    weigh: str = "tokens"
    observe: str = "seen"
    spare: str = "unused"

    def check(self, arm: str) -> None:
        """Refuse what makes no sense, naming the arm."""
        one_of(f"{arm}.placement.dp.update", self.update, ("frozen", "periodic", "decayed"))
        one_of(f"{arm}.placement.dp.backtrack", self.backtrack, ("per_length", "fixed"))
        one_of(f"{arm}.placement.dp.weigh", self.weigh, ("tokens", "flops"))
        one_of(f"{arm}.placement.dp.observe", self.observe, ("seen", "matched"))
        one_of(f"{arm}.placement.dp.spare", self.spare, ("unused", "first_bin"))
        positive(f"{arm}.placement.dp.every", self.every)
        not_negative(f"{arm}.placement.dp.warmup", self.warmup)
        positive(f"{arm}.placement.dp.max_tokens", self.max_tokens)
        not_negative(f"{arm}.placement.dp.smoothing", self.smoothing)
        if not 0 < self.decay <= 1:
            raise ValueError(f"{arm}.placement.dp.decay={self.decay}: expected a share above 0 and up to 1")


@dataclass
class PlacementSettings:
    """Where recurrent states are put; `also` adds parameterless placements to `kind`."""

    kind: str = "none"
    interval: int | None = None
    count: int | None = None
    also: list[str] = field(default_factory=list)
    dp: Dp | None = None

    def check(self, arm: str) -> None:
        """Refuse what makes no sense, naming the arm."""
        one_of(f"{arm}.placement.kind", self.kind, PLACEMENTS)
        for extra in self.also:
            one_of(f"{arm}.placement.also", extra, ALSO)
        self._goes_with(arm, "interval", ("block",))
        self._goes_with(arm, "count", ("balanced", "dp"))
        if (self.dp is not None) != (self.kind == "dp"):
            raise ValueError(f"{arm}.placement.dp with placement.kind={self.kind}: expected both or neither dp")
        if self.dp is not None:
            self.dp.check(arm)

    def _goes_with(self, arm: str, key: str, kinds: tuple[str, ...]) -> None:
        name, value = f"{arm}.placement.{key}", getattr(self, key)
        if self.kind in kinds and value is None:
            raise ValueError(f"{arm}.placement.kind={self.kind} needs {name}: expected a number above zero")
        if self.kind not in kinds and value is not None:
            raise ValueError(f"{name}={value} with placement.kind={self.kind}: it goes with {', '.join(kinds)}")
        positive(name, value)

    @property
    def places(self) -> bool:
        """Whether it puts any state anywhere."""
        return self.kind != "none" or bool(self.also)


@dataclass
class Strategy:
    """One arm: how prefixes are matched and shared, where states go, what leaves first.

    `family`      names the arm's colour and legend in figures; the placement's kind where empty
    `keep`        False keeps nothing
    `match`       radix (token level, edges split) or block_hash (full blocks of `page` tokens)
    `sharing`     shared, or private: a whole entry per request, the published study's store
    `last_token`  recompute it after a full match, or reuse it too (the published study)
    """

    family: str = ""
    keep: bool = True
    match: str = "radix"
    page: int = 1
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    eviction: str = "lru"
    sharing: str = "shared"
    last_token: str = "recompute"

    def check(self, arm: str) -> None:
        """Refuse what makes no sense, naming the arm."""
        one_of(f"{arm}.match", self.match, ("radix", "block_hash"))
        one_of(f"{arm}.eviction", self.eviction, ("fifo", "lru", "lfu"))
        one_of(f"{arm}.sharing", self.sharing, ("shared", "private"))
        one_of(f"{arm}.last_token", self.last_token, ("recompute", "reuse"))
        positive(f"{arm}.page", self.page)
        if self.match == "block_hash" and self.page < 2:
            raise ValueError(f"{arm}.page={self.page} with match=block_hash: expected a block of two tokens or more")
        if not self.keep and self.placement.places:
            raise ValueError(f"{arm}.placement.kind={self.placement.kind} with keep=false: nothing is kept")
        self.placement.check(arm)


@dataclass
class LoadSweep:
    """More runs of some arms at other rates, for the figure of queueing over load; empty lists skip it."""

    rates_rps: list[float] = field(default_factory=list)
    arms: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        for rate in self.rates_rps:
            positive("load.rates_rps", rate)
        if len(set(self.rates_rps)) != len(self.rates_rps):
            raise ValueError(f"load.rates_rps={self.rates_rps}: expected different rates")
        check_seeds("load.seeds", self.seeds)
        if bool(self.rates_rps) != bool(self.arms):
            raise ValueError("load.rates_rps and load.arms: expected both or neither")


@dataclass
class OutputSettings:
    """Where a run goes: `root`/<workload>/`run`; `if_exists` replace, resume or fail."""

    root: str = "outputs"
    run: str = ""
    if_exists: str = "replace"
    figures: bool = True

    def __post_init__(self) -> None:
        one_of("output.if_exists", self.if_exists, ("replace", "resume", "fail"))
        if "/" in self.run or self.run in (".", ".."):
            raise ValueError(f"output.run={self.run}: expected the name of one folder")


@dataclass
class TrackingSettings:
    """`wandb` writes offline unless the user is logged in and asks for `mode=online`; `none` tracks nothing."""

    kind: str = "wandb"
    project: str = "spanlab"
    mode: str = "auto"

    def __post_init__(self) -> None:
        one_of("tracking.kind", self.kind, ("wandb", "none"))
        one_of("tracking.mode", self.mode, ("auto", "online", "offline"))


@dataclass
class Study:
    """A study: one workload through several arms under one scheduler, one budget and one trace."""

    workload: WorkloadSettings = REQUIRED
    arrivals: ArrivalSettings = REQUIRED
    model: ModelSpec = REQUIRED
    hardware: HardwareSpec = REQUIRED
    timing: TimingSettings = field(default_factory=TimingSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    arms: dict[str, Strategy] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    baseline: str = "none"
    seeds: list[int] = field(default_factory=lambda: [0])
    warmup_fraction: float = 0.0
    hit: str = "reused"
    load: LoadSweep = field(default_factory=LoadSweep)
    output: OutputSettings = field(default_factory=OutputSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    workers: int | None = None

    def __post_init__(self) -> None:
        share("warmup_fraction", self.warmup_fraction, below_one=True)
        one_of("hit", self.hit, ("reused", "matched"))
        positive("workers", self.workers)
        if not self.arms:
            raise ValueError("arms is empty: expected at least one strategy, as in arms=checkpoints")
        check_seeds("seeds", self.seeds)
        if self.load.rates_rps and self.arrivals.rate_rps is None:
            raise ValueError(
                f"load.rates_rps={self.load.rates_rps} with arrivals.kind={self.arrivals.kind}: no rate to set"
            )
        if self.baseline != "none" or "none" in self.arms:
            one_of("baseline", self.baseline, self.arms)
        for name in self.only:
            one_of("only", name, self.arms)
        for name in self.load.arms:
            one_of("load.arms", name, self.arms)
        for name, arm in self.arms.items():
            self._check_arm(name, arm)

    def _check_arm(self, name: str, arm: Strategy) -> None:
        arm.check(f"arms.{name}")
        if arm.placement.places and not self.model.is_hybrid:
            raise ValueError(
                f"arms.{name}.placement.kind={arm.placement.kind} with model.name={self.model.name}: "
                "it has no recurrent state to place; expected a hybrid model, or arms=attention"
            )
        grid = self.model.grid
        if arm.placement.places and arm.page % grid and grid % arm.page:
            raise ValueError(f"arms.{name}.page={arm.page}: expected a divisor or a multiple of model.grid={grid}")

    def chosen(self) -> list[str]:
        """Names of the arms to run, in the order in which they are set."""
        return [name for name in self.arms if not self.only or name in self.only]


@dataclass
class MakeShape:
    """Measure a workload's shape from real text and write it down without the text."""

    kind: str = REQUIRED
    path: str = REQUIRED
    out: str = REQUIRED
    tokenizer: str = REQUIRED
    queries_path: str | None = None
    questions_path: str | None = None
    words_path: str | None = None


def schemas() -> dict[tuple[str | None, str], type[Any]]:
    """Every schema by (config group, name), for the ConfigStore."""
    return {
        (None, "base_study"): Study,
        (None, "base_make_shape"): MakeShape,
        ("model", "base_model"): ModelSpec,
        ("hardware", "base_hardware"): HardwareSpec,
        ("workload", "base_workload"): WorkloadSettings,
        ("arrivals", "base_arrivals"): ArrivalSettings,
        ("timing", "base_timing"): TimingSettings,
        ("batch", "base_batch"): BatchSettings,
        ("store", "base_store"): StoreSettings,
        ("strategy", "base_strategy"): Strategy,
        ("tracking", "base_tracking"): TrackingSettings,
    }


def worker_count(study: Study, jobs: int) -> int:
    """Processes to use: as asked, else one per core, never more than there are jobs."""
    return max(1, min(jobs, study.workers or os.cpu_count() or 1))
