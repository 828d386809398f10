"""Small studies, run in this or in a new process, and their files."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spanlab.analyses import fit_profile
from spanlab.cli import compose
from spanlab.report.sweep import SweepPoint
from spanlab.study import executor
from spanlab.study.run import run_study

from ..support.script import SCRIPT

QUIET = ("output.figures=false", "tracking.kind=none", "analyses=[summary]")
NO_LOAD = ("load.rates_rps=[]", "load.arms=[]")
INCIDENTAL = ("wall_s", "commit", "versions")
HOLD = """
import time
from pathlib import Path
from spanlab.study import backends

class Held(backends.Simulator):
    def run(self, job, write):
        while job.steps.name.partition("-")[0] not in {free} and not Path({go!r}).exists():
            time.sleep(0.01)
        return super().run(job, write)

backends.BACKENDS["sim"] = Held
"""


@pytest.fixture(autouse=True)
def any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles are kept, however busy the machine of the tests is."""
    monkeypatch.setattr(fit_profile, "CROSS_VALIDATION_LIMIT", float("inf"))


def run(root: Path, entry: str, *overrides: str) -> Path:
    """Run a study in this process; returns its folder."""
    return run_study(compose(entry, [*QUIET, *overrides]), entry, root)


def files(folder: Path) -> dict[str, bytes]:
    """Record and runs files by name."""
    paths = [*folder.glob("records/*.jsonl"), *folder.glob("runs/*.jsonl")]
    return {f"{path.parent.name}/{path.stem}": path.read_bytes() for path in sorted(paths)}


def summary(folder: Path) -> dict[str, Any]:
    """The summary without what differs between two runs of the same settings."""
    summary = json.loads((folder / "summary.json").read_bytes())
    return {key: value for key, value in summary.items() if key not in INCIDENTAL}


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def start(root: Path, entry: str, *overrides: str, **options: Any) -> subprocess.Popen[str]:
    """Start a study as the head of a process group of its own."""
    return subprocess.Popen(
        [SCRIPT, "-cn", entry, *QUIET, f"output.root={root}", *overrides],
        start_new_session=True,
        **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True} | options,
    )


def hold(folder: Path, *free: str) -> dict[str, str]:
    """An environment in which arms that are not `free` wait until the file `go` is in the folder."""
    (folder / "sitecustomize.py").write_text(HOLD.format(free=free, go=str(folder / "go")))
    paths = (str(folder), os.environ.get("PYTHONPATH"))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture
def run_here() -> Callable[..., Path]:
    """`run`."""
    return run


@pytest.fixture
def files_of() -> Callable[[Path], dict[str, bytes]]:
    """`files`."""
    return files


@pytest.fixture
def summary_of() -> Callable[[Path], dict[str, Any]]:
    """`summary`."""
    return summary


@pytest.fixture
def rows_of() -> Callable[[Path], list[dict[str, Any]]]:
    """`rows`."""
    return rows


@pytest.fixture
def paused(tmp_path_factory) -> tuple[Path, Callable[..., dict[str, str]]]:
    """A folder for the file `go`, and `hold` for that folder."""
    folder = tmp_path_factory.mktemp("held")
    return folder, lambda *free: hold(folder, *free)


@pytest.fixture
def started() -> Callable[..., subprocess.Popen[str]]:
    """`start`."""
    return start


@pytest.fixture
def simulating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh processes import no engine, whatever other tests have imported here."""
    of_engine = ("spanlab.engine", "spanlab.dense_retrieval", "spanlab_kernels")
    modules = {name: module for name, module in sys.modules.items() if not name.startswith(of_engine)}
    monkeypatch.setattr(executor, "sys", SimpleNamespace(**vars(sys) | {"modules": modules}))


@pytest.fixture(scope="session")
def read_points() -> Callable[[Path], list[SweepPoint]]:
    """The points of a finished sweep, from its folder and the runs beside it."""

    def read(folder: Path) -> list[SweepPoint]:
        points = json.loads((folder / "summary.json").read_bytes())["points"]
        return [_read_point(folder.parents[1], point) for point in points]

    return read


def _read_point(root: Path, point: dict[str, Any]) -> SweepPoint:
    path = root / str(point["workload"]) / point["run"] / "summary.json"
    summary = json.loads(path.read_bytes()) if point["run"] else None
    return SweepPoint(point["axis"], point["value"], point["run"], summary, point["failed"], point["settings"])
