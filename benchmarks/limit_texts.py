"""Tables and sentences of the pages about limits of time and memory, and about the coverage of intervals."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from pages import table

Summary = Mapping[str, Any]


def limits_table(results: Summary) -> str:
    """Return limits and measured values as Markdown."""
    radix = results["radix_10k_nodes_10M_tokens_8k_query"]

    def process(key: str) -> str:
        times = results[key]
        spread = f"{times['wall_s_min']:.1f} to {times['wall_s_max']:.1f} s over {results['runs']} runs"
        return f"{times['wall_s']:.1f} s ({spread}), {times['peak_mib_all_processes'] / 1024:.2f} GiB"

    def worst(key: str) -> str:
        return f"{1e3 * max(results[key].values()):.0f} ms"

    rows = (
        ("`quality_sim`, whole process, tracked", "10 s, 2 GB", process("quality_sim")),
        ("`quality_sim tracking=none`", "", process("quality_sim_without_tracking")),
        ("replica, 2,324 requests × 27 arms", "5 s", process("sparse_prefix_replica")),
        (
            f"radix lookup, 8k tokens against {radix['nodes']:,} nodes and {radix['tokens'] / 1e6:.1f} M tokens",
            "p99 1 ms",
            f"p50 {radix['lookup_p50_ms']:.3f} ms, p99 {radix['lookup_p99_ms']:.3f} ms",
        ),
        ("metadata per node", "1 KB", f"{radix['metadata_bytes_per_node']:.0f} bytes"),
        ("dp, N = 16,384, M = 300", "1 s", worst("placement_N16384_M300")),
        ("dp, K = 2,000, M = 32", "50 ms", worst("placement_K2000_M32")),
    )
    versions = results["versions"]
    return (
        f"{table(('what', 'must be within', 'measured (median)'), rows)}"
        f"\nOn {results['machine']}, Python {versions['python']}, NumPy {versions['numpy']}, "
        f"commit {results['commit']}.\nScript: `benchmarks/must_hold/measure.py`.\n"
    )


def in_turns(results: Summary) -> str:
    """Compare the speed of the code with an earlier commit, on one machine at one time."""
    this, other = (f"{results['wall_s'][name]:.1f} s at {results['commits'][name][:7]}" for name in ("this", "other"))
    ratio = results["ratio"]
    return (
        f"This code and an earlier commit ran in turns on another day, {results['pairs']} pairs on "
        f"{results['machine']}.\n"
        f"`quality_sim tracking=none` takes {this} and {other}, medians.\n"
        f"The ratio is {ratio['mean']:.2f}, with a 95 % interval of {ratio['low']:.2f} to {ratio['high']:.2f}.\n"
        "Script: `benchmarks/must_hold/in_turns.py`.\n"
    )


def sweep_speed(results: Summary) -> str:
    """Return the duration of a sweep of many configurations."""
    return (
        f"A sweep of {results['configurations']:,} configurations of `smoke`: one arm, 48 requests, two seeds.\n"
        f"It takes {results['wall_s']:.0f} s of 360 s on {results['machine']}, and "
        f"{results['processor_s']:.0f} s of processors.\n"
        f"Commit {results['commit']}, script `benchmarks/must_hold/sweep_speed.py`.\n"
    )


def million(results: Summary) -> str:
    """Return memory and time that one process needs for many requests of a log."""
    run, mode = results["run"], "compiled" if results["run"]["compiled"] else "not compiled"
    return (
        f"{run['requests']:,} requests: {results['log']} again and again with full records, {mode}.\n"
        f"The process takes {run['peak_gib']:.2f} GiB at most, of 2 GB.\n"
        f"It loads the requests in {run['load_s']:.0f} s and simulates {run['steps']:,} steps in "
        f"{run['simulate_s']:.0f} s.\n"
        f"One processor of {results['machine']}, commit {results['commit']}.\n"
        "Script: `benchmarks/must_hold/million.py`.\n"
    )


def simulators_claim(results: Summary) -> str:
    """Return one line: what a simulation costs beside NVIDIA's mocker, in medians of ratios within a turn."""
    rows = results["rows"]["conversation"]
    seconds = {name: median(run["cpu_s"] for run in runs) for name, runs in rows.items()}
    times = []
    for size in (16, 512):
        turns = zip(rows[f"compiled_{size}"], rows[f"mocker_{size}"], strict=False)
        times.append(median(ours["cpu_s"] / theirs["cpu_s"] for ours, theirs in turns))
    compiled, pure = seconds["compiled_16"], seconds["pure_16"]
    return (
        f"`explain` takes {compiled:.0f} processor seconds for the 12,031 requests of the Mooncake conversation, "
        f"{pure:.0f} uncompiled. NVIDIA's mocker in Rust computes the schedule alone. "
        f"We take {times[0]:.1f} times as long with blocks of 16 tokens, and {times[1]:.1f} times with 512 "
        "([table](benchmarks/peers/simulators.md)).\n"
    )


def coverage_table(results: Summary) -> str:
    """Return how often intervals hold the true value, by design and kind of interval."""
    kinds = dict.fromkeys(kind for design in results["designs"] for kind in design["intervals"])
    head = ("seeds × documents × questions", "values", "spreads", *kinds)
    rows = [
        (*_design(design), *(_coverage(design["intervals"].get(kind)) for kind in kinds))
        for design in results["designs"]
    ]
    return (
        f"{table(head, rows)}\n{results['studies']:,} studies each. A cell is the share of intervals that cover the "
        f"truth.\nIn brackets: intervals that lie below the truth, and above it.\nSpreads are standard deviations of "
        f"the effects of seeds, documents and questions.\nLognormal values: of the logarithm.\n"
        f"Commit {results['commit']}, script `benchmarks/coverage/measure.py`.\n"
    )


def _design(design: Summary) -> tuple[str, ...]:
    questions = f"1 to {2 * design['questions'] - 1}" if design["unequal"] else design["questions"]
    sizes = f"{design['seeds']} × {design['documents']} × {questions}"
    values = "lognormal" if design["lognormal"] else "normal"
    return sizes, values, ", ".join(f"{spread:g}" for spread in design["spreads"])


def _coverage(interval: Mapping[str, float] | None) -> str:
    if interval is None:
        return ""
    covered, below, above = (f"{100 * interval[name]:.1f}" for name in ("covered", "below", "above"))
    return f"{covered} % ({below}, {above})"
