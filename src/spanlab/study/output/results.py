"""Results of a finished run: summary and tables in its folder, figures, and tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console

from spanlab.report import faces
from spanlab.report.console import print_tables
from spanlab.report.tables import Table
from spanlab.study.output.arm_files import replace_file
from spanlab.study.output.config import settings_yaml
from spanlab.study.output.folder import REPORT, SUMMARY, UNFINISHED, RunFolder
from spanlab.study.progress import print_line
from spanlab.terminal import printed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def entry_folder(settings: Any, name: str, run: str, root: Path) -> RunFolder:
    """Return the run folder of an entry that is no study; it is in the folder `name` of all its runs."""
    return RunFolder(*entry_names(settings, name, run, root))


def entry_names(settings: Any, name: str, run: str, root: Path) -> tuple[Path, str, str, str, str]:
    """Return the arguments of `RunFolder`, and of the check of its names, for an entry that is no study."""
    return root, name, run, settings.output.if_exists, settings_yaml(asdict(settings))


def read_summary(folder: Path, *keys: str) -> dict[str, Any]:
    """Read `summary.json`; ValueError with its path where it is no JSON object or lacks one of the keys, as A.B."""
    path = folder / SUMMARY
    try:
        summary: Any = orjson.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: expected the summary of a finished run: {error}") from error
    if not isinstance(summary, dict):
        raise ValueError(f"{path}: expected the summary of a finished run, an object with {', '.join(keys)}")
    check_keys(path, summary, keys)
    return summary


def check_keys(path: Path, contents: Any, keys: Iterable[str]) -> None:
    """Raise ValueError where one of the keys, as A.B, is missing in nested objects that were read from a file."""
    for key in keys:
        value = contents
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                raise ValueError(f"{path}: no {key}; expected the folder of a run that this version finished")
            value = value[name]


def write_results(summary: dict[str, Any], tables: Sequence[Table], folder: Path) -> None:
    """Write `summary.json` and all tables into a folder."""
    _write_summary(summary, folder)
    faces.write(tables, folder)


def write_before_report(summary: dict[str, Any], tables: Sequence[Table], folder: RunFolder) -> None:
    """Write summary and tables of a run whose figures and report follow; from here on, an error publishes it.

    Until `finish_report`, the summary has the key `report` with the value `unfinished`.
    """
    write_results(summary | {REPORT: UNFINISHED}, tables, folder.work)
    folder.complete()


def finish_report(summary: dict[str, Any], folder: RunFolder) -> None:
    """Publish a run whose figures and report are written, with its final summary."""
    _write_summary(summary, folder.work)
    folder.finish()


def _write_summary(summary: dict[str, Any], folder: Path) -> None:
    text = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    replace_file(folder / SUMMARY, text)


def draw_figures(draws: Mapping[str, Callable[[], Figure | None]], folder: Path) -> list[Path]:
    """Draw every figure in this process, and return the PNG files; `draws` has functions by file name."""
    from spanlab.report.drawing.write import write_figure  # loads matplotlib, half a second

    files = [path for name, draw in draws.items() for path in write_figure(draw, folder / name)]
    return [path for path in files if path.suffix == ".png"]


def publish(folder: RunFolder, tables: Sequence[Table]) -> None:
    """Replace the old run of an entry by the new one, and print tables and the path."""
    folder.finish()
    with printed() as console:
        print_tables(tables, console)
    print_line(Console(stderr=True), str(folder.path))
