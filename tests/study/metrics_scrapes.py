"""Scrapes of `/metrics` of a simulated server, as vLLM writes them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spanlab.core.request import Request
from spanlab_sim.lockstep import Times

BOUNDS = (0.3, 0.5, 1.0, 2.5, 10.0)
LABELS = 'engine="0",model_name="m"'


def scrape(log: Sequence[Request], times: Times, at_ns: float, zero: float = 0.0, **more: float) -> str:
    """Return the text at a moment of the run; `zero` is what every total has before, `more` are further counters."""
    done = [request for request in log if times.last_ns[request.id] <= at_ns]
    ids = [request.id for request in done]
    arrived = np.array([request.arrived_at for request in done], np.int64)
    admitted, first, last = (ns[ids] for ns in (times.admitted_ns, times.first_ns, times.last_ns))
    outside_ns = 4e6  # a request is longer in the server than in its engine
    histograms = {
        "time_to_first_token_seconds": first - arrived + outside_ns,
        "e2e_request_latency_seconds": last - arrived + outside_ns,
        "request_queue_time_seconds": admitted - np.array([_queued(int(at), times) for at in arrived], np.int64),
        "request_prefill_time_seconds": first - admitted,
        "request_decode_time_seconds": last - first,
    }
    text = [line for name, ns in histograms.items() for line in _histogram(name, ns * 1e-9, zero)]
    text += _histogram("request_prompt_tokens", [request.num_tokens for request in done], zero)
    text += _histogram("request_generation_tokens", [request.output_len for request in done], zero)
    text += [f"vllm:{name}{{{LABELS}}} {float(value)}" for name, value in more.items()]
    return "\n".join([*text, ""])


def _queued(arrived_ns: int, times: Times) -> int:
    """The end of the step that runs at an arrival: vLLM looks for new requests between two steps."""
    return next((run.end_ns for run in times.runs if run.start_ns <= arrived_ns < run.end_ns), arrived_ns)


def _histogram(name: str, values: Any, zero: float) -> Iterator[str]:
    values = np.asarray(values, float)
    yield f"# HELP vllm:{name} Histogram."
    yield f"# TYPE vllm:{name} histogram"
    for bound in BOUNDS:
        yield f'vllm:{name}_bucket{{{LABELS},le="{bound}"}} {float((values <= bound).sum() + zero)}'
    yield f'vllm:{name}_bucket{{{LABELS},le="+Inf"}} {float(len(values) + zero)}'
    yield f"vllm:{name}_count{{{LABELS}}} {float(len(values) + zero)}"
    yield f"vllm:{name}_sum{{{LABELS}}} {values.sum() + zero}"


def write_scrapes(folder: Path, *texts: str) -> list[Path]:
    """Write each text as a file, and return their paths."""
    paths = [folder / f"{number}.prom" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths
