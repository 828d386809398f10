"""What tables and figures of the analysis `methods` are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from spanlab.report.units import Ends

Entry = Mapping[str, Any]
Line = list[tuple[str, Entry]]
PLAIN = "pic"  # reuse without repair, where every line of budgets would begin


@dataclass(frozen=True)
class MethodData:
    """Entries of `analysis.method_scores` by arm.

    `floor`      the entry of the baseline's second run, in other chunks
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
        """The arms that have other prompts, or none cached: no methods of reuse."""
        return tuple(
            name for name in (self.baseline, self.without, self.gold_only) if name is not None and name in self.entries
        )

    @property
    def methods(self) -> dict[str, Entry]:
        """The other arms."""
        return {name: entry for name, entry in self.entries.items() if name not in self.views}


def ends(found: Mapping[str, float | None]) -> Ends | None:
    """The bounds of {mean, low, high}; None where there are none."""
    low, high = found["low"], found["high"]
    return None if low is None or high is None else (low, high)


def budgets(methods: dict[str, Entry]) -> dict[str, Line]:
    """Arms by method, few computed tokens to many: lego_link_4 and lego_link_16 are one method with two budgets."""
    named = sorted((name.rpartition("_"), entry) for name, entry in methods.items())
    found: dict[str, Line] = {}
    for method, own in groupby((one for one in named if one[0][2].isdigit()), key=lambda one: one[0][0]):
        line = [(budget, entry) for (_, _, budget), entry in own]
        if len(line) > 1:
            found[method] = sorted(line, key=lambda one: one[1]["computed_tokens"]["mean"])
    return found
