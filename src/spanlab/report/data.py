"""Input of a report: counted requests, runs and summary of each arm of one study."""

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

    utilisation     offered work ÷ capacity; None without a timing model
    busy_fraction   share of the time in which steps run
    queue_s, ttft_s  mean, low, high and p99 in seconds; None where the queue grows, and `unstable` is
                     then the mean over this run, which depends on the length of the run
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
        """Whether the run is neither saturated nor unsettled, so that its delays are steady-state values."""
        return self.state.verdict not in (SATURATED, UNSETTLED)


@dataclass(frozen=True)
class StudyData:
    """Input of the report for one study.

    `arms`          arms that finished
    `footer`        the provenance line under every figure
    `baseline`      the arm that speedups are relative to
    `count_hit_as`  kind of token that makes a request a hit, from one token: reused or matched
    `notes`         additional notes under the table
    `caveats`       limits of the numbers, for readers of the study
    `load_words`    the load at which the arms were measured, as text: 1/s
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

    @property
    def provenance(self) -> str:
        """The line under every figure."""
        return f"{self.title} · {self.footer}"
