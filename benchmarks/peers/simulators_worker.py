"""One foreign simulator on one trace: python simulators_worker.py NAME TRACE TRACE_BLOCK BLOCK BLOCKS.

It prints a JSON line: reused and all tokens of the prompts (`all`), and of the last half of the requests (`half`).
None stands for what a simulator does not tell. `prepare` compiles what kvcache-simulator needs.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

Counts = dict[str, tuple[int, int] | None]
SEATS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}


def mocker(trace: str, trace_block: int, block: int, blocks: int) -> Counts:
    """Replay the trace in Dynamo's mocker of vLLM: a schedule step by step."""
    from dynamo._core import run_mocker_trace_replay  # type: ignore[import-not-found, unused-ignore]

    engine = {"backend": "vllm", "num_gpu_blocks": blocks, "block_size": block} | SEATS
    replay = run_mocker_trace_replay([trace], {"engine": engine}, trace_block_size=trace_block)
    tokens = replay.summary["total_input_tokens"]
    return {"all": (round(tokens * replay.summary["prefix_cache_reused_ratio"]), tokens), "half": None}


def kvcache_simulator(trace: str, trace_block: int, block: int, blocks: int) -> Counts:
    """Count hits of the trace's own blocks under LRU; it measures the last half of the requests only."""
    from kvcache_sim.cpp_backend import run_cpp_sweep  # type: ignore[import-not-found, unused-ignore]
    from kvcache_sim.trace import parse_trace_file  # type: ignore[import-not-found, unused-ignore]

    parsed = parse_trace_file(trace, block_size=trace_block)
    half = parsed.request_count // 2
    found = run_cpp_sweep(parsed, capacities=[blocks], policies=["lru"], warmup_requests=half).results["lru", blocks]
    filled = found.measurementMode == "fixed_window"  # it measures nothing while the cache is not full
    return {"all": None, "half": (found.hitTokens, found.totalTokens) if filled else None}


def kvlint(trace: str, trace_block: int, block: int, blocks: int) -> Counts:
    """Count hits of full blocks under LRU; its commands read texts, so its simulator gets tokens made of the ids."""
    from kvlint.sim.vllm_blocks import VLLMBlockSimulator  # type: ignore[import-not-found, unused-ignore]

    simulator = VLLMBlockSimulator(block, blocks)
    rows = [
        (found.cached_tokens, found.prompt_tokens)
        for found in (simulator.feed_tokens(str(number), ids) for number, ids in enumerate(prompts(trace, trace_block)))
    ]
    half = rows[len(rows) // 2 :]
    return {"all": added(rows), "half": added(half)}


def prompts(trace: str, trace_block: int) -> Iterator[list[int]]:
    """Yield the prompts of a trace: every token of a block is the block's id."""
    with open(trace) as lines:
        for line in lines:
            row: dict[str, Any] = json.loads(line)
            tokens = [block for block in row["hash_ids"] for _ in range(trace_block)]
            yield tokens[: row["input_length"]]


def added(rows: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the sums of both columns."""
    return sum(reused for reused, _ in rows), sum(tokens for _, tokens in rows)


def main() -> None:
    """Run the simulator that the command line names."""
    if sys.argv[1:] == ["prepare"]:
        from kvcache_sim.cpp_backend import ensure_cpp_simulator  # type: ignore[import-not-found, unused-ignore]

        ensure_cpp_simulator()
        return
    name, trace, *numbers = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes to stderr
    simulators = {"mocker": mocker, "kvcache_simulator": kvcache_simulator, "kvlint": kvlint}
    print(json.dumps(simulators[name](trace, *map(int, numbers))), file=answers, flush=True)


if __name__ == "__main__":
    main()
