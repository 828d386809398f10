"""The figure of the analysis `families`: the family with the lowest mean TTFT at each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from spanlab.report.analyses.families import NO_LEAD, families_at, family_text
from spanlab.report.sweep.data import SweepPoint
from spanlab.report.sweep.point_grid import COLOURS, PALE, GridCell, draw_grid
from spanlab.report.units import MISSING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_winners(points: Sequence[SweepPoint]) -> Figure:
    """Draw a cell per point of a product of settings, coloured by the family with the lowest mean TTFT."""
    from matplotlib.patches import Patch

    names = families_at(points)
    colours = dict(zip(names, COLOURS, strict=False))
    title = f"The family with the lowest mean TTFT, and its speedup over {family_text(names[0])}"
    legend = {family_text(name): colour for name, colour in colours.items()}
    pale = Patch(facecolor="#888888", alpha=PALE, label=f"pale: {NO_LEAD}")
    text_key = Patch(facecolor="none", label="a × · b %: speedup · token hit rate")
    return draw_grid(points, title, legend, (pale, text_key), partial(_cell, colours))


def _cell(colours: Mapping[str, str], point: SweepPoint) -> GridCell | None:
    findings = point.findings("families")
    lead = findings["lead"]
    if lead is None:
        return None
    best = next(entry for entry in findings["entries"] if entry["family"] == lead["family"])
    text = f"{_speedup(best, findings)} · {100 * best['token_hit_rate']:.0f} %"
    return GridCell(colours[best["family"]], text, lead["shown"])


def _speedup(best: Mapping[str, Any], findings: Mapping[str, Any]) -> str:
    """Return the speedup over the first family; missing where a queue grew or the machine was noisy."""
    if best is findings["entries"][0]:
        return "1 ×"
    return MISSING if best["speedup"] is None else f"{best['speedup']['mean']:.2f} ×"
