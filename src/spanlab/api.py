"""The Python API: run an entry, load a finished run, read its tables as polars frames.

The API neither prints nor exits. A user error is a ValueError with the sentence that the command
line prints. Terminal output goes to the logger `spanlab`.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import hydra
import polars as pl
from omegaconf import OmegaConf, open_dict

from spanlab import cli  # noqa: F401 - registers all entries and analyses
from spanlab.compiled import CONF
from spanlab.errors import is_user_error, sentence
from spanlab.records import Record, RunRow, ServedRecord, ServedRun
from spanlab.report.table import NAME as REPORT
from spanlab.settings.analyses import with_short_keys
from spanlab.settings.composition import as_settings, compose_run, register, without_sections
from spanlab.settings.study import Study
from spanlab.study.folder import CONFIG, UNFINISHED, UNFINISHED_REPORT, folder_name, read_summary
from spanlab.study.sweep import run_settings

#: Column types by the type annotation of a row's field; frames omit fields of other types, which
#: are nested.
_KINDS: dict[str, pl.DataType | type[pl.DataType]] = {
    "int": pl.Int64,
    "float": pl.Float64,
    "float | None": pl.Float64,
    "int | None": pl.Int64,
    "bool": pl.Boolean,
    "list[float]": pl.List(pl.Float64),
    "list[int]": pl.List(pl.Int64),
}
_log = logging.getLogger("spanlab")


@dataclass(frozen=True)
class Result:
    """A finished study or sweep; each property reads its part of the folder on first use.

    folder  the run folder
    """

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved settings."""
        settings: Any = OmegaConf.to_container(OmegaConf.load(self.folder / CONFIG))
        return dict(settings)

    @cached_property
    def details(self) -> dict[str, Any]:
        """All of `summary.json`: caveats, failed arms, intervals, provenance, commit, versions."""
        return read_summary(self.folder, "commit")

    @cached_property
    def tables(self) -> dict[str, pl.DataFrame]:
        """Every table by name, with times in seconds and rates as shares."""
        paths = sorted(self.folder.glob("tables/*.csv"))
        return {
            path.stem: pl.read_csv(path.read_bytes(), infer_schema_length=None) for path in paths
        }

    @property
    def summary(self) -> pl.DataFrame:
        """One row per arm; for a sweep per arm and point; with only the analysis `serving` per arm
        and load."""
        return self.tables[
            next(name for name in ("arms", "sweep", "serving") if name in self.tables)
        ]

    @cached_property
    def records(self) -> pl.DataFrame:
        """One row per finished request, with its arm; fields as in `spanlab.records.Record`, or
        ServedRecord."""
        return self._rows("records", ServedRecord if self._served else Record)

    @cached_property
    def runs(self) -> pl.DataFrame:
        """One row per arm, seed and load; fields as in `spanlab.records.RunRow`, or ServedRun,
        without nested ones."""
        return self._rows("runs", ServedRun if self._served else RunRow)

    @property
    def _served(self) -> bool:
        return bool(self.details.get("backend") == "server")

    @property
    def _arms(self) -> list[str]:
        """Names of the arms in the summary, or in the rows of the analysis `serving`."""
        return list(
            self.details.get("arms")
            or dict.fromkeys(row["arm"] for row in self.details.get("serving", ()))
        )

    def _rows(self, kind: str, row: type[Any]) -> pl.DataFrame:
        paths = [self.folder / kind / f"{arm}.jsonl" for arm in self._arms]
        if not paths:
            raise ValueError(
                f"{kind} of {self.folder}: expected a study; a sweep has those of its points"
            )
        schema = {
            field.name: _KINDS[str(field.type)] for field in fields(row) if field.type in _KINDS
        }
        frames = [
            pl.read_ndjson(path.read_bytes(), schema=schema).select(
                pl.lit(path.stem).alias("arm"), pl.all()
            )
            for path in paths
        ]
        return pl.concat(frames)

    @cached_property
    def figures(self) -> dict[str, Path]:
        """The PNG file of each figure, by name."""
        return {path.stem: path for path in sorted(self.folder.glob("figures/*.png"))}

    @property
    def report(self) -> Path:
        """The report of the run, one HTML file; ValueError where the run was stopped before it was
        written."""
        if self.details.get("report") == UNFINISHED:
            raise ValueError(f"{self.folder} {UNFINISHED_REPORT}")
        return self.folder / REPORT


def run(entry: str, *overrides: str) -> Result:
    """Run an entry that is a study, as `bash runall.sh -cn ENTRY OVERRIDES` does, and load its run
    folder.

    Raises ValueError for a user error, and if arms failed; the study can then still be loaded.
    """
    register()
    initialized = hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF))
    with _user_errors_as_values(), _logged(), initialized:
        config = compose_run(entry, list(overrides))
        changed = without_sections(config.hydra.job.override_dirname)
        tasks = list(config.hydra.overrides.task)
        with open_dict(config):
            del config["hydra"]
        study = as_settings(config)
        if not isinstance(study, Study):
            raise ValueError(
                f"entry={entry}: expected a study or a sweep; others run from the command line"
            )
        # the name that the command line gives the run
        study.output.run = study.output.run or folder_name(",".join(filter(None, (entry, changed))))
        return Result(run_settings(study, entry, tasks, show=False))


def load(folder: str | Path) -> Result:
    """Load the finished run in a folder; ValueError if there is none."""
    path = Path(folder).resolve()
    if not (path / "summary.json").is_file():
        raise ValueError(
            f"folder={folder}: expected the folder of a finished run, with config.yaml and summary.json"
        )
    return Result(path)


@contextmanager
def _user_errors_as_values() -> Iterator[None]:
    """Raise user errors as a ValueError with one sentence; other errors pass unchanged."""
    try:
        yield
    except Exception as mistake:  # all but user errors are raised again
        if not is_user_error(mistake):
            raise
        raise ValueError(with_short_keys(sentence(mistake))) from mistake


@contextmanager
def _logged() -> Iterator[None]:
    """Log each line that the block prints."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            _log.info("%s", line)
