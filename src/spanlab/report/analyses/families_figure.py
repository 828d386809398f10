"""The figure of the analysis `families`: which family has the lowest mean TTFT where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from spanlab.report.analyses.families import NO_LEAD, families_of, words
from spanlab.report.sweep.data import SweepPoint
from spanlab.report.sweep.point_grid import COLOURS, PALE, GridCell, draw_grid
from spanlab.report.units import MISSING


def draw_winners(points: Sequence[SweepPoint]) -> Figure:
    """A cell per point of one product of settings, coloured by the family with the lowest mean TTFT."""
    names = list(dict.fromkeys(entry["family"] for point in points for entry in families_of(point)["entries"]))
    colours = dict(zip(names, COLOURS, strict=False))
    title = f"The family with the lowest mean TTFT, and its speedup over {words(names[0])}"
    legend = {words(name): colour for name, colour in colours.items()}
    pale = Patch(facecolor="#888888", alpha=PALE, label=f"pale: {NO_LEAD}")
    said = Patch(facecolor="none", label="a × · b %: speedup · token hit rate")
    return draw_grid(points, title, legend, (pale, said), partial(_cell, colours))


def _cell(colours: Mapping[str, str], point: SweepPoint) -> GridCell | None:
    found = families_of(point)
    lead = found["lead"]
    if lead is None:
        return None
    best = next(entry for entry in found["entries"] if entry["family"] == lead["family"])
    text = f"{_speedup(best, found)} · {100 * best['token_hit_rate']:.0f} %"
    return GridCell(colours[best["family"]], text, lead["shown"])


def _speedup(best: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Over the first family; missing where a queue grew, or the machine was noisy."""
    if best is found["entries"][0]:
        return "1 ×"
    return MISSING if best["speedup"] is None else f"{best['speedup']['mean']:.2f} ×"
