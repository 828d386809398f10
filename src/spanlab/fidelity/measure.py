"""Cells on the engine: saturation first, then every cell, each kept as soon as it is finished."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import orjson

from spanlab.fidelity.cells import Cell, Files
from spanlab.fidelity.replay import Trace
from spanlab.records import Record, RunRow
from spanlab.settings import Study
from spanlab.shortage import CAUGHT, shortage
from spanlab.study.backends import Backend, Job


@dataclass(frozen=True)
class Saturation:
    """What the baseline serves when every request is there from the start."""

    arm: str
    requests: int
    seconds: float
    rate_rps: float


class Bench:
    """The engine of one study, its model loaded, and where its cells are kept."""

    def __init__(self, study: Study, engine: Backend, files: Files) -> None:
        self._study, self._engine, self._files = study, engine, files

    def saturation(self, trace: Trace) -> Saturation:
        """Requests per second of the baseline, all asked at once; what an interrupted run found is kept."""
        path = self._files.folder / "saturation.json"
        if path.exists():
            return Saturation(**orjson.loads(path.read_bytes()))
        arm = self._study.baseline
        row = self._run(arm, _at_once(trace), self._files.folder / "steps" / "saturation.jsonl", lambda record: None)
        found = Saturation(arm, row.requests, row.makespan_s, row.requests / row.makespan_s)
        path.write_bytes(orjson.dumps(asdict(found)) + b"\n")
        return found

    def warm_up(self, trace: Trace) -> None:
        """Let every arm serve a little, uncounted and unlogged."""
        self._engine.warm_up(trace.requests)

    def measure(self, cell: Cell, trace: Trace, progress: Callable[[], None]) -> str | None:
        """Run a cell that is not there yet; a sentence where memory ran out."""
        path = self._files.records(cell)
        if path.exists():
            return None
        lines: list[bytes] = []

        def write(record: Record) -> None:
            lines.append(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
            progress()

        try:
            self._run(cell.arm, trace, self._files.steps(cell), write)
        except CAUGHT as error:
            said = shortage(error)
            if said is None:
                raise
        else:
            _keep(path, lines)
            return None
        self._engine.recover()
        return f"arms.{cell.arm} ran out of memory: {said}"

    def _run(self, arm: str, trace: Trace, steps: Path, write: Callable[[Record], None]) -> RunRow:
        job = Job(
            strategy=self._study.arms[arm],
            requests=trace.requests,
            seed=trace.seed,
            rate_rps=trace.rate_rps,
            warmup=trace.warmup,
            max_tokens=trace.max_tokens,
            group=trace.requests[0].group_id,
            steps=steps,
            readings=self._files.readings,
        )
        return self._engine.run(job, write)


def _at_once(trace: Trace) -> Trace:
    return replace(trace, requests=[replace(request, arrived_at=0) for request in trace.requests], rate_rps=None)


def _keep(path: Path, lines: list[bytes]) -> None:
    """Written beside its place and moved there, so that what is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(lines))
    os.replace(partial, path)
