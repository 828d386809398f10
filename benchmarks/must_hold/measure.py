"""The figures that must hold on two cores: whole processes, radix lookups, node size, optimal placement.

    .venvs/sim/bin/python benchmarks/must_hold/measure.py [RUNS]

Prints a table and writes `results.json` beside this file. Whole processes are timed from outside, RUNS times (5) after
one run that is not counted; medians are what counts, spreads say how noisy the machine was.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measurements import facts, timed, write_results
from pages import ROOT

from spanlab.core.placement.dynamic_program import place
from spanlab.core.token_string import TokenString, string_of
from spanlab.core.tree import PrefixTree


def whole_process(arguments: list[str], runs: int) -> dict[str, float]:
    """Wall seconds of `bash runall.sh ARGUMENTS`: median, least and most of `runs`; peak memory of one more run.

    The run whose memory is watched comes first and is not timed: watching costs time.
    """
    command = ["bash", str(ROOT / "runall.sh"), *arguments]
    quiet = subprocess.DEVNULL
    peak = watch_memory(subprocess.Popen(command, stdout=quiet, stderr=quiet))
    walls = [timed(lambda: subprocess.run(command, stdout=quiet, stderr=quiet, check=True)) for _ in range(runs)]
    return {
        "wall_s": statistics.median(walls),
        "wall_s_min": min(walls),
        "wall_s_max": max(walls),
        "peak_mib_all_processes": peak / 2**20,
    }


def watch_memory(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; returns the most bytes that it and its descendants held together, sampled (PSS)."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(proportional_bytes(pid) for pid in family(process.pid)))
        time.sleep(0.1)
    return peak


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(found for child in children for found in family(int(child)))]


def proportional_bytes(pid: int) -> int:
    """Memory of a process, pages shared with others counted in proportion."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def replica_input(path: Path, requests: int = 2324, documents: int = 118) -> None:
    """A made-up workload of the published study's size: about twenty questions for each of 118 long documents."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 150_000, rng.integers(3_000, 8_500)) for _ in range(documents)]
    groups = np.sort(np.arange(requests) % documents)
    prompts = [np.concatenate([texts[g], rng.integers(0, 150_000, rng.integers(40, 260))]) for g in groups]
    index = np.concatenate([np.arange(n) for n in np.bincount(groups)])
    table = {
        "group_id": groups.tolist(),
        "idx": index.tolist(),
        "tokens": [prompt.astype(np.int32) for prompt in prompts],
        "n_tokens": [len(prompt) for prompt in prompts],
    }
    pq.write_table(pa.table(table), path)


def radix(nodes: int = 10_000, tokens: int = 10_000_000, query: int = 8_192) -> dict[str, float]:
    """Lookup times in a tree of at least `nodes` nodes and `tokens` tokens, and its metadata per node."""
    rng = np.random.default_rng(0)
    prompts = branching_prompts(rng, nodes, tokens)
    tracemalloc.start()
    tree = PrefixTree()
    root = tree.new_root()
    for prompt in prompts:
        tree.extend(root, prompt, len(prompt), 0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    found = below(root)
    content = sum(len(node.edge) for node in found)
    queries = [(prompts[i] + random_tokens(rng, query)).cut(0, query) for i in rng.integers(0, len(prompts), 5_000)]
    times = [timed(lambda q=q: tree.match(root, q)) for q in queries]
    return {
        "nodes": len(found),
        "tokens": content,
        "lookup_p50_ms": float(np.percentile(times, 50)) * 1e3,
        "lookup_p99_ms": float(np.percentile(times, 99)) * 1e3,
        "metadata_bytes_per_node": held / len(found),
    }


def branching_prompts(rng: np.random.Generator, nodes: int, tokens: int) -> list[TokenString]:
    """Prompts that share prefixes with one another, two nodes for each that is added."""
    fresh = 2 * tokens // nodes
    prompts = [random_tokens(rng, fresh)]
    while len(prompts) <= 0.52 * nodes:
        parent = prompts[int(rng.integers(len(prompts)))]
        shared = int(rng.integers(1, min(len(parent), 8_000)))
        prompts.append(parent.cut(0, shared) + random_tokens(rng, fresh))
    return prompts


def random_tokens(rng: np.random.Generator, count: int) -> TokenString:
    """Tokens that no other prompt has."""
    return string_of([rng.integers(0, 150_000, count).astype(np.int32)])


def below(node: object) -> list:
    """All nodes under a root."""
    found, waiting = [], list(node.children.values())  # type: ignore[attr-defined]
    while waiting:
        found.append(waiting.pop())
        waiting.extend(found[-1].children.values())
    return found


def placement(depths: int, count: int, runs: int = 5) -> dict[str, float]:
    """Seconds of the exact solver: the median over runs, the worst over shapes of the histogram."""
    rng = np.random.default_rng(0)
    shapes = {
        "uniform": rng.random(depths),
        "heavy_tailed": rng.exponential(1.0, depths) ** 4,
        "steep": np.exp(-np.arange(depths) / depths * 20),
    }
    positions = np.arange(1, depths + 1) * 64
    return {
        f"{name}_s": statistics.median(timed(lambda mass=mass: place(positions, mass, count)) for _ in range(runs))
        for name, mass in shapes.items()
    }


def main() -> None:
    """Measure everything, print it, write it down."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    results = {"runs": runs} | facts()
    results["radix_10k_nodes_10M_tokens_8k_query"] = radix()
    results["placement_N16384_M300"] = placement(16_384, 300)
    results["placement_K2000_M32"] = placement(2_000, 32)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "requests.parquet"
        replica_input(table)
        out = f"output.root={folder}/outputs"
        results["quality_sim"] = whole_process(["-cn", "quality_sim", out], runs)
        results["quality_sim_without_tracking"] = whole_process(["-cn", "quality_sim", "tracking=none", out], runs)
        source = ["workload.source=local", f"workload.path={table}", out]
        results["sparse_prefix_replica"] = whole_process(["-cn", "sparse_prefix_replica", *source], runs)
    print(write_results(HERE / "results.json", results))


if __name__ == "__main__":
    main()
