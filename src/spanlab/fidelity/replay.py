"""The simulator on the very arrivals that the engine served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from spanlab import build
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.engine.fit_tokens import fit_tokens
from spanlab.fidelity.parity import Parity, parity
from spanlab.settings import DesignSettings, Study
from spanlab.study.step_log import LoggedStep
from spanlab_sim.run import simulate
from spanlab_sim.timing import TimingModel


@dataclass(frozen=True)
class Trace:
    """Requests with their arrival times, ids as the engine's model has them, and what its policies are told.

    `warmup`      requests that are not counted
    `max_tokens`  the longest prompt of the workload
    """

    requests: list[Request]
    seed: int
    rate_rps: float | None
    warmup: int
    max_tokens: int

    @staticmethod
    def of(study: Study, requests: tuple[Request, ...], seed: int, rate_rps: float | None) -> Trace:
        """The arrivals of one seed at one rate, as the study draws them."""
        arrived = build.build_arrivals(study, requests, seed, rate_rps)
        # folded ids can agree where the workload's do not, and both backends must see the same prompts
        fitted = fit_tokens(arrived, study.model.vocab_size)
        warmup = int(study.warmup_fraction * len(arrived))
        return Trace(fitted, seed, rate_rps, warmup, max(request.num_tokens for request in requests))

    def policy(self, study: Study, arm: str) -> TreePolicy:
        """A new policy of an arm, over an empty store."""
        return build.build_policy(study, study.arms[arm], self.warmup, self.max_tokens)


def design_for(study: Study, requests: Sequence[Request]) -> DesignSettings:
    """What to calibrate on: prompts and outputs as long as those of a study's requests."""
    return DesignSettings(
        shapes=study.fidelity.shapes,
        longest=max(request.num_tokens for request in requests),
        outputs=max(request.output_len for request in requests),
    )


def predict(study: Study, arm: str, trace: Trace, timing: TimingModel, path: Path) -> None:
    """Simulate one arm by a timing model and write its records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        simulate(
            trace.requests,
            trace.policy(study, arm),
            build.build_rules(study),
            timing,
            lambda record: file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)),
            seed=trace.seed,
            rate_rps=trace.rate_rps,
            warmup=trace.warmup,
            reads=build.build_span_reads(study.arms[arm]),
        )


def replay(study: Study, arm: str, trace: Trace, log: Sequence[LoggedStep]) -> Parity:
    """Whether the simulator composes the engine's steps when it is told how long they took."""
    return parity(trace.requests, trace.policy(study, arm), build.build_rules(study), log)
