"""Publish the flagship study for real, beside its twin in the simulator: copy both runs, fill quality_clean/README.md.

    bash runall.sh -cn quality_clean device=cpu size=toy output.run=clean_cpu
    bash runall.sh -cn quality_clean device=cpu size=toy backend=sim output.run=clean_cpu_sim
    .venvs/sim/bin/python benchmarks/publish_clean.py cpu

With `cuda` for `cpu` and `size=full` the same for a card. No number in that README is typed by hand.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from publish import HERE, ROOT, filled

FIGURES = ("pareto_tokens", "loss_by_cause", "pareto_ttft")
HEAD = (
    "arm",
    "tokens reused, engine",
    "twin",
    "`quality_sim`",
    "mean TTFT, engine",
    "calibrated simulator",
    "roofline twin",
    "mean E2E, engine",
    "calibrated simulator",
    "request error p50, p95",
    "steps alike",
)


def main() -> None:
    """Copy, then fill."""
    device = sys.argv[1]
    runs = {"engine": f"clean_{device}", "sim": f"clean_{device}_sim"}
    kept = {backend: _copy(ROOT / "outputs" / "quality" / run, device, backend) for backend, run in runs.items()}
    flagship = json.loads((HERE / "quality_sim" / "summary.json").read_text())
    readme = HERE / "quality_clean" / "README.md"
    readme.write_text(filled(readme.read_text(), device, report(kept["engine"], kept["sim"], flagship, device)))
    front = ROOT / "README.md"
    front.write_text(filled(front.read_text(), f"quality_clean:{device}", short(kept["engine"], flagship)))


def _copy(run: Path, device: str, backend: str) -> dict[str, Any]:
    """Copy what is shown of a run; returns its summary."""
    target = HERE / "quality_clean" / f"{device}_{backend}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in ("config.yaml", "summary.json"):
        shutil.copy(run / name, target / name)
    for name in (*FIGURES, *(("predicted_measured",) if backend == "engine" else ())):
        shutil.copy(run / "figures" / f"{name}.png", target / f"{name}.png")
    summary: dict[str, Any] = json.loads((target / "summary.json").read_text())
    return summary


def report(engine: dict[str, Any], twin: dict[str, Any], flagship: dict[str, Any], device: str) -> str:
    """Where it was measured, every arm three times, and the figures side by side."""
    told, profile = engine["engine"], engine["fidelity"]["profile"]
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    left_out = ", ".join(f"{name} {percent(value)}" for name, value in profile["left_out"].items())
    where = (
        f"On {told['device']}: {engine['model']} with {told['weights']} weights in {told['dtype']}, {versions}; "
        f"{engine['workload']['provenance']}: {engine['workload']['detail']}; store of {engine['store']}; commit "
        f"{engine['commit']}. The simulator's prices were fitted on {profile['date']} on the same machine (errors at "
        f"shapes left out: {left_out}).\n\n"
    )
    cells = {cell["arm"]: cell for cell in engine["fidelity"]["cells"]}
    rows = [row(arm, engine, twin, flagship, cell) for arm, cell in cells.items()]
    return where + line(HEAD) + "|---" * len(HEAD) + "|\n" + "".join(rows) + ranks(engine) + "\n" + images(device)


def short(engine: dict[str, Any], flagship: dict[str, Any]) -> str:
    """What the front page shows of it."""
    names = ("arm", "tokens reused", "in `quality_sim`", "mean TTFT", "simulated, calibrated", "steps alike")
    rows = []
    for cell in engine["fidelity"]["cells"]:
        hits = [percent(one["arms"][cell["arm"]]["token_hit_rate"]) for one in (engine, flagship)]
        ttft, parity = cell["errors"]["ttft_s"], cell["parity"]
        alike = f"{parity['equal']:,} of {parity['steps']:,}"
        measured = milliseconds(ttft["measured_mean_s"])
        rows.append(line((f"`{cell['arm']}`", *hits, measured, predicted(ttft), alike)))
    where = f"\nOn {engine['engine']['device']}, {engine['workload']['detail']}; commit {engine['commit']}.\n"
    return line(names) + "|---" * len(names) + "|\n" + "".join(rows) + where


def row(arm: str, engine: dict[str, Any], twin: dict[str, Any], flagship: dict[str, Any], cell: dict[str, Any]) -> str:
    """One arm on the engine, in the twin and in the flagship."""
    hits = [percent(one["arms"][arm]["token_hit_rate"]) for one in (engine, twin, flagship)]
    ttft, e2e, parity = cell["errors"]["ttft_s"], cell["errors"]["e2e_s"], cell["parity"]
    roofline = twin["arms"][arm]["ttft_s"]["mean"]
    times = [milliseconds(ttft["measured_mean_s"]), predicted(ttft), milliseconds(roofline)]
    times += [milliseconds(e2e["measured_mean_s"]), predicted(e2e)]
    single = f"{percent(ttft['request_p50'])}, {percent(ttft['request_p95'])}"
    return line((f"`{arm}`", *hits, *times, single, f"{parity['equal']:,} of {parity['steps']:,}"))


def predicted(values: dict[str, Any]) -> str:
    """What the calibrated simulator says of a mean, and how far off that is."""
    return f"{milliseconds(values['predicted_mean_s'])} ({100 * values['bias']:+.1f} %)"


def ranks(engine: dict[str, Any]) -> str:
    """How the arms rank by mean TTFT."""
    (at,) = engine["fidelity"]["rates"]
    tau, regret = f"{at['tau']:.2f}", percent(at["regret"])
    return (
        f"\nRanked by mean TTFT, engine and calibrated simulator agree with Kendall's tau {tau}; taking the arm that "
        f"the simulator puts first (`{at['choice']}`) costs {regret} over the engine's best (`{at['best']}`).\n"
    )


def images(device: str) -> str:
    """Figures of the engine and of its twin, in two columns."""
    rows = [line(("engine", "twin in the simulator (uncalibrated roofline)")), "|---|---|\n"]
    rows += [
        line(tuple(f"![{name}]({device}_{backend}/{name}.png)" for backend in ("engine", "sim"))) for name in FIGURES
    ]
    return "".join(rows) + f"\n![Every request, predicted against measured]({device}_engine/predicted_measured.png)\n"


def line(cells: tuple[str, ...]) -> str:
    """A row of Markdown."""
    return "| " + " | ".join(cells) + " |\n"


def percent(value: float) -> str:
    """One digit: 4.2 %."""
    return f"{100 * value:.1f} %"


def milliseconds(seconds: float) -> str:
    """Three digits: 4.20 ms."""
    value = 1e3 * seconds
    return f"{value:.2f} ms" if abs(value) < 10 else f"{value:.1f} ms" if abs(value) < 100 else f"{value:.0f} ms"


if __name__ == "__main__":
    main()
