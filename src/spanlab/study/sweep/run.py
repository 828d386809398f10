"""A sweep: one study at several values of some settings, axis by axis.

An axis varies one setting, or runs every combination of several. Every point is an ordinary run in a separate folder,
`<run>,<key>=<value>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from rich.console import Console
from rich.text import Text

from spanlab import build
from spanlab.errors import is_user_error, sentence
from spanlab.report import faces
from spanlab.report.console import print_tables
from spanlab.report.page import Page, facts_of, write_page
from spanlab.report.sweep.data import SweepPoint, as_value, sweep_rows
from spanlab.report.sweep.figure import draw_sweep
from spanlab.report.sweep.table import failures, rate_tables, sweep_tables
from spanlab.report.tables import Table
from spanlab.settings import Study
from spanlab.settings.analyses import OF_POINTS
from spanlab.study.findings import Findings
from spanlab.study.output import provenance
from spanlab.study.output.config import GROWING, settings_key, settings_yaml
from spanlab.study.output.folder import CONFIG, RunFolder, folder_name
from spanlab.study.output.results import draw_figures, finish_report, write_before_report
from spanlab.study.progress import print_line
from spanlab.study.sweep.lanes import ConcurrentPoints, PointOutcome, SequentialPoints, points_of
from spanlab.terminal import printed
from spanlab.tracking import Tracker, check_login, tracked

FIGURES = {"sweep_tokens": "token_hit_rate", "sweep_ttft": "ttft_mean_s"}


@dataclass(frozen=True)
class Axis:
    """Swept settings: their keys, and the values of each as on the command line."""

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    @property
    def name(self) -> str:
        """The keys, joined by spaces."""
        return " ".join(self.keys)

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """Iterate over tuples of one value per key; the last key varies fastest."""
        return product(*self.values)


if TYPE_CHECKING:
    from matplotlib.figure import Figure

Compose = Callable[..., Study]  # returns the study with further overrides


def run_sweep(study: Study, name: str, root: Path, compose: Compose) -> Path:
    """Run every point, write table, CSV and figures, and return the folder.

    `name`  name of the entry
    `root`  folder of all outputs

    Other points continue after a failure. The ValueError at the end names every point that failed.
    """
    axes, run, config = parse_axes(study.sweep), study.output.run, asdict(study)
    check_login(study.tracking)
    build.copy_pipe(study.workload)
    console = Console(stderr=True)
    with RunFolder(*sweep_names(study, root)) as folder:
        points = list(_Points(study, name, root, compose, console).run(axes))
        _check_any_completed(points)
        ran = [point for point in points if point.summary is not None]
        findings = [OF_POINTS[name](ran) for name in study.chosen_analyses() if name in OF_POINTS]
        tables = (
            *sweep_tables(points),
            *(table for analysis_findings in findings for table in analysis_findings.every_table),
        )
        summary = _write(points, findings, tables, folder)
        figures = _draw(points, findings, folder.work / "figures") if study.output.figures else []
        write_page(_page(name, points, tables, figures, summary, folder), folder.work)
        finish_report(summary, folder)
        _print(points, findings)
        with tracked(study.tracking, run, name, config, folder.path) as tracker:
            _track(tables, folder.path, tracker)
    print_line(console, str(folder.path))
    _raise_failures(points)
    return folder.path


def sweep_names(study: Study, root: Path) -> tuple[Any, ...]:
    """Return the arguments of `RunFolder`, and of the check of its names, for a sweep."""
    config = settings_yaml(asdict(study))
    return root, study.workload.kind, study.output.run, study.output.if_exists, config, GROWING


def points_of_sweep(study: Study, compose: Compose) -> Iterator[tuple[str, Study]]:
    """Yield name and study of each point, equal settings once; ValueError for the first that cannot be composed."""
    known = set()
    for axis in parse_axes(study.sweep):
        for values in axis.combinations():
            overrides = [f"{key}={value}" for key, value in zip(axis.keys, values, strict=True)]
            with named_point(study, ",".join(overrides)):
                point = _of_point(study, compose(*overrides), overrides)
            if (key := settings_key(asdict(point))) not in known:
                known.add(key)
                yield ",".join(overrides), point


@contextmanager
def named_point(study: Study, point: str) -> Iterator[None]:
    """Name the point of a sweep in a user error of the block."""
    try:
        yield
    except Exception as mistake:  # all but user errors are raised again
        if not is_user_error(mistake):
            raise
        raise ValueError(f"sweep={study.sweep}: {point}: {sentence(mistake)}") from mistake


def _of_point(study: Study, point: Study, overrides: Sequence[str]) -> Study:
    """Return the study of a point with its own run folder."""
    run = folder_name(",".join([study.output.run, *overrides]))
    point.output = replace(study.output, run=run, figures=False)
    return point


def parse_axes(texts: list[str]) -> list[Axis]:
    """Parse axes in Hydra's sweep syntax: KEY=A,B,C, further keys after spaces; ValueError for any other text."""
    return [_parse_axis(text) for text in texts]


def _parse_axis(text: str) -> Axis:
    expected = f"sweep={text}: expected KEY=A,B,... with two values or more"
    try:
        overrides = OverridesParser.create().parse_overrides(text.split())
    except HydraException as error:
        raise ValueError(expected) from error
    keys = tuple(assignment.partition("=")[0] for assignment in text.split())
    if not keys or not all(keys) or not all(override.is_sweep_override() for override in overrides):
        raise ValueError(expected)
    return Axis(keys, tuple(tuple(map(str, override.sweep_string_iterator())) for override in overrides))


class _Points:
    """The points of a sweep; points with equal settings run once, even on different axes."""

    def __init__(self, study: Study, entry: str, root: Path, compose: Compose, console: Console) -> None:
        self._study, self._entry, self._root, self._compose, self._console = study, entry, root, compose, console
        self._names: dict[str, str] = {}  # name of the first point with given settings, by settings key
        self._studies: dict[str, Study] = {}  # studies of the points that run, by name
        self._points: dict[str, SweepPoint] = {}  # by name

    def run(self, axes: list[Axis]) -> Iterator[SweepPoint]:
        """Run all points, and yield their results axis by axis."""
        combinations = [(axis, values) for axis in axes for values in axis.combinations()]
        with points_of(self._study, len(combinations), self._entry, self._root) as running:
            names = [self._start(self._settings(*combination), running) for combination in combinations]
            outcomes = running.outcomes()
        for name, outcome in outcomes.items():
            self._points[name] = self._read(self._studies[name], outcome)
        for (axis, values), name in zip(combinations, names, strict=True):
            value, settings = as_value(", ".join(values)), self._settings(axis, values)
            yield replace(self._points[name], axis=axis.name, value=value, settings=settings)

    @staticmethod
    def _settings(axis: Axis, values: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(axis.keys, values, strict=True))

    def _start(self, settings: dict[str, str], running: ConcurrentPoints | SequentialPoints) -> str:
        """Start a point, or record why its settings are invalid; return the name of the point with these settings."""
        overrides = [f"{key}={value}" for key, value in settings.items()]
        point = ",".join(overrides)
        try:
            study = self._compose(*overrides)
        except Exception as mistake:  # all but user errors are raised again
            if not is_user_error(mistake):
                raise
            failure = f"{point}: {sentence(mistake)}"
            print_line(self._console, f"failed: {failure}")
            self._points[point] = SweepPoint("", "", "", None, failure)
            return point
        study = _of_point(self._study, study, overrides)
        name = self._names.setdefault(settings_key(asdict(study)), point)
        if name not in self._studies:
            self._studies[name] = study
            running.start(study, name)
        return name

    def _read(self, study: Study, outcome: PointOutcome) -> SweepPoint:
        """Read the results of a point; its summary is None where the run did not complete."""
        if not outcome.ran:
            return SweepPoint("", "", "", None, outcome.failure)
        run = study.output.run
        summary = (self._root / study.workload.kind / run / "summary.json").read_bytes()
        return SweepPoint("", "", run, orjson.loads(summary), outcome.failure)


def _check_any_completed(points: list[SweepPoint]) -> None:
    if all(point.summary is None for point in points):
        raise ValueError(f"no point of the sweep completed, the first error: {points[0].failure}")


def _write(
    points: list[SweepPoint], findings: list[Findings], tables: Sequence[Table], folder: RunFolder
) -> dict[str, Any]:
    """Write summary and tables of all points that ran, and return the summary."""
    summary = sweep_summary(points)
    for analysis_findings in findings:
        summary |= analysis_findings.summary
    write_before_report(summary, tables, folder)
    return summary


def _page(
    name: str,
    points: list[SweepPoint],
    tables: tuple[Table, ...],
    figures: list[Path],
    summary: dict[str, Any],
    folder: RunFolder,
) -> Page:
    workload = summary["workload"]
    return Page(
        title=f"{name}, swept",
        tables=tables,
        about=(
            f"first point: {workload['provenance']}: {workload['detail']}",
            f"{summary['model']}, seeds {summary['seeds']}",
        ),
        caveats=summary["caveats"],
        failed=failures(points),
        figures=figures,
        config=(folder.work / CONFIG).read_text(),
        facts=facts_of(summary),
    )


def _print(points: list[SweepPoint], findings: list[Findings]) -> None:
    with printed() as console:
        print_tables(rate_tables(points), console)
        for analysis_findings in findings:
            console.print()
            print_tables(analysis_findings.tables, console)
        console.print(Text("\n".join(failures(points)), style="dim"))


def _track(tables: Sequence[Table], folder: Path, tracker: Tracker) -> None:
    for table in tables:
        tracker.table(table.name, *faces.tracker_rows(table))
    tracker.figures(sorted(folder.glob("figures/*.png")))


def _draw(points: list[SweepPoint], findings: list[Findings], folder: Path) -> list[Path]:
    """Draw one figure per measure and those of the analyses, and return the PNG files."""
    figures: dict[str, Callable[[], Figure | None]] = {}
    for name, measure in FIGURES.items():
        figures[name] = partial(draw_sweep, points, measure)
    for analysis_findings in findings:
        figures |= analysis_findings.figures
    return draw_figures(figures, folder)


def sweep_summary(points: list[SweepPoint]) -> dict[str, Any]:
    """Contents of a sweep's `summary.json`: keys that all points share, every point, every row."""
    first = next(point.summary for point in points if point.summary is not None)
    shared = ("study", "workload", "model", "hardware", "timing", "backend", "engine", "store", "seeds")
    caveats = dict.fromkeys(caveat for point in points if point.summary for caveat in point.summary["caveats"])
    walls = {point.run: point.summary["wall_s"] for point in points if point.summary is not None}
    return {
        **{key: first[key] for key in shared},
        "caveats": list(caveats),
        "points": [_point_summary(point) for point in points],
        "rows": [asdict(row) for row in sweep_rows(points)],
        **provenance.run_facts(sum(walls.values())),
    }


def _point_summary(point: SweepPoint) -> dict[str, Any]:
    return {
        "axis": point.axis,
        "value": point.value,
        "settings": dict(point.settings),
        "workload": None if point.summary is None else point.summary["workload"]["kind"],
        "run": point.run,
        "failed": point.failure,
    }


def _raise_failures(points: list[SweepPoint]) -> None:
    failed = failures(points)
    if failed:
        counts = f"{len(failed)} of {len(points)} points failed, the others are reported"
        raise ValueError(f"{counts}: {'; '.join(failed)}")
