"""Input and output of an analysis of a finished study."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spanlab.analysis.families import MeasuredArm
from spanlab.report.tables import Table
from spanlab.settings import Study
from spanlab.study.machine.device import EngineFacts
from spanlab.study.machine.noise import Noise
from spanlab.study.numbers.results import ArmResult
from spanlab.study.output.arm_files import ArmFiles
from spanlab.workloads import Workload
from spanlab_sim.calibrated import Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spanlab.study.execution.arms import Arms


@dataclass(frozen=True)
class Finished:
    """A study whose arms have run.

    name      the entry
    root      folder of all runs
    folder    folder of this run while it is written
    files     files of each arm that completed
    results   summaries of these files; present where an analysis needs ARMS
    failed    the error of each arm that failed, by arm
    facts     device of the engine; None for a simulation
    noise     noise of the engine's machine; None for a simulation
    profile   timing model that predicts the engine; None where no analysis reads it
    shares    loads as shares of saturation, by rate; empty where the study sets rates
    arms      the study's executor; None where no analysis needs POINTS
    """

    study: Study
    name: str
    root: Path
    folder: Path
    workload: Workload
    files: Mapping[str, ArmFiles]
    results: list[ArmResult]
    failed: dict[str, str]
    facts: EngineFacts | None
    noise: Noise | None
    profile: Profile | None
    shares: Mapping[float, float] = field(default_factory=dict)
    arms: Arms | None = None

    @property
    def measured(self) -> list[MeasuredArm]:
        """The arms that completed, for comparisons of families."""
        return [MeasuredArm(result.data.name, result.data.summary, result.ttft_sums) for result in self.results]

    def noise_sentence(self, refused: str) -> str:
        """Sentence why the study reports no `refused`, such as speedups; empty on a calm machine and in simulations."""
        return self.noise.sentence(refused) if self.noise else ""


@dataclass(frozen=True)
class Findings:
    """Results of one analysis.

    summary  entries of `summary.json`; no other analysis has the same keys
    tables   printed in this order
    further  tables that are written and not printed
    figures  picklable functions that draw the figures, by file name; they return None where there is no figure
    caveats  sentences that a reader of the numbers must know
    """

    summary: dict[str, Any]
    tables: tuple[Table, ...] = ()
    further: tuple[Table, ...] = ()
    figures: Mapping[str, Callable[[], Figure | None]] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()

    @property
    def every_table(self) -> tuple[Table, ...]:
        """All tables, the printed ones first."""
        return (*self.tables, *self.further)
