"""Input of the tables and figures of the analysis `methods`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from spanlab.report.units import Ends

Entry = Mapping[str, Any]
Line = list[tuple[str, Entry]]
PLAIN = "pic"  # reuse without repair: the start of every line of budgets


@dataclass(frozen=True)
class MethodData:
    """Entries of `analysis.method_scores` by arm.

    `floor`      entry of the second run of the baseline, with prompts in other chunks
    `baseline`   arm that recomputes everything
    `without`    arm without passages; None where there is none
    `gold_only`  arm with the gold passage alone; None where there is none
    `footer`     the provenance line under every figure
    """

    entries: Mapping[str, Entry]
    floor: Entry
    baseline: str
    without: str | None
    gold_only: str | None
    footer: str

    @property
    def views(self) -> tuple[str, ...]:
        """The arms that are no methods of reuse: the baseline, and arms with other prompts."""
        return tuple(
            name for name in (self.baseline, self.without, self.gold_only) if name is not None and name in self.entries
        )

    @property
    def methods(self) -> dict[str, Entry]:
        """Entries of the arms that are methods of reuse."""
        return {name: entry for name, entry in self.entries.items() if name not in self.views}


def ends(estimate: Mapping[str, float | None]) -> Ends | None:
    """Return (low, high) of {mean, low, high}, or None where either is missing."""
    low, high = estimate["low"], estimate["high"]
    return None if low is None or high is None else (low, high)


def budgets(methods: dict[str, Entry]) -> dict[str, Line]:
    """Group arms by method, fewest computed tokens first: lego_link_4 and lego_link_16 are budgets of one method."""
    named = sorted((name.rpartition("_"), entry) for name, entry in methods.items())
    lines: dict[str, Line] = {}
    for method, group in groupby((item for item in named if item[0][2].isdigit()), key=lambda item: item[0][0]):
        line = [(budget, entry) for (_, _, budget), entry in group]
        if len(line) > 1:
            lines[method] = sorted(line, key=lambda item: item[1]["computed_tokens"]["mean"])
    return lines
