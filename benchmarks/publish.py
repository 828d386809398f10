"""Publish quality_sim and the limits: copy the study's results here and fill the tables of both pages.

    bash runall.sh -cn quality_sim
    .venvs/sim/bin/python benchmarks/must_hold/measure.py
    .venvs/sim/bin/python benchmarks/must_hold/in_turns.py OTHER
    .venvs/sim/bin/python benchmarks/publish.py

No number is typed by hand; publish_sweep.py fills the README.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = ROOT / "docs" / "results.md"  # short forms of what these folders show
STUDY = ROOT / "outputs" / "quality" / "quality_sim"
FIGURES = ("pareto_tokens", "loss_by_cause", "queueing_load", "cache_content", "checkpoint_positions")
SHOWN = (
    "none",
    "kv_only",
    "block_64",
    "block_512",
    "block_2048",
    "balanced_12",
    "sqrt",
    "log",
    "dp_3",
    "dp_8",
    "dp_3_branch",
    "block_hash_align",
    "radix_branch_last",
    "last",
    "tail_1",
    "tail_3",
    "branch",
    "boundary",
)


def main() -> None:
    """Copy, then fill."""
    target = HERE / "quality_sim"
    target.mkdir(exist_ok=True)
    for name in ("config.yaml", "summary.json"):
        shutil.copy(STUDY / name, target / name)
    for name in FIGURES:
        shutil.copy(STUDY / "figures" / f"{name}.png", target / f"{name}.png")
    summary = json.loads((target / "summary.json").read_text())
    fill(target / "README.md", {"table:quality_sim": study_table(summary)})
    limits = HERE / "must_hold"
    results = {name: json.loads((limits / f"{name}.json").read_text()) for name in ("results", "in_turns")}
    fill(
        limits / "README.md",
        {"must_hold": bars_table(results["results"]), "in_turns": in_turns(results["in_turns"])},
    )


def fill(path: Path, contents: dict[str, str]) -> None:
    """Write each content between its marks in the file."""
    text = path.read_text()
    for mark, content in contents.items():
        text = filled(text, mark, content)
    path.write_text(text)


def filled(text: str, mark: str, content: str) -> str:
    """`text` with what stands between the two marks replaced."""
    pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    assert pattern.search(text), f"the page has no place for {mark}"
    return pattern.sub(lambda found: found[1] + content + found[2], text)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Rows under their head, as Markdown."""
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (head, ("---",) * len(head), *rows))


def study_table(summary: dict[str, Any]) -> str:
    """The arms of a study as Markdown, and what their intervals cover."""
    load = summary["offered_load"]
    rows = [
        f"| arm | tokens reused | of the bound | mean TTFT, ms | p99, ms | KV, GiB | states, GiB | speedup at {load} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in SHOWN:
        arm = summary["arms"][name]
        cells = (
            f"`{name}`",
            f"{100 * arm['token_hit_rate']:.1f} %",
            f"{100 * arm['share_of_bound']:.1f} %",
            mean_ttft(arm, 0),
            "–" if arm["ttft_s"]["p99"] is None else f"{1e3 * arm['ttft_s']['p99']:.0f}",
            f"{arm['bytes']['kv_resident_mean'] / 2**30:.1f}",
            f"{arm['bytes']['state_resident_mean'] / 2**30:.1f}",
            speedup(arm, 1),
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + f"\n\n{covered(summary)}\n"


def covered(summary: dict[str, Any]) -> str:
    """What the intervals of a study cover, and over how many requests its percentiles are."""
    requests = max(arm["requests"] for arm in summary["arms"].values())
    return f"{summary['intervals']}; p99 of {requests:,} requests."


def mean_ttft(arm: dict[str, Any], digits: int) -> str:
    """Mean TTFT in milliseconds with its interval; in words where the queue grows."""
    if arm["stationarity"]["verdict"] == "saturated":
        return "saturated"
    return f"{1e3 * arm['ttft_s']['mean']:.{digits}f}{between(arm['ttft_s_interval']['mean'], 1e3, digits)}"


def speedup(arm: dict[str, Any], digits: int) -> str:
    """Speedup with its interval; a dash where the arm or its baseline is saturated."""
    found = arm["speedup"]
    if found is None:
        return "–"
    return f"{found['mean']:.{digits}f}{between((found['low'], found['high']), 1, digits)} ×"


def between(ends: Sequence[float | None] | None, factor: float, digits: int) -> str:
    """An interval as " [a, b]"; nothing where there is none."""
    if ends is None or ends[0] is None or ends[1] is None:
        return ""
    return f" [{factor * ends[0]:.{digits}f}, {factor * ends[1]:.{digits}f}]"


def bars_table(results: dict[str, Any]) -> str:
    """What must hold beside what was measured, as Markdown."""
    radix = results["radix_10k_nodes_10M_tokens_8k_query"]

    def process(key: str) -> str:
        one = results[key]
        spread = f"{one['wall_s_min']:.1f} to {one['wall_s_max']:.1f} s over {results['runs']} runs"
        return f"{one['wall_s']:.1f} s ({spread}), {one['peak_mib_all_processes'] / 1024:.2f} GiB"

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
    head = "| what | must be within | measured (median) |\n|---|---|---|\n"
    lines = "".join(f"| {what} | {bar} | {found} |\n" for what, bar, found in rows)
    versions = results["versions"]
    return (
        head
        + lines
        + (
            f"\nOn {results['machine']}, Python {versions['python']}, NumPy {versions['numpy']}, "
            f"commit {results['commit']}; `benchmarks/must_hold/measure.py`.\n"
        )
    )


def in_turns(results: dict[str, Any]) -> str:
    """How fast the code is beside an earlier commit, on one machine at one time."""
    this, other = (f"{results['wall_s'][name]:.1f} s at {results['commits'][name][:7]}" for name in ("this", "other"))
    ratio = results["ratio"]
    return (
        f"In turns with an earlier commit, {results['pairs']} pairs on {results['machine']} on another day: "
        f"`quality_sim tracking=none` takes {this} and {other}, medians; the ratio is {ratio['mean']:.2f} (95 % "
        f"interval {ratio['low']:.2f} to {ratio['high']:.2f}); `benchmarks/must_hold/in_turns.py`.\n"
    )


if __name__ == "__main__":
    main()
