"""Sweeps: the points of a study, in parallel lanes, and their common report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from spanlab.build import build_workload, copy_pipe
from spanlab.compiled import HOME
from spanlab.errors import is_user_error, sentence
from spanlab.provenance import run_facts
from spanlab.registry import entry_of
from spanlab.report.sweep import (
    SweepPoint,
    as_value,
    draw_sweep,
    failures,
    rate_tables,
    sweep_rows,
    sweep_tables,
)
from spanlab.report.table import Page, Table, facts_of, print_tables, tracker_rows, write_page
from spanlab.settings.analyses import ANALYSES
from spanlab.settings.composition import as_settings, compose_entry
from spanlab.settings.server import ExecutorSettings
from spanlab.settings.study import Study, worker_count
from spanlab.study.bounds import ArmsFailedError, BarMissedError
from spanlab.study.executor import KILLED, ProcessKilledError, executor
from spanlab.study.folder import (
    CONFIG,
    GROWING,
    RunFolder,
    check_names,
    draw_figures,
    finish_report,
    folder_name,
    print_line,
    printed,
    settings_key,
    settings_yaml,
    write_before_report,
)
from spanlab.study.jobs import run_cells
from spanlab.study.machine import installed
from spanlab.study.prepare import LoadFunction, load_workload
from spanlab.study.run import Host, folder_names, run_study
from spanlab.tracking import check_login, tracked
from spanlab.workloads.load import WorkloadSettings
from spanlab.workloads.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Lanes that run points of a sweep concurrently, where a study has fewer arms than there are
# cores.
# ------------------------------------------------------------------------------


class LastWorkload:
    """`build_workload` with a cache of the last result."""

    def __init__(self) -> None:
        self._last_arguments: Any = None
        self._last: Workload | None = None

    def __call__(self, settings: WorkloadSettings, cache_dir: str, serves: bool = True) -> Workload:
        """Return the workload of these settings."""
        arguments = asdict(settings), cache_dir, serves
        if self._last is None or arguments != self._last_arguments:
            self._last = None  # else both would be in memory
            self._last_arguments = arguments
            self._last = build_workload(settings, cache_dir, serves)
        return self._last


@dataclass(frozen=True)
class Lane:
    """Runs points one after another, and loads a workload that consecutive points share once.

    `concurrent`  other lanes run at the same time: progress bars would overwrite one another
    """

    name: str
    root: Path
    concurrent: bool

    @cached_property
    def _host(self) -> Host:
        console = Console(stderr=True, force_terminal=False if self.concurrent else None)
        return Host(LastWorkload(), console)

    def run(self, study: Study, point: str) -> SweepPoint:
        """Run the study of a point and return its results; `point` is its name in messages."""
        failure, run = "", study.output.run
        try:
            run_study(study, self.name, self.root, show=False, host=self._host)
        except (ArmsFailedError, BarMissedError) as error:
            failure = f"{point}: {error}"  # the run folder is complete
        except Exception as mistake:  # all but user errors are raised again
            if not is_user_error(mistake):
                raise
            failure = f"{point}: {sentence(mistake)}"
            print_line(self._host.console, f"failed: {failure}")
            return _failed(failure)
        summary = (self.root / study.workload.kind / run / "summary.json").read_bytes()
        return SweepPoint("", "", run, orjson.loads(summary), failure)

    def run_here(self, study: Study, point: str) -> SweepPoint:
        """Run the study of a point with all its arms in this process."""
        study.executor, study.executor.workers = ExecutorSettings("here"), None
        return self.run(study, point)


def _failed(failure: str) -> SweepPoint:
    """A point whose run did not complete."""
    return SweepPoint("", "", "", None, failure)


def _finished(point: SweepPoint) -> Future[SweepPoint]:
    future = Future[SweepPoint]()
    future.set_result(point)
    return future


StartPoint = Callable[[Study, str], Future[SweepPoint]]


@contextmanager
def lanes_of(study: Study, count: int, name: str, root: Path) -> Iterator[StartPoint]:
    """Yield a function that starts one of `count` points of a study, by its name in messages.

    Points run concurrently where the arms of one point would leave cores idle.
    """
    arms = max(1, len(study.chosen()))
    lanes = 1 if study.executor.kind == "dask" else worker_count(study, count * arms) // arms
    if lanes > 1:
        lane = Lane(name, root, concurrent=True)
        with executor(ExecutorSettings(), lane, lanes, study.plugins) as pool:
            yield lambda study, point: pool.submit(Lane.run_here, study, point)
        return
    lane = Lane(name, root, concurrent=False)
    yield lambda study, point: _finished(lane.run(study, point))


# ------------------------------------------------------------------------------
# A sweep: one study at several values of some settings, axis by axis.
#
# An axis varies one setting, or runs every combination of several. Every point is an ordinary run
# in a separate folder,
# `<run>,<key>=<value>`.
# ------------------------------------------------------------------------------

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


Compose = Callable[..., Study]  # returns the study with further overrides


def run_sweep(study: Study, name: str, root: Path, compose: Compose) -> Path:
    """Run every point, write table, CSV and figures, and return the folder.

    `name`  name of the entry
    `root`  folder of all outputs

    Other points continue after a failure. The ValueError at the end names every point that failed.
    """
    axes, run, config = parse_axes(study.runs.sweep), study.output.run, asdict(study)
    check_login(study.tracking)
    copy_pipe(study.workload)
    console = Console(stderr=True)
    with RunFolder(*sweep_names(study, root)) as folder:
        points = list(run_points(study, name, root, compose, axes))
        ran = [point for point in points if point.summary is not None]
        if not ran:
            first = points[0].failure
            raise ValueError(f"no point of the sweep completed, the first error: {first}")
        functions = [ANALYSES[name].of_points for name in study.chosen_analyses()]
        findings = [of_points(ran) for of_points in functions if of_points is not None]
        tables = (
            *sweep_tables(points),
            *(table for analysis_findings in findings for table in analysis_findings.every_table),
        )
        summary = sweep_summary(points)
        for analysis_findings in findings:
            summary |= analysis_findings.summary
        write_before_report(summary, tables, folder)
        figures = []
        if study.output.figures:
            drawn: dict[str, Callable[[], Figure | None]] = {
                name: partial(draw_sweep, points, measure) for name, measure in FIGURES.items()
            }
            for analysis_findings in findings:
                drawn |= analysis_findings.figures
            figures = draw_figures(drawn, folder.work / "figures")
        write_page(_page(name, points, tables, figures, summary, folder), folder.work)
        finish_report(summary, folder)
        with printed() as terminal:
            print_tables(rate_tables(points), terminal)
            for analysis_findings in findings:
                terminal.print()
                print_tables(analysis_findings.tables, terminal)
            terminal.print(Text("\n".join(failures(points)), style="dim"))
        with tracked(study.tracking, run, name, config, folder.path) as tracker:
            for table in tables:
                tracker.table(table.name, *tracker_rows(table))
            tracker.figures(sorted(folder.path.glob("figures/*.png")))
    print_line(console, str(folder.path))
    if failed := failures(points):
        counts = f"{len(failed)} of {len(points)} points failed, the others are reported"
        raise ValueError(f"{counts}: {'; '.join(failed)}")
    return folder.path


def sweep_names(study: Study, root: Path) -> tuple[Any, ...]:
    """Return the arguments of `RunFolder`, and of the check of its names, for a sweep."""
    config = settings_yaml(asdict(study))
    return root, study.workload.kind, study.output.run, study.output.if_exists, config, GROWING


def points_of_sweep(study: Study, compose: Compose) -> Iterator[tuple[str, Study]]:
    """Yield name and study of each point, equal settings once; ValueError for the first that cannot
    be composed."""
    known = set()
    for axis in parse_axes(study.runs.sweep):
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
        raise ValueError(f"sweep={study.runs.sweep}: {point}: {sentence(mistake)}") from mistake


def _of_point(study: Study, point: Study, overrides: Sequence[str]) -> Study:
    """Return the study of a point with its own run folder."""
    run = folder_name(",".join([study.output.run, *overrides]))
    point.output = replace(study.output, run=run, figures=False)
    return point


def parse_axes(texts: list[str]) -> list[Axis]:
    """Parse axes in Hydra's sweep syntax: KEY=A,B,C, further keys after spaces; ValueError for any
    other text."""
    axes = []
    for text in texts:
        expected = f"sweep={text}: expected KEY=A,B,... with two values or more"
        try:
            overrides = OverridesParser.create().parse_overrides(text.split())
        except HydraException as error:
            raise ValueError(expected) from error
        keys = tuple(assignment.partition("=")[0] for assignment in text.split())
        if (
            not keys
            or not all(keys)
            or not all(override.is_sweep_override() for override in overrides)
        ):
            raise ValueError(expected)
        values = (tuple(map(str, override.sweep_string_iterator())) for override in overrides)
        axes.append(Axis(keys, tuple(values)))
    return axes


def run_points(
    study: Study, name: str, root: Path, compose: Compose, axes: Sequence[Axis]
) -> Iterator[SweepPoint]:
    """Run all points, and yield their results axis by axis.

    Points with equal settings run once, even on different axes.
    """
    combinations = [(axis, values) for axis in axes for values in axis.combinations()]
    known: dict[str, tuple[str, Future[SweepPoint]]] = {}  # name and run of a point, by settings
    runs: list[tuple[str, Future[SweepPoint]]] = []
    with lanes_of(study, len(combinations), name, root) as start:
        for axis, values in combinations:
            overrides = [f"{key}={value}" for key, value in zip(axis.keys, values, strict=True)]
            point = ",".join(overrides)
            try:
                swept = _of_point(study, compose(*overrides), overrides)
            except Exception as mistake:  # all but user errors are raised again
                if not is_user_error(mistake):
                    raise
                failure = f"{point}: {sentence(mistake)}"
                print_line(Console(stderr=True), f"failed: {failure}")
                runs.append((point, _finished(_failed(failure))))
                continue
            key = settings_key(asdict(swept))
            if key not in known:
                known[key] = point, start(swept, point)
            runs.append(known[key])
        results = []
        for point, run in runs:
            try:
                results.append(run.result())
            except ProcessKilledError:
                results.append(_failed(f"{point}: its process {KILLED}"))
    for (axis, values), result in zip(combinations, results, strict=True):
        settings = dict(zip(axis.keys, values, strict=True))
        value = as_value(", ".join(values))
        yield replace(result, axis=axis.name, value=value, settings=settings)


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


def sweep_summary(points: list[SweepPoint]) -> dict[str, Any]:
    """Contents of a sweep's `summary.json`: keys that all points share, every point, every row."""
    shared = [
        "study",
        "workload",
        "model",
        "hardware",
        "timing",
        "backend",
        "engine",
        "store",
        "seeds",
    ]
    ran = [(point.run, point.summary) for point in points if point.summary is not None]
    caveats = dict.fromkeys(caveat for _, summary in ran for caveat in summary["caveats"])
    walls = {run: summary["wall_s"] for run, summary in ran}
    return {
        **{key: ran[0][1][key] for key in shared},
        "caveats": list(caveats),
        "points": [
            {
                "axis": point.axis,
                "value": point.value,
                "settings": dict(point.settings),
                "workload": None if point.summary is None else point.summary["workload"]["kind"],
                "run": point.run,
                "failed": point.failure,
            }
            for point in points
        ],
        "rows": [asdict(row) for row in sweep_rows(points)],
        **run_facts(sum(walls.values())),
    }


# ------------------------------------------------------------------------------
# A study or a sweep from its settings, and the settings of a sweep's points.
# ------------------------------------------------------------------------------


def run_settings(study: Study, entry: str, overrides: Sequence[str], show: bool = True) -> Path:
    """Run a study or a sweep, and return its folder; Hydra has to be initialized, for the points of
    a sweep.

    `overrides`  overrides of the command line, which the points of a sweep have too
    `show`       print the tables of a study
    """
    root = HOME / study.output.root  # an absolute root replaces HOME
    if study.runs.sweep:
        return run_sweep(study, entry, root, PointComposer(entry, overrides, as_settings))
    return run_study(study, entry, root, show)


class PointComposer:
    """Composes an entry with further overrides, as the command line does.

    `overrides`  overrides of the command line; a point's override of the same key replaces them
    `make`       function that converts a composed config to checked settings
    """

    def __init__(
        self, entry: str, overrides: Sequence[str], make: Callable[[DictConfig], Any]
    ) -> None:
        self._entry, self._overrides, self._make = entry, overrides, make

    def __call__(self, *point_overrides: str) -> Any:
        """Return the settings with these overrides, each KEY=VALUE."""
        keys = tuple(f"{override.partition('=')[0]}=" for override in point_overrides)
        remaining = [override for override in self._overrides if not override.startswith(keys)]
        return self._make(compose_entry(self._entry, [*remaining, *point_overrides, "sweep=[]"]))


# ------------------------------------------------------------------------------
# Dry run: all checks before a run that need no device and no package of the engine; nothing
# is written.
# ------------------------------------------------------------------------------


def check_entry(settings: object, entry: str, run: str, root: Path) -> str:
    """Check an entry that is no study, and say so in one line; `root` is the folder of outputs."""
    check = entry_of(settings).check
    if check is not None:
        check(settings, root)
    return f"{entry}: the settings are valid"


def describe_run(study: Study, name: str, root: Path, compose: Compose) -> str:
    """Describe the study's arms, runs and requests, one line each; ValueError where a check fails.

    `compose`  returns the study with further overrides, for the points of a sweep
    """
    if study.tracking.kind == "wandb" and installed("wandb"):
        check_login(study.tracking)
    load, quiet = LastWorkload(), Console(quiet=True)
    if study.runs.sweep:
        check_names(*sweep_names(study, root))
        sizes = []
        for point, swept in points_of_sweep(study, compose):
            with named_point(study, point):
                sizes.append(_requests(swept, name, root, quiet, load))
    else:
        sizes = [_requests(study, name, root, Console(stderr=True), load)]
    arms, runs = study.chosen(), sum(len(run_cells(study, arm)) for arm in study.chosen())
    return "\n".join(
        [
            f"entry     {name}, backend={study.backend}",
            f"arms      {len(arms)}: {', '.join(arms)}",
            f"runs      {runs}: arms x seeds, plus the load sweep",
            f"requests  {sizes[0]} per run, {runs * sizes[0]} in total",
            *(f"sweep     {point}" for point in study.runs.sweep),
        ]
    )


def _requests(study: Study, name: str, root: Path, console: Console, load: LoadFunction) -> int:
    """Check a study with its workload and the names of its run, and return the requests of a
    run."""
    workload = load_workload(study, name, root, console, load)
    check_names(*folder_names(study, name, root, workload))
    return study.workload.popularity.requests or workload.size
