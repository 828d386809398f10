"""What tables and figures of the analysis `methods` are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spanlab.report.units import Ends

Entry = Mapping[str, Any]


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
        return tuple(name for name in (self.baseline, self.without, self.gold_only) if name in self.entries)

    @property
    def methods(self) -> dict[str, Entry]:
        """The other arms."""
        return {name: entry for name, entry in self.entries.items() if name not in self.views}


def ends(found: Mapping[str, float | None]) -> Ends | None:
    """The bounds of {mean, low, high}; None where there are none."""
    low, high = found["low"], found["high"]
    return None if low is None or high is None else (low, high)
