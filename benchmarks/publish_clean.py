"""Publish the studies for real, the flagship beside its twin in the simulator: copy the runs, fill clean/README.md.

    bash runall.sh -cn quality_clean device=cpu size=toy seeds=[0,1,2,3,4] output.run=clean_cpu
    bash runall.sh -cn quality_clean device=cpu size=toy backend=sim seeds=[0,1,2,3,4] output.run=clean_cpu_sim
    bash runall.sh -cn system_prompts_clean device=cpu size=toy seeds=[0,1,2,3,4] output.run=clean_cpu
    bash runall.sh -cn narrativeqa_clean device=cpu size=toy_long seeds=[0,1,2,3,4] output.run=clean_cpu
    .venvs/sim/bin/python benchmarks/publish_clean.py cpu

With `cuda` for `cpu` and `full` for `toy` the same for a card. No number in that README or in docs/results.md is typed
by hand.
"""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

from publish import HERE, RESULTS, ROOT, filled, table

FIGURES = ("loss_by_cause", "ttft_distribution", "cache_content")
COMPARED = "predicted_measured"
OTHERS = ("system_prompts", "narrativeqa")
HEAD_ALONE = (
    "arm",
    "tokens reused",
    "mean TTFT, engine",
    "speedup",
    "calibrated simulator",
    "mean E2E, engine",
    "calibrated simulator",
    "request error p50, p95",
    "steps alike",
)
HEAD = (
    "arm",
    "tokens reused, engine",
    "twin",
    "`quality_sim`",
    "mean TTFT, engine",
    "speedup",
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
    run = f"clean_{device}"
    flagship = json.loads((HERE / "quality_sim" / "summary.json").read_text())
    engine = _copy("quality", run, f"quality_{device}_engine", (*FIGURES, COMPARED))
    twin = _copy("quality", f"{run}_sim", f"quality_{device}_sim", FIGURES)
    readme = HERE / "clean" / "README.md"
    text = filled(readme.read_text(), device, report(engine, twin, flagship, device))
    for name in OTHERS:
        kept = f"{name}_{device}"
        text = filled(text, f"{name}:{device}", alone(_copy(name, run, kept, (FIGURES[0], COMPARED)), kept))
    readme.write_text(text)
    RESULTS.write_text(filled(RESULTS.read_text(), f"quality_clean:{device}", short(engine, flagship)))


def _copy(study: str, run: str, name: str, figures: tuple[str, ...]) -> dict[str, Any]:
    """Copy what is shown of a run to clean/`name`; returns its summary."""
    source, target = ROOT / "outputs" / study / run, HERE / "clean" / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in ("config.yaml", "summary.json"):
        shutil.copy(source / file, target / file)
    for figure in figures:
        shutil.copy(source / "figures" / f"{figure}.png", target / f"{figure}.png")
    summary: dict[str, Any] = json.loads((target / "summary.json").read_text())
    return summary


def report(engine: dict[str, Any], twin: dict[str, Any], flagship: dict[str, Any], device: str) -> str:
    """Where it was measured, every arm three times, and the figures side by side."""
    cells = {cell["arm"]: cell for cell in engine["fidelity"]["cells"]}
    rows = [row(arm, engine, twin, flagship, cell) for arm, cell in cells.items()]
    return where(engine) + table(HEAD, rows) + ranks(engine) + "\n" + images(device)


def alone(engine: dict[str, Any], name: str) -> str:
    """Where it was measured, every arm beside its prediction, and two figures."""
    rows = []
    for cell in engine["fidelity"]["cells"]:
        hits = percent(engine["arms"][cell["arm"]]["token_hit_rate"])
        ttft, *others = times(engine, cell)
        rows.append((f"`{cell['arm']}`", hits, ttft, speedup(engine, cell["arm"]), *others, *agreement(cell)))
    shown = f"\n![Prompt tokens by cause]({name}/{FIGURES[0]}.png)\n![Predicted and measured]({name}/{COMPARED}.png)\n"
    return where(engine) + table(HEAD_ALONE, rows) + ranks(engine) + shown


def where(engine: dict[str, Any]) -> str:
    """What ran on what, and when its simulator was calibrated."""
    told, profile = engine["engine"], engine["fidelity"]["profile"]
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    left_out = ", ".join(f"{name} {percent(value)}" for name, value in profile["left_out"].items())
    return (
        f"On {told['device']}: {engine['model']} with {told['weights']} weights in {told['dtype']}, {versions}; "
        f"{engine['workload']['provenance']}: {engine['workload']['detail']}; store of {engine['store']}; commit "
        f"{engine['commit']}. The simulator's prices were fitted on {profile['date']} on the same machine (errors at "
        f"shapes left out: {left_out}). {noise(engine)}\n\n"
    )


def noise(engine: dict[str, Any]) -> str:
    """What the repeated baseline and the fixed step said of the machine, in one sentence."""
    found = engine["machine_noise"]
    ratios = ", ".join(f"{ratio:.3f}" for ratio in found["aa_ratios"])
    verdict = "too noisy for speedups" if found["noisy"] else "within the limits"
    return (
        f"{len(engine['seeds'])} repeats, arms in turns; A/A of `{engine['baseline']}` {ratios}; a fixed step drifted "
        f"by {percent(found['step_drift'])}; load average {found['load_average']:.1f}: {verdict}."
    )


def short(engine: dict[str, Any], flagship: dict[str, Any]) -> str:
    """What docs/results.md shows of it."""
    names = ("arm", "tokens reused", "in `quality_sim`", "mean TTFT", "simulated, calibrated", "steps alike")
    rows = []
    for cell in engine["fidelity"]["cells"]:
        hits = [percent(one["arms"][cell["arm"]]["token_hit_rate"]) for one in (engine, flagship)]
        ttft, parity = cell["errors"]["ttft_s"], cell["parity"]
        alike = f"{parity['equal']:,} of {parity['steps']:,}"
        measured = measured_mean(engine, cell, "ttft_s")
        rows.append((f"`{cell['arm']}`", *hits, measured, predicted(ttft), alike))
    told = f"\nOn {engine['engine']['device']}, {engine['workload']['detail']}; commit {engine['commit']}.\n"
    return table(names, rows) + told


def row(
    arm: str, engine: dict[str, Any], twin: dict[str, Any], flagship: dict[str, Any], cell: dict[str, Any]
) -> tuple[str, ...]:
    """One arm on the engine, in the twin and in the flagship."""
    hits = [percent(one["arms"][arm]["token_hit_rate"]) for one in (engine, twin, flagship)]
    ttft, ttft_told, e2e, e2e_told = times(engine, cell)
    mean = twin["arms"][arm]["ttft_s"]["mean"]
    roofline = "saturated" if mean is None else milliseconds(mean)
    return f"`{arm}`", *hits, ttft, speedup(engine, arm), ttft_told, roofline, e2e, e2e_told, *agreement(cell)


def times(engine: dict[str, Any], cell: dict[str, Any]) -> tuple[str, str, str, str]:
    """Mean TTFT and mean E2E, each measured and predicted."""
    ttft, e2e = cell["errors"]["ttft_s"], cell["errors"]["e2e_s"]
    measured = [measured_mean(engine, cell, metric) for metric in ("ttft_s", "e2e_s")]
    return measured[0], predicted(ttft), measured[1], predicted(e2e)


def measured_mean(engine: dict[str, Any], cell: dict[str, Any], metric: str) -> str:
    """A mean over all repeats with its 95 % interval, where there is one."""
    mean = milliseconds(cell["errors"][metric]["measured_mean_s"])
    bounds = engine["arms"][cell["arm"]][f"{metric}_interval"]["mean"]
    return f"{mean} [{milliseconds(bounds[0])}, {milliseconds(bounds[1])}]" if bounds else mean


def speedup(engine: dict[str, Any], arm: str) -> str:
    """Of mean TTFT over the baseline's with its 95 % interval; a noisy machine has none."""
    found = engine["arms"][arm]["speedup"]
    if not found:
        return "–"
    bounds = "" if found["low"] is None else f" [{found['low']:.2f}, {found['high']:.2f}]"
    return f"{found['mean']:.2f}{bounds} ×"


def agreement(cell: dict[str, Any]) -> tuple[str, str]:
    """Single requests' errors of TTFT, and steps composed alike."""
    ttft, parity = cell["errors"]["ttft_s"], cell["parity"]
    single = f"{percent(ttft['request_p50'])}, {percent(ttft['request_p95'])}"
    return single, f"{parity['equal']:,} of {parity['steps']:,}"


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
    head = ("engine", "twin in the simulator (uncalibrated roofline)")
    rows = [
        tuple(f"![{name}](quality_{device}_{backend}/{name}.png)" for backend in ("engine", "sim")) for name in FIGURES
    ]
    return (
        table(head, rows) + f"\n![Every request, predicted against measured](quality_{device}_engine/{COMPARED}.png)\n"
    )


def percent(value: float) -> str:
    """One digit: 4.2 %."""
    return f"{100 * value:.1f} %"


def milliseconds(seconds: float) -> str:
    """Three digits: 4.20 ms."""
    value = 1e3 * seconds
    return f"{value:.2f} ms" if abs(value) < 10 else f"{value:.1f} ms" if abs(value) < 100 else f"{value:.0f} ms"


if __name__ == "__main__":
    main()
