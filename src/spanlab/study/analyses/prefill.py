"""The analysis `prefill`: time to first token by the workload's labels, of one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from spanlab.analysis.prefill import capture_goal, prefill_entries
from spanlab.report.prefill.capture import draw as draw_prefill_capture
from spanlab.report.prefill.data import PrefillData
from spanlab.report.prefill.parts import draw as draw_prefill_parts
from spanlab.report.prefill.reuse import draw as draw_prefill_reuse
from spanlab.report.prefill.speedup import draw as draw_prefill_speedup
from spanlab.report.prefill.table import prefill_table
from spanlab.report.prefill.ttft import draw as draw_prefill_ttft
from spanlab.report.sweep.data import SweepPoint
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.analyses.head import footer
from spanlab.study.analyses.prefill_inputs import read_logits, read_prefills
from spanlab.study.findings import Findings, Finished

FIGURES = {
    "prefill_ttft": draw_prefill_ttft,
    "prefill_speedup": draw_prefill_speedup,
    "prefill_parts": draw_prefill_parts,
    "prefill_reuse": draw_prefill_reuse,
    "prefill_capture": draw_prefill_capture,
}


@ANALYSES.register("prefill")
def compare_prefills(finished: Finished) -> Findings:
    """Return every arm compared with the baseline; no speedups where the machine was noisy."""
    study, labels = finished.study, finished.workload.labels
    rates = None if finished.facts is None else finished.facts.rates
    base = finished.files.get(study.baseline)
    logits = read_logits(study, study.baseline, base) if base and finished.facts else None
    arms = [read_prefills(study, arm, files, rates, logits) for arm, files in finished.files.items()]
    entries = prefill_entries(arms, labels or {"request": ("all",) * len(finished.workload.requests)}, study.baseline)
    if finished.noise_sentence("speedups"):
        entries = [entry | {"speedup": None} for entry in entries]
    return _findings(entries, list(labels or {"request": ()}), study.baseline, f"{finished.name} · {footer(finished)}")


@OF_POINTS.register("prefill")
def prefills_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return one table and figures over all points of a sweep that ran."""
    ran = {point.run: point.summary or {} for point in points}
    summaries = [summary["prefill"] for summary in ran.values()]
    first = next(iter(ran.values()))
    provenance = f"{first['study']} · {first['model']} · {len(ran)} points · commit {first['commit']}"
    noisy = sum(summary.get("machine_noise", {}).get("noisy", False) for summary in ran.values())
    footer = f"{provenance} · no speedups at {noisy} of them, for the machine was noisy" if noisy else provenance
    return _findings(
        [entry for summary in summaries for entry in summary["entries"]],
        summaries[0]["labels"],
        first["baseline"],
        footer,
    )


def _findings(entries: list[dict[str, Any]], labels: Sequence[str], baseline: str, footer: str) -> Findings:
    """Return table and figures of entries, of one study or of all points of a sweep; `footer` is for figures."""
    data = PrefillData(entries, tuple(labels), baseline, footer)
    return Findings(
        summary={"prefill": {"labels": list(labels), "entries": entries, "capture_goal": capture_goal(entries)}},
        tables=(prefill_table(entries, labels, baseline),),
        figures={name: partial(drawing, data) for name, drawing in FIGURES.items()},
    )
