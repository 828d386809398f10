"""Publish the simulated studies of reused documents: copy their results here and fill the tables of their pages.

    bash runall.sh -cn pic_sim
    bash runall.sh -m -cn pic_sim workload.rag.order=shuffled,ranked,fixed
    bash runall.sh -m -cn pic_sim store.total_gib=4,8,16,32,64
    bash runall.sh -cn rag_sim
    bash runall.sh -m -cn rag_sim workload.ragpulse.rate_rps=1,2,3,4
    bash runall.sh -m -cn rag_sim store.total_gib=4,8,16,32,64
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

from matplotlib.backends.backend_agg import FigureCanvasAgg
from publish import filled

from spanlab.report.sweep import NAMES, SweptRun, draw_sweep
from spanlab.study.sweep import read_sweep

HERE = Path(__file__).resolve().parent
OUTPUTS = HERE.parent / "outputs"
FIGURES = {
    "pic_sim": ("pareto_tokens", "loss_by_cause", "ttft_load", "cache_content"),
    "rag_sim": ("pareto_tokens", "loss_by_cause", "ttft_distribution"),
}
SWEEPS = {
    "pic_sim": {"by_order": "workload.rag.order", "by_budget": "store.total_gib"},
    "rag_sim": {"by_load": "workload.ragpulse.rate_rps", "by_budget": "store.total_gib"},
}
WORKLOADS = {"pic_sim": "rag", "rag_sim": "ragpulse"}

Summary = dict[str, Any]


def main() -> None:
    """Copy, draw, fill: one page for each entry."""
    for entry, workload in WORKLOADS.items():
        folder, target = OUTPUTS / workload, HERE / entry
        summary = copied(folder / entry, target, FIGURES[entry])
        page = filled((target / "README.md").read_text(), "study", study_table(summary))
        sweeps = {}
        for name, key in SWEEPS[entry].items():
            runs = read_sweep(folder, entry, key)
            FigureCanvasAgg(draw_sweep(key, runs)).print_png(target / f"{name}.png", metadata={"Software": None})
            page = filled(page, name, sweep_table(key, runs))
            sweeps[key] = [{"value": run.value, **essence(run.summary)} for run in runs]
        (target / "sweeps.json").write_text(json.dumps(sweeps, indent=1) + "\n")
        if entry == "rag_sim":
            told = json.loads((folder / "whole_trace" / "summary.json").read_text())
            (target / "whole_trace.json").write_text(json.dumps(told, indent=1) + "\n")
            page = filled(page, "whole_trace", bounds_table(told))
        (target / "README.md").write_text(filled(page, "made", made(summary)))


def copied(study: Path, target: Path, figures: Sequence[str]) -> Summary:
    """A finished study's settings, summary and figures, brought here; returns the summary."""
    for name in ("config.yaml", "summary.json"):
        shutil.copy(study / name, target / name)
    for name in figures:
        shutil.copy(study / "figures" / f"{name}.png", target / f"{name}.png")
    summary: Summary = json.loads((target / "summary.json").read_text())
    return summary


def essence(summary: Summary) -> Summary:
    """What the figure of a sweep shows of one run."""
    keys = ("token_hit_rate", "token_hit_rate_interval", "own_bound_tokens", "finds")
    arms = {
        name: {key: arm[key] for key in keys}
        | {"prompt_tokens": arm["tokens"]["prompt"], "ttft_mean_s": arm["ttft_s"]["mean"]}
        | {"ttft_mean_interval_s": arm["ttft_s_interval"]["mean"]}
        for name, arm in summary["arms"].items()
    }
    return {"commit": summary["commit"], "store": summary["store"], "arms": arms}


def study_table(summary: Summary) -> str:
    """The arms of a study, as Markdown."""
    rows = [
        "| arm | reused | of its own bound | repaired | TTFT, ms | p99, ms | speedup | cached, GiB | copied, GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in summary["arms"].items():
        tokens, speedup, held = arm["tokens"], arm["speedup"], arm["bytes"]
        own = tokens["reused"] / arm["own_bound_tokens"]
        cells = (
            f"`{name}`",
            f"{100 * arm['token_hit_rate']:.1f}{half(arm['token_hit_rate_interval'], 100, 1)} %",
            f"{100 * own:.1f} % of {100 * arm['own_bound_tokens'] / tokens['prompt']:.1f} %",
            f"{100 * tokens['repaired'] / tokens['prompt']:.1f} %",
            f"{1e3 * arm['ttft_s']['mean']:.1f}{half(arm['ttft_s_interval']['mean'], 1e3, 1)}",
            f"{1e3 * arm['ttft_s']['p99']:.0f}",
            f"{speedup['mean']:.2f}{half((speedup['low'], speedup['high']), 1, 2)} ×",
            f"{held['kv_resident_mean'] / 2**30:.1f}",
            f"{held['copied_mean'] / 2**30:.2f}",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def half(low_high: Sequence[float | None] | None, factor: float, digits: int) -> str:
    """Half of an interval as " ± x"; nothing for a single seed."""
    if low_high is None or low_high[0] is None or low_high[1] is None:
        return ""
    return f" ± {factor * (low_high[1] - low_high[0]) / 2:.{digits}f}"


def sweep_table(key: str, runs: Sequence[SweptRun]) -> str:
    """Token hit rate and mean TTFT of every arm, one column a value."""
    names = list(runs[0].summary["arms"])
    head = [NAMES.get(key, key), *(f"{run.value:g}" if isinstance(run.value, float) else run.value for run in runs)]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in names:
        arms = [run.summary["arms"][name] for run in runs]
        cells = [f"{100 * arm['token_hit_rate']:.1f} %, {1e3 * arm['ttft_s']['mean']:.0f} ms" for arm in arms]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


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
