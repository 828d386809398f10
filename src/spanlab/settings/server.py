"""Settings of the store, of the executor and of the run folder."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from spanlab.compiled import MODES
from spanlab.core.policies.named import POLICIES
from spanlab.core.tiers import FORMAT_BITS, TierRules
from spanlab.judge import check_address
from spanlab.model_files import EMBEDDER, MODELS, PackagedModel, is_ready, packaged
from spanlab.model_spec import ModelSpec
from spanlab.registry import check_seeds, one_of, positive
from spanlab.workloads.workload import WORKLOADS
from spanlab.workloads.writers import check_prompts

if TYPE_CHECKING:
    from spanlab.settings.study import Study


@dataclass
class StoreSettings:
    """Memory budget of the device, for cached and running requests together; null: no limit.

    `total_gib`    GiB of KV and states together
    `kv_gib`       GiB of KV
    `state_gib`    GiB of recurrent states
    `state_ratio`  splits total_gib into two pools: bytes of states ÷ bytes of KV; null: one budget for both
    `entries`      number of stored entries
    `tiers`        memory tiers below the device by name, the nearest first; for pools of blocks
    """

    total_gib: float | None = None
    kv_gib: float | None = None
    state_gib: float | None = None
    state_ratio: float | None = None
    entries: int | None = None
    tiers: dict[str, TierRules] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("total_gib", "kv_gib", "state_gib", "state_ratio", "entries"):
            positive(f"store.{key}", getattr(self, key))
        for key, value in (("kv_gib", self.kv_gib), ("state_gib", self.state_gib)):
            if value is not None and self.total_gib is not None and value > self.total_gib:
                expected = f"expected at most store.total_gib={self.total_gib}, or store.total_gib=null"
                raise ValueError(f"store.{key}={value}: {expected}")
            if value is not None and self.state_ratio is not None:
                raise ValueError(f"store.{key}={value} with store.state_ratio={self.state_ratio}: expected one of them")
        if self.state_ratio is not None and self.total_gib is None:
            raise ValueError(f"store.state_ratio={self.state_ratio}: expected store.total_gib too, which it splits")

    @property
    def pools_gib(self) -> tuple[float | None, float | None]:
        """Budgets of KV and of states in GiB; None: no limit."""
        if self.state_ratio is None or self.total_gib is None:
            return self.kv_gib, self.state_gib
        return self.total_gib / (1 + self.state_ratio), self.total_gib * self.state_ratio / (1 + self.state_ratio)


#: Choices of `executor`, which are also values of its key `kind`.
EXECUTORS = {
    "local": "Processes of this machine, one per core unless workers=N is set.",
    "here": "This process, one arm after another, for use with a debugger or a profiler.",
    "dask": "Workers of a Dask scheduler at executor.address, with this checkout and output.root under the same paths.",
}


@dataclass
class ExecutorSettings:
    """The executor of the arms.

    `kind`      local: worker processes of this machine; here: this process; dask: workers of a Dask scheduler
    `address`   tcp://HOST:PORT of the scheduler; dask only
    `workers`   worker processes on this machine; null: one per core
    `compiled`  the compiled simulator core: auto uses an existing build; always builds it; never ignores it
    """

    kind: str = "local"
    address: str | None = None
    workers: int | None = None
    compiled: str = "auto"

    def __post_init__(self) -> None:
        one_of("compiled", self.compiled, MODES)
        positive("workers", self.workers)
        one_of("executor.kind", self.kind, EXECUTORS)
        scheduler = "expected the scheduler's tcp://HOST:PORT"
        if self.kind != "dask" and self.address is not None:
            raise ValueError(f"executor.address={self.address} with executor.kind={self.kind}: expected executor=dask")
        if self.kind == "dask" and "://" not in (self.address or ""):
            raise ValueError(f"executor.address={self.address} with executor.kind=dask: {scheduler}")


# ------------------------------------------------------------------------------
# Checks of memory tiers: against each other, the arms, the model and the backend.
# ------------------------------------------------------------------------------

BACKFILL = "state_backfill"


def check_tiers(study: Study) -> None:
    """Raise ValueError for invalid tiers, and for settings that need tiers where none is set."""
    tiers = {f"store.tiers.{name}": rules for name, rules in study.store.tiers.items()}
    if not tiers:
        _check_without(study)
        return
    for path, rules in tiers.items():
        rules.check(path)
        _check_formats(path, rules, study.model)
    _check_order(tiers)
    _check_arms(study)
    if study.replicas.count > 1:
        count = f"replicas.count={study.replicas.count}"
        raise ValueError(f"store.tiers={_names(study)} with {count}: expected 1, for tiers belong to one engine")
    if study.backend != "sim":
        raise ValueError(f"store.tiers={_names(study)} with backend={study.backend}: expected backend=sim")
    if not study.serves:
        raise ValueError(f"store.tiers={_names(study)} with analyses={study.analyses.names}: expected store.tiers={{}}")


def _names(study: Study) -> str:
    return f"[{', '.join(study.store.tiers)}]"


def _check_without(study: Study) -> None:
    for name in study.chosen():
        if study.arms[name].recovery == BACKFILL:
            key = f"arms.{name}.recovery={BACKFILL} without store.tiers"
            raise ValueError(f"{key}: expected a tier, as in +tier@store.tiers.host=dram")
    for name, arm in study.arms.items():
        if arm.pool is not None and arm.pool.load_when is not None:
            path = f"arms.{name}.pool.load_when={arm.pool.load_when}"
            raise ValueError(f"{path} without store.tiers: expected null, or a tier, as in +tier@store.tiers.host=dram")
    if "tiers" in study.chosen_analyses():
        raise ValueError("analyses=tiers without store.tiers: expected a tier, as in +tier@store.tiers.host=dram")


def _check_formats(path: str, rules: TierRules, model: ModelSpec) -> None:
    if rules.quantise_to is None:
        return
    if model.is_hybrid:
        raise ValueError(
            f"{path}.action=quantise with model.name={model.name}: expected evict or demote, for recurrent states are "
            "not quantised"
        )
    if FORMAT_BITS[rules.quantise_to] >= 8 * model.kv_itemsize:
        raise ValueError(
            f"{path}.quantise_to={rules.quantise_to} with model.kv_itemsize={model.kv_itemsize}: expected fewer bits"
        )


def _check_order(tiers: dict[str, TierRules]) -> None:
    """Raise ValueError unless each tier with write=back is below a tier with action=demote, and vice versa."""
    for (above, upper), (below, lower) in pairwise(tiers.items()):
        if lower.write == "back" and upper.action != "demote":
            raise ValueError(f"{below}.write=back with {above}.action={upper.action}: expected {above}.action=demote")
    path, last = list(tiers.items())[-1]
    if last.action == "demote":
        raise ValueError(f"{path}.action=demote: expected evict or quantise, for no tier is below it")


def _check_arms(study: Study) -> None:
    """Raise ValueError for arms that run and have no blocks, which tiers store."""
    arms = {name: study.arms[name] for name in study.chosen()}
    of_states = [name for name, arm in arms.items() if arm.recovery == BACKFILL]
    for name in of_states:
        _check_backfill(study, name)
    for name, arm in arms.items():
        if arm.policy_name != "blocks" and not of_states:  # beside arms with backfill it is a baseline
            raise ValueError(
                f"arms.{name} with store.tiers={_names(study)}: expected arms.{name}.pool, "
                f"for tiers hold hashed blocks, or an arm with recovery={BACKFILL}"
            )


def _check_backfill(study: Study, name: str) -> None:
    """Raise ValueError for tier settings that states do not support."""
    for tier, rules in study.store.tiers.items():
        for key, values in (("write", ("through", "back")), ("load", ("blocking",))):
            value = getattr(rules, key)
            if value not in values:
                pair = f"store.tiers.{tier}.{key}={value} with arms.{name}.recovery={BACKFILL}"
                raise ValueError(f"{pair}: expected {' or '.join(values)}")


# ------------------------------------------------------------------------------
# Checks of a study with speculative decoding.
# ------------------------------------------------------------------------------

_PAIRS = "such a drafter's KV goes with pairs of tokens (SGLang keys its tree by them), which is not modelled here"


def check_speculation(study: Study) -> None:
    """Raise ValueError where drafts cannot be verified or rolled back."""
    key = f"batch.speculation.draft_tokens={study.batch.speculation.draft_tokens}"
    if not study.batch.speculation.draft_tokens:
        return
    if study.backend != "sim":
        raise ValueError(f"{key} with backend={study.backend}: expected 0, for that backend has no drafter")
    if study.model.is_hybrid:
        reason = "a rejected draft needs the recurrent state before it, and no policy here keeps one per draft"
        raise ValueError(f"{key} with model.name={study.model.name}: expected 0, for {reason}")
    if study.timing.kind == "calibrated":
        raise ValueError(f"{key} with timing.kind=calibrated: expected 0, for no drafts were measured")
    for name in study.chosen():
        if study.arms[name].spans is not None:
            reason = "verifying drafts on spans read at other positions is not modelled"
            raise ValueError(f"{key} with arms.{name}.spans: expected 0, for {reason}")
    if study.batch.speculation.has_kv:
        _check_kv(study)


def _check_kv(study: Study) -> None:
    """Raise ValueError for a drafter with KV where its cache hits or its memory are not modelled."""
    key = f"batch.speculation.method={study.batch.speculation.method}"
    if not study.serves:
        raise ValueError(f"{key} with analyses={study.chosen_analyses()}: expected ngram, for nothing is served")
    if study.store.tiers:
        reason = "vLLM holds a drafter's last blocks back from lower tiers, which is not modelled here"
        raise ValueError(f"{key} with store.tiers={list(study.store.tiers)}: expected none, for {reason}")
    for name in study.chosen():
        arm = study.arms[name]
        ruled = arm.match == "block_hash" and POLICIES.takes(arm.policy_name, "rules")
        if arm.keep and not (ruled or POLICIES.takes(arm.policy_name, "drops_last")):
            expected = "expected a pool of blocks, match=block_hash or keep=false"
            raise ValueError(f"{key} with arms.{name}.policy={arm.policy_name}: {expected}, for {_PAIRS}")


# ------------------------------------------------------------------------------
# Checks of arms that choose or reorder passages.
# ------------------------------------------------------------------------------


def check_passages(study: Study) -> None:
    """Raise ValueError for `passages` of an arm on several replicas, on tiers or on a real server."""
    for name in study.chosen():
        passages = study.arms[name].passages
        if passages.are_default:
            continue
        chosen = f"arms.{name}.passages.order={passages.order}, view={passages.view}"
        if study.backend == "server":
            raise ValueError(f"{chosen} with backend=server: expected given and all, or backend=sim")
        if study.replicas.count > 1:
            raise ValueError(f"{chosen} with replicas.count={study.replicas.count}: expected given and all")
        if study.store.tiers:
            raise ValueError(f"{chosen} with store.tiers: expected given and all")


# ------------------------------------------------------------------------------
# Models that are installed as Python packages: checks, and the tokenizer of a packaged model.
# ------------------------------------------------------------------------------


def settle_packaged(study: Study) -> None:
    """Raise ValueError for an unknown packaged model, and set its tokenizer if the study names none."""
    engine, workload = study.engine, study.workload
    if engine.weights != "package":
        return
    key = "model" if engine.name is None else "engine.name"
    model = packaged(engine.name or study.model.name, f"engine.weights=package with {key}")
    if workload.tokenizer is None and WORKLOADS.takes(workload.reader, "tokenizer"):
        workload.tokenizer = model.name


def lacks_package(study: Study) -> bool:
    """Return whether the study reads a packaged model that is neither installed nor unpacked here."""
    return any(not (is_ready(model) or model.is_installed) for model in _packaged(study))


def _packaged(study: Study) -> list[PackagedModel]:
    questions = study.workload.questions
    dense = questions is not None and questions.retrieval == "dense"
    model_name = study.engine.name or study.model.name
    names = {study.workload.tokenizer, model_name if study.engine.weights == "package" else None}
    return [MODELS[name] for name in names if name in MODELS] + [EMBEDDER] * dense


# ------------------------------------------------------------------------------
# Settings of additional runs of a study at other loads.
# ------------------------------------------------------------------------------


@dataclass
class LoadSweep:
    """Additional runs of some arms at other arrival rates, for the figure of queueing delay over load.

    `rates_rps`  additional arrival rates, requests per second; empty: none
    `arms`       names of the arms that run at these rates
    `seeds`      seeds of these runs
    `shares`     loads of all arms instead, as shares of the rate that saturates the baseline, measured first
    """

    rates_rps: list[float] = field(default_factory=list)
    arms: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    shares: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rate in self.rates_rps:
            positive("load.rates_rps", rate)
        if len(set(self.rates_rps)) != len(self.rates_rps):
            raise ValueError(f"load.rates_rps={self.rates_rps}: expected different rates")
        check_seeds("load.seeds", self.seeds)
        if self.rates_rps and not self.arms:
            raise ValueError(f"load.rates_rps={self.rates_rps} without load.arms: expected arms, or load.rates_rps=[]")
        for load in self.shares:
            positive("load.shares", load)
        if len(set(self.shares)) != len(self.shares):
            raise ValueError(f"load.shares={self.shares}: expected different shares of saturation")
        if self.shares and self.rates_rps:
            raise ValueError(f"load.rates_rps={self.rates_rps} with load.shares: expected none, shares are loads")


# ------------------------------------------------------------------------------
# Settings of the run folder and of experiment tracking.
# ------------------------------------------------------------------------------


@dataclass
class OutputSettings:
    """The run folder: `root`/WORKLOAD/`run`.

    `root`       folder of all runs; relative to the repository
    `run`        name of the run folder; empty: the entry with its overrides
    `if_exists`  an existing run: replace (the old run is renamed to its time stamp), resume or fail
    `figures`    whether figures are drawn
    `trace`      whether the first run of each arm writes a trace file for Perfetto: steps, requests, counters
    """

    root: str = "outputs"
    run: str = ""
    if_exists: str = "replace"
    figures: bool = True
    trace: bool = False

    def __post_init__(self) -> None:
        one_of("output.if_exists", self.if_exists, ("replace", "resume", "fail"))
        if "/" in self.run or self.run.startswith((".", "-")):
            raise ValueError(f"output.run={self.run}: expected the name of one folder, without . or - in front")

    def refuse_resuming(self) -> None:
        """Raise ValueError for `resume` in an entry that writes only complete runs."""
        if self.if_exists == "resume":
            raise ValueError(
                "output.if_exists=resume: expected replace or fail, for this entry writes only complete runs"
            )


#: Choices of `tracking`, which are also values of its key `kind`.
TRACKERS = {
    "wandb": "Weights & Biases: offline unless logged in (then online); `wandb sync` uploads later.",
    "none": "No tracking.",
}


@dataclass
class TrackingSettings:
    """Experiment tracking.

    `kind`     wandb, or none
    `project`  name of the project
    `mode`     auto: online if the user is logged in, else offline
    """

    kind: str = "wandb"
    project: str = "spanlab"
    mode: str = "auto"

    def __post_init__(self) -> None:
        one_of("tracking.kind", self.kind, TRACKERS)
        one_of("tracking.mode", self.mode, ("auto", "online", "offline"))


# ------------------------------------------------------------------------------
# Settings of `backend=server`: requests to a real server.
# ------------------------------------------------------------------------------

SERVER = "server"
_PATH = re.compile(r"/(?!/)[!-~]*")  # printable; two slashes would name another host


@dataclass
class ServerSettings:
    """A real server, and the requests to it; backend=server only.

    `base_url`           its address: http://HOST:PORT
    `served_model`       name of the model in requests; null: the only model of the server
    `prompts`            tokens: ids below the model's vocabulary; text; messages: one user message
    `tokenizer`          decodes the ids of text prompts: tokenizer.json, its folder, or a hub name
    `exact_lengths`      request outputs of the workload's lengths by ignore_eos and min_tokens (vLLM, SGLang)
    `timeout_s`          longest time without data from the server, seconds
    `request_timeout_s`  longest time from sending a request to the end of its answer, seconds
    `api_key_variable`   environment variable that holds the API key; empty: none
    `reset_path`         path to POST to before each run, which resets the server's prefix cache; null: none
    """

    base_url: str | None = None
    served_model: str | None = None
    prompts: str = "tokens"
    tokenizer: str | None = None
    exact_lengths: bool = True
    timeout_s: float = 600.0
    request_timeout_s: float = 3600.0
    api_key_variable: str = ""
    reset_path: str | None = None

    def __post_init__(self) -> None:
        check_prompts("replay", self.prompts, self.tokenizer)
        positive("replay.timeout_s", self.timeout_s)
        positive("replay.request_timeout_s", self.request_timeout_s)
        if self.reset_path is not None and not _PATH.fullmatch(self.reset_path):
            raise ValueError(
                f"replay.reset_path={self.reset_path}: expected a path of the server, as /reset_prefix_cache"
            )


def check_replay(study: Study) -> None:
    """Raise ValueError for an address without backend=server, and for settings that a server cannot follow."""
    if study.backend != SERVER:
        if study.server.base_url is not None:
            raise ValueError(f"base_url={study.server.base_url} with backend={study.backend}: expected backend=server")
        return
    if study.server.base_url is None:
        raise ValueError("base_url is not set with backend=server: expected the address of a server, http://HOST:PORT")
    check_address("base_url", study.server.base_url)
    if len(study.chosen()) != 1:
        raise ValueError(f"only={study.runs.only} with backend=server: expected one arm, for the server is one")
    if study.executor.workers not in (None, 1):
        raise ValueError(f"workers={study.executor.workers} with backend=server: expected 1")
    if study.executor.kind != "local":
        raise ValueError(f"executor.kind={study.executor.kind} with backend=server: expected local")
