"""The files of one arm: records of its cells one after another, and a line for each cell that is finished.

JSON lines, not Parquet: a line is complete as soon as it is written, so a killed run keeps every finished cell. A line
in the runs file says how many records its cell has and where they end; what follows the last end is cut off.
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
    """One run: one seed at one load, and its number among runs of the same arrivals.

    `rate_rps` None: the workload brings its own times.
    """

    seed: int
    rate_rps: float | None
    repeat: int = 0

    @staticmethod
    def of(row: dict[str, Any]) -> Cell:
        """The cell of a line in the runs file; only lines of repeats name the repeat."""
        return Cell(row["seed"], row["rate_rps"], row.get("repeat", 0))

    @property
    def drawn(self) -> Cell:
        """The first run of the same arrivals."""
        return Cell(self.seed, self.rate_rps)

    @property
    def name(self) -> str:
        """The cell as part of a file name."""
        return f"seed{self.seed}-rate{self.rate_rps}" + (f"-repeat{self.repeat}" if self.repeat else "")


@dataclass(frozen=True, slots=True)
class ArmFiles:
    """Where one arm's records and finished runs go, and the folder of its step logs.

    `readings`  of the study; None where its runs take none
    `first`     folder of the step logs of the study's arms, where these files are of a repeat; None: these are an arm's
    """

    records: Path
    runs: Path
    steps: Path
    readings: Path | None
    first: Path | None = None

    def log(self, arm: str, cell: Cell) -> Path:
        """The step log of one run."""
        return self.steps / f"{arm}-{cell.name}.jsonl"

    def outputs(self, arm: str, cell: Cell) -> Path:
        """What one run has generated."""
        return self.log(arm, cell).with_suffix(".npz")

    def logits(self, arm: str, cell: Cell) -> Path:
        """The logits that scores of a run are relative to; of the arm's first run, where this is a repeat."""
        return (self.first or self.steps) / f"{arm}-{cell.name}.logits.npy"

    def serving(self, arm: str, cell: Cell) -> Path:
        """What the steps of one run tell of its tokens."""
        return self.log(arm, cell).with_suffix(".serving.npz")

    def trace(self, arm: str, cell: Cell) -> Path:
        """The trace file of one run."""
        return self.steps.parent / "traces" / f"{arm}-{cell.name}.json"

    def finished(self) -> Rows:
        """The lines of the finished cells; one that a killed process left unfinished is no line."""
        lines = self.runs.read_bytes().split(b"\n")[:-1] if self.runs.exists() else []
        return [orjson.loads(line) for line in lines]

    def columns(self) -> dict[Cell, Columns]:
        """The records of each finished cell."""
        rows = self.finished()
        if not rows:
            return {}
        every = read_records(io.BytesIO(self.records.read_bytes()[: rows[-1]["records_end"]]))
        ends = np.cumsum([row["requests"] for row in rows]).tolist()
        begins = [0, *ends[:-1]]
        return {
            Cell.of(row): {name: values[begin:end] for name, values in every.items()}
            for row, begin, end in zip(rows, begins, ends, strict=True)
        }

    def corruption(self) -> str:
        """What is wrong with the files, in words that name the file; empty where they agree."""
        read = self.runs
        try:
            rows = self.finished()
            end = rows[-1]["records_end"] if rows else 0
            read = self.records
            found = _disagreement(rows, read_records(io.BytesIO(read.read_bytes()[:end]))) if rows else ""
        except (ValueError, KeyError, TypeError, OSError) as error:
            found = " ".join(str(error).split())
        return found and f"{read}: {found}"

    def remove(self) -> None:
        """Forget every cell."""
        self.runs.unlink(missing_ok=True)
        self.records.unlink(missing_ok=True)

    def arrange(self, order: Sequence[Cell]) -> None:
        """Put cells into this order, others behind them: that of an arm that ran in one go."""
        rows, place = self.finished(), {cell: at for at, cell in enumerate(order)}
        wanted = sorted(rows, key=lambda row: place.get(Cell.of(row), len(place)))
        if wanted != rows:
            self._rewrite(rows, wanted)

    def _rewrite(self, rows: Rows, wanted: Rows) -> None:
        data, begin, parts = self.records.read_bytes(), 0, {}
        for row in rows:
            parts[Cell.of(row)], begin = data[begin : row["records_end"]], row["records_end"]
        ends = np.cumsum([len(parts[Cell.of(row)]) for row in wanted]).tolist()
        lines = [orjson.dumps(row | {"records_end": end}) + b"\n" for row, end in zip(wanted, ends, strict=True)]
        _replace(self.records, b"".join(parts[Cell.of(row)] for row in wanted))
        _replace(self.runs, b"".join(lines))


def _disagreement(rows: Rows, columns: Columns) -> str:
    """How records differ from what the lines of finished cells say of them; empty where they do not."""
    counts = [row["requests"] for row in rows]
    if sum(counts) != len(columns["seed"]):
        return f"{len(columns['seed'])} records, expected {sum(counts)}"
    rates = np.array([np.nan if row["rate_rps"] is None else row["rate_rps"] for row in rows], np.float64)
    told = {"seed": np.array([row["seed"] for row in rows]), "rate_rps": rates}
    for name, values in told.items():
        if not np.array_equal(np.repeat(values, counts), columns[name], equal_nan=name == "rate_rps"):
            return f"{name} of some records is not that of their cell"
    ids = np.split(columns["request_id"], np.cumsum(counts)[:-1])
    return "" if all(len(np.unique(own)) == len(own) for own in ids) else "a request has two records"


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    os.replace(temporary, path)
