"""Publish a run of quality_fidelity or pic_fidelity: copy its summary, settings, profile and figures, fill README.md.

    bash runall.sh -cn pic_fidelity output.run=published
    .venvs/engine/bin/python benchmarks/fidelity/publish.py pic_fidelity outputs/rag/published

No number in README.md is typed by hand, nor in its lines in docs/results.md.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "docs" / "results.md"
KEPT = ("config.yaml", "summary.json", "profile.json")
FIGURES = ("predicted_measured", "error_by_load", "ranking")
CELLS = (
    "load",
    "arm",
    "mean TTFT",
    "error",
    "A/A",
    "requests p50, p95",
    "A/A p50, p95",
    "mean E2E",
    "error",
    "A/A",
    "TPOT error",
    "steps alike",
)
GOALS = ("goal", "at most", "cells within it", "shown", "no verdict", "verdict", "worst", "its error", "its A/A")
RANKS = ("load", "requests/s", "Kendall tau-b", "A/A tau", "best, measured", "best, simulated", "regret")


def main() -> None:
    """Copy, then fill."""
    entry, run = sys.argv[1], Path(sys.argv[2])
    folder = HERE / entry
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "figures").mkdir(parents=True)
    for path in (*(run / name for name in KEPT), *sorted((run / "figures").glob("*.png"))):
        shutil.copy(path, folder / path.relative_to(run))
    summary = json.loads((run / "summary.json").read_text())
    readme = HERE / "README.md"
    readme.write_text(filled(readme.read_text(), entry, report(summary, entry)))
    RESULTS.write_text(filled(RESULTS.read_text(), f"fidelity:{entry}", short(summary, entry)))


def filled(text: str, mark: str, content: str) -> str:
    """`text` with what stands between the two marks replaced."""
    pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    assert pattern.search(text), f"the page has no place for {mark}"
    return pattern.sub(lambda found: found[1] + content + found[2], text)


def report(summary: dict[str, Any], entry: str) -> str:
    """Where it was measured, goals, ranks, every cell, and the figures."""
    told, engine = summary["fidelity"], summary["engine"]
    profile = told["profile"]
    versions = ", ".join(f"{name} {version}" for name, version in engine["versions"].items())
    errors = ", ".join(f"{name} {percent(value)}" for name, value in profile["left_out"].items())
    where = (
        f"On {engine['device']}, {summary['model']} with {engine['weights']} weights in {engine['dtype']}, {versions}; "
        f"{summary['workload']['requests']} requests, {summary['repeats']} repeats; saturation of "
        f"`{summary['saturation']['arm']}` {summary['saturation']['rate_rps']:.3g} requests/s; calibrated at "
        f"{profile['steps']} steps of {profile['shapes']} shapes (errors at shapes left out: {errors}); commit "
        f"{summary['commit']}.\n\n"
    )
    images = "".join(f"![{name}]({entry}/figures/{name}.png)\n" for name in FIGURES)
    parts = (
        where,
        head(GOALS) + "".join(map(goal_line, told["goals"])),
        head(RANKS) + "".join(map(rank_line, told["rates"])),
        head(CELLS) + "".join(map(cell_line, told["cells"])),
        images,
    )
    return parts[0] + "\n".join(parts[1:])


def short(summary: dict[str, Any], entry: str) -> str:
    """What docs/results.md says of it."""
    told = summary["fidelity"]
    equal, steps = (sum(cell["parity"][key] for cell in told["cells"]) for key in ("equal", "steps"))
    ttft = next(goal for goal in told["goals"] if goal["goal"] == "mean of TTFT")
    spreads = sorted(cell["errors"]["ttft_s"]["spread"]["mean"] for cell in told["cells"])
    taus = ", ".join(f"{one['tau']:.2f}" for one in told["rates"])
    loads = ", ".join(f"{one['load']:g}" for one in told["rates"])
    regret = max(one["regret"] for one in told["rates"])
    where = f"{summary['model']} on {summary['engine']['device']}"
    counts = f"{ttft['cells_within_goal']} of {ttft['cells']} cells"
    sentences = (
        f"- `{entry}`, {where}: mean TTFT within {percent(ttft['limit'])} in {counts}, "
        f"shown by an equivalence test (TOST) in {ttft['cells_met']}",
        f"no verdict in {ttft['cells_noisy']}, whose repeats differ by more than {percent(2 * ttft['limit'])}",
        f"A/A, what the engine's own repeats differ by, is {percent(spreads[0])} to {percent(spreads[-1])}",
        f"Kendall's tau of the arms {taus} at loads {loads}",
        f"regret at most {percent(regret)}",
        f"both drivers feed the scheduler alike in {equal:,} of {steps:,} steps",
    )
    return "; ".join(sentences) + ".\n"


def goal_line(goal: dict[str, Any]) -> str:
    """A goal with its verdict."""
    verdict = "no verdict" if goal["met"] is None else "met" if goal["met"] else "not met"
    counts = (f"{goal[key]} of {goal['cells']}" for key in ("cells_within_goal", "cells_met", "cells_noisy"))
    worst = (goal["worst"], percent(goal["worst_error"], "+" if goal["signed"] else ""), percent(goal["worst_spread"]))
    return line(goal["goal"], percent(goal["limit"]), *counts, verdict, *worst)


def rank_line(one: dict[str, Any]) -> str:
    """How the arms rank at one load."""
    taus = ("–" if one[key] is None else f"{one[key]:.3f}" for key in ("tau", "aa_tau"))
    regret = f"{percent(one['regret'])} ({milliseconds(one['regret_s'])})"
    return line(f"{one['load']:g}", f"{one['rate_rps']:.3g}", *taus, f"`{one['best']}`", f"`{one['choice']}`", regret)


def cell_line(cell: dict[str, Any]) -> str:
    """An arm at a load."""
    ttft, e2e, tpot = (cell["errors"][metric] for metric in ("ttft_s", "e2e_s", "tpot_s"))
    return line(
        f"{cell['load']:g}",
        f"`{cell['arm']}`",
        *mean(ttft),
        f"{percent(ttft['request_p50'])}, {percent(ttft['request_p95'])}",
        f"{percent(spread(ttft, 'request_p50'))}, {percent(spread(ttft, 'request_p95'))}",
        *mean(e2e),
        percent(tpot["bias"] if tpot else None, "+"),
        f"{cell['parity']['equal']:,} of {cell['parity']['steps']:,}",
    )


def mean(values: dict[str, Any]) -> tuple[str, str, str]:
    """A measured mean, its error in both units, and the engine's own."""
    error = f"{percent(values['bias'], '+')} ({milliseconds(values['bias_s'])})"
    return milliseconds(values["measured_mean_s"]), error, percent(spread(values, "mean"))


def spread(values: dict[str, Any], key: str) -> float | None:
    """What the repeats differ by; None for a single one."""
    return values["spread"][key] if values["spread"] else None


def head(names: tuple[str, ...]) -> str:
    """The first two lines of a table."""
    return line(*names) + "|---" * len(names) + "|\n"


def line(*cells: str) -> str:
    """A row of Markdown."""
    return "| " + " | ".join(cells) + " |\n"


def percent(value: float | None, sign: str = "") -> str:
    """One digit: +4.2 %."""
    return "–" if value is None else f"{100 * value:{sign}.1f} %"


def milliseconds(seconds: float) -> str:
    """Three digits: 4.20 ms."""
    value = 1e3 * seconds
    return f"{value:.2f} ms" if abs(value) < 10 else f"{value:.1f} ms" if abs(value) < 100 else f"{value:.0f} ms"


if __name__ == "__main__":
    main()
