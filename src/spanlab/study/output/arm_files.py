"""Files of one arm: the records of its cells in order, and one line for each finished cell.

The format is JSON lines, not Parquet: a line is complete as soon as it is written, so a killed run keeps every finished
cell. A line in the runs file has the number of records of its cell and the byte offset of their end. Bytes after the
last end are truncated.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from spanlab.study.numbers.summary import Columns, read_records

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a seed, a load, and the number of the repeat with the same arrivals.

    `rate_rps`  None: the workload has arrival times
    """

    seed: int
    rate_rps: float | None
    repeat: int = 0

    @staticmethod
    def of(row: dict[str, Any]) -> Cell:
        """The cell of a line in the runs file; `repeat` is absent in the first run."""
        return Cell(row["seed"], row["rate_rps"], row.get("repeat", 0))

    @property
    def first_repeat(self) -> Cell:
        """Cell of the first run with the same arrivals."""
        return Cell(self.seed, self.rate_rps)

    @property
    def name(self) -> str:
        """Text of the cell for file names."""
        return f"seed{self.seed}-rate{self.rate_rps}" + (f"-repeat{self.repeat}" if self.repeat else "")


@dataclass(frozen=True, slots=True)
class ArmFiles:
    """Paths of one arm's records and finished runs, and the folder of its step logs.

    `readings`  machine readings of the study; None where its runs record none
    `arm_logs`  folder of the step logs of the study's arms, where these files are of a repeat; None: of an arm
    """

    records: Path
    runs: Path
    steps: Path
    readings: Path | None
    arm_logs: Path | None = None

    @staticmethod
    def of_arm(folder: Path, arm: str, readings: Path | None = None) -> ArmFiles:
        """Files of one of several arms in a folder."""
        records, runs = (folder / kind / f"{arm}.jsonl" for kind in ("records", "runs"))
        return ArmFiles(records, runs, folder / "steps", readings)

    @staticmethod
    def alone(folder: Path, readings: Path, arm_logs: Path | None = None) -> ArmFiles:
        """Files of the only arm in a folder."""
        return ArmFiles(folder / "records.jsonl", folder / "runs.jsonl", folder / "steps", readings, arm_logs)

    def log(self, arm: str, cell: Cell) -> Path:
        """Step log of one run."""
        return self.steps / f"{arm}-{cell.name}.jsonl"

    def outputs(self, arm: str, cell: Cell) -> Path:
        """Generated tokens of one run."""
        return self.log(arm, cell).with_suffix(".npz")

    def logits(self, arm: str, cell: Cell) -> Path:
        """Logits that scores of a run are relative to; where this is a repeat, those of the arm's run."""
        return (self.arm_logs or self.steps) / f"{arm}-{cell.name}.logits.npy"

    def serving(self, arm: str, cell: Cell) -> Path:
        """Token gaps and batch sizes of one run."""
        return self.log(arm, cell).with_suffix(".serving.npz")

    def trace(self, arm: str, cell: Cell) -> Path:
        """Trace file of one run."""
        return self.steps.parent / "traces" / f"{arm}-{cell.name}.json"

    def finished(self) -> Rows:
        """The lines of the finished cells, without a partial line of a killed process."""
        lines = self.runs.read_bytes().split(b"\n")[:-1] if self.runs.exists() else []
        return [orjson.loads(line) for line in lines]

    def columns(self) -> dict[Cell, Columns]:
        """Records of each finished cell."""
        rows = self.finished()
        if not rows:
            return {}
        columns = read_records(io.BytesIO(self.records.read_bytes()[: rows[-1]["records_end"]]))
        ends = np.cumsum([row["requests"] for row in rows]).tolist()
        begins = [0, *ends[:-1]]
        return {
            Cell.of(row): {name: values[begin:end] for name, values in columns.items()}
            for row, begin, end in zip(rows, begins, ends, strict=True)
        }

    def corruption(self) -> str:
        """Describe an inconsistency, with the file's path; empty where the files agree."""
        path = self.runs
        try:
            rows = self.finished()
            end = rows[-1]["records_end"] if rows else 0
            path = self.records
            error_text = _find_inconsistency(rows, read_records(io.BytesIO(path.read_bytes()[:end]))) if rows else ""
        except (ValueError, KeyError, TypeError, OSError) as error:
            error_text = " ".join(str(error).split())
        return error_text and f"{path}: {error_text}"

    def remove(self) -> None:
        """Delete the records and runs of every cell."""
        self.runs.unlink(missing_ok=True)
        self.records.unlink(missing_ok=True)

    def sort_cells(self, order: Sequence[Cell]) -> None:
        """Sort the cells in the files by `order`, cells that are not in it last, as in an uninterrupted run."""
        rows, position = self.finished(), {cell: index for index, cell in enumerate(order)}
        ordered = sorted(rows, key=lambda row: position.get(Cell.of(row), len(position)))
        if ordered != rows:
            self._rewrite(rows, ordered)

    def _rewrite(self, rows: Rows, ordered: Rows) -> None:
        data, begin, parts = self.records.read_bytes(), 0, {}
        for row in rows:
            parts[Cell.of(row)], begin = data[begin : row["records_end"]], row["records_end"]
        ends = np.cumsum([len(parts[Cell.of(row)]) for row in ordered]).tolist()
        lines = [orjson.dumps(row | {"records_end": end}) + b"\n" for row, end in zip(ordered, ends, strict=True)]
        replace_file(self.records, b"".join(parts[Cell.of(row)] for row in ordered))
        replace_file(self.runs, b"".join(lines))


def _find_inconsistency(rows: Rows, columns: Columns) -> str:
    """Describe the first difference between records and lines of finished cells; empty where they agree."""
    counts = [row["requests"] for row in rows]
    if sum(counts) != len(columns["seed"]):
        return f"{len(columns['seed'])} records, expected {sum(counts)}"
    rates = np.array([np.nan if row["rate_rps"] is None else row["rate_rps"] for row in rows], np.float64)
    expected = {"seed": np.array([row["seed"] for row in rows]), "rate_rps": rates}
    for name, values in expected.items():
        if not np.array_equal(np.repeat(values, counts), columns[name], equal_nan=name == "rate_rps"):
            return f"{name} of some records differs from their cell"
    ids = np.split(columns["request_id"], np.cumsum(counts)[:-1])
    return (
        ""
        if all(len(np.unique(request_ids)) == len(request_ids) for request_ids in ids)
        else "a request has two records"
    )


def replace_file(path: Path, data: bytes) -> None:
    """Write a temporary file and rename it, so that a full disk leaves no partial file."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
