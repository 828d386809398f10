"""A finished study for the terminal and the tracker."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spanlab.report.console import print_tables
from spanlab.report.table import print_table
from spanlab.settings import Study
from spanlab.study.findings import Findings
from spanlab.study.summarise_arms import flat_table
from spanlab.terminal import printed
from spanlab.tracking import tracked


@dataclass(frozen=True)
class Report:
    """What a study came to: for the terminal and the tracker."""

    study: Study
    name: str
    summary: dict[str, Any]
    findings: list[Findings]
    figures: list[Path]

    @property
    def failed(self) -> dict[str, str]:
        """A sentence for each arm that failed."""
        failed: dict[str, str] = self.summary["failed"]
        return failed

    def show(self) -> None:
        """Print the tables of every analysis."""
        with printed() as console:
            for number, found in enumerate(self.findings):
                if number:
                    console.print()
                if found.data is not None:
                    print_table(found.data, console)
                if found.tables:
                    print_tables(found.tables, console)

    def track(self, run: str, folder: Path) -> None:
        """Hand everything to the tracker, in the folder where it stays."""
        with tracked(self.study.tracking, run, self.name, asdict(self.study), folder) as tracker:
            tracker.figures([folder / path for path in self.figures])
            tracker.summary(self.summary)
            if "arms" in self.summary:
                tracker.table("arms", *flat_table(self.summary))
