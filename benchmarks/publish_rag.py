"""Publish the simulated studies of reused documents: copy their results here and fill the tables of their pages.

    bash runall.sh -cn pic_sim
    bash runall.sh -cn pic_sweep
    bash runall.sh -cn rag_sim
    bash runall.sh -cn rag_sweep
    bash runall.sh -cn rag_sim workload.ragpulse.requests=null workload.ragpulse.rate_rps=null \\
        workload.ragpulse.independent=all store=unlimited batch=single 'only=[none,radix,pic]' output.run=whole_trace
    .venvs/sim/bin/python benchmarks/publish_rag.py

No number of the tables is typed by hand.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from publish import RESULTS, between, covered, fill, filled, mean_ttft, speedup
from publish_sweep import copy_sweep, rates_of, span

from spanlab.report.faces import markdown
from spanlab.report.sweep_data import by_axis
from spanlab.report.sweep_table import rate_tables
from spanlab.study.sweep import read_points

HERE = Path(__file__).resolve().parent
OUTPUTS = HERE.parent / "outputs"
FIGURES = {
    "pic_sim": ("loss_by_cause", "ttft_load", "cache_content"),
    "rag_sim": ("loss_by_cause", "ttft_distribution"),
}
SWEEPS = {"pic_sim": "pic_sweep", "rag_sim": "rag_sweep"}
MARKS = {
    "workload.rag.order": "by_order",
    "workload.ragpulse.rate_rps": "by_load",
    "store.total_gib": "by_budget",
}
WORKLOADS = {"pic_sim": "rag", "rag_sim": "ragpulse"}

Summary = dict[str, Any]


def main() -> None:
    """Copy, draw, fill: one page for each entry."""
    for entry, workload in WORKLOADS.items():
        folder, target = OUTPUTS / workload, HERE / entry
        summary = copied(folder / entry, target, FIGURES[entry])
        page = filled((target / "README.md").read_text(), "study", study_table(summary))
        swept = folder / SWEEPS[entry]
        copy_sweep(swept, target, "sweep.json")
        if entry == "pic_sim":
            fill(RESULTS, {"pic_claims": claims(swept)})
        points = read_points(swept)
        for key, table in zip(by_axis(points), rate_tables(points), strict=True):
            page = filled(page, MARKS[key], markdown(table))
        if entry == "rag_sim":
            told = json.loads((folder / "whole_trace" / "summary.json").read_text())
            (target / "whole_trace.json").write_text(json.dumps(told, indent=1) + "\n")
            page = filled(page, "whole_trace", bounds_table(told))
        (target / "README.md").write_text(filled(page, "made", made(summary)))


def claims(swept: Path) -> str:
    """What pic_sweep says, with its ranges."""
    rates = rates_of(read_points(swept))
    orders, budgets = rates["workload.rag.order"], rates["store.total_gib"]
    first, last = min(budgets), max(budgets)
    anywhere = [arm for arm in orders["shuffled"] if arm not in ("none", "block_hash_16", "radix")]
    shuffled = [arms[arm] for arms in budgets.values() for arm in anywhere]
    ordered = [orders[order]["radix"] for order in ("ranked", "fixed")]
    return (
        f"*`bash runall.sh -cn pic_sweep`* (modelled retrieval over measured QuALITY passages, llama-3.1-8b, H200, "
        f"simulated). With shuffled passages and {first:g} to {last:g} GiB, `radix` reuses "
        f"{span(arms['radix'] for arms in budgets.values())} % of the prompt tokens and "
        f"position-independent caches {span(shuffled)} %. With ranked or fixed order and 16 GiB, "
        f"`radix` reuses {span(ordered)} %.\n"
    )


def copied(study: Path, target: Path, figures: Sequence[str]) -> Summary:
    """A finished study's settings, summary and figures, brought here; returns the summary."""
    for name in ("config.yaml", "summary.json"):
        shutil.copy(study / name, target / name)
    for name in figures:
        shutil.copy(study / "figures" / f"{name}.png", target / f"{name}.png")
    summary: Summary = json.loads((target / "summary.json").read_text())
    return summary


def study_table(summary: Summary) -> str:
    """The arms of a study, as Markdown, and what their intervals cover."""
    load = summary["offered_load"]
    rows = [
        f"| arm | reused | of its own bound | repaired | TTFT, ms | p99, ms | speedup at {load} | cached, GiB | "
        "copied, GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in summary["arms"].items():
        tokens, held = arm["tokens"], arm["bytes"]
        own = tokens["reused"] / arm["own_bound_tokens"]
        cells = (
            f"`{name}`",
            f"{100 * arm['token_hit_rate']:.1f}{between(arm['token_hit_rate_interval'], 100, 1)} %",
            f"{100 * own:.1f} % of {100 * arm['own_bound_tokens'] / tokens['prompt']:.1f} %",
            f"{100 * tokens['repaired'] / tokens['prompt']:.1f} %",
            mean_ttft(arm, 1),
            "–" if arm["ttft_s"]["p99"] is None else f"{1e3 * arm['ttft_s']['p99']:.0f}",
            speedup(arm, 2),
            f"{held['kv_resident_mean'] / 2**30:.1f}",
            f"{held['copied_mean'] / 2**30:.2f}",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + f"\n\n{covered(summary)}\n"


def bounds_table(summary: Summary) -> str:
    """What the policies found in the whole trace."""
    rows = ["| arm | prompt tokens | reused | share |", "|---|---|---|---|"]
    for name in ("radix", "pic"):
        tokens = summary["arms"][name]["tokens"]
        share = f"{100 * tokens['reused'] / tokens['prompt']:.2f} %"
        rows.append(f"| `{name}` | {tokens['prompt']:,} | {tokens['reused']:,} | {share} |")
    return "\n".join(rows) + "\n"


def made(summary: Summary) -> str:
    """Where the numbers come from."""
    versions, work = summary["versions"], summary["workload"]
    return (
        f"{work['provenance']}: {work['detail']}. {summary['model']} on {summary['hardware']}, {summary['timing']} "
        f"timing, uncalibrated; store {summary['store']}; seeds {summary['seeds']}. Commit {summary['commit']}, "
        f"{summary['wall_s']:.1f} s on {summary['machine']}, Python {versions['python']}, NumPy {versions['numpy']}.\n"
    )


if __name__ == "__main__":
    main()
