"""Jobs: the requests of one run with their arrival times, and the settings of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from spanlab import build
from spanlab.core.batch_rules import BatchRules
from spanlab.core.request import Request
from spanlab.engine.settings import BASELINE
from spanlab.metrics import seen_tokens
from spanlab.settings import Strategy, Study
from spanlab.settings.analyses import DESIGNED, TOKENS, needed
from spanlab.study.fidelity.shapes import shapes_of
from spanlab.study.output.arm_files import ArmFiles, Cell
from spanlab.workloads.designed_shapes import Shape


@dataclass(frozen=True)
class Job:
    """One run: `requests` with their arrival times; the first `warmup` of them are not counted.

    `max_tokens`  tokens of the workload's longest prompt
    `group`       group of requests whose visits are recorded one by one
    `steps`       file of the step log, for a backend that measures steps
    `readings`    file of the machine readings before each run; None: not written
    `outputs`     file of the generated tokens; None: not written
    `serving`     file of the gaps between tokens; None: not written
    `trace`       trace file; None: not written
    `title`       name of the run in the trace file
    `teacher`     outputs of another arm's run, for teacher forcing; None: outputs of the requests, or generated ones
    `logits`      file of the logits that scores are relative to; None where nothing is scored
    `reference`   whether this run writes these logits
    `clients`     maximum number of requests in flight; None: no limit
    `seen`        longest seen prefix of each request by id; None where the order of arrival follows from the run
    `touched`     memory of KV and states is touched before the run, as in a store that has been full once
    """

    strategy: Strategy
    requests: Sequence[Request]
    rules: BatchRules
    seed: int
    rate_rps: float | None
    warmup: int
    max_tokens: int
    group: int
    steps: Path
    readings: Path | None = None
    outputs: Path | None = None
    serving: Path | None = None
    trace: Path | None = None
    title: str = ""
    teacher: Path | None = None
    logits: Path | None = None
    reference: bool = False
    clients: int | None = None
    seen: Mapping[int, int] | None = None
    touched: bool = False


class Jobs:
    """Jobs of one study over one workload; arrivals of each cell, and their seen prefixes, are generated once."""

    def __init__(self, study: Study, requests: tuple[Request, ...]) -> None:
        self.study, self.requests = study, requests
        self.arrivals = cache(self._arrivals)
        self._seen = cache(self._find_seen)

    def job(self, arm: str, cell: Cell, files: ArmFiles, rules: BatchRules | None = None) -> Job:
        """Return the job of one cell, with `rules` or the study's batch limits; in a calibration, `cell.seed` is the
        number of the shape."""
        study, designed = self.study, self.study.workload.kind == DESIGNED
        shape = self._shapes[cell.seed] if designed else None
        requests = list(shape.requests) if shape else self.arrivals(cell.first_repeat)
        engine = study.engine
        base = study.baseline
        records, has_teacher = engine.record != "nothing", engine.teacher == BASELINE and arm != base
        return Job(
            strategy=study.arms[arm],
            requests=requests,
            rules=shape.rules if shape else rules or study.batch,
            seed=cell.seed,
            rate_rps=cell.rate_rps,
            warmup=int(study.warmup_fraction * len(requests)),
            max_tokens=max(request.num_tokens for request in (requests if designed else self.requests)),
            group=self.requests[0].group_id,
            steps=files.log(arm, cell),
            readings=files.readings,
            outputs=files.outputs(arm, cell) if records else None,
            serving=files.serving(arm, cell) if needed(study, TOKENS) else None,
            trace=files.trace(arm, cell) if study.output.trace and self._has_trace(cell) else None,
            title=f"{arm}, {cell.name}",
            teacher=files.outputs(base, cell) if has_teacher else None,
            logits=files.logits(base, cell) if engine.record == "scores" else None,
            reference=arm == base and files.arm_logs is None,
            clients=study.arrivals.clients,
            seen=None if shape else self._seen(cell.first_repeat),
            touched=designed,
        )

    def _has_trace(self, cell: Cell) -> bool:
        """Whether the run writes a trace file: the first seed at the study's load."""
        return cell == Cell(self.study.seeds[0], self.study.arrivals.rate_rps)

    @cached_property
    def _shapes(self) -> list[Shape]:
        return shapes_of(self.study)

    def _find_seen(self, cell: Cell) -> dict[int, int] | None:
        requests = self.arrivals(cell)
        depends = self.study.arrivals.clients is not None or any(request.after for request in requests)
        return None if depends else seen_tokens(requests)

    def _arrivals(self, cell: Cell) -> list[Request]:
        return build.build_arrivals(self.study, self.requests, cell.seed, cell.rate_rps)
