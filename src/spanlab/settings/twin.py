"""Settings of the analysis `twin`: facts about a server that its log lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanlab.checks import one_of, positive, require, share
from spanlab_sim.deployment import KV, WEIGHTS

if TYPE_CHECKING:
    from spanlab.settings.study import Study

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
