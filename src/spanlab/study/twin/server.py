"""The server of a log: facts from meta.json, from the study's settings, and estimated ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spanlab.build import GIB
from spanlab.checks import positive
from spanlab.core.batch_rules import BatchRules
from spanlab.core.policies.named import BLOCK
from spanlab.settings import Study
from spanlab.typed_json import from_json, of_kind, reading
from spanlab.workloads.logs.source import Row
from spanlab_sim.deployment import Deployment
from spanlab_sim.fitted_server import Memory

UTILIZATION = 0.9  # vLLM's default
#: GiB of one device without weights and KV: activations, captured graphs, the driver's context. Least, usual and
#: most; 1.4 GiB where a published log of vLLM 0.19 names blocks and memory both (8B on 24 GB).
WORKSPACE_GIB = (0.5, 1.5, 4.0)
_LIMITS = ("max_num_batched_tokens", "max_num_seqs")
_FORMATS = {"auto": "model", "bfloat16": "model", "float16": "model"}
_QUANTIZED = {"fp8": "fp8", "awq": "int4", "awq_marlin": "int4", "gptq": "int4", "gptq_marlin": "int4"}


@dataclass(frozen=True)
class ServerFacts:
    """A server as the twin simulates it.

    `asynchronous`  whether a step is scheduled while the previous one runs; None: unknown
    `memory`        of one rank; `blocks_between` has the least and the most blocks where the number is estimated
    `sources`       value and source of each setting, by its name
    """

    rules: BatchRules
    deployment: Deployment
    asynchronous: bool | None
    memory: Memory
    blocks_between: tuple[int, int] | None
    sources: dict[str, str]


class _Settings:
    """Settings by name from the study, else from meta.json, else defaults; `sources` records the origin."""

    def __init__(self, study: Study, meta: Mapping[str, Any]) -> None:
        self._study, self._meta = study, Row(dict(meta))
        self.sources: dict[str, str] = {}

    def choose(self, name: str, kind: type, study_value: Any, default: Any, *paths: str) -> Any:
        """Return the setting `name`, of type `kind`.

        `study_value`  None where the study sets none
        `paths`        keys of meta.json
        """
        path = next((path for path in paths if self._meta.get(path) is not None), None)
        logged = None if path is None else of_kind(self._meta.get(path), kind, f"meta.json: {path}")
        if kind in (int, float):
            positive(f"meta.json: {path}", logged)
        value, source = (
            (study_value, "set")
            if study_value is not None
            else (logged, "meta.json")
            if logged is not None
            else (default, "")
        )
        self.sources[name] = f"{value} ({source or 'default'})"
        return value

    def limit(self, name: str) -> int:
        """Return a limit of a step; a value that the study changed has priority over meta.json."""
        study_value, usual = getattr(self._study.batch, name), getattr(BatchRules(), name)
        paths = f"engine_kwargs.{name}", f"resolved_config.scheduler_config.{name}"
        return int(self.choose(f"batch.{name}", int, None if study_value == usual else study_value, usual, *paths))


def server_of(study: Study) -> ServerFacts:
    """Return the server of the study's log."""
    settings = _Settings(study, _meta(Path(study.workload.path or "")))
    deployment = _deployment(study, settings)
    deployment.check("twin", study.model)
    tokens, seqs = (settings.limit(name) for name in _LIMITS)
    rules = replace(study.batch, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    paths = ("resolved_config.scheduler_config.async_scheduling", "engine_kwargs.async_scheduling")
    asynchronous = settings.choose("twin.async_scheduling", bool, study.twin.async_scheduling, None, *paths)
    if asynchronous is None:
        settings.sources["twin.async_scheduling"] = "what fits better"
    memory, between = _memory(study, settings, deployment)
    return ServerFacts(rules, deployment, asynchronous, memory, between, settings.sources)


def _meta(log: Path) -> dict[str, Any]:
    path = log / "meta.json"
    if not path.is_file():
        return {}
    with reading(f"log={path}", "vLLM's settings as JSON"):
        return from_json(path.read_bytes(), dict[str, Any])


def _deployment(study: Study, settings: _Settings) -> Deployment:
    twin = study.twin
    formats = {"weights": settings.choose("quantization", str, None, None, "engine_kwargs.quantization")}
    formats["kv"] = settings.choose("kv_cache_dtype", str, None, None, "engine_kwargs.kv_cache_dtype")
    for name in ("quantization", "kv_cache_dtype"):
        settings.sources.pop(name)
    return Deployment(
        tensor_parallel=settings.choose(
            "twin.tensor_parallel", int, twin.tensor_parallel, 1, "engine_kwargs.tensor_parallel_size"
        ),
        data_parallel=settings.choose(
            "twin.data_parallel", int, twin.data_parallel, 1, "engine_kwargs.data_parallel_size"
        ),
        weights=settings.choose(
            "twin.weights", str, twin.weights or _format("quantization", formats["weights"]), "model"
        ),
        kv=settings.choose("twin.kv", str, twin.kv or _format("kv_cache_dtype", formats["kv"]), "model"),
        cuda_graphs=settings.choose("twin.cuda_graphs", bool, twin.cuda_graphs, True),
    )


def _format(name: str, vllm_format: str | None) -> str | None:
    """Return vLLM's format under the name of `Deployment`; None for the model's own format."""
    if vllm_format is None or vllm_format in _FORMATS:
        return None
    deployment_format = _QUANTIZED.get(vllm_format, "fp8" if vllm_format.startswith("fp8") else None)
    if deployment_format is None:
        choices = ", ".join((*_FORMATS, *_QUANTIZED))
        raise ValueError(f"{name}={vllm_format} in meta.json: expected one of {choices}")
    return deployment_format


def _memory(study: Study, settings: _Settings, deployment: Deployment) -> tuple[Memory, tuple[int, int] | None]:
    """Return the blocks of one rank: as set, as logged, or estimated from the memory of the device."""
    arm = study.chosen()[0]
    pool = study.arms[arm].pool
    assert pool is not None, "checked with the settings"
    usual = deployment.block_tokens(study.model, BLOCK)
    size = settings.choose(f"arms.{arm}.pool.block_size", int, pool.block_size, usual, "kv_cache.block_size")
    paths = "engine_kwargs.enable_prefix_caching", "resolved_config.cache_config.enable_prefix_caching"
    caching = settings.choose("twin.prefix_caching", bool, study.twin.prefix_caching, True, *paths)
    block_bytes = int(size * deployment.kv_bytes_per_token(study.model))
    own_blocks, between = study.twin.num_gpu_blocks, None
    if own_blocks is None and study.store.kv_gib is not None:
        own_blocks = int(study.store.kv_gib * GIB) // block_bytes
    blocks = settings.choose("twin.num_gpu_blocks", int, own_blocks, None, "kv_cache.num_gpu_blocks")
    if blocks is None:
        paths = "kv_cache.gpu_memory_utilization", "engine_kwargs.gpu_memory_utilization"
        own_share = study.twin.gpu_memory_utilization
        share = settings.choose("twin.gpu_memory_utilization", float, own_share, UTILIZATION, *paths)
        free = share * study.hardware.memory_gib * GIB - deployment.weight_bytes(study.model)
        least, blocks, most = sorted(int((free - gib * GIB) // block_bytes) for gib in WORKSPACE_GIB)
        between = max(least, 1), most
        settings.sources["twin.num_gpu_blocks"] = f"{blocks} (estimated: from {between[0]} to {most})"
        if blocks < 2:
            raise ValueError(
                f"hardware.memory_gib={study.hardware.memory_gib}: expected more than {study.model.name} takes on each "
                f"of {deployment.devices} devices, {deployment.weight_bytes(study.model) / GIB:.3g} GiB"
            )
    null_block = 1
    return Memory(int(blocks) - null_block, int(size), block_bytes, study.model.state_groups, bool(caching)), between
