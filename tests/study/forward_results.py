"""Results of `vllm bench forward` for a device with known rates, as vLLM 0.33 writes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spanlab.model_spec import HardwareSpec, ModelSpec
from spanlab_sim.timings import Rates

Batch = Sequence[tuple[int, int]]  # of each request: tokens of its query, and tokens of its KV after the step
CASES: dict[str, Batch] = {
    "prefill": [(4096, 4096)],
    "hit": [(512, 8192)],
    "mix": [(1024, 1024), *[(1, 2048)] * 16],
    "decode_1": [(1, 1000)],
    "decode_64": [(1, 4096)] * 64,
    "decode_256": [(1, 500)] * 256,
}


def forward_s(model: ModelSpec, hardware: HardwareSpec, rates: Rates, batch: Batch) -> float:
    """Seconds of the layers alone: of matrices or their weights, of query-key pairs, and of keys and values."""
    flops_per_s = hardware.peak_flops * rates.compute
    bytes_per_s = hardware.bandwidth_bytes_per_s * rates.bandwidth
    tokens = sum(query for query, _ in batch)
    pairs = sum(
        key + 1 for query, kv in batch if query > 1 for key in range(kv - query, kv)
    )  # of a decode, reading its keys counts alone
    read = sum(kv - query if query > 1 else kv for query, kv in batch) + tokens
    compute_s = tokens * model.linear_flops_per_token / flops_per_s
    memory_s = model.layer_parameters * model.weight_itemsize / bytes_per_s
    matrices_s = (compute_s**8 + memory_s**8) ** (1 / 8)
    pairs_s = pairs * model.attention_flops_per_pair / flops_per_s
    return matrices_s + pairs_s + read * model.kv_bytes_per_token / bytes_per_s


def case(name: str, batch: Batch, seconds: float, devices: int = 1, **changes: Any) -> dict[str, Any]:
    """One case of the file; `changes` are of the numbers of each rank."""
    tokens, median = sum(query for query, _ in batch), seconds * 1e6
    latency = {"timer": "graph_events" + "_rank_max" * (devices > 1), "median": median, "sample_spread_pct": 0.1}
    latency |= {"mean": median, "std": 0.0, "min": median, "p90": median, "count": 2, "samples_us": [median] * 2}
    same = {"max_abs": 0.0, "relative_rms": 0.0}
    rank = {
        "num_tokens": tokens,
        "kv_blocks": 1 + sum(-(-kv // 16) for _, kv in batch),
        "routing": "real",
        "num_local_tokens": tokens,
        "num_tokens_after_padding": tokens,
        "batch_order": [f"bench-{number}" for number in range(len(batch))],
        "timing_scope": "target_only",
        "eager_repeat": same,
        "graph_vs_eager": same,
        "graph_deterministic": True,
        "finite": True,
        "state_reset_bytes": 4096,
        "latency_us": latency | changes.pop("latency_us", {}),
    }
    requests = [
        {"query_len": query, "kv_len": kv, "num_draft_tokens": changes.get("drafts", 0), "chunked": False}
        for query, kv in batch
    ]
    ranks = [rank | {name: value for name, value in changes.items() if name != "drafts"}] * devices
    return {"case": name, "requests": requests, "median_us": median, "ranks": ranks}


def write_forwards(path: Path, *cases: dict[str, Any]) -> Path:
    """Write cases as a file of results."""
    path.write_text(json.dumps(cases, indent=2))
    return path
