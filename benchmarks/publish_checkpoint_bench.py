"""Publish a run of checkpoint_bench: copy its summary, settings and figures, and fill checkpoint_bench/README.md.

    .venvs/engine/bin/python benchmarks/publish_checkpoint_bench.py cpu [outputs/checkpoint_bench/cpu]

The first argument names the run, its folder here and the place in README.md: cpu or cuda. No number is typed by hand.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from publish import filled

from spanlab.checkpoint_bench.table import CAPTURES, Columns, columns_of, goal_line, last_visits, noise_line

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks" / "checkpoint_bench"

Entry = dict[str, Any]


def main() -> None:
    """Copy, then fill."""
    name = sys.argv[1]
    run = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "outputs" / "checkpoint_bench" / name
    summary = json.loads((run / "summary.json").read_text())
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in (run / "config.yaml", run / "summary.json", *sorted((run / "figures").glob("*.png"))):
        shutil.copy(path, target / path.name)
    readme = HERE / "README.md"
    readme.write_text(filled(readme.read_text(), name, section(summary, name)))


def section(summary: Entry, name: str) -> str:
    """Where it was measured, both tables, the goal and the figures."""
    models = dict.fromkeys(entry["model"] for entry in summary["noise"])
    figures = [
        f"![{figure} of {model}]({name}/{figure}_{model.replace('/', '_')}.png)"
        for model in models
        for figure in ("prefill", "capture", "bytes", "speedup")
        if (HERE / name / f"{figure}_{model.replace('/', '_')}.png").exists()
    ]
    verdicts = [f"- {line}" for line in (*map(noise_line, summary["noise"]), *map(goal_line, summary["goal"]))]
    again = last_visits(summary["again"])
    noisy = [f"**{sentence}**." for sentence in summary["caveats"]]
    tables = table(summary["captures"], CAPTURES), table(again, columns_of(again))
    return "\n\n".join([where(summary), *noisy, *tables, "\n".join(verdicts), "\n".join(figures)]) + "\n"


def where(summary: Entry) -> str:
    """Machine, versions and rates."""
    rates, versions = summary["rates"], summary["versions"] | summary["engine"]
    return (
        f"Measured on {summary['machine']}, {summary['device']}, threads: {summary['threads']}; {summary['weights']} "
        f"weights in {summary['dtype']}; matmul {rates['flops_per_s'] / 1e9:.3g} GFLOP/s and copy "
        f"{rates['bytes_per_s'] / 1e9:.3g} GB/s, measured; the simulator's roofline is that of {summary['hardware']}; "
        f"Python {versions['python']}, torch {versions['torch']}, transformers {versions['transformers']}, commit "
        f"{summary['commit']}. Load average of the machine {' to '.join(map(str, summary['load']))}."
    )


def table(entries: Sequence[Entry], columns: Columns) -> str:
    """Entries as Markdown, in the columns of the terminal's table."""
    names: list[tuple[str, Callable[[Entry], str]]] = [
        ("model", lambda entry: entry["model"]),
        ("length", lambda entry: f"{entry['length']:,}"),
        ("arm", lambda entry: f"`{entry['arm']}`"),
    ]
    heads = [heading.replace("\n", " ").strip() for heading, _ in (*names, *columns)]
    lines = [heads, ["---"] * len(heads), *([text(entry) for _, text in (*names, *columns)] for entry in entries)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
