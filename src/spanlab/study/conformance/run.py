"""Run the entry `conformance`: one verdict per property, a table, a summary."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from spanlab.engine.load import load_model, read_config
from spanlab.engine.supported import check_support, require_exact
from spanlab.report.tables import MISSING, Cell, Column, Table
from spanlab.report.units import significant
from spanlab.settings.conformance import PROPERTIES, Conformance
from spanlab.study.conformance.subject import Subject
from spanlab.study.conformance.verdicts import FAILED, SUPPORTED, Measurement
from spanlab.study.output import provenance
from spanlab.study.output.results import entry_folder, publish, write_results

FOLDER = "conformance"
Measurements = dict[str, Measurement]
_COLUMNS = (
    Column("property", "property", left=True),
    Column("verdict", "verdict", left=True),
    *(Column("measured", "measured"), Column("limit", "limit")),
    Column("what", "what", keep=1, left=True),
)


def run_conformance(settings: Conformance, run: str, root: Path) -> bool:
    """Check all properties, write a run folder and print the table; return whether no property failed."""
    started = time.perf_counter()
    with entry_folder(settings, FOLDER, run, root) as folder:
        measured = _measure(settings)
        table = verdict_table(settings.model.name, measured)
        write_results(_summary(settings, measured, started), [table], folder.work)
        publish(folder, [table])
    return all(measurement.verdict != FAILED for measurement in measured.values())


def _measure(settings: Conformance) -> Measurements:
    """Measure all properties, by name in order; for a model that fails the support check, only that property."""
    name = settings.engine.name or settings.model.name
    layers = check_support(read_config(settings.engine, name))
    try:
        require_exact(name, layers)
    except ValueError as error:
        return {SUPPORTED: Measurement(None, None, str(error), refused=True)}
    supported = Measurement(0.0, 0.0, f"layers that spans cannot be reused in, of {len(layers)}")
    return {SUPPORTED: supported} | measure(Subject(load_model(settings.engine, settings.model), settings))


def measure(subject: Subject) -> Measurements:
    """Measure each chosen property of a loaded model."""
    return {name: PROPERTIES[name](subject=subject) for name in subject.settings.chosen}


def verdict_table(model: str, measured: Measurements) -> Table:
    """One row per property."""
    rows = [
        (Cell(name, name), Cell(measurement.verdict, measurement.verdict),
         _number(measurement.value), _number(measurement.limit), Cell(measurement.what, measurement.what))
        for name, measurement in measured.items()
    ]  # fmt: skip
    return Table("properties", f"Conformance of {model}", _COLUMNS, tuple(rows))


def _number(value: float | None) -> Cell:
    return MISSING if value is None else Cell(value, significant(value))


def _summary(settings: Conformance, measured: Measurements, started: float) -> dict[str, object]:
    properties = {
        name: {
            "verdict": measurement.verdict,
            "measured": measurement.value,
            "limit": measurement.limit,
            "what": measurement.what,
        }
        for name, measurement in measured.items()
    }
    return {
        "model": settings.model.name,
        "engine": {"weights": settings.engine.weights, "threads": torch.get_num_threads()},
        "properties": properties,
        **provenance.run_facts(time.perf_counter() - started, provenance.PACKAGES_OF["engine"]),
    }
