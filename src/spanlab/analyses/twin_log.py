"""Logs as inputs of a twin: facts of the server, and requests with measured times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.core.admission import BatchRules
from spanlab.core.policies.block_pool import BLOCK
from spanlab.core.request import Request, Span
from spanlab.core.step import StepFeatures
from spanlab.model_spec import GIB
from spanlab.records import e2e, tpot, ttft
from spanlab.registry import positive
from spanlab.settings.study import Study
from spanlab.typed_json import from_json, of_kind, reading
from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.rows import Row
from spanlab_sim.lockstep import Memory
from spanlab_sim.timings import Deployment

# ------------------------------------------------------------------------------
# The server of a log: facts from meta.json, from the study's settings, and estimated ones.
# ------------------------------------------------------------------------------

UTILIZATION = 0.9  # vLLM's default
#: GiB of one device without weights and KV: activations, captured graphs, the driver's context.
#: Least, usual and most; 1.4 GiB where a published log of vLLM 0.19 names blocks and memory both
#: (8B on 24 GB).
WORKSPACE_GIB = (0.5, 1.5, 4.0)
LIMITS = ("max_num_batched_tokens", "max_num_seqs")
_FORMATS = {"auto": "model", "bfloat16": "model", "float16": "model"}
_QUANTIZED = {
    "fp8": "fp8",
    "awq": "int4",
    "awq_marlin": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
}


@dataclass(frozen=True)
class ServerFacts:
    """A server as the twin simulates it.

    `asynchronous`  whether a step is scheduled while the previous one runs; None: unknown
    `memory`        of one rank; `blocks_between` has the least and the most blocks where the number
                    is estimated
    `sources`       value and source of each setting, by its name
    """

    rules: BatchRules
    deployment: Deployment
    asynchronous: bool | None
    memory: Memory
    blocks_between: tuple[int, int] | None
    sources: dict[str, str]


@dataclass(frozen=True)
class Described:
    """What a log says of its server.

    `meta`      settings by the keys of vLLM's meta.json; `origin` names where they stand
    `batch`     limits of a step; None: those of the study
    `prompts`   whether the log has prompts, so that its requests share blocks; the study's settings
                then must not differ from `meta`
    `retention` states that the cache of a hybrid keeps, as in `BlockRules`
    `eager`     whether it runs without CUDA graphs
    """

    meta: Mapping[str, Any]
    origin: str = "meta.json"
    batch: BatchRules | None = None
    prompts: bool = False
    retention: int | None = 0
    eager: bool = False


class _Settings:
    """Settings by name from the study, else from the log, else defaults; `sources` records the
    origin."""

    def __init__(self, study: Study, described: Described) -> None:
        self._study, self._described, self._meta = study, described, Row(dict(described.meta))
        self.sources: dict[str, str] = {}

    def choose(self, name: str, kind: type, study_value: Any, default: Any, *paths: str) -> Any:
        """Return the setting `name`, of type `kind`.

        `study_value`  None where the study sets none
        `paths`        keys of meta.json
        """
        path = next((path for path in paths if self._meta.get(path) is not None), None)
        origin = self._described.origin
        logged = None if path is None else of_kind(self._meta.get(path), kind, f"{origin}: {path}")
        if kind in (int, float):
            positive(f"{origin}: {path}", logged)
        if self._described.prompts and None not in (study_value, logged) and study_value != logged:
            raise ValueError(
                f"{name}={study_value}: expected {logged}, as {origin} has it, or null"
            )
        value, source = (
            (study_value, "set")
            if study_value is not None
            else (logged, origin)
            if logged is not None
            else (default, "")
        )
        self.sources[name] = f"{value} ({source or 'default'})"
        return value

    def limit(self, name: str) -> int:
        """Return a limit of a step; a value that the study changed has priority over meta.json."""
        study_value, usual = getattr(self._study.batch, name), getattr(BatchRules(), name)
        paths = f"engine_kwargs.{name}", f"resolved_config.scheduler_config.{name}"
        return int(
            self.choose(
                f"batch.{name}", int, None if study_value == usual else study_value, usual, *paths
            )
        )


def server_of(study: Study, described: Described | None = None) -> ServerFacts:
    """Return the server of a log; None: of the study's log, as its meta.json describes it."""
    described = described or Described(_meta(Path(study.workload.path or "")))
    settings = _Settings(study, described)
    deployment = _deployment(study, settings, described.eager)
    deployment.check("twin", study.model)
    tokens, seqs = (settings.limit(name) for name in LIMITS)
    rules = replace(
        described.batch or study.batch, max_num_batched_tokens=tokens, max_num_seqs=seqs
    )
    paths = ("resolved_config.scheduler_config.async_scheduling", "engine_kwargs.async_scheduling")
    asynchronous = settings.choose(
        "twin.async_scheduling", bool, study.analyses.twin.async_scheduling, None, *paths
    )
    if asynchronous is None:
        settings.sources["twin.async_scheduling"] = "what fits better"
    memory, between = _memory(study, settings, deployment)
    memory = replace(memory, shares=described.prompts, retention=described.retention)
    return ServerFacts(rules, deployment, asynchronous, memory, between, settings.sources)


def _meta(log: Path) -> dict[str, Any]:
    path = log / "meta.json"
    if not path.is_file():
        return {}
    with reading(f"log={path}", "vLLM's settings as JSON"):
        return from_json(path.read_bytes(), dict[str, Any])


def _deployment(study: Study, settings: _Settings, eager: bool) -> Deployment:
    twin = study.analyses.twin
    formats = {
        "weights": settings.choose("quantization", str, None, None, "engine_kwargs.quantization")
    }
    formats["kv"] = settings.choose(
        "kv_cache_dtype", str, None, None, "engine_kwargs.kv_cache_dtype"
    )
    for name in ("quantization", "kv_cache_dtype"):
        settings.sources.pop(name)
    return Deployment(
        tensor_parallel=settings.choose(
            "twin.tensor_parallel",
            int,
            twin.tensor_parallel,
            1,
            "engine_kwargs.tensor_parallel_size",
        ),
        data_parallel=settings.choose(
            "twin.data_parallel", int, twin.data_parallel, 1, "engine_kwargs.data_parallel_size"
        ),
        weights=settings.choose(
            "twin.weights",
            str,
            twin.weights or _format("quantization", formats["weights"]),
            "model",
        ),
        kv=settings.choose(
            "twin.kv", str, twin.kv or _format("kv_cache_dtype", formats["kv"]), "model"
        ),
        cuda_graphs=settings.choose("twin.cuda_graphs", bool, twin.cuda_graphs, not eager),
    )


def _format(name: str, vllm_format: str | None) -> str | None:
    """Return vLLM's format under the name of `Deployment`; None for the model's own format."""
    if vllm_format is None or vllm_format in _FORMATS:
        return None
    deployment_format = _QUANTIZED.get(
        vllm_format, "fp8" if vllm_format.startswith("fp8") else None
    )
    if deployment_format is None:
        choices = ", ".join((*_FORMATS, *_QUANTIZED))
        raise ValueError(f"{name}={vllm_format} in meta.json: expected one of {choices}")
    return deployment_format


def _memory(
    study: Study, settings: _Settings, deployment: Deployment
) -> tuple[Memory, tuple[int, int] | None]:
    """Return the blocks of one rank: as set, as logged, or estimated from the memory of the
    device."""
    arm = study.chosen()[0]
    pool = study.arms[arm].pool
    assert pool is not None, "checked with the settings"
    usual = deployment.block_tokens(study.model, BLOCK)
    size = settings.choose(
        f"arms.{arm}.pool.block_size", int, pool.block_size, usual, "kv_cache.block_size"
    )
    paths = (
        "engine_kwargs.enable_prefix_caching",
        "resolved_config.cache_config.enable_prefix_caching",
    )
    caching = settings.choose(
        "twin.prefix_caching", bool, study.analyses.twin.prefix_caching, True, *paths
    )
    block_bytes = int(size * deployment.kv_bytes_per_token(study.model))
    own_blocks, between = study.analyses.twin.num_gpu_blocks, None
    if own_blocks is None and study.store.kv_gib is not None:
        own_blocks = int(study.store.kv_gib * GIB) // block_bytes
    blocks = settings.choose(
        "twin.num_gpu_blocks", int, own_blocks, None, "kv_cache.num_gpu_blocks"
    )
    if blocks is None:
        paths = "kv_cache.gpu_memory_utilization", "engine_kwargs.gpu_memory_utilization"
        own_share = study.analyses.twin.gpu_memory_utilization
        share = settings.choose(
            "twin.gpu_memory_utilization", float, own_share, UTILIZATION, *paths
        )
        free = share * study.hardware.memory_gib * GIB - deployment.weight_bytes(study.model)
        least, blocks, most = sorted(
            int((free - gib * GIB) // block_bytes) for gib in WORKSPACE_GIB
        )
        between = max(least, 1), most
        settings.sources["twin.num_gpu_blocks"] = (
            f"{blocks} (estimated: from {between[0]} to {most})"
        )
        if blocks < 2:
            raise ValueError(
                f"hardware.memory_gib={study.hardware.memory_gib}: expected more than {study.model.name} takes on each "
                f"of {deployment.devices} devices, {deployment.weight_bytes(study.model) / GIB:.3g} GiB"
            )
    null_block = 1
    groups, state_bytes = study.model.state_groups, study.model.state_bytes
    memory = Memory(
        int(blocks) - null_block,
        int(size),
        block_bytes,
        groups,
        bool(caching),
        state_bytes=state_bytes,
    )
    return memory, between


# ------------------------------------------------------------------------------
# A log as input of a fit: requests without tokens, times of their tokens, and the split into
# training and test.
# ------------------------------------------------------------------------------

Floats = NDArray[np.float64]
LEAST_REQUESTS = 15  # on either side of the split


@dataclass(frozen=True, eq=False)
class Outside:
    """Seconds of fitted requests outside the server's steps, float64 samples.

    `before`  from the arrival to the queue of an idle server
    `after`   from the end of the step that made a token to the client
    """

    before: Floats
    after: Floats


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps of a server in order: their work, float64 seconds, and whether they are in the training
    set."""

    work: tuple[StepFeatures, ...]
    seconds: Floats
    trains: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TimedLog:
    """Requests in order of arrival.

    `requests`     with ids 0, 1, and so on
    `arrived_s`, `ttft_s`, `e2e_s`  float64 seconds, shape (requests,); delays are NaN where no
                                    request has times
    `output_lens`  int64
    `trains`       whether a request is in the training set
    `notes`        caveats, such as changes to the clocks
    `reused`       int64, prompt tokens that the server reused; None: the log has no prompts, and
                   they are computed in full
    `outside`      times of a request outside the server's steps
    `steps`        the server's steps; None: the log has none
    """

    requests: tuple[Request, ...]
    arrived_s: Floats
    ttft_s: Floats
    e2e_s: Floats
    output_lens: NDArray[np.int64]
    trains: NDArray[np.bool_]
    notes: tuple[str, ...] = ()
    reused: NDArray[np.int64] | None = None
    outside: Outside = field(default_factory=lambda: Outside(np.zeros(1), np.zeros(1)))
    steps: Steps | None = None

    @property
    def prompt_lens(self) -> NDArray[np.int64]:
        """Tokens of the prompts."""
        return np.array([request.num_tokens for request in self.requests], np.int64)

    @property
    def has_times(self) -> bool:
        """Whether times of requests are known, and not only sums of all."""
        return not bool(np.isnan(self.ttft_s).all())

    @property
    def tpot_s(self) -> Floats:
        """Seconds per output token after the first; NaN for outputs of one token."""
        return tpot(self.ttft_s, self.e2e_s, self.output_lens)


def read_timed_log(log: Log, path: str, train_share: float) -> TimedLog:
    """Return the log with its times, its clocks aligned by the training requests; ValueError where
    it lacks the data that a fit needs."""
    if log.observed is None:
        raise ValueError(
            f"log={path}: expected times of arrival, first and last token of every request, as in requests.jsonl with "
            "arrival_time, first_token_ts and last_token_ts"
        )
    arrived_s = np.asarray(log.arrived_ns * 1e-9, np.float64)
    trains = np.arange(log.requests) < round(train_share * log.requests)
    observed = log.observed.aligned_by(arrived_s, trains)
    first, last = observed.first_token, observed.last_token
    for bad, problem in (
        (np.isnan(first), "first_token_ts: expected a time, and it is missing"),
        (np.isnan(last), "last_token_ts: expected a time, and it is missing"),
        (first <= arrived_s, "first_token_ts: expected a time after the request's arrival"),
        (last < first, "last_token_ts: expected a time at first_token_ts or later"),
        (log.output_lens < 1, "output_toks: expected 1 or more"),
        (log.prompt_tokens < 1, "input_toks: expected 1 or more"),
    ):
        if bad.any():
            raise ValueError(f"{path}:{observed.lines[int(np.argmax(bad))]}: {problem}")
    if log.output_lens[trains].max() < 2:
        raise ValueError(
            f"output_toks=1 of all fitted requests in log={path}: expected 2 or more for one of them"
        )
    check_split(trains, train_share, path)
    waits = ttft(arrived_s, first), e2e(arrived_s, last)
    before, outside = (observed.queued - arrived_s)[trains], Outside(np.zeros(1), np.zeros(1))
    # of two clocks, the least delay counts as none
    if not observed.own_clock and not np.isnan(before).all():
        outside = Outside(before[~np.isnan(before)], np.zeros(1))
    outputs = log.output_lens.astype(np.int64)
    return TimedLog(
        _requests(log), arrived_s, *waits, outputs, trains, observed.notes, outside=outside
    )


def read_untimed_log(log: Log, path: str, train_share: float) -> TimedLog:
    """Return a log whose requests have arrivals and lengths, but no times of tokens; ValueError
    where it lacks them."""
    for name, missing in (
        ("arrival time", not log.arrived_ns.any()),
        ("number of output tokens", bool((log.output_lens < 1).any())),
        ("number of prompt tokens", bool((log.prompt_tokens < 1).any())),
    ):
        if missing:
            raise ValueError(
                f"log={path} with twin.metrics: expected the {name} of every request, and one has none"
            )
    unknown = np.full(log.requests, np.nan)
    trains = np.arange(log.requests) < round(train_share * log.requests)
    arrived_s = np.asarray(log.arrived_ns * 1e-9, np.float64)
    outputs = log.output_lens.astype(np.int64)
    note = "the log has no times of tokens: the sums of twin.metrics are fitted, and no error of a request is known"
    return TimedLog(_requests(log), arrived_s, unknown, unknown, outputs, trains, (note,))


def _requests(log: Log) -> tuple[Request, ...]:
    """Return the requests of a log by their lengths; none shares a prefix with another."""
    prompts, outputs = log.prompt_tokens, log.output_lens.astype(np.int64)
    # one array for all requests, since token ids are never read
    tokens = np.zeros(int(prompts.max()), dtype=np.int32)
    columns = zip(prompts.tolist(), outputs.tolist(), log.arrived_ns.tolist(), strict=True)
    return tuple(
        Request(number, number, (Span(tokens[:prompt]),), output, arrived, cache_salt=str(number))
        for number, (prompt, output, arrived) in enumerate(columns)
    )


def check_split(trains: NDArray[np.bool_], train_share: float, path: str) -> None:
    """Raise ValueError for too few requests on either side of the split."""
    if min(trains.sum(), (~trains).sum()) < LEAST_REQUESTS:
        raise ValueError(
            f"twin.train_share={train_share} of {len(trains)} requests in log={path}: expected {LEAST_REQUESTS} "
            "requests or more on either side"
        )


def check_memory(timed_log: TimedLog, memory: Memory, path: str) -> None:
    """Raise ValueError where the server has too few blocks for the longest request alone."""
    tokens = [request.num_tokens + request.output_len - 1 for request in timed_log.requests]
    longest = int(np.argmax(tokens))
    need = memory.blocks_for(timed_log.requests[longest])
    if need > memory.blocks:
        raise ValueError(
            f"twin.num_gpu_blocks={memory.blocks + 1}: expected at least {need + 1}, for request {longest} of "
            f"log={path} alone holds {tokens[longest]:,} tokens"
        )
