"""What a report is made from: the counted requests, runs and summary of each arm of one study."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from spanlab.steady import SATURATED, UNSETTLED, Stationarity


@dataclass(frozen=True)
class ArmData:
    """One arm of a study, all its seeds together.

    columns  every Record field plus `seed`; one entry per counted request
    runs     RunRow fields, one dict per seed
    summary  `arms.<name>` of summary.json
    """

    name: str
    family: str
    columns: dict[str, NDArray[Any]]
    runs: list[dict[str, Any]]
    summary: dict[str, Any]


@dataclass(frozen=True)
class LoadPoint:
    """One arm at one offered load, all seeds together.

    utilisation     offered work ÷ capacity, None where no timing model tells
    busy_fraction   share of the time in which steps run
    queue_s, ttft_s  mean, low, high and p99 in seconds; where the queue grows these are None, and
                     `unstable` is the mean over this run, which no other length of it would have
    """

    arm: str
    family: str
    rate_rps: float
    seeds: int
    requests: int
    state: Stationarity
    utilisation: float | None
    busy_fraction: float
    queue_s: dict[str, float | None]
    ttft_s: dict[str, float | None]

    @property
    def stable(self) -> bool:
        """Whether its delays are those of a steady state, as far as the run can tell."""
        return self.state.verdict not in (SATURATED, UNSETTLED)


@dataclass(frozen=True)
class StudyData:
    """One study as the report sees it.

    `arms`          those that ran to their end
    `footer`        the provenance line that stands under every figure
    `baseline`      the arm that speedups are relative to
    `count_hit_as`  what a request needs one token of to count as a hit: reused or matched
    `notes`         what else stands under the table
    `caveats`       what a reader of the numbers must know about this study
    `load_words`    the load at which the arms were measured: 1/s
    """

    title: str
    footer: str
    arms: list[ArmData]
    load: list[LoadPoint]
    store: str
    baseline: str = "none"
    count_hit_as: str = "reused"
    caveats: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    load_words: str = ""
