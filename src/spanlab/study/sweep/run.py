"""A sweep: one study at several values of some settings, axis by axis.

An axis varies one setting, or runs every combination of several. Every point is an ordinary run with a folder of its
own, `<run>,<key>=<value>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import orjson
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from rich.console import Console
from rich.text import Text

from spanlab.errors import USER_ERRORS
from spanlab.report import faces
from spanlab.report.console import print_tables
from spanlab.report.page import Page, facts_of, write_page
from spanlab.report.sweep.data import SweepPoint, as_value, sweep_rows
from spanlab.report.sweep.table import failures, rate_tables, sweep_tables
from spanlab.report.tables import Table
from spanlab.settings import Study
from spanlab.settings.analyses import OF_POINTS
from spanlab.study.findings import Findings
from spanlab.study.output import provenance
from spanlab.study.output.config import GROWING, settings_key, settings_yaml
from spanlab.study.output.folder import CONFIG, RunFolder, folder_name
from spanlab.study.progress import say
from spanlab.study.sweep.lanes import Ended, Points, PointsInTurn, points_of
from spanlab.terminal import printed
from spanlab.tracking import Tracker, check_login, tracked

FIGURES = {"sweep_tokens": "token_hit_rate", "sweep_ttft": "ttft_mean_s"}


@dataclass(frozen=True)
class Axis:
    """Swept settings: their keys, and the values of each as they are written on the command line."""

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    @property
    def name(self) -> str:
        """The keys as one text."""
        return " ".join(self.keys)

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """One value per key, the last key varying fastest."""
        return product(*self.values)


@dataclass(frozen=True)
class Entry:
    """An entry of conf/ as the command line set it.

    `compose`  the study with further overrides
    `explain`  a mistake as one sentence
    """

    name: str
    compose: Callable[..., Study]
    explain: Callable[[BaseException], str]


def run_sweep(study: Study, entry: Entry, root: Path) -> Path:
    """Run every point, then write table, CSV and figures; returns the folder.

    A point that fails stops no other. ValueError at the end names every point that failed.
    """
    axes, run, config = parse_axes(study.sweep), study.output.run, asdict(study)
    check_login(study.tracking)
    console = Console(stderr=True)
    with RunFolder(root, study.workload.kind, run, study.output.if_exists, settings_yaml(config), GROWING) as folder:
        points = list(_Points(study, entry, root, console).run(axes))
        _refuse_empty(points)
        found = [OF_POINTS[name](points) for name in study.chosen_analyses() if name in OF_POINTS]
        tables = (*sweep_tables(points), *(table for one in found for table in one.every_table))
        summary = _write(points, found, tables, folder)
        figures = _draw(points, found, folder.work / "figures") if study.output.figures else []
        write_page(_page(entry.name, points, tables, figures, summary, folder), folder.work)
        folder.finish()
        _print(points, found)
        with tracked(study.tracking, run, entry.name, config, folder.path) as tracker:
            _track(tables, folder.path, tracker)
    say(console, str(folder.path))
    _raise_failures(points)
    return folder.path


def parse_axes(given: list[str]) -> list[Axis]:
    """The axes in Hydra's syntax of sweeps, KEY=A,B,C, more keys after spaces; ValueError for anything else."""
    return [_parse_axis(text) for text in given]


def _parse_axis(text: str) -> Axis:
    expected = f"sweep={text}: expected KEY=A,B,... with two values or more"
    try:
        overrides = OverridesParser.create().parse_overrides(text.split())
    except HydraException as error:
        raise ValueError(expected) from error
    keys = tuple(part.partition("=")[0] for part in text.split())
    if not keys or not all(keys) or not all(override.is_sweep_override() for override in overrides):
        raise ValueError(expected)
    return Axis(keys, tuple(tuple(map(str, override.sweep_string_iterator())) for override in overrides))


class _Points:
    """The points of a sweep; equal settings are run once, whichever axes they lie on."""

    def __init__(self, study: Study, entry: Entry, root: Path, console: Console) -> None:
        self._study, self._entry, self._root, self._console = study, entry, root, console
        self._names: dict[str, str] = {}  # of the first point with some settings, by these
        self._studies: dict[str, Study] = {}  # of the points that are run, by name
        self._points: dict[str, SweepPoint] = {}  # by name

    def run(self, axes: list[Axis]) -> Iterator[SweepPoint]:
        """Run the points, and yield them axis by axis."""
        asked = [(axis, values) for axis in axes for values in axis.combinations()]
        with points_of(self._study, len(asked), self._entry.name, self._root, self._entry.explain) as running:
            named = [self._start(self._set(*one), running) for one in asked]
            ends = running.ends()
        for name, how in ends.items():
            self._points[name] = self._read(self._studies[name], how)
        for (axis, values), name in zip(asked, named, strict=True):
            value, settings = as_value(", ".join(values)), self._set(axis, values)
            yield replace(self._points[name], axis=axis.name, value=value, settings=settings)

    @staticmethod
    def _set(axis: Axis, values: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(axis.keys, values, strict=True))

    def _start(self, settings: dict[str, str], running: Points | PointsInTurn) -> str:
        """Let a point run, or note why it cannot; returns the name of the point that runs these settings."""
        overrides = [f"{key}={value}" for key, value in settings.items()]
        point = ",".join(overrides)
        try:
            study = self._entry.compose(*overrides)
        except USER_ERRORS as mistake:
            words = f"{point}: {self._entry.explain(mistake)}"
            say(self._console, f"failed: {words}")
            self._points[point] = SweepPoint("", "", "", None, words)
            return point
        run = folder_name(",".join([self._study.output.run, *overrides]))
        study.output = replace(self._study.output, run=run, figures=False)
        name = self._names.setdefault(settings_key(asdict(study)), point)
        if name not in self._studies:
            self._studies[name] = study
            running.start(study, name)
        return name

    def _read(self, study: Study, ended: Ended) -> SweepPoint:
        """A point with its results, where it has some."""
        if not ended.ran:
            return SweepPoint("", "", "", None, ended.failure)
        run = study.output.run
        summary = (self._root / study.workload.kind / run / "summary.json").read_bytes()
        return SweepPoint("", "", run, orjson.loads(summary), ended.failure)


def _refuse_empty(points: list[SweepPoint]) -> None:
    if all(point.summary is None for point in points):
        raise ValueError(f"no point of the sweep ran to its end, the first for this: {points[0].failure}")


def _write(
    points: list[SweepPoint], found: list[Findings], tables: Sequence[Table], folder: RunFolder
) -> dict[str, Any]:
    """Write summary and tables of all points that ran; returns the summary."""
    summary = sweep_summary(points)
    for one in found:
        summary |= one.summary
    (folder.work / "summary.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
    faces.write(tables, folder.work)
    folder.complete()
    return summary


def _page(
    name: str,
    points: list[SweepPoint],
    tables: tuple[Table, ...],
    figures: list[Path],
    summary: dict[str, Any],
    folder: RunFolder,
) -> Page:
    told = summary["workload"]
    return Page(
        title=f"{name}, swept",
        tables=tables,
        about=(f"first point: {told['provenance']}: {told['detail']}", f"{summary['model']}, seeds {summary['seeds']}"),
        caveats=summary["caveats"],
        failed=failures(points),
        figures=figures,
        config=(folder.work / CONFIG).read_text(),
        facts=facts_of(summary),
    )


def _print(points: list[SweepPoint], found: list[Findings]) -> None:
    with printed() as console:
        print_tables(rate_tables(points), console)
        for one in found:
            console.print()
            print_tables(one.tables, console)
        console.print(Text("\n".join(failures(points)), style="dim"))


def _track(tables: Sequence[Table], folder: Path, tracker: Tracker) -> None:
    for table in tables:
        tracker.table(table.name, *faces.tracker_rows(table))
    tracker.figures(sorted(folder.glob("figures/*.png")))


def _draw(points: list[SweepPoint], found: list[Findings], folder: Path) -> list[Path]:
    """Every figure; returns the PNG files."""
    from spanlab.report.drawing.write import write_figure  # matplotlib: half a second that only drawing needs

    own = [(name, draw) for one in found for name, draw in one.figures.items()]
    files = [path for name, draw in own for path in write_figure(draw, folder / name)]
    return draw_figures(points, folder) + [path for path in files if path.suffix == ".png"]


def draw_figures(points: list[SweepPoint], folder: Path) -> list[Path]:
    """One figure per measure; returns the PNG files."""
    from spanlab.report.drawing.write import write_figure
    from spanlab.report.sweep.figure import draw_sweep  # matplotlib: half a second that only drawing needs

    files = [
        path
        for name, measure in FIGURES.items()
        for path in write_figure(partial(draw_sweep, points, measure), folder / name)
    ]
    return [path for path in files if path.suffix == ".png"]


def sweep_summary(points: list[SweepPoint]) -> dict[str, Any]:
    """What `summary.json` of a sweep holds: what all points share, every point, every row."""
    first = next(point.summary for point in points if point.summary is not None)
    shared = ("study", "workload", "model", "hardware", "timing", "backend", "engine", "store", "seeds")
    caveats = dict.fromkeys(words for point in points if point.summary for words in point.summary["caveats"])
    walls = {point.run: point.summary["wall_s"] for point in points if point.summary is not None}
    return {
        **{key: first[key] for key in shared},
        "caveats": list(caveats),
        "points": [_of_point(point) for point in points],
        "rows": [asdict(row) for row in sweep_rows(points)],
        **provenance.run_facts(sum(walls.values())),
    }


def _of_point(point: SweepPoint) -> dict[str, Any]:
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
        counted = f"{len(failed)} of {len(points)} points failed, the others are reported"
        raise ValueError(f"{counted}: {'; '.join(failed)}")
