"""Logs of servers with known rates, made by the simulator, and the analysis `twin` of them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from spanlab.cli import compose
from spanlab.core.admission import BatchRules
from spanlab.core.request import Request, Span
from spanlab.study.run import run_study
from spanlab_sim.lockstep import Memory, Times, serve_log
from spanlab_sim.timings import Deployment, FittedTiming, Rates

from ..support.files import write_lines

RATES = Rates(compute=0.5, bandwidth=0.9, host_s=0.004, host_s_per_sequence=2e-5, host_s_with_prefill=0.006)
LIMITS = {"max_num_batched_tokens": 1024, "max_num_seqs": 16}
MONOTONIC = 5000.0  # the server's own clock at the first arrival
UNIX = 1.7e9
MODEL, DEVICE, EXPERTS, HYBRID = "llama-3.1-8b", "rtx4090", "qwen3-30b-a3b", "qwen3.5-4b"
MEMORY = Memory(2500, 16, 1)
OF_SERVER = (f"model={MODEL}", f"hardware={DEVICE}")
GIVEN = ("executor.kind=here", "output.figures=false", "output.run=x", *OF_SERVER)


def twin(root: Path, log: Path, *overrides: str) -> dict[str, Any]:
    """The summary of the analysis of a log."""
    study = compose("twin", [*GIVEN, f"log={log}", *overrides])
    folder = run_study(study, "twin", root, show=False)
    assert folder == root / "twin" / "x"
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    return summary


def served(requests: int = 120, rate_rps: float = 4.0, rates: Rates = RATES, **changes: Any) -> list[dict[str, Any]]:
    """Lines of requests.jsonl: Poisson arrivals, lognormal lengths, times of the simulator."""
    return lines(*simulated(requests, rate_rps, rates, **changes))


@cache
def simulated(requests: int, rate_rps: float, rates: Rates, **changes: Any) -> tuple[list[Request], Times]:
    """Requests with Poisson arrivals and lognormal lengths, and their times; not to be changed."""
    settings = changes.pop("settings", OF_SERVER)
    study, random = compose("twin", list(settings)), np.random.default_rng(5)
    arrived = np.cumsum(random.exponential(1 / rate_rps, requests)) * 1e9
    prompts = np.minimum(random.lognormal(5.8, 0.9, requests).astype(int) + 1, changes.pop("longest", 4000))
    outputs = random.integers(20, 120, requests)
    log = [
        Request(id, id, (Span(np.zeros(prompt, np.int32)),), int(output), int(arrival), cache_salt=str(id))
        for id, (prompt, output, arrival) in enumerate(zip(prompts, outputs, arrived, strict=True))
    ]
    rules = BatchRules(**(LIMITS | {"async_scheduling": changes.pop("asynchronous", True)}))
    memory = changes.pop("memory", MEMORY)
    timing = FittedTiming(study.model, study.hardware, Deployment(**changes), rates)
    return log, serve_log(log, memory, rules, timing, changes.get("data_parallel", 1))


def lines(log: list[Request], times: Times) -> list[dict[str, Any]]:
    """Lines of requests.jsonl."""
    first, last = times.first_ns * 1e-9 + MONOTONIC, times.last_ns * 1e-9 + MONOTONIC
    return [
        {
            "request_id": f"r{request.id}",
            "input_toks": request.num_tokens,
            "output_toks": request.output_len,
            "arrival_time": UNIX + request.arrived_at * 1e-9,
            "queued_ts": MONOTONIC + request.arrived_at * 1e-9,
            "first_token_ts": first[request.id],
            "last_token_ts": last[request.id],
        }
        for request in log
    ]


def write(folder: Path, rows: list[dict[str, Any]], memory: Memory = MEMORY, **engine: Any) -> Path:
    """A folder of requests.jsonl and meta.json."""
    folder.mkdir(exist_ok=True)
    write_lines(folder / "requests.jsonl", *rows)
    kv_cache = {"num_gpu_blocks": memory.blocks + 1, "block_size": memory.block_size}
    (folder / "meta.json").write_text(json.dumps({"engine_kwargs": LIMITS | engine, "kv_cache": kv_cache}))
    return folder
