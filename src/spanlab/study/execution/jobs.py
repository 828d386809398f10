"""What a run of an arm serves: requests with their arrival times, and under which rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from spanlab import build
from spanlab.core.batch_rules import BatchRules
from spanlab.core.request import Request
from spanlab.engine.settings import BASELINE
from spanlab.settings import Strategy, Study
from spanlab.settings.analyses import DESIGNED, TOKENS, needed
from spanlab.study.fidelity.shapes import shapes_of
from spanlab.study.output.arm_files import ArmFiles, Cell
from spanlab.workloads.designed_shapes import Shape


@dataclass(frozen=True)
class Job:
    """A run: `requests` with their arrival times, the first `warmup` of them not counted.

    `max_tokens`  the longest prompt of the workload
    `group`       the group of requests whose visits are noted one by one
    `steps`       where a backend that measures steps writes them down
    `readings`    where it writes down the state of the machine before the run; None: nowhere
    `outputs`     where it writes down what was generated; None: nowhere
    `serving`     where a run writes down gaps between tokens; None: nowhere
    `trace`       where a run writes down its trace file; None: nowhere
    `title`       names the run there
    `teacher`     outputs of another arm's run, which are generated instead; None: those of the requests, or its own
    `logits`      what scores are relative to; None where nothing is scored
    `reference`   whether this run leaves these logits
    `clients`     most requests in flight; None is no limit
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
    touched: bool = False


class Jobs:
    """The runs of one study over one workload; each cell's arrivals are drawn once."""

    def __init__(self, study: Study, requests: tuple[Request, ...]) -> None:
        self.study, self.requests = study, requests
        self.arrivals = cache(self._arrivals)

    def job(self, arm: str, cell: Cell, files: ArmFiles, rules: BatchRules | None = None) -> Job:
        """One run of an arm, by `rules` or the study's; of a calibration, `cell.seed` is the number of the shape."""
        study, designed = self.study, self.study.workload.kind == DESIGNED
        shape = self._shapes[cell.seed] if designed else None
        requests = list(shape.requests) if shape else self.arrivals(cell.drawn)
        engine = study.engine
        base = study.baseline
        records, taught = engine.record != "nothing", engine.teacher == BASELINE and arm != base
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
            trace=files.trace(arm, cell) if study.output.trace and self._traced(cell) else None,
            title=f"{arm}, {cell.name}",
            teacher=files.outputs(base, cell) if taught else None,
            logits=files.logits(base, cell) if engine.record == "scores" else None,
            reference=arm == base and files.first is None,
            clients=study.arrivals.clients,
            touched=designed,
        )

    def _traced(self, cell: Cell) -> bool:
        """Whether a trace is written of a run: the first seed at the study's own load."""
        return cell == Cell(self.study.seeds[0], self.study.arrivals.rate_rps)

    @cached_property
    def _shapes(self) -> list[Shape]:
        return shapes_of(self.study)

    def _arrivals(self, cell: Cell) -> list[Request]:
        return build.build_arrivals(self.study, self.requests, cell.seed, cell.rate_rps)
