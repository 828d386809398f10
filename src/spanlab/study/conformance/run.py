"""Run the entry `conformance`: one verdict per property, a table, a summary."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
import torch
from rich.console import Console

from spanlab.engine.load import load_model, read_config
from spanlab.engine.supported import check_support, require_exact
from spanlab.report import faces
from spanlab.report.console import print_tables
from spanlab.report.tables import MISSING, Cell, Column, Table
from spanlab.report.units import significant
from spanlab.settings.conformance import PROPERTIES, Conformance
from spanlab.study.conformance.subject import Subject
from spanlab.study.conformance.verdicts import FAILED, Verdict, refused, supported
from spanlab.study.output import provenance
from spanlab.study.output.config import settings_yaml
from spanlab.study.output.folder import RunFolder
from spanlab.study.progress import print_line
from spanlab.terminal import printed

FOLDER = "conformance"
_COLUMNS = (
    Column("property", "property", left=True),
    Column("verdict", "verdict", left=True),
    *(Column("measured", "measured"), Column("limit", "limit")),
    Column("what", "what", keep=1, left=True),
)


def run_conformance(settings: Conformance, run: str, root: Path) -> bool:
    """Check all properties, write a run folder and print the table; return whether no property failed."""
    started = time.perf_counter()
    config = settings_yaml(asdict(settings))
    with RunFolder(root, FOLDER, run, settings.output.if_exists, config) as folder:
        verdicts = list(_judge_model(settings))
        (folder.work / "summary.json").write_bytes(orjson.dumps(_summary(settings, verdicts, started), option=_INDENT))
        table = verdict_table(settings.model.name, verdicts)
        faces.write([table], folder.work)
        folder.finish()
    with printed() as console:
        print_tables([table], console)
    print_line(Console(stderr=True), str(folder.path))
    return all(verdict.verdict != FAILED for verdict in verdicts)


_INDENT = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


def _judge_model(settings: Conformance) -> Iterator[Verdict]:
    """Yield all verdicts in order; for a model that fails the support check, only that verdict."""
    name = settings.engine.name or settings.model.name
    layers = check_support(read_config(settings.engine, name))
    try:
        require_exact(name, layers)
    except ValueError as error:
        yield refused(str(error))
        return
    yield supported(len(layers))
    yield from judged(Subject(load_model(settings.engine, settings.model), settings))


def judged(subject: Subject) -> Iterator[Verdict]:
    """Yield the verdict on each chosen property of a loaded model."""
    for name in subject.settings.chosen:
        yield Verdict.of(name, PROPERTIES[name](subject=subject))


def verdict_table(model: str, verdicts: Sequence[Verdict]) -> Table:
    """One row per property."""
    rows = [
        (Cell(verdict.name, verdict.name), Cell(verdict.verdict, verdict.verdict),
         _number(verdict.measured), _number(verdict.limit), Cell(verdict.what, verdict.what))
        for verdict in verdicts
    ]  # fmt: skip
    return Table("properties", f"Conformance of {model}", _COLUMNS, tuple(rows))


def _number(value: float | None) -> Cell:
    return MISSING if value is None else Cell(value, significant(value))


def _summary(settings: Conformance, verdicts: Sequence[Verdict], started: float) -> dict[str, object]:
    properties = {
        verdict.name: {
            "verdict": verdict.verdict,
            "measured": verdict.measured,
            "limit": verdict.limit,
            "what": verdict.what,
        }
        for verdict in verdicts
    }
    return {
        "model": settings.model.name,
        "engine": {"weights": settings.engine.weights, "threads": torch.get_num_threads()},
        "properties": properties,
        **provenance.run_facts(time.perf_counter() - started, provenance.PACKAGES_OF["engine"]),
    }
