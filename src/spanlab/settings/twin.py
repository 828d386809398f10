"""What the analysis `twin` must be told of a server, where its log does not say."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.checks import one_of, positive, share
from spanlab_sim.deployment import KV, WEIGHTS


@dataclass
class TwinSettings:
    """How a server is fitted to its log; null: as the log's meta.json says, or else as vLLM does by default.

    `train_share`             share of the requests, the first to arrive, that the fit sees; the others test it
    `num_gpu_blocks`          blocks of KV of one rank; null without meta.json: estimated from the device's memory
    `block_size`              tokens per block
    `gpu_memory_utilization`  share of the device's memory that the engine takes, where blocks are estimated
    `tensor_parallel`         devices that share each layer
    `data_parallel`           ranks that share the experts and take every step together
    `async_scheduling`        a step is planned while the one before runs; null without meta.json: what fits better
    `weights`                 model (as its config.json says), fp8 or int4
    `kv`                      model, fp8 or int4
    `cuda_graphs`             steps are padded to the numbers of tokens for which CUDA graphs were captured
    """

    train_share: float = 0.5
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    async_scheduling: bool | None = None
    weights: str | None = None
    kv: str | None = None
    cuda_graphs: bool | None = None

    def __post_init__(self) -> None:
        for key in ("num_gpu_blocks", "block_size", "gpu_memory_utilization", "tensor_parallel", "data_parallel"):
            positive(f"twin.{key}", getattr(self, key))
        share("twin.train_share", self.train_share, below_one=True)
        positive("twin.train_share", self.train_share)
        for key, value, known in (("weights", self.weights, WEIGHTS), ("kv", self.kv, KV)):
            if value is not None:
                one_of(f"twin.{key}", value, known)
