"""Runs the metrics of vLLM's own benchmark over token times: `python vllm_metrics_driver.py CASES.json OUT.json`.

Needs the environment of `requirements/vllm.txt`.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

PERCENTILES = [90, 95, 99]


def measure(case: dict, calculate, output_type) -> dict[str, float]:
    """The metrics of one case by vLLM's function, under the names that its benchmark prints."""
    outputs = []
    for one in case["requests"]:
        times = one["times"]
        output = output_type()
        output.success, output.start_time, output.prompt_len = True, one["at"], one["prompt"]
        output.ttft, output.latency, output.output_tokens = times[0] - one["at"], times[-1] - one["at"], len(times)
        output.itl = [after - before for before, after in pairwise(times)]
        outputs.append(output)
    duration = max(one["times"][-1] for one in case["requests"]) - min(one["at"] for one in case["requests"])
    metrics, _ = calculate([], outputs, duration, None, PERCENTILES, case["goodput_ms"])
    found = {name: getattr(metrics, name) for name in ("completed", "request_throughput", "request_goodput")}
    found |= {name: getattr(metrics, name) for name in ("output_throughput", "total_token_throughput")}
    for delay in ("ttft", "tpot", "itl", "e2el"):
        found |= {f"{part}_{delay}_ms": getattr(metrics, f"{part}_{delay}_ms") for part in ("mean", "median", "std")}
        found |= {f"p{percent}_{delay}_ms": value for percent, value in getattr(metrics, f"percentiles_{delay}_ms")}
    return {name: float(value) for name, value in found.items()}


def main() -> None:
    """Read cases, write them with their metrics."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    cases = json.loads(Path(sys.argv[1]).read_text())
    measured = [case | {"metrics": measure(case, calculate_metrics, RequestFuncOutput)} for case in cases]
    Path(sys.argv[2]).write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
