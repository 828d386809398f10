"""A round at one length: every arm from an empty cache, a cold prefill without captures beside each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from spanlab.bench.bed import Bed
from spanlab.bench.session import Served, Session
from spanlab.checkpoint_bench.held import Held
from spanlab.checkpoint_bench.prompts import Prompts
from spanlab.checkpoint_bench.rows import Cell, Kind, Row
from spanlab.checkpoint_bench.theory import Theory
from spanlab.core.request import Request
from spanlab.core.scheduler import Sequence
from spanlab.settings import Strategy
from spanlab.settings.checkpoint_bench import CheckpointBench
from spanlab.study.warm_up import warm_up

BARE_EVERY = 3  # turns: the baseline, then two arms, so that each arm has it as a neighbour


def cells(settings: CheckpointBench) -> list[Cell]:
    """All cells of a run in their order."""
    return [
        Cell(model, length, number)
        for model in settings.models
        for length in sorted(settings.lengths)
        for number in range(settings.rounds)
    ]


def visits(strategy: Strategy) -> int:
    """How often a depth is asked: a branch puts its state where a first visit left, and only the next starts there."""
    return 2 if "branch" in (strategy.placement.kind, *strategy.placement.also) else 1


def turns(settings: CheckpointBench, cell: Cell) -> list[str]:
    """The arms in this round's order, with the baseline at every third place and at the end."""
    arms = [name for name in settings.chosen() if name != settings.baseline]
    order = np.random.default_rng([settings.seed, cell.length, cell.round]).permutation(len(arms))
    found: list[str] = []
    for place in order:
        if len(found) % BARE_EVERY == 0:
            found.append(settings.baseline)
        found.append(arms[place])
    return [*found, settings.baseline]


def baseline_repeats(rows: Iterable[Row]) -> list[list[float]]:
    """TTFT of the cold prefills without captures, seconds, in a row by round (A/A)."""
    found: dict[Cell, list[Row]] = {}
    for row in rows:
        if row.kind == "bare":
            found.setdefault(row.cell, []).append(row)
    return [[row.ttft_s for row in sorted(own, key=lambda row: row.turn)] for own in found.values()]


def rows_of(settings: CheckpointBench) -> int:
    """Rows of a complete cell."""
    names = turns(settings, Cell("", 0, 0))
    asked = [visits(settings.arms[name]) for name in names if name != settings.baseline]
    return len(names) + len(settings.depths) * sum(asked)


class Length:
    """Everything that is measured at one length of one model; full prefills are made first, and warm the machine."""

    def __init__(self, settings: CheckpointBench, bed: Bed, length: int) -> None:
        self._settings, self._bed = settings, bed
        self.prompts = Prompts(settings.seed, bed.model.vocab_size, length, tuple(settings.shared(length)))
        self._theory = Theory(bed.spec, bed.rates, settings.hardware)
        self._noted: dict[int, Tensor] = {}
        most = max(visits(settings.arms[name]) for name in settings.chosen())
        asked = [self.prompts.cold, *(again for _, _, again in self._again(most))]
        self._full = {request.id: self._first_logits(request) for request in asked}
        warm_up(settings.chosen(), asked, self._serve)

    def round(self, cell: Cell) -> Iterator[Row]:
        """The rows of one round, each as soon as it is there."""
        for turn, arm in enumerate(turns(self._settings, cell)):
            for row in self._session(arm):
                yield Row(*cell, turn=turn, arm=arm, **row)

    def _session(self, arm: str) -> Iterator[dict[str, Any]]:
        settings, strategy = self._settings, self._settings.arms[arm]
        kind: Kind = "cold" if strategy.keep else "bare"
        later = self._again(visits(strategy)) if strategy.keep else []
        told = self.prompts.visits(settings.told)
        asked = [self.prompts.cold, *(again for _, _, again in later)]
        with Session(self._bed, strategy, asked, settings.token_budget, on_logits=self._note, told=told) as session:
            held = Held(session, self._bed.spec)
            yield self._row(kind, 0, 0, asked[0], session, held)
            for shared, visit, request in later:
                yield self._row("again", shared, visit, request, session, held)

    def _serve(self, arm: str, asked: list[Request]) -> None:
        """Requests of a warm-up, one after another."""
        settings = self._settings
        with Session(self._bed, settings.arms[arm], asked, settings.token_budget) as session:
            for request in asked:
                session.ask(request)

    def _again(self, times: int) -> list[tuple[int, int, Request]]:
        """Later prompts, few shared tokens to many, each depth as often as it is visited."""
        places = [(shared, visit) for shared in self.prompts.shared for visit in range(times)]
        return [(*place, self.prompts.again(*place)) for place in places]

    def _first_logits(self, request: Request) -> Tensor:
        settings = self._settings
        strategy = settings.arms[settings.baseline]
        with Session(self._bed, strategy, [request], settings.token_budget, on_logits=self._note) as session:
            session.ask(request)
        return self._noted.pop(request.id).cpu()

    def _note(self, sequence: Sequence, row: Tensor) -> None:
        self._noted[sequence.request.id] = row

    def _row(
        self, kind: Kind, shared: int, visit: int, request: Request, session: Session, held: Held
    ) -> dict[str, Any]:
        served = session.ask(request)
        full = self._full[request.id]
        gap = (self._noted.pop(request.id).cpu() - full).abs().max()
        return {
            "kind": kind,
            "shared": shared,
            "visit": visit,
            **_times(served),
            **self._theory.of(served.plans)._asdict(),
            "load_floor_s": self._theory.copied(int(served.record.reused_tokens > 0)),
            "capture_floor_s": self._theory.copied(served.record.captured_states),
            **held.after(served),
            "logit_gap": float(gap),
            "logit_scale": float(full.abs().max()),
        }


def _times(served: Served) -> dict[str, float | int]:
    """What a request with one token of output found and did, and how long it took."""
    record, steps = served.record, served.steps
    assert all(plan.chunks for plan in served.plans), "a request of one token decodes nothing"
    return {
        "matched_tokens": record.matched_tokens,
        "reused_tokens": record.reused_tokens,
        "computed_tokens": record.computed_tokens,
        "captured_states": record.captured_states,
        "ttft_s": record.first_token_s - record.admitted_s,
        "plan_s": sum(step.phases["plan_s"] for step in steps),
        "load_s": sum(step.phases["copy_s"] for step in steps),
        "prefill_s": sum(step.phases["prefill_s"] for step in steps),
    }
