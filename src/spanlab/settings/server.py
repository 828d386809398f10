"""Settings of the store, of the executor and of the run folder."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from spanlab.compiled import MODES
from spanlab.core.admission import BatchRules
from spanlab.core.request import UNLIMITED, Budget
from spanlab.core.tiers import TierRules
from spanlab.model_spec import GIB, ModelSpec
from spanlab.registry import check_seeds, one_of, positive, require, within
from spanlab.workloads.workload import check_prompts


@dataclass
class StoreSettings:
    """Memory budget of the device, for cached and running requests together; null: no limit.

    `total_gib`    GiB of KV and states together
    `kv_gib`       GiB of KV
    `state_gib`    GiB of recurrent states
    `state_ratio`  splits total_gib into two pools: bytes of states ÷ bytes of KV; null: one budget
                   for both
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
                expected = (
                    f"expected at most store.total_gib={self.total_gib}, or store.total_gib=null"
                )
                raise ValueError(f"store.{key}={value}: {expected}")
            if value is not None and self.state_ratio is not None:
                raise ValueError(
                    f"store.{key}={value} with store.state_ratio={self.state_ratio}: expected one of them"
                )
        if self.state_ratio is not None and self.total_gib is None:
            raise ValueError(
                f"store.state_ratio={self.state_ratio}: expected store.total_gib too, which it splits"
            )

    @property
    def pools_gib(self) -> tuple[float | None, float | None]:
        """Budgets of KV and of states in GiB; None: no limit."""
        if self.state_ratio is None or self.total_gib is None:
            return self.kv_gib, self.state_gib
        return self.total_gib / (1 + self.state_ratio), self.total_gib * self.state_ratio / (
            1 + self.state_ratio
        )

    @property
    def budget(self) -> Budget:
        """Budget in bytes."""
        kv, state, total = (
            UNLIMITED if gib is None else min(int(gib * GIB), UNLIMITED)
            for gib in (*self.pools_gib, self.total_gib)
        )
        return Budget(kv, state, total, self.entries or UNLIMITED)


def held_token_bytes(model: ModelSpec, batch: BatchRules) -> int:
    """Return the KV bytes per token of the model and of a drafter's layers."""
    drafter = batch.speculation
    held_layers = drafter.draft_layers if drafter.has_kv else 0
    return model.kv_bytes_per_token + held_layers * model.drafter_layer_bytes


#: Choices of `executor`, which are also values of its key `kind`.
EXECUTORS = {
    "local": "Processes of this machine, one per core unless workers=N is set.",
    "here": "This process, one arm after another, for use with a debugger or a profiler.",
    "dask": "Workers of a Dask scheduler at executor.address, with this checkout and output.root under the same paths.",
}


@dataclass
class ExecutorSettings:
    """The executor of the arms.

    `kind`      local: worker processes of this machine; here: this process; dask: workers of a Dask
                scheduler
    `address`   tcp://HOST:PORT of the scheduler; dask only
    `workers`   worker processes on this machine; null: one per core
    `compiled`  the compiled simulator core: auto uses an existing build; always builds it; never
                ignores it
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
            raise ValueError(
                f"executor.address={self.address} with executor.kind={self.kind}: expected executor=dask"
            )
        if self.kind == "dask" and "://" not in (self.address or ""):
            raise ValueError(
                f"executor.address={self.address} with executor.kind=dask: {scheduler}"
            )


# ------------------------------------------------------------------------------
# Settings of additional runs of a study at other loads.
# ------------------------------------------------------------------------------


@dataclass
class LoadSweep:
    """Additional runs of some arms at other arrival rates, for the figure of queueing delay over
    load.

    `rates_rps`  additional arrival rates, requests per second; empty: none
    `arms`       names of the arms that run at these rates
    `seeds`      seeds of these runs
    `shares`     loads of all arms instead, as shares of the rate that saturates the baseline,
                 measured first
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
            raise ValueError(
                f"load.rates_rps={self.rates_rps} without load.arms: expected arms, or load.rates_rps=[]"
            )
        for load in self.shares:
            positive("load.shares", load)
        if len(set(self.shares)) != len(self.shares):
            raise ValueError(f"load.shares={self.shares}: expected different shares of saturation")
        if self.shares and self.rates_rps:
            raise ValueError(
                f"load.rates_rps={self.rates_rps} with load.shares: expected none, shares are loads"
            )


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
    `trace`      whether the first run of each arm writes a trace file for Perfetto: steps,
                 requests, counters
    """

    root: str = "outputs"
    run: str = ""
    if_exists: str = "replace"
    figures: bool = True
    trace: bool = False

    def __post_init__(self) -> None:
        one_of("output.if_exists", self.if_exists, ("replace", "resume", "fail"))
        if "/" in self.run or self.run.startswith((".", "-")):
            raise ValueError(
                f"output.run={self.run}: expected the name of one folder, without . or - in front"
            )

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
NO_ENGINE = "none"
_PATH = re.compile(r"/(?!/)[!-~]*")  # printable; two slashes would name another host


@dataclass
class ServerSettings:
    """A real server, and the requests to it; of backend=server and of conformance.

    `engine`             the server to start for the study (`--list server.engine`); none: the one
                         at base_url
    `base_url`           its address: http://HOST:PORT; null where the study starts the server
    `port`               port of the server that is started, on the loopback interface; null: a free
                         one
    `arguments`          further words of its command line
    `start_timeout_s`    longest time until it answers, seconds
    `step_log`           file in which the hook of the server at base_url writes its steps; null: it
                         has no hook
    `served_model`       name of the model in requests; null: the only model of the server
    `prompts`            tokens: ids below the model's vocabulary; text; messages: one user message
    `tokenizer`          decodes the ids of text prompts: tokenizer.json, its folder, or a hub name
    `exact_lengths`      request outputs of the workload's lengths by ignore_eos and min_tokens
                         (vLLM, SGLang)
    `timeout_s`          longest time without data from the server, seconds
    `request_timeout_s`  longest time from sending a request to the end of its answer, seconds
    `api_key_variable`   environment variable that holds the API key; empty: none
    `reset_path`         path to POST to before each run, which resets the server's prefix cache;
                         null: none
    """

    engine: str = NO_ENGINE
    base_url: str | None = None
    port: int | None = None
    arguments: list[str] = field(default_factory=list)
    start_timeout_s: float = 600.0
    step_log: str | None = None
    served_model: str | None = None
    prompts: str = "tokens"
    tokenizer: str | None = None
    exact_lengths: bool = True
    timeout_s: float = 600.0
    request_timeout_s: float = 3600.0
    api_key_variable: str = ""
    reset_path: str | None = None

    def __post_init__(self) -> None:
        check_prompts("server", self.prompts, self.tokenizer)
        if self.engine == NO_ENGINE:
            require(
                "server.engine=none",
                ("server.port", self.port, None),
                ("server.arguments", self.arguments, []),
            )
        for key, value in (("base_url", self.base_url), ("server.step_log", self.step_log)):
            if self.engine != NO_ENGINE and value is not None:
                raise ValueError(
                    f"{key}={value} with server.engine={self.engine}: expected server.engine=none"
                )
        if self.step_log is not None and self.reset_path is None:
            raise ValueError(
                f"server.step_log={self.step_log}: expected server.reset_path too, for runs begin empty"
            )
        within(1, 65_535)("server.port", self.port)
        positive("server.start_timeout_s", self.start_timeout_s)
        positive("server.timeout_s", self.timeout_s)
        positive("server.request_timeout_s", self.request_timeout_s)
        if self.reset_path is not None and not _PATH.fullmatch(self.reset_path):
            raise ValueError(
                f"server.reset_path={self.reset_path}: expected a path of the server, as /reset_prefix_cache"
            )


def check_address(name: str, base_url: str) -> None:
    """Raise ValueError unless `base_url` is an http address without a password; `name` is the
    settings key."""
    if set("@?#") & set(base_url):  # the value may contain a password, so it is not repeated
        raise ValueError(
            f"{name} holds one of @ ? #: expected an address alone, the key in an environment variable"
        )
    try:
        parts = urlsplit(base_url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        sound = False
    if not sound or not base_url.isascii() or not base_url.isprintable() or " " in base_url:
        raise ValueError(
            f"{name}={base_url}: expected http://HOST or https://HOST, with port and path if needed"
        )
