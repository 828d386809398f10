"""Wall time and kernel time of one prefill step: plain, in pieces, and transformers' forward with SDPA, in turns.

    python benchmarks/cards/step_time.py --device cuda --model llama-3.1-8b --out FILE [--prefill plain]

The arm `none` computes a prompt of 64 or 256 tokens. The arm `pic` computes a question of as many tokens after four
reused documents of 500 tokens. Writes FILE, JSON, and prints a table, then the operations of each case by host time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from spanlab.build import build_engine, build_model, build_policy
from spanlab.cli import compose
from spanlab.core.request import Request, Span
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import eager_twin
from spanlab.engine.settings import PREFILLS
from spanlab.settings import Study
from spanlab_sim.run import serve

TOKENS = (64, 256)
DOCUMENTS, DOCUMENT_TOKENS, HEAD = 4, 500, 9
PROFILED = 3  # steps
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")

Step = Callable[[], float]
"""One step, and its milliseconds."""


def of_engine(study: Study, model: SpanModel, arm: str, prefill: str, tokens: int, repeats: int) -> Step:
    """Steps of one engine; each has fresh tokens, and for `pic` the same documents."""
    drawn = np.random.default_rng(0)

    def span(count: int, independent: bool = False) -> Span:
        return Span(drawn.integers(3, model.vocab_size, count).astype(np.int32), independent=independent)

    before = [span(HEAD), *(span(DOCUMENT_TOKENS, True) for _ in range(DOCUMENTS))] if arm == "pic" else []
    requests = [Request(id, 0, (*before, span(tokens)), output_len=1) for id in range(repeats)]
    policy = build_policy(study, study.arms[arm], 0, max(request.num_tokens for request in requests), requests)
    study = replace(study, engine=replace(study.engine, prefill=prefill))
    engine, waiting = build_engine(study, study.arms[arm], model, policy, requests), iter(requests)

    def step() -> float:
        return 1e3 * serve([next(waiting)], policy, study.batch, engine, lambda record: None).busy_s

    return step


def of_transformers(model: SpanModel, tokens: int) -> Step:
    """Forwards of transformers' model with the same weights."""
    twin = eager_twin(model)
    twin.set_attn_implementation("sdpa")
    ids = torch.arange(3, 3 + tokens, device=model.device)[None]

    @torch.no_grad()
    def step() -> float:
        began = time.perf_counter()
        twin(input_ids=ids, use_cache=False, logits_to_keep=1).logits.argmax(-1).cpu()
        return 1e3 * (time.perf_counter() - began)

    return step


def cases(study: Study, model: SpanModel, prefill: str, repeats: int) -> Iterator[tuple[str, str, int, Step]]:
    """Arm, launch mode, tokens and step of every case."""
    prefills = dict.fromkeys(("plain", prefill))
    for tokens in TOKENS:
        for arm in ("none", "pic"):
            for prefill in prefills:
                yield arm, prefill, tokens, of_engine(study, model, arm, prefill, tokens, repeats)
        yield "none", "transformers", tokens, of_transformers(model, tokens)


def profiled(step: Step) -> tuple[float, float, str]:
    """Milliseconds of kernels and number of launches of one step, and a table of its operations."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as found:
        for _ in range(PROFILED):
            step()
    rows: Any = found.key_averages()
    kernels = sum(row.self_device_time_total for row in rows if row.device_type == torch.autograd.DeviceType.CUDA)
    launches = sum(row.count for row in rows if row.key in LAUNCHES)
    by_host_time = rows.table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=48)
    return kernels * 1e-3 / PROFILED, launches / PROFILED, by_host_time


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prefill", choices=PREFILLS, default="graphs", help="beside plain")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    study = compose("pic_bench", [f"model={given.model}", f"device={given.device}"])
    assert isinstance(study, Study)
    model, warm = build_model(study), 3
    found = list(cases(study, model, given.prefill, given.repeats + warm + PROFILED))
    times = [[step() for _, _, _, step in found] for _ in range(given.repeats + warm)][warm:]  # in turns
    results, tables = [], []
    for (arm, launch, tokens, step), milliseconds in zip(found, zip(*times, strict=True), strict=True):
        kernels_ms, launches, table = profiled(step)
        low, median, high = statistics.quantiles(milliseconds, n=4)
        numbers = {"median_ms": median, "low_ms": low, "high_ms": high, "kernels_ms": kernels_ms, "launches": launches}
        results.append({"arm": arm, "launch": launch, "tokens": tokens} | numbers)
        tables.append(f"{arm}, {launch}, {tokens} tokens\n{table}")
    given.out.write_text(json.dumps({"repeats": given.repeats, "steps": results}, indent=1) + "\n")
    print("\n".join(tables))
    print("| arm | launch mode | tokens | step, ms | quartiles | kernels, ms | launches |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in results:
        quartiles = f"{row['low_ms']:.2f} to {row['high_ms']:.2f}"
        print(
            f"| {row['arm']} | {row['launch']} | {row['tokens']} | {row['median_ms']:.2f} | {quartiles} | "
            f"{row['kernels_ms']:.2f} | {row['launches']:.0f} |"
        )


if __name__ == "__main__":
    main()
