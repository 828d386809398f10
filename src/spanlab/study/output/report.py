"""A finished study for the terminal, the tracker, and as one page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spanlab.report import faces
from spanlab.report.console import print_tables
from spanlab.report.page import Page, facts_of, write_page
from spanlab.report.tables import Table
from spanlab.settings import Study
from spanlab.study.findings import Findings
from spanlab.study.output.folder import CONFIG
from spanlab.terminal import printed
from spanlab.tracking import tracked


@dataclass(frozen=True)
class Report:
    """Report of a finished study.

    footer   provenance of its numbers, in one line
    figures  image paths relative to the run folder
    """

    study: Study
    name: str
    footer: str
    summary: dict[str, Any]
    findings: list[Findings]
    figures: list[Path]

    @property
    def tables(self) -> list[Table]:
        """All tables, in the order of the analyses."""
        return [table for findings in self.findings for table in findings.every_table]

    @property
    def failed(self) -> dict[str, str]:
        """Error of each failed arm, by arm."""
        failed: dict[str, str] = self.summary["failed"]
        return failed

    def write_page(self, folder: Path) -> None:
        """Write `report.html` into the run folder, which already has the other files."""
        page = Page(
            title=self.name,
            tables=tuple(self.tables),
            about=(self.footer,),
            caveats=tuple(self.summary["caveats"]),
            failed=tuple(self.failed.values()),
            figures=sorted(folder / path for path in self.figures),
            config=(folder / CONFIG).read_text(),
            facts=facts_of(self.summary),
        )
        write_page(page, folder)

    def show(self) -> None:
        """Print the tables of every analysis."""
        with printed() as console:
            for number, findings in enumerate(self.findings):
                if number:
                    console.print()
                print_tables(findings.tables, console)

    def track(self, run: str, folder: Path) -> None:
        """Send figures, summary and tables to the tracker; `folder` is the published run folder."""
        with tracked(self.study.tracking, run, self.name, asdict(self.study), folder) as tracker:
            tracker.figures([folder / path for path in self.figures])
            tracker.summary(self.summary)
            for table in self.tables:
                tracker.table(table.name, *faces.tracker_rows(table))
